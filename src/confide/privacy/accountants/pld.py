"""The PLD accountant: numerical composition of privacy loss distributions, and the number confide stands by.

Covered, each with a dominating pair for one release (units of C, standard deviation z):

    add-remove    full-batch   N(0) and N(1), in closed form
                  poisson      (1-q) N(0) + q N(1) against N(0), both directions composed, the worse one counts
    replace-one   full-batch   N(-1) and N(1), in closed form
                  poisson      (1-q) N(0) + q N(-1) against (1-q) N(0) + q N(1)
                  fixed-size   the profile of Balle, Barthe and Gaboardi (2018), see `losses`
                  shuffle      one N(-1), N(1) per pass: given the permutation a record is used once in a pass
    either        pure         randomised response; a slack is taken off delta beforehand

Fixed-size and shuffled batches under add-remove are refused: no sound bound is known. The pairs are discretised and
composed by our own code, because dp-accounting has no distribution for fixed-size batches, one grid step for all
sizes of epsilon, and no bound on the rounding error of its Fourier transforms; the two agree where both apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from confide.errors import Refusal
from confide.privacy.accountants.bound import (
    EXACT,
    UPPER_BOUND,
    Bound,
    check_question,
    check_sampling,
    counted,
    is_exact_gaussian,
    is_plain_gaussian,
    known,
    non_private,
    pure_epsilon,
    sensitivity,
    slack,
    without_bound,
)
from confide.privacy.accountants.composition import Composition, WindowTooWideError
from confide.privacy.accountants.losses import Grid, Unit, loss_pmf, on_grid, reach_for
from confide.privacy.accountants.profiles import Array, gaussian_delta, gaussian_epsilon
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent

Parts = tuple[tuple[Unit, int], ...]

# Widths of the grid of losses: the coarse one is exact enough where epsilon is large, and several times as quick.
COARSE = 1e-4
FINE = 2e-5
# Between these two epsilons the step goes over smoothly from FINE to COARSE, so that epsilon has no jump.
_FINE_BELOW, _COARSE_ABOVE = 0.12, 0.18
# Below this epsilon the step shrinks with it.
_TINY = 0.005
# The step is refined further until the grid adds at most about this fraction to epsilon.
_INFLATION = 0.01
# In the tail, dots may lie this part of epsilon apart (which is more than they can add to it), but not further
# than _WIDEST.
_GAP = 0.01
_WIDEST = 0.0065
# A first answer chooses the grid for the next one, as long as each is less than half of the one before.
_ROUNDS = 4
# The step is coarsened (still an upper bound) so that no array has more points than this.
_POINTS = 1 << 18
# Where rare large losses have no room on a grid, those beyond this many points are counted apart.
_NEAR = 1 << 14
# Losses so rare that together they make up this part of delta count as infinite.
_CUT = 1e-6
# Points at which a whole profile is given; a cover by a Gaussian loses about 0.1 % of its mu to their distance.
_PROFILE_POINTS = 2000


@dataclass(frozen=True)
class PLD:
    """Privacy loss distributions (Koskela, Jälkö and Honkela 2020; Doroshenko et al. 2022): sound and tight.

    discretisation  step of the loss grid. None: 1e-4, going over to 2e-5 for epsilon near 0.1 and below, finer
                    where many tiny losses add up, coarser where epsilon is huge.
    """

    discretisation: float | None = None

    def __post_init__(self) -> None:
        if self.discretisation is not None and not 0 < self.discretisation < 1:
            raise Refusal(f"discretisation={self.discretisation}: must be in (0, 1), or None for automatic")

    @property
    def name(self) -> str:
        return "pld"

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound:
        """The smallest epsilon that can be shown for this delta."""
        check_question(delta, adjacency)
        listed = known(events)
        hopeless = without_bound(listed, delta, adjacency)
        if hopeless is not None:
            return hopeless
        delta -= slack(listed, adjacency)
        parts = units(listed, adjacency)
        if delta == 0:
            return Bound(_pure_sum(parts), UPPER_BOUND, "basic composition of pure releases")
        mu = gaussian_only(parts)
        if mu is not None:
            kind = EXACT if is_exact_gaussian(listed) else UPPER_BOUND
            return Bound(gaussian_epsilon(mu, delta) if mu > 0 else 0.0, kind, f"Gaussian with mu={mu:.6g}")
        epsilon, step, _ = _epsilon(parts, delta, self.discretisation)
        return Bound(min(epsilon, _pure_sum(parts)), UPPER_BOUND, f"connect-the-dots with step {step:.3g}")

    def delta(self, events: Iterable[Event], epsilon: float, adjacency: Adjacency = "add-remove") -> float:
        """An upper bound on delta(epsilon); delta(0) is the total variation distance."""
        if not epsilon >= 0:
            raise Refusal(f"epsilon={epsilon}: must be >= 0")
        check_question(0.0, adjacency)
        listed = known(events)
        if non_private(listed) is not None:
            return 1.0
        return min(1.0, _delta(units(listed, adjacency), epsilon, self.discretisation) + slack(listed, adjacency))

    def deltas(self, events: Iterable[Event], epsilons: Sequence[float], adjacency: Adjacency = "add-remove") -> Array:
        """delta at many epsilons >= 0, upper bounds to about 1e-9."""
        check_question(0.0, adjacency)
        listed = known(events)
        if non_private(listed) is not None:
            return np.ones(len(epsilons))
        exact = _deltas(units(listed, adjacency), epsilons, self.discretisation)
        return np.minimum(1.0, exact + slack(listed, adjacency))


def units(events: Sequence[Event], adjacency: Adjacency) -> Parts:
    """Events as releases with a loss distribution; all un-sampled Gaussians become a single one."""
    totals: dict[Unit, int] = {}
    squared = 0.0
    for event in counted(events, adjacency):
        if isinstance(event, GaussianEvent):
            check_sampling(event, adjacency)
        if is_plain_gaussian(event):
            assert isinstance(event, GaussianEvent)
            squared += event.count * (sensitivity(adjacency) / event.noise_multiplier) ** 2
            continue
        unit = _unit(event, adjacency)
        totals[unit] = totals.get(unit, 0) + event.count
    if squared > 0:
        totals[Unit("gaussian", math.sqrt(squared))] = 1
    return tuple(sorted(totals.items(), key=lambda item: (item[0].shape, item[0].parameter, item[0].rate)))


def _unit(event: Event, adjacency: Adjacency) -> Unit:
    if isinstance(event, PureEvent):
        return Unit("pure", pure_epsilon(event, adjacency))
    assert isinstance(event, GaussianEvent)
    if event.sampling == "fixed-size":
        return Unit("fixed-size", 2 / event.noise_multiplier, event.rate)
    shape = "poisson" if adjacency == "add-remove" else "poisson-replace"
    return Unit(shape, 1 / event.noise_multiplier, event.rate)


def gaussian_only(parts: Parts) -> float | None:
    """mu when the whole composition is one Gaussian (0 when there is nothing at all)."""
    if not parts:
        return 0.0
    return parts[0][0].parameter if len(parts) == 1 and parts[0][0].shape == "gaussian" else None


def _pure_sum(parts: Parts) -> float:
    """Basic composition: the epsilon at delta = 0."""
    if any(unit.shape != "pure" for unit, _ in parts):
        return math.inf
    return sum(unit.parameter * count for unit, count in parts)


def _compositions(parts: Parts, step: float, widest: float, delta: float, jumps: float = math.inf) -> list[Composition]:
    """One composition when every pair is symmetric; else one for removing a record and one for adding it."""
    reaches = _reaches(parts, delta)
    if math.isinf(jumps):
        step *= max(1.0, _crowd(parts, step, reaches))
    forward = [
        (unit, loss_pmf(unit, Grid(step, widest, reach, jumps)), count)
        for (unit, count), reach in zip(parts, reaches, strict=True)
    ]
    directions = [Composition(tuple((pmf, count) for _, pmf, count in forward), 2 * _POINTS)]
    if not all(unit.symmetric for unit, _ in parts):
        backward = [(pmf if unit.symmetric else pmf.reversed(), count) for unit, pmf, count in forward]
        directions.append(Composition(tuple(backward), 2 * _POINTS))
    if math.isinf(jumps):
        return directions
    return [composition.raised(-jumps).split(jumps) for composition in directions]


def _reaches(parts: Parts, delta: float) -> list[float]:
    """Up to how many deviations of the noise the losses of each release are looked at."""
    releases = sum(count for _, count in parts)
    return [reach_for(_CUT * delta / releases, unit.rate, unit.parameter) for unit, _ in parts]


def _crowd(parts: Parts, step: float, reaches: list[float]) -> float:
    """How many times too many points the widest loss distribution has on this grid."""
    return max(_size(unit, step, reach) for (unit, _), reach in zip(parts, reaches, strict=True)) / _POINTS


def _size(unit: Unit, step: float, reach: float) -> float:
    """About how many grid points a loss distribution needs."""
    if unit.shape == "pure":
        return 3.0
    return min(unit.highest_loss(reach), unit.quantile(1e-3) + 0.1 * unit.highest_loss(reach)) / step


def _fitting(
    parts: Parts, step: float, widest: float, delta: float, ask: Callable[[Composition], float]
) -> tuple[float, list[Composition]]:
    """The worse answer of the two directions, on this grid or the next coarser one on which the losses fit.

    Raises WindowTooWideError where there is none.
    """
    most = math.inf
    while True:
        directions = _compositions(parts, step, widest, delta)
        try:
            return max(ask(composition) for composition in directions), directions
        except WindowTooWideError as error:
            if error.points >= most:
                raise  # so many releases that each of them, however coarse, takes a point of its own
            most, step = error.points, directions[0].step * error.points / _POINTS


def _fitting_apart(
    parts: Parts, step: float, widest: float, delta: float, epsilon: float
) -> tuple[float, list[Composition]] | None:
    """The answer on a grid on which rare large losses have no room, with those counted apart; not above `epsilon`.

    None where all losses have room, where the answer may be among the rare ones, or where counting them apart would
    cost more than a grid may.
    """
    if _NEAR * step < 2 * epsilon or _crowd(parts, step, _reaches(parts, delta)) <= 1:
        return None
    try:
        directions = _compositions(parts, step, widest, delta, _NEAR * step)
        if any(one.jumps is None or one.jumps.doubt > _INFLATION * delta for one in directions):
            return None
        return min(epsilon, max(one.epsilon(delta) for one in directions)), directions
    except WindowTooWideError:
        return None


@lru_cache(maxsize=4096)
def _epsilon(parts: Parts, delta: float, discretisation: float | None) -> tuple[float, float, float]:
    """(epsilon, step and widest gap of the grid): a first answer chooses the grid for the final one."""

    def ask(composition: Composition) -> float:
        return composition.epsilon(delta)

    try:
        epsilon, directions = _fitting(parts, discretisation or COARSE, _WIDEST, delta, ask)
    except WindowTooWideError:
        directions = _compositions(parts, discretisation or COARSE, _WIDEST, delta)
        return max(one.chernoff_epsilon(delta) for one in directions), directions[0].step, _WIDEST
    widest = _WIDEST
    for _ in range(_ROUNDS):
        step = wanted = directions[0].step
        if epsilon == 0 or math.isinf(epsilon):
            break
        before, gap = epsilon, min(_WIDEST, _GAP * epsilon)
        if discretisation is None and step <= COARSE:
            wanted = min(_step_for(epsilon), _step_without_inflation(directions[0]))
        if wanted >= 0.999 * step and gap >= widest:
            break
        widest = gap
        apart = _fitting_apart(parts, wanted, widest, delta, epsilon)
        epsilon, directions = apart or _fitting(parts, wanted, widest, delta, ask)
        if epsilon > before / 2:
            break
    return epsilon, directions[0].step, widest


def _step_for(epsilon: float) -> float:
    """COARSE for large epsilon, FINE for small, log-linear in between; a small part of epsilon when it is tiny."""
    if epsilon < _TINY:
        return max(FINE * epsilon / _TINY, 1e-9)
    weight = (math.log(max(epsilon, 1e-300)) - math.log(_FINE_BELOW)) / math.log(_COARSE_ABOVE / _FINE_BELOW)
    weight = min(1.0, max(0.0, weight))
    return math.exp((1 - weight) * math.log(FINE) + weight * math.log(COARSE))


def _step_without_inflation(composition: Composition) -> float:
    """The step at which the grid adds the fraction _INFLATION to the standard deviation of the summed loss.

    Moving a loss to the two ends of its cell adds step^2 / 6 to its variance on average.
    """
    variance = composition.moments(0.0)[2]
    releases = composition.releases
    own = variance - releases * composition.step**2 / 6
    own = max(own, variance * 0.01)
    return math.sqrt(12 * _INFLATION * own / releases)


@lru_cache(maxsize=8)
def _curve(parts: Parts, discretisation: float | None) -> tuple[Composition, ...]:
    """Compositions with their plain transforms, on the grid that suits these releases at a usual delta."""
    _, step, widest = _epsilon(parts, 1e-5, discretisation)
    return tuple(_fitting(parts, step, widest, 1e-4, lambda composition: composition.plain.infinity)[1])


@lru_cache(maxsize=4096)
def _delta(parts: Parts, epsilon: float, discretisation: float | None) -> float:
    mu = gaussian_only(parts)
    if mu is not None:
        return float(gaussian_delta(mu, np.array([epsilon]))[0]) if mu > 0 else 0.0
    try:
        return max(composition.delta(epsilon) for composition in _curve(parts, discretisation))
    except WindowTooWideError:
        return 1.0  # an epsilon of hundreds of thousands: nothing is protected


def _deltas(parts: Parts, epsilons: Sequence[float], discretisation: float | None) -> Array:
    mu = gaussian_only(parts)
    grid = np.asarray(epsilons, dtype=np.float64)
    if mu is not None:
        return gaussian_delta(mu, grid) if mu > 0 else np.zeros_like(grid)
    try:
        directions = _curve(parts, discretisation)
    except WindowTooWideError:
        return np.ones_like(grid)
    found: Array = np.maximum.reduce([composition.plain.deltas(grid) for composition in directions])
    return found


def profile(parts: Parts, least: float) -> tuple[Array, Array]:
    """Rising epsilons from 0 on, and upper bounds on delta there over both directions, down to a delta of `least`.

    Each tilt is accurate for deltas near the one it is made for, and an upper bound everywhere, so the least counts.
    The last delta is 1 where no epsilon reaches `least`.
    """
    end, step, widest = _epsilon(parts, least, None)
    if math.isinf(end):
        return np.zeros(1), np.ones(1)
    try:
        directions = _fitting(parts, step, widest, least, lambda composition: composition.epsilon(least))[1]
    except WindowTooWideError:
        return np.zeros(1), np.ones(1)
    step = directions[0].step
    grid = on_grid(np.unique(np.linspace(0, math.ceil(end / step) + 1, _PROFILE_POINTS).astype(np.int64)), step)
    depths = np.geomspace(least, 1e-3, 2 + round(-math.log10(least) / 3))
    found = []
    for composition in directions:
        tails = [composition.plain, *(composition.deep(float(depth)) for depth in depths)]
        found.append(np.minimum.reduce([tail.deltas(grid) for tail in tails]))
    return grid, np.maximum.reduce(found)
