"""Ctrl-C between two steps: a release that is paid for is not thrown away half way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Let an interrupt wait until the function that this yields is called; a second one does not wait.

    Elsewhere than in the main thread, or where somebody handles interrupts already, nothing is changed.
    """
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not plain or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    waiting = False

    def later(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            raise KeyboardInterrupt
        waiting = True

    def due() -> None:
        if waiting:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, later)
    try:
        yield due
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
