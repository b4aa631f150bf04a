"""What a data set has been charged, and whether one more charge stays below a ceiling.

Composition does not depend on order, so a charged data set is a multiset of events: each distinct event
with its number of releases. Composing by privacy loss distributions takes a good part of a second, too long
to do for each of thousands of small charges. Two facts about multisets spare most of it, whatever the
accountant:

    M contained in B and epsilon(B) <= ceiling:  M is within it, for dropping releases is post-processing
    A contained in M and epsilon(A) >  ceiling:  M is refused, for more releases cannot cost less

so a run of equal small charges needs only O(log n) compositions: see `Prices.larger`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import TypeAlias

from confide.errors import UnsupportedEvents
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent

Multiset: TypeAlias = dict[Event, int]

_REMEMBERED = 512


def single(event: Event) -> Event:
    """The event that `event` counts."""
    return event if event.count == 1 else replace(event, count=1)


def _sum(multisets: Iterable[Multiset]) -> Multiset:
    total: Multiset = {}
    for multiset in multisets:
        for event, count in multiset.items():
            total[event] = total.get(event, 0) + count
    return total


def _contained(small: Multiset, large: Multiset) -> bool:
    return len(small) <= len(large) and all(count <= large.get(event, 0) for event, count in small.items())


def _maximal(multisets: Iterable[Multiset]) -> list[Multiset]:
    """Drops what is contained in another: it costs no more than that one."""
    kept: list[Multiset] = []
    for multiset in sorted(multisets, key=lambda one: sum(one.values()), reverse=True):
        if not any(_contained(multiset, other) for other in kept):
            kept.append(multiset)
    return kept


@dataclass
class Account:
    """The events charged to one data set: those on all of it, and those on each declared partition."""

    whole: Multiset = field(default_factory=dict)
    parts: dict[str, Multiset] = field(default_factory=dict)

    def add(self, event: Event, partition: str | None) -> None:
        target = self.whole if partition is None else self.parts.setdefault(partition, {})
        unit = single(event)
        target[unit] = target.get(unit, 0) + event.count

    def plus_all(self, events: Iterable[Event], partition: str | None) -> Account:
        """A copy with more charges."""
        copy = Account(dict(self.whole), {name: dict(part) for name, part in self.parts.items()})
        for event in events:
            copy.add(event, partition)
        return copy

    def events(self) -> tuple[Event, ...]:
        total = _sum([self.whole, *self.parts.values()])
        return tuple(replace(event, count=count) for event, count in total.items())

    def worlds(self, adjacency: Adjacency) -> list[Multiset]:
        """What one neighbouring record can touch: the cost is the largest epsilon over these multisets.

        A record that is added or removed lies in one partition: {whole + part}. A record that is replaced
        may leave one partition and enter another, and then both of them see a change: {whole + part + other
        part}.
        """
        if not self.parts:
            return [self.whole] if self.whole else []
        if adjacency == "add-remove":
            return _maximal(_sum([self.whole, part]) for part in self.parts.values())
        _check_moving_record(self.parts.values())
        return _maximal(_sum([self.whole, *pair]) for pair in _pairs(list(self.parts.values())))


def _pairs(parts: list[Multiset]) -> list[tuple[Multiset, ...]]:
    """All pairs of partitions, up to equality of what was charged to them."""
    if len(parts) == 1:
        return [(parts[0],)]
    number = Counter(frozenset(part.items()) for part in parts)
    pairs = combinations_with_replacement(number, 2)
    return [(dict(one), dict(two)) for one, two in pairs if one != two or number[one] > 1]


def _check_moving_record(parts: Iterable[Multiset]) -> None:
    """Refuses events whose replace-one bound does not cover a record that moves to another partition.

    The partition it leaves sees a removal, the one it enters an addition. For a noisy sum over all records,
    or over independently drawn ones, removing a record is the same as replacing it by one that answers
    zero, so the replace-one bound covers it. Fixed-size batches, shuffled passes and events that are
    private for replacement only may reveal the number of records in the partition.
    """
    for event in (event for part in parts for event in part):
        fixed_number = isinstance(event, GaussianEvent) and event.sampling in ("fixed-size", "shuffle")
        replacement_only = isinstance(event, PureEvent) and event.adjacency == "replace-one"
        if fixed_number or replacement_only:
            raise UnsupportedEvents(
                f"adjacency='replace-one': no sound bound for {event!r} in a partition, as a replaced record "
                "may change the partition's size; charge it to the whole data set, or sample by 'poisson'"
            )


def compose(multiset: Multiset, delta: float, adjacency: Adjacency) -> float:
    """The sound epsilon of all these events together."""
    if not multiset:
        return 0.0
    from confide.privacy import accountants

    events = sorted((replace(event, count=count) for event, count in multiset.items()), key=repr)
    return float(accountants.sound_epsilon(events, delta, adjacency))


class Prices:
    """The epsilons composed so far at one delta and adjacency. The caller keeps threads apart."""

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[Event, int]], tuple[Multiset, float]] = {}

    def remember(self, multiset: Multiset, epsilon: float) -> None:
        if len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[frozenset(multiset.items())] = (multiset, epsilon)

    def exact(self, multiset: Multiset) -> float | None:
        found = self._known.get(frozenset(multiset.items()))
        return None if found is None else found[1]

    def within(self, multiset: Multiset, ceiling: float) -> bool | None:
        """Whether the multiset stays within the ceiling; None where what is known does not tell."""
        if not multiset:
            return True
        for known, epsilon in reversed(self._known.values()):
            if epsilon <= ceiling and _contained(multiset, known):
                return True
            if epsilon > ceiling and _contained(known, multiset):
                return False
        return None

    def larger(self, multiset: Multiset, unit: Event, ceiling: float) -> Multiset | None:
        """A multiset with more of `unit` that answers for many later charges if it is within the ceiling.

        Twice as many, or half way to the least number known to be too many: a search by doubling and halving
        that is spread over the charges.
        """
        count = multiset[unit]
        others = {**multiset, unit: 0}
        too_many = [
            known[unit]
            for known, epsilon in self._known.values()
            if epsilon > ceiling and known.get(unit, 0) > count and _contained({**known, unit: 0}, others)
        ]
        target = (count + min(too_many)) // 2 if too_many else 2 * count
        return {**multiset, unit: target} if target > count else None
