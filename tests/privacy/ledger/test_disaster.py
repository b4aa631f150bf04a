"""Many writers at one server, one killed with the lock in its hand, then the server: nothing lost, no overspend."""

from __future__ import annotations

import math
import os
import time
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import pytest

from confide.errors import BudgetExceeded, LedgerError
from confide.privacy.ledger import Ledger
from tests.privacy.ledger.ledger_tools import DELTA, FILTERED, FORKSERVER, STEP, gaussian_epsilon, in_a_process, most
from tests.privacy.ledger.servers import Server, emptied
from tests.privacy.ledger.test_hardening import hold_and_die


def spend_until_told(place: str, barrier: Barrier, enough: Event, results: Any) -> None:
    """One writer: goes on over refused connections, and reports what was acknowledged to it."""
    acknowledged: list[str] = []
    refused = False
    barrier.wait(timeout=300)
    ledger: Ledger | None = None
    while not (refused or enough.is_set()):
        try:
            ledger = ledger or Ledger(place, timeout=20.0)
            acknowledged.append(ledger.charge(STEP, f"{os.getpid()} {len(acknowledged)}").purpose)
        except BudgetExceeded:
            refused = True
        except LedgerError:
            time.sleep(0.05)  # the server is gone, and comes back
    results.put((acknowledged, refused))


@pytest.mark.parametrize("writers", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_writers_and_server_are_killed(server: Server, writers: int) -> None:
    place, room = emptied(server.address), 12 * writers
    ceiling = gaussian_epsilon(math.sqrt(room + 0.5) / STEP.noise_multiplier, FILTERED)
    assert most(STEP, ceiling, delta=FILTERED) == room
    with Ledger(place) as ledger:
        ledger.limit(ceiling, DELTA)
    barrier, enough, results = FORKSERVER.Barrier(writers + 1), FORKSERVER.Event(), FORKSERVER.Queue()
    arguments = (place, barrier, enough, results)
    processes = [FORKSERVER.Process(target=spend_until_told, args=arguments) for _ in range(writers)]
    for process in processes:
        process.start()
    barrier.wait(timeout=300)
    assert in_a_process(hold_and_die, place) is None  # among all the others, with the lock in its hand
    server.kill()
    server.start_again()
    reports = [results.get(timeout=500) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    acknowledged = [purpose for one, _ in reports for purpose in one]
    with Ledger(place) as again:
        written = [entry.purpose for entry in again.entries()]
        again.verify()
        assert len(again.limits()) == 1  # what the killed writer had begun is not there
        assert set(acknowledged) <= set(written)
        # What was committed just before the kill may not have been acknowledged any more: at most one for each writer.
        assert len(written) - len(acknowledged) <= writers
        assert all(refused for _, refused in reports)
        assert len(written) == room
        assert again.spent() <= ceiling
