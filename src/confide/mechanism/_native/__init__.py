"""The optional native kernel: Box-Muller on blocks of keystream, in vectorised C++ (`gaussian.cpp`).

The library is built at installation where a C++ compiler exists and loaded by ctypes. Where it is missing, or
the processor lacks the instructions it needs, `kernel()` is None and the torch path does the same work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["LIBRARY", "Kernel", "kernel"]

LIBRARY = Path(__file__).with_name("libconfide_gaussian.so")
ABI = 1  # what `confide_abi` returns; a library left behind by another version is not called

# (address of the words, address of the output, blocks, pairs per block, std) -> the least radius word
Kernel = Callable[[int, int, int, int, float], int]


@cache
def kernel() -> Kernel | None:
    """The kernel, or None where it cannot run."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        usable = library.confide_abi() == ABI and library.confide_supported() == 1
        function = library.confide_box_muller
    except (OSError, AttributeError):
        return None
    if not usable:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_float]
    function.restype = ctypes.c_int32
    return function
