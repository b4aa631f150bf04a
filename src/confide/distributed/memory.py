"""Memory that all ranks have in common where they are on one machine: sums go through it, not over the loopback device.

Rank 0 makes a file in memory that never has a name. The others open it by rank 0's own table of open files, which the
system allows to processes of the same user alone, and look for a word in it that was told over the wire. A rank on
another machine, or in a container of its own, does not find that: then all of them use the wire. The file ends with the
last who has it open, whoever is killed.

What stands there are sums without noise, as in the memory of each rank: see `ranks` on what is inside the boundary.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch
from torch import Tensor

SMALLEST = 1 << 16  # bytes of a vector from which on it is worth it: below, both ways cost two meetings and little else
LARGEST = 1 << 27  # bytes of a vector up to which it is done: the memory is there beside that of the ranks
_WORD = 32  # bytes, at the start of the file


class CommonMemory:
    """A stretch for every rank, and one for the result; each has `capacity` bytes."""

    def __init__(self, mapped: mmap.mmap, capacity: int) -> None:
        self.capacity, self._mapped = capacity, mapped

    def stretch(self, place: int, dtype: torch.dtype, length: int) -> Tensor:
        """So many numbers, in the stretch of a rank or, after the last rank, in that of the result."""
        return torch.frombuffer(self._mapped, dtype=dtype, count=length, offset=place * self.capacity)


class Offer:
    """Rank 0's side: the file, for as long as the others need to open it.

    name   where they find it, and the word in it; empty where there is no room, or no such thing on this system
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.name, self._handle = "", -1
        if not hasattr(os, "memfd_create"):
            return
        try:
            self._handle = os.memfd_create("confide", os.MFD_CLOEXEC)
            os.posix_fallocate(self._handle, 0, (size + 1) * capacity)  # now: a page that is missing later kills
            os.pwrite(self._handle, word := secrets.token_bytes(_WORD), 0)
        except OSError:
            return
        self.name = f"/proc/{os.getpid()}/fd/{self._handle} {word.hex()}"

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def capacity_for(wanted: int) -> int:
    """Whole pages, so that every stretch begins where any kind of number may."""
    return -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE


def opened(name: str, size: int, capacity: int) -> CommonMemory | None:
    """The memory of that name, or None where this rank does not reach it."""
    path, _, word = name.partition(" ")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not word or os.pread(handle, _WORD, 0) != bytes.fromhex(word):
            return None
        return CommonMemory(mmap.mmap(handle, (size + 1) * capacity), capacity)
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)
