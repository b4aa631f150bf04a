"""The worst adversary of a ceiling: by dynamic programming, whichever next plan makes delta(epsilon) largest.

    V(plans, loss) = max( (1 - e^(epsilon - loss))+,  max over accepted plans p of E V(plans and p, loss + loss of p) )

is the largest delta that anybody reaches who has charged `plans`, has seen a privacy loss so far, and may look before
every further charge. V(no plans, 0) must not pass the ceiling's delta. Loss distributions dominate (connect the dots),
so V is an upper bound but for 1e-15 of the transforms, and tight: plans fixed in advance give their exact delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve

from confide.privacy.accountants.losses import Grid, LossPmf, Unit, loss_pmf
from confide.privacy.accountants.pld import units
from confide.privacy.events import Adjacency, Event
from confide.privacy.filters import Plan, Promise, plan_of

Array = NDArray[np.float64]
Judge = Callable[[Sequence[Plan], Promise], bool]
STEP = 5e-4
ROOM = 8.0  # losses on either side


@dataclass(frozen=True)
class Loss:
    """Masses at whole multiples of STEP from `low` on, and of an infinite loss."""

    low: int
    masses: Array
    infinity: float


def _dense(pmf: LossPmf) -> Loss:
    masses = np.zeros(int(pmf.index[-1] - pmf.index[0]) + 1)
    masses[pmf.index - pmf.index[0]] = pmf.probs
    return Loss(int(pmf.index[0]), masses, pmf.infinity)


def _together(first: Loss, second: Loss) -> Loss:
    masses = np.maximum(fftconvolve(first.masses, second.masses), 0.0)
    infinity = 1 - (1 - first.infinity) * (1 - second.infinity)
    low = first.low + second.low
    # Far ends: what is beyond the room counts as infinite above, and as the lowest loss below.
    most, least = round(ROOM / STEP), -round(ROOM / STEP)
    above, below = max(0, low + len(masses) - 1 - most), max(0, least - low)
    if above:
        infinity, masses = infinity + float(masses[-above:].sum()), masses[:-above]
    if below:
        rest = float(masses[:below].sum())
        masses, low = masses[below:].copy(), least
        masses[0] += rest
    return Loss(low, masses, infinity)


def _power(loss: Loss, count: int) -> Loss:
    found = None
    while count:
        if count % 2:
            found = loss if found is None else _together(found, loss)
        count //= 2
        loss = _together(loss, loss) if count else loss
    assert found is not None
    return found


@lru_cache(maxsize=4096)
def loss_of(plan: Plan, adjacency: Adjacency, reverse: bool) -> Loss:
    parts: Sequence[tuple[Unit, int]] = units(plan, adjacency)
    found = Loss(0, np.ones(1), 0.0)
    for unit, count in parts:
        pmf = loss_pmf(unit, Grid(STEP, STEP, 9.0))
        found = _together(found, _power(_dense(pmf.reversed() if reverse and not unit.symmetric else pmf), count))
    return found


@dataclass
class Adversary:
    """menu: plans that may be charged, as often as the judge lets them. `depth`: how many plans at most.

    The last plan may also be `last` times as much of one on the menu, the most that is accepted.
    """

    menu: Sequence[Sequence[Event]]
    promise: Promise
    judge: Judge
    depth: int
    reverse: bool = False
    last: int = 64
    _known: dict[tuple[Plan, ...], Array | None] = field(default_factory=dict)

    def delta(self) -> float:
        """The largest delta that is reached at the promise's epsilon."""
        return float(self._value(())[round(ROOM / STEP)])  # type: ignore[index]

    def _value(self, plans: tuple[Plan, ...]) -> Array | None:
        """V over losses so far; None where the plans are refused. Behind the first plan their order does not matter."""
        key = plans[:1] + tuple(sorted(plans[1:], key=repr))
        if key not in self._known:
            self._known[key] = self._best(plans) if not plans or self.judge(plans, self.promise) else None
        return self._known[key]

    def _best(self, plans: tuple[Plan, ...]) -> Array:
        losses = np.arange(-round(ROOM / STEP), round(ROOM / STEP) + 1) * STEP
        best: Array = -np.expm1(np.minimum(self.promise.epsilon - losses, 0.0))
        stop = best
        for events in self.menu if len(plans) < self.depth else ():
            plan = plan_of(events)
            behind = self._value((*plans, plan))
            if behind is not None:
                best = np.maximum(best, self._expected(plan, behind))
                if plans:
                    best = np.maximum(best, self._expected(self._most(plans, plan), stop))
        return best

    def _most(self, plans: tuple[Plan, ...], plan: Plan) -> Plan:
        """The largest multiple that is still accepted."""
        low, high = 1, self.last + 1
        while high - low > 1:
            middle = (low + high) // 2
            accepted = self.judge((*plans, _times(plan, middle)), self.promise)
            low, high = (middle, high) if accepted else (low, middle)
        return _times(plan, low)

    def _expected(self, plan: Plan, behind: Array) -> Array:
        loss = loss_of(plan, self.promise.adjacency, self.reverse)
        top = max(0, loss.low + len(loss.masses) - 1)
        padded = np.concatenate((np.full(max(0, -loss.low), behind[0]), behind, np.ones(top)))
        found = fftconvolve(padded, loss.masses[::-1], mode="valid")
        start = max(0, loss.low)
        return np.minimum(1.0, found[start : start + len(behind)] + loss.infinity)


def _times(plan: Plan, count: int) -> Plan:
    return tuple(replace(event, count=event.count * count) for event in plan)


def error_of_grid(plan: Plan, promise: Promise, exact: float) -> float:
    """How much the grid adds to the delta of one plan, relatively."""
    alone = Adversary([plan], promise, lambda plans, _: len(plans) <= 1, 1)
    return alone.delta() / exact - 1 if exact > 0 else math.inf
