"""Raw rows of any kind as the inputs of a model: by declared facts alone, as they were made for training."""

from __future__ import annotations

import csv
import datetime
import hashlib
import math
import re
from typing import Any

import numpy as np

MISSING_TOKENS = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")


def columns_of(rows: Any) -> dict[str, list[Any]]:
    """Rows of any kind as columns by name."""
    if isinstance(rows, str) or hasattr(rows, "__fspath__"):
        return _file_columns(rows)
    if hasattr(rows, "columns") and hasattr(rows, "__getitem__"):  # pandas, polars, Arrow
        names = getattr(rows, "column_names", None) or list(rows.columns)
        return {str(name): _listed(rows[name]) for name in names}
    if isinstance(rows, dict):
        several = any(isinstance(value, list | tuple | np.ndarray) for value in rows.values())
        return {name: _listed(value) if several else [value] for name, value in rows.items()}
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _file_columns(path: Any) -> dict[str, list[Any]]:
    """Of a text file, whose separator its header shows; where that is a semicolon, numbers may have a comma."""
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark first
        outside = re.sub('"[^"]*"', "", file.readline())
        file.seek(0)
        mark = next((one for one in ",\t;|" if one in outside), ",")
        rows = list(csv.DictReader(file, delimiter=mark))
    found = columns_of([{name or "unnamed": cell for name, cell in row.items()} for row in rows]) if rows else {}
    if mark != ";":
        return found
    return {name: [_Spelt(cell) if isinstance(cell, str) else cell for cell in cells] for name, cells in found.items()}


class _Spelt(str):
    """A cell of a file in which a comma may stand in numbers."""


def _listed(values: Any) -> list[Any]:
    for name in ("to_list", "tolist", "to_pylist"):
        if hasattr(values, name):
            return list(getattr(values, name)())
    return list(values)


def viewed(columns: dict[str, list[Any]], facts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns that the model knows: cells as they are, parts of dates, and buckets of a public hash."""
    absent = dict.fromkeys(
        fact.get("of", fact["name"]) for fact in facts if fact.get("of", fact["name"]) not in columns
    )
    if absent:
        raise ValueError(f"rows: no column {', '.join(map(repr, list(absent)[:5]))}; the model needs it")
    return {fact["name"]: [_view(cell, fact) for cell in columns[fact.get("of", fact["name"])]] for fact in facts}


def _view(cell: Any, fact: dict[str, Any]) -> Any:
    if "buckets" in fact:
        key = None if _is_missing(cell) else key_of(cell)
        return None if key is None else int.from_bytes(_hash(key), "big") % fact["buckets"]
    return _part_of_date(cell, fact["date"], fact["part"]) if "date" in fact else cell


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8]


def _part_of_date(cell: Any, form: str, part: str) -> float:
    """NaN for what is no date of that form; 12:00+02:00 is 12:00."""
    try:
        if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
            when = datetime.datetime(cell.year, cell.month, cell.day)
        elif isinstance(cell, str):
            text = cell.strip()
            iso = form == "ISO"
            when = datetime.datetime.fromisoformat(text) if iso else datetime.datetime.strptime(text, form)
        else:
            when = cell
        when = when.replace(tzinfo=None)
    except (ValueError, TypeError, AttributeError):
        return math.nan
    days = (when - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)
    plain = {"time": days, "hour": 24.0 * (days % 1.0), "weekday": float(when.isoweekday())}
    plain |= {"year": float(when.year), "month": float(when.month), "day": float(when.day)}
    if part in plain:
        return plain[part]
    cycle, _, wave = part.partition("-")  # 1970 began on a Thursday, and a year has 365.2425 days on average
    turn = {"year": (days % 365.2425) / 365.2425, "week": ((days + 3.0) % 7.0) / 7.0, "day": days % 1.0}[cycle]
    return (math.sin if wave == "sin" else math.cos)(2 * math.pi * turn)


def encode(columns: dict[str, list[Any]], facts: list[dict[str, Any]]) -> Any:
    """The inputs of every row, float32 in [-1, 1], as they were made for training: by declared facts alone."""
    absent = [fact["name"] for fact in facts if fact["name"] not in columns]
    if absent:
        raise ValueError(f"rows: no column {', '.join(map(repr, absent[:5]))}; the model needs it")
    parts = []
    for fact in facts:
        cells = columns[fact["name"]]
        parts.append(_categories(cells, fact) if fact["kind"] == "categorical" else _numbers(cells, fact))
    return np.concatenate(parts, 1)


def raw_column(cells: list[Any], fact: dict[str, Any]) -> Any:
    """A column as an ONNX graph takes it: numbers with NaN for what is missing, or texts as they were declared."""
    if fact["kind"] == "numeric":
        return np.array([_number(cell) for cell in cells], dtype=np.float64)[:, None]
    spelt = {key_of(label): str(label) for label in fact["categories"]}
    texts = [spelt.get(key_of(cell), "" if _is_missing(cell) else str(cell)) for cell in cells]
    return np.array(texts, dtype=object)[:, None]


def encode_block(values: Any, about: dict[str, Any]) -> Any:
    """The same for plain arrays: one pair of bounds for every feature, or for all."""
    if about.get("bounds") is None:
        return values.astype(np.float32)
    pairs = np.asarray(about["bounds"], dtype=np.float64)
    return _scaled(values, pairs[:, 0], pairs[:, 1], about["missing"], "inputs")


def _numbers(cells: list[Any], fact: dict[str, Any]) -> Any:
    numbers = np.array([_number(cell) for cell in cells], dtype=np.float64)[:, None]
    scaled = _scaled(numbers, fact["low"], fact["high"], fact["missing"], f"column {fact['name']!r}")
    if fact["missing"] != "category":
        return scaled
    return np.concatenate([scaled, ~np.isfinite(numbers)], 1).astype(np.float32)


def _scaled(values: Any, low: Any, high: Any, missing: str, where: str) -> Any:
    absent = ~np.isfinite(values)
    if missing == "refuse" and absent.any():
        raise ValueError(f"{where}: some cells hold no number, and the model has no input for that; fill them in")
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    clamped = np.clip(np.where(absent, middle, values), low, high)
    return np.where(absent, 0.0, np.clip((clamped - middle) / half, -1.0, 1.0)).astype(np.float32)


def _number(cell: Any) -> float:
    if isinstance(cell, str):
        word = _DECIMAL_COMMA.sub(r"\1.\2", cell).strip() if isinstance(cell, _Spelt) else cell.strip()
        if word.lower() in ("true", "false"):
            return float(word.lower() == "true")
        try:
            return math.nan if "_" in word else float(word)
        except ValueError:
            return math.nan
    try:
        return math.nan if cell is None else float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _categories(cells: list[Any], fact: dict[str, Any]) -> Any:
    labels = fact["categories"]
    place = {key_of(label): position for position, label in enumerate(labels)}
    found = np.zeros((len(cells), len(labels) + (fact["missing"] == "category")), dtype=np.float32)
    for row, cell in enumerate(cells):
        key = key_of(cell)
        if key in place:
            found[row, place[key]] = 1.0
        elif _is_missing(cell):
            if fact["missing"] == "refuse":
                raise ValueError(
                    f"column {fact['name']!r}: some cells are missing, and the model has no input for that"
                )
            if fact["missing"] == "category":
                found[row, -1] = 1.0
            else:
                found[row] = 1.0 / len(labels)
    return found


def _is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip() in MISSING_TOKENS
    if isinstance(cell, float | np.floating):
        return not math.isfinite(cell)
    return key_of(cell) is None


_DECIMAL_COMMA = re.compile(r"^\s*([+-]?[0-9]*),([0-9]+(?:[eE][+-]?[0-9]+)?)\s*$")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?\Z")


def key_of(value: Any) -> Any:
    """What makes 3, "3" and "3.0" one category; None for what is missing by its type."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value)) if abs(int(value)) < 10**18 else hex(int(value))
    if isinstance(value, float | np.floating):
        return _float_key(float(value))
    if not isinstance(value, str):
        return None if value is None else "\0"
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    if _INTEGER.match(text):
        return str(int(text))
    return (_float_key(float(text)) or text) if _DECIMAL.match(text) else text


def _float_key(number: float) -> Any:
    if math.isnan(number):
        return None
    whole = math.isfinite(number) and number == int(number) and abs(number) < 10**18
    return str(int(number)) if whole else repr(number)
