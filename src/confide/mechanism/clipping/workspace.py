"""Memory for per-record gradients, kept between steps.

Buffers of many megabytes that are given back to the operating system cost more in page faults than the arithmetic
done in them. A workspace hands out pieces of one buffer, which grows to what a step needs within the memory budget.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_KEPT_BYTES = 31 << 20  # Just below 32 MB, up to which the C library raises its limit.


def keep_pages() -> None:
    """Let the C library keep freed memory for the next batch.

    By default it hands buffers back to the operating system, and the next batch waits for fresh pages several times as
    long as it takes to fill them. It raises its limit to the largest buffer that was ever freed, up to 32 MB: one that
    nobody touches costs nothing. Elsewhere than under glibc this does nothing.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
GAPS = 128 << 20
"""Bytes of gradients that come before what lies free between them is handed back."""


def give_back() -> None:
    """Let the C library hand what lies free to the operating system: passes of other sizes than a run's have left gaps,
    and the first batch would grow the process beside them. Elsewhere than under glibc this does nothing."""
    if _trim is not None:
        _trim(0)


class Gaps:
    """What a backward pass lets go leaves gaps that are a little too small for the gradients that come for it, since
    those begin at lines of the cache: in a large pass they are handed back as it goes on."""

    def __init__(self) -> None:
        self.come = 0

    def taken(self, gradients: Sequence[Tensor | None]) -> None:
        self.come += sum(one.numel() * one.element_size() for one in gradients if one is not None and one.is_cpu)
        if self.come >= GAPS:
            self.come = 0
            give_back()


class Workspace:
    """Pieces of one buffer; `begin` takes them all back."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.used = 0
        self.wanted = 0
        self.budget = 0

    def begin(self, budget: int, expected: int = 0) -> None:
        """A new step, with so many bytes for all pieces together, of which some are `expected` to be used."""
        self.wanted = max(self.wanted, expected)
        if self.buffer is not None and self.wanted > self.buffer.numel():
            self.buffer = None  # one that is large enough is made at the first request
        self.budget, self.used = budget, 0

    def fits(self, bytes_needed: int) -> bool:
        return self.used + bytes_needed <= self.budget

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor of the type of `like`; from the buffer while that lasts."""
        size = math.prod(shape) * like.element_size()
        start = -(-self.used // 64) * 64  # aligned for vector instructions
        self.used = start + size
        self.wanted = max(self.wanted, self.used)
        if self.buffer is None:
            self.buffer = torch.empty(self.wanted, dtype=torch.uint8, device=like.device)
        if self.used > self.buffer.numel() or self.buffer.device != like.device:
            return like.new_empty(shape)
        return self.buffer[start : self.used].view(like.dtype).view(shape)
