"""How children are started: whatever interrupts, none comes out into its parent's program, and threads take turns."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import pytest
import torch

from confide.mechanism.clipping import apart

pytestmark = pytest.mark.skipif(not apart.is_cut_off(), reason="no process here can be cut off from the machine")


def test_signals_wait_while_a_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = signal.pthread_sigmask(signal.SIG_BLOCK, ()), []
    fork = apart._fork

    def started(work: Callable[[], None], into: deque[int], heard: Iterable[int]) -> None:
        seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        assert set(heard) == before
        fork(work, into, heard)

    monkeypatch.setattr(apart, "_fork", started)
    apart._run(lambda: None)
    assert signal.SIGINT in seen[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_a_signal_that_both_hear_sends_no_child_out_of_its_place() -> None:
    """A keyboard's interrupt reaches parent and child; in the child it may come before anything else does."""
    program = """
import os, signal, sys
from confide.mechanism.clipping import apart
system = apart._interpreter()
class Interrupted:
    fork = system.fork
    def PyOS_AfterFork_Child(self, number):
        system.PyOS_AfterFork_Child()
        os.kill(os.getpid(), signal.SIGINT)
        return 0
interrupted = Interrupted()
apart._interpreter = lambda: interrupted
if sys.argv[1] == "broken":
    signal.pthread_sigmask = lambda *given: set()
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell ignores it
parent = os.getpid()
try:
    apart._run(lambda: None)
except KeyboardInterrupt:
    pass
if os.getpid() != parent:
    print("a child came out", flush=True)
    os._exit(0)
"""

    def said(how: str) -> str:
        return subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout

    assert said("right") == ""
    assert said("broken") == "a child came out\n"


def test_threads_have_children_one_after_the_other() -> None:
    """Two that put back each other's texts left addresses in those of a child, and none anywhere for good."""
    inside, most = [0], [0]

    class Shown:
        pass

    def work() -> None:
        def given(place: int) -> int:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1
            return place

        apart.in_children(3, given, lambda place, one: [torch.zeros(1)], [torch.zeros(1)], lambda place, values: None)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert " at 0x" in repr(Shown())
