"""Records given as lists of Python: each is read by itself and by what is declared, so that none decides for others.

An array has one shape and one type, whoever is in it. A list has neither before its records are looked at, so that both
must be declared: how many numbers a record has, and whether they are ids. A row of another shape, and a cell that is no
such number, are missing, and what is missing counts for nothing. Nothing is refused for what rows hold: where not one
of them can be read, whoever may see the records is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from confide.data.schema import Schema
from confide.data.table import Array, as_numbers
from confide.data.trees import is_composed
from confide.errors import DataError, NothingToLearn

# What is missing among whole numbers: no token, no class, and beyond all bounds.
MISSING = np.iinfo(np.int64).min
_EXACT = 2.0**53  # whole numbers below it are floats too


def read_rows(x: Any, schema: Schema, raw: bool = False) -> Any:
    """Records, with arrays of numbers in the place of lists.

    raw   rows as a table has them, with one cell for each column; encoded, a column may be several numbers
    """
    ids = {name for name, one in schema.inputs if one.vocabulary is not None}
    if isinstance(x, Mapping) and is_composed(x):
        return {name: rows_of_numbers(part, None, f"x[{name!r}]", ids=name in ids) for name, part in x.items()}
    if is_composed(x):
        return x
    features = len(schema.columns) if raw and schema.columns else schema.features
    shape = schema.shape or (None if features is None else (features,))
    return rows_of_numbers(x, shape, "X" if raw else "x", ids="0" in ids)


def rows_of_numbers(rows: Any, shape: tuple[int, ...] | None, where: str = "X", ids: bool = False) -> Any:
    """(records, *shape) of numbers; arrays and tensors of numbers as they are.

    shape   of one row, as declared; an array of cells has its own
    ids     whole numbers, for a network that looks them up
    """
    if not is_loose(rows):
        return rows
    if isinstance(rows, np.ndarray) and rows.ndim > 1:
        shape = rows.shape[1:]
    if shape is None:
        raise DataError(
            f"{where}: is a list, and how many numbers a record has would be read off the records; give an array, such "
            "as numpy.asarray(...), or declare shape= in the schema"
        )
    found = _numbers_of(rows, shape, where)
    if ids:
        found[(found != np.floor(found)) | (np.abs(found) >= _EXACT)] = np.nan
    if len(found) and np.isnan(found.reshape(len(found), -1)).any(1).all():
        said = (
            f"{where}: not one row is {' x '.join(map(str, shape))} numbers, as declared, and a fit would cost the "
            "same; columns of text are for data frames, by their names in schema="
        )
        warnings.warn(said, NothingToLearn, stacklevel=4)
    return np.nan_to_num(found, nan=MISSING).astype(np.int64) if ids else found


def _numbers_of(rows: Any, shape: tuple[int, ...], where: str) -> Array:
    """Numbers, NaN for what is missing. Where numpy reads all rows at once it reads each as it would alone."""
    at_once = _cells(rows)
    if at_once is not None and at_once.dtype.kind in "biuf" and at_once.shape[1:] == shape:
        return as_numbers(at_once, where)
    found = np.full((len(rows), *shape), np.nan)
    for place, row in enumerate(rows):
        cells = _cells(row)
        if cells is not None and cells.shape == shape and cells.dtype.kind != "c":
            found[place] = as_numbers(cells.astype(object).ravel(), where, private=True).reshape(shape)
    return found


def one_each(values: Any) -> Any:
    """Labels or weights, one for each record: one that is several, or a mapping, is missing. Arrays as they are."""
    if not is_loose(values) or isinstance(values, np.ndarray):
        return values
    found = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        found[place] = _only(value)
    return found


def is_loose(values: Any) -> bool:
    """Whether it has no type of numbers before its records are looked at: a list, or an array of objects or texts."""
    if isinstance(values, list | tuple):
        return True
    kind = values.dtype.kind if isinstance(values, np.ndarray) else ""
    return kind == "O" or (kind in ("U", "S") and values.ndim > 1)


def _only(value: Any) -> Any:
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    if isinstance(value, Mapping):
        return None
    cells = _cells(value)
    return None if cells is None or cells.size != 1 else cells.astype(object).ravel()[0]


def _cells(row: Any) -> Array | None:
    """A row as an array; None for what is none."""
    if isinstance(row, Mapping):
        return None
    try:
        return np.asarray(row.detach().cpu() if isinstance(row, Tensor) else row)
    except Exception:  # an object may have its own way of being a number, which may raise anything
        return None
