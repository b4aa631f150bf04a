"""A process for each record: what one leaves behind ends with it, whatever it is and wherever it lies.

For code that keeps something which nobody can put back, or of which nobody can say what it reaches (`sealed`). Every
record runs in a child that is forked from the same state, is cut off from the machine (`confined`), writes an answer
of a size that was known beforehand into memory that it shares with its parent, and ends there. The parent learns
whether there is an answer, and the numbers; no error, no text, no code of an exit. Between two children it does the
same whatever the first one said, so that no child can tell which ones there were before it.

What a child inherits it might look at: other records lie in the memory of the parent. Ways to look there are refused
as in any other way (`unsealable`, `watched`); the pages of the batch, of the answers and of the tables of all sources
are not inherited at all. What is left is in large pages (`large_pages`), so that a fork has little to copy.
Forks of this file run none of the functions that others have registered for forks of Python in the parent, which would
count them; in the child they run, so that locks are new and noise is void (`_native.process`). One thread at a time has
children: what is kept from them, and texts without addresses, are of the whole process.

Only on Linux, and where all tensors are on the host: an accelerator does not survive a fork.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, filterfalse, tee
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from confide._native.process import ForkAwareLock
from confide.errors import Refusal
from confide.mechanism.clipping.confined import PAGE, Confinement
from confide.mechanism.clipping.large_pages import LargePages, Span
from confide.mechanism.clipping.randomness import restored, start_from
from confide.mechanism.clipping.texts import without_addresses

_DO_NOT_INHERIT, _INHERIT = 10, 11  # MADV_DONTFORK and MADV_DOFORK of <linux/mman.h>
_COMPUTING = 0  # RLIMIT_CPU of <sys/resource.h>
_MOST_SAID = 1 << 20  # bytes for the error of a rehearsal, and the names of what was loaded
# After that a child is ended, and its record counts as zero: far beyond what any record takes, so that it tells nothing
# but that this one does not end. Waiting is counted in seconds without computing, whatever the machine is busy with.
_LONGEST_WAIT, _LONGEST_COMPUTING = 60, 3600  # seconds
_SECOND = 1000  # milliseconds, which the system counts in
_PAGES = LargePages()
_CHILDREN = ForkAwareLock()
_TABLES: WeakValueDictionary[int, Any] = WeakValueDictionary()
_ALIGNED = 64  # bytes at whose multiples an answer begins, as torch's own memory does


class SharedAnswer:
    """Room for the answer of one record: whether there is one, and its numbers."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        sizes = [-(-one.numel() * one.element_size() // _ALIGNED) * _ALIGNED for one in like]
        self.memory = mmap.mmap(-1, _ALIGNED + sum(sizes))
        self.given = torch.frombuffer(self.memory, dtype=torch.int64, count=1)
        self.values: list[Tensor] = []
        place = _ALIGNED
        for one, size in zip(like, sizes, strict=True):
            flat = torch.empty(0, dtype=one.dtype)
            if size:
                flat = torch.frombuffer(self.memory, dtype=one.dtype, count=one.numel(), offset=place)
            self.values.append(flat.view(one.shape))
            place += size

    @property
    def address(self) -> int:
        return int(self.given.data_ptr())

    def write(self, values: Sequence[Tensor | None]) -> None:
        """In the child: all of it, and then that it is there."""
        for room, value in zip(self.values, values, strict=True):
            if value is not None:
                room.copy_(value.detach().to_dense() if value.layout != torch.strided else value.detach())
        self.given.fill_(1)

    def clear(self) -> None:
        self.given.zero_()
        for room in self.values:
            room.zero_()


def in_children(
    count: int,
    given: Callable[[int], Any],
    function: Callable[[int, Any], Sequence[Tensor | None]],
    like: Sequence[Tensor],
    store: Callable[[int, Sequence[Tensor]], object],
    private: Iterable[Tensor] = (),
) -> int:
    """store(place, function(place, given(place))) for every place, each in a child; zeros where there is no answer.

    How many have answered is returned, for records that are made up. `private`: tensors that no child inherits.
    """
    answer, answered = SharedAnswer(like), 0
    with (
        _CHILDREN.held(),
        open(os.devnull, "r+b", buffering=0) as nowhere,
        _kept_out(private) as kept_out,
        without_addresses(),
    ):
        _PAGES.expect(count, kept_out)
        confinement = Confinement.of_this_process(nowhere.fileno(), answer.address)
        for place in range(count):
            one = given(place)
            _run(functools.partial(_child, confinement, function, place, one, answer))
            there = int(answer.given)
            answered += there == 1
            if there != 1:  # part of one, perhaps
                answer.clear()
            store(place, answer.values)
            answer.clear()
    return answered


def _child(
    confinement: Confinement,
    function: Callable[[int, Any], Sequence[Tensor | None]],
    place: int,
    one: Any,
    answer: SharedAnswer,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its child
    _interpreter().setrlimit(
        _COMPUTING, struct.pack("QQ", _LONGEST_COMPUTING, _LONGEST_COMPUTING)
    )  # or has less already
    torch.set_num_threads(1)
    confinement.begin()
    answer.write(function(place, one))


def rehearsed(function: Callable[[], object]) -> None:
    """Run it in a child that may still ask the machine, for records that are made up: what it leaves behind ends there.

    An error is raised here, with the place where it happened; what it has loaded is loaded here too.
    """
    room = mmap.mmap(-1, _MOST_SAID)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()

    def work() -> None:
        before, error = frozenset(sys.modules), None
        try:
            function()
        except Exception as found:
            error = found
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        room.write(_said(error, [name for name in sys.modules if name not in before]))

    _run(work)
    try:
        error, loaded = pickle.loads(room[:])
    except Exception:
        raise Refusal(
            "module: it, its loss or its statistic ended the process in which made-up records ran; it has to come back"
        ) from None
    for name in loaded:
        with suppress(Exception):
            importlib.import_module(name)
    if error is not None:
        raise error


def _said(error: Exception | None, loaded: list[str]) -> bytes:
    """What a rehearsal says to its parent; an error that cannot be handed on is told of."""
    if error is not None and not isinstance(error, Refusal):  # which is one sentence, and enough
        place = "".join(traceback.format_exception(error))[-_MOST_SAID // 4 :]
        error.add_note(f"in a process of its own:\n{place}")
    for said in (error, Refusal(f"module: raised {type(error).__name__} on made-up records: {error}")):
        with suppress(Exception):
            text = pickle.dumps((said, loaded))
            pickle.loads(text)
            if len(text) < _MOST_SAID:
                return text
    return pickle.dumps((Refusal(f"module: raised {type(error).__name__} on made-up records"), []))


def _run(work: Callable[[], None]) -> None:
    """`work` in a child that ends with it, whatever happens; nobody is told how."""
    started: deque[int] = deque()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _fork(work, started, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _wait_for(started[0])
    except BaseException:  # of the parent, as the curator's interrupt: no child is left
        if started and started[0] > 0:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(started[0], signal.SIGKILL)
                os.waitpid(started[0], 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(work: Callable[[], None], started: deque[int], heard: Iterable[int]) -> None:
    """The number of the child goes to `started`, in the parent; the child does not come back.

    The child must be told of its fork before it runs a single instruction of Python: where another thread had asked for
    its turn, it would give way to that thread, which is not there, and wait for ever. And whatever interrupts the
    parent finds the number. So all of it is one call, of iterators in C, the last one for the child alone, whose number
    is 0. Signals are kept waiting, so that one that both hear does not send the child out of here; `heard` are those
    that were kept waiting before.
    """
    number, told = tee(map(_interpreter().fork, (0,)))
    started.extend(chain(number, map(_interpreter().PyOS_AfterFork_Child, filterfalse(None, told))))
    if started[0] == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
            work()
        finally:
            os._exit(0)
    if started[0] < 0:
        raise Refusal(
            "module: its records run in processes of their own, and the system starts no more of them; give it more "
            "memory, or a higher limit of processes"
        )


def _wait_for(child: int) -> None:
    """Until it ends. One that only waits itself, as for a lock of a thread that it does not have, is ended."""
    still, before = 0, ""
    with suppress(ChildProcessError), _seen_ending(child) as has_ended:  # unless somebody else has waited for it
        while still < _LONGEST_WAIT and not has_ended():
            used = _computed_by(child)
            still = still + 1 if used and used == before else 0
            before = used
        if still:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def _seen_ending(child: int) -> Iterator[Callable[[], bool]]:
    """A function that waits for a second and says whether the child has ended."""
    try:
        handle = os.pidfd_open(child)
    except OSError:  # before Linux 5.3 nobody can say in time
        yield lambda: True
        return
    try:
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        yield lambda: bool(ready.poll(_SECOND))
    finally:
        os.close(handle)


def _computed_by(child: int) -> str:
    """The processor time of a child that waits; nothing where it computes, is about to, or was stopped by somebody."""
    try:
        with open(f"/proc/{child}/stat") as found:
            state, *words = found.read().rpartition(") ")[2].split()
    except OSError:
        return ""
    return " ".join(words[10:12]) if state == "S" else ""


@functools.cache
def _interpreter() -> ctypes.PyDLL:
    return ctypes.PyDLL(None)  # no other thread runs in between


def keep_out(*tables: Any) -> None:
    """Trees of tensors or arrays with the records of a source: no child finds them, for as long as they are there.

    Nor does a process that another thread forks meanwhile.
    """
    held = [one for one in tree_leaves(tables) if isinstance(one, Tensor | np.ndarray)]
    _TABLES.update((id(one), one) for one in held)


@contextmanager
def _kept_out(tensors: Iterable[Tensor]) -> Iterator[list[Span]]:
    """Whole pages of what they hold are not there in a child; also, they need not be copied."""
    found = {*(_pages_of(tensor, whole=True) for tensor in tensors), *map(_pages_of, list(_TABLES.values()))}
    spans = [span for span in found if span[1] > 0]
    try:
        for start, size in spans:
            _interpreter().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DO_NOT_INHERIT)
        yield spans
    finally:
        for start, size in spans:
            _interpreter().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _INHERIT)


def _pages_of(tensor: Any, whole: bool = False) -> Span:
    """Where the whole pages of a tensor's memory begin, and their size; those at its ends have something else too.

    whole   all of the memory of which it may show a part
    """
    start = size = 0
    if isinstance(tensor, np.ndarray):
        start, size = (
            tensor.ctypes.data,
            tensor.nbytes if tensor.flags.c_contiguous and not tensor.dtype.hasobject else 0,
        )
    elif type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not whole:
            start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size() if tensor.is_contiguous() else 0
    start, end = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
    return start, max(0, end - start)


def is_possible() -> bool:
    """Whether records can run in processes of their own here: found out by a trial, once."""
    return sys.platform == "linux" and bool(_tried()[0])


def is_cut_off() -> bool:
    """Whether such a process is cut off from the machine: no file, no clock, no number of its own."""
    return is_possible() and bool(_tried()[1])


@functools.cache
def _tried() -> tuple[float, float]:
    """In a child: backwards through a product and a convolution; and what it can have of the machine."""

    def work(place: int, one: Tensor) -> list[Tensor]:
        start_from(place)
        with torch.enable_grad():
            weight = one.clone().requires_grad_()
            seen = torch.nn.functional.conv1d((weight @ weight)[:, None], torch.ones(2, 1, 3)).cumsum(-1).softmax(-1)
            found = torch.autograd.grad(seen.square().sum(), weight)[0].isfinite().all()
        return [torch.stack([found.float(), torch.tensor(float(_has_nothing()))])]

    start, said = torch.eye(8), torch.zeros(2)
    with restored():
        f"{work(0, start)}"  # what torch loads at the first use is loaded here: a child opens no file
    try:
        in_children(1, lambda place: start, work, [said], lambda place, values: said.copy_(values[0]))
    except (OSError, Refusal):
        return 0.0, 0.0
    return said[0].item(), said[1].item()


def _has_nothing() -> bool:
    clocks = (time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time)
    if any(clock() for clock in clocks) or os.getpid() or os.getppid():
        return False
    tries: list[Callable[[], object]] = [
        lambda: os.open("/proc/self/maps", os.O_RDONLY),
        lambda: os.stat("/"),
        lambda: os.readlink("/proc/self"),
        lambda: os.listdir("/"),
        lambda: os.pipe(),
        lambda: os.fork() or os._exit(0),
    ]
    return not any(_works(one) for one in tries)


def _works(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except OSError:
        return False
    return True
