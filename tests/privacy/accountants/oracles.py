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
    masses = -np.diff(np.append(_above(noise, rate, edges, replace_one), 0.0))
    composed = np.roll(fft.irfft(fft.rfft(np.roll(masses, -half)) ** steps, len(masses)), half)
    return [float(composed[edges > e] @ -np.expm1(e - edges[edges > e])) for e in epsilons]


def optimistic_delta_apart(
    noise: float, rate: float, steps: int, epsilon: float, step: float, cut: float, replace_one: bool
) -> tuple[float, float]:
    """The same where rare losses need no fine grid: a lower bound on delta(epsilon), and about how much it leaves out.

    Cases in which all losses are within the cut are composed. To these come those with one loss l above it, where
    E max(0, 1 - e^(epsilon - l - R)) >= P(R) - e^(epsilon - l) E e^-R for the sum R of the others. Left out are those
    with two such losses, or with one below minus the cut.
    """
    half = math.ceil(cut / step)
    edges = np.arange(-half, half + 1) * step
    far = np.append(edges[-1] * np.exp(0.002 * np.arange(math.ceil(math.log(700 / cut) / 0.002))), math.inf)
    above = _above(noise, rate, np.append(edges, far[1:]), replace_one)
    near, rare = -np.diff(above[: 2 * half + 1]), -np.diff(above[2 * half :])
    points = fft.next_fast_len(2 * half * min(steps, 8) + 1, real=True)
    composed = fft.irfft(fft.rfft(near, points) ** steps, points)
    losses = (np.arange(points) - half * steps % points) * step
    losses = np.where(losses < -points * step / 2, losses + points * step, losses)
    losses = np.where(losses > points * step / 2, losses - points * step, losses)
    inside = losses > epsilon
    without = float(composed[inside] @ -np.expm1(epsilon - losses[inside]))
    others = near.sum() ** (steps - 1), float(near @ np.exp(np.minimum(-edges[:-1], 700.0))) ** (steps - 1)
    one = float(rare @ np.maximum(0.0, others[0] - np.exp(epsilon - far[:-1]) * others[1]))
    # What two large losses add is about the chance of one times what the other adds; one far below takes the rest away.
    whole = steps * float(rare @ -np.expm1(-far[:-1])) + float(composed[losses > 0] @ -np.expm1(-losses[losses > 0]))
    left_out = whole * steps * (rare.sum() + 1 - above[0])
    return without + steps * one, left_out


def _above(noise: float, rate: float, edges: np.ndarray, replace_one: bool) -> np.ndarray:
    """The chance that the loss of one release is above each of the edges."""
    if replace_one:
        with np.errstate(over="ignore"):  # beyond all numbers: nothing lies above
            ratio = np.sinh(np.abs(edges) / 2) * (1 - rate) / rate * math.exp(1 / (2 * noise * noise))
        x = np.sign(edges) * noise * noise * (np.arcsinh(ratio) + np.abs(edges) / 2)
        return (1 - rate) * ndtr(-x / noise) + rate * ndtr((1 - x) / noise)
    inside = (np.expm1(np.minimum(edges, _LARGE)) + rate) / rate
    logarithm = np.where(edges < _LARGE, np.log(np.maximum(inside, 1e-300)), edges - math.log(rate))
    x = noise * noise * logarithm + 0.5
    return np.where(inside > 0, (1 - rate) * ndtr(-x / noise) + rate * ndtr((1 - x) / noise), 1.0)
