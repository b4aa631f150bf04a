"""Threads for the native kernels, shared by all who call them; the kernels let go of Python's lock."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def threads() -> ThreadPoolExecutor:
    """Made when first needed."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), "confide")
    return _pool


def _forget() -> None:
    global _pool
    _pool = None  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
