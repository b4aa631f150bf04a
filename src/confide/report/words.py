"""Numbers and names as readers expect them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from confide.wording import METRICS, SHARES, Title, Withheld, share, up

SAMPLING = {
    "poisson": "each record joins each batch by an independent coin toss",
    "fixed-size": "each batch is a fresh draw of a fixed number of records",
    "shuffle": "each pass goes once through the shuffled records",
    "full-batch": "each step uses every record",
}


def number(value: Any) -> str:
    """A number with four significant digits."""
    if value is None:
        return "not set"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    whole = value == int(value) and 1000 <= abs(value) < 1e15
    return f"{int(value):,}" if whole else f"{value:.4g}"


def small(value: float) -> str:
    """A delta, rounded up: written out where that is readable, for "1e-05" breaks over lines."""
    return up(value, decimals=12).rstrip("0") if 1e-7 <= value < 1 else up(value, digits=6)


def metric(name: str, value: float) -> dict[str, str]:
    """One row of the table of metrics."""
    title = METRICS.get(name, Title(name, name, ""))
    if name in SHARES:
        text = share(value)
    elif 1e-3 <= abs(value) < 1000:
        text = f"{value:.4f}" if abs(value) < 10 else f"{value:#.4g}"
    else:
        text = number(value)
    return {"name": title.heading, "value": text, "meaning": title.meaning}


def settings(thing: object) -> dict[str, Any]:
    """The public fields of a frozen settings object, by name."""
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: value for name, value in vars(thing).items() if not name.startswith("_")}


def shown(value: Any) -> str:
    """A setting as text: nested settings by name and fields, functions by name."""
    if isinstance(value, Withheld):
        return "not shown: computed from private records without protection"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{name} = {shown(inner)}" for name, inner in settings(value).items())
        return f"{type(value).__name__} ({inner})" if inner else type(value).__name__
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value) or "none"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    text = number(value)
    return text if len(text) <= 500 else f"{text[:500]} ..."


def label(name: str) -> str:
    """`burn_in_steps` as "Burn in steps"."""
    text = str(name).replace("_", " ")
    return text[:1].upper() + text[1:]


def first_sentence(docstring: str | None) -> str:
    """The first line of a docstring: what the thing is."""
    return (docstring or "").strip().split("\n")[0].strip()
