"""Moments for given distances, divergences of Gaussians, and bounds on means: formulae against integration, and what
each bound on a mean is worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from confide.errors import UnsupportedEvents
from confide.privacy.bayesian import (
    Distances,
    binary_mean_bound,
    exact_binary_mean_bound,
    group_privacy,
    log_moment,
    log_sampled_moment,
    renyi_gaussians,
    smallest_honest_moment,
)
from confide.privacy.bayesian.moments import LEVELS, WHOLE_ORDERS, ObservedSteps, log_mean_bounds
from confide.privacy.events import GaussianEvent


def integrated_moment(order: float, distance: float, noise: float, rate: float, reverse: bool = False) -> float:
    """log E (p / q)^order under p = (1 - rate) N(0) + rate N(distance) and q = N(0); `reverse` exchanges them."""

    def density(x: float) -> float:
        base = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        ratio = 1 - rate + rate * math.exp(x * distance / noise - distance**2 / (2 * noise**2))
        return base * ratio**-order if reverse else base * ratio ** (order + 1)

    return math.log(integrate.quad(density, -40, 40, limit=500, epsabs=0, epsrel=1e-12)[0])


@pytest.mark.parametrize(("order", "distance", "noise", "rate"), [(1, 1, 1, 0.01), (8, 1, 1, 0.01), (5, 0.3, 2, 0.5)])
def test_moment_by_integration(order: int, distance: float, noise: float, rate: float) -> None:
    """Catches lambda for lambda + 1 experiments, a lost factor 2, and the wrong sign in the paper's (53)."""
    expected = integrated_moment(order, distance, noise, rate)
    assert log_moment(order, distance, noise, rate) == pytest.approx(expected, rel=1e-9)


def test_the_reversed_moment_is_the_smaller_one() -> None:
    """c^L is enough; the c^R that the paper prints is a loose bound of a smaller number."""
    left, right = integrated_moment(8, 1.0, 1.0, 0.01), integrated_moment(8, 1.0, 1.0, 0.01, reverse=True)
    assert left == pytest.approx(0.0143, abs=5e-5)
    assert right == pytest.approx(0.0051, abs=5e-5)
    k = np.arange(9)
    printed = math.log(float(stats.binom.pmf(k, 8, 0.01) @ np.exp((k * k + k) / 2)))
    assert printed == pytest.approx(0.596, abs=5e-4)


def test_moments_of_high_order_neither_overflow_nor_lose_digits() -> None:
    large = log_moment(4096, [0.0, 1e-6, 1.0], 0.5, 0.01)
    # the term k = lambda + 1 dominates: (lambda + 1) log q + (lambda + 1) lambda / (2 z^2)
    assert large[2] == pytest.approx(4097 * math.log(0.01) + 4097 * 4096 / (2 * 0.25), rel=1e-9)
    assert large[0] == 0
    # a small moment is lambda (lambda + 1) / 2 q^2 d^2 / z^2 to first order: ten digits, where log(sum) keeps four
    assert large[1] == pytest.approx(4096 * 4097 / 2 * 1e-4 * 1e-12 / 0.25, rel=1e-4)
    assert log_moment(1, 1e-9, 1.0, 0.01) == pytest.approx(1e-4 * 1e-18, rel=1e-9)


def test_without_sampling_the_order_may_be_fractional() -> None:
    assert log_moment(2.5, 0.7, 1.3) == pytest.approx(2.5 * 3.5 * 0.49 / (2 * 1.69), rel=1e-12)
    with pytest.raises(ValueError, match=r"order=2.5.*whole number"):
        log_moment(2.5, 0.7, 1.3, 0.1)


def test_orders_go_beyond_1024() -> None:
    assert {1.0, 2.0, 33.0, 128.0, 256.0, 512.0, 1024.0, 4096.0} <= set(WHOLE_ORDERS)
    assert all(order == round(order) for order in WHOLE_ORDERS)


class TestRenyiDivergenceOfGaussians:
    def test_by_quadrature(self) -> None:
        """Catches v1 and v2 exchanged, and the order on the wrong variance."""

        def integrand(x: float) -> float:
            return float(stats.norm.pdf(x, 0.3, math.sqrt(1.1)) ** 3 * stats.norm.pdf(x, 0.0, math.sqrt(1.3)) ** -2)

        expected = math.log(integrate.quad(integrand, -30, 30, epsabs=0, epsrel=1e-12)[0]) / 2
        found = renyi_gaussians(3, [0.3], [1.1], [0.0], [1.3])
        assert found == pytest.approx(expected, rel=1e-9)
        assert found == pytest.approx(0.0958728, abs=5e-8)

    def test_infinite_where_it_does_not_exist(self) -> None:
        """v2 / v1 must exceed (a - 1) / a in every coordinate: at a = 33 a variance may not shrink by 3.04 %."""
        edge = 32 / 33
        assert np.isfinite(renyi_gaussians(33, [0.0], [1.0], [0.0], [edge * 1.001]))
        assert np.isinf(renyi_gaussians(33, [0.0], [1.0], [0.0], [edge * 0.999]))
        assert np.isinf(renyi_gaussians(33, [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.9]))

    def test_equal_variances_and_order_one(self) -> None:
        assert renyi_gaussians(7, [1.0, 2.0], [4.0, 4.0], [0.0, 0.0], [4.0, 4.0]) == pytest.approx(7 * 5 / 8)
        kl = renyi_gaussians(1, [1.0], [2.0], [0.0], [3.0])
        assert renyi_gaussians(1 + 1e-7, [1.0], [2.0], [0.0], [3.0]) == pytest.approx(float(kl), rel=1e-5)

    def test_sampling_recovers_the_gaussian_moment(self) -> None:
        """The general sampled sum with k (k - 1) d^2 / (2 z^2) is log_moment; infinite terms stay infinite."""
        k = np.arange(8)
        base = k * (k - 1) * 0.4**2 / (2 * 1.1**2)
        assert log_sampled_moment(6, base, 0.03) == pytest.approx(float(log_moment(6, 0.4, 1.1, 0.03)), rel=1e-9)
        base[-1] = np.inf
        assert np.isinf(log_sampled_moment(6, base, 0.03))


class TestBinaryEstimator:
    def test_value_of_the_paper(self) -> None:
        """100 zeros: a bound of 0.01 has failure probability 0.99^101 = 0.36."""
        assert binary_mean_bound(0, 100, 0.99**101) == pytest.approx(0.01, rel=1e-9)
        assert binary_mean_bound(0, 100, 0.0) == 1.0
        assert binary_mean_bound(0, 100, 1e-15) > 0.28

    def test_it_is_credible_rather_than_exact(self) -> None:
        """Just above its bound for no ones, the probability of seeing none exceeds the stated failure."""
        failure = 0.05
        rho = binary_mean_bound(0, 100, failure) + 1e-9
        assert (1 - rho) ** 100 > failure
        assert (1 - exact_binary_mean_bound(0, 100, failure)) ** 100 == pytest.approx(failure)
        assert exact_binary_mean_bound(3, 0, failure) == 1.0


def sample_bound(values: np.ndarray, rule: str, failure: float, log_largest: float) -> np.ndarray:
    """log bound on the mean for many samples at once: values has one row of log moments per sample."""
    event = GaussianEvent(1.0)
    steps = ObservedSteps([Distances(event, np.ones(values.shape[1]))] * len(values))
    return log_mean_bounds(steps, values.ravel(), rule, failure, np.full(len(values), log_largest))  # type: ignore[arg-type]


class TestBoundsOnMeans:
    def test_student_t_misses_an_outlier_it_has_not_seen(self) -> None:
        """0.5 % of records have a large moment. With 50 records none is seen with probability 0.995^50 = 0.778, and
        then the bound, whose stated failure is 1e-15, lies below the mean. Why it is no guarantee."""
        random = np.random.default_rng(0)
        samples = np.where(random.random((20_000, 50)) < 0.005, 6.0, 0.0)
        mean = math.log(0.995 + 0.005 * math.exp(6.0))
        missed = np.mean(sample_bound(samples, "student-t", 1e-15, 6.0) < mean)
        assert missed == pytest.approx(0.778, abs=0.01)
        # the bound that holds for every distribution does not miss once
        assert not np.any(sample_bound(samples, "bernstein", 1e-15, 6.0) < mean)

    @pytest.mark.parametrize(("deviation", "expected"), [(1.0, 0.065), (2.0, 0.26), (3.0, 0.57)])
    def test_student_t_on_heavy_tails(self, deviation: float, expected: float) -> None:
        """Stated failure 1 %, lognormal moments, 50 records."""
        samples = np.random.default_rng(1).normal(0.0, deviation, (20_000, 50))
        missed = np.mean(sample_bound(samples, "student-t", 0.01, math.inf) < deviation**2 / 2)
        assert missed == pytest.approx(expected, abs=0.02)

    def test_student_t_by_hand(self) -> None:
        """mean + t S / sqrt(m - 1) with m - 1 = 2 degrees of freedom, whose quantile is known in closed form."""
        failure = 0.05
        quantile = (1 - 2 * failure) * math.sqrt(2 / (4 * failure * (1 - failure)))
        values = np.array([[1.0, 2.0, 6.0]])
        expected = math.log(3.0 + quantile * math.sqrt(14 / 3) / math.sqrt(2))
        assert sample_bound(np.log(values), "student-t", failure, math.inf)[0] == pytest.approx(expected, rel=1e-9)

    def test_student_t_on_normal_values_is_as_stated(self) -> None:
        samples = np.log(np.random.default_rng(2).normal(10.0, 1.0, (20_000, 50)))
        missed = np.mean(sample_bound(samples, "student-t", 0.05, math.inf) < math.log(10.0))
        assert missed == pytest.approx(0.05, abs=0.006)

    def test_no_free_lunch(self) -> None:
        """Whatever was seen, an honest bound is at least (1 - failure^(1/m)) e^largest; Student-t goes below."""
        least = smallest_honest_moment(50, 0.01, 40.0)
        assert least == pytest.approx(math.log(1 - 0.01 ** (1 / 50)) + 40.0)
        # the reason: an atom of that mass at the largest value stays unseen with probability failure
        assert math.exp(50 * math.log1p(-math.exp(least - 40.0))) == pytest.approx(0.01)
        calm = np.full((1, 50), 0.1)
        assert sample_bound(calm, "bernstein", 0.01, 40.0)[0] >= least
        assert sample_bound(calm, "student-t", 0.01, 40.0)[0] < least - 30


def test_group_privacy_counter_example() -> None:
    """Gaussian with mu = 1, epsilon = 5, ten records: the paper's (k epsilon, k delta) claims 3.4e-5; it is 0.5."""
    delta = stats.norm.sf((5 - 0.5) / 1)
    claimed = 10 * delta
    true = stats.norm.sf((50 - 10**2 / 2) / 10)
    assert claimed == pytest.approx(3.397673124730053e-05, rel=1e-6)
    assert true == pytest.approx(0.5)
    epsilon, bound = group_privacy(5.0, delta, 10)
    assert (epsilon, bound) == (50.0, 1.0)
    assert group_privacy(0.1, 1e-6, 3)[1] == pytest.approx(1e-6 * (1 + math.exp(0.1) + math.exp(0.2)))
    assert group_privacy(0.0, 1e-6, 3) == (0.0, pytest.approx(3e-6))  # type: ignore[comparison-overlap]


def test_too_many_distances_are_rounded_up() -> None:
    values = np.random.default_rng(3).random(3 * LEVELS)
    steps = ObservedSteps([Distances(GaussianEvent(1.0, "poisson", 0.01), values)])
    rounded = steps.log_moments(8)
    exact = log_moment(8, values, 1.0, 0.01)
    assert np.all(rounded >= exact)
    assert np.all(rounded <= log_moment(8, values + 1.01 / LEVELS, 1.0, 0.01))


@pytest.mark.parametrize(
    ("event", "values", "weights", "message"),
    [
        (GaussianEvent(1.0), [-1.0], None, "finite number >= 0"),
        (GaussianEvent(1.0), [math.nan], None, "finite number >= 0"),
        (GaussianEvent(1.0), [1.0, 0.0], [0.5, 0.4], "summing to 1"),
    ],
)
def test_distances_are_checked(
    event: GaussianEvent, values: list[float], weights: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Distances(event, np.array(values), None if weights is None else np.array(weights))


def test_shuffled_batches_are_refused() -> None:
    with pytest.raises(UnsupportedEvents, match="shuffle"):
        Distances(GaussianEvent(1.0, "shuffle", 0.1), np.ones(3))
