"""Public facts read off the data, because the user said that they are public (`--assume-public`).

Every fact that is read here is marked "assumed public" and repeated in the report: the privacy guarantee then
covers everything except these facts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from confide.data.columns import SMALLEST_HALF_WIDTH, Bounds, Column, Source
from confide.data.labels import LARGEST_LABEL, Label, category_key, is_missing
from confide.data.schema import Schema, Task
from confide.data.table import Array, Table, as_numbers, plain_column, quoted
from confide.errors import DataError

ASSUMED: Source = "assumed public"
MOST_CATEGORIES = 1000  # convention: a column of more different values is an identifier or free text
# A numeric target counts as classes when it holds whole numbers and at most this many different ones.
MOST_NUMERIC_CLASSES = 20


def read_facts(table: Table, target: str | None, declared: Schema, task: Task | None) -> Schema:
    """`declared`, with every fact that it leaves open read off the table."""
    if task not in (None, "classification", "regression"):
        raise DataError(f"task={task!r}: must be classification or regression")
    if table.rows < 2:
        raise DataError(f"records: the data holds {table.rows} rows; learning needs at least 2")
    schema = replace(declared, target=target or declared.target or table.target)
    if schema.records is None:
        schema = _with(schema, "records", table.rows)
    if schema.classes is None and schema.target_bounds is None and table.labels is not None:
        schema = _with_target(schema, table.labels, task)
    if table.block is not None:
        return _with_block(schema, table.block)
    return _with_columns(schema, table)


def _with(schema: Schema, fact: str, value: object) -> Schema:
    """The schema with one more fact, marked as assumed; `Schema` itself checks the value."""
    facts: dict[str, Any] = {fact: value, "sources": {**dict(schema.sources), fact: ASSUMED}}
    return replace(schema, **facts)


def _with_target(schema: Schema, labels: Array, task: Task | None) -> Schema:
    where = f"target {quoted(schema.target or 'y')}"
    values = plain_column(labels, schema.target or "y")
    if task == "regression" or (task is None and _looks_continuous(values)):
        bounds = _finite_range(as_numbers(values, where), where)
        if not _apart(bounds):
            raise DataError(f"{where}: constant, so there is nothing to learn; choose another target")
        return _with(schema, "target_bounds", bounds)
    classes = _distinct(values, where)
    if len(classes) < 2:
        raise DataError(f"{where}: holds {len(classes)} class; classification needs at least two")
    return _with(schema, "classes", classes)


def _looks_continuous(values: Array) -> bool:
    if values.dtype.kind != "f":
        return False
    finite = values[np.isfinite(values)]
    return bool((finite != np.floor(finite)).any()) or len(np.unique(finite)) > MOST_NUMERIC_CLASSES


def _with_block(schema: Schema, block: Array) -> Schema:
    schema = schema.for_table(Table(block=block))
    if schema.bounds is not None:
        return schema
    if block.ndim == 2:
        # Columns of a plain matrix may be of different nature; pixels of an image are not.
        pairs = [_widened(_finite_range(block[:, j].astype(np.float64), f"feature {j}")) for j in range(block.shape[1])]
        return _with(schema, "bounds", pairs)
    return _with(schema, "bounds", _widened(_finite_range(block.ravel(), "x")))


def _with_columns(schema: Schema, table: Table) -> Schema:
    known = {column.name: column for column in schema.columns}
    columns = []
    for name, values in table.columns.items():
        if name == schema.target or name in schema.ignore:
            continue
        columns.append(_assumed_column(known.pop(name, Column(name, missing=schema.missing)), values, schema))
    return replace(schema, columns=(*columns, *known.values())).for_table(table)


def _assumed_column(column: Column, values: Array, schema: Schema) -> Column:
    where = f"column {quoted(column.name)}"
    if column.bounds is not None or column.categories:
        return column
    if values.dtype.kind == "O":
        values = plain_column(values, column.name)
    is_text = values.dtype.kind not in "iuf"
    if column.kind == "categorical" or is_text:
        missing = column.missing
        if missing == "refuse" and any(is_missing(value) for value in values.tolist()):
            missing = "category"
        return Column(column.name, "categorical", None, _distinct(values, where), missing, ASSUMED)
    if schema.bounds is not None:
        return column
    missing = column.missing
    if missing == "refuse" and not np.isfinite(values).all():
        missing = "category"
    return Column(column.name, "numeric", _widened(_finite_range(values, where)), (), missing, ASSUMED)


def _finite_range(values: Array, where: str) -> Bounds:
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise DataError(f"{where}: holds no finite number; leave it out")
    return float(finite.min()), float(finite.max())


def _apart(bounds: Bounds) -> bool:
    """What `bounds_pair` demands; asked here first, because its message quotes the bounds, which are cells here."""
    return bounds[1] / 2 - bounds[0] / 2 > SMALLEST_HALF_WIDTH


def _widened(bounds: Bounds) -> Bounds:
    """A constant column still needs bounds that are apart; its value becomes the middle."""
    low, high = bounds
    if _apart(bounds):
        return bounds
    margin = max(1.0, abs(low) * 1e-6)
    largest = float(np.finfo(np.float64).max)
    return max(low - margin, -largest), min(high + margin, largest)


def _distinct(values: Array, where: str) -> tuple[Label, ...]:
    """The different values in order, spelled by their keys; whole numbers come back as numbers."""
    keys: dict[str, Label] = {}
    for value in values.tolist():
        key = None if is_missing(value) else category_key(value)
        if key is None:
            continue
        if not isinstance(value, str) and not abs(value) < LARGEST_LABEL:
            raise DataError(f"{where}: holds numbers too large for a class or category; declare bounds instead")
        if key not in keys:
            keys[key] = _spelled(value, key)
        if len(keys) > MOST_CATEGORIES:
            raise DataError(
                f"{where}: holds more than {MOST_CATEGORIES} different values, like an identifier; "
                "leave it out, or declare its categories"
            )
    if not keys:
        raise DataError(f"{where}: holds missing values only; leave it out")
    labels = list(keys.values())
    if all(isinstance(label, int | float) and not isinstance(label, bool) for label in labels):
        return tuple(sorted(labels))
    return tuple(sorted(labels, key=str))


def _spelled(value: object, key: str) -> Label:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and not value.is_integer():
        return value
    return key if isinstance(value, bool) else int(value)  # type: ignore[call-overload]
