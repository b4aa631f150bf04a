"""The budget ledger: what each data set has been charged, written down before the data is read.

One entry per charge, append-only, in a hash chain (see `_ledger_store` for what tampering it shows and what
it cannot), and a ceiling that refuses a charge BEFORE anything else happens. The ledger holds no record and
derives nothing from one: a data set is known to it by the name or keyed hash the caller gives.
"""

from __future__ import annotations

import getpass
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count as count_up
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from confide.errors import BudgetExceeded, LedgerError, Refusal, StepsClaimed, UnsupportedEvents
from confide.privacy.events import Adjacency, Event, NonPrivateEvent, event_to_dict
from confide.privacy.ledger.budget import Account, Multiset, Prices, compose, single
from confide.privacy.ledger.entries import (
    Entry,
    Limit,
    Steps,
    check_names,
    check_run,
    check_who,
    entry_of,
    is_real,
    plain_event,
    row,
    row_key,
    summary,
)
from confide.privacy.ledger.store import Head, Record, Store, for_reading

__all__ = ["BudgetExceeded", "Entry", "Head", "Ledger", "LedgerError", "Limit", "for_reading"]

# A charge is priced outside the lock, so that others can go on. Where others are always quicker, the price
# of this try is worked out under the lock instead, so that everybody comes to an end.
_TRIES_OUTSIDE_THE_LOCK = 3
# Charges smaller than this part of what is there already come in a run of many; prepare for the next ones.
_SMALL = 0.25
try:
    _VERSION = version("confide")
except PackageNotFoundError:  # run from its source folder, without having been installed
    _VERSION = "not installed"


@dataclass
class _Run:
    """What one run has paid, and the highest step that an attempt of it has claimed."""

    paid: Account = field(default_factory=Account)
    claimed: int = 0

    def take(self, entry: Entry) -> None:
        if entry.event is not None:
            self.paid.add(entry.event, None)
        if entry.steps is not None:
            self.claimed = max(self.claimed, entry.steps.last)


def _steps(run: str | None, first: int | None, last: int | None) -> Steps | None:
    check_run(run, first is not None or last is not None)
    return None if first is None and last is None else Steps(first, last)  # type: ignore[arg-type]


def _names(purpose: str, dataset: str, partition: str | None, run: str | None, steps: Steps | None) -> dict[str, Any]:
    """What an entry says beside its event; what does not apply is left out."""
    names: dict[str, Any] = {"purpose": purpose, "dataset": dataset, "partition": partition}
    if run is not None:
        names["run"] = run
    if steps is not None:
        names["steps"] = [int(steps.first), int(steps.last)]
    return names


def _system_user() -> str:
    """The name the system knows the user by; empty where it knows none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, no variable set
        return ""


class Ledger:
    """An append-only account of privacy spending with a ceiling, in memory or in a file shared by processes.

    `Ledger()` lives in memory, cannot be copied or pickled, and does not follow a fork: a copy could spend
    the budget a second time. `Ledger("budget.db")` is a SQLite file that many threads and processes may
    charge at once; it is created if it does not exist, checked from the first entry to the last when it is
    opened, and refused with `LedgerError` if anything is wrong. Every charge is on disk before `charge`
    returns. Keep the file on a local disk: network file systems do not lock reliably. `timeout`: seconds to
    wait for a lock while nothing moves. `who`: named in every entry; the system's name of the user if not given.

    The ceiling (`limit`) holds for each data set by itself. All events charged to it, in all runs, are
    composed by privacy loss distributions, which is tighter than adding up epsilons:

        epsilon(data set) = epsilon of {e_1, ..., e_k} at the ceiling's delta and adjacency  <=  ceiling

    It is only as good as the names: the same records charged under two names get two budgets.

    Partitions. Events charged with `partition=` see only that part of the data set. With add/remove
    adjacency a record lies in one part, so the parts compose in parallel:

        epsilon(data set) = max over parts p of epsilon(events on the whole + events on p)

    This is sound only if the parts are disjoint, if all names used with a data set belong to ONE split of
    it, and if the part a record belongs to depends on that record alone (by country: yes; "the oldest
    half": no, for a new record may push another one across). With replace-one adjacency the new record may
    belong to another part than the old one, so the maximum runs over PAIRS of parts, both in full, and
    events whose replace-one bound does not cover a change of a part's size (fixed-size, shuffle, pure
    events for replacement) are refused.

    When the parameters are chosen on the way. The guarantee is that of composition: it holds when the
    noise, rates and numbers of steps are decided without looking at earlier releases, and also when only
    the time to stop is (a family of events that composition orders totally, such as repetitions of one
    event, or full-batch Gaussian events of any noise). If noise or rates are tuned by what earlier releases
    showed, a ceiling on composed trade-off curves is in general no longer a proof (Rogers, Roth, Ullman and
    Vadhan 2016, NIPS; Tran, Koskela, Räisä and Honkela 2026, arXiv:2602.06756; Regehr et al. 2026,
    arXiv:2602.15815).
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, timeout: float = 5.0, who: str | None = None
    ) -> None:
        if not (is_real(timeout) and math.isfinite(timeout) and timeout >= 0):
            raise Refusal(f"timeout={timeout!r}: must be a finite number of seconds >= 0")
        self.who = _system_user() if who is None else check_who(who)
        self._store = Store(None if path is None else Path(os.path.realpath(path)), float(timeout))
        self._seen = self._store.origin
        self._accounts: dict[str, Account] = {}
        self._runs: dict[str, _Run] = {}
        self._limit: Limit | None = None
        self._prices: dict[tuple[float, Adjacency], Prices] = {}
        try:
            self._refresh()
        except LedgerError:
            self._store.close()
            raise

    # -- writing ---------------------------------------------------------------------------------------------

    def charge(
        self, event: Event, purpose: str = "", dataset: str = "", partition: str | None = None, count: int = 1
    ) -> Entry:
        """Writes down `count` times `event`, or raises `BudgetExceeded` and writes nothing.

        Call it before the data is read. Once it returns, the charge is paid, whatever happens afterwards.
        """
        return self.charge_all([event], purpose, dataset, partition, count)[0]

    def charge_all(
        self,
        events: Sequence[Event],
        purpose: str = "",
        dataset: str = "",
        partition: str | None = None,
        count: int = 1,
        run: str | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> tuple[Entry, ...]:
        """Writes down every one of the events, an entry each, or raises `BudgetExceeded` and writes none of them.

        run          the identity of the run that pays, kept with every entry; see `paid`
        first_step,  steps of that run, from 1, that this attempt claims by the same transaction: `StepsClaimed` where
        last_step    another attempt has claimed one of them or a later one, and then nothing is written
        """
        plain = [plain_event(event_to_dict(event), count) for event in events]
        steps = _steps(run, first_step, last_step)
        check_names(purpose, dataset, partition)
        names = _names(purpose, dataset, partition, run, steps)
        for attempt in count_up():
            with self._store.transaction(write=True):
                head, limit = self._catch_up(), self._limit
                if steps is not None:
                    self._check_unclaimed(names["run"], steps)
                if limit is None:
                    return self._append_charges(plain, names, head)
                before = self._account(dataset)
                worlds = before.plus_all(plain, partition).worlds(limit.adjacency)
                if attempt < _TRIES_OUTSIDE_THE_LOCK:
                    within = self._within(worlds, limit)
                else:
                    within = self._epsilon(worlds, limit.delta, limit.adjacency) <= limit.epsilon
                if within:
                    return self._append_charges(plain, names, head)
                worlds_before = before.worlds(limit.adjacency)
            if within is False:
                self._refuse(plain, dataset, worlds_before, worlds, limit)
            self._find_out(worlds, plain, limit)
        raise AssertionError("unreachable")

    def claim(self, run: str, first_step: int, last_step: int, purpose: str = "", dataset: str = "") -> Entry:
        """Takes steps that the run has paid for before, so that no other attempt can release them at the same price.

        An attempt calls it before it makes these steps. `StepsClaimed`: one of them, or a later one, was taken already,
        by an earlier attempt or by one that runs from a copy of the same folder; what is to be released again must be
        charged again. A run that this ledger never charged can claim nothing.
        """
        steps = _steps(run, first_step, last_step)
        assert steps is not None
        check_names(purpose, dataset, None)
        with self._store.transaction(write=True):
            head = self._catch_up()
            if run not in self._runs:
                raise LedgerError(f"{self._store.name}: run={run!r} was never charged here; pay for its steps first")
            self._check_unclaimed(run, steps)
            return self._append("claim", _names(purpose, dataset, None, run, steps), head)

    def limit(self, epsilon: float, delta: float, adjacency: Adjacency = "add-remove") -> Limit:
        """Sets the ceiling for each data set of this ledger; the change itself becomes an entry of the chain.

        It may be raised or lowered. Below what is spent already it takes nothing back, but nothing more can
        be charged; the same holds where no sound bound is known for what was charged before. It cannot be
        removed.
        """
        limit = Limit(epsilon, delta, adjacency)
        limit = Limit(float(limit.epsilon), float(limit.delta), limit.adjacency)
        with self._store.transaction(write=True):
            self._append("limit", asdict(limit), self._catch_up())
        return limit

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def ceiling(self) -> Limit | None:
        """The ceiling in force, None if there is none."""
        self._refresh()
        return self._limit

    @property
    def head(self) -> Head:
        """The number of entries and the last hash; noted elsewhere, it shows `verify` a ledger cut short."""
        self._refresh()
        return self._seen

    def verify(self, noted: Head | None = None) -> Head:
        """Reads everything again and raises `LedgerError` if the chain is broken anywhere.

        Give the head that was noted after some earlier charge, and a chain that no longer contains it is
        refused too: that is the one way to see a rewritten ledger or an older copy put back in its place.
        """
        with self._store.transaction(write=False):
            records, head = self._store.read_after(self._store.origin)
            if noted is not None:
                self._store.check(noted)
        for record in records:
            self._parse(record)
        return head

    def spent(self, delta: float | None = None, dataset: str = "", adjacency: Adjacency | None = None) -> float:
        """Epsilon of everything charged to the data set; delta and adjacency default to the ceiling's."""
        with self._store.lock:
            self._refresh()
            delta, adjacency = self._question(delta, adjacency)
            worlds = self._account(dataset).worlds(adjacency)
        return self._epsilon(worlds, delta, adjacency)

    def remaining(self, dataset: str = "") -> float:
        """The ceiling's epsilon less what is spent, at least 0; infinity without a ceiling.

        A difference of two epsilons, not a price tag: composition is not additive, and an event that would
        cost this much by itself usually fits in more than once. Only `charge` tells whether something still
        fits.
        """
        limit = self.ceiling
        if limit is None:
            return math.inf
        return max(0.0, limit.epsilon - self.spent(limit.delta, dataset, limit.adjacency))

    def entries(self, dataset: str | None = None) -> tuple[Entry, ...]:
        """All charges in order (of one data set, if named), read from the checked chain."""
        chosen = (entry for entry in self._read_all() if entry.event is not None)
        return tuple(entry for entry in chosen if dataset is None or entry.dataset == dataset)

    def limits(self) -> tuple[Entry, ...]:
        """All ceilings ever set, in order."""
        return tuple(entry for entry in self._read_all() if entry.limit is not None)

    def claimed(self, run: str) -> int:
        """The highest step of the run that an attempt has claimed, 0 if none."""
        self._refresh()
        return self._runs[run].claimed if run in self._runs else 0

    def paid(self, run: str) -> tuple[Event, ...]:
        """Everything that was charged under this run's identity, equal events counted together."""
        with self._store.lock:
            self._refresh()
            return self._runs[run].paid.events() if run in self._runs else ()

    def datasets(self) -> tuple[str, ...]:
        """The names of the data sets charged so far."""
        self._refresh()
        return tuple(self._accounts)

    def events(self, dataset: str = "") -> tuple[Event, ...]:
        """Everything charged to the data set, equal events counted together, whatever their partition."""
        with self._store.lock:
            self._refresh()
            return self._account(dataset).events()

    def to_rows(self, delta: float | None = None, adjacency: Adjacency | None = None) -> list[dict[str, Any]]:
        """The ledger as a table, ready to print or to write as JSON.

        Keys: time, kind ("charge", "limit" or "claim"), charges, purpose, dataset, partition, event (in words), who,
        epsilon. Equal charges that follow one another make one row: `charges` of them, the last at `time`.
        `epsilon` is what the data set had spent by then, at the given delta and adjacency or the present
        ceiling's; None if neither is there, or no sound bound is known.
        """
        if delta is None and self.ceiling is None:
            question = None
        else:
            question = self._question(delta, adjacency)
        rows: list[dict[str, Any]] = []
        accounts: dict[str, Account] = {}
        for _, group in groupby(self._read_all(), key=row_key):
            run = list(group)
            for entry in run:
                if entry.event is not None:
                    accounts.setdefault(entry.dataset, Account()).add(entry.event, entry.partition)
            rows.append(row(run) | {"epsilon": self._epsilon_so_far(accounts.get(run[0].dataset), run, question)})
        return rows

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file; using the ledger again opens it again. Does nothing to a ledger in memory."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = "" if self._store.path is None else repr(str(self._store.path))
        return f"Ledger({place})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A ledger in a file travels as its path; one in memory does not travel. Also what `copy` asks."""
        if self._store.path is None:
            raise TypeError(
                "a ledger in memory cannot be copied or pickled, for the copy could spend the budget again; "
                "use one in a file: Ledger('budget.db')"
            )
        return Ledger, (str(self._store.path), self._store.timeout, self.who)

    # -- inside ----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        with self._store.transaction(write=False):
            self._catch_up()

    def _catch_up(self) -> Head:
        """Takes in what was written since the last look, by anybody. Inside a transaction only."""
        records, head = self._store.read_after(self._seen)
        for entry in [self._parse(record) for record in records]:
            if entry.limit is not None:
                self._limit = entry.limit
            if entry.event is not None:
                self._accounts.setdefault(entry.dataset, Account()).add(entry.event, entry.partition)
            if entry.run is not None:
                self._runs.setdefault(entry.run, _Run()).take(entry)
        self._seen = head
        return head

    def _check_unclaimed(self, run: str, steps: Steps) -> None:
        highest = self._runs[run].claimed if run in self._runs else 0
        if steps.first <= highest:
            raise StepsClaimed(
                f"{self._store.name}: steps up to {highest} of run {run!r} were claimed already, so {steps.first} "
                f"to {steps.last} cannot be; pay for what is to be released again",
                highest,
            )

    def _append(self, kind: str, values: dict[str, Any], head: Head) -> Entry:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds")
        written = {"type": kind, "time": stamp, "who": self.who, "version": _VERSION}
        return self._parse(self._store.append({**written, **values}, head))

    def _append_charges(self, events: Sequence[Event], names: dict[str, Any], head: Head) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for event in events:
            plan = {"plan": entries[0].position} if entries else {}
            entries.append(self._append("charge", {**names, **plan, "event": event_to_dict(event)}, head))
            head = entries[-1].head
        return tuple(entries)

    def _read_all(self) -> Iterator[Entry]:
        with self._store.transaction(write=False):
            records, _ = self._store.read_after(self._store.origin)
        return (self._parse(record) for record in records)

    def _parse(self, record: Record) -> Entry:
        try:
            return entry_of(record)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self._store.name}: entry {record.position} is of no known form ({error}); "
                "open it with the version of confide that wrote it"
            ) from error

    def _account(self, dataset: str) -> Account:
        return self._accounts.get(dataset, Account())

    def _question(self, delta: float | None, adjacency: Adjacency | None) -> tuple[float, Adjacency]:
        if delta is None and self._limit is None:
            raise Refusal("delta=None: there is no ceiling to take it from, so give a delta")
        default = self._limit if self._limit is not None else Limit(1.0, 0.5)
        asked = Limit(1.0, default.delta if delta is None else delta, adjacency or default.adjacency)
        return asked.delta, asked.adjacency

    def _within(self, worlds: list[Multiset], limit: Limit) -> bool | None:
        prices = self._prices_at(limit.delta, limit.adjacency)
        known = [prices.within(world, limit.epsilon) for world in worlds]
        return False if False in known else None if None in known else True

    def _find_out(self, worlds: list[Multiset], events: Sequence[Event], limit: Limit) -> None:
        """Composes, outside the lock, what the next try needs to know."""
        if len(events) != 1:
            self._epsilon(worlds, limit.delta, limit.adjacency)
            return
        event = events[0]
        unit = single(event)
        for world in worlds:
            with self._store.lock:
                prices = self._prices_at(limit.delta, limit.adjacency)
                if prices.within(world, limit.epsilon) is not None:
                    continue
                in_a_run = event.count <= _SMALL * world.get(unit, 0)
                larger = prices.larger(world, unit, limit.epsilon) if in_a_run else None
            if larger is None or self._epsilon([larger], limit.delta, limit.adjacency) > limit.epsilon:
                self._epsilon([world], limit.delta, limit.adjacency)

    def _epsilon(self, worlds: list[Multiset], delta: float, adjacency: Adjacency) -> float:
        return max((self._epsilon_of(world, delta, adjacency) for world in worlds), default=0.0)

    def _epsilon_of(self, world: Multiset, delta: float, adjacency: Adjacency) -> float:
        with self._store.lock:
            known = self._prices_at(delta, adjacency).exact(world)
        if known is not None:
            return known
        epsilon = compose(world, delta, adjacency)
        with self._store.lock:
            self._prices_at(delta, adjacency).remember(dict(world), epsilon)
        return epsilon

    def _prices_at(self, delta: float, adjacency: Adjacency) -> Prices:
        return self._prices.setdefault((delta, adjacency), Prices())

    def _refuse(
        self, events: Sequence[Event], dataset: str, before: list[Multiset], after: list[Multiset], limit: Limit
    ) -> NoReturn:
        spent = self._epsilon(before, limit.delta, limit.adjacency)
        total = self._epsilon(after, limit.delta, limit.adjacency)
        ceiling = f"the ceiling of epsilon={limit.epsilon:.6g} at delta={limit.delta:g} ({limit.adjacency})"
        if any(isinstance(event, NonPrivateEvent) for event in events):
            message = f"a non-private event has no place under {ceiling}; use a ledger without a ceiling"
        else:
            message = (
                f"charging {' and '.join(map(summary, events))} "
                f"would bring data set {dataset!r} to epsilon={total:.6g}, "
                f"above {ceiling}, of which {max(0.0, limit.epsilon - spent):.6g} remains; "
                "charge fewer or noisier steps, or raise the ceiling with limit()"
            )
        raise BudgetExceeded(message, total, limit.epsilon, limit.delta)

    def _epsilon_so_far(
        self, account: Account | None, run: list[Entry], question: tuple[float, Adjacency] | None
    ) -> float | None:
        if account is None or question is None or run[0].event is None:
            return None

        try:
            return self._epsilon(account.worlds(question[1]), *question)
        except UnsupportedEvents:
            return None
