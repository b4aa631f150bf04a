"""Look-ups: the gradient of one record has as many rows as it used indices.

dW = sum_t e_{index_t} g_t^T,     |dW|^2 = sum over pairs t, s with the same index of  g_t . g_s
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import UnclippableError
from confide.mechanism.clipping.rounding import lost_in_squares
from confide.mechanism.clipping.rules.registry import Call, Contribution, Where, not_finite, rule_for
from confide.mechanism.clipping.rules.squares import expanded, products, squared_norms_of

# With more positions than this, adding up the rows of equal indices is cheaper than comparing all pairs.
PAIRS = 32


class Rows(Contribution):
    """index (records, positions), values (records, positions, features) added to those rows of the weight."""

    names: tuple[str, ...] = ("weight",)

    def __init__(self, index: Tensor, values: Tensor, rows: int) -> None:
        self.index, self.values, self.rows, self.records = index, values, rows, index.shape[0]

    def squared_norms(self) -> Tensor:
        if self.index.shape[1] == 1:
            return squared_norms_of(self.values)
        if self.index.shape[1] <= PAIRS:
            same = self.index.unsqueeze(2) == self.index.unsqueeze(1)
            norms = (products(self.values, self.values.transpose(1, 2)) * same).sum((1, 2)).clamp_(min=0)
            width = self.values.shape[2]
        else:
            norms, width = self._norms_by_row(), 0
        # what cancels in a row is hidden from the norm by rounding, but not from the sum
        hidden = lost_in_squares(width + self.index.shape[1], norms.dtype)
        return norms.addcmul_(spread := self.spread(), spread, value=hidden)

    def _norms_by_row(self) -> Tensor:
        """Add up what one record sends to one row; the squares of these sums belong to the record."""
        owner = torch.arange(self.records, device=self.index.device).unsqueeze(1)
        places, inverse = torch.unique(owner * self.rows + self.index, return_inverse=True)
        sums = self.values.new_zeros(len(places), self.values.shape[2])
        sums.index_add_(0, inverse.flatten(), self.values.flatten(0, 1))
        norms = self.values.new_zeros(self.records)
        return norms.index_add_(0, places // self.rows, squared_norms_of(sums))

    def spread(self) -> Tensor:
        return squared_norms_of(self.values.flatten(0, 1)).sqrt_().view(self.index.shape).sum(1)

    def lost(self) -> Tensor | None:
        return not_finite(self.values)

    def chain(self, records: int) -> int:
        """No more than the most frequent index has in all."""
        if not self.index.numel():
            return 1
        return min(records * self.index.shape[1], int(torch.bincount(self.index.flatten()).max()))

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return self.in_blocks(factors, max(1, self.records))

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor]:
        places, sums = self.sums(factors, size)
        return {"weight": sums.new_zeros(self.rows, sums.shape[1]).index_copy_(0, places, sums)}

    def sums(self, factors: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The rows that are looked up, each once, and their weighted sums: blocks of `size` records, then all of
        them."""
        scaled = self.values * expanded(factors, 3)
        places, inverse = torch.unique(self.index, return_inverse=True)
        total = scaled.new_zeros(len(places), scaled.shape[2])
        for start in range(0, self.records, size):
            some = slice(start, start + size)
            onto = total if start == 0 else torch.zeros_like(total)
            onto.index_add_(0, inverse[some].flatten(), scaled[some].flatten(0, 1))
            if start:
                total += onto
        return places, total

    def add_onto(self, places: dict[str, Tensor], factors: Tensor, size: int) -> bool:
        """Only the rows that are looked up are touched, each once."""
        if any(value.dtype != factors.dtype for value in (self.values, *places.values())):
            return False
        where, sums = self.sums(factors, size)
        for name, part in zip(self.names, sums.chunk(len(self.names), -1), strict=True):
            places[name].index_add_(0, where, part)
        return True

    def chosen(self, where: Where) -> Contribution:
        return self._alike(self.index[where], self.values[where])

    def widened(self) -> Contribution:
        return self._alike(self.index, self.values.double())

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        index, values = self.index[start:stop], self.values[start:stop]
        weight = values.new_zeros(stop - start, self.rows, values.shape[2])
        return {"weight": weight.scatter_add_(1, index.unsqueeze(2).expand_as(values), values)}

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        parts = [self, *(other for other in others if isinstance(other, Rows))]
        if len(parts) <= len(others):
            return None
        index = torch.cat([part.index for part in parts], 1)
        return self._alike(index, torch.cat([part.values for part in parts], 1))

    def _alike(self, index: Tensor, values: Tensor) -> Rows:
        return Rows(index, values, self.rows)


class MeanFieldRows(Rows):
    """The same for several tables of one shape side by side: values (records, positions, tables x features)."""

    def __init__(self, index: Tensor, values: Tensor, rows: int, names: Sequence[str]) -> None:
        super().__init__(index, values, rows)
        self.names = tuple(names)

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor]:
        return self._apart(super().in_blocks(factors, size)["weight"])

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return self._apart(super().dense(start, stop)["weight"])

    def _apart(self, weight: Tensor) -> dict[str, Tensor]:
        parts = weight.chunk(len(self.names), -1)
        return {name: part.contiguous() for name, part in zip(self.names, parts, strict=True)}

    def _alike(self, index: Tensor, values: Tensor) -> Rows:
        return MeanFieldRows(index, values, self.rows, self.names)


def without_padding(values: Tensor, index: Tensor, padding: int | None) -> Tensor:
    return values if padding is None else values * (index != padding).unsqueeze(-1)


@rule_for(nn.Embedding, parameters=("weight",), positions=True)
def embedding(call: Call) -> Contribution:
    layer: Any = call.layer
    index = call.input.reshape(call.records, -1)
    values = call.gradient.reshape(call.records, -1, layer.embedding_dim)
    return Rows(index, without_padding(values, index, layer.padding_idx), layer.num_embeddings)


@rule_for(nn.EmbeddingBag, parameters=("weight",))
def embedding_bag(call: Call) -> Contribution:
    """A bag is a weighted sum of look-ups: of ones, of 1 / count, or of the places where the maximum was found."""
    layer: Any = call.layer
    index = call.input
    offsets, weights = bag_arguments(call)
    if offsets is not None or index.dim() != 2:
        raise UnclippableError("EmbeddingBag: offsets cut records apart by position; give indices (records, positions)")
    used = torch.ones_like(index, dtype=call.gradient.dtype)
    if layer.padding_idx is not None:
        used = (index != layer.padding_idx).to(used)
    if layer.mode == "max":
        share = places_of_maximum(layer, index, used)
    elif layer.mode == "mean":
        share = (used / used.sum(1, keepdim=True).clamp_(min=1)).unsqueeze(2)
    else:
        share = (used if weights is None else used * weights).unsqueeze(2)
    return Rows(index, call.gradient.unsqueeze(1) * share, layer.num_embeddings)


def bag_arguments(call: Call) -> tuple[Any, Any]:
    names = ("offsets", "per_sample_weights")
    given = dict(zip(names, call.inputs[1:], strict=False)) | call.keywords
    return given.get("offsets"), given.get("per_sample_weights")


def places_of_maximum(layer: nn.EmbeddingBag, index: Tensor, used: Tensor) -> Tensor:
    """One where a feature's maximum was first found, zero elsewhere: (records, positions, features)."""
    values = F.embedding(index, layer.weight).masked_fill(used.unsqueeze(2) == 0, -torch.inf)
    winner = values.argmax(1, keepdim=True)
    places = torch.zeros_like(values).scatter_(1, winner, 1.0)
    return places * used.unsqueeze(2)
