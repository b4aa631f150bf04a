"""The paper on private SG-MCMC, quickly and without data: every experiment runs, and its claims are checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from confide import papers
from confide.data import catalogue
from confide.data.columns import Column
from confide.papers import base, drawing
from confide.papers.base import Context, Finished, PaperMeasure, PaperTable
from confide.papers.dp_sgmcmc import adult, digits

QUICK = Context(quick=True, seeds=(0,), noise_seed=1)


@pytest.fixture(scope="module")
def done() -> dict[str, Finished]:
    return {item.experiment.name: item for item in base.run(papers.get("dp-sgmcmc"), QUICK)}


def rows(table: PaperTable) -> dict[tuple[Any, Any], dict[str, Any]]:
    return {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.slow
def test_every_table_sets_the_paper_beside_ours_and_a_sound_epsilon(done: dict[str, Finished]) -> None:
    assert list(done) == ["step-sizes", "adult", "mnist", "pate", "gan"]
    for item in done.values():
        for table in item.outcome.tables:
            if table.title.startswith("Protocol"):
                continue
            assert {"paper", "ours", "sound epsilon"} <= set(table.columns)
            assert table.notes
            # Asked for an epsilon, a run keeps it.
            for row in table.rows:
                cells = dict(zip(table.columns, row, strict=True))
                if "epsilon asked for" in cells and row[0] != "the paper's first step":
                    assert cells["sound epsilon"] <= cells["epsilon asked for"]


def test_step_sizes() -> None:
    (item,) = base.run(papers.get("dp-sgmcmc"), QUICK, None, ("step-sizes",))
    table, samplers = item.outcome.tables
    found = rows(table)
    assert found["fixed", 0.1]["ours"] > 100 * found["Wang et al. (2015)", 0.1]["ours"]
    assert found["first of t^(-1/3)", 0.1]["ours"] > found["fixed", 0.1]["ours"]
    steps = {row[0].split(",")[0]: row[2] for row in samplers.rows}
    assert steps["SGHMC"] == pytest.approx(0.2 * steps["SGLD"]) == steps["SGNHT"]


@pytest.mark.slow
def test_adult_stand_in_is_learnt_by_all(done: dict[str, Finished]) -> None:
    table = done["adult"].outcome.tables[0]
    assert "Stand-in" in table.notes[-1]
    for row in table.rows:
        assert isinstance(row[3], PaperMeasure)
        assert row[3].mean > 0.8, row[0]
    assert math.isinf(table.rows[-1][-1])  # type: ignore[arg-type]


@pytest.mark.slow
def test_figures_can_be_drawn(done: dict[str, Finished], tmp_path: Any) -> None:
    names = []
    for item in done.values():
        for figure in item.outcome.figures:
            drawing.save_figure(figure, tmp_path)
            names.append(figure.name)
    assert names == ["step_sizes", "step_size_sensitivity", "adult_accuracy", "adult_traces", "gan_samples"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)


def test_the_feature_map_reads_columns_and_no_other_record() -> None:
    columns = (Column("age", bounds=(0, 10)), Column("fnlwgt", bounds=(0, 9)), Column("capital_gain", bounds=(0, 100)))
    x = torch.tensor([[0.5, 0.1, -1.0], [0.2, 0.9, 1.0]])
    both = adult.public_map(x, columns)
    assert torch.allclose(both, torch.tensor([[0.5, 0.0, 0.0], [0.2, 1.0, 1.0]]))
    assert torch.equal(adult.public_map(x[:1], columns), both[:1])


def test_the_feature_bound_holds_for_every_record_of_adult() -> None:
    """One input per categorical column, two per capital column, none for the weight, and the constant."""
    columns = catalogue.schema("adult").columns
    assert sum(adult._inputs(column) for column in columns) == 8 + 3 + 4


@pytest.mark.slow
def test_the_comparison_is_of_the_same_runs(done: dict[str, Finished]) -> None:
    """A difference of the wrong rows, or with the wrong sign, would be seen."""
    accuracy, comparison, _ = done["adult"].outcome.tables
    found = {key: cells["ours"].mean for key, cells in rows(accuracy).items()}
    assert {row[0] for row in comparison.rows} == {"OPS", "hybrid", "DP-VI"}
    for row in comparison.rows:
        points = 100 * (found["SGLD", row[1]] - found[row[0], row[1]])
        assert row[3] == pytest.approx(points, abs=0.0051)
    spread = adult.standard_error(PaperMeasure((0.1, 0.3)), PaperMeasure((0.2, 0.4, 0.6)))
    assert spread == pytest.approx(math.sqrt(0.02 / 2 + 0.04 / 3))


def test_steps_follow_epsilon_between_their_bounds() -> None:
    problem, _ = adult.load(QUICK)
    assert (problem.steps(0.01), problem.steps(100.0), problem.steps(None)) == (60, 60, 240)
    wider = replace(problem, fewest=400, most=1000)
    assert [wider.steps(epsilon) for epsilon in (0.05, 0.2, 0.25, 0.5, 1.0)] == [400, 400, 500, 1000, 1000]


def test_a_rival_of_table_1_is_tuned_like_the_method_it_stands_beside() -> None:
    """Settings of all rows come from one place, at the epsilon that the paper has; DP-SGD once had an untuned rate."""
    for name, claimed, _, asked in digits.ROWS:
        assert (asked.rate, asked.clip, asked.batch, asked.noise_multiplier) == (None, None, None, None), name
        assert asked.private == (claimed != "none")
        assert not asked.private or asked.epsilon == float(claimed)


class TestPrivateLabels:
    """What 100 private labels can teach at epsilon 0.2 (docs/soundness.md, 6.2, L13)."""

    def test_the_bounds_of_the_documents(self) -> None:
        from statistics import NormalDist

        from confide.privacy.accountants import sound_epsilon
        from confide.privacy.events import GaussianEvent

        low, high = 1.0, 100.0  # bisection on the noise; epsilon falls with it
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if sound_epsilon((GaussianEvent(middle),), 1e-5) < 0.2 else (middle, high)
        mu, records = 1 / high, 20
        assert mu == pytest.approx(0.0613, abs=1e-4)
        assert NormalDist().cdf(records * mu / 2) == pytest.approx(0.730, abs=1e-3)
        assert NormalDist().cdf(2 * records * mu / 2) == pytest.approx(0.890, abs=1e-3)
        factor = math.exp(records * 0.2)
        left = 1e-5 * (factor - 1) / (math.exp(0.2) - 1)
        assert (factor + left) / (1 + factor) == pytest.approx(0.9821, abs=1e-4)
