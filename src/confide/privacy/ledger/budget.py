"""What a data set has been charged: its events, and the plans they came in.

For a sum of what was spent the order does not matter, so it is kept as a multiset of events. For the ceiling it does:
a plan that was charged later may have been chosen by what an earlier one released, so the plans are kept as well, in
their order (see `confide.privacy.filters`). Everything here is appended to and never copied for a charge, so that a
charge costs the same however much was charged before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias

from confide.errors import Refusal, UnsupportedEvents
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent
from confide.privacy.filters import History, Log, Sum, plan_of

Multiset: TypeAlias = dict[Event, int]

_REMEMBERED = 512  # Epsilons kept in memory; the oldest goes first.
# From so many different un-sampled Gaussian releases on, they are kept as the one release that they amount to.
_MANY = 16
# That release is given less noise by this fraction: more than the rounding of four million additions.
_ROUNDING = 1e-9


def single(event: Event) -> Event:
    """The event that `event` counts."""
    return event if event.count == 1 else replace(event, count=1)


class ChargedPart:
    """What was charged to one partition, or to the whole: events, the plans they came in, and what these amount to.

    events    how often each event was charged
    log       the plans
    shape     the same number for partitions that were charged the same plans in the same order
    unmoved   an event that has no bound for a record that moves between partitions, if there is one
    """

    def __init__(self) -> None:
        self.events: Multiset = {}
        self.log = Log()
        self.shape = 0
        self.unmoved: Event | None = None
        self._others: Multiset = {}  # all but un-sampled Gaussians
        self._plain: Multiset = {}
        self._precision = 0.0  # the sum of 1 / noise^2 over un-sampled Gaussians

    def add(self, event: Event) -> None:
        unit = single(event)
        self.events[unit] = self.events.get(unit, 0) + event.count
        if self.unmoved is None and not _covers_a_move(event):
            self.unmoved = unit
        if isinstance(event, GaussianEvent) and event.sampling == "full-batch" and event.noise_multiplier > 0:
            self._plain[unit] = self._plain.get(unit, 0) + event.count
            self._precision += event.count / event.noise_multiplier**2
        else:
            self._others[unit] = self._others.get(unit, 0) + event.count

    def amounts_to(self) -> Multiset:
        """A multiset that costs the same, and does not grow with un-sampled Gaussians."""
        if len(self._plain) < _MANY:
            return self.events
        noise = 1 / math.sqrt(self._precision) * (1 - _ROUNDING)
        return {**self._others, GaussianEvent(noise): 1}


_EMPTY = ChargedPart()


@dataclass
class Account:
    """What was charged to one data set: on all of it (None), and on each declared partition.

    before_ceiling  how many plans were there when the ceiling was set, or changed for the last time
    """

    parts: dict[str | None, ChargedPart] = field(default_factory=dict)
    before_ceiling: int = 0
    _count: int = 0
    _last: tuple[int, str | None, tuple[Event, ...]] | None = None
    _shapes: dict[tuple[int, object], int] = field(default_factory=dict)

    def add(self, event: Event, partition: str | None, plan: int) -> None:
        """One event more; those with the same number `plan` were charged together."""
        if self._last is None or self._last[:2] != (plan, partition):
            self._close()
            self._last = (plan, partition, ())
        self._last = (plan, partition, (*self._last[2], event))
        self.parts.setdefault(partition, ChargedPart()).add(event)

    def _close(self) -> None:
        """The plan whose entries came last is whole, and becomes part of the log."""
        if self._last is None:
            return
        _, partition, events = self._last
        self._last = None
        part, plan = self.parts[partition], plan_of(events)
        part.log.add(plan, self._count)
        self._count += 1
        if partition is not None:
            part.shape = self._shapes.setdefault((part.shape, plan), len(self._shapes) + 1)

    def note(self, partition: str | None, found: Sum) -> None:
        """A sum over the plans of one part that is written down, so that it need not be made again."""
        self._close()
        part = self.parts.get(partition)
        if part is None or found.position > len(part.log.plans):
            raise Refusal(f"a sum over {found.position} plans, which are not there")
        part.log.note(found)

    def part_of(self, log: Log) -> str | None:
        """The partition whose plans these are."""
        return next(name for name, part in self.parts.items() if part.log is log)

    @property
    def plans(self) -> int:
        """How many plans were charged."""
        self._close()
        return self._count

    def events(self) -> tuple[Event, ...]:
        total = _sum(part.events for part in self.parts.values())
        return tuple(replace(event, count=count) for event, count in total.items())

    def worlds(self, adjacency: Adjacency, more: Sequence[Event] = (), partition: str | None = None) -> list[Multiset]:
        """What one neighbouring record can touch: the cost is the largest epsilon over these multisets.

        A record that is added or removed lies in one partition: {whole + part}. A record that is replaced may leave one
        partition and enter another, and then both of them see a change: {whole + part + other part}. `more` is counted
        as if it had been charged to the partition.
        """
        self._check_moving_record(adjacency, more if partition is not None else ())
        charged = {name: part.amounts_to() for name, part in self.parts.items()}
        if more:
            extra = _sum({single(event): event.count} for event in more)
            charged[partition] = _sum([charged.get(partition, {}), extra])
        whole = charged.pop(None, {})
        if not charged:
            return [dict(whole)] if whole else []
        contents = {name: frozenset(part.items()) for name, part in charged.items() if name is not None}
        return _maximal(_sum([whole, *(charged[name] for name in names)]) for names in _seen(contents, adjacency))

    def histories(
        self, adjacency: Adjacency, more: Sequence[Event] = (), partition: str | None = None
    ) -> list[History]:
        """The plans that one neighbouring record can have seen, for the same neighbours as `worlds`."""
        self._close()
        self._check_moving_record(adjacency, more if partition is not None else ())
        plan = plan_of(more)
        whole = self.parts.get(None, _EMPTY).log
        parts = {name: part for name, part in self.parts.items() if name is not None}
        if partition is not None:
            parts.setdefault(partition, _EMPTY)
        if not parts:
            return [History((whole,), plan)]
        # What is asked about makes its partition unlike all others.
        shapes = {name: (part.shape, bool(plan) and name == partition) for name, part in parts.items()}
        return [
            History((whole, *(parts[name].log for name in names)), plan if partition in (None, *names) else ())
            for names in _seen(shapes, adjacency)
        ]

    def _check_moving_record(self, adjacency: Adjacency, more: Iterable[Event] = ()) -> None:
        """Refuses events whose replace-one bound does not cover a record that moves to another partition."""
        if adjacency == "add-remove":
            return
        unmoved = [part.unmoved for name, part in self.parts.items() if name is not None]
        unmoved += [single(event) for event in more if not _covers_a_move(event)]
        for event in unmoved:
            if event is not None:
                raise UnsupportedEvents(
                    f"adjacency='replace-one': no sound bound for {event!r} in a partition, as a replaced record "
                    "may change the partition's size; charge it to the whole data set, or sample by 'poisson'"
                )


def _covers_a_move(event: Event) -> bool:
    """Whether its replace-one bound covers a record that leaves one partition and enters another.

    The partition it leaves sees a removal, the one it enters an addition. For a noisy sum over all records,
    or over independently drawn ones, removing a record is the same as replacing it by one that answers
    zero, so the replace-one bound covers it. Fixed-size batches, shuffled passes and events that are
    private for replacement only may reveal the number of records in the partition.
    """
    fixed_number = isinstance(event, GaussianEvent) and event.sampling in ("fixed-size", "shuffle")
    replacement_only = isinstance(event, PureEvent) and event.adjacency == "replace-one"
    return not (fixed_number or replacement_only)


def _seen(alike: Mapping[str, object], adjacency: Adjacency) -> list[tuple[str, ...]]:
    """The partitions, or pairs of them, that one neighbouring record can lie in, up to equality of what they saw.

    Of partitions that were charged alike, the two first and the two last to be charged stand for all: what a record has
    seen is made of what was charged, and of which plan came first.
    """
    groups: dict[object, list[str]] = {}
    for name, what in alike.items():
        groups.setdefault(what, []).append(name)
    kept = [name for group in groups.values() for name in dict.fromkeys([*group[:2], *group[-2:]])]
    if adjacency == "add-remove" or len(alike) == 1:
        return [(name,) for name in kept]
    return list(combinations(kept, 2))


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
        self._known: dict[frozenset[tuple[Event, int]], float] = {}

    def remember(self, multiset: Multiset, epsilon: float) -> None:
        if len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[frozenset(multiset.items())] = epsilon

    def exact(self, multiset: Multiset) -> float | None:
        return self._known.get(frozenset(multiset.items()))
