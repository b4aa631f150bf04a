"""What a column is made of where it is not the cell itself: a part of a date, or the bucket of a public hash.

Each cell is looked at by itself and by declared facts alone. A cell that is no date of the declared format is missing.

    time       days since 1970, with their fractions        year, month, day, weekday (1 is Monday), hour   numbers
    year-sin, year-cos    where in the year                 week-sin, week-cos    where in the week
    day-sin, day-cos      where in the day

A bucket is the first 8 bytes of SHA-256 of the text, modulo the declared number of buckets: everybody can compute it,
and it rests on no record. Texts that share a bucket are one category.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from confide.data.labels import category_key, is_missing
from confide.errors import DataError

DatePart: TypeAlias = Literal[
    "", "time", "year", "month", "day", "weekday", "hour",
    "year-sin", "year-cos", "week-sin", "week-cos", "day-sin", "day-cos",
]  # fmt: skip
PARTS: tuple[DatePart, ...] = get_args(DatePart)
USUAL_PARTS: tuple[DatePart, ...] = ("time", "year-sin", "year-cos", "week-sin", "week-cos")
ISO = "ISO"  # 2024-02-29, 2024-02-29T12:30, 20240229, with or without seconds and an offset
# The calendar's own ranges: nobody has to declare them.
KNOWN_BOUNDS: dict[str, tuple[float, float]] = {
    "month": (1.0, 12.0),
    "day": (1.0, 31.0),
    "weekday": (1.0, 7.0),
    "hour": (0.0, 24.0),
    **{f"{cycle}-{wave}": (-1.0, 1.0) for cycle in ("year", "week", "day") for wave in ("sin", "cos")},
}
_YEAR, _WEEK = 365.2425, 7.0  # days; of the year the mean over 400 of them
_START = datetime(1970, 1, 1)


def moment_of(cell: Any, form: str) -> datetime | None:
    """The date that a cell says, without an offset: 12:00+02:00 is 12:00; None for what is no date of that form."""
    if isinstance(cell, datetime):
        return cell.replace(tzinfo=None)
    if isinstance(cell, date):
        return datetime(cell.year, cell.month, cell.day)
    if not isinstance(cell, str):
        return None
    text = cell.strip()
    try:
        found = datetime.fromisoformat(text) if form == ISO else datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        return None
    return found.replace(tzinfo=None)


def days_of(when: datetime) -> float:
    """Days since the start of 1970."""
    return (when - _START) / timedelta(days=1)


def check_format(form: str, where: str) -> None:
    """Refuse a format by which no date can be read."""
    example = datetime(2024, 2, 29)
    if form == ISO or (isinstance(form, str) and "%" in form and moment_of(example.strftime(form), form) is not None):
        return
    raise DataError(f"{where}: date={form!r}: must be ISO, or a format such as %d/%m/%Y")


def dates_as_numbers(bounds: Any, part: str, form: str, where: str) -> Any:
    """Bounds of time or year that were given as dates, in the column's own format or as ISO; numbers stay."""
    if isinstance(bounds, str | bytes) or not isinstance(bounds, list | tuple):
        return bounds
    found = [
        bound if isinstance(bound, int | float) else moment_of(bound, form) or moment_of(bound, ISO) for bound in bounds
    ]
    if any(bound is None for bound in found):
        own = "" if form == ISO else f" or of the format {form}"
        raise DataError(f"{where}: must be two dates such as 2015-01-01{own}, or two numbers (time: days since 1970)")
    return tuple(part_of(bound, part) if isinstance(bound, datetime) else bound for bound in found)


def part_of(when: datetime, part: str) -> float:
    """One number of a date."""
    days = days_of(when)
    if part == "time":
        return days
    if part == "hour":
        return 24.0 * (days % 1.0)
    if part == "weekday":
        return float(when.isoweekday())
    if part in ("year", "month", "day"):
        return float({"year": when.year, "month": when.month, "day": when.day}[part])
    cycle, _, wave = part.partition("-")
    since_monday = days + 3.0  # 1970 began on a Thursday
    turn = {"year": (days % _YEAR) / _YEAR, "week": (since_monday % _WEEK) / _WEEK, "day": days % 1.0}[cycle]
    return (math.sin if wave == "sin" else math.cos)(2 * math.pi * turn)


def bucket_of(key: str, buckets: int) -> int:
    """The public hash of a text."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") % buckets


def dates_viewed(values: NDArray[Any], form: str, part: str) -> NDArray[Any]:
    """One number per cell; NaN where there is no such date."""

    def number(cell: Any) -> float:
        when = moment_of(cell, form)
        return math.nan if when is None else part_of(when, part)

    return np.array(_each(values, number), dtype=np.float64)


def texts_viewed(values: NDArray[Any], buckets: int) -> NDArray[Any]:
    """The bucket of every cell, None for a missing one."""

    def bucket(cell: Any) -> int | None:
        key = None if is_missing(cell) else category_key(cell)
        return None if key is None else bucket_of(key, buckets)

    result = np.empty(len(values), dtype=object)
    result[:] = _each(values, bucket)
    return result


def _each(values: NDArray[Any], view: Callable[[Any], Any]) -> list[Any]:
    """The view of every cell; equal texts are looked at once."""
    seen: dict[str, Any] = {}
    result = []
    for cell in values.tolist():
        if not isinstance(cell, str):
            result.append(view(cell))
            continue
        if cell not in seen:
            seen[cell] = view(cell)
        result.append(seen[cell])
    return result
