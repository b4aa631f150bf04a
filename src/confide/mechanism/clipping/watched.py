"""What code may not do to the machine while it reads private records: write, rename, set, connect, start.

A file is a memory that nobody puts back. Python tells of every opening and of every change to the machine before it
happens (PEP 578), whoever makes it: the user's code, numpy, a library. While a record runs by itself, changes are
refused there and then, so that there is nothing for the next record to find; reading is left alone, for parts of
libraries are loaded late. What runs on all records at once knows no numbers that it could write down.
Files that torch writes in C are not told of; their names are refused (`unsealable`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confide.errors import Refusal
from confide.mechanism.clipping.origins import is_installed

_OF_OS = (
    "putenv unsetenv remove rename mkdir rmdir link symlink truncate chmod chown utime setxattr removexattr chflags "
    "chdir fchdir lockf system exec fork forkpty posix_spawn spawn kill killpg startfile"
)
_REFUSED = frozenset(
    {f"os.{word}" for word in _OF_OS.split()}
    | {"resource.setrlimit", "resource.prlimit", "subprocess.Popen", "pty.spawn", "_thread.start_new_thread"}
    | {"sqlite3.connect", "urllib.Request", "webbrowser.open", "mmap.__new__"}
)
_REFUSED_ROOMS = ("socket", "shutil", "syslog", "fcntl", "tempfile", "ftplib", "http", "smtplib", "winreg", "signal")
_LIVING = ("/proc", "/sys", "/dev")  # files that change by themselves, or with the process
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# Ways to the frames of those who called, which hold all records, and to everything there is.
_FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
_EVERYTHING = frozenset(
    {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys.settrace", "sys.setprofile"}
    | {"sys.addaudithook", "sys.monitoring.register_callback"}
)
_SHOWING_FRAMES = ("traceback", "inspect")  # modules that hand on what they find


class _MachineWatch(threading.local):
    depth = 0
    inside = 0
    asking = False


_WATCHED = _MachineWatch()
_hooked = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not (_WATCHED.depth or _WATCHED.inside):
        return
    if event == "sys._getframe" or (event == "object.__getattr__" and arguments[1] in _FRAMES):
        if _is_asked_by_user_code():
            raise Refusal(
                f"module: it, its loss or its statistic looks at frames ({event}), which hold the records of others; "
                "use what the module is given"
            )
        return
    if event in _EVERYTHING or (event.startswith("ctypes.") and event != "ctypes.dlopen"):
        raise Refusal(f"module: it, its loss or its statistic asks for {event}, which shows the records of others")
    if not _WATCHED.depth:
        return
    if event == "open":
        path, mode, flags = arguments[:3]
        writes = bool(set("wax+") & set(mode)) if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
        if not writes and not name.startswith(_LIVING):
            return
    elif event not in _REFUSED and event.partition(".")[0] not in _REFUSED_ROOMS:
        return
    raise Refusal(
        f"module: it, its loss or its statistic asks the machine for {event} while it reads a record, where the next "
        "one could find what it left; use tensors, lists and numbers"
    )


def _is_asked_by_user_code() -> bool:
    """Whether those who ask for a frame are the user's, or show it to them: packages may look for who called."""
    if _WATCHED.asking:
        return False
    _WATCHED.asking = True
    try:
        frame: Any = sys._getframe(2)  # of whoever made the event
        while frame.f_back is not None and frame.f_globals.get("__name__") in _SHOWING_FRAMES:
            frame = frame.f_back
        name = frame.f_globals.get("__name__")
        home = sys.modules.get(name) if isinstance(name, str) else None
        return home is None or vars(home) is not frame.f_globals or not is_installed(home)
    finally:
        _WATCHED.asking = False


def _listen() -> None:
    """Once; Python keeps what listens for good."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hear)


def is_watched() -> bool:
    """Whether this thread runs records apart: a library of confide's own, asked by addresses, stays out of it."""
    return bool(_WATCHED.depth or _WATCHED.inside)


@contextmanager
def looked_after() -> Iterator[None]:
    """This thread's code finds no way to the frames around it, and to all objects: for what runs on all records."""
    _listen()
    _WATCHED.inside += 1
    try:
        yield
    finally:
        _WATCHED.inside -= 1


@contextmanager
def watched() -> Iterator[None]:
    """What this thread's code does to the machine is refused inside."""
    _listen()
    _WATCHED.depth += 1
    try:
        yield
    finally:
        _WATCHED.depth -= 1
