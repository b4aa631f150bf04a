"""Records given as lists of Python: each is looked at by itself, so that none decides whether all of them can be read.

numpy makes an array of all rows or of none. Where it makes none, a row of another shape and a cell that is no number
are missing, and what is missing counts for nothing. Of a kind that no row fits the callers say what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from confide.data.table import as_numbers

# What is missing among whole numbers: no token, no class, and beyond all bounds.
MISSING = np.iinfo(np.int64).min


def rows_of_numbers(rows: Any, features: int | None = None, tokens: bool = False) -> Any:
    """(records, ...) of numbers. The shape of a row is the declared one, or that of most rows.

    tokens   rows of whole numbers stay whole, for a network that looks them up
    """
    if not _is_loose(rows):
        return rows
    shapes = [_shape_of(row) for row in rows]
    usual = Counter(shapes).most_common(1)[0][0] if shapes else None
    shape = (features,) if features and usual is not None and len(usual) == 1 else usual
    if not shape:
        return rows
    found = np.full((len(shapes), *shape), np.nan)
    kinds = set()
    for place, row in enumerate(rows):
        cells = np.asarray(row) if shapes[place] == shape else None
        if cells is not None and cells.dtype.kind != "c":
            found[place] = as_numbers(cells.astype(object).ravel(), "X", private=True).reshape(shape)
            kinds.add(cells.dtype.kind)
    if np.isnan(found.reshape(len(found), -1)).any(1).all():
        return rows  # not one row: a kind, not a record
    return np.nan_to_num(found, nan=MISSING).astype(np.int64) if tokens and kinds <= set("biu") else found


def one_each(values: Any) -> Any:
    """Labels or weights, one for each record: one that is a list, an array or complex is missing."""
    if not _is_loose(values) or isinstance(values, np.ndarray):
        return values
    found = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        found[place] = value if isinstance(value, str) or not hasattr(value, "__len__") else None
    return values if all(value is None for value in found) else found


def _is_loose(values: Any) -> bool:
    """Whether numpy makes no array of numbers of it."""
    if not isinstance(values, list | tuple) and getattr(getattr(values, "dtype", None), "kind", "") not in tuple(
        "OUSc"
    ):
        return False
    with suppress(ValueError, TypeError):
        return np.asarray(values).dtype.kind not in "biuf"
    return True


def _shape_of(row: Any) -> tuple[int, ...] | None:
    try:
        return None if isinstance(row, Mapping) else np.shape(row)
    except (ValueError, TypeError):
        return None
