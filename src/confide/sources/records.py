"""Records as the boundary keeps them: tensors of features and targets, and which records can answer at all.

Nothing here raises because of what one record holds: a record that cannot answer is kept out of every sum. What is
refused are shapes and types, which are the same whoever is in the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.data import trees
from confide.data.labels import NO_LABEL
from confide.data.rows import one_each, read_rows, rows_of_numbers
from confide.data.schema import Schema
from confide.data.table import as_numbers
from confide.data.trees import Tree
from confide.errors import Refusal


def as_records(x: Any, y: Any, schema: Schema) -> tuple[Tree, Tensor, Tensor]:
    """Tensors of features and targets, and which records can answer at all."""
    features, targets = trees.tree_of(read_rows(x, schema)), trees.tree_of(_numbers(y, schema))
    if not isinstance(targets, Tensor):
        raise Refusal(f"y: has {len(targets)} tensors per record; give one tensor of targets")
    if trees.size_of(features) != len(targets):
        raise Refusal(
            f"x of {_shapes(features)} and y of shape {tuple(targets.shape)}: need one row of x and one entry of y per "
            "record"
        )
    features, valid = trees.checked(features, schema.inputs)
    targets, usable = _as_targets(targets, schema, _real_type(features))
    return features, targets, valid & usable


def as_weights(weights: Any, records: int) -> tuple[Tensor | None, Tensor | None]:
    """Weights within [0, 1], and which of them are numbers; those outside are moved to the nearer end."""
    if weights is None:
        return None, None
    found = torch.as_tensor(_one_number_each(weights), dtype=torch.float64)
    if found.shape != (records,):
        raise Refusal(f"weights of shape {tuple(found.shape)}: need one number per record")
    return found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(0, 1).float(), torch.isfinite(found)


def _numbers(y: Any, schema: Schema) -> Any:
    """As many numbers for each record as targets are declared; where one of them is none it is missing."""
    several = len(schema.targets) or (2 if schema.observed else 0)
    return rows_of_numbers(y, (several,), "y") if several else _one_number_each(y)


def _one_number_each(values: Any) -> Any:
    """One number for each record; where one of them is none it is missing, and the others are as they were."""
    loose = one_each(values)
    if not isinstance(loose, np.ndarray) or loose.dtype.kind != "O" or loose.ndim != 1:
        return loose
    return as_numbers(loose, "y", private=True)


def _shapes(tree: Tree) -> str:
    shapes = [tuple(tensor.shape) for tensor in trees.tensors_in(tree)]
    return f"shape {shapes[0]}" if isinstance(tree, Tensor) else f"shapes {shapes}"


def _real_type(tree: Tree) -> torch.dtype:
    """Of real targets: double precision beside plain features in double precision."""
    return torch.float64 if isinstance(tree, Tensor) and tree.dtype == torch.float64 else torch.float32


def _as_targets(targets: Tensor, schema: Schema, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = schema.class_count
    if count is not None:
        known = torch.isfinite(targets.double()) & (targets >= 0) & (targets < count)
        known &= targets.double() == targets.double().floor()
        if targets.ndim > 1:  # labels of tokens, of which some have none
            known |= targets == NO_LABEL
        kept = torch.where(known, targets, torch.zeros_like(targets)).to(torch.int64)
        return kept, known.flatten(1).all(1) if targets.ndim > 1 else known
    targets = targets.to(dtype)
    usable = torch.isfinite(targets.flatten(1) if targets.ndim > 1 else targets[:, None]).all(1)
    return torch.nan_to_num(targets, nan=0.0, posinf=0.0, neginf=0.0), usable
