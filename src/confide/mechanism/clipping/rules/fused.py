"""Convolutions without patches: weight gradients by torch's own kernel, norms by products of pixels.

Patches that are written out are as large as the kernel has places, and the products of them are limited by memory. The
kernel that torch uses for ordinary gradients adds up the same terms, one product each, in an order of its own, which is
all that `rounding` asks of a sum. It is asked for single precision on the host only: there it multiplies and adds
directly, where kernels of other devices may take transforms whose rounding follows no such rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from confide.devices import HOST
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.squares import products

FOR_A_BATCH = 1 << 20  # multiply-adds of one record, from which on torch's kernel beats products of patches
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
