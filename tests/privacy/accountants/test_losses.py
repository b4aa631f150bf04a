"""Loss distributions: the profiles they come from, that they dominate them, and that composition loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from confide.privacy.accountants.composition import Composition, Jumps, Tail
from confide.privacy.accountants.losses import Grid, LossPmf, Unit, dot_masses, half_grid, loss_pmf, on_grid
from confide.privacy.accountants.profiles import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    poisson_replace_delta,
    pure_delta,
    sampled_delta,
    sampled_delta_reversed,
)

UNITS = [
    Unit("gaussian", 0.7),
    Unit("poisson", 1 / 1.3, 0.0043),
    Unit("poisson", 1 / 0.5, 0.3),
    Unit("poisson", 1 / 70, 0.9),
    Unit("poisson-replace", 1 / 1.3, 0.0043),
    Unit("fixed-size", 2 / 1.3, 0.01),
    Unit("pure", 0.31234),
]


def profile(unit: Unit, epsilon: np.ndarray) -> np.ndarray:
    if unit.shape == "gaussian":
        return gaussian_delta(unit.parameter, epsilon)
    if unit.shape == "poisson-replace":
        return poisson_replace_delta(1 / unit.parameter, unit.rate, epsilon)
    if unit.shape == "pure":
        return pure_delta(unit.parameter, epsilon)
    return sampled_delta(unit.parameter, unit.rate, epsilon)


def discrete_delta(pmf: LossPmf, epsilon: float) -> float:
    above = pmf.losses > epsilon
    return pmf.infinity + float(pmf.probs[above] @ -np.expm1(epsilon - pmf.losses[above]))


def integrated(upper: object, lower: object, epsilon: float) -> float:
    """The hockey-stick divergence by quadrature: an independent way to every profile."""

    def positive_part(x: float) -> float:
        return max(0.0, upper(x) - math.exp(epsilon) * lower(x))  # type: ignore[operator]

    return float(quad(positive_part, -12, 12, points=np.linspace(-6, 6, 25), limit=400)[0])


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.4, 1.5])
def test_profiles_agree_with_quadrature(epsilon: float) -> None:
    # Catches a wrong sign, a forgotten rate or a swapped pair in any closed form.
    mu, rate, e = 0.8, 0.3, np.array([epsilon])

    def one(x: float, mean: float = 0.0) -> float:
        return math.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi)

    def moved(x: float) -> float:
        return one(x, mu)

    def mixed(x: float) -> float:
        return (1 - rate) * one(x) + rate * one(x, mu)

    def mirrored(x: float) -> float:
        return mixed(-x)

    assert gaussian_delta(mu, e)[0] == pytest.approx(integrated(moved, one, epsilon), abs=1e-8)
    assert sampled_delta(mu, rate, e)[0] == pytest.approx(integrated(mixed, one, epsilon), abs=1e-8)
    assert sampled_delta_reversed(mu, rate, e)[0] == pytest.approx(integrated(one, mixed, epsilon), abs=1e-8)
    found = poisson_replace_delta(1 / mu, rate, e)[0]
    assert found == pytest.approx(integrated(mirrored, mixed, epsilon), abs=1e-8)


def test_a_sampled_profile_below_zero_is_that_of_the_reversed_pair() -> None:
    epsilon = np.array([1e-3, 0.01, 0.1, 0.3])
    direct = sampled_delta(0.8, 0.3, -epsilon)
    by_reversal = -np.expm1(-epsilon) + np.exp(-epsilon) * sampled_delta_reversed(0.8, 0.3, epsilon)
    np.testing.assert_allclose(direct, by_reversal, rtol=1e-12)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
def test_gaussian_epsilon_and_mu_are_inverse_and_on_the_safe_side(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, np.array([epsilon]))[0] <= delta
    if epsilon > 0:
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-9)
        assert gaussian_delta(mu, np.array([epsilon * (1 - 1e-6)]))[0] > delta


@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("step", [1e-2, 1e-3])
def test_the_grid_only_adds(unit: Unit, step: float) -> None:
    # Catches rounding a loss down: then the discrete profile falls below the true one somewhere.
    pmf = loss_pmf(unit, Grid(step, 0.0065, 9.0))
    for epsilon in np.linspace(0, pmf.losses[-1], 57):
        true = profile(unit, np.array([epsilon]))[0]
        assert discrete_delta(pmf, float(epsilon)) >= true * (1 - 1e-9) - 1e-16


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_both_distributions_of_the_pair_sum_to_one(unit: Unit) -> None:
    pmf = loss_pmf(unit, Grid(1e-3, 0.0065, 9.0))
    # Masses are rounded up, so that there is never less than one, and hardly more.
    assert 1 - 1e-13 <= pmf.probs.sum() + pmf.infinity <= 1 + 1e-10
    assert 1 - 1e-13 <= (pmf.probs @ np.exp(-pmf.losses)) + pmf.only_q <= 1 + 1e-10


def test_rounding_losses_down_would_be_caught() -> None:
    """The broken variant: the same masses one dot lower. Its profile falls below the truth."""
    unit = UNITS[1]
    pmf = loss_pmf(unit, Grid(1e-3, 0.0065, 9.0))
    lowered = replace(pmf, index=pmf.index - 1)
    assert discrete_delta(lowered, 0.01) < profile(unit, np.array([0.01]))[0]


def test_the_reversed_distribution_is_that_of_adding_a_record() -> None:
    unit = UNITS[2]
    backward = loss_pmf(unit, Grid(1e-3, 0.0065, 9.0)).reversed()
    for epsilon in (0.0, 0.1, 0.2, 0.3):
        true = sampled_delta_reversed(unit.parameter, unit.rate, np.array([epsilon]))[0]
        assert true * (1 - 1e-9) <= discrete_delta(backward, epsilon) <= true * 1.001 + 1e-12


def test_the_sparse_tail_costs_next_to_nothing() -> None:
    # Catches a grid that thins out inside the bulk.
    unit, step = UNITS[1], 1e-4
    sparse = loss_pmf(unit, Grid(step, 0.0065, 9.0))
    index = np.arange(0, sparse.index[-1] + 1)
    masses = dot_masses(sampled_delta(unit.parameter, unit.rate, on_grid(index, step)), index, step)
    dense_second_moment = float(masses @ on_grid(index[1:], step) ** 2)
    positive = sparse.losses > 0
    sparse_second_moment = float(sparse.probs[positive] @ sparse.losses[positive] ** 2)
    assert len(sparse.probs) < len(index) / 10
    assert sparse_second_moment == pytest.approx(dense_second_moment, rel=1e-4)


def test_grids_rise_and_start_at_zero() -> None:
    for unit in UNITS:
        grid = half_grid(unit, Grid(1e-4, 0.0065, 9.0))
        assert grid[0] == 0
        assert np.all(np.diff(grid) > 0)


@settings(deadline=None, max_examples=25)
@given(mu=st.floats(0.02, 2.0), count=st.integers(1, 50), log_delta=st.floats(-25, -2))
def test_composed_gaussians_match_the_closed_form(mu: float, count: int, log_delta: float) -> None:
    # Catches errors of window, wrap-around and tilt: never below the truth, and close above it.
    delta = math.exp(log_delta)
    pmf = loss_pmf(Unit("gaussian", mu), Grid(1e-3 * max(mu, 0.1), 0.0065, 12.0))
    found = Composition(((pmf, count),)).epsilon(delta)
    true = gaussian_epsilon(mu * math.sqrt(count), delta)
    assert true <= found <= true * 1.01 + 2e-3 * mu * math.sqrt(count)


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-30, 1e-100])
def test_small_deltas_keep_their_accuracy(delta: float) -> None:
    # A plain Fourier transform has rounding errors near 1e-13 and would answer infinity, or worse, zero.
    pmf = loss_pmf(Unit("gaussian", 0.3), Grid(1e-3, 0.0065, 37.0))
    found = Composition(((pmf, 9),)).epsilon(delta)
    true = gaussian_epsilon(0.9, delta)
    assert true <= found <= true * 1.002


@pytest.mark.parametrize("tilt", [0.0, 0.5, 2.0, 5.0])
def test_every_tilt_gives_an_upper_bound(tilt: float) -> None:
    pmf = loss_pmf(Unit("gaussian", 0.3), Grid(1e-3, 0.0065, 12.0))
    tail = Composition(((pmf, 9),)).tail(tilt, 1e-12)
    for epsilon in (0.5, 1.0, 3.0):
        true = gaussian_delta(0.9, np.array([epsilon]))[0]
        assert true <= tail.delta(epsilon) <= true * 1.01 + 2e-9


def test_wrapped_losses_are_never_lost() -> None:
    """A window far too small: the answer is loose and still an upper bound."""
    pmf = loss_pmf(Unit("gaussian", 0.3), Grid(1e-3, 0.0065, 12.0))
    composition = Composition(((pmf, 9),))

    class Cramped(Composition):
        def window(self, tilt: float, negligible: float) -> tuple[int, int, float]:
            low, high, _ = composition.window(tilt, negligible)
            middle = (2 * low + high) // 3
            order = 2.0
            return low, middle, math.exp(min(0.0, self.cumulant(order) - order * middle * self.step))

    for epsilon in (0.0, 0.5, 1.0):
        assert Cramped(composition.parts).tail(0.0, 1e-9).delta(epsilon) >= gaussian_delta(0.9, np.array([epsilon]))


def test_rounding_errors_are_counted_against_us() -> None:
    losses = np.arange(10) * 0.1
    exact = Tail(losses, np.full(10, 0.1), 0.0, 0.0, 0.0, 0.0)
    doubtful = Tail(losses, np.full(10, 0.1), 0.0, 0.0, 0.0, 1e-4)
    assert doubtful.delta(0.2) == pytest.approx(exact.delta(0.2) + 1e-4, rel=1e-5)
    assert doubtful.epsilon(0.05) > exact.epsilon(0.05)


CUTS = [0.05, 0.2, 0.5, 1.0]


def split_deltas(cut: float, epsilon: float, jumps: Callable[[Jumps], Jumps]) -> tuple[float, float]:
    """delta of nine Gaussians with losses above the cut counted apart, and the true one."""
    pmf = loss_pmf(Unit("gaussian", 0.3), Grid(1e-3, 0.0065, 12.0, cut))
    found = Composition(((pmf, 9),)).raised(-2 * cut).split(cut)
    assert found.jumps is not None
    found = replace(found, jumps=jumps(found.jumps))
    return found.tail(0.0, 1e-12).delta(epsilon), float(gaussian_delta(0.9, np.array([epsilon]))[0])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 2.0])
def test_jumps_that_are_counted_apart_only_add(cut: float, epsilon: float) -> None:
    found, true = split_deltas(cut, epsilon, lambda jumps: jumps)
    assert found >= true
    assert cut < 1.0 or found <= 1.2 * true


@pytest.mark.parametrize("left_out", ["masses", "advantage"])
def test_jumps_and_what_the_rest_adds_to_one_are_needed(left_out: str) -> None:
    """The broken variants: jumps that are forgotten, or one to which the other releases add nothing."""

    def spoil(jumps: Jumps) -> Jumps:
        return replace(jumps, **{left_out: 0 * getattr(jumps, left_out)})

    assert any(found < true for found, true in (split_deltas(cut, 0.1, spoil) for cut in CUTS))


def test_splitting_again_begins_with_the_whole() -> None:
    pmf = loss_pmf(Unit("gaussian", 0.3), Grid(1e-3, 0.0065, 12.0))
    whole = Composition(((pmf, 9),))
    once, twice = whole.split(0.2), whole.split(0.5).split(0.2)
    assert once.tail(0.0, 1e-12).delta(0.5) == twice.tail(0.0, 1e-12).delta(0.5)


def test_masses_too_small_for_a_number_come_back_reversed() -> None:
    """On a grid of steps of 1000 nearly all of the left side is below e^-745 under P, and not under Q."""
    pmf = loss_pmf(Unit("poisson", 30.0, 0.5), Grid(1000.0, 1000.0, 9.0)).reversed()
    assert 1 - 1e-12 <= pmf.probs.sum() + pmf.infinity <= 1 + 1e-9
