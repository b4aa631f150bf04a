"""The kernels of `clipping.cpp`: small clipped sums in one call, and mean-field weights in one pass.

Each function is None-able like the noise kernel: where the library is missing, torch does the same work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from confide.mechanism import _native
from confide.mechanism._native.threads import threads

THREAD_ENTRIES = 1 << 17  # so many weights are worth a thread


class Layer(ctypes.Structure):
    """Output gradients (records, outputs), inputs (records, inputs), and where the sums go."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@cache
def _library() -> Any:
    if _native.kernel() is None:
        return None
    library = ctypes.CDLL(str(_native.LIBRARY))
    address, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    try:
        for function in (library.confide_clip_float, library.confide_clip_double):
            function.argtypes = [count, count, address, address, real, real, real]
            function.restype = ctypes.c_int
        library.confide_mean_field.argtypes = [address] * 5 + [count]
        library.confide_mean_field.restype = None
    except AttributeError:  # a library built before there were any
        return None
    return library


@cache
def clip_kernel(dtype: torch.dtype) -> Callable[..., int] | None:
    """(records, layers, array of Layer, norms, bound, gamma or 0, tiny) -> whether all norms were finite.

    Only then anything is added.
    """
    library = _library()
    if library is None or dtype not in (torch.float32, torch.float64):
        return None
    function: Callable[..., int] = library.confide_clip_float if dtype == torch.float32 else library.confide_clip_double
    return function


def mean_field(mean: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
    """mean + softplus(rho) * noise and sigmoid(rho) * noise for every draw, noise (draws, *shape); None without it."""
    library = _library()
    tensors = (mean, rho, noise)
    if library is None or any(value.dtype != torch.float32 or value.device.type != "cpu" for value in tensors):
        return None
    if not all(value.is_contiguous() for value in tensors):
        return None
    weight, jacobian = torch.empty_like(noise), torch.empty_like(noise)
    size = mean.numel()
    workers = max(1, min(torch.get_num_threads(), size // THREAD_ENTRIES))
    bounds = [size * part // workers for part in range(workers + 1)]
    given, each = (mean.data_ptr(), rho.data_ptr()), (noise.data_ptr(), weight.data_ptr(), jacobian.data_ptr())

    def fill(part: int) -> None:
        start, count = 4 * bounds[part], bounds[part + 1] - bounds[part]
        for draw in range(len(noise)):
            shift = 4 * size * draw + start
            library.confide_mean_field(*(a + start for a in given), *(a + shift for a in each), count)

    waiting = [threads().submit(fill, part) for part in range(1, workers)]
    fill(0)
    for one in waiting:
        one.result()
    return weight, jacobian
