"""Column and Input: the public facts of one feature, or of one tensor of a record, and the checks they go through."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from confide.data.labels import Label, plain_labels
from confide.data.table import attempt, quoted, shown
from confide.errors import DataError

Kind: TypeAlias = Literal["numeric", "categorical"]
Missing: TypeAlias = Literal["refuse", "middle", "category"]
Source: TypeAlias = Literal["declared", "assumed public", "learnt privately"]
Bounds: TypeAlias = tuple[float, float]

KINDS: tuple[Kind, ...] = get_args(Kind)
POLICIES: tuple[Missing, ...] = get_args(Missing)
# The encoder divides by the half-width, which must not vanish for bounds a hair apart.
SMALLEST_HALF_WIDTH = 1e-300
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True)
class Column:
    """The public facts of one feature; a list of categories makes it categorical.

    missing = "refuse"    there is no input for it: a training record counts for nothing (the boundary answers zero),
                          a record to predict is an error
              "middle"    a number: the middle of the bounds; a category: an equal share of every category
              "category"  missing is a value of its own and gets its own input
    """

    name: str
    kind: Kind = "numeric"
    bounds: Bounds | None = None
    categories: tuple[Label, ...] = ()
    missing: Missing = "refuse"
    source: Source = "declared"

    def __post_init__(self) -> None:
        where = f"column {quoted(self.name)}"
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"name={shown(self.name)}: a column needs a name, a text that is not empty")
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

    @property
    def width(self) -> int:
        """How many model inputs this column becomes."""
        return (1 if self.kind == "numeric" else len(self.categories)) + (self.missing == "category")


@dataclass(frozen=True)
class Input:
    """The public facts of one tensor of a record, for records that are several tensors or ids.

    vocabulary   of whole numbers: ids are 0, ..., vocabulary - 1, and a record with any other counts for nothing
    bounds       (low, high) of real numbers; those outside are moved to the nearer end
    """

    vocabulary: int | None = None
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        size = self.vocabulary
        if (size is None) == (self.bounds is None):
            raise DataError("input: has a vocabulary or bounds; give one of them")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**62):
            raise DataError(f"vocabulary={shown(size)}: must be a whole number, at least 1")
        if self.bounds is not None:
            object.__setattr__(self, "bounds", bounds_pair(self.bounds, "input: bounds"))


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
