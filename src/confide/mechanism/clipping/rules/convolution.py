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

from confide.mechanism.clipping.rules.linear import CACHE_BYTES, PASS_COST, ghost_norms, rounding_guard, squared_sizes
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Where, rule_for
from confide.mechanism.clipping.rules.squares import chunks, expanded, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace

# Terms that meet in one product: enough to be worth a call, few enough for the rounding of some hundred records.
TERMS = 128


class PatchSum(Contribution):
    """sum_t left_t patch_t^T per record and channel group.

    left (records, groups, channels, positions); patches (records, groups, *positions, *kernel, channels), a view.
    """

    def __init__(self, left: Tensor, patches: Tensor, kernel: tuple[int, ...], space: Workspace) -> None:
        self.left, self.patches, self.kernel, self.space = left, patches, kernel, space
        self.records, self.groups, self.channels, self.positions = left.shape
        self.width = math.prod(kernel) * patches.shape[-1]
        self.stored: Tensor | None = None
        self.spreads: Tensor | None = None  # as far as they are known
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

    def _record_bytes(self) -> int:
        return self.groups * self.positions * self.width * self.left.element_size()

    def _piece_bytes(self) -> int:
        return min(self.space.budget, CACHE_BYTES)

    def _pieces(self) -> Any:
        return chunks(self.records, self._record_bytes(), self._piece_bytes())

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
        self.spreads = norms.sqrt()
        return norms

    def _ghost_norms(self) -> Tensor:
        norms, self.spreads = self.left.new_empty(self.records), self.left.new_empty(self.records)
        for start, stop in self._pieces():
            left = self.left[start:stop].flatten(0, 1).transpose(1, 2)
            each, spreads = ghost_norms(left, self._columns(start, stop).flatten(0, 1))
            norms[start:stop] = each.view(stop - start, self.groups).sum(1)
            self.spreads[start:stop] = torch.linalg.vector_norm(spreads.view(stop - start, self.groups), dim=1)
        return norms

    def _piecewise_norms(self) -> Tensor:
        norms = self.left.new_empty(self.records)
        for start, stop in self._pieces():
            columns = self._columns(start, stop)
            left = self.left[start:stop]
            norms[start:stop] = squared_norms_of(torch.matmul(left, columns))
            norms[start:stop] += rounding_guard(left, columns, self.positions)
        return norms

    def chain(self, records: int) -> int:
        if self.stored is not None:
            return records
        together = max(1, TERMS // self.positions)
        piece = max(1, min(records, self._piece_bytes() // self._record_bytes()))
        # the terms of one product, the products of one piece of records, and two sums for every piece
        return min(records, together) * self.positions + -(-piece // together) + 2 * -(-records // piece)

    def spread(self) -> Tensor:
        if self.spreads is None:
            self.spreads = self.left.new_empty(self.records)
            for start, stop in self._pieces():
                self.spreads[start:stop] = squared_sizes(self.left[start:stop], self._columns(start, stop)).sqrt_()
        found: Tensor = self.spreads
        return found

    def chosen(self, where: Where) -> PatchSum:
        found = PatchSum(self.left[where], self.patches[where], self.kernel, self.space)
        found.stored = None if self.stored is None else self.stored[where]
        found.spreads = None if self.spreads is None else self.spreads[where]
        return found

    def widened(self) -> PatchSum:
        """The patches are widened as they are written out."""
        found = PatchSum(self.left.double(), self.patches, self.kernel, self.space)
        found.stored = None if self.stored is None else self.stored.double()
        return found

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        if self.stored is not None:
            total = factors @ self.stored
        else:
            total = self._products(factors)
        return {"weight": self._as_weight(total.view(1, self.groups, self.channels, self.width))[0]}

    def _products(self, factors: Tensor) -> Tensor:
        """Few terms meet in one product: as many products side by side as it takes, and their sums added up."""
        total = self.left.new_zeros(self.groups, self.channels, self.width)
        together = max(1, TERMS // self.positions)
        for start, stop in self._pieces():
            scaled, columns = self.left[start:stop] * expanded(factors[start:stop], 4), self._columns(start, stop)
            whole = (stop - start) // together * together
            for first, last, size in ((0, whole, together), (whole, stop - start, stop - start - whole)):
                if first < last:  # (blocks, groups, channels, terms) and (blocks, groups, terms, width)
                    left = scaled[first:last].unflatten(0, (-1, size)).permute(0, 2, 3, 1, 4).flatten(3)
                    right = columns[first:last].unflatten(0, (-1, size)).transpose(1, 2).flatten(2, 3)
                    total += torch.matmul(left, right).sum(0)
        return total

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """(records, groups, channels, width) in the shape of the weight, (records, channels, inputs, *kernel)."""
        records = gradients.shape[0]
        return gradients.reshape(records, self.groups * self.channels, *self.kernel, -1).movedim(-1, 2)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return {"weight": self._as_weight(self._gradients(start, stop))}


class WithBias(Contribution):
    """A weight's contribution and the bias that goes with it."""

    def __init__(self, weight: Contribution, bias: Contribution) -> None:
        self.weight, self.bias, self.records = weight, bias, weight.records

    def squared_norms(self) -> Tensor:
        return self.weight.squared_norms() + self.bias.squared_norms()

    def chain(self, records: int) -> int:
        return max(self.weight.chain(records), self.bias.chain(records))

    def spread(self) -> Tensor:
        return torch.hypot(self.weight.spread(), self.bias.spread())

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return self.weight.weighted(factors) | self.bias.weighted(factors)

    def chosen(self, where: Where) -> Contribution:
        return WithBias(self.weight.chosen(where), self.bias.chosen(where))

    def widened(self) -> Contribution:
        return WithBias(self.weight.widened(), self.bias.widened())

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
