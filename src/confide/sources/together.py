"""Several releases that are paid for in one go: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from confide.errors import Refusal
from confide.privacy.events import Event, merged
from confide.sources.base import Part, Receipt, Source, Stretch, Wrapper


class PaidTogether(Wrapper):
    """A source whose first charge pays for everything that is to come. The same charge again is free as often as it was
    paid for; any other is paid. Each run states its own part, and the first one what is asked beside it too.

    times    how often what is charged will be run
    beside   mechanisms with their steps that are asked beside it, each paid for once
    purpose  of what is asked beside it, for the ledger
    """

    def __init__(self, source: Source, times: int = 1, beside: Sequence[Part] = (), purpose: str = "") -> None:
        super().__init__(source)
        self.times, self.purpose = times, purpose
        self._beside = tuple(beside)
        self._due: list[tuple[Part, ...]] = []  # charges that were paid for with an earlier one
        self._together: Stretch | None = None  # under whose name they were paid

    def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
        if tuple(parts) in self._due:
            self._due.remove(tuple(parts))
            return self._paid_before(parts, purpose, stretch)
        beside, self._beside = self._beside, ()
        said = f"{purpose} and {self.purpose}" if self.purpose else purpose
        wanted = [*beside, *(part for _ in range(self.times) for part in parts)]
        together = None if stretch is None else replace(stretch, beside=(*stretch.beside, *beside))
        paid = self._source.charge(wanted, said, together)
        if parts:
            self._due, self._together = [tuple(parts)] * (self.times - 1), stretch
        return paid.stating(_without(paid.events, self._source.price(parts), self.times - 1))

    def _paid_before(self, parts: Sequence[Part], purpose: str, stretch: Stretch | None) -> Receipt:
        events = self._source.price(parts)
        if stretch is None or self._together is None or self._together.claim is None:
            return Receipt(events, ())  # what was paid is open to anybody
        last = self._together.claim[1] + sum(answers for _, answers in parts)
        # Steps of one run follow those of the run before: all of them together are one run in the ledger.
        self._together = replace(stretch, run=self._together.run, claim=(self._together.claim[1] + 1, last))
        return self._source.charge((), purpose, self._together).stating(events)

    def check_resumable(self) -> None:
        if self.times > 1:
            raise Refusal(
                f"checkpoint: {self.times} runs that are paid for together cannot be taken up one by one; fit them "
                "without a checkpoint"
            )
        super().check_resumable()


def _without(events: Sequence[Event], others: Sequence[Event], times: int) -> tuple[Event, ...]:
    """The events less so many times the others, which are among them."""
    if not times:
        return tuple(events)
    left = {replace(event, count=1): event.count for event in merged(events)}
    for event in others:
        left[replace(event, count=1)] -= times * event.count
    return tuple(replace(unit, count=count) for unit, count in left.items() if count)
