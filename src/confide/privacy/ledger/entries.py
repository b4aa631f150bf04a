"""One entry of a ledger: what it says, how it is read back, how it is shown."""

from __future__ import annotations

import base64
import math
import numbers
import re
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
    VotesEvent,
    event_from_dict,
    event_to_dict,
)
from confide.privacy.filters import Promise, Sum
from confide.privacy.ledger.budget import single
from confide.privacy.ledger.keys import Seal
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

    def within(self, other: Limit) -> bool:
        """Whether this ceiling allows nothing that the other one forbids."""
        return self.epsilon <= other.epsilon and self.delta <= other.delta and self.adjacency == other.adjacency

    def words(self) -> str:
        """As errors call it."""
        return f"the ceiling of epsilon={self.epsilon:.6g} at delta={self.delta:g} ({self.adjacency})"

    def text_to_sign(self, before: str) -> str:
        """What the key of the ceiling in force signs; `before` is the hash of the chain so far."""
        return f"confide limit {before} {float(self.epsilon)!r} {float(self.delta)!r} {self.adjacency}"


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
    """One entry of the chain: a charge (`event` is set), a ceiling (`limit`), claimed steps, known records, or a sum.

    position   from 1, without gaps
    time       when it was written, UTC, ISO 8601
    hash       stands for this entry and all before it
    plan       position of the first entry that was charged together with this one, as one plan
    run        the run that pays or claims, and the steps it claims by this entry
    uses       what those steps will release, out of what the run has paid
    who        who wrote it, as given or as the system knows them, and with which version of confide
    before     the hash of the entry before it
    seal       the key that a looser ceiling must be signed with, and the signature of this one
    sketch     of the records of `dataset`, which only the key with this `key_id` opens
    sum        what a filter has added up over the plans of `dataset` and `partition`, so that nobody has to again
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
    before: str = ""
    seal: Seal | None = None
    signature: str | None = None
    key_id: str = ""
    sketch: bytes | None = None
    sum: Sum | None = None
    uses: tuple[Event, ...] = ()

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
    if isinstance(event, VotesEvent):
        return f"{event.count} counts of votes, noise {event.noise:.6g}, moved by {event.moved:.6g}"
    return f"{event.count} non-private: {event.reason}"


def kind_of(entry: Entry) -> str:
    """What an entry is, in one word."""
    if entry.event is not None:
        return "charge"
    others = {"limit": entry.limit, "dataset": entry.sketch, "sum": entry.sum}
    return next((kind for kind, held in others.items() if held is not None), "claim")


def row_key(entry: Entry) -> tuple[Any, ...]:
    if entry.event is None:
        return (kind_of(entry), entry.position)
    return ("charge", entry.purpose, entry.dataset, entry.partition, entry.who, single(entry.event))


def row(run: Sequence[Entry]) -> dict[str, Any]:
    last = run[-1]
    if last.limit is not None:
        words = f"ceiling epsilon {last.limit.epsilon:.6g}, delta {last.limit.delta:g}, {last.limit.adjacency}"
    elif last.sketch is not None:
        words = "its records are known by their sketch"
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
        "version": last.version,
    }


def entry_of(record: Record) -> Entry:
    """The entry a record holds; what is unknown or missing is refused, never guessed."""
    values = record.values
    kind, stamp = values.pop("type"), values.pop("time")
    fields: dict[str, Any] = {name: values.pop(name, "") for name in ("who", "version")}
    for name, value in (("time", stamp), *fields.items()):
        if not isinstance(value, str):
            raise Refusal(f"{name}={value!r}")
    if kind not in _READERS:
        raise Refusal(f"type={kind!r}")
    fields |= _READERS[kind](values, record)
    if values:
        raise Refusal(f"unknown: {', '.join(values)}")
    return Entry(record.position, stamp, record.hash, before=record.before, **fields)


def _read_limit(values: dict[str, Any], record: Record) -> dict[str, Any]:
    seal, signature = values.pop("seal", None), values.pop("signature", None)
    limit = Limit(**{name: values.pop(name) for name in ("epsilon", "delta", "adjacency")})
    return {"limit": limit, "seal": None if seal is None else Seal(*seal), "signature": signature}


def _read_charge(values: dict[str, Any], record: Record) -> dict[str, Any]:
    return {"event": plain_event(values.pop("event"), 1), **_read_claim(values, record)}


def _read_claim(values: dict[str, Any], record: Record) -> dict[str, Any]:
    names = {name: values.pop(name) for name in ("purpose", "dataset", "partition")}
    run, steps, plan = values.pop("run", None), values.pop("steps", None), values.pop("plan", record.position)
    if not _is_whole(plan) or not 1 <= plan <= record.position:
        raise Refusal(f"plan={plan!r}")
    uses = tuple(plain_event(event, 1) for event in values.pop("uses", []))
    check_names(**names)
    check_run(run, steps is not None or bool(uses))
    return {**names, "run": run, "steps": None if steps is None else Steps(*steps), "plan": plan, "uses": uses}


def _read_dataset(values: dict[str, Any], record: Record) -> dict[str, Any]:
    found = {name: values.pop(name) for name in ("dataset", "key_id", "sketch")}
    for name, value in found.items():
        if not isinstance(value, str):
            raise Refusal(f"{name}={value!r}")
    return {**found, "sketch": base64.b64decode(found["sketch"], validate=True)}


def sum_values(found: Sum) -> dict[str, Any]:
    """A sum as JSON has it; where a filter does not apply its amount is infinite, and null here."""
    return {
        "rules": found.rules,
        "ceiling": [found.promise.epsilon, found.promise.delta, found.promise.adjacency],
        "first": [event_to_dict(event) for event in found.first],
        "inside": found.inside,
        "filter": found.filter,
        "position": found.position,
        "amount": None if math.isinf(found.amount) else found.amount,
        "slack": found.slack,
    }


def _read_sum(values: dict[str, Any], record: Record) -> dict[str, Any]:
    names = {name: values.pop(name) for name in ("dataset", "partition")}
    check_names("", **names)
    found = {name: values.pop(name) for name in ("rules", "inside", "filter", "position", "amount", "slack")}
    amount = math.inf if found["amount"] is None else found["amount"]
    for name, value, fits in (
        ("rules", found["rules"], _is_whole(found["rules"])),
        ("inside", found["inside"], isinstance(found["inside"], bool)),
        ("filter", found["filter"], isinstance(found["filter"], str)),
        ("position", found["position"], _is_whole(found["position"]) and found["position"] >= 0),
        ("amount", amount, is_real(amount) and amount >= 0),
        ("slack", found["slack"], is_real(found["slack"]) and found["slack"] >= 0),
    ):
        if not fits:
            raise Refusal(f"{name}={value!r}")
    ceiling = Limit(*values.pop("ceiling"))
    first = tuple(plain_event(event, 1) for event in values.pop("first"))
    promise = Promise(ceiling.epsilon, ceiling.delta, ceiling.adjacency)
    return {**names, "sum": Sum(promise=promise, first=first, **{**found, "amount": amount})}


_READERS = {
    "limit": _read_limit,
    "charge": _read_charge,
    "claim": _read_claim,
    "dataset": _read_dataset,
    "sum": _read_sum,
}


class Reader:
    """Reads records; bodies that differ in their time alone are read once.

    Thousands of equal charges are the usual long ledger. What is cut out of a body is exactly its time, so two bodies
    that agree in the rest say the same.
    """

    def __init__(self) -> None:
        self._read: dict[str, Entry] = {}

    def entry(self, record: Record) -> Entry:
        start = record.body.rfind(_TIME_KEY) + len(_TIME_KEY)
        stamp = record.body[start : start + _TIME_LENGTH]
        if start < len(_TIME_KEY) or not _TIME.fullmatch(stamp) or record.body[start + _TIME_LENGTH :][:1] != '"':
            return entry_of(record)
        rest = record.body[:start] + record.body[start + _TIME_LENGTH :]
        known = self._read.get(rest)
        if known is None:
            known = entry_of(record)
            if known.event is not None:
                if len(self._read) >= _REMEMBERED:
                    self._read.clear()
                self._read[rest] = known
            return known
        position = record.position
        plan = position if known.plan == known.position else known.plan
        if plan > position:
            return entry_of(record)
        names = (known.purpose, known.dataset, known.partition, known.run, known.steps, known.who, known.version)
        return Entry(position, stamp, record.hash, known.event, None, *names, plan, record.before, uses=known.uses)


_TIME_KEY, _TIME_LENGTH = '"time":"', len("2026-01-01T00:00:00.000000+00:00")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", re.ASCII)
_REMEMBERED = 4096  # Different entries kept as they were read: most ledgers repeat a few.


def is_real(value: object) -> bool:
    if type(value) is float or type(value) is int:  # of nearly every number, and ten times as fast as to ask for a kind
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    if type(value) is int:
        return True
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_count(name: str, value: object) -> int:
    if not _is_whole(value) or value < 1:
        raise Refusal(f"{name}={value!r}: must be a whole number >= 1")
    return int(value)


def plain_event(values: dict[str, Any], count: int) -> Event:
    """The event of these values, `count` times over, in plain Python numbers: what is kept is what was meant."""
    plain = dict(values)
    for name, value in plain.items():
        if type(value) is str or type(value) is int or type(value) is float:
            continue
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


def steps_of(run: str | None, first: int | None, last: int | None) -> Steps | None:
    check_run(run, first is not None or last is not None)
    return None if first is None and last is None else Steps(first, last)  # type: ignore[arg-type]


def names_of(
    purpose: str,
    dataset: str,
    partition: str | None,
    run: str | None,
    steps: Steps | None,
    uses: Sequence[Event] = (),
) -> dict[str, Any]:
    """What an entry says beside its event; what does not apply is left out."""
    names: dict[str, Any] = {"purpose": purpose, "dataset": dataset, "partition": partition}
    if run is not None:
        names["run"] = run
    if steps is not None:
        names["steps"] = [int(steps.first), int(steps.last)]
    if uses:
        names["uses"] = [event_to_dict(event) for event in uses]
    return names


def check_run(run: str | None, claims: bool) -> None:
    if run is None and not claims:
        return
    if not isinstance(run, str) or not run:
        raise TypeError(f"run={run!r}: must be the identity of a run, and steps are claimed for a run only")


def check_who(who: str) -> str:
    if not isinstance(who, str) or not who.strip() or not who.isprintable():
        raise Refusal(f"who={who!r}: must be a name of printable characters")
    return who


def plain_events(events: Sequence[Event]) -> list[Event]:
    """Each of them once, as an entry holds it."""
    return [plain_event(event_to_dict(event), 1) for event in events]


def asked_limit(ceiling: Limit | None, delta: float | None, adjacency: Adjacency | None) -> Limit:
    """The delta and the adjacency of a question, those of the ceiling where it leaves them out; its epsilon is none."""
    if delta is None and ceiling is None:
        raise Refusal("delta=None: there is no ceiling to take it from, so give a delta")
    default = ceiling if ceiling is not None else Limit(1.0, 0.5)
    return Limit(1.0, default.delta if delta is None else delta, adjacency or default.adjacency)
