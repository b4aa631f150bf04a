"""What one cell of an unknown column can be: missing, a number in a bin, a date in a year, or a text.

Bins are public and of no data: numbers lie between 1, 2 and 5 times powers of ten, and years are years. A cell is
looked at by itself, whatever the others are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

import numpy as np

from confide.data.labels import category_key, is_missing
from confide.data.table import Array
from confide.data.views import ISO, days_of, moment_of

CellKind: TypeAlias = Literal["number", "date", "text"]
CELL_KINDS: tuple[CellKind, ...] = ("number", "date", "text")
# Powers of ten between a millionth and 5e15, beyond which whole numbers are no longer apart in double precision.
MAGNITUDES = tuple(mantissa * 10.0**power for power in range(-6, 16) for mantissa in (1, 2, 5))
GRID = 2 * len(MAGNITUDES) + 3  # negative and positive, those beyond the last, and zero
FIRST_YEAR, LAST_YEAR = 1900, 2100  # of people alive, and of what they may have planned
YEARS = LAST_YEAR - FIRST_YEAR + 1  # dates before and after lie in the first and the last
LONGEST_TEXT = 200  # characters; a longer one is no category that somebody would list


def number_of(cell: Any) -> float | None:
    """The finite number that a cell says; None for any other."""
    if isinstance(cell, str):
        word = cell.strip()
        if word.lower() in ("true", "false") or "_" in word:
            return None
        try:
            cell = float(word)
        except ValueError:
            return None
    if isinstance(cell, bool | np.bool_) or not isinstance(cell, int | float | np.integer | np.floating):
        return None
    try:
        number = float(cell)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def bin_of(number: float) -> int:
    """The bin of a number; those of one sign are half open, (a, b], seen from zero."""
    if number == 0:
        return len(MAGNITUDES) + 1
    place = bisect_left(MAGNITUDES, abs(number)) + 1
    return len(MAGNITUDES) + 1 + (place if number > 0 else -place)


def edges_of(place: int) -> tuple[float, float]:
    """The lowest and the highest number of a bin; of those beyond the last, its edge."""
    step = place - len(MAGNITUDES) - 1
    if step == 0:
        return 0.0, 0.0
    size = abs(step)
    near = 0.0 if size == 1 else MAGNITUDES[size - 2]
    far = MAGNITUDES[min(size, len(MAGNITUDES)) - 1]
    return (near, far) if step > 0 else (-far, -near)


def year_bin(when: datetime) -> int:
    return min(max(when.year, FIRST_YEAR), LAST_YEAR) - FIRST_YEAR


def days_of_years(first: int, last: int) -> tuple[float, float]:
    """From the start of the year of one bin to the end of that of another, in days since 1970."""
    return days_of(datetime(FIRST_YEAR + first, 1, 1)), days_of(datetime(FIRST_YEAR + last + 1, 1, 1))


@dataclass
class Cells:
    """How many cells of a column are what. Private: counts without noise.

    categories   every cell that is not missing is a text, whatever it says
    """

    categories: bool
    missing: int = 0
    kinds: Counter[CellKind] = field(default_factory=Counter)
    grid: Array = field(default_factory=lambda: np.zeros(GRID))
    years: Array = field(default_factory=lambda: np.zeros(YEARS))
    texts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, values: Array, categories: bool = False) -> Cells:
        """Each cell counts once as a kind and once as what it is, or once as missing."""
        found = cls(categories)
        alike: dict[tuple[type, str], list[Any]] = {}
        for place, cell in enumerate(values.tolist()):
            said = written(cell) if type(cell) in _PLAIN else str(place)
            alike.setdefault((type(cell), said), []).append(cell)
        for cells in alike.values():
            try:
                found._add(cells[0], len(cells))
            except Exception:  # an object that cannot say what it is: no error depends on a record
                found.missing += len(cells)
        return found

    def _add(self, cell: Any, count: int) -> None:
        key = None if is_missing(cell) else category_key(cell)
        if key is None:
            self.missing += count
            return
        number = None if self.categories else number_of(cell)
        when = None if self.categories or number is not None else moment_of(cell, ISO)
        if number is not None:
            self.kinds["number"] += count
            self.grid[bin_of(number)] += count
        elif when is not None:
            self.kinds["date"] += count
            self.years[year_bin(when)] += count
        elif key[:1] == "\0":  # an object that is no label
            self.missing += count
        else:
            self.kinds["text"] += count
            self.texts[key[:LONGEST_TEXT]] += count  # spelt one way, as a list of categories wants it

    @property
    def listed(self) -> Array:
        """Counts of everything that is public, in one row."""
        return np.concatenate([[self.missing], [self.kinds[kind] for kind in CELL_KINDS], self.grid, self.years])


@dataclass(frozen=True)
class NoisyCells:
    """The same after noise: what may be seen. `texts` are those that many records hold."""

    missing: float
    kinds: dict[CellKind, float]
    grid: Array
    years: Array
    texts: dict[str, float]

    @classmethod
    def of(cls, listed: Array, texts: dict[str, float]) -> NoisyCells:
        kinds = dict(zip(CELL_KINDS, listed[1:4].tolist(), strict=True))
        return cls(float(listed[0]), kinds, listed[4 : 4 + GRID], listed[4 + GRID :], texts)


# Of these what a cell says is what it is; an object of another type, that of somebody's own among them, is by itself.
_PLAIN = frozenset({str, int, float, bool, type(None)})
LISTED = 1 + len(CELL_KINDS) + GRID + YEARS  # numbers in `Cells.listed`


def written(cell: Any) -> str:
    """What a cell says. Cells are counted together only where they say the same: 1, 1.0 and True are equal to Python,
    as are 0.0 and -0.0, and the first of them would decide what all the others are."""
    try:
        return str(cell)
    except Exception:  # a whole number of thousands of digits, or an object of somebody's
        return "\0"
