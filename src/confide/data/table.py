"""Raw records as they come from a file: named columns, or one block of unnamed numbers such as images.

A `Table` holds private records. It lives on the trusted side only: it hides its contents from `repr`, and
nothing of it reaches a method except through the boundary. Values are kept as read; every transformation that
a model sees is made later by the `Encoder`, from public facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from confide.errors import DataError

if TYPE_CHECKING:
    from confide.data.schema import Schema

Array: TypeAlias = NDArray[Any]
Result = TypeVar("Result")

# Cells that count as missing, after blanks at both ends are cut off. A declared category or class of the same
# spelling wins over this list ("NA" may be a country). "None" is left out: it is a common honest category.
MISSING_TOKENS: tuple[str, ...] = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")

_PLAIN_CELLS = frozenset((str, bool, int, float, type(None)))
_CELLS = (str, bool, int, float, np.bool_, np.integer, np.floating, type(None))


def attempt(action: Callable[[], Result], complaint: str, *kinds: type[BaseException]) -> Result:
    """Run `action`; on one of `kinds` raise a DataError instead.

    The new error is raised outside the `except` block on purpose: readers quote cells in their messages, and
    an exception chained as context would carry them into a log.
    """
    try:
        return action()
    except kinds:
        pass
    raise DataError(complaint)


def quoted(name: object, limit: int = 60) -> str:
    """A name fit for a message: escaped, and cut when it is very long."""
    text = str(name)
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def shown(value: object, limit: int = 60) -> str:
    """A public value fit for a message. Python refuses to write whole numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return f"({type(value).__name__})"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listed(names: Iterable[object], limit: int = 20) -> str:
    """The first names of a list, for a message."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(quoted(name) for name in every[:limit]) + more if every else "none"


def placed(places: Iterable[int], limit: int = 20) -> str:
    """Columns of a file by number, counted from 1. Their names may be the cells of a first record."""
    every = [str(place + 1) for place in places]
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return f"column{'s' if len(every) != 1 else ''} {', '.join(every[:limit])}{more}"


@dataclass(frozen=True, repr=False, eq=False)
class Table:
    """Private records: features by name (`columns`), as one `block` of shape (n, ...) or as `inputs`; and labels.

    Columns and labels are one-dimensional arrays: float64 for numbers (missing is NaN), bool, or object for
    text (missing is None, or one of MISSING_TOKENS). Inputs are the tensors of a record, of any shape, by name or
    place: they reach a network of one's own as they are (`confide.data.trees`). Weights are their shares. Whether
    labels are whole numbers is said by the type of the array that they came in (`whole_labels`), not by what they are.
    """

    columns: Mapping[str, Array] = field(default_factory=dict)
    block: Array | None = None
    target: str | None = None
    labels: Array | None = None
    inputs: Mapping[str, Array] = field(default_factory=dict)
    weights: Array | None = None
    whole_labels: bool = False

    def __post_init__(self) -> None:
        if (self.block is not None) + bool(self.inputs) + bool(self.columns) > 1:
            raise DataError("columns and block: a table holds named columns, one block or inputs, not two of them")
        for name, values in self.columns.items():
            if values.ndim != 1 or len(values) != self.rows:
                raise DataError(f"column {quoted(name)}: must be one-dimensional, as long as the other columns")
        if self.labels is not None and (self.labels.ndim not in (1, 2) or len(self.labels) != self.rows):
            raise DataError("labels: must have one value per record, or one row of several targets")
        if self.weights is not None and self.weights.shape != (self.rows,):
            raise DataError("weights: must be one-dimensional, with one number per record")

    @classmethod
    def from_arrays(cls, x: Any, y: Any | None = None, *, target: str = "y") -> Table:
        """A block of numbers (n, d), (n, h, w), ... and its labels; anything `numpy.asarray` takes."""
        block = attempt(lambda: np.asarray(x), "x: must be an array of numbers", TypeError, ValueError)
        if block.ndim < 2:
            raise DataError(f"x: has {block.ndim} dimensions; must be (records, features) or (records, height, width)")
        if block.dtype.kind not in "biuf":
            raise DataError(f"x: holds {block.dtype.name} values; must be an array of real numbers")
        if y is None:
            return cls(block=block)
        labels = attempt(lambda: np.asarray(y), "y: must be an array", TypeError, ValueError)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or len(labels) != len(block):
            raise DataError(f"y: has shape {labels.shape}; must hold one label for each of the {len(block)} rows of x")
        # Of lists and frames the type follows from the values: one missing label would make another type of it.
        whole = isinstance(y, np.ndarray) and labels.dtype.kind in "iu"
        return cls(block=block, target=target, labels=plain_column(labels, target), whole_labels=whole)

    @property
    def rows(self) -> int:
        """The true number of records: private, unlike `Schema.records`."""
        if self.block is not None:
            return len(self.block)
        for values in chain(self.columns.values(), self.inputs.values()):  # the first one only: there may be thousands
            return len(values)
        return 0 if self.labels is None else len(self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def take(self, rows: Sequence[int] | Array) -> Table:
        """The records of these row numbers."""
        index = np.asarray(rows, dtype=np.intp)
        if index.size and (index.min() < 0 or index.max() >= self.rows):
            raise DataError(f"rows: the row numbers reach outside the {self.rows} rows of the table")
        return replace(
            self,
            columns={name: values[index] for name, values in self.columns.items()},
            block=None if self.block is None else self.block[index],
            labels=None if self.labels is None else self.labels[index],
            weights=None if self.weights is None else self.weights[index],
            inputs={name: values[index] for name, values in self.inputs.items()},
        )

    def __repr__(self) -> str:
        what = f"{len(self.columns)} columns" if self.block is None else f"block of shape (n, *{self.block.shape[1:]})"
        return f"Table({what}, target={self.target!r}, records hidden)"


def plain_column(values: Array, name: str) -> Array:
    """Any one-dimensional array in one of the three kinds that a Table keeps."""
    if values.dtype.kind in "iuf":
        return as_numbers(values, name)
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind == "O":
        cells = list(values)
        if all(type(cell) in _PLAIN_CELLS for cell in cells):
            return values
        result = np.empty(len(values), dtype=object)
        result[:] = [plain_cell(cell) for cell in cells]
        return result
    if values.dtype.kind in "UT":
        return values.astype(object)
    raise DataError(f"column {quoted(name)}: holds {values.dtype.name} values; must hold numbers, booleans or text")


def as_numbers(values: Array, where: str, *, private: bool = False) -> Array:
    """An array as float64. Text is refused; objects that are numbers or booleans are taken, all others are missing.

    private   whether a column can be read must not depend on one of its cells: text that is no number is missing
    """
    if values.dtype.kind in "biuf":
        with np.errstate(over="ignore"):  # long doubles beyond float64 become infinite, that is, missing
            return values.astype(np.float64)
    result = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(map(plain_cell, values.tolist())):
        if isinstance(value, str) and private:
            value = _number_of(value)
        elif isinstance(value, str):
            instead = "classes" if where.startswith("target") else "categories"
            raise DataError(f"{where}: holds text where numbers are declared; clean it, or declare {instead}")
        try:
            result[row] = np.nan if value is None else float(value)
        except OverflowError:  # an integer beyond the largest float
            result[row] = np.nan
    return result


def plain_cell(cell: Any) -> Any:
    """A number, a truth value or a text, by itself; None for anything else. An object may raise whatever is asked."""
    if type(cell) in _PLAIN_CELLS:
        return cell
    try:
        if isinstance(cell, str):
            return str.__str__(cell)
        if isinstance(cell, Decimal):
            return float(cell)
        if isinstance(cell, date):  # and times of a day, of Python and of pandas
            return cell.isoformat()
        return cell if isinstance(cell, _CELLS) and not isinstance(cell, np.timedelta64) else None
    except Exception:
        return None


def as_text(cell: Any) -> str | None:
    """A cell as it would be written in a file of text; None for what is missing, or no number, truth value or text."""
    cell = plain_cell(cell)
    try:
        text = None if cell is None or cell != cell else str(cell)
        return text if text is None or text.encode() else ""
    except ValueError:  # whole numbers of thousands of digits, texts that are no Unicode
        return None


def _number_of(text: str) -> float | None:
    """The number that a cell says, as it would be read in a column of numbers; None for any other text."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return float(word.lower() == "true")
    try:
        return None if "_" in word else float(word)
    except ValueError:
        return None


@dataclass(frozen=True, repr=False, eq=False)
class DataSet:
    """Training records, an optional separate test part, and the public facts that come with a known data set.

    `splits` are public pairs of row numbers (train, test), for benchmarks that publish them.
    """

    name: str
    train: Table
    test: Table | None = None
    schema: Schema | None = None
    splits: tuple[tuple[Array, Array], ...] = ()

    def split(self, number: int) -> DataSet:
        """Part `train` by the published split of this number, or 90/10 by a permutation of the row numbers.

        Either way it depends on row numbers only, so the sizes of the two parts are public.
        """
        if self.splits:
            if not 0 <= number < len(self.splits):
                raise DataError(f"number={number}: {self.name} has the splits 0 to {len(self.splits) - 1}")
            chosen, held_out = self.splits[number]
        else:
            chosen, held_out = permuted_rows(self.train.rows, self.train.rows // 10, number)
        schema = self.schema and replace(self.schema, records=len(chosen))
        return DataSet(self.name, self.train.take(chosen), self.train.take(held_out), schema)

    def __repr__(self) -> str:
        return f"DataSet({self.name!r}, train={self.train!r}, test={self.test!r}, splits={len(self.splits)})"


def permuted_rows(rows: int, held_out: int, seed: int) -> tuple[Array, Array]:
    """Row numbers (train, test) by a fixed permutation; the stream of RandomState never changes."""
    order = np.random.RandomState(seed).permutation(rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
