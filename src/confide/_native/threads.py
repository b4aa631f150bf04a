"""Threads for the native kernels, shared by all who call them; the kernels let go of Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confide._native.process import mark

_pool: ThreadPoolExecutor | None = None
_pool_mark = 0


def threads() -> ThreadPoolExecutor:
    """Made when first needed, and again after a fork, which threads do not survive."""
    global _pool, _pool_mark
    if _pool is None or _pool_mark != mark():
        _pool, _pool_mark = ThreadPoolExecutor(os.cpu_count(), "confide"), mark()
    return _pool


def share(fill: Callable[[int], None], workers: int) -> None:
    """Every part on a thread of its own, the first on this one."""
    waiting = [threads().submit(fill, part) for part in range(1, workers)]
    fill(0)
    for one in waiting:
        one.result()
