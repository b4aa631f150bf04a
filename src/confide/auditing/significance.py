"""Chances: how likely a right mechanism is to look at least as wrong as this. All of them are vectorised and two-sided.

A family of tests is one number, the smallest chance times how many tests there were (Bonferroni), so that a family
alarms by mistake no more often than its level, whatever the tests have to do with one another.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, Any]


def family(*chances: Any) -> float:
    """The chance of the most surprising of all these tests, for having looked at all of them."""
    every = np.concatenate([np.atleast_1d(np.asarray(each, dtype=float)).ravel() for each in chances])
    if not len(every):
        return 1.0
    # A test whose value is not a number saw something that is not a number: nothing is more surprising.
    return float(min(1.0, len(every) * np.nan_to_num(every, nan=0.0).min()))


def normal(value: Any) -> Floats:
    """For standard normal values."""
    from scipy.special import erfc

    return np.asarray(erfc(np.abs(value) / math.sqrt(2)))


def chi_square(value: Any, degrees: Any) -> Floats:
    """For sums of squares of `degrees` standard normals."""
    return spread(value, degrees, 2.0)


def spread(value: Any, count: Any, variance: float) -> Floats:
    """For sums of `count` terms of mean 1 and that variance: a gamma law of the same two moments.

    With variance 2 it is the chi-square law; counts that are nearly Poisson have a little more.
    """
    from scipy.special import gammainc, gammaincc

    shape, scaled = np.asarray(count) / variance, np.asarray(value) / variance
    return np.asarray(np.minimum(1.0, 2 * np.minimum(gammainc(shape, scaled), gammaincc(shape, scaled))))


def binomial(successes: Any, trials: Any, rate: float) -> Floats:
    """For counts of successes; exact."""
    from scipy.special import betainc

    found, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    below = np.where(found < n, betainc(np.maximum(n - found, 1), found + 1, 1 - rate), 1.0)
    above = np.where(found > 0, betainc(np.maximum(found, 1), n - found + 1, rate), 1.0)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)))


def kolmogorov(uniform: Floats) -> Floats:
    """For columns of uniform numbers: the largest gap between their distribution and the stated one.

    2 exp(-2 n D^2) bounds the chance for every n (Massart 1990, Annals of Probability).
    """
    count = len(uniform)
    ordered = np.sort(uniform, axis=0)
    steps = np.arange(count + 1, dtype=float).reshape(-1, *[1] * (uniform.ndim - 1)) / count
    gap = np.maximum((steps[1:] - ordered).max(0), (ordered - steps[:-1]).max(0))
    return np.asarray(np.minimum(1.0, 2 * np.exp(-2 * count * gap**2)))


def anderson_darling(uniform: Floats) -> float:
    """For one long sample of uniform numbers: gaps weighted so that the tails count.

    In the limit A^2 = sum of Z_j^2 / (j (j + 1)), so E exp(t A^2) = sqrt(-2 pi t / cos(pi/2 sqrt(1 + 8 t))) for t < 1,
    and Chernoff's inequality bounds the chance (Anderson and Darling 1952, Annals of Mathematical Statistics).
    """
    # A number that rounds to 0 or 1 is no infinite surprise by itself.
    ordered = np.sort(uniform).clip(1e-300, 1 - 1e-16)
    count = len(ordered)
    odd = 2 * np.arange(1, count + 1) - 1
    value = -count - (odd * (np.log(ordered) + np.log1p(-ordered[::-1]))).mean()
    tilts = np.linspace(0.01, 0.999, 200)
    moments = np.sqrt(-2 * math.pi * tilts / np.cos(math.pi / 2 * np.sqrt(1 + 8 * tilts)))
    return float(min(1.0, (np.exp(-tilts * value) * moments).min()))


def lags(values: Floats) -> Floats:
    """For one long sequence of independent standard normals: its correlation with itself at every lag up to the half.

    The sum of n products is normal up to a fourth cumulant of order 1 / n; the factor 2 covers that.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    count = len(values)
    room = next_fast_len(2 * count, real=True)
    products = irfft(np.abs(rfft(values, room)) ** 2, room)[1 : count // 2 + 1]
    return np.asarray(np.minimum(1.0, 2 * normal(products / np.sqrt(count - np.arange(1, count // 2 + 1)))))


def pairs(rows: Floats) -> Floats:
    """For rows of independent standard normals: the correlation of every two rows. Given one of them it is normal."""
    products = rows @ rows.T
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = products / np.sqrt(np.diagonal(products))[:, None]
    return normal(scaled[np.triu_indices(len(rows), 1)])


def repeats(bits: np.ndarray[Any, Any]) -> float:
    """For a sequence of the bits of random numbers: whether three that follow one another come again anywhere."""
    words = bits.astype(np.uint64)
    if len(words) < 4:
        return 1.0
    mixed = words[:-2].copy()
    for following in (words[1:-1], words[2:]):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + following
    mixed.sort()
    found = (mixed[1:] == mixed[:-1]).any()
    # Two of n hashed triples agree by chance with probability n^2 / 2^65; three roundings to 2^-21 agree even less.
    return 1.0 if not found else min(1.0, len(mixed) ** 2 * 2.0**-62)
