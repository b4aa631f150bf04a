"""How a convolution cuts its patches out of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGE_PLANE = 512  # positions
_pad = torch.nn.functional.pad  # as it was when confide was imported


class Cut:
    """How patches are cut out of images (records, channels, *space)."""

    def __init__(self, layer: Any, margins: Sequence[int], mode: str = "constant") -> None:
        self.kernel, self.stride, self.dilation, self.groups = (
            layer.kernel_size, layer.stride, layer.dilation, layer.groups
        )  # fmt: skip
        self.margins, self.mode = margins, mode

    @property
    def padding(self) -> list[int] | None:
        """As many zeros on either side of every axis, or None where it is otherwise."""
        before, after = list(self.margins[::2])[::-1], list(self.margins[1::2])[::-1]  # torch counts from the last axis
        return before if self.mode == "constant" and before == after and min(before) >= 0 else None

    @property
    def times_read(self) -> int:
        """How many patches a number of an image is part of, at most."""
        steps = [step // math.gcd(step, window) for step, window in zip(self.stride, self.dilation, strict=True)]
        return math.prod(-(-size // step) for size, step in zip(self.kernel, steps, strict=True))

    def __call__(self, images: Tensor) -> Tensor:
        """(records, groups, *positions, *kernel, channels of the group), a view of a copy."""
        stride: Sequence[int] = self.stride
        if set(self.kernel) == {1} and not any(self.margins):  # what is stepped over is read by nothing
            steps: list[Any] = [slice(None, None, step) for step in stride]
            images, stride = images[(..., *steps)], (1,) * len(stride)
        view: Tensor = padded_last(images, self.margins, self.mode).unflatten(-1, (self.groups, -1)).movedim(-2, 1)
        space = len(self.kernel)
        for axis in range(space):
            window = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            view = view.unfold(2 + axis, window, stride[axis])[..., :: self.dilation[axis]]
        return view.movedim(2 + space, -1)  # unfold puts the kernel last; the channels go behind it again


def padded_last(values: Tensor, margins: Sequence[int], mode: str = "constant") -> Tensor:
    """(records, channels, *space) with margins and the channels last, in memory of its own; zeros take one copy.

    Two for large images: planes that are a power of two apart fall on the same lines of the cache.
    """
    if mode != "constant" or not any(margins) or min(margins) < 0 or math.prod(values.shape[2:]) >= LARGE_PLANE:
        padded = _pad(values, list(margins), mode=mode) if any(margins) else values
        return padded.movedim(1, -1).contiguous()
    before, after = margins[::2][::-1], margins[1::2][::-1]  # torch counts from the last axis
    sizes = values.shape[2:]
    found = values.new_zeros(len(values), *map(sum, zip(before, sizes, after, strict=True)), values.shape[1])
    inner: Any = found
    for axis, (start, size) in enumerate(zip(before, sizes, strict=True)):
        inner = inner.narrow(1 + axis, start, size)
    inner.copy_(values.movedim(1, -1))
    return found
