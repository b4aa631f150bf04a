"""The scale of the additive method: room for tails, correlated waves, numbers of one value, and constants."""

from __future__ import annotations

import math

import pytest
import torch

from confide.methods import _additive_levels as levels
from confide.methods import _additive_steps as steps
from confide.models import additive as model
from tests.methods.test_additive import fitted, log_loss


def normal_shares() -> torch.Tensor:
    """Of the bins of a normal number within bounds of five deviations."""
    below = torch.special.ndtr((model.edges(1) - 0.5) * 10)
    shares: torch.Tensor = below.diff()[None]
    return shares / shares.sum()


def explained(shares: torch.Tensor, waves: int = 12) -> float:
    """Share of the variance of a square that the waves explain, by least squares over the bins."""
    square = ((model.middles(1) - 0.5) * 10).square()
    angles = torch.pi * model.heights_of(shares)[0, :, None] * torch.arange(waves + 1)
    root = shares[0].sqrt()[:, None]
    found = torch.linalg.lstsq(torch.cos(angles) * root, (square * root[:, 0])[:, None], driver="gelsd").solution
    left = square - (torch.cos(angles) @ found)[:, 0]
    mean = (shares[0] * square).sum()
    return 1 - float((shares[0] * left.square()).sum() / (shares[0] * (square - mean).square()).sum())


def test_tails_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the quantile scale itself, the broken variant, a twelfth of a square is lost in the tails."""
    assert explained(normal_shares()) > 0.96
    monkeypatch.setattr(model, "TAIL_ROOM", 1.0)
    assert explained(normal_shares()) < 0.93


def test_steps_of_correlated_waves_are_divided_by_their_matrix() -> None:
    _, variance, alike = model.wave_moments(normal_shares(), model.heights_of(normal_shares()), 5)
    curvature = torch.cat([torch.ones(1, dtype=torch.float64), 100 * variance[0]])[None]
    matrix = steps.wave_matrix(curvature, curvature, alike)
    assert float((alike[0] - torch.eye(5)).abs().max()) > 0.2, "a test that can fail"
    truth = torch.arange(6, dtype=torch.float64)[None]
    whole = torch.eye(6, dtype=torch.float64)
    whole[1:, 1:] = alike[0]
    whole = curvature[0].sqrt()[:, None] * whole * curvature[0].sqrt()
    assert torch.allclose(steps.divided(truth @ whole, curvature, matrix), truth)


def test_a_number_of_one_value_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value lies off the middle of its bin, so that its waves would be constants beside the constant."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 3, generator=generator).div(4).clamp(-1, 1)
    x[:, 2] = 0.4
    y = (torch.rand(3000, generator=generator) < torch.sigmoid(4 * x[:, 0] - 3 * x[:, 1])).long()
    run = fitted(x, y, epsilon=8.0)
    weights, features = run.posterior.centre.view(1, -1), run.posterior.module.features(x)
    part = run.posterior.module.recipe.groups()[2]
    assert float((features[:, part] @ weights[:, part].T).abs().max()) == 0
    assert log_loss(run.posterior, x, y) < 0.58
    monkeypatch.setattr(model, "ONE_VALUE", 2.0)
    assert float(fitted(x, y, epsilon=8.0).posterior.centre.view(1, -1)[:, part].abs().max()) > 0


def test_the_sharpest_direction_shows_where_a_way_has_a_small_part_in_it() -> None:
    """Nineteen directions of curvature 1 and one of 16, a fifth of the way's square: its mean curvature is 4."""
    sharp, divisor = torch.ones(1, 20, dtype=torch.float64), torch.full((1, 20), 3.0, dtype=torch.float64)
    sharp[0, 0] = 16.0
    way = torch.full((1, 20), math.sqrt(0.8 / 19), dtype=torch.float64)
    way[0, 0] = math.sqrt(0.2)
    before = (torch.zeros_like(way), torch.zeros_like(way), torch.zeros(2, dtype=torch.float64))
    gradient, assumed = 3 * sharp * way, float((divisor * way.square()).sum())
    (mean,), _ = steps.sharpness(before, (), 1.0, way, gradient, assumed, 0.0)
    assert mean == pytest.approx(4.0)
    metric = steps.StepMetric(divisor, torch.ones(1, 20, 1, 1, dtype=torch.float64))
    steepest = steps.steepness(before, gradient, metric, assumed, 0.0)
    assert 7 < steepest <= 16
    recipe = model.AdditiveRecipe((0,) * 20, 1)
    pull = torch.ones(1, recipe.features, dtype=torch.float64)
    rates = [steps.largest_rate(recipe, (mean,), met, pull, 13) for met in (0.0, steepest)]
    assert 16 * rates[0] > 2 * (1 + steps.MOMENTUM), "without it steps would go to and fro"
    assert rates[1] < 0.75 * rates[0]
    noise = torch.randn(1, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert steps.steepness(before, noise, metric, assumed, 1.0) == 0


def test_a_number_of_nine_values_has_no_waves_that_seem_not_to_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve waves at nine known places would be correlated in full; where in its bin a value lies nobody knows."""
    shares = torch.zeros(1, model.bins(1), dtype=torch.float64)
    shares[0, torch.linspace(5, model.bins(1) - 6, 9).long()] = 1 / 9

    def least() -> float:
        return float(torch.linalg.eigvalsh(model.wave_moments(shares, model.heights_of(shares), 12)[2])[0, 0])

    assert least() > 1e-3
    monkeypatch.setattr(model, "PLACES_IN_A_BIN", (0.0,))
    assert least() < 1e-9


def test_what_steps_say_of_correlated_waves_is_read_along_their_axes() -> None:
    """A gradient speaks of all waves of its number: wave by wave, the broken variant, it says something else."""
    _, variance, alike = model.wave_moments(normal_shares(), model.heights_of(normal_shares()), 5)
    variances = torch.cat([torch.ones(1, dtype=torch.float64), variance[0]])
    axes = steps.Axes.of(variances, alike)
    root = variances[1:].sqrt()
    curvature = torch.eye(6, dtype=torch.float64)
    curvature[1:, 1:] = root[:, None] * alike[0] * root
    truth = torch.arange(6, dtype=torch.float64)[None]
    gradient = -truth @ curvature
    assert torch.allclose(axes.back(-axes.along(gradient) / axes.variances), truth)
    assert not torch.allclose(-gradient / variances, truth, rtol=0.1)
    doubt = torch.rand(1, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose((axes.variances_back(doubt) * variances).sum(), (doubt * axes.variances).sum())


def test_shares_of_the_histogram_count_where_effects_are_large() -> None:
    """Skewed effects: steps have led to a constant of 1.2 where half of the records belong to either class."""
    sums = torch.tensor([[1e6, 1e6], [-0.6e6, 0.6e6], [0.0, 0.0]], dtype=torch.float64)
    even = torch.full((2,), 0.5, dtype=torch.float64)
    start, spread = torch.zeros(2, dtype=torch.float64), torch.full((2,), 6.0, dtype=torch.float64)
    shares, _ = levels.shares_of(sums, start, 1.0, 1000, spread, (even, 0.005))
    assert float(shares[1]) == pytest.approx(0.5, abs=0.01)
    alone, _ = levels.shares_of(sums, start, 1.0, 1000, spread, (even, math.inf))
    assert float(alone[1]) > 0.55
    here = torch.tensor([-0.6, 0.6], dtype=torch.float64)
    level, _ = levels.constants_of((even, 0.005 * even), spread, spread, here, (here, 1e-6 * even))
    assert level.tolist() == pytest.approx(here.tolist(), abs=0.01)
    level, _ = levels.constants_of((even, 0.005 * even), spread, spread, here, (here, 100 * even))
    assert float(level[1]) == pytest.approx(0.0, abs=0.03), "what noise says of a constant is not believed"


def test_a_clip_does_not_make_a_rare_class_rarer() -> None:
    """One record in fifty, whose residual is cut at .65 of the longest: read as it is, the gradient says two thirds."""
    share, level = torch.tensor([0.98, 0.02], dtype=torch.float64), torch.tensor([0.0, -4.0], dtype=torch.float64)
    expected, spread = level.softmax(0), torch.full((2,), 1e-9, dtype=torch.float64)
    kept = levels.passing(expected, 0.65)
    residual = (share * kept).sum() * expected - share * kept
    sums = torch.stack([torch.full_like(level, 1e9), torch.zeros_like(level), 1e9 * 1000 * residual])
    unknown = (torch.full_like(share, 0.5), math.inf)
    found, _ = levels.shares_of(sums, level, 1.0, 1000, spread, unknown, clip=0.65)
    assert found.tolist() == pytest.approx(share.tolist(), rel=0.01)
    plain, _ = levels.shares_of(sums, level, 1.0, 1000, spread, unknown)
    assert float(plain[1]) < 0.75 * float(share[1])
