"""Columns of a table that are no features: several targets, the mark of a time until an event, the weight of a record.

targets = ["cough", "fever"]         # labels of which any may hold, 0 or 1 each
[targets.height]                     # or several numbers, each with its public range
bounds = [100, 220]

target = "days"                      # a time until an event ...
observed = "died"                    # ... which came (1) or had not come by then (0)

weight = "survey_weight"             # what a record counts for, from 0 to largest_weight, which is public
largest_weight = 4.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from confide.data.columns import Bounds, bounds_pair, known_keys
from confide.data.labels import positions
from confide.data.table import Array, Table, as_numbers, attempt, listed, quoted, shown
from confide.errors import DataError

if TYPE_CHECKING:
    from confide.data.schema import Schema

Targets: TypeAlias = tuple[tuple[str, Bounds | None], ...]
"""The names of several targets, each with the range of a number, or None for a label that holds or does not."""


def named_targets(targets: Mapping[str, Any] | Iterable[Any]) -> Targets:
    """From a list of labels, or numbers by name with their bounds."""
    complaint = 'targets: must be a list of columns of 0 and 1, or bounds by column, {"height": {"bounds": [100, 220]}}'
    listed_ = attempt(lambda: list(targets.items() if isinstance(targets, Mapping) else targets), complaint, TypeError)
    pairs: list[tuple[str, Bounds | None]] = []
    for one in listed_:
        name, facts = one if isinstance(one, tuple | list) and len(one) == 2 else (one, None)
        if not isinstance(name, str) or not name or isinstance(targets, str):
            raise DataError(complaint)
        if isinstance(facts, Mapping):
            facts = known_keys(facts, ["bounds"], f"targets: {quoted(name)}").get("bounds")
        pairs.append((name, None if facts is None else bounds_pair(facts, f"targets: {quoted(name)}: bounds")))
    if len({bounds is None for _, bounds in pairs}) > 1:
        raise DataError("targets: some have bounds and some have none; give all of them bounds, or none")
    return tuple(pairs)


def check_roles(schema: Schema) -> None:
    """Refuse columns with two roles, and facts that do not belong together."""
    names = [name for name, _ in schema.targets]
    for fact in ("observed", "weight"):
        name = getattr(schema, fact)
        if name is not None and (not isinstance(name, str) or not name):
            raise DataError(f"{fact}={shown(name)}: must be the name of a column")
    largest = schema.largest_weight
    if isinstance(largest, bool) or not isinstance(largest, int | float) or not 0 < largest < math.inf:
        raise DataError(f"largest_weight={shown(largest)}: must be a finite number > 0")
    if names and (schema.target is not None or schema.classes is not None or schema.target_bounds is not None):
        raise DataError("targets: are instead of target, classes and target_bounds; give one of them")
    if schema.observed is not None and (names or schema.classes is not None):
        raise DataError("observed: marks a time until an event, target; leave targets and classes out")
    taken = [*names, *(name for name in (schema.target, schema.observed, schema.weight) if name is not None)]
    features = [column.raw for column in schema.columns]
    twice = sorted({name for name in taken if taken.count(name) > 1 or name in features or name in schema.ignore})
    if twice:
        raise DataError(f"columns: {listed(twice)} declared in two roles; choose one")


def arranged(table: Table, schema: Schema | None, *, required: bool = True) -> Table:
    """The table with several targets, marks and weights taken from among its columns; as it is where there are none.

    required   whether targets must be there, as they need not be among records to predict
    """
    if schema is None or not (schema.targets or schema.observed or schema.weight):
        return table
    columns, labels, weights = dict(table.columns), table.labels, table.weights
    wanted = [name for name, _ in schema.targets] + ([schema.observed] if schema.observed else [])
    found = {name: columns.pop(name) for name in wanted if name in columns}
    absent = [name for name in wanted if name not in found]
    if required and absent and (labels is None or labels.ndim == 1):
        raise DataError(f"columns: {listed(absent)} not among the {len(table.columns)} of the data; check its header")
    if found and not absent:
        every = [*([] if schema.targets else [labels]), *found.values()]
        parts = [as_numbers(values, "target", private=True) for values in every if values is not None]
        labels = np.stack(parts, axis=1) if len(parts) == len(every) else None
    if schema.weight is not None and schema.weight in columns:
        weights = columns.pop(schema.weight)
    return replace(table, columns=columns, labels=labels, weights=weights)


def weights_of(table: Table, schema: Schema, class_weight: Mapping[Any, float] | None) -> Array | None:
    """What each record counts for, from 0 to 1, by its own weight over the largest and the public one of its class.

    A record without a weight that is a number gets one that is none, and counts for nothing.
    """
    found = None
    if schema.weight is not None and table.weights is None:
        raise DataError(f"weight={quoted(schema.weight)}: no such column; check the header of the data")
    if table.weights is not None:
        numbers = as_numbers(table.weights, "weight", private=True)
        found = np.where(np.isfinite(numbers), np.clip(numbers / schema.largest_weight, 0, 1), np.nan)
    if class_weight is None or schema.classes is None or table.labels is None:
        return found
    by_class = np.array([*_of_classes(class_weight, schema), 0.0])
    each = by_class[positions(table.labels, schema.classes, unknown=-1, missing=-1)]
    return each if found is None else found * each


def check_class_weight(class_weight: Any, classes: tuple[Any, ...] | None) -> None:
    """Refuse weights of classes that would be read off the records, or are no weights."""
    if class_weight is None:
        return
    if isinstance(class_weight, str):
        raise DataError(
            f"class_weight={class_weight!r}: how often classes occur is private; give a weight for each of them by "
            "what is publicly known, such as {0: 1, 1: 5}"
        )
    if not isinstance(class_weight, Mapping) or not class_weight:
        raise DataError(f"class_weight={shown(class_weight)}: must map classes to weights, such as {{0: 1, 1: 5}}")
    for label, weight in class_weight.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DataError(f"class_weight={shown(class_weight)}: the weight of {shown(label)} must be a number >= 0")
    if not max(class_weight.values()) > 0:
        raise DataError(f"class_weight={shown(class_weight)}: at least one class needs a weight > 0")
    if classes is not None:
        unknown = positions(np.array(list(class_weight), dtype=object), classes, unknown=-1, missing=-1) < 0
        if unknown.any():
            name = list(class_weight)[int(np.argmax(unknown))]
            raise DataError(f"class_weight: {shown(name)} is not among the declared classes, {listed(classes)}")


def _of_classes(class_weight: Mapping[Any, float], schema: Schema) -> list[float]:
    """Over the largest; a class that is not named counts as 1 does."""
    assert schema.classes is not None
    named = positions(np.array(list(class_weight), dtype=object), schema.classes, unknown=-1, missing=-1)
    weights = dict(zip(named.tolist(), class_weight.values(), strict=True))
    each = [float(weights.get(place, 1.0)) for place in range(len(schema.classes))]
    return [weight / max(each) for weight in each]
