"""Labels and categories: one value, however it was written, has one key.

A class declared as 3 must be found in a file that says "3", "3.0" or 3. Keys make them equal, from the value
alone; "03" stays apart, since leading zeros mark a code and not a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from confide.data.table import MISSING_TOKENS, Array, shown
from confide.errors import DataError

Label: TypeAlias = str | int | float | bool

LARGEST_LABEL = 10**18  # below 2^63, so that a label is an int64 with room to spare
NO_LABEL = -100
"""Among labels of tokens: this token has none. torch's cross entropies leave it out, too."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?\Z")


def category_key(value: Any) -> str | None:
    """The key of a label or category; None for a value that is missing by its type (None, NaN)."""
    if value is None:
        return None
    if isinstance(value, str):
        return _text_key(value.strip())
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        # Through hex for huge numbers: int to text has a limit on digits.
        return str(int(value)) if abs(int(value)) < 10**18 else hex(int(value))
    if isinstance(value, float | np.floating):
        return _float_key(float(value))
    return "\0" + type(value).__name__  # a foreign object: equal to no label that can be declared


def _text_key(text: str) -> str:
    if text.lower() in ("true", "false"):
        return text.lower()
    if _INTEGER.match(text):
        return str(int(text))
    if _NUMBER.match(text):
        return _float_key(float(text)) or text
    return text


def _float_key(number: float) -> str | None:
    if math.isnan(number):
        return None
    if math.isfinite(number) and number == int(number) and abs(number) < 10**18:
        return str(int(number))
    return repr(number)


def is_missing(value: Any) -> bool:
    """Whether a cell counts as missing when no declared category has its spelling."""
    if isinstance(value, str):
        return value.strip() in MISSING_TOKENS
    if isinstance(value, float | np.floating):
        return not math.isfinite(value)
    return category_key(value) is None


def plain_labels(labels: Iterable[Any], where: str) -> tuple[Label, ...]:
    """Labels as plain Python values, each with a key of its own, or a DataError."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise DataError(f"{where}={shown(labels)}: must be a list of labels")
    plain = tuple(label.item() if isinstance(label, np.generic) else label for label in labels)
    seen: dict[str, Label] = {}
    for label in plain:
        key = category_key(label)
        if not isinstance(label, str | int | float | bool) or key is None or _unwritable(label):
            raise DataError(
                f"{where}: a value of type {type(label).__name__} is not a label; use texts or numbers below 1e18"
            )
        if key in seen:
            raise DataError(f"{where}: {shown(seen[key])} and {shown(label)} read as the same label; list it once")
        seen[key] = label
    return plain


def _unwritable(label: Label) -> bool:
    """Numbers that plain JSON or a 64-bit integer cannot carry."""
    return not isinstance(label, str) and not abs(label) < LARGEST_LABEL


def class_positions(values: Array, classes: Iterable[Label]) -> Array:
    """The position of each value among the classes, -1 where it has none.

    Truth values are 0 and 1 where those are the classes, and 0 and 1 are truth values where those are: frames write
    truth values with gaps as numbers.
    """
    place = {category_key(label): position for position, label in enumerate(classes)}
    truths, numbers = ("false", "true"), ("0", "1")
    for given, meant in ((truths, numbers), (numbers, truths)):
        if place.keys() & set(meant) and not place.keys() & set(given):
            place |= {one: place.get(other, -1) for one, other in zip(given, meant, strict=True)}
            break
    return _looked_up(values, place, -1, -1)


def positions(values: Array, labels: Iterable[Label], unknown: int, missing: int) -> Array:
    """The position of each value in the list of labels; `unknown` or `missing` where it has none."""
    return _looked_up(
        values, {category_key(label): position for position, label in enumerate(labels)}, unknown, missing
    )


def _looked_up(values: Array, place: dict[str | None, int], unknown: int, missing: int) -> Array:
    found: dict[Any, int] = {}
    result = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values.tolist()):
        cached = found.get(value) if isinstance(value, str) else None
        if cached is None:
            cached = place.get(category_key(value), missing if is_missing(value) else unknown)
            if isinstance(value, str):
                found[value] = cached
        result[row] = cached
    return result
