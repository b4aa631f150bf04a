"""Composition of privacy loss distributions.

Losses of independent releases add up, so their distributions convolve. That is done by one Fourier transform per
kind of release on a window that wraps around, after tilting every distribution by e^(tilt * loss). Wrapping only
adds mass to the losses inside the window, and the mass above it is bounded by Chernoff and counted as infinite
loss, so the result stays an upper bound for every window and every tilt. The tilt makes the rounding error of the
transform small relative to the delta asked for, however small that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from confide.privacy.accountants.losses import LossPmf
from confide.privacy.accountants.profiles import Array

_MACHINE = float(np.finfo(np.float64).eps)
# A Fourier transform errs at every frequency by at most this much times the logarithm (base 2) of its length and the
# sum of its inputs: docs/soundness.md, "Rounding". The second number is for powers and products of frequencies.
_PER_LEVEL, _PER_PRODUCT = 4 * _MACHINE, 16 * _MACHINE
# Where rounding errors make up more than this part of delta, losses above _JUMP times epsilon are taken out, again and
# again while epsilon falls, at most _SPLITS times.
_DOUBTFUL, _JUMP, _SPLITS = 0.01, 1.2, 8
# More than what rounding takes from a cumulant.
_ROUNDED_UP = 1 + 1e-9
# Frequencies below this are left out.
_SILENT = 1e-25


class WindowTooWideError(ArithmeticError):
    """The composed losses do not fit on the grid; `points` says how many points they would need."""

    def __init__(self, points: int) -> None:
        super().__init__(f"{points} grid points")
        self.points = points


@dataclass(frozen=True, eq=False)
class Composition:
    """Independent releases of given loss distributions, each some number of times, in one direction."""

    parts: tuple[tuple[LossPmf, int], ...]
    max_points: int = 1 << 21
    jumps: Jumps | None = None
    whole: Composition | None = None  # what it was before the jumps were taken out

    @property
    def step(self) -> float:
        return self.parts[0][0].step

    @property
    def releases(self) -> int:
        return sum(count for _, count in self.parts)

    @cached_property
    def _pool(self) -> _Pool:
        return _Pool(self.parts)

    def moments(self, tilt: float) -> tuple[float, float, float]:
        """Cumulant function K of the summed loss at the tilt, with the tilted mean and variance."""
        return self._pool.moments(tilt)

    def cumulant(self, tilt: float) -> float:
        """K(tilt) alone."""
        return float(self._pool.counts @ self._pool.cumulants(tilt))

    @property
    def infinity(self) -> float:
        """The probability that at least one loss is infinite."""
        if any(pmf.infinity >= 1 for pmf, _ in self.parts):
            return 1.0
        return -math.expm1(sum(count * math.log1p(-pmf.infinity) for pmf, count in self.parts))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 that the composed distribution shows for delta."""
        if self.infinity >= delta:
            return math.inf
        tail = self.deep(delta)
        epsilon = tail.epsilon(delta)
        for _ in range(_SPLITS):
            if not 0 < epsilon < math.inf or tail.doubt_at(epsilon) < _DOUBTFUL * delta:
                break
            tail = self.split(_JUMP * epsilon).deep(delta)
            before, epsilon = epsilon, min(epsilon, tail.epsilon(delta))
            if epsilon > 0.97 * before:
                break
        return epsilon

    def chernoff_epsilon(self, delta: float) -> float:
        """An epsilon that the summed loss passes with a chance of at most delta: sound, without a transform."""
        left = delta - self.infinity
        return max(0.0, self._chernoff_end(1, left)[0] * _ROUNDED_UP) if left > 0 else math.inf

    def split(self, cut: float) -> Composition:
        """The same releases, with losses above the cut taken out and counted apart: see `Jumps`."""
        if self.whole is not None:
            return self.whole.split(cut)
        near, still, losses, masses = [], [], [], []
        for pmf, count in self.parts:
            end = int(np.searchsorted(pmf.losses, cut, side="right"))
            losses.append(pmf.losses[end:])
            masses.append(count * pmf.probs[end:])
            kept, zero = pmf.part(0, end), int(np.searchsorted(pmf.index, 0))  # every distribution has a place for zero
            near.append((kept, count))
            still.append((kept.with_more(zero, float(pmf.probs[end:].sum())), count))
        rest = Composition(tuple(still), self.max_points).plain.delta(0.0)
        jumps = _jumps_of(np.concatenate(losses), np.concatenate(masses), rest)
        return Composition(tuple(near), self.max_points, jumps, self)

    def raised(self, lowest: float) -> Composition:
        """With all losses below the lowest moved up to it, or to the next that there is: that only adds to delta."""
        return replace(self, parts=tuple((_raised(pmf, lowest), count) for pmf, count in self.parts))

    def deep(self, delta: float) -> Tail:
        """The composed distribution with errors that are small relative to this delta."""
        return self.tail(self._tilt_for_delta(delta), 1e-7 * delta)

    def delta(self, epsilon: float) -> float:
        """delta(epsilon) of the composed distribution."""
        delta = self.plain.delta(epsilon)
        for _ in range(8):
            # A small delta is computed anew with errors relative to its size, until that changes little.
            if not 0 < delta < 1e-2:
                break
            before = delta
            delta = min(before, self.deep(before).delta(epsilon))
            if delta > 0.5 * before:
                break
        return delta

    @cached_property
    def plain(self) -> Tail:
        """The composed distribution without a tilt: the whole curve, to about 1e-9 in absolute terms."""
        return self.tail(0.0, 1e-9)

    def _tilt_for_delta(self, delta: float) -> float:
        """The mildest tilt that keeps rounding errors some four orders of magnitude below delta.

        Where t K'(t) - K(t) = log(1 / c) they are about c times those of the plain transform. A few per cent off is
        good enough: every tilt is sound.
        """
        rounding = 64 * _MACHINE * max(self.releases, 16)
        goal = min(math.log(rounding / (1e-4 * delta)), -math.log(delta))
        variance = self.moments(0.0)[2]
        if goal <= 0 or variance == 0:
            return 0.0
        low, high, tilt, previous = 0.0, math.inf, math.sqrt(2 * goal / variance), 0.0
        for _ in range(40):
            k, mean, _ = self.moments(tilt)
            value = tilt * mean - k
            if abs(value - goal) <= 0.05 * goal:
                break
            if math.isinf(high) and 0 < value < previous * 1.01:
                # Bounded losses cannot be pushed further than their upper end. Beyond it only rounding errors are
                # left, which a strong tilt makes fall off quickly.
                return 64 * tilt
            low, high, previous = (tilt, high, value) if value < goal else (low, tilt, value)
            tilt = 2 * tilt if math.isinf(high) else math.sqrt(max(low, high / 16) * high)
        return tilt

    def window(self, tilt: float, negligible: float) -> tuple[int, int, float]:
        """Indices [low, high] such that what they leave out costs a negligible delta; the mass above is bounded.

        Losses above are counted as infinite. They also wrap around to lower ones, where un-tilting multiplies their
        probability by e^(tilt * width), so a tilted window must be wide. A loss below wraps to a higher one and is
        multiplied by e^(-tilt * width): with a strong tilt the window may begin just below zero, as long as nobody
        asks for an epsilon below it.
        """
        lowest = sum(count * int(pmf.index[0]) for pmf, count in self.parts)
        highest = sum(count * int(pmf.index[-1]) for pmf, count in self.parts)
        end, shift = self._chernoff_end(1, negligible)
        high, above = math.ceil(end / self.step), 0.0
        if high < highest:
            above = math.exp(min(0.0, self.cumulant(shift) - shift * high * self.step))
        else:
            high = highest
        low = math.floor(self._chernoff_end(-1, negligible)[0] / self.step)
        if tilt * high * self.step > -math.log(negligible):
            low = max(low, -1)
        low = max(low, lowest)
        if tilt > 0:
            high = max(high, low + math.ceil(self._chernoff_end(1, negligible, tilt)[0] / self.step))
        return low, max(high, low + 1, 1), above

    def _chernoff_end(self, side: int, negligible: float, tilt: float = 0.0) -> tuple[float, float]:
        """A loss beyond which (above: side 1, below: side -1) lies at most a negligible mass, and the order s.

        Chernoff's end (K(s) + log(1 / negligible)) / s has one minimum in |s|: near reach / deviation for light
        tails, near reach / largest loss for heavy ones. With a tilt, the loss l where P(loss > l) e^(tilt l) is
        negligible.
        """
        reach = -math.log(negligible)
        deviation = max(math.sqrt(self.moments(tilt)[2]), self.step)
        largest = max(abs(pmf.losses[-1 if side > 0 else 0]) for pmf, _ in self.parts)

        def end(shift: float) -> tuple[float, float]:
            return (self.cumulant(tilt + side * shift) + reach) / shift, float(side * shift)

        shifts = np.geomspace(reach / (8 * (largest + 4 * deviation)), 2 * math.sqrt(2 * reach) / deviation, 7)
        ends = [end(shift) for shift in shifts]
        best = min(range(len(ends)), key=lambda i: ends[i][0])
        for neighbour in (best - 1, best + 1):
            if 0 <= neighbour < len(shifts):
                ends.append(end(math.sqrt(shifts[best] * shifts[neighbour])))
        loss, order = min(ends)
        return side * loss, order

    def tail(self, tilt: float, negligible: float) -> Tail:
        """The composed distribution on its window."""
        from scipy import fft

        low, high, above = self.window(tilt, negligible)
        points = fft.next_fast_len(high - low + 1, real=True)
        if points > self.max_points:
            raise WindowTooWideError(points)
        spectrum = np.ones(points // 2 + 1, dtype=np.complex128)
        log_scale, doubt, growth = 0.0, 0.0, 0.0
        unit = _PER_LEVEL * math.log2(points) + _PER_PRODUCT
        # Large powers first: they silence most frequencies, which then need no further work.
        cumulants = self._pool.cumulants(tilt)
        for i in np.argsort(-self._pool.counts):
            (pmf, count), k = self.parts[i], float(cumulants[i])
            masses, roundings = _folded(pmf, tilt, k, points)
            factor = fft.rfft(masses)[: len(spectrum)]
            # Cauchy-Schwarz turns an error of every frequency into one for any sum of masses; a power multiplies
            # the error by its exponent and damps it where the factor is small.
            energy = 2 * float(np.sum((np.abs(factor) + unit) ** (2 * (count - 1)))) if count > 1 else points
            doubt += count * math.sqrt(energy) * unit
            spectrum *= factor**count if count > 1 else factor
            loud = np.flatnonzero(np.abs(spectrum) > _SILENT)
            spectrum = spectrum[: loud[-1] + 1]
            log_scale += count * k
            growth += count * roundings
        mass = np.maximum(np.roll(fft.irfft(spectrum, points), -(low % points)), 0.0)
        # The way back errs by that much of the Euclidean norm, and a sum of masses by the root of their number more.
        doubt += unit * math.sqrt(points) * (float(np.linalg.norm(mass)) + doubt) + len(self.parts) * points * _SILENT
        losses = (low + np.arange(points)) * self.step
        # Sums and scales: a few units in the last place for each point and for each unit of an exponent.
        exponents = abs(log_scale) + tilt * self.step * (abs(low) + points)
        surcharge = math.exp(growth + 4 * _MACHINE * (points + exponents + 64))
        return Tail(losses, mass, tilt, log_scale, self.infinity + above, doubt, surcharge, self.jumps)


@dataclass(frozen=True, eq=False)
class Jumps:
    """Large losses that were taken out of a composition: too rare and too large for any tilt, or for its grid.

    Let X be the sum of jumps, R that of the other losses. Either there is no jump, and the rest composes by itself; or
    there is one of loss l, which adds at most 1 - e^(epsilon - l) + e^(epsilon - l) E max(0, 1 - e^-R); or there are
    several, which add at most E max(0, 1 - e^(-X - R)) <= E (1 - e^-X) + E max(0, 1 - e^-R) over that case, and
    1 - e^-X is at most the sum of 1 - e^-l over the jumps. All add up, with no more than the probability of each.

    losses, masses  of one jump, summed over the releases
    advantage       bound on delta(0) of everything, and so on E max(0, 1 - e^-R) over any of the releases
    pairs           bound on what several jumps add
    """

    losses: Array
    masses: Array
    advantage: float
    pairs: float

    @property
    def doubt(self) -> float:
        """What counting them apart may add to delta."""
        return self.pairs + self.advantage * float(self.masses.sum())

    def delta(self, epsilon: float) -> float:
        behind = np.exp(np.minimum(epsilon - self.losses, 0.0))
        return self.pairs + _dot(self.masses, np.minimum(1.0, 1 - behind + behind * self.advantage))


def _jumps_of(losses: Array, masses: Array, rest: float) -> Jumps:
    """`rest` is delta(0) of all releases where every jump has loss zero instead."""
    total, alone = float(masses.sum()), _dot(masses, -np.expm1(-losses))
    advantage = min(1.0, alone + rest)
    return Jumps(losses, masses, advantage, total * min(total / 2, alone + advantage * total / 2))


class _Pool:
    """All distributions in one array, so that many of them cost no more than their points."""

    def __init__(self, parts: tuple[tuple[LossPmf, int], ...]) -> None:
        self.counts = np.array([count for _, count in parts], dtype=np.float64)
        self._losses = np.concatenate([pmf.losses for pmf, _ in parts])
        self._log_probs = np.concatenate([pmf.log_probs for pmf, _ in parts])
        self._sizes = np.array([len(pmf.probs) for pmf, _ in parts])
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)[:-1]))

    def _weights(self, tilt: float) -> tuple[Array, Array, Array]:
        """Tilted masses, their total in each distribution, and the logarithm of the scale they are in."""
        logarithms = tilt * self._losses + self._log_probs
        scale: Array = np.maximum.reduceat(logarithms, self._starts)
        weights = np.exp(logarithms - np.repeat(scale, self._sizes))
        return weights, self._sum(weights), scale

    def _sum(self, values: Array) -> Array:
        sums: Array = np.add.reduceat(values, self._starts)
        return sums

    def cumulants(self, tilt: float) -> Array:
        """log E e^(tilt loss) over the finite losses of each distribution."""
        _, totals, scale = self._weights(tilt)
        return np.log(totals) + scale

    def moments(self, tilt: float) -> tuple[float, float, float]:
        weights, totals, scale = self._weights(tilt)
        means = self._sum(weights * self._losses) / totals
        centred = (self._losses - np.repeat(means, self._sizes)) ** 2
        variances = self._sum(weights * centred) / totals
        k = np.log(totals) + scale
        return float(self.counts @ k), float(self.counts @ means), float(self.counts @ variances)


def _raised(pmf: LossPmf, lowest: float) -> LossPmf:
    low = int(np.searchsorted(pmf.losses, lowest))
    return pmf.part(low, len(pmf.index)).with_more(0, float(pmf.probs[:low].sum()))


def _dot(weights: Array, values: Array) -> float:
    """Not by `@`, which adds in another order where a process has another number of threads: noise that one of them has
    found would be a last digit off in the next."""
    return float(np.sum(weights * values))


def _folded(pmf: LossPmf, tilt: float, k: float, points: int) -> tuple[Array, float]:
    """The tilted masses e^(tilt l - K) p(l), laid around a circle of `points` grid points, and their relative error."""
    exponents = pmf.log_probs + tilt * pmf.losses - k
    folded: Array = np.bincount(pmf.index % points, weights=np.exp(exponents), minlength=points).astype(np.float64)
    some = pmf.probs > 0
    size = float(np.max(np.abs(pmf.log_probs[some]) + tilt * np.abs(pmf.losses[some]), initial=0.0)) + abs(k)
    return folded, 8 * _MACHINE * (1 + size)


class Tail:
    """Composed losses with masses e^(log_scale - tilt * loss) * mass, summed from the top.

    infinity   mass of infinite loss, with what lies above the window
    doubt      bound on the rounding error of any sum of the tilted masses
    surcharge  factor on delta for the rounding errors of the masses themselves
    floor      the lowest loss of the window; nothing is known below it unless the tilt is zero
    """

    def __init__(
        self,
        losses: Array,
        mass: Array,
        tilt: float,
        log_scale: float,
        infinity: float,
        doubt: float,
        surcharge: float = 1.0,
        jumps: Jumps | None = None,
    ) -> None:
        self.jumps = jumps
        self.losses, self.tilt, self.log_scale = losses, tilt, log_scale
        self.infinity, self.doubt, self.surcharge = infinity, doubt, surcharge
        self.floor = float(losses[0])
        self._weights = np.exp(np.minimum(log_scale - tilt * losses, 700.0)) * mass
        self._above = np.append(np.cumsum(self._weights[::-1])[::-1], 0.0)

    def delta(self, epsilon: float) -> float:
        """delta(epsilon) = P(infinite loss) + E max(0, 1 - e^(epsilon - loss)), rounded up."""
        first, far = np.searchsorted(self.losses, (epsilon, epsilon + 40.0), side="right")
        near = _dot(self._weights[first:far], -np.expm1(epsilon - self.losses[first:far]))
        return min(1.0, (near + float(self._above[far]) + self._fixed(epsilon)) * self.surcharge)

    def deltas(self, epsilons: Array) -> Array:
        """delta at rising epsilons >= 0, all at once: 1 where nothing is known.

        delta(e) = P(l > e) - e^e E[e^-l, l > e]. Sums of positive numbers and their difference are off by less than
        1e-9 of P(l > e) for any length of the window, which is added; a factor that underflows only adds as well.
        """
        beyond = np.searchsorted(self.losses, epsilons, side="right")
        # (Losses below -700 are of no epsilon's account.)
        shrunk = np.append(np.cumsum((self._weights * np.exp(-np.maximum(self.losses, -700.0)))[::-1])[::-1], 0.0)
        exponents = np.minimum(epsilons, 700.0)
        doubt = self.doubt * np.exp(np.minimum(700.0, self.log_scale - self.tilt * exponents))
        values = (1 + 1e-9) * self._above[beyond] - np.exp(exponents) * shrunk[beyond] + self.infinity + doubt
        if self.jumps is not None:
            values += [self.jumps.delta(float(one)) for one in epsilons]
        known = (epsilons >= self.floor) | (self.tilt == 0)
        found: Array = np.where(known, np.clip(values * self.surcharge, 0.0, 1.0), 1.0)
        return found

    def _fixed(self, epsilon: float) -> float:
        """What is added to delta(epsilon) whatever the masses are."""
        jumps = 0.0 if self.jumps is None else self.jumps.delta(epsilon)
        return self.infinity + jumps + self.doubt_at(epsilon)

    def doubt_at(self, epsilon: float) -> float:
        """The bound on rounding errors in delta(epsilon)."""
        return self.doubt * math.exp(min(700.0, self.log_scale - self.tilt * epsilon))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with delta(epsilon) <= delta; at the least the floor of a tilted window."""
        start = 0.0 if self.tilt == 0 else max(0.0, self.floor)
        if self.delta(start) <= delta:
            return start
        left = int(np.searchsorted(self.losses, start, side="right")) - 1
        right = len(self.losses) - 1
        if self.delta(float(self.losses[right])) > delta:
            return math.inf
        while right - left > 1:
            middle = (left + right) // 2
            if self.delta(float(self.losses[middle])) > delta:
                left = middle
            else:
                right = middle
        return self._inside_cell(delta, right, start)

    def _inside_cell(self, delta: float, right: int, start: float) -> float:
        """Between two grid points delta(epsilon) = A - B e^(epsilon - anchor), which is solved for epsilon."""
        end = float(self.losses[right])
        anchor = max(start, end - (self.losses[1] - self.losses[0]))
        losses = self.losses[right:]
        lower = _dot(self._weights[right:], np.exp(anchor - losses))
        upper = float(self._above[right]) + self._fixed(anchor) - delta / self.surcharge
        if lower <= 0 or upper <= lower:
            return end
        return min(end, float(anchor) + math.log(upper / lower))
