"""Which columns move together: the release that says so, what is made of it, and what is believed of weights then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.methods import _additive_together as together
from confide.methods import additive as module
from confide.methods._additive_state import Together
from confide.methods._additive_steps import StepMetric
from confide.methods.additive import Additive
from confide.models.additive import AdditiveRecipe, additive, edges, heights_of, wave_moments
from confide.sources.private_data import PrivateData


def normal_pair(correlation: float, records: int = 40_000) -> Tensor:
    """Two normal numbers within bounds of five deviations."""
    first, second = torch.randn(2, records, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = torch.stack([first, correlation * first + math.sqrt(1 - correlation**2) * second], 1)
    return (both / 5).clamp(-1, 1)


def scaled(x: Tensor, waves: int = 6) -> tuple[Any, Tensor, Tensor]:
    """A network whose scale is that of these records, the variances of its features, and how its waves are alike."""
    network = additive([0] * x.shape[1], 1, waves)
    bins = torch.bucketize((x + 1) / 2, edges(x.shape[1])[1:-1])
    count = len(edges(x.shape[1])) - 1
    shares = torch.stack([torch.bincount(one, minlength=count).double() / len(x) for one in bins.mT])
    heights = heights_of(shares)
    mean, variance, alike = wave_moments(shares, heights, waves)
    network.features.heights.copy_(heights)
    network.features.centres.copy_(torch.cat([torch.zeros(1).double(), mean.flatten()]))
    amplitudes = network.features.amplitudes.double()
    return network, torch.cat([torch.ones(1).double(), variance.flatten()]) * amplitudes.square(), alike


class TestRelease:
    @pytest.mark.parametrize("size", [0.3, 1.0, 1e6])
    def test_a_record_moves_it_by_the_clip_at_most(self, size: float) -> None:
        network, variances, _ = scaled(normal_pair(0.8))
        query = together.products(network, variances, clip=2.5)
        rows = query.function(size * normal_pair(-0.9, 200).float(), torch.zeros(200))
        assert rows.shape == (200, query.size) == (200, 3)
        assert float(rows.norm(dim=1).max()) <= 2.5 * (1 + 1e-12)
        assert float(rows.norm(dim=1).max()) > 1.0, "or next to nothing is asked"

    def test_without_noise_it_tells_correlations(self) -> None:
        for correlation in (0.9, 0.3, -0.7):
            x = normal_pair(correlation)
            network, variances, alike = scaled(x)
            query = together.products(network, variances, clip=1.0)
            told = query.function(x.float(), torch.zeros(len(x))).mean(0)
            found = together.together_of(network.recipe, told, 0.0, alike)
            places = together.firsts(network.recipe)
            assert float(found.correlations[places[0], places[1]]) == pytest.approx(correlation, abs=0.1)
            assert found.doubt == 0

    def test_noise_is_not_taken_for_correlation(self) -> None:
        recipe = AdditiveRecipe((0,) * 12, 1, waves=2)
        alike = torch.eye(2, dtype=torch.float64).expand(12, 2, 2)
        noise, generator = 0.02, torch.Generator().manual_seed(1)
        told = noise * torch.randn(78, generator=generator, dtype=torch.float64)
        rows, columns = torch.triu_indices(12, 12)
        told[rows == columns] += 1 / (together.ROOM * 12)
        found = together.together_of(recipe, told, noise, alike)
        off = found.correlations - torch.eye(recipe.features)
        assert float(off.abs().max()) < together.entry_noise(12, noise)
        assert 0 < found.doubt < together.USUAL_CORRELATION
        assert float(torch.linalg.eigvalsh(found.correlations).min()) > 0

    def test_it_is_asked_where_it_could_be_read(self) -> None:
        few, many = AdditiveRecipe((0,) * 8, 1), AdditiveRecipe((0,) * (together.MOST_TOGETHER + 1), 1)
        assert together.asked(few, 100.0)
        assert together.asked(few, math.inf)
        assert not together.asked(few, 1.0)
        assert not together.asked(few, 0.0)
        assert not together.asked(many, math.inf)
        assert not together.asked(AdditiveRecipe((0,), 1), math.inf), "one column moves with no other"


class TestWaves:
    @pytest.mark.parametrize("correlation", [0.85, -0.6])
    def test_waves_of_normal_numbers_move_together_as_powers(self, correlation: float) -> None:
        x = normal_pair(correlation)
        network, _, alike = scaled(x, waves=4)
        true = torch.corrcoef(network.features(x.float())[:, 1:].double().mT)
        first = float(true[0, 4])
        between = torch.tensor([[1.0, first], [first, 1.0]], dtype=torch.float64)
        found = together.feature_correlations(network.recipe, alike, between)[1:, 1:]
        assert torch.allclose(found[:4, :4], alike[0], atol=1e-5)
        assert float((found - true).abs().max()) < 0.26
        # The planted fault: all orders move together as the first does.
        flat = found.clone()
        flat[:4, 4:] = first * torch.eye(4)
        assert float((flat - true).abs().max()) > 0.4

    def test_a_number_of_few_values(self) -> None:
        """Waves beyond the fourth of five values are sums of the others, and move together as these do."""
        x = (normal_pair(0.8) * 5).round().clamp(-2, 2) / 2.5
        network, _, alike = scaled(x, waves=8)
        true = torch.corrcoef(network.features(x.float())[:, 1:].double().mT)
        first = float(true[0, 8])
        between = torch.tensor([[1.0, first], [first, 1.0]], dtype=torch.float64)
        found = together.feature_correlations(network.recipe, alike, between)[1:, 1:]
        assert float(torch.linalg.eigvalsh(found).min()) > -1e-9
        assert float((found - true)[:4, 8:12].abs().max()) < 0.25


def gradient_of(correlations: Tensor, truth: Tensor, records: float, noise: float) -> tuple[together.Seen, Tensor]:
    curvature = records * correlations
    generator = torch.Generator().manual_seed(3)
    gradient = -curvature @ truth + noise * torch.randn(len(truth), generator=generator, dtype=torch.float64)
    return together.Seen(torch.zeros_like(truth), gradient, noise**2), curvature


class TestBelief:
    def test_differences_and_sums_of_columns_that_move_together(self) -> None:
        """With the planted fault, columns that are taken to move by themselves, sums are many times too large."""
        recipe = AdditiveRecipe((0,) * 6, 1, waves=1)
        correlations = torch.full((7, 7), 0.9, dtype=torch.float64) + 0.1 * torch.eye(7, dtype=torch.float64)
        correlations[0], correlations[:, 0] = 0, 0
        correlations[0, 0] = 1
        truth = torch.tensor([0.1, 0.5, -0.4, 0.0, 0.3, 0.0, 0.2], dtype=torch.float64)
        seen, curvature = gradient_of(correlations, truth, 2000.0, 5.0)
        mean, doubt, scales, wider = together.believed(seen, curvature, 1e-4, 0.0, recipe, 0.1)
        assert float((mean - truth).abs().max()) < 0.08
        assert bool(((mean - truth).abs() < 4 * wider * doubt.sqrt() + 0.01).all())
        assert len(scales) == 6
        alone, _, _, _ = together.believed(seen, curvature.diagonal().diag(), 1e-4, 0.0, recipe, 0.1)
        assert float((alone - truth).abs().max()) > 0.3

    def test_weights_drawn_by_themselves_move_outputs_no_more_than_all_together(self) -> None:
        """Six columns that say nearly the same: which of them counts is in doubt, and what they add is not. Intervals
        of sixteen sensors held .99 of the records for .90."""
        recipe, features = AdditiveRecipe((0,) * 6, 1, waves=1), 7
        correlations = torch.full((features, features), 0.98, dtype=torch.float64)
        correlations[0], correlations[:, 0] = 0, 0
        curvature = 500 * (correlations - correlations.diagonal().diag() + torch.eye(features))
        covariance = torch.linalg.inv(curvature)
        doubts, wider = together._by_themselves(curvature, covariance, recipe)
        own, alone = curvature.diagonal()[1:], covariance.diagonal()[1:]
        assert float(own @ doubts[1:]) == pytest.approx(features - 1), "of every direction as much as of one"
        assert float(own @ alone) > 5 * float(own @ doubts[1:])
        assert torch.allclose(wider**2 * doubts[1:], alone)
        assert doubts[0] == covariance[0, 0]

    def test_doubt_of_the_matrix_shrinks_what_rests_on_it(self) -> None:
        recipe, correlations = AdditiveRecipe((0,) * 6, 1, waves=1), torch.eye(7, dtype=torch.float64)
        truth = torch.full((7,), 0.3, dtype=torch.float64)
        seen, curvature = gradient_of(correlations, truth, 2000.0, 5.0)
        sizes = [
            float(together.believed(seen, curvature, 1e-4, doubt, recipe, 0.1)[0][1:].mean()) for doubt in (0.0, 0.3)
        ]
        assert sizes[0] == pytest.approx(0.3, abs=0.03)
        assert sizes[1] < 0.95 * sizes[0]

    def test_nothing_is_believed_of_noise(self) -> None:
        recipe, correlations = AdditiveRecipe((0,) * 6, 1, waves=3), torch.eye(19, dtype=torch.float64)
        seen, curvature = gradient_of(correlations, torch.zeros(19, dtype=torch.float64), 500.0, 40.0)
        mean, _, _, _ = together.believed(seen, curvature, 1e-4, 0.1, recipe, 0.1)
        assert float(mean[1:].abs().max()) < 0.3 * 40 / 500

    def test_a_whole_metric_is_the_matrix_it_stands_for(self) -> None:
        generator = torch.Generator().manual_seed(0)
        square = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        correlations = square @ square.mT + torch.eye(5)
        correlations = correlations / (correlations.diagonal()[:, None] * correlations.diagonal()).sqrt()
        divisor = torch.rand(1, 5, generator=generator, dtype=torch.float64) + 1
        metric = StepMetric.of(divisor, divisor, torch.zeros(0, 1, 1), Together(correlations, 0.0))
        whole = divisor[0].sqrt()[:, None] * correlations * divisor[0].sqrt()
        way = torch.randn(1, 5, generator=generator, dtype=torch.float64)
        assert metric.square(way) == pytest.approx(float(way[0] @ whole @ way[0]))
        assert torch.allclose(metric.divided(way)[0], torch.linalg.solve(whole, way[0]))
        found, trace, root, largest = metric.noise(way)
        inverse = torch.linalg.inv(whole)
        assert found == pytest.approx(float(way[0] @ inverse @ way[0]))
        assert (trace, root) == pytest.approx((float(inverse.trace()), float(inverse.norm())))
        assert largest == pytest.approx(float(torch.linalg.eigvalsh(inverse).max()))


def one_load(records: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eight columns that move with one load, and a target in their differences."""
    generator = torch.Generator().manual_seed(seed)
    load = torch.randn(records, 1, generator=generator, dtype=torch.float64)
    x = (load + 0.2 * torch.randn(records, 8, generator=generator, dtype=torch.float64)) / 5
    weights = torch.tensor([2.5, -2.5, 1.75, -1.75, 1.25, -1.25, 0.75, 0.75], dtype=torch.float64)
    y = x @ weights + 0.06 * torch.randn(records, generator=generator, dtype=torch.float64)
    return x.clamp(-1, 1).float(), y.clamp(-1, 1).float()


def error(x: Tensor, y: Tensor, epsilon: float) -> float:
    data = PrivateData(x, y, schema=Schema(records=len(x)), seed=1)
    plan = confide.plan(delta=1e-5, records=len(x), steps=17, sampling="full-batch", clip=2.0, epsilon=epsilon)
    found = confide.fit(Additive(), additive([0] * x.shape[1]), data, plan, seed=0).posterior
    return float((found.predict(x).mean - y).square().mean().sqrt() / y.std())


def test_differences_of_columns_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few thousand records; with the planted fault, nobody asks which columns move together, they are not."""
    x, y = one_load(3000, 0)
    assert error(x, y, 1.0) < 0.38
    monkeypatch.setattr(module, "asked", lambda *_: False)
    assert error(x, y, 1.0) > 0.42


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 30.0])
def test_columns_that_are_all_the_same(epsilon: float) -> None:
    """The common direction is twelve times as sharp as any column, and there is no other."""
    generator = torch.Generator().manual_seed(2)
    one = torch.rand(1500, 1, generator=generator) * 2 - 1
    y = 0.5 * one[:, 0] + 0.1 * torch.randn(1500, generator=generator)
    assert error(one.repeat(1, 12), y, epsilon) < {0.1: 1.0, 1.0: 0.42, 30.0: 0.36}[epsilon]
