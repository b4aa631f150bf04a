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
from contextlib import suppress
from typing import Any

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of <linux/mman.h>, which Python's mmap does not name


def _page() -> mmap.mmap | bytearray:
    """A page that is blank in a child; elsewhere than on Linux plain memory, and the process id has to do."""
    if os.name != "posix":
        return bytearray(8)
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, ValueError):
        page.madvise(_WIPE_ON_FORK)
    return page


_words = memoryview(_page()).cast("Q")
_process = 0
_making = threading.Lock()


def mark() -> int:
    """A random number of 64 bits that stands for this process; a child has another from its first moment on."""
    found = _words[0]
    return found if found and _process == os.getpid() else _new_mark()


def _new_mark() -> int:
    global _process
    with _making:
        if not _words[0] or _process != os.getpid():
            _words[0] = int.from_bytes(os.urandom(8)) | 1  # never blank
            _process = os.getpid()
        return _words[0]


class ForkAwareLock:
    """A lock that one thread may take several times; a child of a fork has one of its own, which nobody holds."""

    def __init__(self) -> None:
        self._locks: dict[int, Any] = {}

    def held(self) -> Any:
        """To be used by `with`. Whoever held the parent's lock does not exist in a child, so there it is another."""
        here = mark()
        # Of threads that come first, one makes the lock: setdefault is atomic.
        return self._locks.get(here) or self._locks.setdefault(here, threading.RLock())


mark()  # the first mark is made while there is one thread
