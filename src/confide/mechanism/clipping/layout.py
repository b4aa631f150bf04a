"""Where the records are in a tensor.

Inside a network the records need not be on axis 0: a transformer may run positions first, a window attention
folds windows into the batch, several weight draws are stacked as (draws x records). A `Layout` says which axis
carries the records, how many rows of it belong to one record, and in which order they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Layout:
    """Records on `axis`, `fold` rows each; `outer`: the fold runs slower than the records, as in (draws, records)."""

    axis: int = 0
    fold: int = 1
    outer: bool = False

    @property
    def plain(self) -> bool:
        return self.axis == 0 and self.fold == 1

    def records_first(self, values: Tensor) -> Tensor:
        """(records, ...), or (records, fold, ...) where a record has several rows."""
        moved = values.movedim(self.axis, 0)
        if self.fold == 1:
            return moved
        rows = moved.shape[0]
        if self.outer:
            return moved.reshape(self.fold, rows // self.fold, *moved.shape[1:]).transpose(0, 1)
        return moved.reshape(rows // self.fold, self.fold, *moved.shape[1:])

    def rows_first(self, values: Tensor) -> Tensor:
        """(records, fold, ...) always, so that one record can be put back with `restored`."""
        first = self.records_first(values)
        return first.unsqueeze(1) if self.fold == 1 else first

    def chosen(self, values: Tensor, records: Tensor) -> Tensor:
        """The same layout with some of the records only."""
        if self.fold == 1:
            return values.index_select(self.axis, records)
        total = values.shape[self.axis] // self.fold
        steps = torch.arange(self.fold, device=records.device)
        if self.outer:
            rows = (steps[:, None] * total + records).flatten()
        else:
            rows = (records[:, None] * self.fold + steps).flatten()
        return values.index_select(self.axis, rows)

    def restored(self, rows: Tensor) -> Tensor:
        """One record's rows (fold, ...) as the layer expects them."""
        return rows.movedim(0, self.axis)


PLAIN = Layout()


@dataclass(frozen=True)
class CallLayout:
    """The layouts of all tensors of one call, in flattened order; None for a tensor without records."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    draws: tuple[Layout | None, ...] = ()

    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        places = (*self.inputs, *self.outputs)
        object.__setattr__(self, "plain", all(place is not None and place.plain for place in places))

    def fits(self, shapes: Sequence[torch.Size], records: int) -> bool:
        """Whether outputs of these shapes can be laid out like this for that many records."""
        if self.plain and len(shapes) == 1:
            return shapes[0][0] == records
        return len(shapes) == len(self.outputs) and all(
            place is None or (len(shape) > place.axis and shape[place.axis] == place.fold * records)
            for shape, place in zip(shapes, self.outputs, strict=True)
        )


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in a fixed order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Any, tree: Any, *values: Sequence[Any]) -> Any:
    """Apply `function(tensor, *parallel values)` to every tensor of a tree, in the order of `tensors_in`."""
    leaves, structure = pytree.tree_flatten(tree)
    position = 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[index] = function(leaf, *(value[position] for value in values))
            position += 1
    return pytree.tree_unflatten(leaves, structure)
