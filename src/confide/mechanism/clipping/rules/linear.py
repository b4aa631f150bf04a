"""Linear layers: the gradient of one record is a sum of outer products.

With input a_t and output gradient g_t at position t of a record (one position in the ordinary case)

    dW = sum_t g_t a_t^T,    db = sum_t g_t.

One position: |dW|^2 + |db|^2 = (|a|^2 + 1) |g|^2, and the clipped sum is one product with a side scaled.
Several positions: |dW|^2 = sum_{t,s} (a_t . a_s)(g_t . g_s), the "ghost" norm (Goodfellow 2015; Li et al. 2022,
ICLR; book-keeping: Bu et al. 2023, ICML), or the outer sums formed in full, whichever costs less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from confide._native.arithmetic import add_outer, gram_norms
from confide.mechanism.clipping.factors import PRECISION, guard
from confide.mechanism.clipping.rounding import lost_in_squares
from confide.mechanism.clipping.rules.formed import in_double
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Where, not_finite, rule_for
from confide.mechanism.clipping.rules.squares import chunks, expanded, products, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace

# Storing per-record gradients and passing over them costs about this many multiply-adds per entry (measured on two
# threads; memory does not get faster with them).
PASS_COST = 80
# Where gradients of all records are larger than both sides of their products, they decide how much memory a step needs:
# they are worth twice that.
LARGE_PASS = 2 * PASS_COST
# Buffers of this size stay in cache between the product that fills them and the sum that reads them.
CACHE_BYTES = 2 << 20


class OuterProduct(Contribution):
    """One outer product per record: left (records, outputs), right (records, inputs).

    A left side that is `ours` is overwritten by the weighted sum, which then needs no memory.
    """

    def __init__(self, left: Tensor, right: Tensor, bias: bool, space: Workspace, ours: bool = False) -> None:
        self.left, self.right, self.bias, self.space, self.ours = left, right, bias, space, ours
        self.records = left.shape[0]
        self.squares: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """Worked out once: the left side may be overwritten later."""
        if self.squares is None:
            self.squares = self._squared_norms()
        return self.squares

    def _squared_norms(self) -> Tensor:
        left, right = self.left, self.right
        extra = 1.0 if self.bias else guard(right.shape[1], right.dtype)
        of_left = squared_norms_of(left).add_(guard(left.shape[1], left.dtype))
        return squared_norms_of(right).add_(extra).mul_(of_left)

    def spread(self) -> Tensor:
        return self.squared_norms().sqrt()

    def lost(self) -> Tensor | None:
        return not_finite(self.left)

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        left, right = self.left, self.right
        column = factors.unsqueeze(1)
        weight = self.space.take(left, left.shape[1], right.shape[1])
        if right.shape[1] < left.shape[1] and not self.ours:  # scale the narrower side
            found = {"weight": torch.mm(left.t(), right * column, out=weight)}
            return found | {"bias": torch.mv(left.t(), factors)} if self.bias else found
        scaled = left.mul_(column) if self.ours else left * column
        found = {"weight": torch.mm(scaled.t(), right, out=weight)}
        return found | {"bias": scaled.sum(0)} if self.bias else found

    def add_onto(self, places: dict[str, Tensor], factors: Tensor, size: int) -> bool:
        weight = places["weight"].view(self.left.shape[1], self.right.shape[1])
        bias = places["bias"] if self.bias else None
        return add_outer(self.left, self.right, factors, weight, bias, size, self.space)

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        blocks = self.records // size
        if blocks * self.left.shape[1] * self.right.shape[1] * self.left.element_size() > CACHE_BYTES:
            return None
        scaled = self.left.mul_(factors.unsqueeze(1)) if self.ours else self.left * factors.unsqueeze(1)
        whole = blocks * size
        sides = [side[:whole].unflatten(0, (blocks, size)) for side in (scaled, self.right)]
        found = {"weight": torch.bmm(sides[0].mT, sides[1]).sum(0)}
        if self.bias:
            found["bias"] = sides[0].sum(1).sum(0)
        if whole < self.records:
            found["weight"] += torch.mm(scaled[whole:].t(), self.right[whole:])
            if self.bias:
                found["bias"] += scaled[whole:].sum(0)
        return found

    def chosen(self, where: Where) -> Contribution:
        return OuterProduct(self.left[where], self.right[where], self.bias, self.space, self.ours)

    def widened(self) -> Contribution:
        return OuterProduct(self.left.double(), self.right.double(), self.bias, self.space, True)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        left, right = self.left[start:stop], self.right[start:stop]
        weight = left.unsqueeze(2) * right.unsqueeze(1)
        return {"weight": weight, "bias": left} if self.bias else {"weight": weight}

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        return merge_outer_products(self, others)


class OuterSum(Contribution):
    """A sum of outer products per record: left (records, positions, outputs), right (records, positions, inputs).

    Where its norm is that of a gradient that was `formed`, that gradient is what counts (`formed`).
    """

    def __init__(self, left: Tensor, right: Tensor, bias: bool, space: Workspace) -> None:
        self.left, self.right, self.bias, self.space = left, right, bias, space
        self.records = left.shape[0]
        self.biases = left.sum(1) if bias else None
        self.formed = self.wide = False
        self.stored: Tensor | None = None
        self.spreads: Tensor | None = None  # of the weight, as far as they are known

    def chain(self, records: int) -> int:
        return records if self.formed else records * self.left.shape[1]

    def spread(self) -> Tensor:
        if self.spreads is None:
            self.spreads = squared_sizes(self.left, self.right).sqrt_()
        found: Tensor = self.spreads
        return found if self.biases is None else (found.square() + squared_norms_of(self.biases)).sqrt_()

    def lost(self) -> Tensor | None:
        return not_finite(self.left)

    def squared_norms(self) -> Tensor:
        norms = self._weight_norms()
        return norms if self.biases is None else norms + squared_norms_of(self.biases)

    def _weight_norms(self) -> Tensor:
        """Choose by cost: store all outer sums, or position-by-position Gram matrices, or pieces thrown away."""
        positions, outputs, inputs = *self.left.shape[1:], self.right.shape[2]
        entries = inputs * outputs
        stored_cost = (LARGE_PASS if entries > positions * (inputs + outputs) else PASS_COST) * entries
        if positions * positions * (inputs + outputs) <= stored_cost:
            return self._ghost_norms()
        size = entries * self.left.element_size()
        if size <= self.space.budget:
            return self._formed_norms(size)
        return self._ghost_norms()

    def _formed_norms(self, size: int) -> Tensor:
        """Form every record's gradient, squaring each piece while it is in cache; stored where all have room."""
        outputs, inputs = self.left.shape[2], self.right.shape[2]
        self.formed = True
        if self.space.fits(self.records * size):
            self.stored = self.space.take(self.left, self.records, outputs * inputs)
        norms = self.left.new_empty(self.records)
        for start, stop in chunks(self.records, size, CACHE_BYTES):
            room = None if self.stored is None else self.stored[start:stop].view(-1, outputs, inputs)
            norms[start:stop] = squared_norms_of(self._products_of_each(start, stop, room))
        norms.add_(rounding_guard(self.left, self.right, self.left.shape[1]))
        self.spreads = norms.sqrt()
        return norms

    def _products_of_each(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Every record's own product, (records, outputs, inputs): the same bits whoever else is in the call."""
        return products(self.left[start:stop].transpose(1, 2), self.right[start:stop], out)

    def _ghost_norms(self) -> Tensor:
        size = 2 * self.left.shape[1] ** 2 * self.left.element_size()
        norms, self.spreads = self.left.new_empty(self.records), self.left.new_empty(self.records)
        for start, stop in chunks(self.records, size, self.space.budget):
            norms[start:stop], self.spreads[start:stop] = ghost_norms(self.left[start:stop], self.right[start:stop])
        return norms

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        if self.stored is not None:
            weight = (factors @ self.stored.to(factors.dtype)).view(self.left.shape[2], self.right.shape[2])
        else:
            weight = self._sum_of_formed(factors) if self.formed else self._products(factors)
        return {"weight": weight} if self.biases is None else {"weight": weight, "bias": factors @ self.biases}

    def add_onto(self, places: dict[str, Tensor], factors: Tensor, size: int) -> bool:
        return self.add_product(places["weight"], places.get("bias"), factors, size)

    def add_product(
        self, weight: Tensor, bias: Tensor | None, factors: Tensor, size: int, turned: bool = False
    ) -> bool:
        """The same by the native kernel, to which every position is a record; onto a weight that may be `turned`."""
        if self.formed:
            return False
        sides = [self.left.flatten(0, 1), self.right.flatten(0, 1)]
        left, right = sides[::-1] if turned else sides
        positions = self.left.shape[1]
        each = factors.repeat_interleave(positions)
        if not add_outer(left, right, each, weight.view(left.shape[1], -1), None, size * positions, self.space):
            return False
        if self.biases is not None:
            assert bias is not None
            bias.add_(_sum_of_blocks(factors, self.biases, size))
        return True

    def chosen(self, where: Where) -> Contribution:
        found = OuterSum(self.left[where], self.right[where], False, self.space)
        found.bias, found.biases = self.bias, None if self.biases is None else self.biases[where]
        found.formed, found.wide = self.formed, self.wide
        found.stored = None if self.stored is None else self.stored[where]
        found.spreads = None if self.spreads is None else self.spreads[where]
        return found

    def widened(self) -> Contribution:
        found = OuterSum(*self._sides_for_sums(), False, self.space)
        # what was formed before its norm was taken stays as it is
        found.bias, found.biases = self.bias, None if self.biases is None else self.biases.double()
        found.formed, found.wide = self.formed, True
        found.stored, found.spreads = (
            None if values is None else values.double() for values in (self.stored, self.spreads)
        )
        return found

    def _sides_for_sums(self) -> tuple[Tensor, Tensor]:
        return (self.left, self.right) if self.formed else (self.left.double(), self.right.double())

    def _sum_of_formed(self, factors: Tensor) -> Tensor:
        """Gradients are formed once more, bit by bit as they were for their norms."""
        weight = self.left.new_zeros(self.left.shape[2], self.right.shape[2], dtype=factors.dtype)
        for start, stop in chunks(self.records, weight.numel() * self.left.element_size(), CACHE_BYTES):
            each = self._products_of_each(start, stop).flatten(1).to(factors.dtype)
            weight += (factors[start:stop] @ each).view_as(weight)
        return weight

    def _products(self, factors: Tensor) -> Tensor:
        """One product over the positions of all records, the narrower side scaled, a piece that fits into the cache."""
        left, right, column = self.left, self.right, expanded(factors, 3)
        weight = self.space.take(left, left.shape[2], right.shape[2]).zero_()
        narrow_right = right.shape[2] < left.shape[2]
        size = left.shape[1] * min(left.shape[2], right.shape[2]) * left.element_size()
        for start, stop in chunks(self.records, size, CACHE_BYTES):
            some_left, some_right, some = left[start:stop], right[start:stop], column[start:stop]
            if narrow_right:
                some_right = some_right * some
            else:
                some_left = some_left * some
            weight.addmm_(some_left.flatten(0, 1).t(), some_right.flatten(0, 1))
        return weight

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        found = {"weight": self._products_of_each(start, stop)}
        if self.formed and self.wide:
            found = in_double(found, lambda lost: self._anew(lost + start))
        return found if self.biases is None else found | {"bias": self.biases[start:stop]}

    def _anew(self, which: Tensor) -> dict[str, Tensor]:
        return {"weight": products(self.left[which].double().transpose(1, 2), self.right[which].double())}

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        return merge_outer_products(self, others)


def _sum_of_blocks(factors: Tensor, rows: Tensor, size: int) -> Tensor:
    """sum_i factors[i] rows[i], at most `size` in one product."""
    total = factors[:size] @ rows[:size]
    for start in range(size, len(rows), size):
        total += factors[start : start + size] @ rows[start : start + size]
    return total


def ghost_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """|sum_t left_t right_t^T|^2 through the Gram matrices of the positions, and |left| |right|, at least its spread.

    The terms may cancel and tiny ones may have been lost; what that could hide is added, so that no record passes
    with a norm that is too small.
    """
    precision = PRECISION[left.dtype]
    slack = lost_in_squares(left.shape[2] + right.shape[2] + left.shape[1], left.dtype)
    native = gram_norms(left, right, slack, precision.tiny)
    if native is not None:
        return native
    gram_left = products(left, left.transpose(1, 2))
    gram_right = products(right, right.transpose(1, 2))
    return norms_of_grams(gram_left, gram_right, (left.shape[2], right.shape[2]), slack)


def norms_of_grams(
    gram_left: Tensor, gram_right: Tensor, features: tuple[int, int], slack: float
) -> tuple[Tensor, Tensor]:
    """The same of Gram matrices (records, positions, positions) of so many features on either side."""
    norms = (gram_left * gram_right).sum((1, 2)).clamp_(min=0)
    of_left, of_right = (gram.diagonal(dim1=1, dim2=2).sum(1) for gram in (gram_left, gram_right))
    lost_left, lost_right = (guard(gram_left.shape[1] * width, gram_left.dtype) for width in features)
    norms.addcmul_(of_left, of_right, value=slack)
    norms.add_(of_right, alpha=lost_left).add_(of_left, alpha=lost_right).add_(lost_left * lost_right)
    return norms, of_left.add_(lost_left).mul_(of_right.add_(lost_right)).sqrt_()


def rounding_guard(left: Tensor, right: Tensor, terms: int) -> Tensor:
    """What rounding may hide when norms and sums come from two different products."""
    return squared_sizes(left, right).mul_(lost_in_squares(terms, left.dtype))


def squared_sizes(left: Tensor, right: Tensor) -> Tensor:
    """|left|^2 |right|^2 of every record, with what underflow may have hidden from either."""
    of_left, of_right = (squared_norms_of(side).add_(guard(side[0].numel(), side.dtype)) for side in (left, right))
    return of_left.mul_(of_right)


def merge_outer_products(first: OuterProduct | OuterSum, others: Sequence[Contribution]) -> Contribution | None:
    """Several calls of one layer are one call with the positions of all of them."""
    parts = [first]
    for other in others:
        if not isinstance(other, OuterProduct | OuterSum) or other.bias != first.bias:
            return None
        parts.append(other)
    left = torch.cat([with_positions(part.left) for part in parts], 1)
    right = torch.cat([with_positions(part.right) for part in parts], 1)
    return OuterSum(left, right, first.bias, first.space)


def with_positions(values: Tensor) -> Tensor:
    """(records, ..., features) as (records, positions, features)."""
    return values.unsqueeze(1) if values.dim() == 2 else values.reshape(values.shape[0], -1, values.shape[-1])


@rule_for(nn.Linear, parameters=("weight", "bias"), positions=True)
def linear(call: Call) -> Contribution:
    left, right = call.gradient, call.input
    if "weight" not in call.trainable:
        return Dense({"bias": with_positions(left).sum(1)})
    bias = "bias" in call.trainable
    if left.dim() == 2:
        return OuterProduct(left, right, bias, call.space)
    return OuterSum(with_positions(left), with_positions(right), bias, call.space)
