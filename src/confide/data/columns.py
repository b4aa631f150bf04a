"""Column and Input: the public facts of one feature, or of one tensor of a record, and the checks they go through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from confide.data.labels import Label, plain_labels
from confide.data.table import Array, attempt, quoted, shown
from confide.data.views import (
    KNOWN_BOUNDS,
    PARTS,
    USUAL_PARTS,
    DatePart,
    check_format,
    dates_as_numbers,
    dates_viewed,
    texts_viewed,
)
from confide.errors import DataError
from confide.wording import meant

Kind: TypeAlias = Literal["numeric", "categorical"]
Missing: TypeAlias = Literal["refuse", "middle", "category"]
Source: TypeAlias = Literal["declared", "assumed public", "learnt privately"]
Bounds: TypeAlias = tuple[float, float]

KINDS: tuple[Kind, ...] = get_args(Kind)
POLICIES: tuple[Missing, ...] = get_args(Missing)
# The encoder divides by the half-width, which must not vanish for bounds a hair apart.
SMALLEST_HALF_WIDTH = 1e-300
SOURCES: tuple[Source, ...] = get_args(Source)
MOST_BUCKETS = 4096  # as many inputs of a network; beyond it a text tells little more


@dataclass(frozen=True)
class Column:
    """The public facts of one feature; a list of categories makes it categorical.

    kind         "numeric" or "categorical"
    bounds       (low, high) of a number; values outside are moved to the nearer end
    categories   the values of a category, in any order; another value counts as missing
    missing      what an empty cell is: "refuse", "middle" or "category"
    source       whose word these facts are

    missing = "refuse"    there is no input for it: a training record counts for nothing (the boundary answers zero),
                          a record to predict is an error
              "middle"    a number: the middle of the bounds; a category: an equal share of every category
              "category"  missing is a value of its own and gets its own input
    of        the column of the file that it is made of, where that has another name
    date      the cells are dates of this format, ISO or such as %d/%m/%Y, and `part` of them is a number (`views`)
    buckets   the cells are texts of which there are too many to list: a public hash puts them into so many categories
    """

    name: str
    kind: Kind = "numeric"
    bounds: Bounds | None = None
    categories: tuple[Label, ...] = ()
    missing: Missing = "refuse"
    source: Source = "declared"
    of: str = ""
    date: str = ""
    part: DatePart = ""
    buckets: int = 0

    def __post_init__(self) -> None:
        where = f"column {quoted(self.name)}"
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"name={shown(self.name)}: a column needs a name, a text that is not empty")
        self._check_view(where)
        object.__setattr__(self, "categories", plain_labels(self.categories, f"{where}: categories"))
        if self.categories and self.bounds is None:
            object.__setattr__(self, "kind", "categorical")
        check_choice(f"{where}: kind", self.kind, KINDS)
        check_choice(f"{where}: missing", self.missing, POLICIES)
        check_choice(f"{where}: source", self.source, SOURCES)
        if self.kind == "categorical" and self.bounds is not None:
            raise DataError(f"{where}: a categorical column has categories, not bounds; leave one of them out")
        if self.kind == "numeric" and self.categories:
            raise DataError(f"{where}: a numeric column has bounds, not categories; leave one of them out")
        if self.bounds is not None:
            object.__setattr__(self, "bounds", bounds_pair(self.bounds, f"{where}: bounds"))

    def _check_view(self, where: str) -> None:
        """What a column that is not the cell itself has to declare; what is known of it is filled in."""
        if not isinstance(self.of, str):
            raise DataError(f"{where}: of={shown(self.of)}: must be the name of a column of the file")
        check_choice(f"{where}: part", self.part, PARTS)
        if self.date:
            check_format(self.date, where)
            object.__setattr__(self, "part", self.part or "time")
            if self.bounds is None and not self.categories:
                object.__setattr__(self, "bounds", KNOWN_BOUNDS.get(self.part))
            if self.part in ("time", "year") and self.bounds is not None:
                numbers = dates_as_numbers(self.bounds, self.part, self.date, f"{where}: bounds")
                object.__setattr__(self, "bounds", numbers)
        elif self.part:
            raise DataError(f"{where}: part={self.part!r}: is of a date; declare date=, its format")
        size = self.buckets
        if isinstance(size, bool) or not isinstance(size, int) or not (size == 0 or 2 <= size <= MOST_BUCKETS):
            raise DataError(f"{where}: buckets={shown(size)}: must be a whole number from 2 to {MOST_BUCKETS}")
        if size:
            if self.date or self.bounds is not None or tuple(self.categories) not in ((), tuple(range(size))):
                raise DataError(f"{where}: buckets are instead of categories, bounds and dates; give one of them")
            object.__setattr__(self, "categories", tuple(range(size)))

    @property
    def raw(self) -> str:
        """The column of the file that it is made of."""
        return self.of or self.name

    @property
    def is_text(self) -> bool:
        """Whether its cells are to be read as they are written."""
        return self.kind == "categorical" or bool(self.date)

    def view(self, values: Array) -> Array:
        """The values that its facts are about, of the cells of its raw column."""
        if self.date:
            return dates_viewed(values, self.date, self.part)
        return texts_viewed(values, self.buckets) if self.buckets else values

    @property
    def width(self) -> int:
        """How many model inputs this column becomes."""
        return (1 if self.kind == "numeric" else len(self.categories)) + (self.missing == "category")


@dataclass(frozen=True)
class Input:
    """The public facts of one tensor of a record, for records that are several tensors or ids.

    vocabulary   of whole numbers: ids are 0, ..., vocabulary - 1, and a record with any other counts for nothing;
                 several numbers are one for every place along the last axis, such as columns of categories
    bounds       (low, high) of real numbers; those outside are moved to the nearer end
    """

    vocabulary: int | tuple[int, ...] | None = None
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        size: Any = self.vocabulary
        if (size is None) == (self.bounds is None):
            raise DataError("input: has a vocabulary or bounds; give one of them")
        sizes = size if isinstance(size, list | tuple) and size else () if size is None else (size,)
        if any(isinstance(one, bool) or not isinstance(one, int) or not 1 <= one < 2**62 for one in sizes):
            raise DataError(f"vocabulary={shown(size)}: must be a whole number, at least 1, or one for every column")
        if isinstance(size, list):
            object.__setattr__(self, "vocabulary", tuple(size))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", bounds_pair(self.bounds, "input: bounds"))

    @property
    def sizes(self) -> str:
        """Its vocabularies as a text."""
        return ", ".join(map(str, self.vocabulary)) if isinstance(self.vocabulary, tuple) else str(self.vocabulary)


def bounds_pair(values: Any, where: str) -> Bounds:
    """(low, high) as floats, or a DataError."""
    pair = attempt(
        lambda: tuple(float(value) for value in values),
        f"{where}: must be two numbers, low and high",
        TypeError,
        ValueError,
        OverflowError,
    )
    if len(pair) != 2 or isinstance(values, str | bytes):
        raise DataError(f"{where}: must be two numbers, low and high")
    low, high = pair
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{where}=({low:g}, {high:g}): must be finite")
    if not (low < high and high / 2 - low / 2 > SMALLEST_HALF_WIDTH):
        raise DataError(f"{where}=({low:g}, {high:g}): low must be less than high")
    return low, high


def check_choice(argument: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise DataError(f"{argument}={shown(value)}: must be one of {', '.join(choices)}")


def columns_of(name: str, entry: Any, missing: Any, where: str) -> list[Column]:
    """What stands under one [columns.name]: one column, or one for every part of a date."""
    known = [field.name for field in fields(Column) if field.name != "name"]
    inner = {"missing": missing, **known_keys(entry, [*known, "parts"], where)}
    parts = inner.pop("parts", None)
    if "date" not in inner or "part" in inner:
        if parts is not None:
            raise DataError(f"{where}: parts are of a date; declare date, its format")
        return [column_of({"name": name, **inner}, where)]
    wanted = USUAL_PARTS if parts is None else parts
    if not isinstance(wanted, list | tuple) or not wanted:
        raise DataError(f"{where}: parts={shown(wanted)}: must be a list such as {list(USUAL_PARTS)}")
    of, bounds, columns = inner.pop("of", name), inner.pop("bounds", None), []
    for part in wanted:
        facts = {**inner, "of": of, "part": part, **({"bounds": bounds} if part in ("time", "year") else {})}
        columns.append(column_of({"name": f"{name} {part}", **facts}, where))
    return columns


def facts_of_column(column: Column) -> dict[str, Any]:
    """All that is usual, and what is not where it is there."""
    rare = {"of", "date", "part", "buckets"}
    found = {field.name: plain(getattr(column, field.name)) for field in fields(column)}
    return {name: value for name, value in found.items() if value or name not in rare}


def column_of(values: dict[str, Any], where: str) -> Column:
    return attempt(lambda: Column(**values), f"{where}: a value is missing or has the wrong type", TypeError)


def known_keys(values: Any, known: list[str], where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: must be a table of keys and values")
    for key in values:
        if key not in known:
            raise DataError(f"{where}: unknown key {quoted(key)}; known: {', '.join(known)}{meant(key, known)}")
    return dict(values)


def plain(value: Any) -> Any:
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value
