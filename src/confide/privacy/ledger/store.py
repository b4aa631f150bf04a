"""Where a ledger's entries are kept: an append-only, hash-chained table in SQLite.

Each entry is one line of canonical JSON, its `body`, and a hash that covers it and everything before it:

    hash_0 = SHA-256("confide ledger <format> <identity>")
    hash_k = SHA-256(hash_{k-1} + newline + body_k)

with an identity drawn at random when the ledger is made, so that no entry fits into another ledger.
Editing, deleting or reordering rows breaks the chain. Cutting rows off the end would not, so the number of
entries and the last hash (the head) stand in a row of their own, written in the same transaction as the
entry.

What this cannot see: the hashes carry no secret, so somebody who rewrites the chain AND the head, or who
puts an older copy of the whole file back (deleting the `-wal` file beside it while it holds entries does
the same), leaves a consistent file behind. Only a head that was noted elsewhere, in a run's record say,
shows that; see `Store.check`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from confide.errors import LedgerError

FORMAT = 1
_APPLICATION = 0x636F6E66  # "conf": stands in the file's header and tells a ledger from any other SQLite file
_POLL_SECONDS = 0.25
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
BEGIN;
PRAGMA application_id = {_APPLICATION};
CREATE TABLE meta (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL, identity TEXT NOT NULL,
                   count INTEGER NOT NULL, head TEXT NOT NULL);
CREATE TABLE entries (position INTEGER PRIMARY KEY, body TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TRIGGER entries_are_never_edited BEFORE UPDATE ON entries
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
CREATE TRIGGER entries_are_never_deleted BEFORE DELETE ON entries
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
"""

_LOCKED = "locked by another process; wait for it to finish or close it, then try again"
_READ_ONLY = "read-only; a charge must be written down, so make the file and its folder writable"
_CORRUPT = "corrupt or truncated ({error}); restore it from a trusted copy"
_OTHER = "SQLite says {error}; check the file, or restore it from a trusted copy"
_REASONS: dict[int | None, str] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_NOTADB: "neither a ledger nor a SQLite file; give the path of a ledger or a new name",
    sqlite3.SQLITE_CORRUPT: _CORRUPT,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; the file and its folder must exist and be writable",
    sqlite3.SQLITE_FULL: "the disk is full, so nothing was charged; free some space",
}


@dataclass(frozen=True)
class Head:
    """How many entries a ledger holds and the hash of the last one, which stands for all of them."""

    count: int
    hash: str


@dataclass(frozen=True)
class Record:
    """One row of the chain, its hash already checked."""

    position: int
    values: dict[str, Any]
    hash: str


def canonical(values: dict[str, Any]) -> str:
    """The one JSON text of these values: sorted keys, no blanks, ASCII, no NaN."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _origin(identity: str) -> Head:
    return Head(0, _digest(f"confide ledger {FORMAT} {identity}"))


def _primary_code(error: sqlite3.Error) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


class Store:
    """The chain in one SQLite file (WAL, every commit flushed to disk), or in memory when `path` is None.

    One connection, used by one thread at a time and closed around a fork (see `_before_fork`). `read_after`,
    `check` and `append` belong inside a `transaction`.
    """

    def __init__(self, path: Path | None, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._left_behind: sqlite3.Connection | None = None
        self._inode: int | None = None
        _stores.add(self)
        with self.lock, self._explained():
            self._make_if_new()
        try:
            with self.transaction(write=False):
                self._identity = self._read_identity()
        except LedgerError:
            self.close()
            raise
        self.origin = _origin(self._identity)

    @property
    def name(self) -> str:
        return "the ledger in memory" if self.path is None else f"ledger {str(self.path)!r}"

    def close(self) -> None:
        """Closes the file; the next use opens it again. A ledger in memory stays as it is."""
        with self.lock:
            if self.path is not None and self._connection is not None:
                connection, self._connection = self._connection, None
                connection.close()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All or nothing. `write=True` keeps every other writer out from the first moment on."""
        with self.lock, self._explained():
            connection = self._connected()
            self._begin(connection, write)
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def read_after(self, seen: Head) -> tuple[list[Record], Head]:
        """The records behind `seen`, each checked against the chain, and the head they lead to."""
        connection = self._connected()
        if self._read_identity() != self._identity:
            raise self._tampered("another ledger stands in its place")
        head = Head(*connection.execute("SELECT count, head FROM meta").fetchone())
        query = "SELECT position, body, hash FROM entries WHERE position >= ? ORDER BY position"
        rows = connection.execute(query, (seen.count,)).fetchall()
        if seen.count:
            if not rows or (rows[0][0], rows[0][2]) != (seen.count, seen.hash):
                raise self._tampered(f"entry {seen.count} is not the one that was read before")
            del rows[0]
        records = []
        for row in rows:
            records.append(self._checked(row, seen))
            seen = Head(records[-1].position, records[-1].hash)
        if seen != head:
            raise self._tampered(f"{seen.count} entries do not lead to the head, which counts {head.count}")
        return records, head

    def check(self, noted: Head) -> None:
        """Refuses unless the entry that `noted` stands for is still in its place."""
        found: str | None = self.origin.hash
        if noted.count > 0:
            query = "SELECT hash FROM entries WHERE position = ?"
            row = self._connected().execute(query, (noted.count,)).fetchone()
            found = None if row is None else row[0]
        if found != noted.hash:
            raise self._tampered(f"entry {noted.count} is not the one the noted head stands for")

    def append(self, values: dict[str, Any], head: Head) -> Record:
        """Writes one more record behind `head`, which must be the head read in this same transaction."""
        body = canonical(values)
        record = Record(head.count + 1, values, _digest(f"{head.hash}\n{body}"))
        connection = self._connected()
        if not connection.in_transaction:  # SQLite would write at once, and without the lock
            raise LedgerError(f"{self.name}: interrupted by a fork, so nothing was written; try again")
        connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (record.position, body, record.hash))
        connection.execute("UPDATE meta SET count = ?, head = ?", (record.position, record.hash))
        return record

    def _checked(self, row: tuple[Any, Any, Any], before: Head) -> Record:
        position, body, found = row
        if position != before.count + 1:
            raise self._tampered(f"entry {before.count + 1} is missing")
        if not isinstance(body, str) or _digest(f"{before.hash}\n{body}") != found:
            raise self._tampered(f"entry {position} does not match its hash")
        try:
            values = json.loads(body)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise self._tampered(f"entry {position} is not a JSON object")
        return Record(position, values, found)

    def _tampered(self, what: str) -> LedgerError:
        return LedgerError(f"{self.name}: tampered with or corrupt, {what}; restore it from a trusted copy")

    def _read_identity(self) -> str:
        connection = self._connected()
        if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise LedgerError(f"{self.name}: a SQLite file but not a ledger; give the path of a ledger")
        row = connection.execute("SELECT format, identity FROM meta").fetchone()
        if row is None:
            raise self._tampered("its head is missing")
        if row[0] != FORMAT:
            raise LedgerError(f"{self.name}: format {row[0]!r}, known is {FORMAT}; install a newer confide")
        return str(row[1])

    def _make_if_new(self) -> None:
        if self.path is None:
            self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _create_tables(self._connection)
            return
        _check_place(self.path)
        if not self.path.exists():
            _create_file(self.path)

    def _connected(self) -> sqlite3.Connection:
        if self.path is None:
            if self._process != os.getpid():
                raise LedgerError(
                    "the ledger in memory belongs to another process, where its budget may be spent as well; "
                    "share a file instead: Ledger('budget.db')"
                )
            assert self._connection is not None
            return self._connection
        if self._process != os.getpid():  # a fork that Python did not see: the parent's connection is not ours to close
            self._left_behind, self._connection, self._process = self._connection, None, os.getpid()
        inode = self.path.stat().st_ino if self.path.exists() else None
        if self._connection is None:
            self._connection, self._inode = self._open(self.path), inode
        elif inode != self._inode:
            # SQLite would go on writing into a file that no longer has a name.
            raise LedgerError(f"{self.name}: moved or replaced while open; open it anew at its present place")
        return self._connection

    def _open(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",  # rw, not rwc: a file that has vanished must not begin anew
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=min(self.timeout, _POLL_SECONDS),
        )

    def _begin(self, connection: sqlite3.Connection, write: bool) -> None:
        """Waits while others make progress; gives up when nothing has moved for `timeout` seconds.

        Of fifty processes charging at once the last waits longer than any fixed time-out, and that is no
        fault.
        """
        patience_ends, last = time.monotonic() + self.timeout, None
        while True:
            try:
                connection.execute("PRAGMA synchronous = FULL")  # belongs to the connection, not to the file
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # a plain BEGIN reads from here on
                return
            except sqlite3.OperationalError as error:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if _primary_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
            count = _count_or_none(connection)
            if count != last:
                patience_ends, last = time.monotonic() + self.timeout, count
            elif time.monotonic() >= patience_ends:
                raise LedgerError(f"{self.name}: {_LOCKED} (waited {self.timeout:g} s)")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what SQLite and the operating system say into one sentence with a way out."""
        try:
            yield
        except UnicodeDecodeError as error:  # so damaged that what SQLite says of it is no text
            raise LedgerError(f"{self.name}: {_CORRUPT.format(error='unreadable')}") from error
        except sqlite3.Error as error:
            reason = _REASONS.get(_primary_code(error), _OTHER)
            said = " ".join(str(error).split())[:80]  # it may quote a damaged file at length
            raise LedgerError(f"{self.name}: {reason.format(error=said)}") from error
        except OSError as error:
            raise LedgerError(f"{self.name}: {error.strerror}; check the path and its permissions") from error


@contextmanager
def for_reading(path: Path) -> Iterator[Path]:
    """A ledger that may only be read, as a copy that SQLite can open; one that may be written, as itself.

    SQLite writes beside a file even to read it. A copy caught in the middle of somebody's charge breaks the chain, so
    it is refused when opened and never shown wrong.
    """
    place = Path(os.path.realpath(path))
    if os.access(place, os.W_OK) and os.access(place.parent, os.W_OK):
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / place.name
        try:
            for beside in ("-wal", ""):
                if beside == "" or Path(f"{place}{beside}").exists():
                    shutil.copyfile(f"{place}{beside}", f"{copy}{beside}")
        except OSError as error:
            raise LedgerError(f"ledger {str(path)!r}: cannot be read ({error.strerror})") from None
        yield copy


def _count_or_none(connection: sqlite3.Connection) -> int | None:
    """A writer does not keep readers out, so what others achieve is visible while waiting for them."""
    try:
        row = connection.execute("SELECT count FROM meta").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else int(row[0])


def _check_place(path: Path) -> None:
    name = f"ledger {str(path)!r}"
    if path.is_dir():
        raise LedgerError(f"{name}: is a directory; give the path of a file")
    if not path.parent.is_dir():
        raise LedgerError(f"{name}: the folder {str(path.parent)!r} does not exist; create it first")
    if not path.exists():
        return
    if not path.is_file():
        raise LedgerError(f"{name}: not a regular file; give the path of a file")
    if path.stat().st_size == 0:
        # SQLite takes an empty file for a new database: a ledger cut to nothing would begin a new budget.
        raise LedgerError(f"{name}: empty, so not a ledger; restore it from a trusted copy or give a new name")
    if not os.access(path, os.R_OK | os.W_OK):
        raise LedgerError(f"{name}: {_READ_ONLY}")


def _create_tables(connection: sqlite3.Connection) -> None:
    identity = secrets.token_hex(16)
    connection.executescript(_SCHEMA)
    connection.execute("INSERT INTO meta VALUES (1, ?, ?, 0, ?)", (FORMAT, identity, _origin(identity).hash))
    connection.execute("COMMIT")


def _create_file(path: Path) -> None:
    """Makes a complete ledger under another name, then gives it its own: nobody ever sees half of one.

    A name that is taken cannot be linked again: of many processes creating the same ledger one wins and the
    others open it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            _create_tables(connection)
        finally:
            connection.close()
        with suppress(FileExistsError):
            _link(draft, path)
    finally:
        for leftover in ("", "-wal", "-shm", "-journal"):
            Path(f"{draft}{leftover}").unlink(missing_ok=True)


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: claim the name, then fill it in one move
        path.touch(exist_ok=False)
        os.replace(draft, path)


# SQLite notes in memory which locks it holds on a file. A forked child inherits the notes but not the
# locks: it would take itself to be protected, the parent could fold away the log that the child still
# writes to, and entries would be lost. So no file is open at the moment of a fork; parent and child open it
# again at need.
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_held: list[Store] = []


def _before_fork() -> None:
    for store in list(_stores):
        store.lock.acquire()
        _held.append(store)
        store.close()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().lock.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
