"""Whether a history keeps a promise, and by which filter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from confide.privacy.accountants.bound import is_plain_gaussian, non_private
from confide.privacy.events import Adjacency
from confide.privacy.filters import kinds
from confide.privacy.filters.history import FIXED, GAUSSIAN, RENYI, REPETITION, History, Log, Plan, Promise, Sum
from confide.privacy.filters.kinds import Filter

# How delta is shared. A filter that gets a part w of delta loses about as much epsilon as log(1 / w) adds to
# log(1 / delta): some 3 % at one half. Renyi is the last resort. Un-sampled Gaussians repeat inside `gaussian`.
SHARES = {REPETITION: 0.4, GAUSSIAN: 0.5, RENYI: 0.1}
SHARES_OF_GAUSSIANS = {REPETITION: 0.0, GAUSSIAN: 0.9, RENYI: 0.1}
# How often a refusal looks for a ceiling that would have room, and up to how many plans.
_ASKED_AGAIN, _SHORT = 4, 16
# Families of filters and prices of single plans that are kept in memory, each.
_REMEMBERED = 512


@dataclass(frozen=True)
class Verdict:
    """Whether the plans stay within the ceiling, and by which filter.

    by     the filter that has room; when refused, the one that came closest
    costs  the epsilon that each filter would have to be given; what was not needed for the verdict is left out
    """

    within: bool
    by: str
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """The least ceiling that one of the filters would have accepted."""
        return min(self.costs.values(), default=math.inf)


class Filters:
    """Judges histories, and remembers per ceiling and first plan what it worked out. Sound whatever is forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[Plan, Promise], _Family] = {}
        self._costs: dict[tuple[Plan, float, Adjacency], float] = {}

    def judge(self, history: History, promise: Promise) -> Verdict:
        """Whether these plans together keep the promise. Raises UnsupportedEvents where no bound is known at all."""
        first, begun = _first(history)
        if history.count < 2:
            cost = self._cost(first, promise) if first else 0.0
            return Verdict(cost <= promise.epsilon, FIXED, {FIXED: cost})
        if non_private(first) is not None:
            return Verdict(False, FIXED, {FIXED: math.inf})
        family = self._family(first, promise)
        for name, one in family.filters.items():
            if one.within(history, begun):
                return Verdict(True, name)
        return self._closest(family, history, begun)

    def costs(self, history: History, promise: Promise) -> Verdict:
        """As `judge`, with the price of every filter also where one of them has room."""
        first, begun = _first(history)
        if history.count < 2 or non_private(first) is not None:
            return self.judge(history, promise)
        return self._closest(self._family(first, promise), history, begun)

    def needed(self, history: History, promise: Promise) -> Verdict:
        """As `costs`, for a refusal: about the least ceiling that would have room.

        Filters are made for their ceiling, and far above it they say little, so the question is put again for a ceiling
        as high as the last answer, as long as that helps and the history is short.
        """
        found = self.costs(history, promise)
        for _ in range(_ASKED_AGAIN):
            higher = min(found.epsilon, 64 * promise.epsilon)
            if found.within or history.count > _SHORT or higher <= promise.epsilon:
                break
            other = self.costs(history, replace(promise, epsilon=higher))
            if not other.epsilon < 0.99 * found.epsilon:
                break
            found = Verdict(False, other.by, other.costs)
        return found

    def recall(self, history: History, promise: Promise) -> bool | None:
        """The answer of `judge` if it needs no price that is not known yet, else None."""
        first, begun = _first(history)
        if not first:
            return True
        if history.count < 2:
            cost = self._costs.get((first, promise.delta, promise.adjacency))
            return None if cost is None else cost <= promise.epsilon
        family = self._known.get((first, promise))
        if family is None:
            return None
        answers = [one.recall(history, begun) for one in family.filters.values()]
        return True if True in answers else None if None in answers else False

    def worth_noting(self, history: History, promise: Promise) -> list[tuple[Log, Sum]]:
        """Sums over the logs that are worth writing down, so that the next process need not make them again."""
        first, begun = _first(history)
        family = self._known.get((first, promise))
        if family is None:
            return []
        found = [(log, one.worth_noting(log, log is begun)) for log in history.logs for one in family.filters.values()]
        return [(log, made) for log, made in found if made is not None]

    @staticmethod
    def _closest(family: _Family, history: History, begun: Log | None) -> Verdict:
        costs = {name: one.cost(history, begun) for name, one in family.filters.items()}
        best = min(costs, key=lambda name: costs[name])
        return Verdict(costs[best] <= family.promise.epsilon, best, costs)

    def _family(self, first: Plan, promise: Promise) -> _Family:
        found = self._known.get((first, promise))
        if found is None:
            _forget_some(self._known)
            found = self._known.setdefault((first, promise), _Family(first, promise))
        return found

    def _cost(self, plan: Plan, promise: Promise) -> float:
        key = (plan, promise.delta, promise.adjacency)
        found = self._costs.get(key)
        if found is None:
            _forget_some(self._costs)
            found = self._costs[key] = kinds.sound_epsilon(plan, promise.delta, promise.adjacency)
        return found


def falls_short(log: Log, found: Sum) -> bool:
    """Whether a sum that was written down is less than what its plans come to. Works all of them out again."""
    one = _Family(found.first, found.promise).filters.get(found.filter)
    if found.rules != kinds.RULES or one is None:
        return False  # nobody takes it over
    plans = Log(log.plans[: found.position])
    return found.amount * (1 + kinds.ROUNDING) < one.amount(History([plans]), plans if found.inside else None)


def _first(history: History) -> tuple[Plan, Log | None]:
    """The first plan of all, and the log that holds it; None where it is the plan that is asked about."""
    begun = history.begun()
    return (history.more, None) if begun is None else (begun.plans[0], begun)


def _forget_some(memory: dict[Any, Any]) -> None:
    """Room for one more. The oldest goes first; another thread may be quicker, which does no harm."""
    while len(memory) >= _REMEMBERED:
        memory.pop(next(iter(memory)), None)


class _Family:
    """The filters that a ceiling and a first plan fix."""

    def __init__(self, first: Plan, promise: Promise) -> None:
        self.promise = promise
        shares = SHARES_OF_GAUSSIANS if all(is_plain_gaussian(event) for event in first) else SHARES
        made: list[type[Filter]] = [kinds.RepetitionFilter, kinds.GaussianFilter, kinds.RenyiFilter]
        self.filters = {kind.name: kind(first, promise, shares[kind.name]) for kind in made if shares[kind.name] > 0}
