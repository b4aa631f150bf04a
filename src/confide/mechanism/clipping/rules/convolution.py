"""Convolutions: linear maps over patches, so the gradient of one record is a sum of outer products over positions.

    dW = sum over positions t of  g_t  patch_t^T

with g_t the output gradient and patch_t the part of the padded input under the kernel. A transposed convolution
exchanges the roles: the patches are cut from the output gradient and the input takes the place of g. Patches are
strided views of a channels-last copy, written out a cache-sized piece at a time, never for the whole batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.mechanism.clipping.rules.linear import CACHE_BYTES, PASS_COST, ghost_norms, rounding_guard
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Weighted, rule_for
from confide.mechanism.clipping.rules.squares import chunks, expanded, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace


class PatchSum(Contribution):
    """sum_t left_t patch_t^T per record and channel group.

    left (records, groups, channels, positions); patches (records, groups, *positions, *kernel, channels), a view.
    """

    def __init__(self, left: Tensor, patches: Tensor, kernel: tuple[int, ...], space: Workspace) -> None:
        self.left, self.patches, self.kernel, self.space = left, patches, kernel, space
        self.records, self.groups, self.channels, self.positions = left.shape
        self.width = math.prod(kernel) * patches.shape[-1]
        self.stored: Tensor | None = None
        self.buffer: Tensor | None = None

    def _columns(self, start: int, stop: int) -> Tensor:
        """The patches of some records written out: (records, groups, positions, width), in one reused buffer."""
        count = stop - start
        if self.buffer is None or self.buffer.shape[0] < count:
            self.buffer = self.left.new_empty(count, self.groups, self.positions, self.width)
        columns = self.buffer[:count]
        part = self.patches[start:stop]
        columns.view(part.shape).copy_(part)
        return columns

    def _pieces(self) -> Any:
        size = self.groups * self.positions * self.width * self.left.element_size()
        return chunks(self.records, size, min(self.space.budget, CACHE_BYTES))

    def _gradients(self, start: int, stop: int) -> Tensor:
        """(records, groups, channels, width)"""
        return torch.matmul(self.left[start:stop], self._columns(start, stop))

    def squared_norms(self) -> Tensor:
        """Choose by cost as for linear layers; small positions and wide kernels take Gram matrices."""
        inputs, outputs, positions = self.width, self.channels, self.positions
        entries = self.groups * inputs * outputs
        if positions * positions * (inputs + outputs) <= PASS_COST * inputs * outputs:
            return self._ghost_norms()
        if self.space.fits(self.records * entries * self.left.element_size()):
            return self._stored_norms()
        return self._piecewise_norms()

    def _stored_norms(self) -> Tensor:
        self.stored = self.space.take(self.left, self.records, self.groups * self.channels * self.width)
        norms = self.left.new_empty(self.records)
        for start, stop in self._pieces():
            piece = self.stored[start:stop]
            columns = self._columns(start, stop).flatten(0, 1)
            torch.bmm(self.left[start:stop].flatten(0, 1), columns, out=piece.view(-1, self.channels, self.width))
            norms[start:stop] = squared_norms_of(piece)
        return norms

    def _ghost_norms(self) -> Tensor:
        norms = self.left.new_empty(self.records)
        for start, stop in self._pieces():
            left = self.left[start:stop].flatten(0, 1).transpose(1, 2)
            each = ghost_norms(left, self._columns(start, stop).flatten(0, 1))
            norms[start:stop] = each.view(stop - start, self.groups).sum(1)
        return norms

    def _piecewise_norms(self) -> Tensor:
        norms = self.left.new_empty(self.records)
        for start, stop in self._pieces():
            columns = self._columns(start, stop)
            left = self.left[start:stop]
            norms[start:stop] = squared_norms_of(torch.matmul(left, columns)) + rounding_guard(left, columns)
        return norms

    def add_weighted(self, factors: Tensor, into: Weighted) -> None:
        if self.stored is not None:
            total = factors @ self.stored
        else:
            total = self.left.new_zeros(self.groups, self.channels, self.width)
            for start, stop in self._pieces():
                scaled = self.left[start:stop] * expanded(factors[start:stop], 4)
                rows = self._columns(start, stop).transpose(0, 1).reshape(self.groups, -1, self.width)
                total.baddbmm_(scaled.permute(1, 2, 0, 3).reshape(self.groups, self.channels, -1), rows)
        into["weight"].add_(self._as_weight(total.view(1, self.groups, self.channels, self.width))[0])

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """(records, groups, channels, width) in the shape of the weight, (records, channels, inputs, *kernel)."""
        records = gradients.shape[0]
        return gradients.reshape(records, self.groups * self.channels, *self.kernel, -1).movedim(-1, 2)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return {"weight": self._as_weight(self._gradients(start, stop))}


class WithBias(Contribution):
    """A weight's contribution and the bias that goes with it."""

    def __init__(self, weight: Contribution, bias: Dense) -> None:
        self.weight, self.bias, self.records = weight, bias, weight.records

    def squared_norms(self) -> Tensor:
        return self.weight.squared_norms() + self.bias.squared_norms()

    def add_weighted(self, factors: Tensor, into: Weighted) -> None:
        self.weight.add_weighted(factors, into)
        self.bias.add_weighted(factors, into)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return self.weight.dense(start, stop) | self.bias.dense(start, stop)


def patches_of(
    padded: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Tensor:
    """(records, channels, *space) cut into (records, groups, *positions, *kernel, channels of the group), a view."""
    space = len(kernel)
    view: Tensor = padded.movedim(1, -1).contiguous().unflatten(-1, (groups, -1)).movedim(-2, 1)
    for axis in range(space):
        window = dilation[axis] * (kernel[axis] - 1) + 1
        view = view.unfold(2 + axis, window, stride[axis])[..., :: dilation[axis]]
    return view.movedim(2 + space, -1)  # unfold puts the kernel last; the channels go behind it again


def channel_groups(values: Tensor, groups: int) -> Tensor:
    """(records, channels, *positions) as (records, groups, channels of the group, positions)."""
    return values.reshape(values.shape[0], groups, values.shape[1] // groups, -1)


def with_bias(call: Call, weight: Contribution | None) -> Contribution:
    if "bias" not in call.trainable:
        assert weight is not None
        return weight
    bias = Dense({"bias": call.gradient.flatten(2).sum(2)})
    return bias if weight is None else WithBias(weight, bias)


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d, parameters=("weight", "bias"))
def convolution(call: Call) -> Contribution:
    layer: Any = call.layer
    if "weight" not in call.trainable:
        return with_bias(call, None)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    margins = layer._reversed_padding_repeated_twice
    padded = F.pad(call.input, margins, mode=mode) if any(margins) else call.input
    patches = patches_of(padded, layer.kernel_size, layer.stride, layer.dilation, layer.groups)
    left = channel_groups(call.gradient, layer.groups)
    return with_bias(call, PatchSum(left, patches, layer.kernel_size, call.space))


@rule_for(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, parameters=("weight", "bias"))
def transposed_convolution(call: Call) -> Contribution:
    """Input position t with kernel offset k writes to output t * stride + k * dilation - padding."""
    layer: Any = call.layer
    if "weight" not in call.trainable:
        return with_bias(call, None)
    margins: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        reach = (call.input.shape[2 + axis] - 1) * layer.stride[axis]
        reach += layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        before = layer.padding[axis]
        margins += [before, reach - before - call.gradient.shape[2 + axis]]
    padded = F.pad(call.gradient, margins) if any(margins) else call.gradient
    patches = patches_of(padded, layer.kernel_size, layer.stride, layer.dilation, layer.groups)
    left = channel_groups(call.input, layer.groups)
    return with_bias(call, PatchSum(left, patches, layer.kernel_size, call.space))
