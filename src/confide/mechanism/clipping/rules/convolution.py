"""Convolutions: linear maps over patches, so the gradient of one record is a sum of outer products over positions.

    dW = sum over positions t of  g_t  patch_t^T

with g_t the output gradient and patch_t the part of the padded input under the kernel. A transposed convolution
exchanges the roles: the patches are cut from the output gradient and the input takes the place of g. Gradients of
single records are made by a native kernel of ours, sums of large layers by torch's (`fused`). Elsewhere patches are
strided views of a channels-last copy, made and written out a cache-sized piece at a time, never for the whole batch.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from confide._native.patches import patch_gradients, patches_fit
from confide.mechanism.clipping.rounding import lost_in_squares
from confide.mechanism.clipping.rules.formed import in_double
from confide.mechanism.clipping.rules.fused import (
    FOR_A_BATCH,
    exact_convolutions,
    fewer_products,
    fusible,
    gram_of_patches,
    output_space,
    weight_gradient,
)
from confide.mechanism.clipping.rules.linear import (
    CACHE_BYTES,
    PASS_COST,
    ghost_norms,
    norms_of_grams,
    squared_sizes,
)
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Where, not_finite, rule_for
from confide.mechanism.clipping.rules.squares import (
    chunks,
    expanded,
    squared_norms_of,
    sum_in_blocks,
)
from confide.mechanism.clipping.rules.squares import (
    products as products_of,
)
from confide.mechanism.clipping.workspace import Workspace

# What may be written out for one product. Fewer records meet in one where rounding asks for it, and only there: small
# weights then take many products in one call, large ones as few as will do, since adding those up is dear.
PRODUCT_BYTES = 16 << 20
# What storing an entry of a gradient costs where the native kernel makes it, in multiply-adds of Gram matrices of
# patches (measured: on either side of 20 the one or the other is quicker).
NATIVE_PASS_COST = 20


class PatchSum(Contribution):
    """sum_t left_t patch_t^T per record and channel group.

    left (records, groups, channels, positions); images (records, channels, *space), of which patches are cut. What is
    `fused` has the entries of a channel in the order of the weight, else the channels of the images come last: formed
    gradients, stored ones, scales and sums alike. What is `formed` for its norm counts as it was formed (`formed`).
    """

    def __init__(self, left: Tensor, images: Tensor, cut: Cut, space: Workspace) -> None:
        self.left, self.cut, self.space = left, cut, space
        self.images: Tensor | None = images  # None once every gradient is stored: neither side is needed any more
        self.records, self.groups, self.channels, self.positions = left.shape
        self.width: int = math.prod(cut.kernel) * images.shape[1] // self.groups
        self.work = self.positions * self.groups * self.channels * self.width  # multiply-adds of one record
        self.native = cut.padding is not None and patches_fit(left, images, len(cut.kernel))
        self.by_kernel = self.work >= FOR_A_BATCH and fusible(images, cut)
        self.fused = self.native or self.by_kernel
        self.formed = self.wide = False
        self.stored: Tensor | None = None
        self.squares: Tensor | None = None  # of what is stored
        self.spreads: Tensor | None = None  # as far as they are known
        self.buffer: Tensor | None = None

    def _columns(self, start: int, stop: int) -> Tensor:
        """The patches of some records written out: (records, groups, positions, width), in one reused buffer."""
        count = stop - start
        if self.buffer is None or self.buffer.shape[0] < count:
            self.buffer = self.left.new_empty(count, self.groups, self.positions, self.width)
        columns = self.buffer[:count]
        assert self.images is not None
        part = self.cut(self.images[start:stop])
        columns.view(part.shape).copy_(part)
        return columns

    def _record_bytes(self) -> int:
        return self.groups * self.positions * self.width * self.left.element_size()

    def _piece_bytes(self) -> int:
        return min(self.space.budget, CACHE_BYTES)

    def _pieces(self, formed: bool = False) -> Any:
        """Of records whose patches, and gradients where these are formed, stay in the cache."""
        each = self.groups * self.channels * self.width * self.left.element_size() if formed else 0
        return chunks(self.records, max(each, self._record_bytes()), self._piece_bytes())

    def _alone(self, start: int, stop: int, room: Tensor | None = None) -> Tensor:
        """Gradients of some records, (records, entries), each with the bits that it has among any others."""
        if self.native:
            entries = self.groups * self.channels * self.width
            each = self.left.new_empty(stop - start, entries) if room is None else room
            self._written(start, stop, each)
            return each
        columns = self._columns(start, stop).flatten(0, 1)
        out = None if room is None or self.fused else room.view(-1, self.channels, self.width)
        products = products_of(self.left[start:stop].flatten(0, 1), columns, out)
        if room is not None and out is not None:
            return room
        found = self._ordered(products).reshape(stop - start, -1)
        return found if room is None else room.copy_(found)

    def _rows(self, start: int, stop: int) -> Tensor:
        """Formed gradients as they count: of the type of the layer, whatever they are added up in."""
        if self.stored is not None:
            return self.stored[start:stop]
        rows = self._alone(start, stop)
        return rows.double() if self.wide else rows

    def _ordered(self, products: Tensor) -> Tensor:
        """Products of patches, whose channels come last, in the order of what is fused."""
        if not self.fused:
            return products
        found: Tensor = products.unflatten(-1, (math.prod(self.cut.kernel), -1)).transpose(-2, -1).flatten(-2)
        return found

    def _planes(self, images: Tensor, start: int, stop: int) -> Tensor:
        """The left side as torch's kernel has it: (records, channels, *positions)."""
        return self.left[start:stop].reshape(stop - start, -1, *output_space(images, self.cut))

    def squared_norms(self, scales: Tensor | None = None) -> Tensor:
        """Choose by cost as for linear layers; small positions and wide kernels take Gram matrices.

        scales (groups, channels, width): of gradients whose entries are multiplied by these, which no Gram matrix knows
        """
        if self.squares is not None:
            return self.squares
        try:
            return self._norms(scales)
        finally:
            self.buffer = None  # one layer's after the other

    def _norms(self, scales: Tensor | None) -> Tensor:
        inputs, outputs, positions = self.width, self.channels, self.positions
        pass_cost = NATIVE_PASS_COST if self.native else PASS_COST
        if scales is None and positions * positions * (inputs + outputs) <= pass_cost * inputs * outputs:
            return self._ghost_norms()
        size = self.groups * inputs * outputs * self.left.element_size()
        if scales is not None and size > CACHE_BYTES and not self.native:
            return self._scaled_norms(scales)
        self.formed = scales is None or size <= CACHE_BYTES  # how many records there are has no say in it
        return self._formed_norms(scales, self.formed and self.space.fits(self.records * size))

    def _formed_norms(self, scales: Tensor | None, room: bool) -> Tensor:
        """With the same guard whether they are stored or not: how many records there are must not change a norm."""
        if room:
            self.stored = self.space.take(self.left, self.records, self.groups * self.channels * self.width)
        if self.native and scales is None:
            norms = self._written(0, self.records, self.stored)
        else:
            norms = self.left.new_empty(self.records)
            for start, stop in self._pieces(formed=True):
                rows = self._alone(start, stop, None if self.stored is None else self.stored[start:stop])
                norms[start:stop] = squared_norms_of(rows if scales is None else rows * scales.reshape(-1))
        norms.add_(self._guard(scales))
        self.spreads = norms.sqrt() if self.formed else None
        if self.stored is not None:
            self.squares = norms
            self._let_go(norms)
        return norms

    def _written(self, start: int, stop: int, into: Tensor | None) -> Tensor:
        """Squared norms of the gradients of some records, which the native kernel writes, or throws away."""
        images, cut, padding = self.images, self.cut, self.cut.padding
        assert images is not None
        assert padding is not None
        left, images = self.left[start:stop].flatten(1, 2), images[start:stop]
        sizes = (cut.kernel, cut.stride, cut.dilation, padding)
        return patch_gradients(left, images, sizes, self.groups, output_space(images, cut), into)

    def _guard(self, scales: Tensor | None) -> Tensor:
        """What rounding may hide where norms and sums come from two products, of gradients whose entries are scaled.

        In every way but that of Gram matrices, stored or not: how many records fit must not change a norm.
        """
        largest = 1.0 if scales is None else float(scales.abs().max()) ** 2
        return self._squared_sizes().mul_(lost_in_squares(self.positions, self.left.dtype) * largest)

    def _squared_sizes(self) -> Tensor:
        """|left|^2 |patches|^2 or a little more, of every record."""
        assert self.images is not None
        if self.cut.mode != "constant":  # margins have numbers of their own
            found = self.left.new_empty(self.records)
            for start, stop in self._pieces():
                found[start:stop] = squared_sizes(self.left[start:stop], self._columns(start, stop))
            return found
        return squared_sizes(self.left, self.images).mul_(self.cut.times_read)

    def _let_go(self, norms: Tensor) -> None:
        """Both sides, unless there are records that are no numbers in this type: they are formed in a wider one."""
        if bool(norms.isfinite().all()):
            self.left, self.images = self.left.new_empty(0), None

    def _scaled_norms(self, scales: Tensor) -> Tensor:
        """As many channels at a time as stay in cache, of gradients that are too large to be formed at once."""
        norms = self._guard(scales)
        for start, stop in self._pieces():
            columns, left = self._columns(start, stop), self.left[start:stop]
            size = max(1, CACHE_BYTES // ((stop - start) * self.groups * self.width * left.element_size()))
            for first in range(0, self.channels, size):
                some = left[:, :, first : first + size]
                part = products_of(some.flatten(0, 1), columns.flatten(0, 1)).view(*some.shape[:3], self.width)
                norms[start:stop] += squared_norms_of(self._ordered(part) * scales[:, first : first + size])
        return norms

    def _ghost_norms(self) -> Tensor:
        norms, self.spreads = self.left.new_empty(self.records), self.left.new_empty(self.records)
        assert self.images is not None
        by_pixels = fewer_products(self.images, self.positions, self.cut)
        slack = lost_in_squares(self.channels + self.width + self.positions, self.left.dtype)
        for start, stop in self._pieces():
            left = self.left[start:stop].flatten(0, 1).transpose(1, 2)
            if by_pixels:
                grams = products_of(left, left.mT), gram_of_patches(self.images[start:stop], self.cut)
                each, spreads = norms_of_grams(*grams, (self.channels, self.width), slack)
            else:
                each, spreads = ghost_norms(left, self._columns(start, stop).flatten(0, 1))
            norms[start:stop] = each.view(stop - start, self.groups).sum(1)
            self.spreads[start:stop] = torch.linalg.vector_norm(spreads.view(stop - start, self.groups), dim=1)
        return norms

    def chain(self, records: int) -> int:
        if self.formed:
            return records
        together = min(records, self._together())
        return together * self.positions + -(-records // together)

    def _together(self) -> int:
        """How many records meet in one product."""
        if self.by_kernel:
            return self.records
        return max(1, min(self.space.budget, PRODUCT_BYTES) // self._record_bytes())

    def spread(self) -> Tensor:
        if self.spreads is None:
            self.spreads = self._squared_sizes().sqrt_()
        found: Tensor = self.spreads
        return found

    def lost(self) -> Tensor | None:
        """Every number of the left side is in every entry; of the images, some may be in none."""
        return None if self.images is None else not_finite(self.left)

    def chosen(self, where: Where) -> PatchSum:
        found = copy(self)
        if self.images is not None:
            found.left, found.images = self.left[where], self.images[where]
        found.stored, found.squares, found.spreads = (
            None if values is None else values[where] for values in (self.stored, self.squares, self.spreads)
        )
        found.records = len(found.left if found.stored is None else found.stored)
        found.buffer = None
        return found

    def widened(self) -> PatchSum:
        """The patches are widened as they are written out; what was formed before its norm was taken stays as it is."""
        found = copy(self)
        found.wide = True
        if not self.formed:
            found.native, found.by_kernel, found.left = False, False, self.left.double()
        found.stored, found.squares, found.spreads = (
            None if values is None else values.double() for values in (self.stored, self.squares, self.spreads)
        )
        found.buffer = None
        return found

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return {"weight": self.as_weight(self.summed(factors))}

    def summed(self, factors: Tensor) -> Tensor:
        """(groups, channels, width)"""
        if not self.formed:
            return self._products(factors, min(self.records, self._together()))
        total = self.left.new_zeros(self.groups * self.channels * self.width, dtype=factors.dtype)
        for start, stop in [(0, self.records)] if self.stored is not None else self._pieces(formed=True):
            total += factors[start:stop] @ self._rows(start, stop)
        return total.view(self.groups, self.channels, self.width)

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        total = self.summed_in_blocks(factors, size)
        return None if total is None else {"weight": self.as_weight(total)}

    def summed_in_blocks(self, factors: Tensor, size: int) -> Tensor | None:
        if not self.formed:
            return self._products(factors, size) if size <= self._together() else None
        total = None if self.stored is None else sum_in_blocks(factors, self.stored, size)
        return None if total is None else total.view(self.groups, self.channels, self.width)

    def _products(self, factors: Tensor, size: int) -> Tensor:
        """So many records meet in one product, and the products are added up; as many in one call as stay in cache."""
        if self.by_kernel:
            return self._fused_products(factors, size)
        total = self.space.take(self.left, self.groups, self.channels, self.width)
        bytes_each = self.groups * self.channels * self.width * self.left.element_size()
        blocks = max(1, min(self._together() // size, CACHE_BYTES // bytes_each, self.records // size))
        whole = self.records // size * size
        pieces = [(start, min(whole, start + blocks * size)) for start in range(0, whole, blocks * size)]
        for start, stop in [*pieces, (whole, self.records)] if whole < self.records else pieces:
            found = self._some_products(factors[start:stop], start, stop, min(size, stop - start))
            part = found[0] if len(found) == 1 else found.sum(0)
            # the product by itself and then the sum: a product onto a sum may add up in any order
            total.add_(part) if start else total.copy_(part)
        self.buffer = None
        return self._ordered(total)

    def _fused_products(self, factors: Tensor, size: int) -> Tensor:
        """The same by torch's kernel: the sum of a block in one call, which has memory of its own."""
        images, total = self.images, None
        assert images is not None
        for start in range(0, self.records, size):
            stop = min(self.records, start + size)
            left = self._planes(images, start, stop)
            left = left * expanded(factors[start:stop], left.dim())
            with exact_convolutions():
                part = weight_gradient(left, images[start:stop], self.cut)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.reshape(self.groups, self.channels, self.width)

    def _some_products(self, factors: Tensor, start: int, stop: int, size: int) -> Tensor:
        """The sums of blocks of records: (blocks, groups, channels, width)."""
        scaled = (self.left[start:stop] * expanded(factors, 4)).unflatten(0, (-1, size))
        left = scaled.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)  # records x positions last, as terms of a product
        columns = self._columns(start, stop).unflatten(0, (-1, size)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return torch.bmm(left, columns).view(-1, self.groups, self.channels, self.width)

    def as_weight(self, total: Tensor) -> Tensor:
        return self._as_weight(total.unsqueeze(0))[0]

    def from_weight(self, values: Tensor) -> Tensor:
        """Values in the shape of the weight as (groups, channels, width), in memory of their own."""
        if self.fused:
            return values.reshape(self.groups, self.channels, self.width).contiguous()
        return values.movedim(1, -1).reshape(self.groups, self.channels, self.width).contiguous()

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """(records, groups, channels, width) in the shape of the weight, (records, channels, inputs, *kernel)."""
        rows = (gradients.shape[0], self.groups * self.channels)
        if self.fused:
            return gradients.reshape(*rows, -1, *self.cut.kernel)
        return gradients.reshape(*rows, *self.cut.kernel, -1).movedim(-1, 2)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        found = {"weight": self._rows(start, stop) if self.formed else self._alone(start, stop)}
        if self.formed and self.wide and self.images is not None:
            found = in_double(found, lambda lost: {"weight": self._anew(lost + start)})
        shape = (-1, self.groups, self.channels, self.width)
        return {"weight": self._as_weight(found["weight"].view(shape))}

    def _anew(self, which: Tensor) -> Tensor:
        """Formed in double precision from the beginning."""
        found = self.chosen(which)
        found.stored, found.native, found.by_kernel, found.left = None, False, False, found.left.double()
        return found._alone(0, found.records)


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

    def lost(self) -> Tensor | None:
        return self.weight.lost()

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return self.weight.weighted(factors) | self.bias.weighted(factors)

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        weight, bias = self.weight.in_blocks(factors, size), self.bias.in_blocks(factors, size)
        return None if weight is None or bias is None else weight | bias

    def chosen(self, where: Where) -> Contribution:
        return WithBias(self.weight.chosen(where), self.bias.chosen(where))

    def widened(self) -> Contribution:
        return WithBias(self.weight.widened(), self.bias.widened())

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return self.weight.dense(start, stop) | self.bias.dense(start, stop)


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
    cut = Cut(layer, layer._reversed_padding_repeated_twice, mode)
    return with_bias(call, PatchSum(channel_groups(call.gradient, layer.groups), call.input, cut, call.space))


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
    left = channel_groups(call.input, layer.groups)
    return with_bias(call, PatchSum(left, call.gradient, Cut(layer, margins), call.space))
