"""The budget ledger: what each data set has been charged, written down before the data is read.

One entry per charge, append-only, in a hash chain (see `store` for what tampering it shows and what it cannot), and a
ceiling that refuses a charge BEFORE anything else happens. The ledger holds no record and derives nothing from one: a
data set is known to it by the name the caller gives, and by a sketch that only the curator's key opens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count as count_up
from typing import Any, NoReturn

from confide.errors import BudgetExceeded, LedgerError, Refusal, StepsClaimed
from confide.privacy.events import Adjacency, Event, NonPrivateEvent, event_to_dict
from confide.privacy.filters import FIXED, History, Log, Verdict, plan_of
from confide.privacy.ledger.book import Book
from confide.privacy.ledger.entries import (
    Entry,
    Limit,
    Steps,
    asked_limit,
    check_names,
    check_who,
    is_real,
    names_of,
    plain_event,
    plain_events,
    steps_of,
    sum_values,
)
from confide.privacy.ledger.keys import Seal, check_key, sign_head
from confide.privacy.ledger.names import key_of
from confide.privacy.ledger.opening import open_store, system_user
from confide.privacy.ledger.pricing import Pricing
from confide.privacy.ledger.registry import Registry
from confide.privacy.ledger.standing import Standing, refusal
from confide.privacy.ledger.state import PaidRun
from confide.privacy.ledger.store import Head
from confide.privacy.ledger.table import notebook_table, table
from confide.privacy.ledger.witness import Witness

# A charge is priced outside the lock, so that others can go on. Where others are always quicker, the price
# of this try is worked out under the lock instead, so that everybody comes to an end.
_TRIES_OUTSIDE_THE_LOCK = 3


class Ledger:
    """An append-only account of privacy spending with a ceiling, in memory or in a file shared by processes.

    `Ledger()` lives in memory, cannot be copied or pickled, and does not follow a fork: a copy could spend
    the budget a second time. `Ledger("budget.db")` is a SQLite file that many threads and processes may
    charge at once; it is created if it does not exist, checked from the first entry to the last when it is
    opened, and refused with `LedgerError` if anything is wrong. Every charge is on disk before `charge`
    returns. Keep the file on a local disk: network file systems do not lock reliably. `timeout`: seconds to
    wait for a lock while nothing moves. `who`: named in every entry; $CONFIDE_WHO or the system's name of the user if
    not given.

    The ceiling (`limit`) holds for each data set by itself: everything charged to it stays (epsilon, delta)-private
    together. One charge is one plan, fixed before any of it is released. A single plan is composed by privacy loss
    distributions. Of several, each but the first may be chosen by what earlier ones released, and composing them proves
    nothing then; so they must pass one of three privacy filters that are proven for it (docs/soundness.md, "Filters").
    That costs some 1 to 7 % of epsilon in usual histories; plans fixed together are charged together, by `charge_all`,
    and lose nothing. A ceiling that is changed after looking at releases is a new promise.

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
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        who: str | None = None,
        witness: str | os.PathLike[str] | None = None,
        key: bytes | None = None,
    ) -> None:
        if not (is_real(timeout) and math.isfinite(timeout) and timeout >= 0):
            raise Refusal(f"timeout={timeout!r}: must be a finite number of seconds >= 0")
        self.who = system_user() if who is None else check_who(who)
        self._key = None if key is None else check_key(key)
        self._store = open_store(path, float(timeout))
        seeing = None if witness is None else Witness(witness, self._store.identity, self._key)
        self._book = Book(self._store, seeing, self.who)
        self._pricing = Pricing()

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
        uses: Sequence[Event] = (),
    ) -> tuple[Entry, ...]:
        """Writes down every one of the events, an entry each, or raises `BudgetExceeded` and writes none of them.

        run          the identity of the run that pays, kept with every entry; see `paid`
        first_step,  steps of that run, from 1, that this attempt claims by the same transaction: `StepsClaimed` where
        last_step    another attempt has claimed one of them, and then nothing is written
        uses         what this attempt is about to release: refused where the run has not paid for all of it, these
                     events included, or has used it before
        """
        plain = [plain_event(event_to_dict(event), count) for event in events]
        steps = steps_of(run, first_step, last_step)
        check_names(purpose, dataset, partition)
        uses = plain_events(uses)
        names = names_of(purpose, dataset, partition, run, steps, uses)
        histories: list[History] = []
        limit: Limit | None = None
        within: bool | None = None

        def attempt(head: Head) -> tuple[Entry, ...]:
            nonlocal histories, limit, within
            self._book.state.check_names(dataset, partition)
            if steps is not None:
                self._check_unclaimed(names["run"], steps)
            self._check_paid(run, uses, plain)
            limit = self._book.state.limit
            if limit is None:
                return self._append_charges(plain, names, head)
            part = self._book.state.part(dataset, partition)
            histories = self._book.state.account(dataset).histories(limit.adjacency, plain, part)
            if number < _TRIES_OUTSIDE_THE_LOCK:
                within = self._pricing.within(histories, limit)
            else:
                within = self._pricing.judge(histories, limit).within
            if not within:
                return ()
            return self._append_charges(plain, names, self._append_sums(dataset, histories, limit, head))

        for number in count_up():  # noqa: B007 (`attempt` reads it)
            entries = self._book.write(attempt)
            if entries or not plain:
                return entries
            assert limit is not None
            if within is False:
                self._refuse(plain, dataset, partition, limit, histories)
            self._pricing.judge(histories, limit)
        raise AssertionError("unreachable")

    def check_room(self, plans: Sequence[Sequence[Event]], dataset: str = "") -> None:
        """Raises `BudgetExceeded` if these plans, charged one after the other, would be refused. Writes nothing."""
        with self._store.lock:
            self._book.refresh()
            limit, account = self._book.state.limit, self._book.state.account(dataset)
            histories = [] if limit is None else account.histories(limit.adjacency)
        if limit is None:
            return
        *before, last = [[plain_event(event_to_dict(event), 1) for event in plan] for plan in plans if plan] or [[]]
        planned = Log(map(plan_of, before))
        planned.numbers = [account.plans + number for number in range(len(before))]
        after = [History((*history.logs, planned), plan_of(last)) for history in histories]
        if not self._pricing.judge(after, limit).within:
            self._refuse([event for plan in (*before, last) for event in plan], dataset, None, limit, after)

    def claim(
        self,
        run: str,
        first_step: int,
        last_step: int,
        purpose: str = "",
        dataset: str = "",
        uses: Sequence[Event] = (),
    ) -> Entry:
        """Takes steps that the run has paid for before, so that no other attempt can release them at the same price.

        An attempt calls it before it makes these steps. `StepsClaimed`: one of them was taken already, by an earlier
        attempt or by one that runs from a copy of the same folder; what is to be released again must be charged again.
        A run that this ledger never charged can claim nothing, and one that did can use what it paid for once (`uses`,
        as for `charge_all`).
        """
        steps = steps_of(run, first_step, last_step)
        assert steps is not None
        check_names(purpose, dataset, None)
        uses = plain_events(uses)

        def claim(head: Head) -> tuple[Entry, ...]:
            if self._book.state.run(run) is None:
                raise LedgerError(f"{self._store.name}: run={run!r} was never charged here; pay for its steps first")
            self._check_unclaimed(run, steps)
            self._check_paid(run, uses, ())
            return (self._book.append("claim", names_of(purpose, dataset, None, run, steps, uses), head),)

        return self._book.write(claim)[0]

    def limit(
        self, epsilon: float, delta: float, adjacency: Adjacency = "add-remove", passphrase: str | None = None
    ) -> Limit:
        """Sets the ceiling for each data set of this ledger; the change itself becomes an entry of the chain.

        It may be raised or lowered. Below what is spent already it takes nothing back, but nothing more can
        be charged; the same holds where no sound bound is known for what was charged before. It cannot be
        removed. Once it was set with a passphrase, only that passphrase loosens it (see `keys`); tightening needs none.
        """
        checked = Limit(epsilon, delta, adjacency)
        limit = Limit(float(checked.epsilon), float(checked.delta), checked.adjacency)
        self._book.refresh()
        new_seal = None if passphrase is None or self._book.state.seal is not None else Seal.made_from(passphrase)

        def set_limit(head: Head) -> tuple[Entry, ...]:
            values = asdict(limit)
            if self._book.state.needs_key(limit):
                if passphrase is None:
                    raise LedgerError(
                        f"{self._store.name}: this ceiling can be loosened with its passphrase only; give it or its key"
                    )
                assert self._book.state.seal is not None
                values["signature"] = self._book.state.seal.sign(passphrase, limit.text_to_sign(head.hash))
            elif new_seal is not None and self._book.state.seal is None:
                values["seal"] = [new_seal.salt, new_seal.public]
            return (self._book.append("limit", values, head),)

        self._book.write(set_limit)
        return limit

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def ceiling(self) -> Limit | None:
        """The ceiling in force, None if there is none."""
        self._book.refresh()
        return self._book.state.limit

    @property
    def records(self) -> Registry:
        """The records that are known here by keyed sketches, whatever the names of their tables."""
        return Registry(self._book, self._store, self._key)

    @property
    def outlives_the_process(self) -> bool:
        """Whether it is kept in a file or by a server, and not in memory."""
        return self._store.place is not None

    @property
    def head(self) -> Head:
        """The number of entries and the last hash; noted elsewhere, it shows `verify` a ledger cut short."""
        self._book.refresh()
        return self._book.seen

    def verify(self, noted: Head | None = None, sums: bool = False) -> Head:
        """Reads everything again and raises `LedgerError` if the chain is broken anywhere.

        Give the head that was noted after some earlier charge, and a chain that no longer contains it is
        refused too: that is the one way to see a rewritten ledger or an older copy put back in its place.
        `sums`: what filters have added up is worked out again too, which takes its time.
        """
        return self._book.verify(noted, sums)

    def head_record(self) -> dict[str, Any]:
        """The head, ready for JSON, to be kept with whatever was paid for: a run's record, a report, a checkpoint."""
        head = self.head
        signature = None if self._key is None else sign_head(self._key, self._store.identity, head)
        return {"identity": self._store.identity, **asdict(head), "signature": signature}

    def spent(self, delta: float | None = None, dataset: str = "", adjacency: Adjacency | None = None) -> float:
        """Epsilon of everything charged to the data set, composed as one plan; delta and adjacency are the ceiling's.

        Where later plans were chosen by what earlier ones released, the ceiling is what is proven, not this number.
        """
        with self._store.lock:
            self._book.refresh()
            delta, adjacency = self._question(delta, adjacency)
            worlds = self._book.state.account(dataset).worlds(adjacency)
        return self._pricing.epsilon(worlds, delta, adjacency)

    def remaining(self, dataset: str = "") -> float:
        """The ceiling's epsilon less what its filter has taken of it, at least 0; infinity without a ceiling.

        A difference of two epsilons, not a price tag: composition is not additive, and an event that would
        cost this much by itself usually fits in more than once. Only `charge` tells whether something still
        fits.
        """
        return self.standing(dataset).remaining

    def standing(self, dataset: str = "") -> Standing:
        """What is proven about everything that was charged to the data set, and by which filter."""
        with self._store.lock:
            self._book.refresh()
            account, limit = self._book.state.account(dataset), self._book.state.limit
            plans, before_ceiling = account.plans, account.before_ceiling
            histories = [] if limit is None else account.histories(limit.adjacency)
        verdict = Verdict(True, FIXED) if limit is None else self._pricing.costs(histories, limit)
        return Standing(dataset, plans, limit, verdict.by, verdict.epsilon, before_ceiling)

    def entries(self, dataset: str | None = None) -> tuple[Entry, ...]:
        """All charges in order (of one data set, if named), read from the checked chain."""
        chosen = (entry for entry in self._book.read_all() if entry.event is not None)
        return tuple(entry for entry in chosen if dataset is None or key_of(entry.dataset) == key_of(dataset))

    def limits(self) -> tuple[Entry, ...]:
        """All ceilings ever set, in order."""
        return tuple(entry for entry in self._book.read_all() if entry.limit is not None)

    def claimed(self, run: str) -> int:
        """The highest step of the run that an attempt has claimed, 0 if none."""
        self._book.refresh()
        found = self._book.state.run(run)
        return 0 if found is None else found.claimed

    def paid(self, run: str) -> tuple[Event, ...]:
        """Everything that was charged under this run's identity, equal events counted together."""
        with self._store.lock:
            self._book.refresh()
            found = self._book.state.run(run)
            return () if found is None else found.paid.events()

    def datasets(self) -> tuple[str, ...]:
        """The names of the data sets charged so far."""
        self._book.refresh()
        return self._book.state.datasets()

    def events(self, dataset: str = "") -> tuple[Event, ...]:
        """Everything charged to the data set, equal events counted together, whatever their partition."""
        with self._store.lock:
            self._book.refresh()
            return self._book.state.account(dataset).events()

    def to_rows(self, delta: float | None = None, adjacency: Adjacency | None = None) -> list[dict[str, Any]]:
        """The ledger as a table, ready to print or to write as JSON.

        Keys: time, kind ("charge", "limit", "claim" or "dataset"), charges, purpose, dataset, partition, event (in
        words), who, epsilon. Equal charges that follow one another make one row: `charges` of them, the last at `time`.
        `epsilon` is what the data set had spent by then, at the given delta and adjacency or the present
        ceiling's; None if neither is there, no sound bound is known, or the row is not among the last ones.
        """
        if delta is None and self.ceiling is None:
            question = None
        else:
            question = self._question(delta, adjacency)
        return table(self._book.read_all(), self._pricing, question)

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file; using the ledger again opens it again. Does nothing to a ledger in memory."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "Ledger()" if self._store.place is None else f"Ledger({self._store.name.partition(' ')[2]})"

    def _repr_html_(self) -> str:
        return notebook_table(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A ledger in a file travels as its path; one in memory does not travel. Also what `copy` asks."""
        if self._store.place is None:
            raise TypeError(
                "a ledger in memory cannot be copied or pickled, for the copy could spend the budget again; "
                "use one in a file: Ledger('budget.db')"
            )
        if self._key is not None:
            raise TypeError("a ledger with a key cannot be copied or pickled, for the key would travel; open it again")
        witness = None if self._book.witness is None else str(self._book.witness.path)
        return Ledger, (self._store.place, self._store.timeout, self.who, witness)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_unclaimed(self, run: str, steps: Steps) -> None:
        found = self._book.state.run(run)
        if found is not None and found.is_taken(steps):
            raise StepsClaimed(
                f"{self._store.name}: of the steps up to {found.claimed} of run {run!r} some were claimed already, so "
                f"{steps.first} to {steps.last} cannot be; pay for what is to be released again",
                found.claimed,
            )

    def _check_paid(self, run: str | None, uses: Sequence[Event], paid_now: Sequence[Event]) -> None:
        found = (self._book.state.run(run) if run is not None else None) or PaidRun()
        shortfall = found.shortfall(uses, paid_now)
        if shortfall:
            raise Refusal(f"run={run!r}: has not paid for {shortfall}; charge for what it releases")

    def _append_charges(self, events: Sequence[Event], names: dict[str, Any], head: Head) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for event in events:
            plan = {"plan": entries[0].position} if entries else {}
            entries.append(self._book.append("charge", {**names, **plan, "event": event_to_dict(event)}, head))
            names = {name: value for name, value in names.items() if name != "uses"}  # once for all of them
            head = entries[-1].head
        return tuple(entries)

    def _append_sums(self, dataset: str, histories: list[History], limit: Limit, head: Head) -> Head:
        """Writes down what was dear to add up, so that the next process starts from there."""
        account = self._book.state.account(dataset)
        for log, found in self._pricing.worth_noting(histories, limit):
            names = {"dataset": dataset, "partition": account.part_of(log)}
            head = self._book.append("sum", {**names, **sum_values(found)}, head).head
        return head

    def _question(self, delta: float | None, adjacency: Adjacency | None) -> tuple[float, Adjacency]:
        asked = asked_limit(self._book.state.limit, delta, adjacency)
        return asked.delta, asked.adjacency

    def _refuse(
        self, events: Sequence[Event], dataset: str, partition: str | None, limit: Limit, after: list[History]
    ) -> NoReturn:
        if any(isinstance(event, NonPrivateEvent) for event in events):
            message = f"a non-private event has no place under {limit.words()}; use a ledger without a ceiling"
            raise BudgetExceeded(message, math.inf, limit.epsilon, limit.delta)
        with self._store.lock:
            account, part = self._book.state.account(dataset), self._book.state.part(dataset, partition)
            before = account.histories(limit.adjacency)
            together = account.worlds(limit.adjacency, events, part)
        verdict = self._pricing.needed(after, limit)
        left = max(0.0, limit.epsilon - self._pricing.costs(before, limit).epsilon)
        composed = verdict.epsilon
        if verdict.by != FIXED:
            composed = self._pricing.epsilon(together, limit.delta, limit.adjacency)
        message = refusal(events, dataset, limit, verdict, composed, left)
        raise BudgetExceeded(message, verdict.epsilon, limit.epsilon, limit.delta)
