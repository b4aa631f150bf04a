"""How much memory a piece of work holds at its worst moment."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """The most memory that was held beyond what was in use at the start, in megabytes; None where it is not told."""

    mb: float | None = None


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    """How much more memory than at its start is held at the worst moment inside the block.

    What earlier work has freed is given back to the system first, for a fit that lived in it would seem to need none.
    """
    peak = Peak()
    if sys.platform != "linux":
        yield peak
        return
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
        before = _status("VmRSS")
    except (OSError, ValueError):
        yield peak
        return
    yield peak
    with contextlib.suppress(OSError, ValueError):
        peak.mb = max(0.0, _status("VmHWM") - before)


def _give_back() -> None:
    """Collect garbage, and have glibc return what is free; other libraries have no such function."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status(entry: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return float(line.split()[1]) / 1024
    raise ValueError(f"{entry}: not in /proc/self/status")
