"""The kernels of `clipping.cpp`: small clipped sums in one call, norms of sums of outer products, mean-field weights.

Each function is None-able like the noise kernel: where the library is missing, torch does the same work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from confide._native.known_answers import ClipLayer as ClipLayer
from confide._native.known_answers import OuterTask
from confide._native.loader import library
from confide._native.threads import share

THREAD_ENTRIES = 1 << 17  # so many weights are worth a thread
THREAD_SQUARES = 1 << 20  # so many squares
THREAD_PRODUCTS = 1 << 21  # and so many multiply-adds
# Records, or their positions, and outputs of which the kernel of outer products is quicker than torch: the panels of
# more records do not stay in the caches, and fewer outputs are not worth copying the inputs.
OUTER_RECORDS, OUTER_OUTPUTS = 8192, 24


class Room(Protocol):
    """Lends memory: a tensor of the type of `like` in which nothing has been written."""

    def take(self, like: Tensor, *shape: int) -> Tensor: ...


@cache
def clip_kernel(dtype: torch.dtype) -> Callable[..., int] | None:
    """(records, layers, array of Layer, norms, bound, gamma or 0, tiny) -> whether all norms were finite.

    Only then anything is added.
    """
    opened = library()
    if opened is None or dtype not in (torch.float32, torch.float64):
        return None
    function: Callable[..., int] = opened.confide_clip_float if dtype == torch.float32 else opened.confide_clip_double
    return function


def row_squares(values: Tensor) -> Tensor | None:
    """The squared norm of every row of a matrix, without a temporary; None where the kernel does not fit."""
    opened = library()
    if opened is None or values.device.type != "cpu" or values.stride(1) != 1:
        return None
    if values.dtype == torch.float32:
        kernel = opened.confide_squares_float
    elif values.dtype == torch.float64:
        kernel = opened.confide_squares_double
    else:
        return None
    rows, entries = values.shape
    norms = values.new_empty(rows)
    workers = max(1, min(torch.get_num_threads(), values.numel() // THREAD_SQUARES, rows))
    bounds = [rows * part // workers for part in range(workers + 1)]
    stride, size = values.stride(0), values.element_size()
    start, into = values.data_ptr(), norms.data_ptr()

    def fill(part: int) -> None:
        first, count = bounds[part], bounds[part + 1] - bounds[part]
        kernel(count, entries, stride, start + first * stride * size, into + first * size)

    share(fill, workers)
    return norms


def gram_norms(left: Tensor, right: Tensor, slack: float, tiny: float) -> tuple[Tensor, Tensor] | None:
    """|sum_t left_t right_t^T|^2 and |left| |right| of every record, for left and right (records, positions, features).

    To the first `slack` times the square of the second is added, and what underflow below `tiny` may have hidden. None
    without the library, or where the tensors are not laid out for it.
    """
    opened = library()
    if opened is None or not all(value.is_contiguous() and value.device.type == "cpu" for value in (left, right)):
        return None
    if left.dtype != right.dtype or left.dtype not in (torch.float32, torch.float64):
        return None
    kernel = opened.confide_gram_float if left.dtype == torch.float32 else opened.confide_gram_double
    records, positions, outputs = left.shape
    inputs = right.shape[2]
    norms, spreads = left.new_empty(2, records)
    work = records * positions * (positions + 1) // 2 * (inputs + outputs)
    workers = max(1, min(torch.get_num_threads(), work // THREAD_PRODUCTS, records))
    bounds = [records * part // workers for part in range(workers + 1)]
    places = [(value.data_ptr(), value.stride(0) * value.element_size()) for value in (left, right, norms, spreads)]

    def fill(part: int) -> None:
        addresses = (address + bounds[part] * stride for address, stride in places)
        kernel(bounds[part + 1] - bounds[part], positions, outputs, inputs, *addresses, slack, tiny)

    share(fill, workers)
    return norms, spreads


def add_outer(
    left: Tensor, right: Tensor, factors: Tensor, weight: Tensor, bias: Tensor | None, block: int, space: Room
) -> bool:
    """weight += sum_r factors_r left_r right_r^T, bias += sum_r factors_r left_r; False where that is not done.

    Every entry adds up `block` records one after the other, then these sums, and meets what is there once.
    """
    opened, sides = library(), (left, right, weight)
    (records, outputs), inputs = left.shape, right.shape[1]
    if opened is None or outputs < OUTER_OUTPUTS or not 0 < records <= OUTER_RECORDS:
        return False
    vectors = (factors,) if bias is None else (factors, bias)
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in (*sides, *vectors)):
        return False
    if weight.shape != (outputs, inputs) or not all(value.stride(-1) == 1 for value in (*sides, *vectors)):
        return False
    workers = max(1, min(torch.get_num_threads(), records * outputs * inputs // THREAD_PRODUCTS))
    tasks = []
    for part in range(workers):  # each has some rows of the weight, or some columns
        whole, (first, last) = slice(None), (max(outputs, inputs) * end // workers for end in (part, part + 1))
        row, column = (slice(first, last), whole) if outputs >= inputs else (whole, slice(first, last))
        a, b, into = left[:, row], right[:, column], weight[row, column]
        biases = None if bias is None or (part and outputs < inputs) else bias[row].data_ptr()
        places, strides = (value.data_ptr() for value in (a, b, factors)), (value.stride(0) for value in (a, b, into))
        tasks.append(OuterTask(records, *into.shape, block, *places, *strides, into.data_ptr(), biases, None))
    rooms = space.take(left, workers, max(opened.confide_outer_room(ctypes.addressof(task)) for task in tasks))
    for task, room in zip(tasks, rooms, strict=True):
        task.room = room.data_ptr()
    share(lambda part: opened.confide_outer(ctypes.addressof(tasks[part])), workers)
    return True


def mean_field(mean: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
    """mean + softplus(rho) * noise and sigmoid(rho) * noise for every draw, noise (draws, *shape); None without it."""
    opened = library()
    tensors = (mean, rho, noise)
    if opened is None or any(value.dtype != torch.float32 or value.device.type != "cpu" for value in tensors):
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
            opened.confide_mean_field(*(a + start for a in given), *(a + shift for a in each), count)

    share(fill, workers)
    return weight, jacobian


def add_rows(rows: Sequence[Tensor], noise: Tensor, out: Tensor) -> bool:
    """out = the sum of rows and noise, added in double precision one after the other; False where that is not done."""
    opened = library()
    if opened is None or not all(
        value.dtype == torch.float32
        and value.device.type == "cpu"
        and value.is_contiguous()
        and value.shape == out.shape
        for value in (*rows, noise, out)
    ):
        return False
    places = (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    opened.confide_add_rows(ctypes.addressof(places), len(rows), noise.data_ptr(), out.data_ptr(), len(out))
    return True
