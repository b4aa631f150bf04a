"""What an accountant answers, and the few facts about events that every accountant shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from confide.errors import Refusal, UnsupportedEvents
from confide.privacy.events import (
    ADJACENCIES,
    Adjacency,
    Event,
    GaussianEvent,
    NonPrivateEvent,
    PureEvent,
    VotesEvent,
    merged,
)

UPPER_BOUND = "upper bound"
EXACT = "upper bound (exact)"
APPROXIMATION = "approximation"
DATA_DEPENDENT = "data-dependent"
_ROUNDING = 2.0**-50  # A product and a quotient are each off by 2^-53 of themselves.


@dataclass(frozen=True)
class Bound:
    """An epsilon together with what it is worth.

    epsilon  the number; None when the accountant does not apply; infinity when there is no protection
    kind     "upper bound", "upper bound (exact)", "approximation", "data-dependent" or "not applicable: reason"
    note     how it was computed, in a few words
    """

    epsilon: float | None
    kind: str
    note: str = ""

    @property
    def sound(self) -> bool:
        """True when the number may be quoted as a guarantee."""
        return self.epsilon is not None and self.kind in (UPPER_BOUND, EXACT)


class Accountant(Protocol):
    """Prices events: the smallest epsilon it can show for a delta."""

    @property
    def name(self) -> str: ...

    def epsilon(self, events: Iterable[Event], delta: float, adjacency: Adjacency = "add-remove") -> Bound: ...


def not_applicable(reason: str) -> Bound:
    return Bound(None, f"not applicable: {reason}")


def check_question(delta: float, adjacency: Adjacency) -> None:
    """Refuse a delta or an adjacency that no accountant could answer for."""
    if not 0 <= delta < 1:
        raise Refusal(f"delta={delta}: must be in [0, 1)")
    if adjacency not in ADJACENCIES:
        raise Refusal(f"adjacency={adjacency!r}: must be one of {', '.join(ADJACENCIES)}")


def known(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events counted together; a foreign object among them is refused, never guessed."""
    listed = tuple(events)
    for event in listed:
        if type(event) not in (GaussianEvent, PureEvent, VotesEvent, NonPrivateEvent):
            raise UnsupportedEvents(
                f"event={event!r}: unknown kind of event; describe the release as a GaussianEvent, a PureEvent "
                "or a NonPrivateEvent"
            )
    return merged(listed)


def counted(events: Iterable[Event], adjacency: Adjacency) -> tuple[Event, ...]:
    """The known events, with votes as the Gaussian releases that they are under this adjacency.

    A Gaussian's noise is told in units of what one record adds, which counts twice where it is replaced; one voter
    moves votes equally far under both. The noise that stands for them is rounded downwards.
    """
    return merged(_as_gaussian(event, adjacency) for event in known(events))


def _as_gaussian(event: Event, adjacency: Adjacency) -> Event:
    if not isinstance(event, VotesEvent):
        return event
    multiplier = sensitivity(adjacency) * event.noise / event.moved
    return GaussianEvent(math.nextafter(multiplier * (1 - _ROUNDING), 0.0), count=event.count)


def non_private(events: Sequence[Event]) -> str | None:
    """The reason given by the first release without protection, if there is one."""
    for event in events:
        if isinstance(event, NonPrivateEvent):
            return event.reason
    return None


def infinite(reason: str) -> Bound:
    return Bound(math.inf, UPPER_BOUND, f"a release without protection: {reason}")


def slack(events: Iterable[Event], adjacency: Adjacency) -> float:
    """What releases with a slack add to delta, at any epsilon and whatever is released beside them.

    A release that is (e, s)-private is no worse than one that gives everything away with probability s and is e-private
    otherwise (Kairouz, Oh and Viswanath 2015). With all releases so replaced, nothing is given away but with the sum of
    the slacks, and the rest composes as if there were none.
    """
    return sum(event.count * _slack(event, adjacency) for event in events if isinstance(event, PureEvent))


def _slack(event: PureEvent, adjacency: Adjacency) -> float:
    """Of one release. Replacing is removing and adding: P <= e^e (e^e Q + s) + s, so s counts 1 + e^e times."""
    if event.slack == 0 or pure_epsilon(event, adjacency) == event.epsilon:
        return event.slack
    return event.slack * (1 + math.exp(min(event.epsilon, 700.0)))


def without_bound(events: Sequence[Event], delta: float, adjacency: Adjacency) -> Bound | None:
    """Infinity where no accountant can do better: a release without protection, or more slack than delta."""
    reason = non_private(events)
    if reason is not None:
        return infinite(reason)
    missed = slack(events, adjacency)
    if missed > delta:
        return Bound(math.inf, UPPER_BOUND, f"delta is below the slack of what was released, {missed:.3g}")
    return None


def sensitivity(adjacency: Adjacency) -> float:
    """How far one record can move a sum of answers of norm at most C, in units of C."""
    return 2.0 if adjacency == "replace-one" else 1.0


def pure_epsilon(event: PureEvent, adjacency: Adjacency) -> float:
    """Epsilon of one pure release under the adjacency asked for.

    Replacing a record is removing one and adding another, so an add-remove guarantee holds twice over. The other
    direction has no bound: a mechanism may publish the number of records and still be private for replacement.
    """
    if event.adjacency == adjacency:
        return event.epsilon
    if adjacency == "replace-one":
        return 2 * event.epsilon
    raise UnsupportedEvents(
        "adjacency='add-remove': a pure release that is private only for replace-one says nothing about adding or "
        "removing a record; ask for adjacency='replace-one'"
    )


def check_sampling(event: GaussianEvent, adjacency: Adjacency) -> None:
    """Refuse samplers whose batches are not defined on data sets that differ in their number of records."""
    if adjacency == "add-remove" and event.sampling in ("fixed-size", "shuffle"):
        raise UnsupportedEvents(
            f"sampling={event.sampling!r} with adjacency='add-remove': no sound bound is known, since one record "
            "more changes every batch; use sampling='poisson', or ask for adjacency='replace-one'"
        )


def is_plain_gaussian(event: Event) -> bool:
    """True when each count is one Gaussian mechanism without amplification.

    A shuffled pass is one: given the permutation, a record enters exactly one batch of the pass, and a mixture over
    permutations is no worse than its worst component.
    """
    if not isinstance(event, GaussianEvent):
        return False
    return event.sampling in ("full-batch", "shuffle") or event.rate == 1.0


def is_exact_gaussian(events: Sequence[Event]) -> bool:
    """True when the Gaussian formula is not merely an upper bound: shuffling may hide more than is provable."""
    return all(
        isinstance(event, GaussianEvent) and is_plain_gaussian(event) and event.sampling != "shuffle"
        for event in events
    )
