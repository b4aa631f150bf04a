"""What a charge would cost, worked out as seldom as possible and remembered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from confide.privacy.events import Adjacency, Event
from confide.privacy.ledger.budget import Multiset, Prices, compose, single
from confide.privacy.ledger.entries import Limit

# Charges smaller than this part of what is there already come in a run of many; prepare for the next ones.
_SMALL = 0.25


class Pricing:
    """Prices by delta and adjacency, shared by the threads of one ledger."""

    def __init__(self) -> None:
        self._prices: dict[tuple[float, Adjacency], Prices] = {}
        self._lock = threading.RLock()

    def within(self, worlds: list[Multiset], limit: Limit) -> bool | None:
        """Whether all of them stay within the ceiling; None where what is known does not tell."""
        with self._lock:
            prices = self._at(limit.delta, limit.adjacency)
            known = [prices.within(world, limit.epsilon) for world in worlds]
        return False if False in known else None if None in known else True

    def find_out(self, worlds: list[Multiset], events: Sequence[Event], limit: Limit) -> None:
        """Composes what the next question needs to know; `events` are those that made these worlds."""
        if len(events) != 1:
            self.epsilon(worlds, limit.delta, limit.adjacency)
            return
        event = events[0]
        unit = single(event)
        for world in worlds:
            with self._lock:
                prices = self._at(limit.delta, limit.adjacency)
                if prices.within(world, limit.epsilon) is not None:
                    continue
                in_a_run = event.count <= _SMALL * world.get(unit, 0)
                larger = prices.larger(world, unit, limit.epsilon) if in_a_run else None
            if larger is None or self.epsilon([larger], limit.delta, limit.adjacency) > limit.epsilon:
                self.epsilon([world], limit.delta, limit.adjacency)

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
