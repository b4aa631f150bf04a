"""The paper on private Bayesian networks: a quick run on embedded digits, and the arithmetic behind its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from confide import papers
from confide.mechanism.plan import plan
from confide.methods.sgd import SGD
from confide.methods.sgld import SGLD
from confide.models.networks import softmax
from confide.papers import base
from confide.papers.base import Context, Finished, PaperMeasure
from confide.papers.dp_bnn import fits, printed, regression, trials
from confide.papers.mnist_cnn import FEATURE_SIZE, encoded
from confide.papers.parts import Parts
from confide.running.fit import fit, make_problem
from confide.sources.private_data import PrivateData

CONTEXT = Context(quick=True, seeds=(0,), noise_seed=1)
FIGURES = {
    "regression_bands",
    "predictions_hard",
    "predictions_easy",
    "predictions_inputs",
    "reliability_private",
    "reliability_not_private",
    "reliability_sgld",
    "confidence_private",
    "accuracy_epsilon",
    "effects",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    out = tmp_path_factory.mktemp("paper")
    found = {item.experiment.name: item for item in base.run(papers.get("dp-bnn"), CONTEXT, out)}
    assert {path.stem for path in Path(out).glob("*.png")} == FIGURES
    return found


def _rows(item: Finished, table: int = 0) -> dict[str, dict[str, object]]:
    made = item.outcome.tables[table]
    return {str(row[0]): dict(zip(made.columns, row, strict=True)) for row in made.rows}


@dataclass(frozen=True)
class Trial:
    """A fit that was not made: the better, the smaller its rate and its clip or scale."""

    y: torch.Tensor
    doubt: float

    @property
    def predicted(self) -> torch.Tensor:
        return (1 - self.doubt) * torch.nn.functional.one_hot(self.y.long(), 10).double() + self.doubt / 10


def test_one_experiment_keeps_its_epsilon_and_names_its_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows run with what trials took, which see training images alone, as many for every method; none is fitted again
    by a run that goes on after a stop."""
    context = replace(CONTEXT, parts=Parts(tmp_path, "these"))
    whole, tried = fits.load(CONTEXT).found, []

    def made(row: fits.TableRow, images: fits.Images, context: Context, seed: int) -> Trial:
        found = images.found
        assert torch.equal(torch.cat([found.x, found.x_test]), whole.x)
        tried.append(row)
        return Trial(found.y_test, (row.rate or 1) * (row.clip or row.scale or 1) / 100)

    monkeypatch.setattr(trials, "train", made)
    (item,) = base.run(papers.get("dp-bnn"), context, None, ("mnist-cnn",))
    monkeypatch.setattr(fits, "train", None)
    (again,) = base.run(papers.get("dp-bnn"), context, None, ("mnist-cnn",))
    assert again.outcome == item.outcome
    assert len(tried) == 2 * len({(row.method, row.network) for row in tried}) == 4
    taken = {(row[0], row[1]): row[3] for row in item.outcome.tables[2].rows}
    assert taken["SGLD", "CNN"] == "rate 2, scale 0.1"
    for name, row in _rows(item).items():
        epsilon = row["sound epsilon"]
        assert isinstance(epsilon, float)
        assert math.isinf(epsilon) if "not private" in name else 0.99 < epsilon <= 1, name
    assert all(any(note.startswith("Stand-in") for note in table.notes) for table in item.outcome.tables)


@pytest.mark.slow
def test_the_time_of_an_epoch_and_the_family_of_figure_4(finished: dict[str, Finished]) -> None:
    """A falling clip costs what a fixed one does, since its noise falls with it."""
    seconds = _rows(finished["seconds"])
    assert set(seconds) == {"SGLD", "BBP", "MC dropout", "SGD"}
    assert seconds["SGLD"]["ours, over SGLD"] == 1.0
    assert seconds["BBP"]["paper, over SGLD"] == 48.0
    family = _rows(finished["family"])
    assert [name for name in family if "falling" in name] == ["SGD, clip falling over 3, 1.5, 0.75"]
    rows = {name: row for _, name, row in printed._family(Context(data=Path("x")))}
    images = fits.load(CONTEXT)
    fixed, falling = (
        fits.train(replace(row, epochs=1.0), images, CONTEXT, 0) for row in (rows["1.5"], rows["3, 1.5, 0.75"])
    )
    assert falling.epsilon == pytest.approx(fixed.epsilon)


@pytest.mark.slow
def test_private_rows_keep_their_epsilon_and_learn(finished: dict[str, Finished]) -> None:
    """Catches noise calibrated to another plan than the one that runs, and a method that does not descend."""
    rows = _rows(finished["mnist-mlp"]) | _rows(finished["mnist-cnn"])
    for name, row in rows.items():
        accuracy, epsilon = row["ours"], row["sound epsilon"]
        assert isinstance(accuracy, PaperMeasure)
        assert isinstance(epsilon, float)
        assert accuracy.mean > 0.35, name
        assert math.isinf(epsilon) if "not private" in name else 0.99 < epsilon <= 1, name
    ours = rows["SGLD, CNN on fixed public edges, Gaussian"]["ours"]
    assert isinstance(ours, PaperMeasure)
    assert ours.mean > 0.7
    assert rows["SGLD, MLP, Gaussian"]["paper"] == 0.90


@pytest.mark.slow
def test_the_stand_in_is_named(finished: dict[str, Finished]) -> None:
    tables = [
        table for name in ("mnist-mlp", "mnist-cnn", "epsilon", "effects") for table in finished[name].outcome.tables
    ]
    assert all(any(note.startswith("Stand-in") for note in table.notes) for table in tables)


@pytest.mark.slow
def test_calibration_stands_beside_the_paper(finished: dict[str, Finished]) -> None:
    row = _rows(finished["mnist-mlp"], 1)["BBP, MLP, Gaussian"]
    assert (row["ECE paper"], row["MCE paper"]) == (0.204, 0.641)


@pytest.mark.slow
def test_batches_cost_sgd_and_spare_sgld(finished: dict[str, Finished]) -> None:
    """Catches the paper's first theorem as printed, whose noise would grow with the rate."""
    rows = _rows(finished["effects"])
    cost = {name: row["sound epsilon"] for name, row in rows.items()}
    assert cost["SGD, batch size 128"] > cost["SGD, batch size 64"]  # type: ignore[operator]
    assert cost["SGLD, batch size 128"] < cost["SGLD, batch size 64"]  # type: ignore[operator]
    assert cost["SGLD, learning rate 1"] > cost["SGLD, learning rate 0.25"]  # type: ignore[operator]
    assert cost["SGD, learning rate 1"] == cost["SGD, learning rate 0.25"]


@pytest.mark.slow
def test_regression_has_the_exact_epsilon(finished: dict[str, Finished]) -> None:
    rows = _rows(finished["regression"])
    assert rows["SGLD, private"]["sound epsilon"] == pytest.approx(4.1944, abs=1e-3)
    best = rows["exact posterior of the process"]["ours"]
    assert isinstance(best, float)
    for name, row in rows.items():
        ours = row["ours"]
        assert isinstance(ours, float)
        assert 0.8 * best <= ours < 1.0, name


def test_privacy_noise_alone_is_the_langevin_noise() -> None:
    """The clip's rule: at temperature 1 nothing is left to add. A clip one tenth larger would run hotter."""
    row = fits.TableRow("SGLD")
    setting = fits.SETTINGS["SGLD", "MLP"]
    calibrated = fits.plan_for(row, setting, 60_000)
    method = fits.method_for(row, setting, calibrated)
    assert isinstance(method, SGLD)
    schema = fits.load(CONTEXT).found.schema
    problem = make_problem(method, softmax(4, 10), schema, calibrated, seed=0)
    assert method.temperature(problem) == pytest.approx(1, abs=1e-6)
    brought = setting.rate * calibrated.mechanism.noise_std / calibrated.expected_batch
    assert brought**2 == pytest.approx(2 * setting.rate / 60_000, rel=1e-6)
    wide = fits.plan_for(fits.TableRow("SGLD", clip=1.1 * calibrated.mechanism.clip), setting, 60_000)
    problem = make_problem(method, softmax(4, 10), schema, wide, seed=0)
    assert method.temperature(problem) == pytest.approx(1.21, rel=1e-3)


def test_the_rule_solved_for_the_noise_agrees_with_it_solved_for_the_clip() -> None:
    calibrated = fits.plan_for(fits.TableRow("SGLD"), fits.SETTINGS["SGLD", "MLP"], 60_000)
    mechanism = calibrated.mechanism
    z = fits.langevin_noise_multiplier(fits.SETTINGS["SGLD", "MLP"].rate, 2048, mechanism.clip, 60_000)
    assert z == pytest.approx(mechanism.noise_multiplier, rel=1e-9)


def test_images_are_encoded_one_by_one() -> None:
    """Catches statistics over records, which would not be post-processing."""
    images = fits.load(CONTEXT)
    alone = fits._edges(images.found.x[3:4], images.side)
    together = images.inputs(fits.EDGES)[0][3:4] / 16
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(encoded(images.found.x[3:4]), images.inputs("CNN")[0][3:4], rtol=1e-4, atol=1e-6)
    assert images.inputs("MLP")[0].norm(dim=1) == pytest.approx(8.0, abs=1e-3)


def test_every_layer_of_the_cnn_is_learnt() -> None:
    """Catches a filter that is fixed or starts from the same place for every seed; only sizes are constants."""
    one, other = (fits.network("CNN", 28, 10, seed) for seed in (0, 1))
    learnt = {name: value for name, value in one.named_parameters() if value.requires_grad}
    assert sum(value.numel() for value in learnt.values()) == 9_418
    for name, layer in one.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert {f"{name}.weight", f"{name}.bias"} <= set(learnt)
            assert not torch.equal(layer.weight, other.get_submodule(name).weight)  # type: ignore[arg-type]
    fixed = [value for value in one.parameters() if not value.requires_grad]
    assert all(value.unique().numel() == 1 for value in fixed)
    assert sum(isinstance(layer, nn.Dropout) for layer in fits.network("CNN", 28, 10, 0, dropout=True).modules()) == 1


def test_features_of_an_image_depend_on_no_other() -> None:
    """Catches statistics over a batch, and features whose size is not the one that is stated."""
    network = fits.network("CNN", 8, 10, seed=0)
    x = fits.load(CONTEXT).inputs("CNN")[0][:5]
    torch.testing.assert_close(network(x)[2:3], network(x[2:3]), rtol=1e-4, atol=1e-5)
    features = network[:-1](x)  # type: ignore[index]
    torch.testing.assert_close(features.square().mean(1).sqrt(), torch.full((5,), FEATURE_SIZE), rtol=1e-3, atol=0)


def test_filters_answer_to_their_direction() -> None:
    """An edge that brightens to the right is seen by the filter of angle 0 and not by its opposite."""
    patch = torch.zeros(7, 7)
    patch[:, 4:] = 1
    answers = (fits._filters(28)[:, 0] * patch).sum((1, 2))
    assert answers.argmax() == 0
    assert answers.argmin() == 4
    torch.testing.assert_close(answers[2], torch.tensor(0.0), rtol=0, atol=1e-6)


def test_simulated_noise_grows_as_the_paper_says() -> None:
    """Residuals about the exact mean have variance (0.3 x + 0.6)^2 / 1.63 and more; never less on average."""
    every = [regression.simulate(seed) for seed in range(20)]
    floor = ((0.3 * torch.cat([p.x_test for p in every]) + 0.6) ** 2).mean().item() / regression.TARGET_VARIANCE
    exact = sum(points.exact for points in every) / len(every)
    assert 0.9 * floor < exact < 1.25 * floor


def test_sgd_averages_the_last_steps() -> None:
    """Catches an average over all steps, or one that starts from zero."""
    images = fits.load(CONTEXT)
    found = images.found

    def estimate(averaging: float, steps: int = 10) -> torch.Tensor:
        short = plan(delta=1e-5, records=found.records, batch=100, steps=steps, noise_multiplier=1.0)
        data = PrivateData(found.x, found.y, schema=found.schema, seed=7)
        return fit(SGD(learning_rate=0.5, averaging=averaging), softmax(64, 10), data, short, seed=0).posterior.mean()

    positions = [estimate(0.0, steps) for steps in range(8, 11)]
    torch.testing.assert_close(estimate(0.3), torch.stack(positions).mean(0), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"averaging=1\.5"):
        SGD(averaging=1.5)
