"""Watching a run: the norms are those that were clipped, hold-out records are seen as they would have been used, and
neither changes the run nor shows anything."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.mechanism.gaussian import SampledGaussian
from confide.methods.sgd import SGD
from confide.models import networks
from confide.privacy.bayesian import averaged, hoelder, product
from confide.privacy.events import GaussianEvent
from confide.running.artefacts import save_run
from confide.running.fit import fit
from confide.sources.hold_out import HoldOut, Watch, contributions
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from confide.wording import WITHHELD

RECORDS = 120
IDENTITY = StatisticQuery(lambda x, y: x.double(), 3)


def mechanism(**options: Any) -> SampledGaussian:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 1.0, "rate": 0.5, "records": RECORDS}
    return SampledGaussian(**{**settings, **options})


def vectors(norms: Any, size: int = 3) -> Tensor:
    """Rows of the given norms."""
    return torch.as_tensor(norms, dtype=torch.float64)[:, None] * torch.eye(size, dtype=torch.float64)[:1]


def source(norms: Any, **options: Any) -> PrivateData:
    return PrivateData(vectors(norms), np.zeros(len(norms)), schema=Schema(records=RECORDS), **{"seed": 3, **options})


class TestWatch:
    def test_keeps_clipped_norms_of_every_batch(self) -> None:
        watch = Watch()
        data = source([0.25] * 60 + [4.0] * 60, watch=watch)
        for _ in range(5):
            data.answer(IDENTITY, mechanism())
        found = watch.distances()
        assert [step.event for step in found] == [GaussianEvent(1.0, "poisson", 0.5)] * 5
        for step in found:
            assert len(step.values) > 30
            assert set(np.round(step.values, 4)) == {0.25, 1.0}
            assert np.all(step.values[step.values < 1] >= 0.25)  # rounded up

    def test_many_steps_are_packed(self) -> None:
        watch = Watch()
        one = mechanism()
        for step in range(1200):
            watch(one, torch.full((4,), 0.5 + step / 2400))
        found = watch.distances()
        assert len(found) == 1200
        assert found[-1].values == pytest.approx(0.5 + 1199 / 2400, abs=3e-5)
        assert found[-1].values.min() >= 0.5 + 1199 / 2400

    def test_a_step_with_few_records_counts_at_the_bound(self) -> None:
        """An empty Poisson batch shows no distance; leaving the step out would make it free."""
        watch = Watch()
        watch(mechanism(), torch.zeros(0))
        watch(mechanism(), torch.tensor([0.1, 0.1]))
        assert [step.values.tolist() for step in watch.distances()] == [[1.0] * 3] * 2

    def test_styles_of_clipping(self) -> None:
        norms = np.array([0.0, 0.01, 1.0, 100.0])
        flat = contributions(norms, mechanism(clip=2.0))
        assert flat == pytest.approx([0.0, 0.005, 0.5, 1.0], rel=2e-5)
        assert contributions(norms, mechanism(clip=2.0, clipping="per-layer")) == pytest.approx(flat)
        automatic = contributions(norms, mechanism(clip=2.0, clipping="automatic"))
        assert automatic == pytest.approx([0.0, 0.5, 1 / 1.01, 100 / 100.01], rel=2e-5)

    def test_hidden(self) -> None:
        watch = Watch()
        watch(mechanism(), torch.full((3,), 0.123))
        assert "0.123" not in repr(watch)
        with pytest.raises(TypeError, match="private records"):
            pickle.dumps(watch)

    def test_a_run_without_noise_is_refused(self) -> None:
        watch = Watch()
        watch(mechanism(noise_multiplier=0.0, private=False), torch.ones(5))
        with pytest.raises(ValueError, match="private=False"):
            watch.distances()


class TestHoldOut:
    def test_every_record_at_every_step(self) -> None:
        held = HoldOut(source([1.0] * RECORDS), vectors([0.1, 0.3, 7.0]), np.zeros(3), levels=10)
        for _ in range(4):
            held.answer(IDENTITY, mechanism())
        sequences = held.sequences()
        assert sequences.events == (GaussianEvent(1.0, "poisson", 0.5, 4),)
        assert sequences.missed == 0
        # 0.1 and 0.3 lie on levels, and the surcharge for rounding puts them on the next
        levels = [sequences.counts[i].nonzero()[0].tolist() for i in range(3)]
        assert levels == [[2], [4], [10]]
        assert np.all(sequences.counts.sum(1) == 4)

    def test_gradients_are_those_of_the_query_at_that_step(self) -> None:
        """Linear regression: the gradient of a record is (prediction - y) (x, 1), at the weights of the moment."""
        module = nn.Linear(2, 1)
        x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
        y = x.sum(1)
        query = GradientQuery(module, lambda output, y: (output.squeeze(1) - y) ** 2 / 2)
        data = PrivateData(x, y, schema=Schema(records=20), seed=1)
        held = HoldOut(data, x, y, levels=1000)
        one = mechanism(clip=3.0, records=20)
        expected = np.zeros((20, 1001), dtype=int)
        for scale in (0.1, 1.0):
            with torch.no_grad():
                module.weight.fill_(scale)
                module.bias.fill_(scale)
                residual = module(x).squeeze(1) - y
                norms = residual.abs() * (x.square().sum(1) + 1).sqrt()
            held.answer(query, one)
            level = np.ceil(np.minimum(norms.double().numpy() / 3.0 * (1 + 1e-5), 1.0) * 1000).astype(int)
            expected[np.arange(20), level] += 1
        assert np.abs(np.cumsum(held.sequences().counts - expected, axis=1)).max() <= 1  # levels may differ by rounding
        assert np.mean(held.sequences().counts == expected) > 0.99

    def test_looks_at_random_steps_of_each_record(self) -> None:
        """Each record gets its own steps; what was not seen is covered, never taken for zero."""
        size = 400
        held = HoldOut(source([1.0] * RECORDS), vectors([0.05] * size), np.zeros(size), looks=0.1, levels=4, seed=5)
        for _ in range(300):
            held.answer(IDENTITY, mechanism())
        sequences = held.sequences()
        assert sequences.missed == 1e-3
        assert sequences.events == (GaussianEvent(1.0, "poisson", 0.5, 300),)
        at_bound = sequences.counts[:, -1]
        assert np.all(at_bound == int(np.log(1e-3 / 4) / np.log(0.9)))  # none was seen above the first level
        seen = held._HoldOut__seen[mechanism()]  # type: ignore[attr-defined]
        assert seen.sum() == pytest.approx(0.1 * 300 * size, rel=0.05)
        assert len(set(seen.sum(1).tolist())) > 5  # not the same steps for all

    def test_records_that_cannot_answer_have_distance_zero(self) -> None:
        x = torch.ones(4, 3)
        x[0, 0] = torch.nan
        y = np.array([0, 7, 1, 0.5])
        schema = Schema(classes=2, records=RECORDS)
        data = PrivateData(torch.ones(4, 3), np.zeros(4), schema=schema, seed=1)
        held = HoldOut(data, x, y)
        held.answer(
            GradientQuery(nn.Linear(3, 2), lambda output, y: nn.functional.cross_entropy(output, y, reduction="none")),
            mechanism(),
        )
        at_zero = held.sequences().counts[:, 0]
        assert at_zero.tolist() == [1, 1, 0, 1]

    def test_random_layers_of_the_run_are_not_disturbed(self) -> None:
        """Dropout draws from torch's generator; masks for hold-out records must not shift those of the batch."""
        module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        query = GradientQuery(module, lambda output, y: output.squeeze(1) ** 2)
        sums = []
        for watched in (False, True):
            data = source([1.0] * RECORDS)
            module.double()
            held = HoldOut(data, vectors([0.5] * 9), np.zeros(9)) if watched else data
            held.rehearse(query)
            torch.manual_seed(0)
            sums += [held.answer(query, mechanism()).sum.clone()]
        assert torch.equal(*sums)

    def test_blocks_of_different_noise(self) -> None:
        held = HoldOut(source([1.0] * RECORDS), vectors([0.5] * 3), np.zeros(3), levels=2)
        for noise in (1.0, 1.0, 2.0):
            held.answer(IDENTITY, mechanism(noise_multiplier=noise))
        assert held.sequences().events == (
            GaussianEvent(1.0, "poisson", 0.5, 2),
            GaussianEvent(2.0, "poisson", 0.5, 1),
        )

    def test_charges_are_passed_on_and_looking_is_free(self) -> None:
        data = source([1.0] * RECORDS, seed=None)
        held = HoldOut(data, vectors([0.5] * 3), np.zeros(3))
        held.charge([(mechanism(), 2)])
        held.answer(IDENTITY, mechanism())
        assert [entry.event for entry in data.ledger.entries()] == [GaussianEvent(1.0, "poisson", 0.5, 2)]

    def test_hidden(self) -> None:
        held = HoldOut(source([1.0] * RECORDS), vectors([0.5] * 3), np.zeros(3))
        assert "hidden" in repr(held)
        with pytest.raises(TypeError, match="private records"):
            pickle.dumps(held)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"looks": 0.0}, "looks=0.0"), ({"missed": 0.0}, "missed=0.0"), ({"levels": 0}, "levels=0")],
    )
    def test_refusals(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HoldOut(source([1.0] * RECORDS), vectors([0.5] * 3), np.zeros(3), **options)

    def test_shapes_are_checked_and_an_unused_one_has_nothing_to_say(self) -> None:
        with pytest.raises(ValueError, match="one entry of y per record"):
            HoldOut(source([1.0] * RECORDS), vectors([0.5] * 3), np.zeros(2))
        with pytest.raises(ValueError, match="at least 2 hold-out records"):
            HoldOut(source([1.0] * RECORDS), vectors([0.5]), np.zeros(1))
        with pytest.raises(ValueError, match="no step has been answered"):
            HoldOut(source([1.0] * RECORDS), vectors([0.5] * 3), np.zeros(3)).sequences()


class TestWholeRun:
    """A fit with both: the run is untouched, and every rule answers beside the DP number."""

    def records(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 4, generator=generator)
        return x, (x[:, 0] + 0.1 * x[:, 1] > 0).long()

    def fitted(self, with_hold_out: bool, watch: Watch | None = None) -> tuple[Any, HoldOut | None]:
        x, y = self.records(0, RECORDS)
        data = PrivateData(x, y, schema=Schema(classes=2, records=RECORDS), seed=7, watch=watch)
        held = HoldOut(data, *self.records(1, 3000), levels=16) if with_hold_out else None
        plan = confide.plan(records=RECORDS, batch=40, steps=30, noise_multiplier=1.5, delta=1e-5, clip=1.0)
        module = networks.mlp(4, 2, hidden=(6,), generator=torch.Generator().manual_seed(2))
        return fit(SGD(), module, held or data, plan, seed=1), held

    def test_looking_does_not_change_the_run(self) -> None:
        plain, _ = self.fitted(False)
        watched, _ = self.fitted(True, Watch())
        assert torch.equal(plain.posterior.draws, watched.posterior.draws)

    @pytest.mark.parametrize("name", methods.names())
    def test_any_method_can_carry_it(self, name: str) -> None:
        """Also those that draw weights or masks: what is drawn for hold-out records is not missing in the run."""
        method = methods.get(name)()
        if "classification" not in getattr(method, "tasks", ("classification",)):
            return  # no network to watch
        x, y = self.records(0, RECORDS)
        plan = confide.plan(records=RECORDS, batch=40, steps=12, noise_multiplier=1.5, delta=1e-5, clip=1.0)
        module = networks.mlp(4, 2, hidden=(6,), generator=torch.Generator().manual_seed(2))
        runs = []
        for watched in (False, True):
            watch = Watch() if watched else None
            data = PrivateData(x, y, schema=Schema(classes=2, records=RECORDS), seed=7, watch=watch)
            held = HoldOut(data, *self.records(1, 50)) if watched else data
            runs.append(fit(method, module, held, plan, seed=1))
        plain, seen = ([value for value in vars(run.posterior).values() if isinstance(value, Tensor)] for run in runs)
        assert plain
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))

    def test_every_rule_answers(self) -> None:
        watch = Watch()
        run, held = self.fitted(True, watch)
        assert held is not None
        by_average = averaged(held.sequences(), 1e-5).release(acknowledge="a test")
        steps = watch.distances()
        by_product = product(steps, 1e-5).release(acknowledge="a test")
        by_hoelder = hoelder(steps, 1e-5).release(acknowledge="a test")
        for found in (by_average, by_product, by_hoelder):
            assert found.dp.epsilon == pytest.approx(run.privacy.epsilon(), rel=1e-6)
        assert by_average.bayesian.epsilon is not None
        assert by_average.bayesian.epsilon <= run.privacy.epsilon()
        for found in (by_product, by_hoelder):
            assert found.bayesian.epsilon is not None
            assert 0 < found.bayesian.epsilon < 20


class TestAsAUserWouldWriteIt:
    """Everything from one module, in a ledger of several blocks, into a directory that must not know the number."""

    def test_blocks_are_charged_together_or_not_at_all(self) -> None:
        """Catches a hold-out that charges part by part: a budget for the first block alone would then be spent."""
        data = source([1.0] * RECORDS, seed=None)
        data.ledger.limit(epsilon=4.0, delta=1e-5)
        held = HoldOut(data, vectors([0.5] * 3), np.zeros(3))
        parts = [(mechanism(noise_multiplier=4.0), 1), (mechanism(noise_multiplier=0.1), 5)]
        with pytest.raises(confide.BudgetExceeded):
            held.charge(parts)
        assert not data.ledger.entries()
        held.charge(parts[:1])
        assert len(data.ledger.entries()) == 1

    def test_released_artefacts_do_not_know_the_estimate(self, tmp_path: Any) -> None:
        run, held = TestWholeRun().fitted(True, Watch())
        assert held is not None
        found = averaged(held.sequences(), 1e-5).release(acknowledge="a test").bayesian.epsilon
        assert found is not None
        assert found < 0.99 * run.privacy.epsilon()
        run.save(str(tmp_path / "run"))
        text = "".join((tmp_path / "run" / name).read_text() for name in ("run.json", "report.html"))
        assert "data-dependent" not in text
        assert f"{found:.4f}" not in text

    def test_they_do_when_the_user_says_so(self, tmp_path: Any) -> None:
        """A released estimate goes in with both numbers, kinds and the reason; a hidden one shows nothing there."""
        run, held = TestWholeRun().fitted(True, Watch())
        assert held is not None
        hidden = averaged(held.sequences(), 1e-5)
        save_run(run, tmp_path / "hidden", config={"bayesian": hidden})
        said = json.loads((tmp_path / "hidden" / "run.json").read_text())["config"]["bayesian"]
        assert said == WITHHELD
        shown = hidden.release(acknowledge="made-up records")
        save_run(run, tmp_path / "run", config={"bayesian": shown.to_dict()})
        kept = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["bayesian"]
        assert kept["epsilon"]["bayesian"] == shown.bayesian.epsilon
        assert kept["epsilon"]["pld"] == pytest.approx(run.privacy.epsilon(), rel=1e-6)
        assert kept["kind"] == {"pld": "upper bound", "bayesian": "data-dependent"}
        assert kept["disclosure"].endswith("made-up records")
