"""Convolutions without patches: weight gradients by torch's own kernel, norms by products of pixels.

Patches that are written out are as large as the kernel has places, and the products of them are limited by memory. The
kernel that torch uses for ordinary gradients adds up the same terms, one product each, in an order of its own, which is
all that `rounding` asks of a sum. It is asked for single precision on the host only: there it multiplies and adds
directly, where kernels of other devices may take transforms whose rounding follows no such rule.

Gradients that are clipped must not depend on who else is in the batch. So they are asked for record by record, each
from the beginning of a line of the cache: what a kernel adds up first depends on where its numbers begin. Or all in one
call, in which every record is a group of channels of its own, where made-up numbers show that this gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from confide.devices import HOST
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.squares import products

LINE = 64  # bytes
# Multiply-adds of one record, from which on torch's kernel beats products of patches: one record in a call, or a batch.
FOR_A_RECORD, FOR_A_BATCH = 6 << 20, 1 << 20
# Records of one call, more than there are threads, so that none is shared out between two of them; and bytes of their
# gradients: beyond, the C library gives memory back after every step, and waiting for fresh pages takes longer than
# the products.
FEWEST_TOGETHER, MOST_TOGETHER = 4, 24 << 20
TYPES = (torch.float32,)  # others have no kernel that is faster than products
_pad = torch.nn.functional.pad  # as it was when confide was imported
_backward = torch.ops.aten.convolution_backward.default


def fusible(images: Tensor, cut: Cut) -> bool:
    return images.dtype in TYPES and images.device == HOST and cut.padding is not None


def output_space(images: Tensor, cut: Cut) -> list[int]:
    padding: Any = cut.padding
    sides = zip(images.shape[2:], padding, cut.kernel, cut.stride, cut.dilation, strict=True)
    return [(size + 2 * pad - window * (kernel - 1) - 1) // step + 1 for size, pad, kernel, step, window in sides]


def weight_gradient(left: Tensor, images: Tensor, cut: Cut) -> Tensor:
    """left (records, channels, *positions); the sum over the records in the shape of the weight."""
    padding: Any = cut.padding
    shape = (left.shape[1], images.shape[1] // cut.groups, *cut.kernel)
    settings = (list(cut.stride), padding, list(cut.dilation), False, [0] * len(padding), cut.groups)
    # a weight is read for its shape
    found: Tensor = _backward(left, images, left.new_empty(shape), None, *settings, [False, True, False])[1]
    return found


def of_each_record(left: Tensor, images: Tensor, cut: Cut) -> Iterator[Tensor]:
    """The gradient of one record after the other, each a function of that record alone."""
    placed = _aligned(left) and _aligned(images)
    for record in range(len(left)):
        one, image = left[record : record + 1], images[record : record + 1]
        yield weight_gradient(one, image, cut) if placed else weight_gradient(one.clone(), image.clone(), cut)


def of_all_records(left: Tensor, images: Tensor, cut: Cut) -> Tensor | None:
    """The same of all records in one call, (records, entries); None where it might be something else.

    Threads share records out among them, where they would share out each of them otherwise.
    """
    entries = left.shape[1] * images.shape[1] // cut.groups * math.prod(cut.kernel)
    if len(left) < FEWEST_TOGETHER or len(left) * entries * left.element_size() > MOST_TOGETHER:
        return None
    threads = torch.get_num_threads()
    if threads >= FEWEST_TOGETHER or not (_aligned(left) and _aligned(images)):
        return None
    form = (tuple(left.shape[1:]), tuple(images.shape[1:]), tuple(cut.kernel), tuple(cut.stride), tuple(cut.dilation))
    if not _same_together(*form, tuple(cut.margins), cut.groups, left.dtype, threads):
        return None
    return _together(left, images, cut)


def _together(left: Tensor, images: Tensor, cut: Cut) -> Tensor:
    """A record is a group of channels, of which torch's kernel gives every one a weight of its own."""
    records, padding = len(left), cut.padding
    assert padding is not None
    shape = (records * left.shape[1], images.shape[1] // cut.groups, *cut.kernel)
    settings = (list(cut.stride), padding, list(cut.dilation), False, [0] * len(padding), records * cut.groups)
    sides = (values.reshape(1, -1, *values.shape[2:]) for values in (left, images))
    found: Tensor = _backward(*sides, left.new_empty(shape), None, *settings, [False, True, False])[1]
    return found.view(records, -1)


@lru_cache(maxsize=512)
def _same_together(
    left: tuple[int, ...],
    images: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    margins: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    threads: int,
) -> bool:
    """Whether made-up records have the same gradients, bit by bit, alone and with others, on so many threads."""
    layer = SimpleNamespace(kernel_size=kernel, stride=stride, dilation=dilation, groups=groups)
    cut, generator = Cut(layer, margins), torch.Generator().manual_seed(0)
    count = 2 * FEWEST_TOGETHER
    sides = [torch.randn(count, *shape, generator=generator, dtype=dtype) for shape in (left, images)]
    alone = torch.stack([each.flatten() for each in of_each_record(sides[0], sides[1], cut)])
    some = (FEWEST_TOGETHER, FEWEST_TOGETHER + 1, count)
    return all(torch.equal(_together(sides[0][:few], sides[1][:few], cut), alone[:few]) for few in some)


def _aligned(values: Tensor) -> bool:
    """Whether every record begins at a line of the cache."""
    step = values.stride(0) * values.element_size()
    return values.is_contiguous() and values.data_ptr() % LINE == 0 and step % LINE == 0


def fewer_products(images: Tensor, positions: int, cut: Cut) -> bool:
    """Whether products of all pairs of pixels are fewer than those of all pairs of patches."""
    pixels = math.prod(images.shape[2:])
    return cut.padding is not None and 2 * pixels**2 <= positions**2 * math.prod(cut.kernel)


def gram_of_patches(images: Tensor, cut: Cut) -> Tensor:
    """Products of all pairs of patches: (records x groups, positions, positions).

    Two patches are products of pixels, one pair for every place of the kernel, and neighbours have the same pairs: so
    products of pixels are taken once and added up along the diagonals.
    """
    padding: Any = cut.padding
    space, positions = len(padding), output_space(images, cut)
    pixels = images.unflatten(1, (cut.groups, -1)).flatten(0, 1).flatten(2)
    margins = [margin for _ in range(2) for pad in reversed(padding) for margin in (pad, pad)]
    pairs = _pad(products(pixels.mT, pixels).unflatten(2, images.shape[2:]).unflatten(1, images.shape[2:]), margins)
    total = pairs
    for axis in range(space):  # one axis after the other: a kernel of 3 x 3 takes six additions, not nine
        count, step, window = positions[axis], cut.stride[axis], cut.dilation[axis]
        starts = [offset * window for offset in range(cut.kernel[axis])]
        inner = [slice(start, start + (count - 1) * step + 1, step) for start in starts]
        before, between = (slice(None),) * (1 + axis), (slice(None),) * (space - 1)
        first, *rest = (total[(*before, one, *between, one)] for one in inner)
        total = first.clone()
        for part in rest:
            total.add_(part)
    return total.flatten(1, space).flatten(2)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """In single precision throughout, whatever was set outside."""
    backend: Any = torch.backends.mkldnn
    setting = backend.conv
    before = setting.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before
