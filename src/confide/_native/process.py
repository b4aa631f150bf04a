"""Which process this is, told so that no fork goes unnoticed.

A fork copies everything: keys of noise, answers that are paid for, locks that are held. Python's hooks see the forks
that Python makes; one made in C, by a library or by a process that embeds Python, they do not. So every process has a
mark: random bytes on a page of memory that the system wipes in a child (MADV_WIPEONFORK, Linux 4.14 and later), checked
together with the process id. Whoever must not be used twice remembers the mark under which it was made, and asks
`mark()` again at every use.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_SIZE = 16  # random bytes: no two processes ever have the same
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of <linux/mman.h>, which Python's mmap does not name
_BLANK = bytes(_SIZE)


def _page() -> mmap.mmap | bytearray:
    """A page that is blank in a child; elsewhere than on Linux plain memory, and the process id has to do."""
    if os.name != "posix":
        return bytearray(_SIZE)
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, ValueError):
        page.madvise(_WIPE_ON_FORK)
    return page


_memory = _page()
_process = 0
_making = threading.Lock()


def mark() -> int:
    """A random number that stands for this process; a child has another from its first moment on."""
    global _process
    found = bytes(_memory[:_SIZE])
    if found != _BLANK and _process == os.getpid():
        return int.from_bytes(found)
    with _making:
        if bytes(_memory[:_SIZE]) == _BLANK or _process != os.getpid():
            _memory[:_SIZE] = os.urandom(_SIZE)
            _process = os.getpid()
        return int.from_bytes(_memory[:_SIZE])


class ForkAwareLock:
    """A lock that one thread may take several times; a child of a fork has one of its own, which nobody holds."""

    def __init__(self) -> None:
        self._locks: dict[int, Any] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        # Whoever held the parent's lock does not exist in a child. Of threads that come first, one makes the new lock.
        with self._locks.setdefault(mark(), threading.RLock()):
            yield


mark()  # the first mark is made while there is one thread
