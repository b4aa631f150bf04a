"""What a ledger is kept in: the interface of a store, and the hash chain that every store holds.

Each entry is one line of canonical JSON, its `body`, and a hash that covers it and everything before it:

    hash_0 = SHA-256("confide ledger <format> <identity>")
    hash_k = SHA-256(hash_{k-1} + newline + body_k)

with an identity drawn at random when the ledger is made, so that no entry fits into another ledger.
Editing, deleting or reordering rows breaks the chain. Cutting rows off the end would not, so the number of
entries and the last hash (the head) stand in a row of their own, written in the same transaction as the
entry.

What this cannot see: the hashes carry no secret, so somebody who rewrites the chain AND the head, or who
puts an older copy of the whole store back (deleting the `-wal` file beside a SQLite file while it holds entries does
the same), leaves a consistent ledger behind. A head that was noted elsewhere shows that: see `witness`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from confide.errors import LedgerError, Refusal

FORMAT = 1  # Raised when ledgers of before could be misread.
Result = TypeVar("Result")
Row = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Head:
    """How many entries a ledger holds and the hash of the last one, which stands for all of them."""

    count: int
    hash: str

    def __str__(self) -> str:
        """As `confide ledger head` prints it and `Head.read` takes it."""
        return f"{self.count}:{self.hash}"

    @staticmethod
    def read(text: str) -> Head:
        """The head that this text stands for."""
        count, _, digest = text.strip().partition(":")
        if not (count.isdecimal() and count.isascii() and len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
            raise Refusal(f"head={text!r}: must be COUNT:HASH, as `confide ledger head FILE` prints it")
        return Head(int(count), digest)


@dataclass(frozen=True)
class Record:
    """One row of the chain, its hash already checked. `before`: the hash of the row before it."""

    position: int
    body: str
    hash: str
    before: str

    @property
    def values(self) -> dict[str, Any]:
        """What the body says."""
        try:
            values = json.loads(self.body)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise Refusal(f"entry {self.position} is not a JSON object")
        return values


class LedgerStore(Protocol):
    """What a `Ledger` asks of the place it is kept in.

    name, place  as errors call it; what `Ledger(...)` takes to open it again, None in memory
    timeout      seconds to wait for a lock while nothing moves
    lock         held by the thread that is in a transaction
    identity     drawn at random when the ledger was made
    origin       the head of the ledger when it was empty
    transact     runs `body` in one transaction, all or nothing. `write=True` keeps every other writer out from the
                 first moment on, and what was written is read back once it is committed. No interrupt leaves one open
    read_after   the records behind `seen`, each checked against the chain, and the head they lead to
    check        refuses unless the entry that `noted` stands for is still in its place
    append       writes one more record behind `head`, which must be the head read in this same transaction
    close        lets go of files and connections; the next use opens them again

    `read_after`, `check` and `append` belong inside a `transact`.
    """

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> str | None: ...
    @property
    def timeout(self) -> float: ...
    @property
    def lock(self) -> threading.RLock: ...
    @property
    def identity(self) -> str: ...
    @property
    def origin(self) -> Head: ...
    def transact(self, body: Callable[[], Result], *, write: bool) -> Result: ...
    def read_after(self, seen: Head) -> tuple[list[Record], Head]: ...
    def check(self, noted: Head) -> None: ...
    def append(self, values: dict[str, Any], head: Head) -> Record: ...
    def close(self) -> None: ...


def canonical(values: dict[str, Any]) -> str:
    """The one JSON text of these values: sorted keys, no blanks, ASCII, no NaN."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def origin_of(identity: str) -> Head:
    return Head(0, digest(f"confide ledger {FORMAT} {identity}"))


class ChainStore(ABC):
    """The chain over any two tables, `meta` (one row) and `entries`: what is the same in every store."""

    timeout: float
    lock: threading.RLock
    identity: str
    origin: Head

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.lock = threading.RLock()
        self._written: list[Record] = []

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def transact(self, body: Callable[[], Result], *, write: bool) -> Result: ...

    @abstractmethod
    def _read_meta(self) -> tuple[Any, ...] | None:
        """(format, identity, count, head), the one row of `meta`."""

    @abstractmethod
    def _read_rows(self, first: int) -> Sequence[Row]:
        """(position, body, hash) from position `first` on, in order."""

    @abstractmethod
    def _read_row(self, position: int) -> Row | None: ...

    @abstractmethod
    def _write(self, record: Record) -> None:
        """One row more, and the head that it makes. Inside a transaction that writes."""

    def _begin_chain(self) -> None:
        """Learns which ledger this is; once, when it is opened."""
        self.identity = self.transact(self._read_identity, write=False)
        self.origin = origin_of(self.identity)

    def _read_identity(self) -> str:
        meta = self._read_meta()
        if meta is None:
            raise self.tampered("its head is missing")
        if meta[0] != FORMAT:
            raise LedgerError(f"{self.name}: format {meta[0]!r}, known is {FORMAT}; install a newer confide")
        return str(meta[1])

    def read_after(self, seen: Head) -> tuple[list[Record], Head]:
        if self._read_identity() != self.identity:
            raise self.tampered("another ledger stands in its place")
        meta = self._read_meta()
        assert meta is not None
        head = Head(meta[2], meta[3])
        rows = list(self._read_rows(seen.count))
        if seen.count:
            if not rows or (rows[0][0], rows[0][2]) != (seen.count, seen.hash):
                raise self.tampered(f"entry {seen.count} is not the one that was read before")
            del rows[0]
        records = []
        for row in rows:
            records.append(self._checked(row, seen))
            seen = Head(row[0], row[2])
        if seen != head:
            raise self.tampered(f"{seen.count} entries do not lead to the head, which counts {head.count}")
        return records, head

    def _checked(self, row: Row, before: Head) -> Record:
        position, body, found = row
        if position != before.count + 1:
            raise self.tampered(f"entry {before.count + 1} is missing")
        if not isinstance(body, str) or digest(f"{before.hash}\n{body}") != found:
            raise self.tampered(f"entry {position} does not match its hash")
        return Record(position, body, found, before.hash)

    def check(self, noted: Head) -> None:
        found = self.origin.hash
        if noted.count > 0:
            row = self._read_row(noted.count)
            found = "" if row is None else row[2]
        if found != noted.hash:
            raise self.tampered(f"entry {noted.count} is not the one the noted head stands for")

    def append(self, values: dict[str, Any], head: Head) -> Record:
        body = canonical(values)
        record = Record(head.count + 1, body, digest(f"{head.hash}\n{body}"), head.hash)
        self._write(record)
        self._written.append(record)
        return record

    def _check_written(self) -> None:
        """What was committed must be there for everybody: a trigger, or a file system that forgets, could drop it."""
        for record in self._written:
            if self._read_row(record.position) != (record.position, record.body, record.hash):
                raise self.tampered(f"entry {record.position} was committed but cannot be read back, so it is not paid")
        meta = self._read_meta()
        if self._written and (meta is None or meta[2] < self._written[-1].position):
            raise self.tampered("its head does not count what was committed, so it is not paid")

    def tampered(self, what: str) -> LedgerError:
        return LedgerError(f"{self.name}: tampered with or corrupt, {what}; restore it from a trusted copy")
