"""Many processes and threads at one ledger: never overspent, never an entry lost."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from confide.errors import BudgetExceeded, LedgerError
from confide.privacy import accountants
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Entry, Head, Ledger
from confide.privacy.ledger import sqlite as _sqlite
from confide.privacy.ledger.postgres import PostgresStore
from tests.privacy.ledger.ledger_tools import (
    DELTA,
    FILTERED,
    FORKSERVER,
    STEP,
    closed_form,
    gaussian_epsilon,
    in_a_process,
    most,
)
from tests.privacy.ledger.servers import Server, emptied


def spend(path: str, tries: int, barrier: Barrier, results: Any, create: bool, slow: float | None) -> None:
    """One process: the ledger opened here, all started at once; reports what was accepted."""

    def priced(events: Any, delta: float, adjacency: str) -> float:
        time.sleep(slow or 0.0)  # long enough for the others to slip in between pricing and writing
        return closed_form(events, delta, adjacency)

    if slow is not None:
        accountants.sound_epsilon = priced  # type: ignore[assignment]
    ledger = None if create else Ledger(path)
    barrier.wait()
    ledger = ledger or Ledger(path)
    accepted = []
    for number in range(tries):
        try:
            accepted.append(ledger.charge(STEP, f"{os.getpid()} {number}").purpose)
        except BudgetExceeded:
            continue
    results.put(accepted)


def run_at_once(path: str, processes: int, tries: int, create: bool, slow: float | None) -> list[str]:
    """What all processes together had accepted."""
    barrier, results = FORKSERVER.Barrier(processes), FORKSERVER.Queue()
    arguments = (path, tries, barrier, results, create, slow)
    workers = [FORKSERVER.Process(target=spend, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    accepted = [purpose for _ in workers for purpose in results.get(timeout=300)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return accepted


def check_books(path: str, accepted: list[str], expected: int) -> None:
    with Ledger(path) as ledger:
        assert sorted(entry.purpose for entry in ledger.entries()) == sorted(accepted)
        assert len(accepted) == expected
        assert ledger.verify().count == len(accepted) + len(ledger.limits())


@pytest.fixture
def closed_form_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountants, "sound_epsilon", closed_form)


@pytest.mark.usefixtures("closed_form_price")
@pytest.mark.parametrize("processes", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_spending_at_once_never_overspend(place: str, processes: int) -> None:
    """There is room for about half of what is tried. Would catch a check outside the lock, or a lost update."""
    tries = 10
    ceiling = gaussian_epsilon(math.sqrt(processes * tries / 2 + 0.5) / STEP.noise_multiplier, DELTA)
    with Ledger(place) as ledger:
        ledger.limit(ceiling, DELTA)
    accepted = run_at_once(place, processes, tries, create=False, slow=0.01)
    check_books(place, accepted, most(STEP, ceiling, delta=FILTERED))
    with Ledger(place) as ledger:
        assert ledger.spent() <= ceiling
        with pytest.raises(BudgetExceeded):
            ledger.charge(STEP)


@pytest.mark.slow
def test_processes_with_the_real_accountant_never_overspend(place: str) -> None:
    with Ledger(place) as ledger:
        forty = accountants.sound_epsilon([GaussianEvent(STEP.noise_multiplier, count=40)], FILTERED)
        ledger.limit(1.0001 * forty, DELTA)
    check_books(place, run_at_once(place, 8, 10, create=False, slow=None), 40)


@pytest.mark.parametrize("processes", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_creating_the_same_ledger_share_one(place: str, processes: int) -> None:
    """Would catch a second file put over the first, and a half-made one that is opened too early."""
    accepted = run_at_once(place, processes, 5, create=True, slow=0.0)
    check_books(place, accepted, processes * 5)
    assert place.startswith("postgresql") or [file.name for file in Path(place).parent.iterdir()] == ["budget.db"]


@pytest.mark.usefixtures("closed_form_price")
def test_threads_spending_at_once_never_overspend(ledger: Ledger) -> None:
    ledger.limit(1.0, DELTA)
    barrier = threading.Barrier(8)

    def work(_: int) -> int:
        barrier.wait()
        accepted = 0
        for _ in range(most(STEP, 1.0)):
            try:
                ledger.charge(STEP)
                accepted += 1
            except BudgetExceeded:
                ledger.spent()
        return accepted

    with ThreadPoolExecutor(8) as pool:
        accepted = sum(pool.map(work, range(8)))
    assert accepted == most(STEP, 1.0, delta=FILTERED) == len(ledger.entries())
    ledger.verify()


def test_waiting_goes_on_as_long_as_others_move(place: str) -> None:
    """A writer holds the lock most of the time, but writes: no reason to give up after the time-out."""
    busy, patient = Ledger(place), Ledger(place, timeout=0.4)

    def slowly(head: Head) -> tuple[Entry, ...]:
        values = {"purpose": "busy", "dataset": "", "partition": None}
        event = {"kind": "gaussian", "noise_multiplier": 1.0}
        time.sleep(0.2)
        return (busy._book.append("charge", {**values, "event": event}, head),)

    def hold_and_write() -> None:
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            busy._book.write(slowly)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold_and_write)
        time.sleep(0.1)
        for _ in range(3):
            patient.charge(STEP, "patient")
    assert [entry.purpose for entry in busy.entries()].count("patient") == 3


def test_waiting_goes_on_while_others_are_refused_in_turn(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write nothing, yet the lock goes from hand to hand: fifty writers at a ceiling are no reason to give up."""
    place = emptied(server.address)
    busy, patient = [Ledger(place) for _ in range(4)], Ledger(place, timeout=0.4)

    def refused(head: Head) -> tuple[Entry, ...]:
        time.sleep(0.2)
        raise BudgetExceeded("full", 1.0, 1.0, DELTA)

    def hold(ledger: Ledger) -> None:
        ends = time.monotonic() + 0.8
        while time.monotonic() < ends:
            with pytest.raises(BudgetExceeded):
                ledger._book.write(refused)

    def charged_beside_them() -> None:
        with ThreadPoolExecutor(len(busy)) as pool:
            held = [pool.submit(hold, ledger) for ledger in busy]
            time.sleep(0.1)
            patient.charge(STEP, "patient")
            assert [each.result() for each in held] == [None] * len(busy)

    charged_beside_them()
    assert [entry.purpose for entry in patient.entries()] == ["patient"]
    monkeypatch.setattr(PostgresStore, "_read_turn", staticmethod(lambda connection: (1,)))  # as if nobody moved
    with pytest.raises(LedgerError, match="locked by another writer"):
        charged_beside_them()


def fork_and_charge(path: str, fresh: bool, hooked: bool) -> list[str]:
    """Parent and child charge in turn; the parent closes its ledger while the child still uses the file."""
    ledger = Ledger(path)
    ledger.charge(STEP, "parent before")
    if not hooked:
        _sqlite._stores.clear()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        mine = Ledger(path) if fresh else ledger
        mine.charge(STEP, "child first")
        os.write(write, b"x")
        time.sleep(0.5)
        try:
            mine.charge(STEP, "child second")
        except LedgerError:
            os._exit(1)
        os._exit(0)
    os.read(read, 1)
    ledger.charge(STEP, "parent after")
    ledger.close()
    status = os.waitpid(child, 0)[1]
    with Ledger(path) as again:
        again.verify()
        return [entry.purpose for entry in again.entries()] + (["the child knows"] if status else [])


@pytest.mark.parametrize("fresh", [True, False])
def test_a_fork_loses_no_entry(place: str, fresh: bool) -> None:
    written = in_a_process(fork_and_charge, place, fresh, True)
    assert written == ["parent before", "child first", "parent after", "child second"]


def test_a_fork_with_the_file_open_would_lose_entries(tmp_path: Path) -> None:
    """The broken variant: without closing the file around the fork, the child writes into a log folded away.

    Reading back tells the child at least, so that it does not take the charge for paid.
    """
    written = in_a_process(fork_and_charge, str(tmp_path / "budget.db"), True, False)
    assert "child second" not in written
    assert written[-1] == "the child knows"


def fork_a_ledger_in_memory() -> tuple[str, int]:
    ledger = Ledger()
    ledger.charge(STEP)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            ledger.charge(STEP)
        except LedgerError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.wait()
    os.close(write)
    ledger.charge(STEP)
    return os.read(read, 1000).decode(), len(ledger.entries())


def test_a_ledger_in_memory_does_not_follow_a_fork() -> None:
    said, entries = in_a_process(fork_a_ledger_in_memory)
    assert "belongs to another process" in said
    assert entries == 2


def test_a_fork_in_the_middle_of_a_charge_writes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed around a fork; what is then written must not slip past the lock."""
    ledger = Ledger(place)
    append = ledger._book.append

    def interrupted(*arguments: Any) -> Any:
        ledger.close()  # what a fork does first
        return append(*arguments)

    monkeypatch.setattr(ledger._book, "append", interrupted)
    with pytest.raises(LedgerError, match="nothing was written"):
        ledger.charge(STEP)
    monkeypatch.undo()
    assert ledger.entries() == ()
    assert ledger.charge(STEP).position == 1


def charge_and_die(path: str) -> None:
    Ledger(path).charge(STEP, "paid")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_charge_outlives_a_process_killed_right_after_it(place: str) -> None:
    assert in_a_process(charge_and_die, str(place)) is None
    assert [entry.purpose for entry in Ledger(place).entries()] == ["paid"]


def die_half_way(path: str) -> None:
    ledger = Ledger(path)
    ledger.charge(STEP, "paid")

    def half_way(head: Head) -> tuple[Entry, ...]:
        ledger._book.append("limit", {"epsilon": 9.0, "delta": 1e-5, "adjacency": "add-remove"}, head)
        os.kill(os.getpid(), signal.SIGKILL)
        return ()

    ledger._book.write(half_way)


def test_a_process_killed_half_way_leaves_no_trace_and_no_lock(place: str) -> None:
    assert in_a_process(die_half_way, str(place)) is None
    with Ledger(place, timeout=0.5) as ledger:
        assert ledger.ceiling is None
        assert ledger.charge(STEP).position == 2
        ledger.verify()


def test_an_unrelated_ledger_is_not_held_up(tmp_path: Path) -> None:
    one, two = Ledger(tmp_path / "one.db"), Ledger(tmp_path / "two.db", timeout=0)

    def meanwhile() -> None:
        assert two.charge(GaussianEvent(2.0)).position == 1
        with pytest.raises(LedgerError, match="locked"):
            Ledger(tmp_path / "one.db", timeout=0).charge(STEP)

    one._store.transact(meanwhile, write=True)
