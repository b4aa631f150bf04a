"""Attacks on a ledger by people with a shell: planted triggers, interrupts, locks that do not hold, lost writes."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confide.errors import LedgerError
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Entry, Head, Ledger, places, sqlite
from confide.privacy.ledger.postgres import PostgresStore
from tests.privacy.ledger.ledger_tools import in_a_process
from tests.privacy.ledger.servers import Server, emptied

STEP = GaussianEvent(1.0)

FORGETTING = [
    "CREATE TRIGGER forget AFTER INSERT ON entries BEGIN UPDATE meta SET count = 0, head = 'x'; END",
    "DROP TRIGGER entries_are_never_deleted",
]
FOREIGN_IN_SQLITE = {
    "a trigger": ["CREATE TRIGGER forget AFTER INSERT ON entries BEGIN UPDATE meta SET count = 0; END"],
    "a trigger with a taken name": [
        "DROP TRIGGER entries_are_never_deleted",
        "CREATE TRIGGER entries_are_never_deleted AFTER INSERT ON entries BEGIN UPDATE meta SET count = 0; END",
    ],
    "a trigger less": ["DROP TRIGGER entries_are_never_edited"],
    "a view": ["CREATE VIEW sums AS SELECT count(*) FROM entries"],
    "a table": ["CREATE TABLE notes (text TEXT)"],
    "an index": ["CREATE INDEX by_hash ON entries (hash)"],
    "a column": ["ALTER TABLE entries ADD COLUMN note TEXT"],
    "a view for a table": ["ALTER TABLE entries RENAME TO hidden", "CREATE VIEW entries AS SELECT * FROM hidden"],
}
FOREIGN_IN_POSTGRES = {
    "a trigger": [
        "CREATE FUNCTION public.forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER forget BEFORE INSERT ON confide_ledger.entries FOR EACH ROW EXECUTE FUNCTION public.forget()",
    ],
    "a rule": ["CREATE RULE forget AS ON INSERT TO confide_ledger.entries DO INSTEAD NOTHING"],
    "a trigger switched off": ["ALTER TABLE confide_ledger.entries DISABLE TRIGGER ALL"],
    "a view": ["CREATE VIEW confide_ledger.sums AS SELECT 1 AS one"],
    "a table": ["CREATE TABLE confide_ledger.notes (text text)"],
    "a child": ["CREATE TABLE public.child () INHERITS (confide_ledger.entries)"],
    "a column": ["ALTER TABLE confide_ledger.entries ADD COLUMN note text DEFAULT 'x'"],
    "a default": ["ALTER TABLE confide_ledger.meta ALTER COLUMN count SET DEFAULT 0"],
    "row security": ["ALTER TABLE confide_ledger.entries ENABLE ROW LEVEL SECURITY"],
    "a table that a crash empties": ["ALTER TABLE confide_ledger.entries SET UNLOGGED"],
    "another function": [
        "CREATE OR REPLACE FUNCTION confide_ledger.refuse() RETURNS trigger LANGUAGE plpgsql "
        "AS $$ BEGIN RETURN NULL; END $$"
    ],
}


def in_shell(place: str, statements: list[str]) -> None:
    """What somebody with the database's own shell can do."""
    if place.startswith("postgresql"):
        import psycopg

        with psycopg.connect(place, autocommit=True) as shell:
            for statement in statements:
                shell.execute(statement)  # type: ignore[call-overload]
        return
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def check_foreign(place: str, statements: list[str]) -> None:
    """Refused when it is opened, and by a ledger that was open before."""
    ledger = Ledger(place, timeout=30)
    ledger.charge(STEP)
    in_shell(place, statements)
    with pytest.raises(LedgerError, match="are not those of a ledger"):
        ledger.charge(STEP)
    with pytest.raises(LedgerError, match="are not those of a ledger"):
        Ledger(place)
    ledger.close()


@pytest.mark.parametrize("kind", FOREIGN_IN_SQLITE)
def test_a_file_with_anything_of_somebodys_own_is_refused(tmp_path: Path, kind: str) -> None:
    check_foreign(str(tmp_path / "budget.db"), FOREIGN_IN_SQLITE[kind])


@pytest.mark.parametrize("kind", FOREIGN_IN_POSTGRES)
def test_a_database_with_anything_of_somebodys_own_is_refused(server: Server, kind: str) -> None:
    place = emptied(server.address)
    check_foreign(place, FOREIGN_IN_POSTGRES[kind])
    in_shell(place, ["DROP TABLE IF EXISTS public.child", "DROP SCHEMA confide_ledger CASCADE"])
    in_shell(place, ["DROP FUNCTION IF EXISTS public.forget()"])


def test_what_is_committed_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a ledger that does not look at its triggers. What they take back shows all the same."""
    path = str(tmp_path / "budget.db")
    monkeypatch.setattr(sqlite.SqliteStore, "_check_schema", lambda self, connection: None)
    ledger = Ledger(path)
    in_shell(
        path, ["CREATE TRIGGER forget AFTER UPDATE ON meta WHEN new.count > 0 BEGIN UPDATE meta SET count = 0; END"]
    )
    with pytest.raises(LedgerError, match="so it is not paid"):
        ledger.charge(STEP)


# -- interrupts ----------------------------------------------------------------------------------------------


def charge_in_a_storm(place: str, seconds: float) -> tuple[int, int, int]:
    """Charges while alarms go off at odd moments; how many came through, were interrupted, and left something open."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    ledger = Ledger(place)
    store = ledger._store
    assert isinstance(store, sqlite.SqliteStore | PostgresStore)
    signal.signal(signal.SIGALRM, interrupt)
    ends, paid, interrupted, left_open, gap = time.monotonic() + seconds, 0, 0, 0, 0.0002
    while time.monotonic() < ends:
        gap = gap * 1.07 if gap < 0.02 else 0.0002
        try:
            signal.setitimer(signal.ITIMER_REAL, gap)
            ledger.charge(STEP)
            signal.setitimer(signal.ITIMER_REAL, 0)
            paid += 1
        except KeyboardInterrupt:
            interrupted += 1
            left_open += is_open(store)
    return paid, interrupted, left_open


def is_open(store: sqlite.SqliteStore | PostgresStore) -> bool:
    connection = store._connection
    if connection is None:
        return False
    if isinstance(connection, sqlite3.Connection):
        return connection.in_transaction
    return not connection.closed and connection.pgconn.transaction_status != 0


def test_an_interrupt_never_leaves_a_transaction_open(place: str) -> None:
    """Would catch a BEGIN outside of what rolls back, and one half of the entries taken twice."""
    paid, interrupted, left_open = in_a_process(charge_in_a_storm, place, 4.0)
    assert interrupted > 30
    assert left_open == 0
    with Ledger(place, timeout=0.5) as ledger:
        assert len(ledger.entries()) >= paid
        assert ledger.charge(STEP).position == len(ledger.entries())
        ledger.verify()


def test_a_question_that_an_interrupt_left_on_its_way_is_not_answered_to_the_next(place: str) -> None:
    """Would catch a connection that is used again while it still waits for an answer."""
    with Ledger(place) as ledger:
        ledger.charge(STEP)
        store = ledger._store
        if isinstance(store, PostgresStore):
            store._connected().pgconn.send_query(b"SELECT 1")
        assert ledger.charge(STEP).position == 2
        ledger.verify()


class Interrupting:
    """Raises where a signal would be handled: when a function has been entered, or has come back."""

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "return", "c_return"):
            self.seen += 1
            if self.seen == self.place:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, work: Callable[[], object]) -> bool:
        """Whether it came to that."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        except LedgerError:
            return False
        finally:
            sys.setprofile(None)
        return False


@pytest.mark.parametrize("kept", ["in memory", "in a file"])
@pytest.mark.parametrize("asked", ["charge", "look", "refused"])
def test_after_an_interrupt_anywhere_the_next_call_works(kept: str, asked: str, tmp_path: Path) -> None:
    """Caught: a flag that said "inside a transaction" for ever, since an interrupt came just after the rollback."""
    path = None if kept == "in memory" else str(tmp_path / "budget.db")
    ledger = Ledger(path)
    store = ledger._store
    assert isinstance(store, sqlite.SqliteStore)

    def work() -> object:
        if asked == "refused":
            return ledger.claim("0" * 32, 1, 1)  # never charged: found out inside the transaction
        return ledger.charge(STEP) if asked == "charge" else ledger.datasets()

    def read_anew() -> None:
        if path is not None and asked == "look":
            with Ledger(path) as other:  # something to take in, which may be left half done
                other.charge(STEP)

    ledger.charge(STEP)
    everything = Interrupting(0)
    read_anew()
    assert not everything.during(work)
    assert everything.seen > 50
    known = len(ledger.entries())
    for place in range(1, everything.seen + 1, max(1, everything.seen // 100)):
        read_anew()
        known += path is not None and asked == "look"
        Interrupting(place).during(work)
        assert not is_open(store)
        ledger.charge(STEP)
        found = len(ledger.entries())
        assert found in ((known + 1, known + 2) if asked == "charge" else (known + 1,))
        assert ledger.events() == (replace(STEP, count=found),)
        known = found
    ledger.verify()


def test_a_transaction_by_context_manager_is_left_open(tmp_path: Path) -> None:
    """The broken variant: begun in a helper that can be interrupted just after it has begun."""

    class Careless(sqlite.SqliteStore):
        def _begin(self, connection: sqlite3.Connection, write: bool) -> None:
            super()._begin(connection, write)
            self._connection = None  # what `finally` then does not find: as if it was interrupted before it
            self.lost = connection
            raise KeyboardInterrupt

    store = sqlite.SqliteStore(tmp_path / "budget.db", 1.0)
    store.__class__ = Careless
    with pytest.raises(KeyboardInterrupt):
        store.transact(lambda: None, write=True)
    with pytest.raises(LedgerError, match="locked"):
        Ledger(tmp_path / "budget.db", timeout=0).charge(STEP)
    store.lost.close()  # type: ignore[attr-defined]


def test_an_interrupt_while_reading_loses_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of somebody's entries are taken in when it comes; afterwards each one counts, and counts once."""
    ours, theirs = Ledger(tmp_path / "budget.db"), Ledger(tmp_path / "budget.db")
    for number in range(4):
        theirs.charge(STEP, count=number + 1)
    take, calls = type(ours._book.state).take, []

    def interrupted(self: Any, entry: Entry) -> None:
        take(self, entry)
        calls.append(entry)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(ours._book.state), "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.datasets()
    assert ours.events() == (GaussianEvent(1.0, count=10),)


# -- places --------------------------------------------------------------------------------------------------


def test_a_file_system_without_locks_is_refused(tmp_path: Path) -> None:
    """Really without: a library in front of the system's that says yes to every lock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler to make a file system without locks with")
    source = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <fcntl.h>
        #include <stdarg.h>
        #define LOCKLESS(name) int name(int file, int command, ...) { \\
            va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list); \\
            if (command == F_SETLK || command == F_SETLKW) return 0; \\
            int (*next)(int, int, ...) = dlsym(RTLD_NEXT, #name); return next(file, command, argument); }
        LOCKLESS(fcntl)
        LOCKLESS(fcntl64)
    """
    (tmp_path / "lockless.c").write_text(textwrap.dedent(source))
    library = tmp_path / "lockless.so"
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "lockless.c"), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    code = "import sys; from confide.privacy.ledger import Ledger; Ledger(sys.argv[1])"
    words = [sys.executable, "-c", code, str(tmp_path / "budget.db")]
    run = subprocess.run(
        words, env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "locks do not hold on this file system" in run.stderr
    assert "postgresql://" in run.stderr
    assert not (tmp_path / "budget.db").exists()
    assert subprocess.run(words, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(places, "_tested", set())
    monkeypatch.setattr(places, "file_system", lambda device: kind)
    with pytest.raises(LedgerError, match=rf"network file system \({kind}\).*postgresql://"):
        Ledger(tmp_path / "budget.db")
    assert list(tmp_path.iterdir()) == []


def test_this_file_system_is_named(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("no table of mounts")
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=False
    ).stdout
    kind = places.file_system(tmp_path.stat().st_dev)
    assert kind
    assert kind[:3] in found or kind in ("overlay", "tmpfs")


def test_the_folder_is_synced_when_a_ledger_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new name is lost in a crash until its folder is on the disk."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    Ledger(tmp_path / "budget.db").close()
    assert tmp_path.stat().st_ino in synced
    assert (tmp_path / "budget.db").stat().st_ino in synced


# -- a server ------------------------------------------------------------------------------------------------


def hold_and_die(place: str) -> None:
    ledger = Ledger(place)

    def hold(head: Head) -> tuple[Entry, ...]:
        entry = ledger._book.append("limit", {"epsilon": 9.0, "delta": 1e-5, "adjacency": "add-remove"}, head)
        os.kill(os.getpid(), signal.SIGKILL)
        return (entry,)

    ledger._book.write(hold)


def test_a_writer_killed_with_the_lock_lets_the_others_on(place: str) -> None:
    Ledger(place).charge(STEP, "before")
    assert in_a_process(hold_and_die, place) is None
    with Ledger(place, timeout=5) as ledger:
        assert ledger.charge(STEP, "after").position == 2
        assert ledger.ceiling is None
        ledger.verify()


def test_a_server_that_is_killed_loses_nothing_it_acknowledged(server: Server) -> None:
    place = emptied(server.address)
    stop, acknowledged = threading.Event(), []

    def spend() -> None:
        with Ledger(place) as mine:
            while not stop.is_set():
                try:
                    acknowledged.append(mine.charge(STEP, f"{threading.get_ident()} {len(acknowledged)}").purpose)
                except LedgerError:
                    return

    writers = [threading.Thread(target=spend) for _ in range(4)]
    open_before = Ledger(place)
    for writer in writers:
        writer.start()
    time.sleep(1.0)
    server.kill()
    for writer in writers:
        writer.join(timeout=60)
    server.start_again()
    with Ledger(place) as again:
        assert acknowledged
        assert set(acknowledged) <= {entry.purpose for entry in again.entries()}
        again.verify()
    open_before.charge(STEP)  # on a connection of its own, for the one from before is gone


def ended_by_somebody(place: str) -> None:
    """As a pooler, a firewall or an administrator ends connections that stand idle."""
    others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'confide'"
    in_shell(place, [f"SELECT pg_terminate_backend(pid, 5000) {others}"])


def test_a_connection_that_was_ended_while_it_stood_idle_is_made_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confide.privacy.ledger import connection  # needs psycopg, as the server does

    with Ledger(emptied(server.address)) as ledger:
        ledger.charge(STEP, "before")
        ended_by_somebody(server.address)
        ledger.charge(STEP, "after")
        assert [entry.purpose for entry in ledger.entries()] == ["before", "after"]
        monkeypatch.setattr(connection.TimedConnection, "was_ended", lambda _: False)
        ended_by_somebody(server.address)
        with pytest.raises(LedgerError, match="PostgreSQL says"):
            ledger.charge(STEP)  # planted: nobody looks


def test_an_exchange_without_a_single_step_ends(server: Server) -> None:
    """What a transaction does at its end where an interrupt came before it asked anything."""
    from confide.privacy.ledger import connection

    def nothing_to_ask() -> Generator[None, None, bool]:
        return False
        yield

    found = connection.connect(server.address, 5.0)
    assert found.wait(nothing_to_ask()) is False
    found.close()


def test_a_server_that_stands_still_is_an_error_after_a_while(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from confide.privacy.ledger import connection

    monkeypatch.setattr(connection, "PATIENCE", 0.4)
    with Ledger(emptied(server.address), timeout=0.1) as ledger:
        ledger.charge(STEP, "before")
        store = ledger._store
        assert isinstance(store, PostgresStore)
        serving = store._connected().info.backend_pid
        os.kill(serving, signal.SIGSTOP)
        try:
            with pytest.raises(LedgerError, match=r"says nothing for 0\.5 s"):
                ledger.charge(STEP, "lost")
        finally:
            os.kill(serving, signal.SIGCONT)
        ledger.charge(STEP, "after")
        assert [entry.purpose for entry in ledger.entries()] == ["before", "after"]


def test_a_server_that_forgets_is_refused(server: Server) -> None:
    place = emptied(server.address)
    in_shell(place, ["ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"])
    time.sleep(0.3)
    try:
        with pytest.raises(LedgerError, match=r"fsync = off.*set fsync = on"):
            Ledger(place)
    finally:
        in_shell(place, ["ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()"])
        time.sleep(0.3)
    Ledger(place).close()


def test_a_transaction_asks_for_synchronous_commits(server: Server) -> None:
    """Each of them, for a pooler may run every one in another session; and it leaves the session as it was."""
    place = emptied(server.address)
    in_shell(place, ["ALTER ROLE confide SET synchronous_commit = off"])
    with Ledger(place) as ledger:
        ledger.charge(STEP)
        store = ledger._store
        assert isinstance(store, PostgresStore)
        inside = store.transact(lambda: store._connected().execute("SHOW synchronous_commit").fetchone(), write=True)
        assert inside == ("on",)
        assert store._connected().execute("SHOW synchronous_commit").fetchone() == ("off",)
    in_shell(place, ["ALTER ROLE confide RESET synchronous_commit"])


def test_what_a_server_says_is_one_sentence_without_a_password(tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as error:
        Ledger(f"postgresql://someone:secret@/nowhere?host={tmp_path}")
    assert "PostgreSQL says" in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


SUPERUSER = {
    "an event edited": "UPDATE confide_ledger.entries SET body = replace(body, '1.0', '9.0') WHERE position = 2",
    "deleted": "DELETE FROM confide_ledger.entries WHERE position = 2",
    "the last deleted": "DELETE FROM confide_ledger.entries WHERE position = 3",
    "the count edited": "UPDATE confide_ledger.meta SET count = 2",
    "the head deleted": "DELETE FROM confide_ledger.meta",
    "the identity edited": "UPDATE confide_ledger.meta SET identity = 'another'",
}


@pytest.mark.parametrize("kind", SUPERUSER)
def test_a_superuser_who_edits_a_server_is_found_out(server: Server, kind: str) -> None:
    place = emptied(server.address)
    with Ledger(place) as ledger:
        for _ in range(3):
            ledger.charge(STEP)
    quietly = [
        "ALTER TABLE confide_ledger.entries DISABLE TRIGGER ALL",
        "ALTER TABLE confide_ledger.entries ENABLE TRIGGER ALL",
    ]
    in_shell(place, [quietly[0], SUPERUSER[kind], quietly[1]])
    with pytest.raises(LedgerError, match="tampered with or corrupt"):
        Ledger(place)
