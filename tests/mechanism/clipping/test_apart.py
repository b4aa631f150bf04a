"""Records in processes of their own: what ends with them, what they are cut off from, and what stays as it was."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide._native import process
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.clipping import apart
from confide.mechanism.clipping.confined import Confinement
from confide.mechanism.clipping.large_pages import LargePages
from confide.mechanism.clipping.watched import watched
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping import corpus_apart, corpus_machine
from tests.mechanism.clipping.corpus import network, plain
from tests.mechanism.clipping.corpus_ways import MANY, Keep, attacks
from tests.mechanism.clipping.test_corpus import ROUNDING, moves

pytestmark = [
    pytest.mark.skipif(not apart.is_cut_off(), reason="no process here can be cut off from the machine"),
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
THROUGH_THE_DOOR = corpus_apart.APART | attacks(corpus_machine.PLACES_OF_THE_MACHINE)


def opened() -> dict[str, Any]:
    """What is open before a record runs."""
    pipe, pair = os.pipe(), socket.socketpair()
    os.set_blocking(pipe[0], False)
    pair[0].setblocking(False)
    folder = tempfile.mkdtemp()
    return {
        "file": tempfile.TemporaryFile(buffering=0),
        "pipe": pipe,
        "pair": pair,
        "value": multiprocessing.Value("d", 0.0, lock=False),
        "array": multiprocessing.Array("d", 4),
        "semaphore": multiprocessing.Semaphore(MANY),
        "map": mmap.mmap(-1, 64),
        "shared": shared_memory.SharedMemory(create=True, size=64),
        "tensor": torch.zeros(2, dtype=torch.float64).share_memory_(),
        "numpy": np.memmap(os.path.join(folder, "kept"), dtype=np.float64, mode="w+", shape=(2,)),
    }


def begin() -> None:
    vars(torch.nn.functional).setdefault("_opened", None)
    if vars(torch.nn.functional)["_opened"] is None:
        vars(torch.nn.functional)["_opened"] = opened()
        corpus_machine.SHARED.share_memory_()


def end() -> None:
    found = vars(torch.nn.functional).pop("_opened", None)
    if found is not None:
        found["shared"].close()
        found["shared"].unlink()
        for one in (*found["pair"], found["file"]):
            one.close()
        for one in found["pipe"]:
            os.close(one)


@pytest.fixture
def machine() -> Iterator[None]:
    begin()
    yield
    end()


def left(keep: Keep, records: list[float], forked: bool = True) -> list[float]:
    """What each record finds, in a process of its own or, planted, in this one."""
    found: list[float] = []

    def work(place: int, one: float) -> list[Tensor]:
        with watched():
            return [torch.tensor([keep(one)], dtype=torch.float64)]

    def store(place: int, values: Sequence[Tensor]) -> None:
        found.append(float(values[0]))

    if forked:
        apart.in_children(
            len(records), lambda place: records[place], work, [torch.empty(1, dtype=torch.float64)], store
        )
        return found
    for place, one in enumerate(records):
        with suppress(Exception):
            store(place, work(place, one))
    return found


FIRST, OTHERS = 321.0, [2.0, 7.0]
EVERYWHERE = corpus_apart.PLACES_APART | corpus_machine.PLACES_OF_THE_MACHINE


def finds_no_trace(name: str) -> bool:
    """Whether two records find the same with and without one before them, whatever else lies in memory."""
    with_it = left(EVERYWHERE[name], [FIRST, *OTHERS])[1:]
    elsewhere = [object() for _ in range(321)]
    without = left(EVERYWHERE[name], OTHERS)
    del elsewhere
    return with_it == without


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", list(EVERYWHERE)[::9])
def test_no_record_finds_a_trace_of_another(name: str) -> None:
    """Whatever it asks for: nobody looks at its code here."""
    assert finds_no_trace(name)


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_no_record_finds_a_trace_of_another_anywhere(name: str) -> None:
    assert finds_no_trace(name)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", list(THROUGH_THE_DOOR)[::80])
def test_through_the_door_an_attack_moves_an_answer_by_at_most_the_clip(name: str) -> None:
    assert moves(THROUGH_THE_DOOR[name]) <= ROUNDING


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", THROUGH_THE_DOOR)
def test_through_the_door_all_attacks_do(name: str) -> None:
    assert moves(THROUGH_THE_DOOR[name]) <= ROUNDING


def _hooked(register: str) -> GradientQuery:
    module, steps = network(), itertools.count()
    turn = lambda *given: given[-1] * math.cos(next(steps))  # noqa: E731
    before = lambda layer, given: (given[0] * math.cos(next(steps)),)  # noqa: E731
    getattr(module[0], register)(before if "pre" in register else turn)
    return GradientQuery(module, plain)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_layer_of_torchs_own_are_looked_at(register: str) -> None:
    assert moves(lambda: _hooked(register)) <= ROUNDING


def test_there_are_enough() -> None:
    assert len(EVERYWHERE) >= 100
    assert len(THROUGH_THE_DOOR) == 3 * len(EVERYWHERE)


# broken variants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a generator", "an error", "a queue (Queue)", "a digest", "a tree", "fields"])
def test_in_one_process_a_trace_is_found(name: str) -> None:
    keep = EVERYWHERE[name]
    assert left(keep, [FIRST, *OTHERS], forked=False)[1:] != left(keep, OTHERS, forked=False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["its number", "the time", "a file", "a pipe", "a shared value", "a shared tensor"])
def test_in_processes_that_are_not_cut_off_a_trace_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confinement, "begin", lambda self: None)
    assert not finds_no_trace(name)


def test_texts_with_addresses_tell_what_else_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "without_addresses", nullcontext)
    assert not all(finds_no_trace("the text of an object") for _ in range(3))


# what happens to a child, and to its parent ---------------------------------------------------------------------------


def answers(work: Callable[[int], Any], count: int = 3, private: Sequence[Tensor] = ()) -> list[float]:
    found: list[float] = []
    apart.in_children(
        count,
        lambda place: place,
        lambda place, one: [torch.full((2,), float(work(place)))],
        [torch.empty(2)],
        lambda place, values: found.append(float(values[0].sum())),
        private,
    )
    return found


@pytest.mark.parametrize(
    "fails",
    [
        lambda: ctypes.string_at(0),
        lambda: os._exit(0),
        lambda: os.abort(),
        lambda: signal.raise_signal(signal.SIGKILL),
        lambda: [].pop(),
        lambda: (_ for _ in ()).throw(KeyboardInterrupt),
        lambda: os.kill(os.getppid(), signal.SIGKILL),
    ],
    ids=["memory", "exit", "abort", "signal", "error", "interrupt", "its parent"],
)
def test_a_record_that_ends_its_process_counts_as_zero(fails: Callable[[], Any]) -> None:
    assert answers(lambda place: fails() if place == 1 else place + 1) == [2.0, 0.0, 6.0]


def test_half_an_answer_is_none() -> None:
    found: list[float] = []
    given = [torch.ones(1), torch.ones(3)]
    apart.in_children(
        2,
        lambda place: place,
        lambda place, one: [given[0], given[1] if place else torch.ones(5)],
        given,
        lambda place, values: found.append(float(values[0].sum() + values[1].sum())),
    )
    assert found == [0.0, 4.0]


def test_pages_of_other_records_are_not_there() -> None:
    records = torch.ones(1 << 16)
    assert answers(lambda place: records[1 << 15], 1) == [2.0]
    assert answers(lambda place: records[1 << 15], 1, [records]) == [0.0]
    assert answers(lambda place: records[1 << 15], 1) == [2.0], "for other forks they are there again"


def test_the_table_of_a_source_is_not_there_and_what_lies_beside_it_is() -> None:
    whole = torch.ones(1 << 17, 1)
    table, beside = whole[: 1 << 16], whole[1 << 16 :]
    source = PrivateData(table, torch.zeros(1 << 16), schema=Schema(records=1 << 16))
    assert answers(lambda place: table[1 << 15], 1) == [0.0]
    assert answers(lambda place: beside[1 << 15], 1) == [2.0]
    del source


def in_large_pages(start: int) -> int:
    """Bytes of the mapping with this address that lie in large pages."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
        elif line.startswith("AnonHugePages") and low <= start < high:
            found = int(line.split()[1]) << 10
    return found


def test_memory_is_put_into_large_pages_once_there_are_many_children() -> None:
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTDUMP)  # so that the kernel does not take it for a part of what lies beside it
    values = torch.frombuffer(memory, dtype=torch.uint8)
    values.copy_(torch.arange(16 << 20) % 251)
    before, start = values.clone(), int(values.data_ptr())
    pages = LargePages()
    pages.expect(3)
    few = in_large_pages(start)
    pages.expect(1000, [(start, 4 << 20)])
    if not in_large_pages(start):
        pytest.skip("this kernel puts no pages together")
    assert few == 0
    assert in_large_pages(start) <= 14 << 20, "what no child inherits is left alone"
    assert torch.equal(values, before)
    assert answers(lambda place: values[1 << 23]) == [2.0 * int(before[1 << 23])] * 3


def test_a_child_is_another_process_for_noise_and_receipts() -> None:
    here = process.mark()
    assert answers(lambda place: process.mark() != here) == [2.0] * 3
    assert process.mark() == here


COUNTED: list[int] = []
os.register_at_fork(before=lambda: COUNTED.append(1), after_in_parent=lambda: COUNTED.append(1))


def test_nobody_in_the_parent_counts_its_children() -> None:
    COUNTED.clear()
    assert answers(lambda place: len(COUNTED)) == [0.0] * 3
    assert COUNTED == []


def test_an_interrupt_of_the_parent_ends_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[deque[int]] = []
    fork = apart._fork
    monkeypatch.setattr(apart, "_fork", lambda work, into, heard: (started.append(into), fork(work, into, heard))[1])

    def interrupt(number: int, frame: Any) -> None:
        # While the parent waits, and not in a callback of the garbage collector, from which Python lets no error out.
        if frame.f_code.co_filename == apart.__file__ and frame.f_code.co_name in ("_wait_for", "<lambda>"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    held = threading.Lock()  # nobody gives it back; to sleep is no wait where clocks stand still
    held.acquire()
    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        with pytest.raises(KeyboardInterrupt):
            answers(lambda place: held.acquire() or 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 30
    assert [child for (child,) in started if Path(f"/proc/{child}").exists()] == []


def test_an_error_of_a_rehearsal_is_raised_here_and_nothing_else_stays() -> None:
    kept: list[int] = []

    def fails() -> None:
        kept.append(1)
        raise IndexError("none of these")

    with pytest.raises(IndexError, match="none of these") as caught:
        apart.rehearsed(fails)
    assert "test_apart.py" in caught.value.__notes__[0]
    apart.rehearsed(lambda: kept.append(1))
    assert kept == []


@pytest.mark.timeout(120)
def test_threads_that_ask_for_their_turn_stop_no_child() -> None:
    """A child gave way to a thread that it does not have, and waited for ever (before it was told of its fork in C)."""
    busy, before = True, sys.getswitchinterval()

    def work() -> None:
        while busy:
            pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(12):
            apart._run(lambda: None)
    finally:
        busy = False
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()


@pytest.mark.timeout(60)
def test_a_lock_that_nobody_is_left_to_open_stops_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold a lock in C at the moment of the fork; its record counts as zero, the others answer."""
    monkeypatch.setattr(apart, "_SECOND", 100)
    monkeypatch.setattr(apart, "_LONGEST_WAIT", 3)
    lock, system = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    assert system.pthread_mutex_lock(lock) == 0
    assert answers(lambda place: system.pthread_mutex_lock(lock) if place == 1 else place + 1) == [2.0, 0.0, 6.0]


@pytest.mark.timeout(60)
def test_a_record_that_computes_without_end_counts_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_LONGEST_COMPUTING", 1)
    assert answers(lambda place: all(itertools.repeat(place == 1)) or place + 1) == [2.0, 0.0, 6.0]


def test_a_child_that_computes_is_not_taken_for_one_that_waits() -> None:
    assert apart._computed_by(os.getpid()) == ""
    with subprocess.Popen(["sleep", "60"]) as waits:
        time.sleep(0.2)
        assert apart._computed_by(waits.pid) != ""
        waits.kill()


def late(x: Tensor, y: Tensor) -> Tensor:
    """Needs a clock, which stands still in a process of its own."""
    return torch.tensor([[float(x.sum()) * math.log(time.time())]])


def test_a_statistic_that_answers_nobody_is_refused_before_it_is_paid() -> None:
    data = PrivateData(torch.ones(8, 2), torch.zeros(8), schema=Schema(records=8))
    mechanism = SampledGaussian(1.0, 1.0, 1.0, 8, "full-batch")
    with pytest.raises(Refusal, match="no answer for made-up ones there"):
        data.answer(StatisticQuery(late, 1), mechanism)
    assert data.ledger.entries() == ()
