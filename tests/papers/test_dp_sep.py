"""The DP-SEP paper in its quick form: every table is there, private rows carry a sound epsilon, figures are drawn."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from confide import papers
from confide.papers import dp_sep, sets
from confide.papers.base import Context, PaperMeasure, PaperOutcome
from confide.papers.dp_sep import fits, mixture
from confide.papers.drawing import save_figure
from confide.posteriors.natural import GaussianPredictive

CONTEXT = Context(quick=True, seeds=(0,), noise_seed=1)


def outcome(name: str) -> PaperOutcome:
    (experiment,) = papers.get("dp-sep").chosen([name])
    return experiment.run(CONTEXT)


@pytest.mark.slow
def test_mixture(tmp_path: Path) -> None:
    found = outcome("mixture")
    rows = {row[0]: row for row in found.tables[0].rows}
    assert {"EP", "SEP", "SEP clipped", "SEP clipped, C 1", "DP-SEP, epsilon 1", "DP-EM, epsilon 1"} <= set(rows)
    for name in ("DP-SEP", "DP-EM"):
        for epsilon in (50, 5, 1):
            sound = rows[f"{name}, epsilon {epsilon}"][3]
            assert isinstance(sound, float)
            assert 0.9 * epsilon < sound <= epsilon
    assert rows["SEP"][3] == math.inf
    save_figure(found.figures[0], tmp_path)
    assert (tmp_path / "mixture.svg").exists()


def test_regression_tables() -> None:
    errors, likelihoods, points, tried = outcome("regression-wine_red").tables
    found = {row[1]: row for row in errors.rows}
    printed = "DP-SEP, Algorithm 3 as printed"
    assert set(found) == {"VI", "ADF", "EP", "SEP", "SEP clipped", "DP-SEP", "DP-VI", printed}
    assert found[printed][4] == pytest.approx(1.0, abs=0.05)
    assert {row[1] for row in tried.rows} == {2}
    assert {row[0] for row in tried.rows} == {"VI", "ADF", "EP", "SEP", "SEP clipped", "DP-SEP", "DP-VI", "point"}
    assert found["ADF"][2] is None  # the paper has no such row
    assert found["EP"][4] == found["ADF"][4] == math.inf
    assert found["SEP"][4] == math.inf
    assert found["DP-SEP"][4] == pytest.approx(1.0, abs=0.05)
    assert found["DP-VI"][4] == pytest.approx(1.0, abs=0.05)
    assert all(
        isinstance(row[3], PaperMeasure) and math.isfinite(row[3].mean) for row in (*errors.rows, *likelihoods.rows)
    )
    assert {row[1] for row in points.rows} == {"point", "DP-SEP"}
    assert any("Stand-in" in note for note in errors.notes)


@pytest.mark.slow
def test_clipping_and_frontier(tmp_path: Path) -> None:
    assert len(outcome("clipping").tables) == 2
    found = outcome("frontier")
    assert [row[1] for row in found.tables[0].rows] == [1.0, 4.0]
    save_figure(found.figures[0], tmp_path)


def test_a_frontier_says_where_more_budget_did_not_pay() -> None:
    assert dp_sep._turned_note({"kin8nm": [0.4, 0.2, 0.06, 0.07]}, dp_sep.EPSILONS) == ()
    (note,) = dp_sep._turned_note({"kin8nm": [0.4, 0.2, 0.1, 0.0], "protein": [0.1, 0.08, 0.12, 0.15]}, dp_sep.EPSILONS)
    assert "protein (+0.080 at 1, +0.150 at 16)" in note
    assert "kin8nm" not in note


def test_one_run_serves_all_tables() -> None:
    context = Context(quick=True, seeds=(0,), noise_seed=2)
    first = fits.sep_on_split("wine_red", context, 0, 1.0)
    assert fits.sep_on_split("wine_red", context, 0, 1.0) is first
    other = Context(quick=True, seeds=(0,), noise_seed=3)
    assert fits.sep_on_split("wine_red", other, 0, 1.0) is not first


def test_distances_do_not_mind_the_order_of_components() -> None:
    mean = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = torch.eye(4).double().expand(4, 4, 4) * torch.arange(1.0, 5).double()[:, None, None]
    law = mixture.Law(mean, covariance)
    order = [2, 0, 3, 1]
    assert mixture.Law(mean[order], covariance[order]).distances(law) == (0, 0)
    assert mixture.Law(mean + 1, covariance).distances(law)[0] == pytest.approx(4.0)


def test_the_ring_holds_its_share() -> None:
    covariance = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    points = mixture.ring(torch.zeros(2).double(), covariance)
    inside = torch.einsum("nd,de,ne->n", points, torch.linalg.inv(covariance), points)
    assert torch.allclose(inside, torch.full_like(inside, -2 * math.log(0.02)))


def test_one_wild_prediction_does_not_decide_the_error() -> None:
    given = fits.sets.load("wine_red", CONTEXT)  # type: ignore[attr-defined]
    mean = given.y_test.double().clone()
    mean[0] = 1e6
    variance = torch.full_like(mean, 1e12)
    error, _ = fits._quality(GaussianPredictive.of(mean, variance, torch.ones(())), given)
    assert error <= 2 * given.scale / math.sqrt(len(mean))


def test_hyper_prior() -> None:
    (table,) = outcome("hyper-prior").tables
    assert [row[1:3] for row in table.rows] == [
        (method, choice) for method in ("SEP", "DP-SEP") for choice in ("given", "learnt")
    ]
    by_choice = {row[2]: row for row in table.rows if row[1] == "DP-SEP"}
    assert by_choice["given"][5] == by_choice["learnt"][5]  # learning it costs nothing
    assert all(isinstance(row[4], PaperMeasure) and math.isfinite(row[4].mean) for row in table.rows)


def test_year_is_read_where_its_file_is(tmp_path: Path) -> None:
    """On a made file; EP, whose factors would not fit for the published one, is left out with its reason."""
    (experiment,) = papers.get("dp-sep").chosen(["regression-year"])
    assert "holds no YearPredictionMSD.txt.zip" in experiment.lacks(tmp_path)
    rows = torch.randn(240, 90, generator=torch.Generator().manual_seed(0))
    years = (1990 + 5 * rows[:, 0]).round().clamp(1922, 2011)
    text = "\n".join(f"{int(year)}," + ",".join(f"{v:.3f}" for v in row) for year, row in zip(years, rows, strict=True))
    with zipfile.ZipFile(tmp_path / experiment.needs, "w") as archive:
        archive.writestr("YearPredictionMSD.txt", text)
    assert not experiment.lacks(tmp_path)
    context = Context(data=tmp_path)
    given = sets.load("year", context)
    assert (len(given.x), len(given.x_test), given.x.shape[1]) == (216, 24, 90)
    assert fits.ep_bytes(given, context) == 16 * given.records * (100 * 92 + 1)
    assert not fits.ep_fits(given, context), "the declared size is that of the published file"
    assert "each of the 463715 records takes 64 GB" in fits.ep_note(given, context)
    assert fits.ep_fits(replace(given, schema=replace(given.schema, records=216)), context)
