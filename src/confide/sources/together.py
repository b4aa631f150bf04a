"""Several releases that are paid for in one go: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence

from confide.data.schema import Schema
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.events import Event
from confide.running.fit import Source
from confide.sources.queries import Query, Release


class PaidTogether:
    """A source whose first charge pays for everything that is to come. The same charge again is free as often as it was
    paid for; any other is paid.

    times    how often what is charged will be run
    beside   mechanisms with their steps that are asked beside it, each paid for once
    purpose  of what is asked beside it, for the ledger
    """

    def __init__(
        self,
        source: Source,
        times: int = 1,
        beside: Sequence[tuple[SampledGaussian, int]] = (),
        purpose: str = "",
    ) -> None:
        self.source, self.times, self.beside, self.purpose = source, times, beside, purpose
        self.prepaid: list[list[tuple[SampledGaussian, int]]] = []
        self.schema: Schema = source.schema
        self.seeded: bool = source.seeded

    def rehearse(self, query: Query) -> None:
        self.source.rehearse(query)

    def charge(self, mechanism: SampledGaussian, steps: int, purpose: str = "") -> None:
        self.charge_all([(mechanism, steps)], purpose)

    def charge_all(self, parts: Sequence[tuple[SampledGaussian, int]], purpose: str = "") -> None:
        if list(parts) in self.prepaid:
            self.prepaid.remove(list(parts))
            return
        wanted = [*self.beside, *(part for _ in range(self.times) for part in parts)]
        said = f"{purpose} and {self.purpose}" if self.purpose else purpose
        if hasattr(self.source, "charge_all"):
            self.source.charge_all(wanted, said)
        else:
            for mechanism, steps in wanted:
                self.source.charge(mechanism, steps, said)
        self.beside, self.prepaid = (), [list(parts)] * (self.times - 1)

    def answer(self, query: Query, mechanism: SampledGaussian, purpose: str = "") -> Release:
        return self.source.answer(query, mechanism, purpose)

    def events_beside(self) -> tuple[Event, ...]:
        """What a source that adapts itself has charged beside the plans."""
        found: tuple[Event, ...] = getattr(self.source, "events_beside", tuple)()
        return found
