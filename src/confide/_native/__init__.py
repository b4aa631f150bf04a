"""The optional native kernels: Box-Muller on blocks of keystream (`gaussian.cpp`), and whole normals for noise on a
lattice (`secure.cpp`), in vectorised C++. The same library holds the arithmetic of clipped sums (`clipping.cpp`, behind
`arithmetic`) and of predictions (`prediction.cpp`, behind `confide.posteriors.prediction.native`).

The library is built at installation where a C++ compiler exists and loaded by ctypes. Where it is missing, or
the processor lacks the instructions it needs, `kernel()` is None and the torch path does the same work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["LIBRARY", "Kernel", "SecureKernels", "kernel", "secure_kernels"]

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


@dataclass(frozen=True)
class SecureKernels:
    """rounded_normals   (words, output, pairs, sigma, margin, places in doubt, room for them) -> how many are in doubt
    add_float, _double   (noise, sum, count, spacing, largest place); see `secure.cpp`
    """

    rounded_normals: Callable[[int, int, int, float, float, int, int], int]
    add_float: Callable[[int, int, int, float, float], None]
    add_double: Callable[[int, int, int, float, float], None]


@cache
def secure_kernels() -> SecureKernels | None:
    """The kernels of noise on a lattice, or None where they cannot run."""
    if kernel() is None:
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = SecureKernels(library.confide_rounded_normals, library.confide_add_float, library.confide_add_double)
    except (OSError, AttributeError):  # a library built before there were any
        return None
    address, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.confide_rounded_normals.argtypes = [address, address, count, real, real, address, count]
    library.confide_rounded_normals.restype = count
    for function in (library.confide_add_float, library.confide_add_double):
        function.argtypes = [address, address, count, real, real]
        function.restype = None
    return found
