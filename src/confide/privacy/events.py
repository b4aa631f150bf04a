"""Events: what happened to the data, written down so that any accountant can price it later.

An event is a fact about a release, not an opinion about its cost. It is frozen and serialisable, and it knows
nothing of torch. `noise_multiplier` always means

    noise standard deviation / C,   where C bounds the norm of ONE record's contribution,

never the norm of a difference of two records. Accountants turn that into a sensitivity for the adjacency asked for
(C when a record is added or removed, 2C when one is replaced).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from confide.errors import Refusal

Adjacency: TypeAlias = Literal["add-remove", "replace-one"]
Sampling: TypeAlias = Literal["poisson", "fixed-size", "shuffle", "full-batch"]
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
# batch / records in floating point is off by 2^-53 of itself; a few operations may have been done with it since.
_ROUNDING = Fraction(1, 2**49)


@dataclass(frozen=True)
class GaussianEvent:
    """`count` releases of a sum of clipped per-record answers plus Gaussian noise.

    poisson      each record joins each batch with probability `rate`, independently
    fixed-size   a fresh batch of exactly `batch` distinct records at every step; `rate` is batch / records, rounded up
    shuffle      passes over a permuted data set: each record is used once per pass; `count` counts PASSES
    full-batch   every record at every step; `rate` is 1
    """

    noise_multiplier: float
    sampling: Sampling = "full-batch"
    rate: float = 1.0
    count: int = 1
    records: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise Refusal(f"noise_multiplier={self.noise_multiplier}: must be a finite number > 0")
        if self.sampling not in SAMPLINGS:
            raise Refusal(f"sampling={self.sampling!r}: must be one of {', '.join(SAMPLINGS)}")
        if not 0 < self.rate <= 1:
            raise Refusal(f"rate={self.rate}: must be in (0, 1]")
        if self.sampling == "full-batch" and self.rate != 1:
            raise Refusal(f"rate={self.rate}: full-batch sampling uses every record, so the rate must be 1")
        if self.count < 1:
            raise Refusal(f"count={self.count}: must be at least 1")
        if self.sampling == "fixed-size":
            object.__setattr__(self, "rate", above(whole_batch(self.rate, self.records)))

    @property
    def batch(self) -> int:
        """Records per step; only fixed-size sampling has an exact number."""
        if self.records is None:
            raise Refusal("records=None: only events with a declared number of records have a batch size")
        return round(Fraction(self.rate) * self.records)


def whole_batch(rate: float, records: int | None) -> Fraction:
    """The rate of fixed-size batches as the exact fraction batch / records; a rate that is none is refused."""
    if records is None or records < 1:
        raise Refusal(f"records={records}: fixed-size sampling needs the public number of records")
    batch = round(Fraction(rate) * records)
    if batch < 1 or abs(Fraction(rate) * records - batch) > batch * _ROUNDING:
        raise Refusal(f"rate={rate}: rate * records must be a whole number of records, not {rate * records}")
    return Fraction(batch, records)


def above(share: Fraction) -> float:
    """The least floating-point number that is not below the fraction: an accountant that reads it errs upwards."""
    found = float(share)
    return found if Fraction(found) >= share else math.nextafter(found, math.inf)


@dataclass(frozen=True)
class PureEvent:
    """`count` releases that are each epsilon-differentially private, for the stated adjacency.

    slack  the delta of one release: 0, or the little by which a sampler misses the law that is private with delta = 0
    """

    epsilon: float
    adjacency: Adjacency = "add-remove"
    count: int = 1
    slack: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise Refusal(f"epsilon={self.epsilon}: must be a finite number > 0")
        if self.adjacency not in ADJACENCIES:
            raise Refusal(f"adjacency={self.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")
        if self.count < 1:
            raise Refusal(f"count={self.count}: must be at least 1")
        if not 0 <= self.slack < 1:
            raise Refusal(f"slack={self.slack}: must be in [0, 1)")


@dataclass(frozen=True)
class VotesEvent:
    """`count` releases of votes, plus Gaussian noise of standard deviation `noise` in every number.

    Voters hold disjoint parts of the records, and a record's part is drawn by a coin of its own. So whether a record
    is added, removed or replaced, one voter changes: the released numbers move by at most `moved` under EITHER
    adjacency, and an accountant must not double it.
    """

    noise: float
    moved: float
    count: int = 1

    def __post_init__(self) -> None:
        for name, value in (("noise", self.noise), ("moved", self.moved)):
            if not (math.isfinite(value) and value > 0):
                raise Refusal(f"{name}={value}: must be a finite number > 0")
        if self.count < 1:
            raise Refusal(f"count={self.count}: must be at least 1")


@dataclass(frozen=True)
class NonPrivateEvent:
    """A release without protection; every accountant answers infinity."""

    reason: str
    count: int = 1


Event: TypeAlias = GaussianEvent | PureEvent | VotesEvent | NonPrivateEvent
_KINDS: dict[str, type[Any]] = {
    "gaussian": GaussianEvent,
    "pure": PureEvent,
    "votes": VotesEvent,
    "non-private": NonPrivateEvent,
}


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON values."""
    for kind, cls in _KINDS.items():
        if type(event) is cls:
            return {"kind": kind, **asdict(event)}
    raise TypeError(f"event={event!r}: unknown kind of event; known: {', '.join(_KINDS)}")


def event_from_dict(values: dict[str, Any]) -> Event:
    """The inverse of `event_to_dict`. An unknown kind is refused, never guessed."""
    rest = dict(values)
    kind = rest.pop("kind", None)
    if kind not in _KINDS:
        raise Refusal(f"kind={kind!r}: unknown kind of event; known: {', '.join(_KINDS)}")
    try:
        event: Event = _KINDS[kind](**rest)
    except TypeError as error:
        raise Refusal(f"kind={kind!r}: {error}") from None
    return event


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same multiset of events with equal ones counted together; composition does not depend on order."""
    totals: dict[Event, int] = {}
    for event in events:
        unit = event if event.count == 1 else replace(event, count=1)  # a ledger reads a hundred thousand of them
        totals[unit] = totals.get(unit, 0) + event.count
    return tuple(unit if count == 1 else replace(unit, count=count) for unit, count in totals.items())
