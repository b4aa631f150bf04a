"""The paper on variational dropout: quick runs on embedded digits, and the arithmetic of its composition rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confide import papers
from confide.methods.variational_dropout import SPARSE, log_alpha
from confide.models.likelihoods import Categorical
from confide.models.networks import softmax
from confide.papers import base
from confide.papers.base import Context, Finished, PaperMeasure
from confide.papers.dp_variational_dropout import printed, trials
from confide.papers.dp_variational_dropout.fits import INK, DropoutSetting, dropped, pixels, pruned
from confide.papers.dp_variational_dropout.rules import RULES, RUNS, advanced_noise
from confide.papers.protocol import ASSUMED_PUBLIC
from confide.papers.sets import Set
from confide.posteriors.variational import DiagonalGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import GaussianEvent

CONTEXT = Context(quick=True, seeds=(0,), noise_seed=1)


class Runs(dict[str, Finished]):
    """Every experiment that a test asks for, run once."""

    def __missing__(self, name: str) -> Finished:
        (self[name],) = base.run(papers.get("dp-variational-dropout"), CONTEXT, only=[name])
        return self[name]


@pytest.fixture(scope="module")
def finished() -> Runs:
    return Runs()


@pytest.mark.slow
def test_the_whole_paper_leaves_its_figures(tmp_path: Path) -> None:
    list(base.run(papers.get("dp-variational-dropout"), CONTEXT, tmp_path))
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "accuracy-mnist-cnn",
        "accuracy-mnist",
        "accuracy-mnist-wide",
        "accuracy-digits",
        "noise-per-rule",
        "log-alpha",
        "curves-digits",
        "effects",
    }


@pytest.mark.parametrize("name", [pytest.param("mnist-cnn", marks=pytest.mark.slow), "mnist", "digits"])
def test_every_method_learns_within_its_epsilon(finished: Runs, name: str) -> None:
    """Catches noise calibrated to another number of steps, and a method that does not descend."""
    table, tried = finished[name].outcome.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert {row["method"] for row in rows} == {"variational dropout", "SVI without dropout", "DP-SGD"}
    for row in rows:
        target = float(str(row["target"]).split()[1])
        accuracy, spent = row["ours"], row["sound epsilon"]
        assert isinstance(accuracy, PaperMeasure)
        assert isinstance(spent, float)
        assert accuracy.mean > (0.8 if target == 10 else 0.4), row
        assert 0.99 * target < spent <= target
    asked = [(row["method"], str(row["target"]).removeprefix("epsilon ")) for row in rows]
    assert [row[:2] for row in tried.rows] == asked, "every row's settings come from trials of its own"
    assert len({row[2] for row in tried.rows}) == 1
    stand_in = [note for note in table.notes if note.startswith("Stand-in")]
    assert bool(stand_in) == (name != "digits"), "the embedded digits are DIGITS itself, and not MNIST"


def test_trials_see_neither_the_test_part_nor_the_records_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They learn from the last training records alone, under the noise of the real run, each with its own setting."""
    data, seen = pixels("mnist", CONTEXT), []

    def trial(public: Set, real: Set, name: str, setting: DropoutSetting, epsilon: float, context: Context) -> float:
        seen.append((public, setting.rate, setting.clip))
        return setting.rate * setting.clip

    monkeypatch.setattr(trials, "trial", trial)
    middles = {("DP-SGD", 1.0): DropoutSetting((4,), 100, 2, 2.0, 0.4)}
    found = trials.settled("mnist", data, middles, replace(CONTEXT, quick=False))
    assert sorted((rate, clip) for _, rate, clip in seen) == [
        (rate, clip) for rate in (0.2, 0.4, 0.8) for clip in (1.0, 2.0)
    ]
    assert found.of("DP-SGD", "1") == {"rate": 0.2, "clip": 1.0}
    public = seen[0][0]
    held = data.records // 2
    assert torch.equal(torch.cat([public.x, public.x_test]), data.x[-held:])


def test_as_printed(finished: Runs) -> None:
    """Both rules, sound noise and the run without noise, each with its curve; less noise costs more."""
    outcome = finished["printed-digits"].outcome
    rows = {str(row[0]): row for row in outcome.tables[0].rows}
    assert set(rows) == {"AC", "zCDP", "AC, sound, epsilon 10", "sound, epsilon 1", "not private"}
    assert float(rows["AC, sound, epsilon 10"][3]) <= 10  # type: ignore[arg-type]
    assert float(rows["AC"][3]) < float(rows["zCDP"][3]) < float(rows["not private"][3])  # type: ignore[arg-type]
    assert rows["not private"][1] == 0.9535
    assert rows["AC"][1] == 0.9139
    assert float(rows["sound, epsilon 1"][3]) <= 1  # type: ignore[arg-type]


def test_the_papers_sigma_is_half_of_a_noise_multiplier() -> None:
    """Its noise on a sum has deviation 2 C sigma; the full run has every epsilon of the paper's figures."""
    asked = printed._asked("mnist", Context())
    assert asked["zCDP"] == {"noise_multiplier": 2 * 2.68}
    assert asked["AC"] == {"noise_multiplier": 2 * 8.24}
    assert {name for name in asked if name.startswith("sound")} == {f"sound, epsilon {e:g}" for e in (10, 1, 0.1)}
    assert set(asked) == set(printed.STATED["mnist"])


def test_every_curve_of_a_full_run_is_drawn_apart() -> None:
    """Catches more curves than there are colours."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas()
    printed._figure("mnist", dict.fromkeys(printed.STATED["mnist"], ((1.0, 0.5), (2.0, 0.6)))).draw(canvas)
    lines = [(line.get_color(), line.get_linestyle()) for line in canvas.axes[0].lines]
    assert len(lines) == len(set(lines)) == len(printed.STATED["mnist"])


def test_noise_of_advanced_composition_keeps_its_epsilon() -> None:
    for name, paper_run in (("mnist", RUNS[0]), ("digits", RUNS[1])):
        for epsilon in printed.AC_EPSILONS:
            z = advanced_noise(name, epsilon)
            spent = sound_epsilon([GaussianEvent(z, "poisson", paper_run.rate, paper_run.steps)], 1e-5)
            assert spent < epsilon, "advanced composition is sound and wastes some"


@pytest.mark.slow
def test_the_table_of_single_settings(finished: Runs) -> None:
    (table,) = finished["effects"].outcome.tables
    assert {str(row[0]).split()[0] for row in table.rows} == {"units", "passes", "clip", "batch"}
    assert all(0.99 < float(row[3]) <= 1 for row in table.rows)  # type: ignore[arg-type]


def test_one_setting_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    base, seen = printed.PRINTED["mnist"], []

    def once(data: Set, setting: printed.PrintedSetting, *rest: object) -> printed.PrintedRun:
        seen.append(setting)
        return printed.PrintedRun(0.5, (), 1.0)

    monkeypatch.setattr(printed, "printed_run", once)
    printed.run_effects(CONTEXT)
    assert len(seen) == len(set(seen)) == 5, "what all four have in common is fitted once"
    for name, values in printed.EFFECTS.items():
        changed = [printed._changed(base, name, value) for value in values]
        assert base in changed, "what the others have fixed is among the values"
        assert len(set(changed)) == len(values)


def test_no_sound_rule_asks_for_less_noise_than_pld(finished: Runs) -> None:
    (table,) = finished["composition"].outcome.tables
    rows = {str(row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == {name for name, _ in RULES}
    sigmas = {name: row["ours"] for name, row in rows.items()}
    least = sigmas.pop("PLD")
    assert least == pytest.approx(2.6678, rel=2e-3)
    sigmas.pop("central limit (approximation)")
    assert all(isinstance(sigma, float) and sigma > least for sigma in sigmas.values())
    epsilons = [row["sound epsilon"] for name, row in rows.items() if "approximation" not in name]
    assert all(isinstance(epsilon, float) and epsilon <= 1 for epsilon in epsilons)


def test_the_price_of_the_papers_noise(finished: Runs) -> None:
    """sigma = 2.68 keeps epsilon 1 under add/remove and breaks it under the paper's own adjacency."""
    (table,) = finished["composition"].outcome.tables
    row = next(row for row in table.rows if row[1] == "zCDP")
    assert row[2] == RUNS[0].zcdp
    assert row[5] == pytest.approx(0.9949, abs=2e-3)
    assert row[6] == pytest.approx(2.117, abs=5e-3)


def test_dropped_weights_are_those_whose_noise_is_far_above_their_mean() -> None:
    centre = torch.tensor([1.0, 0.01, 0.0, 0.5] + [0.3] * 26)
    spread = torch.tensor([0.1, 0.1, 0.1, 0.1] + [0.0] * 26)
    posterior = DiagonalGaussian(softmax(2, 10), Categorical(10), centre, spread)
    assert dropped(posterior).nonzero().flatten().tolist() == [1, 2]
    assert float(log_alpha(centre[1], spread[1])) > SPARSE > float(log_alpha(centre[3], spread[3]))
    smaller = pruned(posterior)
    assert smaller.centre.tolist()[:4] == [1.0, 0.0, 0.0, 0.5]
    assert smaller.spread.tolist()[1] == 0.0
    assert torch.equal(smaller.centre[4:], centre[4:]), "biases have no noise and stay"


def test_the_divergence_drops_weights(finished: Runs) -> None:
    (table,) = finished["sparsity"].outcome.tables
    shares = [row[table.columns.index("dropped")] for row in table.rows]
    without, with_divergence = shares[0], shares[1]
    assert isinstance(without, PaperMeasure)
    assert isinstance(with_divergence, PaperMeasure)
    assert with_divergence.mean > without.mean
    assert ASSUMED_PUBLIC in " ".join(table.notes)


def test_pixels_are_encoded_by_public_constants() -> None:
    data = pixels("digits", CONTEXT)
    assert data.records == 1437
    assert float(data.x.min()) == pytest.approx(-INK)
    assert float(data.x.max()) == pytest.approx(1 - INK)
    assert float(pixels("mnist", CONTEXT).x.min()) == 0.0


def test_public_features_stand_in_a_table_of_their_own(finished: Runs) -> None:
    (table,) = finished["features"].outcome.tables
    (row,) = table.rows
    assert isinstance(row[3], PaperMeasure)
    assert row[3].mean > 0.75
