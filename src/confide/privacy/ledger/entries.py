"""One entry of a ledger: what it says, how it is read back, how it is shown."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from confide.errors import Refusal
from confide.privacy.events import (
    ADJACENCIES,
    Adjacency,
    Event,
    GaussianEvent,
    PureEvent,
    event_from_dict,
)
from confide.privacy.ledger.budget import single
from confide.privacy.ledger.store import Head, Record


@dataclass(frozen=True)
class Limit:
    """The ceiling: for each data set separately, all its events together stay (epsilon, delta)-private."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        if not (is_real(self.epsilon) and math.isfinite(self.epsilon) and self.epsilon > 0):
            raise Refusal(f"epsilon={self.epsilon!r}: must be a finite number > 0")
        if not (is_real(self.delta) and 0 < self.delta < 1):
            raise Refusal(f"delta={self.delta!r}: must lie strictly between 0 and 1")
        if self.adjacency not in ADJACENCIES:
            raise Refusal(f"adjacency={self.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")


@dataclass(frozen=True)
class Entry:
    """One entry of the chain: a charge (`event` is set) or a new ceiling (`limit` is set).

    position   from 1, without gaps
    time       when it was written, UTC, ISO 8601
    hash       stands for this entry and all before it
    """

    position: int
    time: str
    hash: str
    event: Event | None = None
    limit: Limit | None = None
    purpose: str = ""
    dataset: str = ""
    partition: str | None = None

    @property
    def head(self) -> Head:
        """The ledger's head just after this entry; note it elsewhere for `Ledger.verify`."""
        return Head(self.position, self.hash)


def summary(event: Event) -> str:
    """The event in a few words."""
    if isinstance(event, GaussianEvent):
        rate = "" if event.sampling == "full-batch" else f" rate {event.rate:.6g}"
        what = "passes" if event.sampling == "shuffle" else "steps"
        return f"{event.count} Gaussian {what}, noise {event.noise_multiplier:.6g}, {event.sampling}{rate}"
    if isinstance(event, PureEvent):
        slack = f", slack {event.slack:.3g}" if event.slack else ""
        return f"{event.count} pure, epsilon {event.epsilon:.6g}{slack} ({event.adjacency})"
    return f"{event.count} non-private: {event.reason}"


def row_key(entry: Entry) -> tuple[Any, ...]:
    if entry.event is None:
        return ("limit", entry.position)
    return ("charge", entry.purpose, entry.dataset, entry.partition, single(entry.event))


def row(run: Sequence[Entry]) -> dict[str, Any]:
    last = run[-1]
    if last.limit is not None:
        words = f"ceiling epsilon {last.limit.epsilon:.6g}, delta {last.limit.delta:g}, {last.limit.adjacency}"
    else:
        events = [entry.event for entry in run if entry.event is not None]
        words = summary(replace(events[0], count=sum(event.count for event in events)))
    return {
        "time": last.time,
        "kind": "charge" if last.limit is None else "limit",
        "charges": len(run) if last.limit is None else 0,
        "purpose": last.purpose,
        "dataset": last.dataset,
        "partition": last.partition,
        "event": words,
    }


def entry_of(record: Record) -> Entry:
    """The entry a record holds; what is unknown or missing is refused, never guessed."""
    values = dict(record.values)
    kind, stamp = values.pop("type"), values.pop("time")
    if not isinstance(stamp, str):
        raise Refusal(f"time={stamp!r}")
    if kind == "limit":
        return Entry(record.position, stamp, record.hash, limit=Limit(**values))
    if kind != "charge":
        raise Refusal(f"type={kind!r}")
    event = plain_event(values.pop("event"), 1)
    names = {name: values.pop(name) for name in ("purpose", "dataset", "partition")}
    if values:
        raise Refusal(f"unknown: {', '.join(values)}")
    check_names(**names)
    return Entry(record.position, stamp, record.hash, event=event, **names)


def is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_count(name: str, value: object) -> int:
    if not _is_whole(value) or value < 1:
        raise Refusal(f"{name}={value!r}: must be a whole number >= 1")
    return int(value)


def plain_event(values: dict[str, Any], count: int) -> Event:
    """The event of these values, `count` times over, in plain Python numbers: what is kept is what was meant."""
    plain = dict(values)
    for name, value in plain.items():
        if _is_whole(value):
            plain[name] = int(value)
        elif is_real(value):
            plain[name] = float(value)
    plain["count"] = _check_count("event.count", plain.get("count", 1)) * _check_count("count", count)
    return event_from_dict(plain)


def check_names(purpose: str, dataset: str, partition: str | None) -> None:
    for name, value in (("purpose", purpose), ("dataset", dataset)):
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: must be a string")
    if partition is not None and (not isinstance(partition, str) or not partition):
        raise TypeError(f"partition={partition!r}: must be a name, or None for the whole data set")
