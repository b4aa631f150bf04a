"""Privacy profiles: delta as a function of epsilon for one release (the hockey-stick divergence).

Every function here takes epsilons in an array, is accurate relative to its own size far into the tail, and is rounded
UP: it adds a bound on its own rounding error, so that a loss distribution built from it dominates the mechanism in
floating point too. The bounds are worked out in docs/soundness.md, "Rounding"; they rest on exp, log and the normal
distribution's functions being accurate to eight units in the last place, which a test holds against mpmath.

Noise is in units of the sensitivity: mu = sensitivity / standard deviation, so that the un-sampled mechanism
compares N(0, 1) with N(mu, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal

Array = NDArray[np.float64]

_MACHINE = float(np.finfo(np.float64).eps)
# Relative accuracy of exp, expm1, log1p, ndtr, log_ndtr and erfcx, as far as it is measured.
_FUNCTION = 8 * _MACHINE


def gaussian_delta(mu: float, epsilon: Array) -> Array:
    """delta(epsilon) of the Gaussian mechanism (Balle and Wang 2018), for epsilon of either sign.

    With a = epsilon / mu - mu / 2,   delta = Phi(-a) - e^epsilon Phi(-a - mu) = phi(a) (R(a) - R(a + mu)),
    where R is the Mills ratio; the second form keeps its relative accuracy in the tail.
    """
    delta, doubt = _gaussian_delta(mu, epsilon)
    return np.clip(delta + doubt, 0.0, 1.0)


def gaussian_delta_below(mu: float, epsilon: Array) -> Array:
    """The same rounded DOWN, for what a Gaussian is to cover."""
    delta, doubt = _gaussian_delta(mu, epsilon)
    return np.clip(delta - doubt, 0.0, 1.0)


def _gaussian_delta(mu: float, epsilon: Array) -> tuple[Array, Array]:
    """delta(epsilon), and a bound on its rounding error."""
    from scipy.special import erfcx, log_ndtr, ndtr

    epsilon = np.asarray(epsilon, dtype=np.float64)
    a = epsilon / mu - mu / 2
    moved = 2 * _MACHINE * (np.abs(epsilon) / mu + mu)  # bound on the rounding error of a
    delta, doubt = np.empty_like(a), np.empty_like(a)
    tail = a > 0
    b = a[tail]
    density = np.exp(-b * b / 2) / 2
    first, second = erfcx(b / math.sqrt(2)), erfcx((b + mu) / math.sqrt(2))
    delta[tail] = density * (first - second)
    # The logarithm of delta falls in a by at most a + mu + 6, and that of erfcx by less.
    slope = b + mu + 6
    doubt[tail] = density * (first + second) * (_FUNCTION + _MACHINE * slope) + delta[tail] * (
        slope * moved[tail] + _FUNCTION * (1 + b * b)
    )
    body = ~tail
    inside, exponent = ndtr(-a[body]), epsilon[body] + log_ndtr(-a[body] - mu)
    outside = np.exp(np.minimum(exponent, 0.0))
    delta[body] = inside - outside
    slope = np.abs(a[body]) + mu + 6
    size = np.abs(epsilon[body]) + np.abs(exponent - epsilon[body])
    doubt[body] = (inside + outside) * (_FUNCTION * (1 + size) + slope * (moved[body] + _MACHINE * slope))
    return delta, doubt


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 with gaussian_delta(mu, epsilon) <= delta, rounded up."""
    if delta <= 0:
        return math.inf

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(mu, np.array([epsilon]))[0]) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    while excess(high) > 0:
        high *= 2
    return _bisect_up(excess, 0.0, high)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which the Gaussian mechanism is (epsilon, delta)-private, rounded down."""
    if not (epsilon >= 0 and 0 < delta < 1):
        raise Refusal(f"epsilon={epsilon}, delta={delta}: need epsilon >= 0 and 0 < delta < 1")

    def room(mu: float) -> float:
        return delta - float(gaussian_delta(mu, np.array([epsilon]))[0])

    high = 1.0
    while room(high) > 0:
        high *= 2
    low = high / 2
    while room(low) <= 0:
        high, low = low, low / 2
    # room falls in mu; the last mu with room is the answer, so search on the mirrored axis and round "up" there.
    return -_bisect_up(lambda negative: -room(-negative), -high, -low)


def _bisect_up(excess: Callable[[float], float], low: float, high: float) -> float:
    """The end of [low, high] where `excess` <= 0, closed in on its root; excess(low) > 0 >= excess(high)."""
    from scipy.optimize import brentq

    root = float(brentq(excess, low, high, xtol=1e-15 * max(abs(low), abs(high)), rtol=1e-14))
    step = 1e-14 * max(abs(root), 1e-300)
    while excess(root) > 0 and root < high:
        root, step = min(root + step, high), 2 * step
    return root


def sampled_delta(mu: float, rate: float, epsilon: Array) -> Array:
    """Profile of (1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), for epsilon of either sign.

    delta_q(epsilon) = q delta_mu(log(1 + (e^epsilon - 1) / q))      (Balle, Barthe and Gaboardi 2018)

    With mu = C / std this is Poisson sampling when a record is removed. With mu = 2 C / std and epsilon >= 0 it is
    also the bound for batches of fixed size when a record is replaced; see `losses.fixed_size_replace_one`.
    """
    epsilon = np.asarray(epsilon, dtype=np.float64)
    if rate == 1.0:
        return gaussian_delta(mu, epsilon)
    inside = epsilon > math.log1p(-rate)
    delta = -np.expm1(np.minimum(epsilon, 0.0))
    # e^epsilon would overflow; from here on log(1 + (e^epsilon - 1) / q) = epsilon - log q to the last digit.
    small = np.minimum(epsilon[inside], 600.0)
    ratio = np.expm1(small) / rate
    base = np.log1p(ratio) + (epsilon[inside] - small)
    moved = 2 * _FUNCTION * (1 + np.abs(base) + np.abs(ratio) / (1 + ratio))
    delta[inside] = rate * gaussian_delta(mu, base) * (1 + _FUNCTION + moved * _slope(mu, base))
    return np.clip(delta, 0.0, 1.0)


def _slope(mu: float, epsilon: Array) -> Array:
    """A bound on how fast the logarithm of gaussian_delta(mu, .) falls in epsilon."""
    slope: Array = (np.abs(epsilon / mu) + mu + 6) / mu
    return slope


def sampled_delta_reversed(mu: float, rate: float, epsilon: Array) -> Array:
    """Profile of N(0, 1) against (1 - q) N(0, 1) + q N(mu, 1), for epsilon >= 0: a record added under Poisson sampling.

    With rho = (e^-epsilon - 1 + q) / q,  delta(epsilon) = (1 - (1 - q) e^epsilon) delta_mu(log(1 / rho)), and zero
    once epsilon reaches -log(1 - q). It follows from H_a(Q || P) = 1 - a + a H_(1/a)(P || Q) and is written out
    because that difference would leave no accurate digit in the tail.
    """
    epsilon = np.asarray(epsilon, dtype=np.float64)
    if rate == 1.0:
        return gaussian_delta(mu, epsilon)
    delta = np.zeros_like(epsilon)
    inside = -np.expm1(-epsilon) < rate
    shrink = -np.expm1(-epsilon[inside])  # 1 - e^-epsilon
    outer = (rate - shrink) * np.exp(epsilon[inside])  # 1 - (1 - q) e^epsilon
    base = -np.log1p(-shrink / rate)
    # 1 - shrink / rate keeps an absolute accuracy only, and both factors hang on its logarithm.
    moved = 4 * _FUNCTION / (1 - shrink / rate)
    delta[inside] = outer * gaussian_delta(mu, base) * (1 + moved * (1 + _slope(mu, base)))
    return np.clip(delta, 0.0, 1.0)


def poisson_replace_delta(noise_multiplier: float, rate: float, epsilon: Array) -> Array:
    """Profile of (1-q) N(0) + q N(-1) against (1-q) N(0) + q N(+1), standard deviation z, for epsilon >= 0.

    The loss falls in x and passes epsilon at

        x = -z^2 (asinh(sinh(epsilon / 2) (1 - q) / q e^{1 / (2 z^2)}) + epsilon / 2),

    the root of a quadratic in e^{x / z^2}; it is computed in logarithms so that small z does not overflow.
    """
    from scipy.special import log_ndtr, ndtr

    epsilon = np.asarray(epsilon, dtype=np.float64)
    z = noise_multiplier
    with np.errstate(divide="ignore"):
        log_expm1 = epsilon + np.log(-np.expm1(-epsilon))
    log_ratio = log_expm1 - epsilon / 2 - math.log(2) + math.log1p(-rate) - math.log(rate) + 1 / (2 * z * z)
    asinh = np.logaddexp(log_ratio, 0.5 * np.logaddexp(0.0, 2 * log_ratio))
    x = -z * z * (asinh + epsilon / 2)
    # At the best x the derivative is zero, so that an error of x only counts squared.
    terms = [
        (rate * ndtr((x + 1) / z), (x + 1) / z),
        (-rate * np.exp(epsilon + log_ndtr((x - 1) / z)), (x - 1) / z),
        (-(1 - rate) * np.exp(log_expm1 + log_ndtr(x / z)), x / z),
    ]
    doubt = sum(np.abs(term) * (_FUNCTION * (2 + epsilon + at**2) + 4 * _MACHINE * (1 + at**2)) for term, at in terms)
    delta: Array = np.clip(sum(term for term, _ in terms) + doubt, 0.0, 1.0)
    return delta


def pure_delta(bound: float, epsilon: Array) -> Array:
    """Profile of randomised response with parameter `bound`, which dominates every pure bound-DP release."""
    epsilon = np.asarray(epsilon, dtype=np.float64)
    # (e^bound - e^epsilon) / (1 + e^bound), written so that a large bound does not overflow.
    inside = -np.expm1(np.minimum(epsilon - bound, 0.0)) / (1 + math.exp(-bound))
    return np.minimum(1.0, np.maximum(inside, -np.expm1(epsilon)) * (1 + 4 * _FUNCTION))
