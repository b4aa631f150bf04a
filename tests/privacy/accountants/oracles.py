"""Independent ways to the numbers of the PLD accountant: many digits, and distributions rounded the other way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath
import numpy as np
from scipy import fft
from scipy.special import ndtr

DIGITS = 60
_LARGE = 50.0  # e to this power has no room for a number below 1 beside it


def _normal(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def gaussian(mu: float, epsilon: float) -> mpmath.mpf:
    """delta(epsilon) of the Gaussian mechanism to many digits."""
    with mpmath.workdps(DIGITS):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        a = epsilon / mu - mu / 2
        return _normal(-a) - mpmath.exp(epsilon) * _normal(-a - mu)


def sampled(mu: float, rate: float, epsilon: float) -> mpmath.mpf:
    """(1-q) N(0) + q N(mu) against N(0)."""
    with mpmath.workdps(DIGITS):
        q = mpmath.mpf(rate)
        x = mpmath.log(1 + mpmath.expm1(mpmath.mpf(epsilon)) / q) / mu + mpmath.mpf(mu) / 2
        mixed = (1 - q) * _normal(-x) + q * _normal(mu - x)
        return mixed - mpmath.exp(epsilon) * _normal(-x)


def sampled_reversed(mu: float, rate: float, epsilon: float) -> mpmath.mpf:
    """N(0) against (1-q) N(0) + q N(mu)."""
    with mpmath.workdps(DIGITS):
        q = mpmath.mpf(rate)
        room = 1 + mpmath.expm1(-mpmath.mpf(epsilon)) / q
        if room <= 0:
            return mpmath.mpf(0)
        x = mpmath.log(room) / mu + mpmath.mpf(mu) / 2
        return _normal(x) - mpmath.exp(epsilon) * ((1 - q) * _normal(x) + q * _normal(x - mu))


def replaced(noise: float, rate: float, epsilon: float) -> mpmath.mpf:
    """(1-q) N(0) + q N(-1) against (1-q) N(0) + q N(1), standard deviation z."""
    with mpmath.workdps(DIGITS):
        q, z, e = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.mpf(epsilon)
        ratio = mpmath.sinh(e / 2) * (1 - q) / q * mpmath.exp(1 / (2 * z * z))
        x = -z * z * (mpmath.asinh(ratio) + e / 2)
        first = (1 - q) * _normal(x / z) + q * _normal((x + 1) / z)
        return first - mpmath.exp(e) * ((1 - q) * _normal(x / z) + q * _normal((x - 1) / z))


def randomised_response(epsilon0: float, count: int, epsilon: float) -> mpmath.mpf:
    """delta(epsilon) of so many randomised responses: a sum over the binomial distribution."""
    with mpmath.workdps(DIGITS):
        e0, total = mpmath.mpf(epsilon0), mpmath.mpf(0)
        p = mpmath.exp(e0) / (1 + mpmath.exp(e0))
        for hits in range(count + 1):
            loss = (2 * hits - count) * e0
            if loss > epsilon:
                chance = mpmath.binomial(count, hits) * p**hits * (1 - p) ** (count - hits)
                total += chance * -mpmath.expm1(epsilon - loss)
        return total


def optimistic_deltas(
    noise: float, rate: float, steps: int, epsilons: Sequence[float], step: float, top: float, replace_one: bool
) -> list[float]:
    """Lower bounds on delta under Poisson sampling, but for some 1e-15 of an un-tilted transform.

    Losses are rounded DOWN onto a grid, and those above the top put at the top. Under add-remove: a record removed.
    """
    half = math.ceil(top / step)
    edges = np.arange(-half, half + 1) * step
    if replace_one:
        ratio = np.sinh(np.abs(edges) / 2) * (1 - rate) / rate * math.exp(1 / (2 * noise * noise))
        x = np.sign(edges) * noise * noise * (np.arcsinh(ratio) + np.abs(edges) / 2)
        above = (1 - rate) * ndtr(-x / noise) + rate * ndtr((1 - x) / noise)
    else:
        inside = (np.expm1(np.minimum(edges, _LARGE)) + rate) / rate
        logarithm = np.where(edges < _LARGE, np.log(np.maximum(inside, 1e-300)), edges - math.log(rate))
        x = noise * noise * logarithm + 0.5
        above = np.where(inside > 0, (1 - rate) * ndtr(-x / noise) + rate * ndtr((1 - x) / noise), 1.0)
    masses = -np.diff(np.append(above, 0.0))
    composed = np.roll(fft.irfft(fft.rfft(np.roll(masses, -half)) ** steps, len(masses)), half)
    return [float(composed[edges > e] @ -np.expm1(e - edges[edges > e])) for e in epsilons]
