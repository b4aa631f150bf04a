"""Numbers and names as readers expect them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from confide.wording import METRICS, Title, Withheld, measure, number

SAMPLING = {
    "poisson": "each record joins each batch by an independent coin toss",
    "fixed-size": "each batch is a fresh draw of a fixed number of records",
    "shuffle": "each pass goes once through the shuffled records",
    "full-batch": "each step uses every record",
}


def metric(name: str, value: float) -> dict[str, str]:
    """One row of the table of metrics."""
    title = METRICS.get(name, Title(name, name, ""))
    return {"name": title.heading, "value": measure(name, value), "meaning": title.meaning}


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
