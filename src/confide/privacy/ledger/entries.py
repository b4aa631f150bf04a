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
class Steps:
    """Steps first, ..., last of a run, counted from 1, that one attempt claims for itself."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not (_is_whole(self.first) and _is_whole(self.last) and 1 <= self.first <= self.last):
            raise Refusal(
                f"first_step={self.first!r}, last_step={self.last!r}: must be whole numbers with 1 <= first <= last"
            )


@dataclass(frozen=True)
class Entry:
    """One entry of the chain: a charge (`event` is set), a new ceiling (`limit` is set), or a claim of paid steps.

    position   from 1, without gaps
    time       when it was written, UTC, ISO 8601
    hash       stands for this entry and all before it
    plan       position of the first entry that was charged together with this one, as one plan
    run        the run that pays or claims, and the steps it claims by this entry
    who        who wrote it, as given or as the system knows them, and with which version of confide
    """

    position: int
    time: str
    hash: str
    event: Event | None = None
    limit: Limit | None = None
    purpose: str = ""
    dataset: str = ""
    partition: str | None = None
    run: str | None = None
    steps: Steps | None = None
    who: str = ""
    version: str = ""
    plan: int = 0

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


def kind_of(entry: Entry) -> str:
    """What an entry is, in one word."""
    return "charge" if entry.event is not None else "limit" if entry.limit is not None else "claim"


def row_key(entry: Entry) -> tuple[Any, ...]:
    if entry.event is None:
        return (kind_of(entry), entry.position)
    return ("charge", entry.purpose, entry.dataset, entry.partition, entry.who, single(entry.event))


def row(run: Sequence[Entry]) -> dict[str, Any]:
    last = run[-1]
    if last.limit is not None:
        words = f"ceiling epsilon {last.limit.epsilon:.6g}, delta {last.limit.delta:g}, {last.limit.adjacency}"
    elif last.event is None:
        assert last.steps is not None
        words = f"steps {last.steps.first} to {last.steps.last} claimed, paid for before"
    else:
        events = [entry.event for entry in run if entry.event is not None]
        words = summary(replace(events[0], count=sum(event.count for event in events)))
    return {
        "time": last.time,
        "kind": kind_of(last),
        "charges": 0 if last.event is None else len(run),
        "purpose": last.purpose,
        "dataset": last.dataset,
        "partition": last.partition,
        "event": words,
        "who": last.who,
    }


def entry_of(record: Record) -> Entry:
    """The entry a record holds; what is unknown or missing is refused, never guessed."""
    values = dict(record.values)
    kind, stamp = values.pop("type"), values.pop("time")
    if not isinstance(stamp, str):
        raise Refusal(f"time={stamp!r}")
    written = {name: values.pop(name, "") for name in ("who", "version")}
    for name, value in written.items():
        if not isinstance(value, str):
            raise Refusal(f"{name}={value!r}")
    if kind == "limit":
        return Entry(record.position, stamp, record.hash, limit=Limit(**values), **written)
    if kind not in ("charge", "claim"):
        raise Refusal(f"type={kind!r}")
    event = plain_event(values.pop("event"), 1) if kind == "charge" else None
    names = {name: values.pop(name) for name in ("purpose", "dataset", "partition")}
    run, steps, plan = values.pop("run", None), values.pop("steps", None), values.pop("plan", record.position)
    if not _is_whole(plan) or not 1 <= plan <= record.position:
        raise Refusal(f"plan={plan!r}")
    if values:
        raise Refusal(f"unknown: {', '.join(values)}")
    check_names(**names)
    check_run(run, steps is not None)
    claimed = None if steps is None else Steps(*steps)
    return Entry(
        record.position, stamp, record.hash, event=event, **names, run=run, steps=claimed, plan=plan, **written
    )


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


def check_run(run: str | None, claims: bool) -> None:
    if run is None and not claims:
        return
    if not isinstance(run, str) or not run:
        raise TypeError(f"run={run!r}: must be the identity of a run, and steps are claimed for a run only")


def check_who(who: str) -> str:
    if not isinstance(who, str) or not who.strip() or not who.isprintable():
        raise Refusal(f"who={who!r}: must be a name of printable characters")
    return who
