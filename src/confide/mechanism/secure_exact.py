"""Whole numbers [sigma Z] that double precision cannot settle: with further random bits, in higher precision.

Z = sqrt(-2 log U) cos(2 pi V), or sin, with U in [j, j + 1) / 2^62 and V in [w, w + 1) / 2^64 known from two words. 64
further bits of each and the 64-bit mantissas of extended precision decide nearly always; what is left gets as many bits
as it needs, in arbitrary precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Draw = Callable[[int], Words]

EXTENDED_MARGIN = 2.0**-56  # in units of sigma; the errors add up to 2^-58
ENOUGH = 2.0**-6  # nearer to 0 or 1 than this, in units of 2^-62, U is left to arbitrary precision
HAS_EXTENDED = np.finfo(np.longdouble).nmant >= 63


@dataclass(frozen=True)
class Doubts:
    """Values in doubt: the words of their pairs, the numbers of the pairs, and whether the sine is meant."""

    radii: Words
    angles: Words
    pairs: NDArray[np.int64]
    sines: NDArray[np.bool_]

    @classmethod
    def of(cls, chunks: Sequence[tuple[Words, NDArray[np.int64]]]) -> Doubts:
        """From chunks of words, radii before angles, and the places in doubt of each: cosines before sines."""
        radii, angles, pairs, sines, before = [], [], [], [], 0
        for words, places in chunks:
            half = len(words) // 2
            inside = places % half
            radii.append(words[inside])
            angles.append(words[half + inside])
            pairs.append(before + inside)
            sines.append(places >= half)
            before += half
        return cls(np.concatenate(radii), np.concatenate(angles), np.concatenate(pairs), np.concatenate(sines))


def rounded_exactly(doubts: Doubts, sigma: float, draw: Draw) -> NDArray[np.float64]:
    """[sigma Z] beyond doubt. The two values of a pair share their further bits."""
    numbers, inverse = np.unique(doubts.pairs, return_inverse=True)
    more = draw(2 * len(numbers)).reshape(2, -1)[:, inverse.ravel()]
    radii, angles, sines = doubts.radii, doubts.angles, doubts.sines
    found, settled = _extended(radii, angles, more, sines, sigma)
    for row in np.flatnonzero(~settled):
        known = (_radius_bits(int(radii[row]), int(more[0, row])), _angle_bits(int(angles[row]), int(more[1, row])))
        found[row] = _arbitrary(*known, bool(sines[row]), sigma, draw)
    return found


def _extended(
    radii: Words, angles: Words, more: Words, sines: NDArray[np.bool_], sigma: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The numbers in extended precision, and which of them are beyond doubt."""
    real = np.longdouble
    j = (radii & np.uint64(2**63 - 1)) >> np.uint64(1)
    share = (more[0].astype(real) + real(0.5)) * real(2) ** -64
    above = j.astype(real) + share
    below = (np.uint64(2**62 - 1) - j).astype(real) + (real(1) - share)
    scale = real(2) ** -62
    with np.errstate(divide="ignore"):
        log = np.where(above > below, np.log1p(-below * scale), np.log(above) - 62 * np.log(real(2)))
    turned = angles + np.uint64(2**61)
    rest = (turned & np.uint64(2**62 - 1)).astype(np.int64) - 2**61
    quarter = (turned >> np.uint64(62)).astype(np.int64) - sines  # sin(t) = cos(t - a quarter turn)
    turn = rest.astype(real) + (more[1].astype(real) + real(0.5)) * real(2) ** -64
    angle = turn * (np.arctan(real(1)) * 8 * real(2) ** -64)
    wave = np.where(quarter % 2 == 0, np.cos(angle), -np.sin(angle)) * np.where(quarter % 4 >= 2, real(-1), real(1))
    value = np.sqrt(-2 * log) * wave * real(sigma)
    rounded = np.rint(value)
    sure = real(0.5) - np.abs(value - rounded) > real(EXTENDED_MARGIN * sigma)
    settled = sure & (above >= ENOUGH) & (below >= ENOUGH) & HAS_EXTENDED
    return rounded.astype(np.float64), settled


def _radius_bits(word: int, more: int) -> tuple[int, int]:
    """What is known of U as (whole number, bits): U in [number, number + 1) / 2^bits."""
    return ((word & (2**63 - 1)) >> 1 << 64) | more, 126


def _angle_bits(word: int, more: int) -> tuple[int, int]:
    return (word << 64) | more, 128


def _arbitrary(radius: tuple[int, int], angle: tuple[int, int], sine: bool, sigma: float, draw: Draw) -> float:
    """[sigma Z] with as many bits as it takes.

    Between the ends of what is known of U, sqrt(-2 log U) changes by no more than sqrt(2 w / U), w the width, since
    |sqrt(a) - sqrt(b)| <= sqrt(|a - b|); the wave changes by no more than 2 pi times what is unknown of V.
    """
    import mpmath  # comes with torch

    while True:
        (u, u_bits), (v, v_bits) = radius, angle
        if u > 0:
            with mpmath.workprec(max(u_bits, v_bits) + 64):
                uniform = mpmath.ldexp(u, -u_bits)
                length = mpmath.sqrt(-2 * mpmath.log(uniform))
                turn = 2 * mpmath.pi * mpmath.ldexp(v, -v_bits)
                value = mpmath.mpf(sigma) * length * (mpmath.sin(turn) if sine else mpmath.cos(turn))
                doubt = sigma * (mpmath.sqrt(mpmath.ldexp(2, -u_bits) / uniform) + length * mpmath.ldexp(8, -v_bits))
                rounded = mpmath.nint(value)
                if abs(abs(value - rounded) - 0.5) > 2 * doubt:
                    return float(rounded)
        further = [int(word) for word in draw(4)]
        radius = ((u << 128) | (further[0] << 64) | further[1], u_bits + 128)
        angle = ((v << 128) | (further[2] << 64) | further[3], v_bits + 128)
