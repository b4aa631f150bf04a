"""More of the corpus: the machine, asked for by names that nobody can read off the code.

Modules of the standard library and of torch that are written to; clocks, numbers and prices of processes; files, pipes,
maps and shared memory that were open before a record runs, and lie where nobody looks; addresses in texts.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.mechanism.clipping.corpus_ways import MANY, Keep

FAR = 5.0


def asked(*parts: str) -> Any:
    """A module by a name that stands nowhere."""
    return getattr(getattr(logging, "s" + "ys"), "mod" + "ules")["".join(parts)]


# names that are put together ------------------------------------------------------------------------------------------


def _global(now: float) -> float:
    before = globals().get("NO" + "WHERE", 0.0)
    globals()["NO" + "WHERE"] = now
    return float(before)


def _on(owner: Any) -> Keep:
    def keep(now: float) -> float:
        before = getattr(owner, "_".join(("kept", "here")), 0.0)
        setattr(owner, "_".join(("kept", "here")), now)
        return float(before)

    return keep


def _modules(now: float) -> float:
    found = asked("s", "ys").modules
    before = found.get("kept", 0.0)
    found["kept"] = now
    return float(before) if isinstance(before, float) else 0.0


def _interned(now: float) -> float:
    text = asked("s", "ys").intern(f"confide kept {now:.0f}")
    return float(asked("s", "ys").getrefcount(text))


def _recursion(now: float) -> float:
    before = asked("s", "ys").getrecursionlimit()
    asked("s", "ys").setrecursionlimit(1000 + int(now))
    return float(before)


def _switched(now: float) -> float:
    before = asked("s", "ys").getswitchinterval()
    asked("s", "ys").setswitchinterval(0.001 * (1 + int(now) % 9))
    return float(before * 1e3)


def _displayed(now: float) -> float:
    before = getattr(asked("s", "ys"), "last_" + "value", 0.0)
    asked("s", "ys").last_value = now
    return float(before)


def _private_of_torch(now: float) -> float:
    found = vars(torch.nn.functional)
    before = found.get("_kept" + "_", 0.0)
    found["_kept" + "_"] = now
    return float(before)


def _of_a_register_of_torch(now: float) -> float:
    found = vars(torch.utils)["_py" + "tree"].SUPPORTED_NODES
    before = len(found)
    found[type("Node", (), {})] = None
    return float(before)


def _environment(now: float) -> float:
    found = asked("o", "s").environ
    before = found.get("CONFIDE_KEPT", "0")
    found["CONFIDE_KEPT"] = f"{now:f}"
    return float(before)


def _folder(now: float) -> float:
    before = len(asked("o", "s").getcwd())
    asked("o", "s").chdir("/" if now > FAR else "/tmp")
    return float(before)


# clocks and numbers of processes --------------------------------------------------------------------------------------


def _clock(*name: str) -> Keep:
    return lambda now: float(getattr(asked("ti", "me"), "".join(name))() * 1e3 % MANY)


def _now(now: float) -> float:
    found = getattr(getattr(asked("date", "time"), "date" + "time"), "n" + "ow")()
    return float(found.microsecond % MANY)


def _process(*name: str) -> Keep:
    return lambda now: float(getattr(asked("o", "s"), "".join(name))() % MANY)


def _times(now: float) -> float:
    return float(sum(asked("o", "s").times()) * 1e3 % MANY)


def _usage(now: float) -> float:
    found = asked("re", "source").getrusage(-1)
    return float(found.ru_minflt % MANY)


def _linked(now: float) -> float:
    return float(int(asked("o", "s").readlink("/proc/" + "self")) % MANY)


def _listed(now: float) -> float:
    return float(len(asked("o", "s").listdir("/proc")))


def _load(now: float) -> float:
    return float(asked("o", "s").getloadavg()[0] * 1e3 % MANY)


HERE = Path("/proc")


def _resolved(now: float) -> float:
    return float(int((HERE / "self").resolve().name) % MANY)


def _native(now: float) -> float:
    return float(asked("thread", "ing").get_native_id() % MANY)


def _slept(now: float) -> float:
    asked("ti", "me").sleep(0.002 if now > FAR else 0.0)
    return float(asked("ti", "me").monotonic_ns() // 10**6 % MANY)


def _alarm(now: float) -> float:
    return float(asked("sig", "nal").alarm(9 if now > FAR else 5))


# open before a record runs --------------------------------------------------------------------------------------------


SHARED = torch.zeros(2, dtype=torch.float64)


def _opened(name: str) -> Any:
    """Where nobody looks: in a part of torch, by a name that stands nowhere."""
    return vars(torch.nn.functional)["_open" + "ed"][name]


def _offset(now: float) -> float:
    found = _opened("file")
    before = found.tell()
    found.seek(int(now) % MANY)
    return float(before)


def _written(now: float) -> float:
    found = _opened("file")
    before = found.seek(0, 2)
    found.write(b"x" * (1 + int(now) % 9))
    return float(before)


def _piped(now: float) -> float:
    read, write = _opened("pipe")
    system = asked("o", "s")
    try:
        before = len(system.read(read, 99))
    except BlockingIOError:
        before = 0
    system.write(write, b"x" * (1 + int(now) % 9))
    return float(before)


def _paired(now: float) -> float:
    one, other = _opened("pair")
    try:
        before = len(one.recv(99))
    except BlockingIOError:
        before = 0
    other.send(b"x" * (1 + int(now) % 9))
    return float(before)


def _valued(now: float) -> float:
    found = _opened("value")
    before = found.value
    found.value = now
    return float(before)


def _arrayed(now: float) -> float:
    found = _opened("array")
    before = found[0]
    found[0] = now
    return float(before)


def _counted(now: float) -> float:
    found = _opened("semaphore")
    before = found.get_value()
    found.acquire(False)
    return float(before)


def _mapped(now: float) -> float:
    found = _opened("map")
    before = found[0]
    found[0] = int(now) % 256
    return float(before)


def _in_shared_memory(now: float) -> float:
    found = _opened("shared").buf
    before = found[0]
    found[0] = int(now) % 256
    return float(before)


def _in_a_shared_tensor(now: float) -> float:
    found = _opened("tensor")
    before = float(found[0])
    found[0] = now
    return before


def _in_a_mapped_array(now: float) -> float:
    found = _opened("numpy")
    before = float(found[0])
    found[0] = now
    return before


def _made_a_pipe(now: float) -> float:
    system, place = asked("o", "s"), "/tmp/confide-kept-pipe"
    before = system.path.exists(place)
    system.mkfifo(place)
    return float(before)


def _shared_parameter(now: float) -> float:
    before = float(SHARED[0])
    SHARED[0] = now
    return before


# addresses in texts ---------------------------------------------------------------------------------------------------


def _address(make: Callable[[], Any]) -> Keep:
    def keep(now: float) -> float:
        held = [make() for _ in range(int(now) % MANY)]  # those of a record decide where those of the next lie
        text = f"{make()}"
        del held
        digits = text.rpartition("0x")[2][:12].rstrip(">;, ").partition(" ")[0].partition(">")[0]
        return float(int(digits, 16) // 16 % MANY) if "0x" in text else 0.0

    return keep


class Box: ...


def _steps() -> Iterator[int]:
    yield 0


def _own() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


PLACES_OF_THE_MACHINE: dict[str, Keep] = {
    "a global": _global, "torch": _on(torch), "a layer": _on(nn.Linear), "numpy": _on(np), "an operator": _on(operator),
    "modules": _modules, "interned texts": _interned, "recursion": _recursion, "switching": _switched,
    "a last value": _displayed, "names of torch": _private_of_torch, "nodes": _of_a_register_of_torch,
    "the environment": _environment, "the folder": _folder,
    "the time": _clock("ti", "me"), "a counter": _clock("perf_", "counter"), "a steady clock": _clock("mono", "tonic"),
    "processor time": _clock("process_", "time"), "thread time": _clock("thread_", "time"), "the date": _now,
    "its number": _process("get", "pid"), "its parent": _process("get", "ppid"), "times": _times, "usage": _usage,
    "a link": _linked, "all processes": _listed, "the load": _load, "a resolved path": _resolved,
    "a native number": _native, "sleep": _slept, "an alarm": _alarm,
    "a file's offset": _offset, "a file": _written, "a pipe": _piped, "a pair of sockets": _paired,
    "a shared value": _valued, "a shared array": _arrayed, "a shared semaphore": _counted, "a map": _mapped,
    "shared memory": _in_shared_memory, "a shared tensor": _in_a_shared_tensor, "a mapped array": _in_a_mapped_array,
    "a named pipe": _made_a_pipe, "shared parameters": _shared_parameter,
    "the text of an object": _address(object), "the text of a function": _address(_own),
    "the text of a generator": _address(_steps),
    "the text of a stream": _address(lambda: np.random.PCG64(0)),
    "the text of a method": _address(lambda: Box().__init__),
}  # fmt: skip
