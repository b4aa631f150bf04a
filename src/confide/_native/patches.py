"""The kernel of `patches.cpp`: the gradients of a convolution's weight, record by record, and their squared norms."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from confide._native.known_answers import PatchTask
from confide._native.loader import library
from confide._native.threads import share

THREAD_PRODUCTS = 1 << 21  # so many multiply-adds are worth a thread


def patches_fit(left: Tensor, images: Tensor, axes: int) -> bool:
    """Whether the kernel takes these: images of one or two axes, in single precision on the host."""
    kinds = all(one.dtype == torch.float32 and one.device.type == "cpu" for one in (left, images))
    return kinds and axes in (1, 2) and library() is not None


def patch_gradients(
    left: Tensor,
    images: Tensor,
    sizes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
    groups: int,
    places: Sequence[int],
    into: Tensor | None,
) -> Tensor:
    """Squared norms of what is written into rows of `into` (records, entries), or thrown away, in the weight's order.

    left (records, channels, positions) and images (records, channels, *space), wherever their numbers lie; `sizes` are
    those of kernel, stride, dilation and padding, `places` how many positions there are along every axis.
    """
    opened = library()
    if images.dim() == 3:  # one row
        images, places, sizes = images.unsqueeze(2), (1, *places), _with_rows(sizes)
    kernel, stride, dilation, padding = ((ctypes.c_int64 * 2)(*one) for one in sizes)
    records, (outputs, channels) = len(left), (left.shape[1] // groups, images.shape[1] // groups)
    entries = left.shape[1] * channels * kernel[0] * kernel[1]
    norms = left.new_empty(records)
    work = records * entries * left.shape[2]
    workers = max(1, min(torch.get_num_threads(), work // THREAD_PRODUCTS, records))
    out = left.new_empty(workers, entries) if into is None else into
    bounds = [records * part // workers for part in range(workers + 1)]
    tasks = []
    for part, start in enumerate(bounds[:-1]):
        some, images_here, norms_here = left[start:], images[start:], norms[start:]
        here = out[part if into is None else start :]
        task = PatchTask(bounds[part + 1] - start, groups, outputs, channels, *places, *images.shape[2:])
        task.kernel, task.stride, task.dilation, task.padding = kernel, stride, dilation, padding
        task.left, task.images, task.out, task.norms = (one.data_ptr() for one in (some, images_here, here, norms_here))
        task.left_record, task.left_channel, task.left_position = left.stride()
        task.image_record, task.image_channel, task.image_row, task.image_column = images.stride()
        task.out_stride = 0 if into is None else into.stride(0)
        tasks.append(task)
    room = left.new_empty(workers, opened.confide_patches_room(ctypes.addressof(tasks[0])) if tasks else 0)
    for part, task in enumerate(tasks):
        task.room = room[part].data_ptr()
    share(lambda part: opened.confide_patches(ctypes.addressof(tasks[part])), workers)
    return norms


def _with_rows(
    sizes: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]:
    kernel, stride, dilation, padding = sizes
    return (1, *kernel), (1, *stride), (1, *dilation), (0, *padding)
