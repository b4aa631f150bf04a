"""Where a run stands among everything that was charged to the same records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from confide.errors import UnsupportedEvents
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Adjacency, Event
from confide.privacy.ledger.ledger import Ledger


@dataclass(frozen=True)
class Position:
    """Epsilons of a data set's charges at one delta; None where no sound bound is known.

    before      everything but this run
    run         this run by itself
    total       everything together: less than the sum of the two, for composition is not additive
    left        of the ceiling, by the filter that holds it; None without a ceiling
    limit       the ceiling's epsilon, None without one
    who         by whom this run was charged
    by_whom     how many plans each has charged to the data set, this run included
    """

    before: float | None
    run: float | None
    total: float | None
    left: float | None
    limit: float | None
    delta: float
    adjacency: Adjacency
    who: str
    by_whom: tuple[tuple[str, int], ...]


def position_of(ledger: Ledger, dataset: str, events: Sequence[Event], delta: float, adjacency: Adjacency) -> Position:
    """The position of a run that released `events`, at the ceiling's delta and adjacency or else at the given ones."""
    ceiling = ledger.ceiling
    if ceiling is not None:
        delta, adjacency = ceiling.delta, ceiling.adjacency
    others = _without(ledger.events(dataset), events)
    run = _epsilon(events, delta, adjacency)
    total = run if not others else _spent(ledger, dataset, delta, adjacency)
    before = _epsilon(others, delta, adjacency) if others else 0.0
    if before is not None and total is not None:
        before = min(before, total)  # parts of a data set compose in parallel, which the whole list does not know
    left = None
    if ceiling is not None:
        try:
            left = ledger.remaining(dataset)
        except UnsupportedEvents:
            left = 0.0
    limit = None if ceiling is None else ceiling.epsilon
    return Position(before, run, total, left, limit, delta, adjacency, ledger.who, charged_by(ledger, dataset))


def charged_by(ledger: Ledger, dataset: str) -> tuple[tuple[str, int], ...]:
    """Who has charged how many plans to a data set, the most first."""
    plans = {(entry.plan or entry.position): entry.who for entry in ledger.entries(dataset)}
    return tuple(Counter(plans.values()).most_common())


def _without(booked: Iterable[Event], events: Iterable[Event]) -> list[Event]:
    """What was booked beside these events."""
    due: Counter[Event] = Counter()
    for event in events:
        due[replace(event, count=1)] += event.count
    found = []
    for event in booked:
        one = replace(event, count=1)
        taken = min(due[one], event.count)
        due[one] -= taken
        if event.count > taken:
            found.append(replace(event, count=event.count - taken))
    return found


def _epsilon(events: Sequence[Event], delta: float, adjacency: Adjacency) -> float | None:
    try:
        return float(sound_epsilon(events, delta, adjacency))
    except UnsupportedEvents:
        return None


def _spent(ledger: Ledger, dataset: str, delta: float, adjacency: Adjacency) -> float | None:
    try:
        return ledger.spent(delta, dataset, adjacency)
    except UnsupportedEvents:
        return None
