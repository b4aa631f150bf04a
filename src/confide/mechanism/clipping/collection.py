"""The garbage collector while records run: it rests, and is asked after each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside: what finalisers and callbacks of the collector write is not what a pass wrote."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_young() -> None:
    """Collect what was made while the collector rests. Its callbacks are not told: what they write is not a pass's."""
    told = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        gc.collect(1)
    finally:
        gc.callbacks[:] = told
