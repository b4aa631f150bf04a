"""Trees of tensors: nested tuples, lists and dictionaries, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


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
