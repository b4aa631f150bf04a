"""A ledger in PostgreSQL, for a team on several machines: the same chain, the same atomic ceiling.

`Ledger("postgresql://user@host/database")` keeps one ledger in each database, in a schema of its own. A charge locks
the one row of `meta` before it looks at anything, so writers queue up behind it. The lock goes with the connection: a
writer that dies lets the others on and leaves nothing behind. Every transaction asks for a synchronous commit, and a
server that would acknowledge a charge before it is on the disk is refused. A server that says nothing is not waited for
without end, and a connection that was ended while it stood idle is made again (`connection`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

from confide.errors import LedgerError
from confide.privacy.ledger.store import FORMAT, ChainStore, Record, Result, Row, origin_of

if TYPE_CHECKING:
    from confide.privacy.ledger.connection import TimedConnection

_SCHEMA: LiteralString = """
CREATE SCHEMA confide_ledger;
CREATE TABLE confide_ledger.meta (one integer PRIMARY KEY CHECK (one = 1), format integer NOT NULL,
    identity text NOT NULL, count bigint NOT NULL, head text NOT NULL);
CREATE TABLE confide_ledger.entries (position bigint PRIMARY KEY, body text NOT NULL, hash text NOT NULL);
CREATE FUNCTION confide_ledger.refuse() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'a ledger is append-only'; END $$;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON confide_ledger.entries
    FOR EACH STATEMENT EXECUTE FUNCTION confide_ledger.refuse();
"""
# Everything that could change what a statement does: relations (kind, persistence, row security, rules, children),
# columns with types and defaults, constraints, indexes, triggers with their state, rules, policies, functions.
_DESCRIPTION: LiteralString = """
WITH space AS (SELECT oid FROM pg_namespace WHERE nspname = 'confide_ledger'),
     tables AS (SELECT c.* FROM pg_class c JOIN space ON c.relnamespace = space.oid)
SELECT concat_ws(' ', 'relation', relname, relkind, relpersistence, relrowsecurity, relhasrules, relispartition)
    FROM tables
UNION ALL SELECT concat('child of ', t.relname) FROM pg_inherits i JOIN tables t ON t.oid IN (i.inhparent, i.inhrelid)
UNION ALL SELECT concat_ws(' ', 'column', t.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        pg_get_expr(d.adbin, d.adrelid), nullif(a.attgenerated, ''), nullif(a.attidentity, ''))
    FROM pg_attribute a JOIN tables t ON t.oid = a.attrelid
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attnum > 0 AND NOT a.attisdropped AND t.relkind <> 'i'
UNION ALL SELECT concat_ws(' ', 'constraint', t.relname, pg_get_constraintdef(k.oid))
    FROM pg_constraint k JOIN tables t ON t.oid = k.conrelid WHERE k.contype <> 'n'
UNION ALL SELECT concat_ws(' ', 'index', pg_get_indexdef(i.indexrelid), i.indisvalid)
    FROM pg_index i JOIN tables t ON t.oid = i.indrelid
UNION ALL SELECT concat_ws(' ', 'trigger', g.tgenabled, pg_get_triggerdef(g.oid))
    FROM pg_trigger g JOIN tables t ON t.oid = g.tgrelid
UNION ALL SELECT concat('rule ', pg_get_ruledef(r.oid)) FROM pg_rewrite r JOIN tables t ON t.oid = r.ev_class
UNION ALL SELECT concat('policy ', p.polname) FROM pg_policy p JOIN tables t ON t.oid = p.polrelid
UNION ALL SELECT concat_ws(' ', 'function', p.proname, l.lanname, trim(p.prosrc))
    FROM pg_proc p JOIN space ON p.pronamespace = space.oid JOIN pg_language l ON l.oid = p.prolang
"""
_EXPECTED = frozenset(
    {
        "relation meta r p f f f",
        "relation meta_pkey i p f f f",
        "relation entries r p f f f",
        "relation entries_pkey i p f f f",
        "column meta one integer t",
        "column meta format integer t",
        "column meta identity text t",
        "column meta count bigint t",
        "column meta head text t",
        "column entries position bigint t",
        "column entries body text t",
        "column entries hash text t",
        "constraint meta CHECK ((one = 1))",
        "constraint meta PRIMARY KEY (one)",
        'constraint entries PRIMARY KEY ("position")',
        "index CREATE UNIQUE INDEX meta_pkey ON confide_ledger.meta USING btree (one) t",
        'index CREATE UNIQUE INDEX entries_pkey ON confide_ledger.entries USING btree ("position") t',
        "trigger O CREATE TRIGGER entries_are_never_changed BEFORE DELETE OR UPDATE OR TRUNCATE "
        "ON confide_ledger.entries FOR EACH STATEMENT EXECUTE FUNCTION confide_ledger.refuse()",
        "function refuse plpgsql BEGIN RAISE EXCEPTION 'a ledger is append-only'; END",
    }
)
# A number that everybody who makes a ledger locks first, so that of many one makes it: "conf" as for SQLite.
_MAKING = 0x636F6E66
_IDLE = 0  # libpq's PQTRANS_IDLE: no transaction is open
# With one of these off, a crash of the server may take back what it has acknowledged.
_MUST_BE_ON = ("synchronous_commit", "fsync", "full_page_writes")


class PostgresStore(ChainStore):
    """The chain in the schema `confide_ledger` of one database. One connection, used by one thread at a time."""

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(timeout)
        self.address = re.sub("^(postgres(ql)?):/+", r"\1://", address)
        self._process = os.getpid()
        self._connection: TimedConnection | None = None
        self._left_behind: TimedConnection | None = None
        self._inside = False
        with self.lock, self._explained():
            self._make_if_new(self._connected())
        self._begin_chain()

    @property
    def name(self) -> str:
        """The address without its password."""
        parts = urlsplit(self.address)
        where = parts.netloc.rpartition("@")
        user = where[0].partition(":")[0]
        shown = f"{user}@{where[2]}" if user else where[2]
        return f"ledger {urlunsplit((parts.scheme, shown, parts.path, '', ''))!r}"

    @property
    def place(self) -> str | None:
        return self.address

    def close(self) -> None:
        """Ends the connection; the next use makes another."""
        with self.lock:
            connection, self._connection = self._connection, None
            if connection is not None and self._process == os.getpid():
                connection.close()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None and self._process == os.getpid():
            connection.close()

    # -- transactions ----------------------------------------------------------------------------------------

    def transact(self, body: Callable[[], Result], *, write: bool) -> Result:
        with self.lock, self._explained():
            assert not self._inside, "a transaction inside a transaction"
            connection = self._connected()
            try:
                self._inside, self._written = True, []
                self._begin(connection, write)
                result = body()
                connection.execute("COMMIT")
                self._inside = False
                if self._written:
                    self._check_written()
            finally:
                # Whatever went wrong or interrupted: without its connection the server takes the transaction back. No
                # call comes before this one, and nothing after it, since an interrupt can come after any call.
                self._inside = False
                if connection.pgconn.transaction_status != _IDLE:
                    connection.pgconn.finish()
            return result

    def _begin(self, connection: TimedConnection, write: bool) -> None:
        """Waits for the lock on the head while others make progress; gives up when nothing has moved for `timeout`."""
        if not write:
            connection.execute(f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {self._settings()}")
            self._check_schema(connection)
            return
        import psycopg

        last = self._read_turn(connection)
        while True:
            connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {self._settings()}")
            try:
                connection.execute("SELECT one FROM confide_ledger.meta FOR UPDATE")
            except psycopg.errors.LockNotAvailable:
                connection.execute("ROLLBACK")
            else:
                break
            turn = self._read_turn(connection)
            if turn == last:
                raise LedgerError(
                    f"{self.name}: locked by another writer; wait for it to finish or end it, then try again "
                    f"(waited {self.timeout:g} s)"
                )
            last = turn
        self._check_schema(connection)

    @staticmethod
    def _read_turn(connection: TimedConnection) -> tuple[Any, ...] | None:
        """Changes with every writer, also with one that was refused and wrote nothing: who had the lock last."""
        query: LiteralString = "SELECT count, xmax::text FROM confide_ledger.meta"
        found: tuple[Any, ...] | None = connection.execute(query).fetchone()
        return found

    # -- what is in the database -----------------------------------------------------------------------------

    def _make_if_new(self, connection: TimedConnection) -> None:
        with connection.transaction():
            connection.execute(self._settings())
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'confide_ledger'").fetchone()
            if found is None:
                identity = secrets.token_hex(16)
                connection.execute(_SCHEMA)
                connection.execute(
                    "INSERT INTO confide_ledger.meta VALUES (1, %s, %s, 0, %s)",
                    (FORMAT, identity, origin_of(identity).hash),
                )

    def _check_schema(self, connection: TimedConnection) -> None:
        """The tables of a ledger and nothing else: a trigger or rule of somebody's own could take entries back."""
        found = frozenset(str(row[0]) for row in connection.execute(_DESCRIPTION).fetchall() if row[0] is not None)
        odd = sorted(found ^ _EXPECTED)
        if odd:
            raise self.tampered(f"its tables are not those of a ledger ({odd[0][:80]})")

    def _read_meta(self) -> tuple[Any, ...] | None:
        query: LiteralString = "SELECT format, identity, count, head FROM confide_ledger.meta"
        found: tuple[Any, ...] | None = self._connected().execute(query).fetchone()
        return found

    def _read_rows(self, first: int) -> Sequence[Row]:
        query: LiteralString = (
            "SELECT position, body, hash FROM confide_ledger.entries WHERE position >= %s ORDER BY position"
        )
        return self._connected().execute(query, (first,)).fetchall()

    def _read_row(self, position: int) -> Row | None:
        query: LiteralString = "SELECT position, body, hash FROM confide_ledger.entries WHERE position = %s"
        found: Row | None = self._connected().execute(query, (position,)).fetchone()
        return found

    def _write(self, record: Record) -> None:
        connection = self._connected()
        if connection.pgconn.transaction_status == _IDLE:
            raise LedgerError(f"{self.name}: interrupted by a fork, so nothing was written; try again")
        connection.execute(
            "INSERT INTO confide_ledger.entries VALUES (%s, %s, %s)", (record.position, record.body, record.hash)
        )
        connection.execute("UPDATE confide_ledger.meta SET count = %s, head = %s", (record.position, record.hash))

    # -- the connection --------------------------------------------------------------------------------------

    def _connected(self) -> TimedConnection:
        if self._process != os.getpid():
            # A child of a fork leaves its parent's connection alone, and does not close it either.
            self._left_behind, self._connection, self._process = self._connection, None, os.getpid()
        if self._connection is not None and not self._connection.closed:
            idle = self._connection.pgconn.transaction_status == _IDLE
            if self._inside or (idle and not self._connection.was_ended()):
                return self._connection
            # An interrupt left a question on its way, whose answer would be taken for that of the next one; or the
            # server was started again meanwhile, or somebody between it and us does not keep connections.
            self._connection.pgconn.finish()
        if self._inside:
            raise LedgerError(f"{self.name}: interrupted in the middle, so nothing was written; try again")
        self._connection = self._open()
        return self._connection

    def _settings(self) -> LiteralString:
        """Of every transaction by itself: a pooler may run each in another session, and gives the session to others."""
        waiting: Any = max(1, round(self.timeout * 1000))
        own: LiteralString = f"SET LOCAL lock_timeout = '{waiting}ms'"
        # Nobody's own functions stand in for the server's; nothing is acknowledged before it is on the disk.
        return f"SET LOCAL search_path = pg_catalog; SET LOCAL synchronous_commit = on; {own}"

    def _open(self) -> TimedConnection:
        try:
            from confide.privacy.ledger.connection import connect
        except ImportError:
            raise LedgerError(
                f"{self.name}: needs psycopg, which is not installed; pip install 'confide[postgres]'"
            ) from None
        connection = connect(self.address, self.timeout)
        with connection.transaction():
            connection.execute(self._settings())
            found = {one: connection.execute("SELECT current_setting(%s)", (one,)).fetchone() for one in _MUST_BE_ON}
        for setting, value in found.items():
            if value != ("on",):
                connection.close()
                raise LedgerError(
                    f"{self.name}: the server has {setting} = {value[0] if value else None}, so that a crash could "
                    f"take charges back; set {setting} = on"
                )
        return connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the server says into one sentence with a way out."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "psycopg":
                raise
            said = " ".join(str(error).split())[:160]
            raise LedgerError(
                f"{self.name}: PostgreSQL says {said}; check the address, the server and the rights of its user"
            ) from error
