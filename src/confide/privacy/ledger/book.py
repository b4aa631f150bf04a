"""The book of a ledger: its store, what the entries add up to so far, and the witness, kept in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from confide.errors import LedgerError, Refusal
from confide.privacy.ledger.entries import Entry, Reader
from confide.privacy.ledger.state import State
from confide.privacy.ledger.store import Head, LedgerStore, Record
from confide.privacy.ledger.witness import Witness

try:
    VERSION = version("confide")
except PackageNotFoundError:  # run from its source folder, without having been installed
    VERSION = "not installed"


class Book:
    """Reads every entry once, as it comes, and writes new ones behind the present head."""

    def __init__(self, store: LedgerStore, witness: Witness | None, who: str) -> None:
        self.store, self.witness, self.who = store, witness, who
        self.seen = store.origin
        self.state, self._reader = State(), Reader()
        self._half_read = False
        try:
            self.refresh()
        except LedgerError:
            store.close()
            raise

    def refresh(self) -> None:
        self.store.transact(self.catch_up, write=False)

    def write(self, body: Callable[[Head], tuple[Entry, ...]]) -> tuple[Entry, ...]:
        """Runs `body` on the present head, with every other writer kept out, and shows the witness what it wrote."""
        entries = self.store.transact(lambda: body(self.catch_up()), write=True)
        if self.witness is not None and entries:
            self.witness.note(entries[-1].head)
        return entries

    def catch_up(self) -> Head:
        """Takes in what was written since the last look, by anybody. Inside a transaction only."""
        if self._half_read:
            # An error or an interrupt came when some of the entries were in: the others must not be lost, nor these be
            # counted twice. To begin anew is left to the next look, for the handler of an interrupt can be interrupted.
            self.state, self._reader, self.seen = State(), Reader(), self.store.origin
            self._half_read = False
        records, head = self.store.read_after(self.seen)
        if self.witness is not None:
            self.witness.check(self.store.check)
        self._half_read = True
        for record in records:
            self._take(self.state, self._reader, record)
        self.seen, self._half_read = head, False
        return head

    def append(self, kind: str, values: dict[str, Any], head: Head) -> Entry:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds")
        written = {"type": kind, "time": stamp, "who": self.who, "version": VERSION}
        return self._parse(self._reader, self.store.append({**written, **values}, head))

    def read_all(self) -> Iterator[Entry]:
        records, _ = self.store.transact(lambda: self.store.read_after(self.store.origin), write=False)
        return (self._parse(self._reader, record) for record in records)

    def _take(self, state: State, reader: Reader, record: Record) -> None:
        entry = self._parse(reader, record)
        self._refusing(lambda: state.take(entry))

    def _refusing(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Refusal as error:
            raise LedgerError(f"{self.store.name}: {error}; restore it from a trusted copy") from error

    def _parse(self, reader: Reader, record: Record) -> Entry:
        try:
            return reader.entry(record)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self.store.name}: entry {record.position} is of no known form ({error}); "
                "open it with the version of confide that wrote it"
            ) from error

    def verify(self, noted: Head | None, sums: bool = False) -> Head:
        """Reads everything again, and checks it against the noted head and the witness; `sums`: these as well."""

        def read() -> tuple[list[Record], Head]:
            found = self.store.read_after(self.store.origin)
            for head in (noted, None if self.witness is None else self.witness.highest()):
                if head is not None:
                    self.store.check(head)
            return found

        records, head = self.store.transact(read, write=False)
        state, reader = State(), Reader()
        for record in records:
            self._take(state, reader, record)
        if sums:
            self._refusing(state.check_sums)
        return head
