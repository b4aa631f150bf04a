"""The optional native kernels: Box-Muller on blocks of keystream (`gaussian.cpp`), whole normals for noise on a lattice
(`secure.cpp`), the arithmetic of clipped sums (`clipping.cpp`, behind `arithmetic`), of recurrent layers
(`recurrence.cpp`, behind `recurrence`), of predictions (`prediction.cpp`, behind
`confide.posteriors.prediction.native`) and codes of what lies in memory (`digest.cpp`, behind `digest`), in vectorised
C++ with two headers, `kernels.h` and `tiles.h`.

The library is built at installation where a C++ compiler exists and opened by `loader` alone. Where it is missing, or
must not be called, `kernel()` is None and the torch path does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from confide._native.loader import library

__all__ = ["Kernel", "SecureKernels", "kernel", "secure_kernels"]

# (address of the words, address of the output, blocks, pairs per block, std) -> the least radius word
Kernel = Callable[[int, int, int, int, float], int]


@cache
def kernel() -> Kernel | None:
    """The kernel of ordinary noise, or None where it cannot run."""
    opened = library()
    if opened is None:
        return None
    function: Kernel = opened.confide_box_muller
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
    opened = library()
    if opened is None:
        return None
    return SecureKernels(opened.confide_rounded_normals, opened.confide_add_float, opened.confide_add_double)
