"""The values of a schema as users write them, checked and in one form each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from confide.data.columns import SOURCES, Bounds, Input, Source, bounds_pair, check_choice, known_keys, plain
from confide.data.labels import LARGEST_LABEL, Label, plain_labels
from confide.data.table import attempt, quoted, shown
from confide.errors import DataError

FACTS = ("records", "classes", "target_bounds", "bounds", "shape")
MOST_CLASSES = 100_000  # convention: beyond it a target is a number that was taken for a class


def is_pair(bounds: Any) -> bool:
    return len(bounds) == 2 and all(isinstance(value, float) for value in bounds)


def shared_bounds(bounds: Iterable[Any]) -> Bounds | tuple[Bounds, ...]:
    values = attempt(lambda: list(bounds), "bounds: must be (low, high), or one such pair per feature", TypeError)
    if values and all(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in values):
        return tuple(bounds_pair(value, f"bounds[{position}]") for position, value in enumerate(values))
    return bounds_pair(values, "bounds")


def class_labels(classes: int | Iterable[Label] | None) -> tuple[Label, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, Iterable):
        labels = plain_labels(classes, "classes")
        if len(labels) < 2:
            raise DataError(
                f"classes={shown(list(labels))}: classification needs at least two; for regression leave it out"
            )
        return labels
    count = whole("classes", classes, least=2)
    if count > MOST_CLASSES:
        raise DataError(f"classes={count}: at most {MOST_CLASSES}; for regression give target_bounds instead")
    return tuple(range(count))


def record_shape(shape: int | Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not sizes:
        raise DataError("shape=(): must name at least one dimension")
    return tuple(whole("shape", size, least=1) for size in sizes)


def fact_sources(
    sources: Mapping[str, Source] | Iterable[tuple[str, Source]],
) -> tuple[tuple[str, Source], ...]:
    complaint = 'sources: must map a fact to its source, such as {"records": "declared"}'
    pairs: dict[str, Source] = attempt(lambda: dict(sources), complaint, TypeError, ValueError)
    for fact, source in pairs.items():
        check_choice("sources: fact", fact, FACTS)
        check_choice(f"sources: {fact}", source, SOURCES)
    return tuple((fact, source) for fact, source in sorted(pairs.items()) if source != "declared")


def named_inputs(inputs: Mapping[str, Any] | Iterable[Any] | Input) -> tuple[tuple[str, Input], ...]:
    """By name; those of a tuple by their place, and a single one is the first."""
    complaint = 'inputs: must map the name of a tensor to its facts, such as {"input_ids": Input(vocabulary=50257)}'
    if isinstance(inputs, Input):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        pairs = list(inputs.items())
    else:
        listed_ = attempt(lambda: list(inputs), complaint, TypeError)
        named = all(isinstance(one, tuple) and len(one) == 2 for one in listed_)
        pairs = listed_ if named else [(str(place), one) for place, one in enumerate(listed_)]
    found = []
    for name, one in pairs:
        if isinstance(one, Mapping):
            one = Input(**known_keys(one, [field.name for field in fields(Input)], f"inputs: {quoted(name)}"))
        if not isinstance(one, Input) or not isinstance(name, str) or not name:
            raise DataError(complaint)
        found.append((name, one))
    return tuple(found)


def facts_of_input(one: Input) -> dict[str, Any]:
    return {name: plain(value) for name, value in vars(one).items() if value is not None}


def names_given(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    result = (
        (names,) if isinstance(names, str) else attempt(lambda: tuple(names), f"{argument}: must be names", TypeError)
    )
    if not all(isinstance(name, str) for name in result):
        raise DataError(f"{argument}: must be a list of column names")
    return result


def whole(argument: str, value: Any, least: int) -> int:
    """A whole number, at least `least`; 60_000 or numpy's integers, but neither 3.0 nor True."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = least - 1
        if least <= number < LARGEST_LABEL:
            return number
    raise DataError(f"{argument}={shown(value)}: must be a whole number, at least {least} and below 1e18")
