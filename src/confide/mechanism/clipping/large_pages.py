"""The memory of this process in large pages, so that a fork has little to copy.

A fork copies no memory, but the table that says where each page lies: for pages of 4 kB eight bytes each, written one
by one, and again taken down when the child ends. In pages of 2 MB there are 512 times fewer. Nothing else about them
can be told: what is written where stays as it is, in this process and in its children.

The kernel is asked to put small pages together where most of a large one is in use, once it is known that many children
will be forked. It may say no, and then forks take longer.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

Span: TypeAlias = tuple[int, int]
"""Where memory begins, and its size in bytes."""
_LARGE, _SMALL = 2 << 20, 4096  # bytes of a page, of either kind, on x86-64
_TOGETHER = 25  # MADV_COLLAPSE of <linux/mman.h>, from Linux 6.1 on
_IN_USE = 0.75  # of a large page, so that the process grows by a third at most
_ENOUGH = 64  # children, in whose forks small pages have cost what it takes to put them together
_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(?:\[heap\])?$", re.MULTILINE)


class LargePages:
    """Which parts were put together already: what is taken apart again, by writes while a child runs, stays so."""

    def __init__(self) -> None:
        self.children, self.next = 0, _ENOUGH
        self.tried: set[int] = set()

    def expect(self, children: int, apart_from: Sequence[Span] = ()) -> None:
        """So many more; each time that there are twice as many as before, what the process has become is looked at.

        apart_from   memory that no child inherits
        """
        self.children += children
        if self.children >= self.next:
            self.next = 2 * self.children
            self.gather(apart_from)

    def gather(self, apart_from: Sequence[Span] = ()) -> None:
        try:
            blocks = [block for block in _used_blocks() if block not in self.tried and not _is_in(block, apart_from)]
        except OSError:  # no such files here
            return
        self.tried.update(blocks)
        for start, size in _runs(blocks):
            _system().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _TOGETHER)


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _used_blocks() -> Iterator[int]:
    """Where large pages would begin that are mostly in use."""
    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for first, last in _ANONYMOUS.findall(maps.read()):
            start, end = -(-int(first, 16) // _LARGE) * _LARGE, int(last, 16) // _LARGE * _LARGE
            if start < end:
                pages.seek(start // _SMALL * 8)
                words = np.frombuffer(pages.read((end - start) // _SMALL * 8), dtype=np.uint64)
                each = words[: len(words) // (_LARGE // _SMALL) * (_LARGE // _SMALL)].reshape(-1, _LARGE // _SMALL)
                used = (each >> np.uint64(63)).mean(1)  # the highest bit: whether the page is there
                yield from (start + place * _LARGE for place in np.flatnonzero(used >= _IN_USE).tolist())


def _is_in(block: int, spans: Sequence[Span]) -> bool:
    return any(start <= block < start + size for start, size in spans)


def _runs(blocks: Iterable[int]) -> Iterator[Span]:
    """Those that follow each other, as one: where it begins, and its size."""
    for _, group in groupby(enumerate(blocks), lambda one: one[1] - one[0] * _LARGE):
        found = [block for _, block in group]
        yield found[0], len(found) * _LARGE
