"""A ledger in a SQLite file (write-ahead log, every commit flushed), or in memory."""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from confide.errors import LedgerError
from confide.privacy.ledger.places import READ_ONLY, check_locks, check_place, create_file
from confide.privacy.ledger.store import FORMAT, ChainStore, Record, Result, Row, origin_of

_APPLICATION = 0x636F6E66  # "conf": stands in the file's header and tells a ledger from any other SQLite file
_POLL_SECONDS = 0.25  # How long SQLite waits by itself before we look whether others make progress.
SCHEMA = f"""
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
_CORRUPT = "corrupt or truncated ({error}); restore it from a trusted copy"
_OTHER = "SQLite says {error}; check the file, or restore it from a trusted copy"
_REASONS: dict[int | None, str] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_READONLY: READ_ONLY,
    sqlite3.SQLITE_NOTADB: "neither a ledger nor a SQLite file; give the path of a ledger or a new name",
    sqlite3.SQLITE_CORRUPT: _CORRUPT,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; the file and its folder must exist and be writable",
    sqlite3.SQLITE_FULL: "the disk is full, so nothing was charged; free some space",
}


def _primary_code(error: sqlite3.Error) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


class SqliteStore(ChainStore):
    """The chain in one file, or in memory when `path` is None.

    One connection, used by one thread at a time and closed around a fork (see `_before_fork`).
    """

    def __init__(self, path: Path | None, timeout: float) -> None:
        super().__init__(timeout)
        self.path = path
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._left_behind: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._inside = False
        _stores.add(self)
        with self.lock, self._explained():
            self._make_if_new()
        try:
            self.transact(self._check_whole, write=False)
            self._begin_chain()
        except LedgerError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return "the ledger in memory" if self.path is None else f"ledger {str(self.path)!r}"

    @property
    def place(self) -> str | None:
        return None if self.path is None else str(self.path)

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

    # -- transactions ----------------------------------------------------------------------------------------

    def transact(self, body: Callable[[], Result], *, write: bool) -> Result:
        with self.lock, self._explained():
            assert not self._inside, "a transaction inside a transaction"
            connection = self._connected()
            try:
                self._inside, self._written = True, []
                self._begin(connection, write)
                if write:
                    self._check_schema(connection)
                result = body()
                connection.execute("COMMIT")
            finally:
                # An interrupt can come after any call, so the first call here must be the one that ends the
                # transaction, and nothing comes after it: a helper, or the exit of a context manager, could be
                # interrupted before it begins, and what follows a call might never be done.
                self._inside = False
                if self._connection is connection and connection.in_transaction:
                    connection.execute("ROLLBACK")
            self._read_back()
            return result

    def _begin(self, connection: sqlite3.Connection, write: bool) -> None:
        """Waits while others make progress; gives up when nothing has moved for `timeout` seconds.

        Of fifty processes charging at once the last waits longer than any fixed time-out, and that is no
        fault.
        """
        if connection.in_transaction:
            connection.execute("ROLLBACK")
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

    def _read_back(self) -> None:
        """Through a connection of its own, which has seen nothing of what was written."""
        if not self._written:
            return
        if self.path is None:
            self._check_written()
            return
        mine = self._connection
        with closing(self._open(self.path)) as other:
            try:
                self._connection = other
                self._check_written()
            finally:
                self._connection = mine

    # -- what is in the file ---------------------------------------------------------------------------------

    def _check_whole(self) -> None:
        connection = self._connected()
        if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise LedgerError(f"{self.name}: a SQLite file but not a ledger; give the path of a ledger")
        self._check_schema(connection)
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise LedgerError(f"{self.name}: {_CORRUPT.format(error=' '.join(str(found).split())[:80])}")

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """The tables and triggers of a ledger and nothing else: a trigger of somebody's own could take entries back."""
        found = frozenset(connection.execute(_EVERYTHING))
        odd = sorted(str(name) for _, name, _, _ in found ^ _expected_schema())
        if odd:
            raise self.tampered(f"its tables and triggers are not those of a ledger ({', '.join(odd)[:80]})")

    def _read_meta(self) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = (
            self._connected().execute("SELECT format, identity, count, head FROM meta").fetchone()
        )
        return found

    def _read_rows(self, first: int) -> Sequence[Row]:
        query = "SELECT position, body, hash FROM entries WHERE position >= ? ORDER BY position"
        return self._connected().execute(query, (first,)).fetchall()

    def _read_row(self, position: int) -> Row | None:
        query = "SELECT position, body, hash FROM entries WHERE position = ?"
        found: Row | None = self._connected().execute(query, (position,)).fetchone()
        return found

    def _write(self, record: Record) -> None:
        connection = self._connected()
        if not connection.in_transaction:  # SQLite would write at once, and without the lock
            raise LedgerError(f"{self.name}: interrupted by a fork, so nothing was written; try again")
        connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (record.position, record.body, record.hash))
        connection.execute("UPDATE meta SET count = ?, head = ?", (record.position, record.hash))

    # -- the connection --------------------------------------------------------------------------------------

    def _make_if_new(self) -> None:
        if self.path is None:
            self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _create_tables(self._connection)
            return
        check_place(self.path)
        check_locks(self.path)
        if not self.path.exists():
            create_file(self.path, _create_tables)

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


_EVERYTHING = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@cache
def _expected_schema() -> frozenset[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _create_tables(connection)
        return frozenset(connection.execute(_EVERYTHING))


def _count_or_none(connection: sqlite3.Connection) -> int | None:
    """A writer does not keep readers out, so what others achieve is visible while waiting for them."""
    try:
        row = connection.execute("SELECT count FROM meta").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else int(row[0])


def _create_tables(connection: sqlite3.Connection) -> None:
    identity = secrets.token_hex(16)
    connection.executescript(SCHEMA)
    connection.execute("INSERT INTO meta VALUES (1, ?, ?, 0, ?)", (FORMAT, identity, origin_of(identity).hash))
    connection.execute("COMMIT")


# SQLite notes in memory which locks it holds on a file. A forked child inherits the notes but not the
# locks: it would take itself to be protected, the parent could fold away the log that the child still
# writes to, and entries would be lost. So no file is open at the moment of a fork; parent and child open it
# again at need.
_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
_held: list[SqliteStore] = []


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
