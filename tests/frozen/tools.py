"""What every frozen case shares: values as plain JSON, and the places where two of them differ."""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import confide

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Processors round differently, and so does the native noise kernel; what moved by more than this has changed."""
NOTHING = "(nothing)"
LONGEST = 300
"""Characters of a value in a message; the golden file has the rest."""


def named(name: str) -> Any:
    """The package's object of that name, in whichever module it lives: the files of the package may move."""
    for module in [*sys.modules.values()]:
        if str(getattr(module, "__name__", "")).partition(".")[0] == "confide" and name in vars(module):
            return vars(module)[name]
    for info in pkgutil.walk_packages(confide.__path__, "confide."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # a part that needs what is not installed
            continue
        if name in vars(module):
            return vars(module)[name]
    raise LookupError(f"{name}: nowhere in the package")


def plain(value: Any, digits: int = 6) -> Any:
    """The value in the types of JSON; floats with so many significant digits. Classes may be renamed."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, digits) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, digits) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), digits)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), digits) for field in fields(value) if field.repr}
    return "<object>"


def kinds(value: Any) -> Any:
    """The structure alone: keys and types, for values that noise, time or the machine decide."""
    if isinstance(value, Mapping):
        return {str(key): kinds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [kinds(inner) for inner in value]
    return f"<{type(value).__name__}>"


def without(value: Any, names: Mapping[str, Any]) -> Any:
    """The value with what stands under these keys, at any depth, replaced: by a text, or by what a function makes."""
    if isinstance(value, Mapping):
        return {
            key: (names[key](inner) if callable(names[key]) else names[key]) if key in names else without(inner, names)
            for key, inner in value.items()
        }
    return [without(inner, names) for inner in value] if isinstance(value, list) else value


def differences(frozen: Any, now: Any, place: str = "") -> Iterator[str]:
    """Every place where the two differ, floats by more than the tolerance, everything else at all."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        for key in [*frozen, *(key for key in now if key not in frozen)]:
            yield from differences(frozen.get(key, NOTHING), now.get(key, NOTHING), f"{place}/{key}")
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for index, (one, other) in enumerate(zip(frozen, now, strict=True)):
            yield from differences(one, other, f"{place}/{index}")
    elif type(frozen) is not type(now):
        yield _told(place, frozen, now)
    elif isinstance(frozen, float):
        if not math.isclose(frozen, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield _told(place, frozen, now)
    elif frozen != now:
        yield _told(place, frozen, now)


def _told(place: str, frozen: Any, now: Any) -> str:
    was, now_is = (text if len(text) <= LONGEST else f"{text[:LONGEST]}..." for text in (repr(frozen), repr(now)))
    return f"{place}: was {was}, is {now_is}"
