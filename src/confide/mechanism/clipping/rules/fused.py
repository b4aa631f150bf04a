"""The weight gradient of a convolution by torch's own kernel, which reads images and gradients where they lie.

Patches that are written out are as large as the kernel has places, and the products of them are limited by memory. The
kernel that torch uses for ordinary gradients adds up the same terms, one product each, in an order of its own, which is
all that `rounding` asks of a sum. It is asked for single precision on the host only: there it multiplies and adds
directly, where kernels of other devices may take transforms whose rounding follows no such rule.

Gradients that are clipped must not depend on who else is in the batch. So they are asked for record by record, each
from the beginning of a line of the cache: what a kernel adds up first depends on where its numbers begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from confide.devices import HOST

LINE = 64  # bytes
# Multiply-adds: of one record, from which on a call of its own beats the products of several at once; of a whole batch.
OF_A_RECORD, OF_A_BATCH = 6 << 20, 1 << 20
TYPES = (torch.float32,)  # others have no kernel that is faster than products
_backward = torch.ops.aten.convolution_backward.default


class Cutting(Protocol):
    """How patches are cut: what a convolution is made of beside its weight."""

    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def padding(self) -> list[int] | None:
        """As many zeros on either side of every axis, or None where it is otherwise."""


def fusible(images: Tensor, cut: Cutting) -> bool:
    return images.dtype in TYPES and images.device == HOST and cut.padding is not None


def output_space(images: Tensor, cut: Cutting) -> list[int]:
    padding: Any = cut.padding
    sides = zip(images.shape[2:], padding, cut.kernel, cut.stride, cut.dilation, strict=True)
    return [(size + 2 * pad - window * (kernel - 1) - 1) // step + 1 for size, pad, kernel, step, window in sides]


def weight_gradient(left: Tensor, images: Tensor, cut: Cutting) -> Tensor:
    """left (records, channels, *positions); the sum over the records in the shape of the weight."""
    padding: Any = cut.padding
    shape = (left.shape[1], images.shape[1] // cut.groups, *cut.kernel)
    settings = (list(cut.stride), padding, list(cut.dilation), False, [0] * len(padding), cut.groups)
    # a weight is read for its shape
    found: Tensor = _backward(left, images, left.new_empty(shape), None, *settings, [False, True, False])[1]
    return found


def of_each_record(left: Tensor, images: Tensor, cut: Cutting) -> Iterator[Tensor]:
    """The gradient of one record after the other, each a function of that record alone."""
    placed = _aligned(left) and _aligned(images)
    for record in range(len(left)):
        sides = left[record : record + 1], images[record : record + 1]
        yield weight_gradient(*(sides if placed else (side.clone() for side in sides)), cut)


def _aligned(values: Tensor) -> bool:
    """Whether every record begins at a line of the cache."""
    step = values.stride(0) * values.element_size()
    return values.is_contiguous() and values.data_ptr() % LINE == 0 and step % LINE == 0


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """In single precision throughout, whatever was set outside."""
    setting: Any = torch.backends.mkldnn.conv
    before = setting.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before
