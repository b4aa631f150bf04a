"""Frames and labels as users of scikit-learn give them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.multiclass import type_of_target
from torch import Tensor

from confide.data.loaders import checked_names
from confide.data.schema import Schema
from confide.data.table import Array, Table, listed
from confide.errors import ColumnsLeftOut, Refusal

# What scikit-learn and numpy say of an array whose cells are no numbers, some of it with the cells behind it.
_WORDS = ("could not convert", "arrays of bytes/strings", "Cannot cast")


def on_host(values: Any) -> Any:
    """A tensor of torch without its history and its device; anything else as it is."""
    return values.detach().cpu() if isinstance(values, Tensor) else values


def sorted_labels(classes: tuple[Any, ...]) -> tuple[Any, ...]:
    """scikit-learn's metrics take the columns of probabilities to be in the order of the sorted labels."""
    return tuple(np.unique(np.asarray(classes)).tolist())


def labels_seen(table: Table) -> Any:
    assert table.labels is not None  # a training table has them
    labels = table.labels
    if labels.dtype.kind == "f" and type_of_target(labels) in ("binary", "multiclass"):
        labels = labels.astype(np.int64)
    return np.unique(labels.astype(str) if labels.dtype.kind == "O" else labels).tolist()


def labels_of(table: Table) -> Array:
    assert table.labels is not None  # a training table has them
    return table.labels


def declared(frame: Any, facts: Schema, assume_public: bool = False) -> Any:
    """A frame without the columns that the facts leave out: those to ignore, and where columns are declared by name and
    nothing is said of others, all others."""
    names = names_of(frame)
    extra = {name for name in names if name in facts.ignore}
    if facts.columns and facts.bounds is None and not assume_public:
        roles = {facts.target, facts.observed, facts.weight, *(name for name, _ in facts.targets)}
        others = [name for name in names if name not in roles | {column.raw for column in facts.columns} | extra]
        if others:
            said = f"X: {listed(others)} not declared, and left out; declare what is to be learnt from"
            warnings.warn(said, ColumnsLeftOut, stacklevel=5)
        extra |= set(others)
    return frame if not extra else only(frame, [name for name in names if name not in extra])


def names_of(frame: Any) -> list[Any]:
    """The names of a frame's columns; an Arrow table has its columns themselves under that name."""
    return list(getattr(frame, "column_names", None) or frame.columns)


def only(frame: Any, names: list[str]) -> Any:
    return frame.select(names) if hasattr(frame, "column_names") else frame[names]


@contextmanager
def without_cells(X: Any) -> Iterator[None]:
    """Refuse what is no table of numbers in words of our own: scikit-learn's would quote private cells."""
    first = X[0] if isinstance(X, list | tuple) and X else None
    if isinstance(first, Mapping):
        raise Refusal("X: is a list of dictionaries; give a data frame, such as pandas.DataFrame(X)")
    if getattr(X, "ndim", 2) == 1 or (first is not None and not hasattr(first, "__len__")):
        raise Refusal("X: has one dimension; Expected 2D array, one row per record: Reshape your data, X[:, None]")
    try:
        yield
    except ValueError as error:
        if "Expected 2D array" in str(error):  # with the array itself behind it
            raise Refusal("X: must be an array with one row per record, or a data frame") from None
        if "Complex data" in str(error):
            raise Refusal("X: Complex data not supported; give real numbers, such as X.real and X.imag") from None
        if not any(words in str(error) for words in _WORDS):
            raise
        if hasattr(X, "columns"):
            raise Refusal(
                "X: some cells hold text, and the names of the columns are no texts, by which they could be declared; "
                "rename them, X.columns = map(str, X.columns)"
            ) from None
        raise Refusal("X: some cells hold text; give a data frame, and declare their columns in schema=") from None


def is_frame(X: Any) -> bool:
    """A data frame whose columns have names; one with numbers for names is taken as a plain array."""
    marks = ("iloc", "__dataframe__", "__arrow_c_stream__")
    if not hasattr(X, "columns") or not any(hasattr(X, mark) for mark in marks):
        return False
    names = names_of(X)
    if not all(isinstance(name, str) for name in names):
        return False
    checked_names(names, "X")
    return True
