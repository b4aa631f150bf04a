"""One posterior sample: the right law, the right price, and what happens when either is off."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.mechanism.noise import NoiseStream
from confide.mechanism.posterior_sampling import PosteriorSampling, _LogTarget
from confide.mechanism.sampled_losses import Products
from confide.privacy.events import PureEvent

MECHANISM = PosteriorSampling(epsilon=2.0, radius=4.0, feature_bound=1.0, prior_scale=1.5)


def records(count: int = 25) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=generator) * 2 - 1
    y = (torch.rand(count, generator=generator) < torch.sigmoid(6 * x[:, 0] + 1)).long()
    return x, y


@cache
def grid() -> Tensor:
    """Points of the ball, near enough to each other that its edge is no staircase."""
    side = torch.linspace(-MECHANISM.radius, MECHANISM.radius, 601, dtype=torch.float64)
    square = torch.cartesian_prod(side, side)
    return square[square.norm(dim=1) <= MECHANISM.radius]


def density(mechanism: PosteriorSampling, x: Tensor, y: Tensor, temper: float | None = None) -> Tensor:
    """The posterior of slope and intercept on the grid, from its definition."""
    theta = grid()
    rows = torch.cat([x, torch.ones_like(x)], 1).double()
    rows = rows * (mechanism.feature_bound / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    signs = 2 * y.double() - 1
    losses = [torch.nn.functional.softplus(-(part @ rows.T) * signs).sum(1) for part in theta.split(10_000)]
    energy = torch.cat(losses) * (temper or mechanism.temper)
    energy = energy + theta.square().sum(1) / (2 * (mechanism.prior_scale or 1) ** 2)
    mass = (-energy).softmax(0)
    return mass


@pytest.fixture(scope="module")
def sample() -> Tensor:
    """One exact draw, and the chain from there on, every fifth step of which is nearly independent."""
    target, stream = _LogTarget(MECHANISM, *records()), NoiseStream(7)
    theta, found = target.sample(stream), []
    for count in range(5 * 500):
        theta = target.advance(theta, stream)
        if count % 5 == 4:
            found.append(theta)
    return torch.stack(found)


class TestLaw:
    def distances(self, sample: Tensor, mass: Tensor) -> list[float]:
        """Largest gap between the two distribution functions, for slope, intercept and norm, times sqrt(count)."""
        theta = grid()
        found = []
        for read in (lambda t: t[:, 0], lambda t: t[:, 1], lambda t: t.norm(dim=1)):
            order = read(theta).argsort()
            places, cumulated = read(theta)[order].numpy(), mass[order].cumsum(0).numpy()
            values = np.sort(read(sample).numpy())
            expected = np.interp(values, places, cumulated)
            found.append(
                float(np.abs(expected - (np.arange(len(values)) + 0.5) / len(values)).max() * len(values) ** 0.5)
            )
        return found

    def inner_draws(self, epsilon: float, centre: list[float]) -> tuple[float, float]:
        """Distances of inner draws with a long step from their law, and from the envelope without rejection."""
        x, y = torch.full((60, 1), 0.4), (torch.arange(60) % 3 > 0).long()
        mechanism = replace(MECHANISM, epsilon=epsilon)
        target, stream, step = _LogTarget(mechanism, x, y), NoiseStream(3), 0.3
        near, pulled = torch.tensor([1.0, -1.0]).double(), torch.tensor(centre).double()
        found = torch.stack([target.proximal_draw(near, pulled, step, stream) for _ in range(1000)])
        pull = (grid() - pulled).square().sum(1) / (2 * step)
        mass = (density(mechanism, x, y).log() - pull).softmax(0)
        envelope = (-pull - grid() @ target.slope(target.minimiser(near, 1 / step, pulled, 50))).softmax(0)
        return max(self.distances(found, mass)), max(self.distances(found, envelope))

    def test_the_inner_draw_is_exact_even_for_a_long_step(self) -> None:
        """A rejection left out, or anchored at the wrong tangent, would leave the Gaussian envelope."""
        exact, envelope = self.inner_draws(4.0, [0.5, -0.3])
        assert exact < 1.95
        assert envelope > 2.5

    @pytest.mark.parametrize("centre", [[4.4, 2.0], [4.7, 2.4]])
    def test_the_inner_draw_is_exact_at_the_edge(self, centre: list[float]) -> None:
        """Where the envelope lies a little or far beyond the ball, its tail inside is drawn."""
        assert self.inner_draws(0.1, centre)[0] < 1.95

    def test_data_that_press_against_the_edge(self) -> None:
        """Separable records want coefficients beyond the ball: the posterior is a thin layer at its edge."""
        x = torch.linspace(-1, 1, 200)[:, None]
        mechanism = replace(MECHANISM, epsilon=4.0, prior_scale=3.0)
        target, stream = _LogTarget(mechanism, x, (x[:, 0] > 0).long()), NoiseStream(3)
        theta, found = target.start(stream)[0], []
        for count in range(900):
            theta = target.advance(theta, stream)
            if count >= 200 and count % 4 == 0:
                found.append(theta)
        mass = density(mechanism, x, (x[:, 0] > 0).long())
        norms = torch.stack(found).norm(dim=1)
        assert 0.9 * mechanism.radius < norms.mean() < mechanism.radius
        expected = (mass * grid().norm(dim=1)).sum()
        assert (norms.mean() - expected).abs() < 0.02 * mechanism.radius

    def test_draws_follow_the_posterior(self, sample: Tensor) -> None:
        # Kolmogorov: 1.95 is exceeded with probability 0.001.
        assert max(self.distances(sample, density(MECHANISM, *records()))) < 1.95

    def test_a_temper_off_by_a_factor_of_two_is_caught(self, sample: Tensor) -> None:
        assert max(self.distances(sample, density(MECHANISM, *records(), temper=2 * MECHANISM.temper))) > 1.95
        assert max(self.distances(sample, density(MECHANISM, *records(), temper=MECHANISM.temper / 2))) > 1.95

    def test_the_ball_is_never_left(self, sample: Tensor) -> None:
        assert sample.norm(dim=1).max() <= MECHANISM.radius

    def test_a_smaller_tolerance_takes_more_steps(self) -> None:
        target = _LogTarget(MECHANISM, *records())
        _, divergence = target.start(NoiseStream(1))
        assert 0 < divergence < 50
        tight = _LogTarget(replace(MECHANISM, tolerance=1e-14), *records())
        assert 20 < target.steps(divergence) < tight.steps(divergence) < 1000

    def test_the_bound_on_the_start_holds(self) -> None:
        """Against the divergence of the start from the posterior, both on the grid."""
        target = _LogTarget(MECHANISM, *records())
        stream = NoiseStream(1)
        starts = torch.stack([target.start(stream)[0] for _ in range(2000)])
        centre, small = starts.mean(0), (starts - starts.mean(0)).norm(dim=1).max()
        theta, mass = grid(), density(MECHANISM, *records())
        inside = (theta - centre).norm(dim=1) <= small
        actual = -(mass[inside] * inside.sum()).log().mean().item()
        bound = target.start(stream)[1]
        assert actual <= bound
        assert bound < actual + 5


class TestProducts:
    def test_sparse_and_dense_agree(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(4000, 30, generator=generator, dtype=torch.float64)
        rows *= torch.rand(4000, 30, generator=generator) < 0.1
        sparse, theta = Products(rows), torch.randn(3, 30, generator=generator, dtype=torch.float64)
        assert sparse.sparse is not None
        assert torch.allclose(sparse.with_each(theta), theta @ rows.T)
        assert torch.allclose(sparse.with_each(theta[0]), rows @ theta[0])
        assert torch.allclose(sparse.weighted(rows[:, 0]), rows[:, 0] @ rows)


class TestPrivacy:
    def largest_ratio(self, mechanism: PosteriorSampling, one: Any, other: Any) -> float:
        first, second = density(mechanism, *one), density(mechanism, *other)
        return (first / second).log().abs().max().item()

    def worst(self) -> tuple[Tensor, Tensor]:
        """A record at the edge of what is allowed, mislabelled."""
        return torch.tensor([[1e6]]), torch.tensor([0])

    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
    def test_adding_a_record_moves_no_density_by_more_than_epsilon(self, epsilon: float) -> None:
        mechanism = replace(MECHANISM, epsilon=epsilon)
        x, y = records()
        added = torch.cat([x, self.worst()[0]]), torch.cat([y, self.worst()[1]])
        ratio = self.largest_ratio(mechanism, (x, y), added)
        assert ratio <= mechanism.event().epsilon * (1 + 1e-9)
        assert ratio > 0.3 * mechanism.event().epsilon, "the bound is not far from what a record can do"

    def test_replacing_a_record_costs_twice_as_much(self) -> None:
        mechanism = replace(MECHANISM, adjacency="replace-one")
        x, y = records()
        first = torch.cat([x, self.worst()[0]]), torch.cat([y, torch.tensor([0])])
        second = torch.cat([x, self.worst()[0]]), torch.cat([y, torch.tensor([1])])
        ratio = self.largest_ratio(mechanism, first, second)
        assert 0.3 * mechanism.epsilon < ratio <= mechanism.event().epsilon * (1 + 1e-9)
        careless = self.largest_ratio(MECHANISM, first, second)
        assert careless > mechanism.epsilon / 2 * 1.2, "the add-remove temper would not do"

    def test_the_event_is_what_the_draw_costs(self) -> None:
        assert MECHANISM.event() == PureEvent(2.0, "add-remove", 1, (1 + math.exp(2.0)) * 1e-10)
        assert MECHANISM.event(3).count == 3
        generous = PosteriorSampling(epsilon=50.0, radius=4.0)
        assert generous.temper == 1.0
        assert generous.event().epsilon == 4.0, "the posterior itself is more private than was asked for"

    def test_hostile_records_count_as_zero_or_within_bounds(self) -> None:
        x = torch.tensor([[math.nan], [math.inf], [1e38], [1e-45]])
        target = _LogTarget(MECHANISM, x, torch.tensor([0, 1, 0, 1]))
        assert torch.isfinite(target.losses.rows).all()
        assert target.losses.rows.norm(dim=1).max() <= 1 + 1e-12
        assert (target.losses.rows[:2] == 0).all()

    def test_a_label_that_is_no_class_does_not_lengthen_a_row(self) -> None:
        """2 y - 1 in place of the sign would multiply a record by 13 here, and its price with it."""
        target = _LogTarget(MECHANISM, torch.ones(3, 1), torch.tensor([7.0, -5.0, math.nan]))
        assert target.losses.rows.norm(dim=1).max() <= 1 + 1e-12

    def test_no_records_is_the_prior_on_the_ball(self) -> None:
        stream = NoiseStream(7)
        draws = torch.stack([MECHANISM.draw(torch.zeros(0, 1), torch.zeros(0), stream) for _ in range(5)])
        assert torch.isfinite(draws).all()
        assert draws.norm(dim=1).max() <= 4.0


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 0.0},
        {"radius": -1.0},
        {"feature_bound": math.inf},
        {"prior_scale": 0.0},
        {"tolerance": 0.01},
        {"epsilon": 30.0, "radius": 30.0},  # the slack would be above 1
    ],
)
def test_bad_settings_name_the_argument(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        PosteriorSampling(**{"epsilon": 1.0, **options})
