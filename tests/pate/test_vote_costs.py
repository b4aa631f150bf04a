"""What votes cost where teachers agree: the bound holds, the noise hides one teacher, and nothing leaves unpaid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from confide import pate
from confide.data.schema import Schema
from confide.errors import BudgetExceeded, Refusal
from confide.mechanism import vote_costs
from confide.mechanism.noise import NoiseStream
from confide.mechanism.vote_costs import CostEstimate, costs_by_gap, gaps_of, smooth_sensitivity
from confide.mechanism.votes import Votes
from confide.privacy.events import PureEvent
from confide.privacy.ledger import Ledger
from confide.sources.private_data import PrivateData

TEACHERS, CLASSES, QUERIES = 40, 5, 30


def counts(seed: int) -> Tensor:
    """Votes of teachers who agree on every query, more or less as the seed has it."""
    made = torch.Generator().manual_seed(seed)
    sure = torch.rand(QUERIES, TEACHERS, generator=made) < 0.3 + 0.7 * torch.rand((), generator=made)
    said = torch.where(sure, 0, torch.randint(CLASSES, (QUERIES, TEACHERS), generator=made))
    return torch.stack([torch.bincount(row, minlength=CLASSES) for row in said]).double()


def neighbour(given: Tensor) -> Tensor:
    """One teacher goes over to the second class on every query: the most that the gaps can move."""
    order = given.argsort(1, descending=True)
    rows = torch.arange(len(given))
    moved = given.clone()
    moved[rows, order[:, 0]] -= 1
    moved[rows, order[:, 1]] += 1
    return moved


def divergence(gap: int, other: int, noise: float, order: float) -> float:
    """Renyi's, of the two answers of two classes; by logarithms, since one of them is hardly ever given."""
    at = [(gap / (math.sqrt(2) * noise), other / (math.sqrt(2) * noise))]
    at.append((-at[0][0], -at[0][1]))
    parts = [order * stats.norm.logcdf(one) + (1 - order) * stats.norm.logcdf(two) for one, two in at]
    return float(torch.tensor(parts).logsumexp(0)) / (order - 1)


@pytest.mark.parametrize("noise", [3.0, 8.0])
@pytest.mark.parametrize("order", [2.0, 6.0])
def test_the_cost_bounds_the_exact_divergence_of_two_classes(noise: float, order: float) -> None:
    costs = costs_by_gap(TEACHERS, 2, noise, order)
    assert bool((costs.diff() <= 0).all())
    assert float(costs[0]) == pytest.approx(order / noise**2)
    assert float(costs[-1]) < 0.2 * float(costs[0])
    for gap in range(2, TEACHERS - 1):
        for other in (gap - 2, gap + 2):
            assert divergence(gap, other, noise, order) <= float(costs[gap]) * (1 + 1e-9) + 1e-15, gap


def moves_too_far(sensitivity: Any) -> bool:
    """Whether f moves by more than S somewhere, or S by more than it may."""
    smoothness = 0.5
    costs = costs_by_gap(TEACHERS, CLASSES, 4.0, 6.0)
    for seed in range(60):
        one = counts(seed)
        two = neighbour(one)
        if float((gaps_of(one) - gaps_of(two)).abs().max()) > vote_costs.MOST_MOVED:
            return True
        f, other = (float(costs[gaps_of(each)].sum()) for each in (one, two))
        s, t = (sensitivity(gaps_of(each), costs, smoothness) for each in (one, two))
        if abs(f - other) > s * (1 + 1e-9) or abs(math.log(s / t)) > smoothness * (1 + 1e-9):
            return True
    return False


def test_one_teacher_moves_the_cost_and_its_noise_by_no_more_than_is_paid_for() -> None:
    assert not moves_too_far(smooth_sensitivity)


@pytest.mark.parametrize(
    "fault",
    [
        lambda gaps, costs, b: 0.25 * smooth_sensitivity(gaps, costs, b),
        lambda gaps, costs, b: smooth_sensitivity(gaps, costs, 60 * b),  # that of these votes alone: noise that tells
    ],
)
def test_planted_sensitivities_are_caught(fault: Any) -> None:
    assert moves_too_far(fault)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_noise_is_as_private_as_it_is_charged(epsilon: float) -> None:
    """The worst over a fine line of values, for moving f by S and scaling S at once, in both directions."""
    made = CostEstimate(8.0, epsilon)
    at = torch.linspace(-400, 400, 40_001, dtype=torch.float64).numpy()
    worst = 0.0
    for stretch in (-made.smoothness, made.smoothness):
        one = stats.t.logpdf(at, 3, loc=0, scale=made.scale)
        two = stats.t.logpdf(at, 3, loc=min(1.0, math.exp(stretch)), scale=made.scale * math.exp(stretch))
        worst = max(worst, float(abs(one - two).max()))
    assert 0.4 * epsilon < worst <= epsilon


def test_the_numbers_are_of_students_law() -> None:
    stream = NoiseStream(5)
    found = [vote_costs.student(stream) for _ in range(4000)]
    assert stats.kstest(found, stats.t(3).cdf).pvalue > 0.01


def test_what_is_released_is_near_and_within_public_limits() -> None:
    made, given = CostEstimate(6.0, 2.0), counts(0)
    costs = costs_by_gap(TEACHERS, CLASSES, 4.0, 6.0)
    true, stream = float(costs[gaps_of(given)].sum()), NoiseStream(2)
    released = torch.tensor([made.release(given, TEACHERS, 4.0, stream) for _ in range(300)])
    unit = made.scale * smooth_sensitivity(gaps_of(given), costs, made.smoothness)
    assert abs(float(released.median()) - true) < 0.3 * unit
    assert float(released.min()) >= 0
    assert float(released.max()) <= QUERIES * 6.0 / 16


class Knowing:
    """Votes by the sign of the input."""

    def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
        return (inputs[:, 0] > 0).long()


def private(ceiling: float | None = None) -> PrivateData:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=made)
    schema, y = Schema(400, (0, 1)), (x[:, 0] > 0).long()
    if ceiling is None:
        return PrivateData(x, y, schema=schema, seed=1)
    ledger = Ledger()
    ledger.limit(ceiling, 1e-5)
    return PrivateData(x, y, schema=schema, ledger=ledger, name="votes")


class TestRun:
    inputs = torch.linspace(-2, 2, 60)[:, None].repeat(1, 2)

    def plan(self, estimate: float | None, epsilon: float = 2.0) -> pate.PatePlan:
        return pate.plan(epsilon=epsilon, delta=1e-5, teachers=60, queries=12, estimate=estimate)

    def test_the_estimate_is_part_of_the_budget_and_below_the_bound_where_teachers_agree(self) -> None:
        plain, made = self.plan(None), self.plan(0.5, 8.0)
        assert plain.mechanism.estimate is None
        assert PureEvent(0.5) in made.mechanism.events()
        assert 7.0 < made.epsilon <= 8.0
        run = pate.fit(Knowing(), private(), self.inputs, made, student=pate.Supervised(epochs=1), seed=0)
        assert run.estimated_epsilon is not None
        assert 0.5 < run.estimated_epsilon < 0.8 * run.privacy.epsilon()
        assert replace(run, plan=plain).estimated_epsilon is None

    def test_it_is_charged_with_the_votes(self) -> None:
        """A ceiling that votes alone stay under."""
        made = self.plan(0.5).mechanism
        private(ceiling=1.6).poll(replace(made, estimate=None), Knowing(), self.inputs[:12])
        with pytest.raises(BudgetExceeded):
            private(ceiling=1.6).poll(made, Knowing(), self.inputs[:12])

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(Refusal, match="leave some of epsilon"):
            self.plan(2.0)
        for order, epsilon in ((1.0, 0.1), (4.0, 0.0), (math.nan, 0.1)):
            with pytest.raises(Refusal):
                CostEstimate(order, epsilon)

    def test_replacing_a_record_is_within_the_budget_too(self) -> None:
        made = pate.plan(epsilon=2.0, delta=1e-5, teachers=60, queries=12, estimate=0.5, adjacency="replace-one")
        assert made.epsilon <= 2.0

    def test_votes_of_one_class_have_a_gap(self) -> None:
        found = Votes(5, 2, 1.0, estimate=CostEstimate(4.0, 1.0)).release(torch.tensor([[5.0], [4.0]]), NoiseStream(1))
        assert found.cost is not None
