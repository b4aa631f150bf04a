"""Rounding: every number of the PLD accountant is an upper bound in floating point too."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from scipy import fft, special

from confide.privacy.accountants import PLD
from confide.privacy.accountants.composition import _PER_LEVEL, Composition
from confide.privacy.accountants.losses import Grid, Unit, dot_masses, loss_pmf, reach_for
from confide.privacy.accountants.profiles import (
    _FUNCTION,
    gaussian_delta,
    gaussian_epsilon,
    poisson_replace_delta,
    pure_delta,
    sampled_delta,
    sampled_delta_reversed,
)
from confide.privacy.events import PureEvent
from tests.privacy.accountants import oracles

EPSILONS = (0.0, 1e-9, 1e-6, 1e-4, 0.01, 0.3, 1.0, 4.0, 15.0, 60.0)
RATES = (1e-7, 1e-4, 0.03, 0.5, 0.99)


def test_functions_are_as_accurate_as_assumed() -> None:
    """Eight units in the last place of what it is given, the assumption under all bounds."""
    points = np.random.default_rng(0).uniform(-37, 37, 300)
    with mpmath.workdps(40):
        for x in points:
            normal = mpmath.erfc(-mpmath.mpf(x) / mpmath.sqrt(2)) / 2
            assert abs(special.ndtr(x) / normal - 1) < _FUNCTION * (1 + x * x)
            logarithm = mpmath.log1p(-mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2) if x > 0 else mpmath.log(normal)
            assert abs(special.log_ndtr(x) / logarithm - 1) < _FUNCTION * (1 + max(x, 0) ** 2)
            if x > 0:
                scaled = mpmath.exp(mpmath.mpf(x) ** 2) * mpmath.erfc(mpmath.mpf(x))
                assert abs(special.erfcx(x) / scaled - 1) < _FUNCTION


Exact = Callable[[float], mpmath.mpf]
Computed = Callable[[np.ndarray], np.ndarray]


def cases() -> list[tuple[str, Computed, Exact]]:
    made: list[tuple[str, Computed, Exact]] = []
    for mu in (1e-4, 0.01, 0.7, 6.0):
        made.append((f"gaussian {mu}", lambda e, m=mu: gaussian_delta(m, e), lambda e, m=mu: oracles.gaussian(m, e)))
        for q in RATES:
            given = {"m": mu, "q": q}
            made += [
                (f"sampled {given}", lambda e, m=mu, q=q: sampled_delta(m, q, e), _bound(oracles.sampled, mu, q)),
                (
                    f"reversed {given}",
                    lambda e, m=mu, q=q: sampled_delta_reversed(m, q, e),
                    _bound(oracles.sampled_reversed, mu, q),
                ),
                (
                    f"replaced {given}",
                    lambda e, m=mu, q=q: poisson_replace_delta(1 / m, q, e),
                    _bound(oracles.replaced, 1 / mu, q),
                ),
            ]
    return made


def _bound(oracle: Callable[[float, float, float], mpmath.mpf], first: float, rate: float) -> Exact:
    return lambda epsilon: oracle(first, rate, epsilon)


@pytest.mark.parametrize(("name", "computed", "exact"), cases(), ids=lambda value: value if type(value) is str else "")
def test_profiles_are_rounded_up(name: str, computed: Computed, exact: Exact) -> None:
    """Never below sixty digits, and above them by a part that would be lost in any epsilon."""
    for epsilon, found in zip(EPSILONS, computed(np.array(EPSILONS)), strict=True):
        true = exact(epsilon)
        if true < 1e-290:  # beyond the range of floating point, counted as zero and never asked for
            continue
        assert found >= true, (name, epsilon)
        assert found <= true * (1 + 1e-6), (name, epsilon)
        assert found * (1 - 1e-6) < true  # the same rounded down would be caught


def test_masses_connect_dots_from_above() -> None:
    """With deltas as exact numbers: the profile of the floating-point masses, in many digits, misses no dot."""
    index = np.arange(0, 4000, 7)
    step = 1e-6
    deltas = gaussian_delta(0.003, index * step)
    masses = dot_masses(deltas, index, step)
    with mpmath.workdps(oracles.DIGITS):
        for i in range(0, len(index) - 1, 97):
            above = mpmath.mpf(float(deltas[-1]))
            for j in range(i + 1, len(index)):
                gap = mpmath.mpf(int(index[j] - index[i])) * mpmath.mpf(step)
                above += mpmath.mpf(float(masses[j - 1])) * -mpmath.expm1(-gap)
            assert above >= mpmath.mpf(float(deltas[i]))
            assert above <= mpmath.mpf(float(deltas[i])) * (1 + mpmath.mpf(10) ** -6)


@pytest.mark.parametrize("points", [256, 240, 270, 625])
@pytest.mark.parametrize("shape", ["spike", "spread", "ends", "random"])
def test_the_transform_errs_by_less_than_its_bound(points: int, shape: str) -> None:
    """Each frequency against forty digits; a transform in single precision would break the bound."""
    random = np.random.default_rng(1)
    values = {
        "spike": np.eye(points)[points // 3] / 3,
        "spread": np.full(points, 1 / 3),
        "ends": np.exp(-np.arange(points) / 3.0),
        "random": random.exponential(size=points),
    }[shape]
    values /= values.sum()
    found = fft.rfft(values)
    with mpmath.workdps(40):
        turns = [mpmath.expjpi(mpmath.mpf(-2 * k) / points) for k in range(points)]
        exact = [
            mpmath.fsum(mpmath.mpf(float(v)) * turns[j * k % points] for j, v in enumerate(values)) for k in (1, 7, 100)
        ]
    bound = _PER_LEVEL * math.log2(points)
    worst = max(abs(complex(found[k]) - complex(true)) for k, true in zip((1, 7, 100), exact, strict=True))
    assert worst <= bound
    coarse = fft.rfft(values.astype(np.float32))
    if shape == "random":
        assert max(abs(complex(coarse[k]) - complex(t)) for k, t in zip((1, 7, 100), exact, strict=True)) > bound


def test_the_way_back_errs_by_less_than_its_bound() -> None:
    random = np.random.default_rng(2)
    values = random.exponential(size=3000)
    values /= values.sum()
    again = fft.irfft(fft.rfft(values), 3000)
    assert np.linalg.norm(again - values) <= 2 * _PER_LEVEL * math.log2(3000) * np.linalg.norm(values)


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-12, 1e-25, 1e-80])
@pytest.mark.parametrize(("mu", "count"), [(0.02, 10_000), (0.3, 50), (1.5, 4)])
def test_composed_gaussians_against_the_closed_form(mu: float, count: int, delta: float) -> None:
    """The same code as for sampled releases, where the truth is known: never below, within 2 % above."""
    grid = Grid(2e-4 if mu < 0.1 else 1e-3, 0.0065, reach_for(1e-6 * delta / count))
    found = Composition(((loss_pmf(Unit("gaussian", mu), grid), count),), 1 << 22).epsilon(delta)
    true = gaussian_epsilon(mu * math.sqrt(count), delta)
    assert true * (1 - 1e-9) <= found <= 1.02 * true


@pytest.mark.parametrize(("epsilon0", "count"), [(0.1, 60), (0.01, 400), (2.0, 9)])
@pytest.mark.parametrize("delta", [1e-3, 1e-8, 1e-20])
def test_randomised_responses_against_the_binomial(epsilon0: float, count: int, delta: float) -> None:
    found = PLD().epsilon([PureEvent(epsilon0, count=count)], delta).epsilon
    assert found is not None
    assert oracles.randomised_response(epsilon0, count, found) <= delta
    assert (
        found == pytest.approx(epsilon0 * count) or oracles.randomised_response(epsilon0, count, 0.97 * found) > delta
    )


def test_pure_profiles_are_rounded_up() -> None:
    for bound in (1e-6, 0.3, 20.0):
        with mpmath.workdps(oracles.DIGITS):
            e0, e = mpmath.mpf(bound), mpmath.mpf(bound / 3)
            true = (mpmath.exp(e0) - mpmath.exp(e)) / (1 + mpmath.exp(e0))
        assert true <= pure_delta(bound, np.array([bound / 3]))[0] <= true * (1 + 1e-12)
