"""delta(epsilon) of records that each met their own sequence of distances.

A record whose clipped norms were d_1, ..., d_T (in units of C) is protected as well as by T Gaussian mechanisms with
noise multipliers z / d_t. Their losses add up, so their distribution has the characteristic function

    prod over j of F_j^(n_j),

F_j that of one release at distance level j and n_j how often the record met it. The F_j are computed once, from the
dominating distributions of `losses`; then thousands of records are one matrix product, an exponential, and another
product with the transforms of max(0, 1 - e^(epsilon - loss)), by Parseval. As in `composition`, distributions are
tilted, laid around a circle (wrapping only adds to delta), what lies above the window is bounded by Chernoff, and
the rounding error is bounded and added: every answer is an upper bound. Order does not matter, and a larger distance
never gives a smaller delta, so distances may be rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal, UnsupportedEvents
from confide.privacy.accountants.composition import Composition
from confide.privacy.accountants.losses import Grid, LossPmf, Unit, loss_pmf, reach_for
from confide.privacy.accountants.profiles import Array, gaussian_delta
from confide.privacy.events import GaussianEvent

Counts = NDArray[np.int64]

_MACHINE = float(np.finfo(np.float64).eps)
_POINTS = 1 << 16  # of a grid at most, so that transforms stay quick
# The grid adds about _GRID^2 / 12 of itself to the delta of the worst record, where that is the one asked for.
_GRID = 0.125
_WIDEST = 0.0065
# The variance that the grid adds to a loss, step^2 / 6, is about _SPREAD / 6 of its own.
_SPREAD = 0.005
# Frequencies from which on the spectrum stays below e^-_SILENT are left out.
_SILENT = 60.0
_CHUNK = 1 << 22  # doubles in one piece: 32 MB
_SURCHARGE = 1 + 1e-6  # for profiles, which are second differences of rounded numbers


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which distances records met over a run, as counts.

    kinds         one column for each kind of step: its event (count 1) and a distance in units of C, at most 1
    counts        (rows, columns): how many steps of each kind a record met
    repeats       how many records each row stands for; None: one
    weights       probabilities of the rows when their distribution is known; None for a sample of records
    missed        probability that a row does not cover what its record met, from looking at some steps only
    """

    kinds: tuple[tuple[GaussianEvent, float], ...]
    counts: Counts
    repeats: Counts | None = None
    weights: Array | None = None
    missed: float = 0.0

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64)
        if counts.ndim != 2 or counts.shape[1] != len(self.kinds) or not len(counts) or np.any(counts < 0):
            raise Refusal(f"counts of shape {counts.shape}: need rows of {len(self.kinds)} counts >= 0")
        if any(not 0 <= distance <= 1 for _, distance in self.kinds):
            raise Refusal("kinds: every distance must lie in [0, 1], in units of the clipping bound")
        for event, _ in self.kinds:
            _check_event(event)
        steps = self._steps_by_event(counts)
        if np.any(steps != steps[0]) or not steps[0].sum():
            raise Refusal("counts: every record must meet the same number of steps of each event, and at least one")
        object.__setattr__(self, "counts", counts)
        repeats = np.ones(len(counts), dtype=np.int64) if self.repeats is None else np.asarray(self.repeats)
        if repeats.shape != (len(counts),) or np.any(repeats < 1):
            raise Refusal(f"repeats of shape {repeats.shape}: need a number >= 1 for each row")
        object.__setattr__(self, "repeats", repeats)
        if self.weights is not None and (
            len(self.weights) != len(counts) or abs(float(np.sum(self.weights)) - 1) > 1e-9
        ):
            raise Refusal(f"weights of length {len(self.weights)}: need a probability per row, summing to 1")

    def _steps_by_event(self, counts: Counts) -> Counts:
        events = self._events
        columns = [[i for i, (event, _) in enumerate(self.kinds) if event == wanted] for wanted in events]
        return np.stack([counts[:, chosen].sum(1) for chosen in columns], axis=1)

    @property
    def _events(self) -> tuple[GaussianEvent, ...]:
        return tuple(dict.fromkeys(event for event, _ in self.kinds))

    @cached_property
    def events(self) -> tuple[GaussianEvent, ...]:
        """What the run costs for a record at the clipping bound in every step."""
        steps = self._steps_by_event(self.counts[:1])[0]
        pairs = zip(self._events, steps, strict=True)
        return tuple(replace(event, count=int(count)) for event, count in pairs if count)

    @property
    def records(self) -> int:
        assert self.repeats is not None
        return int(self.repeats.sum())

    @property
    def steps(self) -> int:
        return int(self.counts[0].sum())

    def grouped(self) -> Sequences:
        """Equal rows together, so that each is computed once."""
        if self.weights is not None or len(self.counts) == 1:
            return self
        assert self.repeats is not None
        rows, inverse = np.unique(self.counts, axis=0, return_inverse=True)
        repeats = np.bincount(inverse.ravel(), weights=self.repeats, minlength=len(rows)).astype(np.int64)
        return replace(self, counts=rows, repeats=repeats)


def _check_event(event: GaussianEvent) -> None:
    if not isinstance(event, GaussianEvent) or event.sampling not in ("poisson", "full-batch"):
        raise UnsupportedEvents(f"event={event!r}: distance sequences are known for Gaussian releases, poisson or full")
    if event.count != 1:
        raise Refusal(f"count={event.count}: a kind of step is one step; its counts stand in `counts`")


def constant_sequences(distances: Array, events: Sequence[GaussianEvent], weights: Array | None = None) -> Sequences:
    """Records whose distance is the same at every step of the events."""
    levels, index = np.unique(np.asarray(distances, dtype=np.float64), return_inverse=True)
    kinds = tuple((replace(event, count=1), float(level)) for event in events for level in levels)
    counts = np.concatenate([np.eye(len(levels), dtype=np.int64)[index] * event.count for event in events], axis=1)
    return Sequences(kinds, counts, weights=weights)


def sequences_of(distances: Array, event: GaussianEvent, levels: int = 64) -> Sequences:
    """Records with a matrix (records, steps) of distances, rounded up to multiples of 1 / levels."""
    matrix = np.asarray(distances, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[1] != event.count:
        raise Refusal(f"distances of shape {matrix.shape}: need one row per record and {event.count} steps")
    index = level_of(matrix, levels)
    flat = (np.arange(len(matrix))[:, None] * (levels + 1) + index).ravel()
    counts = np.bincount(flat, minlength=len(matrix) * (levels + 1)).reshape(len(matrix), levels + 1)
    return Sequences(level_kinds(event, levels), counts)


def level_of(distances: Array, levels: int) -> Counts:
    """The number of the level that a distance in [0, 1] is rounded up to; what is above 1 by rounding counts as 1."""
    index: Counts = np.clip(np.ceil(np.asarray(distances, dtype=np.float64) * levels), 0, levels).astype(np.int64)
    return index


def level_kinds(event: GaussianEvent, levels: int) -> tuple[tuple[GaussianEvent, float], ...]:
    return tuple((replace(event, count=1), level / levels) for level in range(levels + 1))


def covering_counts(looks: Counts, steps: int, rate: float, missed: float) -> Counts:
    """Counts that cover each record's whole run with probability 1 - missed, from looks at some of its steps.

    looks    (rows, levels + 1): how often a record was seen at each level
    rate     each step of each record was looked at with this probability, independently of everything else

    Of the N steps above a level, n ~ Bin(N, rate) were seen, so N is at most the largest number for which seeing no
    more than n is not less likely than missed / levels. That holds for all levels at once with probability
    1 - missed. Composition does not know order, so a run with at least as many steps above every level costs at least
    as much.
    """
    if rate >= 1:
        return looks
    levels = looks.shape[1] - 1
    seen_above = np.cumsum(looks[:, :0:-1], axis=1)[:, ::-1]  # column l: looks above level l, for l < levels
    table = _largest_totals(int(seen_above.max(initial=0)), steps, rate, missed / levels)
    above = np.minimum.accumulate(table[seen_above], axis=1)
    edges = np.concatenate([np.full((len(looks), 1), steps), above, np.zeros((len(looks), 1), np.int64)], axis=1)
    return np.asarray(-np.diff(edges, axis=1))


def _largest_totals(most: int, steps: int, rate: float, failure: float) -> Counts:
    """For n = 0, ..., most: the largest N <= steps with P(Bin(N, rate) <= n) >= failure."""
    from scipy.special import bdtr

    seen = np.arange(most + 1)
    low, high = seen.copy(), np.full(most + 1, steps)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        likely = bdtr(seen.astype(np.float64), middle, rate) >= failure
        low, high = np.where(likely, middle, low), np.where(likely, high, middle - 1)
    return low


def profiles(sequences: Sequences, epsilons: Array, delta: float) -> Array:
    """(rows, epsilons): upper bounds on delta(epsilon) of each row, the worse of adding and removing the record.

    They are sharpest for values around `delta`.
    """
    units = [_unit(event, distance) for event, distance in sequences.kinds]
    squares = np.array([unit.parameter**2 for unit in units])
    if all(unit.shape == "gaussian" for unit in units):
        mu = np.sqrt(sequences.counts @ squares)
        return np.stack([gaussian_delta(m, epsilons) if m > 0 else np.zeros(len(epsilons)) for m in mu])
    moving = squares > 0
    counts = sequences.counts[:, moving]
    units = [unit for unit, moves in zip(units, moving, strict=True) if moves]
    if not units:
        return np.zeros((len(counts), len(epsilons)))
    worst = _worst_parts(sequences)
    directions = [_Direction(units, worst, epsilons, delta, backward) for backward in (False, True)]
    return np.maximum(*(direction.deltas(counts) for direction in directions))


def _unit(event: GaussianEvent, distance: float) -> Unit:
    plain = event.sampling == "full-batch" or event.rate == 1
    return Unit("gaussian" if plain else "poisson", distance / event.noise_multiplier, 1.0 if plain else event.rate)


def _worst_parts(sequences: Sequences) -> tuple[tuple[Unit, int], ...]:
    """The run of a record at the clipping bound in every step."""
    return tuple((_unit(replace(event, count=1), 1.0), event.count) for event in sequences.events)


class _Direction:
    """Spectra of all kinds of steps in one direction (record removed, or added), on one window."""

    def __init__(
        self, units: list[Unit], worst: tuple[tuple[Unit, int], ...], epsilons: Array, delta: float, backward: bool
    ) -> None:
        self.epsilons = epsilons
        steps = sum(count for _, count in worst)
        reach = reach_for(1e-8 * delta / steps)
        highest = max(unit.highest_loss(reach) for unit, _ in worst)
        draft = Grid(max(1e-4, highest / _POINTS), max(_WIDEST, highest / _POINTS), reach)
        composed = _composed(worst, draft, backward)
        # Three ways in which a grid can be too coarse: for the slope of the tail at delta, for the spread of one
        # loss, and for the epsilons asked for.
        slope = _GRID / (max(_tilt_at(composed, -math.log(delta)), 1e-9) * math.sqrt(steps))
        spread = math.sqrt(_SPREAD * composed.moments(0.0)[2] / steps)
        step = min(slope, spread, max(1e-3 * float(epsilons.max()), 1e-6), _WIDEST)
        step = max(step, highest / (2 * _POINTS))
        self._build(units, worst, Grid(step, max(_WIDEST, step), reach), delta, backward)

    def _build(
        self, units: list[Unit], worst: tuple[tuple[Unit, int], ...], grid: Grid, delta: float, backward: bool
    ) -> None:
        from scipy import fft

        composed = _composed(worst, grid, backward)
        smallest = _composed(((min(units, key=lambda unit: unit.parameter), composed.releases),), grid, backward)
        self.tilt = _tilt_at(composed, _tilt_goal(composed.releases, delta))
        windows = [composition.window(self.tilt, 1e-8 * delta) for composition in (composed, smallest)]
        low = min(*(window[0] for window in windows), math.floor(self.epsilons.min() / grid.step))
        high = max(*(window[1] for window in windows), math.ceil(self.epsilons.max() / grid.step) + 1)
        points = fft.next_fast_len(high - low + 1, real=True)
        if points > _POINTS:
            wider = replace(grid, step=grid.step * 1.1 * points / _POINTS)
            self._build(units, worst, replace(wider, widest=max(grid.widest, wider.step)), delta, backward)
            return
        self.low, self.points, self.step = low, points, grid.step
        self._transform([_pmf(unit, grid, backward) for unit in units])

    def _transform(self, pmfs: list[LossPmf]) -> None:
        from scipy import fft

        self.infinities = np.array([pmf.infinity for pmf in pmfs])
        self.cumulants = _cumulants(pmfs, self.tilt)
        top = (self.low + self.points - 1) * self.step
        # cumulants at several orders, for Chernoff's bound on the mass above the window
        orders = np.geomspace(4, 1024, 9) / top
        self.chernoff = np.array([_cumulants(pmfs, order) for order in orders]), orders * top
        spectra = [
            fft.rfft(_around(pmf, self.tilt, k, self.points)) for pmf, k in zip(pmfs, self.cumulants, strict=True)
        ]
        factors = np.array(spectra)
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(np.abs(factors), 1e-300))
        self.logs = np.minimum(logs, 0.0) + 1j * np.angle(factors)
        # Candidate cuts, and how fast each kind of step has made its factor fall at and beyond them for good.
        cuts = np.geomspace(32, max(33, factors.shape[1]), 24).astype(int)
        self.cuts = np.unique(np.append(np.minimum(cuts, factors.shape[1]), factors.shape[1]))
        beyond = np.maximum.accumulate(self.logs.real[:, ::-1], axis=1)[:, ::-1]
        self.decay = -beyond[:, np.minimum(self.cuts, factors.shape[1] - 1)]
        self._weigh()

    def _weigh(self) -> None:
        """Transforms of e^(-tilt (l - epsilon)) max(0, 1 - e^(epsilon - l)), times what Parseval needs."""
        from scipy import fft

        losses = (self.low + np.arange(self.points)) * self.step
        parseval = np.full(self.points // 2 + 1, 2 / self.points)
        parseval[0] = 1 / self.points
        if self.points % 2 == 0:
            parseval[-1] = 1 / self.points
        self.weights = np.empty((len(parseval), len(self.epsilons)), dtype=np.complex128)
        self.sizes = np.empty(len(self.epsilons))
        for i, epsilon in enumerate(self.epsilons):
            first = int(np.searchsorted(losses, epsilon))
            above = losses[first:] - epsilon
            held = np.zeros(self.points)
            held[first:] = np.exp(-self.tilt * above) * -np.expm1(-above)
            self.sizes[i] = np.linalg.norm(held) / math.sqrt(self.points)
            self.weights[:, i] = fft.rfft(np.roll(held, self.low % self.points)) * parseval

    def deltas(self, counts: Counts) -> Array:
        """Upper bounds on delta, (rows, epsilons)."""
        numbers = counts.astype(np.float64)
        cut = self._cut_for(numbers)
        result = np.empty((len(counts), len(self.epsilons)))
        for place in np.unique(cut):
            rows = np.flatnonzero(cut == place)
            length = int(self.cuts[place])
            stride = max(1, _CHUNK // length)
            for start in range(0, len(rows), stride):
                chosen = rows[start : start + stride]
                result[chosen] = self._deltas(numbers[chosen], length)
        return np.minimum(result, 1.0)

    def _cut_for(self, numbers: Array) -> NDArray[np.intp]:
        """For each row the first cut beyond which every frequency is silent; the last keeps them all."""
        silent = numbers @ self.decay >= _SILENT
        silent[:, -1] = True
        return np.asarray(np.argmax(silent, axis=1))

    def _deltas(self, numbers: Array, length: int) -> Array:
        spectrum = np.exp(numbers @ self.logs[:, :length])
        weights = self.weights[:length]
        sums = spectrum.real @ weights.real + spectrum.imag @ weights.imag
        energy = np.sqrt(2 * np.sum(spectrum.real**2 + spectrum.imag**2, axis=1))
        # A factor errs by a few units in the last place times the logarithm of the length. A power n multiplies that
        # by n |F|^(n-1): at most 2 n |F|^n where |F| >= 1/2, and at most 1 elsewhere.
        kinds = np.count_nonzero(numbers, axis=1)
        doubt = 2 * numbers.sum(1) * energy + kinds * math.sqrt(self.points)
        doubt *= 16 * _MACHINE * math.log2(self.points)
        doubt += self.points * math.exp(-_SILENT)
        log_scale = (numbers @ self.cumulants)[:, None] - self.tilt * self.epsilons
        tilted = np.maximum(sums, 0.0) + doubt[:, None] * self.sizes
        fixed = numbers @ self.infinities + self._mass_above(numbers)
        with np.errstate(over="ignore"):
            return np.asarray((np.exp(np.minimum(log_scale, 700.0)) * tilted + fixed[:, None]) * _SURCHARGE)

    def _mass_above(self, numbers: Array) -> Array:
        cumulants, reach = self.chernoff
        return np.asarray(np.exp(np.minimum(numbers @ cumulants.T - reach, 0.0)).min(axis=1))


def _pmf(unit: Unit, grid: Grid, backward: bool) -> LossPmf:
    pmf = loss_pmf(unit, grid)
    return pmf.reversed() if backward and not unit.symmetric else pmf


def _composed(parts: tuple[tuple[Unit, int], ...], grid: Grid, backward: bool) -> Composition:
    return Composition(tuple((_pmf(unit, grid, backward), count) for unit, count in parts))


def _cumulants(pmfs: Sequence[LossPmf], tilt: float) -> Array:
    """log E e^(tilt loss) over the finite losses of each distribution."""
    result = np.empty(len(pmfs))
    for i, pmf in enumerate(pmfs):
        scale = max(tilt * pmf.losses[0], tilt * pmf.losses[-1])
        result[i] = scale + math.log(float(pmf.probs @ np.exp(tilt * pmf.losses - scale)))
    return result


def _around(pmf: LossPmf, tilt: float, k: float, points: int) -> Array:
    """Tilted masses e^(tilt l - K) p(l), laid around a circle."""
    masses = pmf.probs * np.exp(tilt * pmf.losses - k)
    return np.bincount(pmf.index % points, weights=masses, minlength=points).astype(np.float64)


def _tilt_goal(releases: int, delta: float) -> float:
    """How far rounding errors must be pushed down, in logarithms, to stay a thousand times below delta."""
    rounding = 512 * _MACHINE * max(releases, 16)
    return max(0.0, min(math.log(rounding / (1e-3 * delta)), -math.log(delta)))


def _tilt_at(composed: Composition, goal: float) -> float:
    """The tilt t with t K'(t) - K(t) = goal, within a few per cent: every tilt is sound."""
    variance = composed.moments(0.0)[2]
    if goal <= 0 or variance <= 0:
        return 0.0
    low, high = 0.0, math.sqrt(2 * goal / variance)
    previous = -1.0
    for _ in range(60):
        k, mean, _ = composed.moments(high)
        value = high * mean - k
        if value >= goal or value < previous * 1.01:  # bounded losses cannot be pushed beyond their upper end
            break
        low, high, previous = high, 2 * high, value
    for _ in range(6):
        middle = (low + high) / 2
        k, mean, _ = composed.moments(middle)
        low, high = (middle, high) if middle * mean - k < goal else (low, middle)
    return high
