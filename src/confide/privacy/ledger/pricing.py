"""What charges cost and whether they stay within the ceiling, worked out as seldom as possible and remembered."""

from __future__ import annotations

import threading

from confide.privacy.events import Adjacency
from confide.privacy.filters import Filters, History, Log, Promise, Sum, Verdict
from confide.privacy.ledger.budget import Multiset, Prices, compose
from confide.privacy.ledger.entries import Limit


class Pricing:
    """Prices by delta and adjacency, shared by the threads of one ledger."""

    def __init__(self) -> None:
        self._prices: dict[tuple[float, Adjacency], Prices] = {}
        self._filters = Filters()
        self._lock = threading.RLock()

    def within(self, histories: list[History], limit: Limit) -> bool | None:
        """Whether all of them stay within the ceiling; None where what is known does not tell."""
        known = [self._filters.recall(history, _promise(limit)) for history in histories]
        return False if False in known else None if None in known else True

    def judge(self, histories: list[History], limit: Limit) -> Verdict:
        """The worst verdict over what one neighbouring record can have seen; takes its time."""
        return _worst([self._filters.judge(history, _promise(limit)) for history in histories])

    def costs(self, histories: list[History], limit: Limit) -> Verdict:
        """The same, with what every filter would need."""
        return _worst([self._filters.costs(history, _promise(limit)) for history in histories])

    def needed(self, histories: list[History], limit: Limit) -> Verdict:
        """The same for a refusal: about the least ceiling that would have room."""
        return _worst([self._filters.needed(history, _promise(limit)) for history in histories])

    def worth_noting(self, histories: list[History], limit: Limit) -> list[tuple[Log, Sum]]:
        """Sums that the filters have made and that should be written down."""
        return [found for history in histories for found in self._filters.worth_noting(history, _promise(limit))]

    def epsilon(self, worlds: list[Multiset], delta: float, adjacency: Adjacency) -> float:
        """The largest epsilon over what one neighbouring record can touch."""
        return max((self._epsilon_of(world, delta, adjacency) for world in worlds), default=0.0)

    def _epsilon_of(self, world: Multiset, delta: float, adjacency: Adjacency) -> float:
        with self._lock:
            known = self._at(delta, adjacency).exact(world)
        if known is not None:
            return known
        epsilon = compose(world, delta, adjacency)
        with self._lock:
            self._at(delta, adjacency).remember(dict(world), epsilon)
        return epsilon

    def _at(self, delta: float, adjacency: Adjacency) -> Prices:
        return self._prices.setdefault((delta, adjacency), Prices())


def _worst(verdicts: list[Verdict]) -> Verdict:
    return max(verdicts, key=lambda verdict: (not verdict.within, verdict.epsilon if verdict.costs else 0.0))


def _promise(limit: Limit) -> Promise:
    return Promise(limit.epsilon, limit.delta, limit.adjacency)
