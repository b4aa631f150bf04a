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

_OF_OS = (
    "putenv unsetenv remove rename mkdir rmdir link symlink truncate chmod chown utime setxattr removexattr chflags "
    "chdir fchdir lockf system exec fork forkpty posix_spawn spawn kill killpg startfile"
)
_REFUSED = frozenset(
    {f"os.{word}" for word in _OF_OS.split()}
    | {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys.setprofile"}
    | {"sys.settrace", "sys.addaudithook", "resource.setrlimit", "resource.prlimit", "subprocess.Popen", "pty.spawn"}
    | {"_thread.start_new_thread", "sqlite3.connect", "urllib.Request", "webbrowser.open", "mmap.__new__"}
)
_REFUSED_ROOMS = ("socket", "shutil", "syslog", "fcntl", "tempfile", "ftplib", "http", "smtplib", "winreg", "signal")
_LIVING = ("/proc", "/sys", "/dev")  # files that change by themselves, or with the process
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _MachineWatch(threading.local):
    depth = 0


_WATCHED = _MachineWatch()
_hooked = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
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


@contextmanager
def watched() -> Iterator[None]:
    """What this thread's code does to the machine is refused inside. Python keeps what listens for good."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hear)
    _WATCHED.depth += 1
    try:
        yield
    finally:
        _WATCHED.depth -= 1
