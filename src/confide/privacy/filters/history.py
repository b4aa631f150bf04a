"""Plans in the order in which they were charged, and the promise that they are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from confide.privacy.events import Adjacency, Event, merged

Plan: TypeAlias = tuple[Event, ...]

FIXED, REPETITION, GAUSSIAN, RENYI = "fixed in advance", "repetition", "gaussian", "renyi"


def plan_of(events: Iterable[Event]) -> Plan:
    """The events as a plan: equal ones counted together, in one order for equal plans."""
    return tuple(sorted(merged(events), key=repr))


@dataclass(frozen=True)
class Promise:
    """The ceiling: all plans together stay (epsilon, delta)-private."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"


@dataclass(frozen=True)
class Sum:
    """What one filter has added up over the first plans of a log: amounts, and what they may give away altogether.

    rules     the version of the rules that it was added up by
    promise   the ceiling that it was added up for
    first     the first plan of all, which is left out of the sum
    inside    whether that one is the first plan of this log
    """

    rules: int
    promise: Promise
    first: Plan
    inside: bool
    filter: str
    position: int = field(compare=False)
    amount: float = field(compare=False)
    slack: float = field(compare=False)


class Log:
    """Plans, each with a number that rises over all logs of a data set. Append-only: sums over it are kept.

    noted   sums that were written down, so that a process that opens the ledger need not add up from the beginning
    """

    __slots__ = ("__weakref__", "noted", "numbers", "plans")

    def __init__(self, plans: Iterable[Plan] = ()) -> None:
        self.plans: list[Plan] = []
        self.numbers: list[int] = []
        self.noted: dict[Sum, Sum] = {}
        for plan in plans:
            self.add(plan, len(self.plans))

    def add(self, plan: Plan, number: int) -> None:
        if plan:
            self.numbers.append(number)  # before the plan, which is what readers count
            self.plans.append(plan)

    def note(self, found: Sum) -> None:
        """Take the sum as known; of two for the same question the one that reaches further."""
        if found.position <= len(self.plans) and found.position > self.reached(found):
            self.noted.pop(found, None)
            self.noted[found] = found

    def reached(self, question: Sum) -> int:
        """Up to which plan the sum is written down."""
        known = self.noted.get(question)
        return -1 if known is None else known.position


@dataclass(frozen=True)
class History:
    """What one neighbouring record can have touched: the plans of some logs, and then one more that is asked about."""

    logs: Sequence[Log]
    more: Plan = ()

    def begun(self) -> Log | None:
        """The log that holds the first plan of all; None if there is none yet."""
        held = [log for log in self.logs if log.plans]
        return min(held, key=lambda log: log.numbers[0]) if held else None

    @property
    def count(self) -> int:
        return sum(len(log.plans) for log in self.logs) + bool(self.more)
