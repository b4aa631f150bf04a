"""Additive models of many columns whose middles noise hides, and the last look at what was learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.methods import additive as module
from confide.methods._additive_belief import AS_ASSUMED, Beliefs
from confide.methods._additive_last_look import MEANS, TargetLine, last_look, line_of, parts_of
from confide.methods._additive_middles import longest, loose_curvature, means, middles_of
from confide.methods._additive_state import AdditiveState
from confide.methods._additive_steps import along_the_way, largest_rate
from confide.methods.additive import Additive
from confide.models import additive as scales
from confide.models.additive import additive
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData

RECORDS, COLUMNS = 2000, 120


def plan(records: int, epsilon: float) -> confide.Plan:
    return confide.plan(epsilon=epsilon, delta=1e-5, records=records, steps=17, sampling="full-batch", clip=2.0)


def counts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Copies of a few sparse counts: nearly all records lie at one end of the bounds."""
    random = torch.Generator().manual_seed(seed)
    x = (torch.rand(RECORDS, 12, generator=random) < 0.08).double().repeat_interleave(COLUMNS // 12, 1) / 10
    y = x[:, :: COLUMNS // 12].sum(1) + 0.07 * torch.randn(RECORDS, generator=random, dtype=torch.float64)
    return (2 * x - 1).float(), ((y - y.mean()) / y.std() * 0.15).float()


def fitted(x: Tensor, y: Tensor, epsilon: float, waves: int = 12) -> Any:
    data = PrivateData(x, y, schema=Schema(classes=None, records=len(x)), seed=1)
    return confide.fit(Additive(), additive([0] * x.shape[1], 1, waves), data, plan(len(x), epsilon), seed=0).posterior


def rmse(posterior: Any, x: Tensor, y: Tensor) -> float:
    off = posterior.output_moments(x)[0][:, 0] - y
    return float(off.square().mean().sqrt() / y.double().std())


def state_of(columns: int) -> tuple[Any, AdditiveState]:
    network, made = additive([0] * columns + [3], 1, 2), plan(1000, 1.0)
    problem = make_problem(Additive(), network, Schema(records=1000), made, seed=0)
    return problem, Additive().init(problem)


class TestMeans:
    def test_a_record_moves_them_by_the_clip_at_most(self) -> None:
        problem, state = state_of(20)
        Additive().show(problem, state)
        random = torch.Generator().manual_seed(0)
        x = torch.cat([torch.rand(500, 20, generator=random).round() * 2 - 1, torch.eye(3)[torch.arange(500) % 3]], 1)
        x[:3, 20:] = 0
        rows = means(problem.module, 2.0).function(x, torch.zeros(500))
        norms = rows.norm(dim=1)
        assert float(norms.max()) <= 2.0 + 1e-6
        assert float(norms.max()) > 1.0, "the bound is not far from what there is"

    def test_they_tell_middles_and_bound_variances(self) -> None:
        problem, state = state_of(20)
        recipe, amplitudes = problem.module.recipe, torch.ones(problem.module.recipe.features).double()
        random = torch.Generator().manual_seed(1)
        at_one_end = (torch.rand(5000, recipe.features, generator=random) < 0.05).double() * -2 + 1
        at_one_end[:, 41:] = (at_one_end[:, 41:] + 1) / 2
        told = (at_one_end - state.centres).mean(0)[1:] / longest(recipe, state.centres, amplitudes)
        found = middles_of(recipe, told, 1e-9, state, amplitudes)
        assert torch.allclose(found.centres[1:], at_one_end.mean(0)[1:], atol=1e-6)
        variances = at_one_end.var(0, correction=0)[1:]
        assert torch.allclose(found.variances[1:], variances, atol=1e-6), "of two values at the ends the bound is exact"

    def test_noise_is_shrunk_towards_what_all_have_in_common(self) -> None:
        problem, state = state_of(200)
        recipe, amplitudes = problem.module.recipe, torch.ones(problem.module.recipe.features).double()
        random, most = torch.Generator().manual_seed(2), longest(problem.module.recipe, state.centres, amplitudes)
        told = torch.full((recipe.features - 1,), 0.5 / most).double()
        noisy = told + 0.4 / most * torch.randn(len(told), generator=random, dtype=torch.float64)
        found = middles_of(recipe, noisy, 0.4 / most, state, amplitudes)
        off = (found.centres - state.centres)[1:401] - 0.5
        assert float(off.square().mean().sqrt()) < 0.12
        assert float(found.doubts[1:401].mean()) >= float(off.square().mean()), "what is left is not understated"


def test_a_loose_curvature_is_the_largest_there_is() -> None:
    random = torch.Generator().manual_seed(0)
    doubts = torch.rand(50, generator=random, dtype=torch.float64)
    divisor = 100 + 900 * torch.rand(1, 50, generator=random, dtype=torch.float64)
    variances, curvature = torch.ones(50, dtype=torch.float64), torch.full((1, 50), 500.0, dtype=torch.float64)
    claimed = loose_curvature(curvature, variances, doubts, divisor)
    found = []
    for _ in range(50):
        off = doubts.sqrt() * torch.randn(50, generator=random, dtype=torch.float64)
        scaled = off / divisor[0].sqrt()
        found.append(float(torch.linalg.matrix_norm(500 * scaled[:, None] * scaled, 2)))
    assert sum(found) / len(found) == pytest.approx(claimed, rel=0.1)
    recipe, pull = additive([0] * 49, 1, 1).recipe, torch.full((1, 50), 0.01, dtype=torch.float64)
    assert largest_rate(recipe, (0.5, 0.5), 1.0, pull, 13, loose=99.0) * 99 <= 2.4


def test_the_whole_way_tells_whether_columns_have_something_in_common() -> None:
    """Where a curvature is the assumed one, where it is five times that, and where gradients are noise alone."""
    random = torch.Generator().manual_seed(0)
    way, curvature = torch.randn(1, 30, generator=random).double(), torch.ones(1, 30).double()
    first = (torch.zeros_like(way), torch.zeros_like(way), torch.tensor(1e-4).double())
    for sharp in (1.0, 5.0):
        found = along_the_way(first, 1e4 * torch.stack([curvature, way, sharp * way]), curvature)
        assert sharp < found < sharp + 0.05
    noise = torch.stack([curvature, 0.01 * way, 0.01 * torch.randn(1, 30, generator=random).double()])
    assert along_the_way(first, 1e4 * noise, curvature) > AS_ASSUMED, "nothing is sure then"


class TestTheLastLook:
    def told(self, learnt: Tensor, target: Tensor) -> Tensor:
        class Known(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

            features = forward

        rungs, doubt = torch.tensor([0.5, 1.0]).double(), torch.zeros(1).double()
        query = last_look(Known(), 0.0, 1.0, 2.0, rungs, doubt)  # type: ignore[arg-type]
        rows = query.function(learnt[:, None], target)
        assert float(rows.norm(dim=1).max()) <= 2.0 + 1e-9
        return parts_of(rows.mean(0) / 2.0, 0.0)[2]

    @pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
    def test_effects_are_kept_as_far_as_they_explain(self, slope: float) -> None:
        random = torch.Generator().manual_seed(0)
        learnt, rest = 0.6 * torch.randn(2, 50_000, generator=random, dtype=torch.float64)
        found = line_of(self.told(learnt, slope * learnt + rest + 0.1), 1e-4)
        assert found.slope == pytest.approx(slope, abs=0.04)
        assert found.level == pytest.approx(0.1, abs=0.03)
        assert found.left == pytest.approx(0.6 / math.hypot(0.6, (1 - slope) * 0.6, 0.1), rel=0.05)

    def test_what_is_larger_than_the_target_is_left_out(self) -> None:
        random = torch.Generator().manual_seed(0)
        target = torch.randn(5000, generator=random, dtype=torch.float64)
        assert line_of(self.told(target + 15, target), 0.01).slope == 0
        assert line_of(self.told(15 * target, target), 0.01).slope == 0

    def test_noise_moves_next_to_nothing(self) -> None:
        random = torch.Generator().manual_seed(0)
        for _ in range(50):
            found = line_of(0.05 + 0.5 * torch.randn(MEANS, generator=random, dtype=torch.float64), 0.5)
            assert abs(found.level) < 0.25
            assert found.slope in (0.0, pytest.approx(1.0, abs=0.3))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_sparse_columns_do_not_run_away(epsilon: float) -> None:
    x, y = counts()
    assert rmse(fitted(x, y, epsilon), x, y) < 1.02


def test_without_the_rules_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: features are taken to be centred, and nobody looks at what was learnt."""
    monkeypatch.setattr(module, "middles_asked", lambda *_: False)
    monkeypatch.setattr(module, "line_of", lambda *_: TargetLine())
    monkeypatch.setattr(scales, "waves_told", lambda shares, noise: torch.full((len(shares),), shares.shape[1]))
    x, y = counts()
    assert max(rmse(fitted(x, y, epsilon), x, y) for epsilon in (0.3, 1.0)) > 1.5


def test_numbers_of_two_values_are_learnt() -> None:
    """Their waves are all the same; a matrix of them was no matrix that steps could be divided by."""
    random = torch.Generator().manual_seed(0)
    x = (torch.rand(4000, 20, generator=random) < 0.1 * torch.rand(20, generator=random)).float()
    y = 0.1 * x.sum(1) + 0.05 * torch.randn(4000, generator=random)
    assert rmse(fitted(2 * x - 1, y, 8.0), 2 * x - 1, y) < 1.02


def flags(epsilon: float) -> float:
    """The error in units of the noise, of thirty flags in 2000 records."""
    random = torch.Generator().manual_seed(1)
    x = (torch.rand(RECORDS, 30, generator=random) < 0.02 + 0.28 * torch.rand(30, generator=random)).float()
    y = x @ torch.randn(30, generator=random)
    y = 0.13 * (y - y.mean()) / y.std() + 0.1 * torch.randn(RECORDS, generator=random)
    return rmse(fitted(2 * x - 1, y, epsilon), 2 * x - 1, y) * float(y.std()) / 0.1


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_flags_are_learnt_at_any_budget(epsilon: float) -> None:
    assert flags(epsilon) < 1.1


def test_waves_that_cannot_be_told_apart_throw_flags_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "waves_told", lambda shares, noise: torch.full((len(shares),), shares.shape[1]))
    assert flags(8.0) > 1.1


@pytest.mark.parametrize(("columns", "alike"), [(30, math.sqrt(31)), (8, 1.0)])
def test_columns_of_a_survey_are_no_independent_witnesses(columns: int, alike: float) -> None:
    """Thirty questions of three factors at a budget too small to ask how they move together: what each says was added
    up, and predictions had up to three times the error of the mean."""
    problem, state = state_of(columns)
    still = torch.zeros_like(state.velocity)
    steep = torch.stack([still + 1, still + 1, still + 1000])
    state = replace(state, sums=steep, first=(still, still, torch.ones(())))
    assert state.loose is None
    curvature = torch.full_like(still, 100.0)
    assert Beliefs(problem, state, Additive()._schedule(problem))._alike(curvature) == pytest.approx(alike)
