"""The Bayesian GAN: what a record pays, what is charged, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from confide.papers.base import Context, PaperMeasure
from confide.papers.dp_sgmcmc import gan, gan_networks, gan_table
from confide.papers.dp_sgmcmc.gan import CLASSES, UNLABELLED, Digits, DigitsReader, DiscriminatorLoss, GanSetting
from confide.papers.drawing import save_figure
from confide.sources.queries import GradientQuery

SMALL = GanSetting(chains=2, hidden=24, latent=4, steps=60, batch=80, matched_every=5)


def blobs(records: int = 600) -> Digits:
    """Ten clusters in the plane, two labelled records of each."""
    made = torch.Generator().manual_seed(0)
    angle = torch.arange(CLASSES) * (2 * math.pi / CLASSES)
    centres = torch.stack([angle.cos(), angle.sin()], 1)
    y = torch.arange(records + 300) % CLASSES
    x = centres[y] + 0.06 * torch.randn(len(y), 2, generator=made)
    rows = gan.labelled_rows(y[:records], 2, 1)
    return Digits(x[:records], y[:records], rows, x[records:], y[records:], True)


def test_a_record_pays_for_its_class_and_for_being_real_at_once() -> None:
    outputs = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([3, UNLABELLED, 0, UNLABELLED])
    with_fake = torch.cat([outputs, torch.zeros(4, 1)], 1).log_softmax(1)
    real = -with_fake[:, :CLASSES].logsumexp(1)
    own = F.cross_entropy(outputs, y.clamp(max=CLASSES - 1), reduction="none")
    assert torch.allclose(DiscriminatorLoss()(outputs, y), real + torch.where(y < CLASSES, own, 0.0), atol=1e-5)
    assert torch.allclose(gan.fake_loss(outputs), -with_fake[:, CLASSES], atol=1e-5)


def test_an_unlabelled_record_alone_pays_for_not_being_sure_of_a_class() -> None:
    outputs = torch.stack([torch.zeros(CLASSES), torch.zeros(CLASSES), 50.0 * torch.eye(CLASSES)[2]])
    y = torch.tensor([4, UNLABELLED, UNLABELLED])
    more = DiscriminatorLoss(2.0)(outputs, y) - DiscriminatorLoss()(outputs, y)
    assert torch.allclose(more, torch.tensor([0.0, 2 * math.log(CLASSES), 0.0]), atol=1e-5)


def reader(labels_public: bool = False, epsilon: float | None = 1.0, setting: GanSetting = SMALL) -> DigitsReader:
    return DigitsReader(blobs(), setting, epsilon, labels_public, 1)


class TestPrice:
    def test_every_chain_pays_for_gradients_and_features(self) -> None:
        asked = reader()
        counts = [event.count for event in asked.receipt.events]  # type: ignore[union-attr]
        assert sum(counts) == SMALL.chains * (SMALL.steps + SMALL.steps // SMALL.matched_every)
        assert asked.epsilon <= 1.0

    def test_labelled_records_answer_at_every_step_and_are_charged_at_rate_one(self) -> None:
        asked = reader()
        assert asked.few_receipt is not None
        (event,) = asked.few_receipt.events
        assert event.sampling == "full-batch"  # type: ignore[union-attr]
        assert event.count == SMALL.chains * SMALL.steps
        assert reader(labels_public=True).few_receipt is None

    def test_more_answers_than_were_paid_for_are_refused(self) -> None:
        asked = reader(setting=replace(SMALL, steps=1, chains=1))
        network = gan_networks.dense_network(2, SMALL.hidden, CLASSES)
        asked.gradient(network)
        asked.mean_features(network)
        before = asked.receipt.left
        assert before == 0

    def test_one_record_moves_a_release_by_no_more_than_the_clip(self) -> None:
        """Without noise, the sum with and without a labelled record that is far from all others."""
        data = blobs()
        hostile = data.x.clone()
        hostile[data.labelled[0]] = 1e6
        network = gan_networks.dense_network(2, SMALL.hidden, CLASSES)
        found = []
        for x in (data.x, hostile):
            made = DigitsReader(replace(data, x=x), SMALL, 1.0, False, 1)
            made.whole = replace(made.whole, noise_multiplier=1e-9)
            paid = made.few.charge([(made.whole, 1)], "a test")
            query = GradientQuery(network, DiscriminatorLoss(1.0))
            found.append(made.few.answer(query, made.whole, paid).sum)
        assert float((found[0] - found[1]).norm()) <= 2 * SMALL.clip * (1 + 1e-4)


class TestLearns:
    @pytest.mark.slow
    def test_without_privacy_the_unlabelled_records_help(self) -> None:
        """Embedded digits of 8 x 8, two labelled ones of every class; without steps by weight it stays below."""
        x, y = load_digits(return_X_y=True)
        images, labels = torch.as_tensor(x / 8 - 1, dtype=torch.float32), torch.as_tensor(y)
        rows = gan.labelled_rows(labels[:1397], 2, 0)
        data = Digits(images[:1397], labels[:1397], rows, images[1397:], labels[1397:], True)
        setting = GanSetting(chains=1, hidden=100, steps=1500, batch=64)
        run = gan.fitted(data, setting, None, seed=0)
        alone = gan.supervised_only(data, setting, 0)
        assert run.accuracy(data.y_test) > alone + 0.03
        assert math.isinf(run.epsilon)
        assert run.samples.shape == (20, 64)
        spread = run.samples.std(0).mean() / data.x.std(0).mean()
        assert 0.3 < float(spread) < 3, "fakes differ from one another as records do"

    def test_private_labels_of_few_records_cannot_be_learnt(self) -> None:
        run = gan.fitted(blobs(), replace(SMALL, steps=30), 0.2, seed=2, noise_seed=1)
        assert run.accuracy(blobs().y_test) < 0.6
        assert run.epsilon <= 0.2


def test_the_quick_form_has_its_readings_and_its_pictures(tmp_path: Any) -> None:
    found = gan_table.run(Context(quick=True, seeds=(0,), noise_seed=1))
    (table,) = found.tables
    rows = {(row[1], row[2]): row for row in table.rows}
    assert set(rows) == {("labelled records alone, public", math.inf), ("not private", math.inf), *PRIVATE}
    assert rows["all private", 0.2][3] == 0.983
    for (_, epsilon), row in rows.items():
        assert isinstance(row[4], PaperMeasure)
        assert isinstance(row[5], float)
        if math.isfinite(epsilon):  # type: ignore[arg-type]
            assert row[5] <= epsilon  # type: ignore[operator]
    assert "40 steps" in table.notes[0]
    save_figure(found.figures[0], tmp_path)
    assert (tmp_path / "gan_samples.png").stat().st_size > 1000


PRIVATE = [("labels public", 3.0), ("all private", 0.2)]


def test_every_row_of_the_full_run_is_in_one_part() -> None:
    rows = [job for part in get_args(gan_table.GanPart) for job in gan_table.jobs(Context(), part)]
    assert len(set(rows)) == len(rows)
    assert {(job.reading, job.epsilon) for job in rows if job.inputs == gan_table.PARTS} == {
        (gan_table.FLOOR, None),
        (gan_table.NOBODY, None),
        *((reading, e) for reading in ("labels public", "all private") for e in (0.2, 1.0, 3.0)),
    }
    beside = gan_table.jobs(Context(), "private")
    assert beside[0].reading == gan_table.FLOOR
    assert len({gan_table._setting(job, Context()) for job in beside}) == 1, "a floor with other steps is no floor"


class TestChain:
    """The step that is scaled weight by weight."""

    def chain(self) -> gan.SghmcChain:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return gan.SghmcChain.of(gan_networks.dense_network(2, 8, 3))

    def test_weights_move_alike_whatever_the_size_of_their_gradients(self) -> None:
        """Catches one step for all: gradients that differ a thousandfold from layer to layer."""
        chain = self.chain()
        sizes = [parameter.numel() for parameter in chain.network.parameters()]
        gradient = torch.cat([torch.full((size,), 10.0**-place) for place, size in enumerate(sizes)])
        before = torch.nn.utils.parameters_to_vector(chain.network.parameters()).detach()
        chain.tell(gradient, 0.0, 1e-3, SMALL, 10**12)
        moved = torch.nn.utils.parameters_to_vector(chain.network.parameters()).detach() - before
        assert float(moved.std() / moved.mean().abs()) < 0.05

    def test_units_that_are_off_do_not_run_away(self) -> None:
        chain = self.chain()
        gradient = torch.ones(len(chain.velocity))
        gradient[:8] = 0.0
        for _ in range(200):
            chain.tell(gradient, 0.0, 1e-3, SMALL, 1000)
        weights = torch.nn.utils.parameters_to_vector(chain.network.parameters()).detach()
        assert float(weights[:8].abs().max()) < 5

    def test_noise_of_the_release_is_credited(self) -> None:
        """Where the release brings more than the chain needs, nothing is added: two tellings are the same."""
        found = []
        for seed in (1, 2):
            chain = self.chain()
            torch.manual_seed(seed)
            chain.tell(torch.ones(len(chain.velocity)), 1e3, 1e-3, SMALL, 1000)
            found.append(chain.velocity)
        assert torch.equal(*found)


class TestViews:
    """Small maps of whole pictures, drawn for a step."""

    def pictures(self) -> Tensor:
        return torch.rand(5, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1

    def test_pictures_are_as_they_are_until_a_view_is_drawn(self) -> None:
        view, x = gan_networks.View(64), self.pictures()
        assert torch.allclose(view(x).flatten(1), x, atol=1e-5)
        view.renew()
        assert not torch.allclose(view(x).flatten(1), x, atol=0.1)

    def test_a_record_is_seen_alike_whoever_stands_beside_it(self) -> None:
        """Catches a view for every place of a batch, which would make a record's gradient depend on its place."""
        view, x = gan_networks.View(64), self.pictures()
        view.renew()
        assert torch.equal(view(x)[3], view(x[3:4])[0])
        assert torch.equal(view(x.flip(0)).flip(0), view(x))

    def test_what_lies_outside_is_blank(self) -> None:
        view = gan_networks.View(64)
        view.renew()
        blank = torch.full((1, 64), gan_networks.BLANK)
        assert torch.allclose(view(blank), blank.reshape(1, 1, 8, 8))

    def test_networks_with_views_are_private_within_their_budget(self) -> None:
        x = self.pictures().repeat(40, 1)
        y = torch.arange(200) % CLASSES
        data = Digits(x, y, gan.labelled_rows(y, 2, 1), x, y, True)
        run = gan.fitted(data, replace(SMALL, steps=4, batch=40, filters=(3, 4), sure=1.0), 1.0, seed=2, noise_seed=1)
        assert 0 < run.epsilon <= 1.0
        assert torch.isfinite(run.chances).all()


def test_labelled_rows_are_as_many_of_every_class() -> None:
    y: Tensor = torch.arange(100) % CLASSES
    assert torch.bincount(y[gan.labelled_rows(y, 3, 0)], minlength=CLASSES).tolist() == [3] * CLASSES


@pytest.mark.parametrize("records", [0])
def test_no_label_is_refused(records: int) -> None:
    data = replace(blobs(), labelled=torch.empty(records, dtype=torch.int64))
    with pytest.raises(ValueError, match="labelled: none"):
        gan.fitted(data, SMALL, None)
