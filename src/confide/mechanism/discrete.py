"""Discrete Gaussians, drawn exactly: P(k) proportional to exp(-k^2 / (2 sigma^2)) on all whole numbers.

By rejection from the discrete Laplace law (Canonne, Kamath and Steinke 2020, NeurIPS), many at a time. With
t = floor(sigma) + 1 and a random sign,

    X = floor(t E), E exponential:      P(X = k) = (1 - e^(-1/t)) e^(-k/t)       (a negative zero is thrown away)
    kept with probability               exp(-(X - sigma^2 / t)^2 / (2 sigma^2)).

Both decisions compare a real random number, of which 64 bits are drawn, with a real value in double precision. Where
the errors of double precision and the bits that were not drawn leave a doubt, about one number in 2^8 at the largest
sigma and in 2^20 at usual ones, more bits are drawn and the value is computed in as many digits as it takes. So the law
is exact, given random bits: no tail is cut off and nothing is rounded. Rejection takes time that depends on the random
bits alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal

Words = NDArray[np.uint64]
Whole = NDArray[np.int64]
Draw = Callable[[int], Words]

LEAST_SIGMA, LARGEST_SIGMA = 1.0, 2.0**40  # beyond, double precision would leave too much in doubt
MARGIN = 2.0**-49  # relative; the operations below are within 2^-51 together
MOST_AT_ONCE = 1 << 18  # numbers; what is worked on stays within some megabytes


def discrete_gaussians(draw: Draw, sigma: float, count: int) -> Whole:
    """So many independent draws; `draw` gives random words of 64 bits."""
    if not LEAST_SIGMA <= sigma <= LARGEST_SIGMA:
        raise Refusal(f"sigma={sigma}: discrete Gaussians are drawn from {LEAST_SIGMA:g} to {LARGEST_SIGMA:g}")
    kept: list[Whole] = []
    missing = count
    while missing > 0:
        found = _candidates(draw, sigma, min(missing + missing // 2 + 16, MOST_AT_ONCE))[:missing]
        kept.append(found)
        missing -= len(found)
    return np.concatenate([np.empty(0, dtype=np.int64), *kept])


def _candidates(draw: Draw, sigma: float, count: int) -> Whole:
    """Those of `count` proposals that are kept."""
    scale = float(np.floor(sigma) + 1)
    lengths, coins = draw(count), draw(count)
    signs = np.repeat(draw((count + 63) // 64), 64)[:count] >> (np.arange(count, dtype=np.uint64) % np.uint64(64))
    negative = (signs & np.uint64(1)).astype(bool)
    size = _floors(lengths, scale, draw)
    kept = _coins(coins, size, sigma, scale, draw) & ~(negative & (size == 0))
    found: Whole = np.where(negative, -size, size)[kept]
    return found


def _floors(words: Words, scale: float, draw: Draw) -> Whole:
    """floor(-scale log U), with U in [w, w + 1) / 2^64 for every word w."""
    known = words.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = -np.log(known * 2.0**-64)
        value = scale * lengths
        doubt = scale * ((1 + lengths) * MARGIN + 2 / known)  # not a number, so in doubt, where the word is zero
        doubtful = ~(np.abs(value - np.rint(value)) > doubt)
    found = np.floor(np.where(doubtful, 0.0, value)).astype(np.int64)
    for place in np.flatnonzero(doubtful):
        found[place] = _floor_exactly(int(words[place]), scale, draw)
    return found


def _coins(words: Words, size: Whole, sigma: float, scale: float, draw: Draw) -> NDArray[np.bool_]:
    """Whether V < exp(-(size - sigma^2 / scale)^2 / (2 sigma^2)), with V in [w, w + 1) / 2^64."""
    distance = (size - sigma * sigma / scale) / sigma
    exponent = distance * distance / 2
    chance = np.exp(-exponent)
    known = words.astype(np.float64) * 2.0**-64
    doubtful = np.abs(known - chance) <= chance * (64 + 4 * exponent) * MARGIN + 2.0**-62
    found: NDArray[np.bool_] = known < chance
    for place in np.flatnonzero(doubtful):
        found[place] = _coin_exactly(int(words[place]), int(size[place]), sigma, scale, draw)
    return found


def _floor_exactly(known: int, scale: float, draw: Draw) -> int:
    """With as many bits as it takes: both ends of what is known must have the same floor."""
    import mpmath  # comes with torch

    bits = 64
    while True:
        known, bits = _longer(known, bits, draw)
        if known == 0:
            continue
        with mpmath.workprec(bits + 64):
            ends = [-mpmath.mpf(scale) * mpmath.log(mpmath.ldexp(end, -bits)) for end in (known, known + 1)]
            slack = mpmath.ldexp(scale, -bits - 32)
            high, low = int(mpmath.floor(ends[0] + slack)), int(mpmath.floor(ends[1] - slack))
        if high == low:
            return high


def _coin_exactly(known: int, size: int, sigma: float, scale: float, draw: Draw) -> bool:
    import mpmath  # comes with torch

    bits = 64
    while True:
        known, bits = _longer(known, bits, draw)
        with mpmath.workprec(bits + 64):
            distance = size - mpmath.mpf(sigma) ** 2 / mpmath.mpf(scale)
            chance = mpmath.ldexp(mpmath.exp(-(distance**2) / (2 * mpmath.mpf(sigma) ** 2)), bits)
            if known + 1 < chance - mpmath.ldexp(1, -8):
                return True
            if known > chance + mpmath.ldexp(1, -8):
                return False


def _longer(known: int, bits: int, draw: Draw) -> tuple[int, int]:
    """128 further bits of the same number."""
    first, second = (int(word) for word in draw(2))
    return (known << 128) | (first << 64) | second, bits + 128
