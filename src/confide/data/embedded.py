"""Embedded data: sets that come with an installed dependency and need no download."""

from __future__ import annotations

from confide.data.schema import Schema
from confide.data.table import DataError, DataSet, Table, permuted_rows

NAMES: tuple[str, ...] = ("digits",)


def load(name: str) -> DataSet:
    """An embedded data set by name, with its public schema and a fixed public split."""
    if name not in NAMES:
        raise DataError(f"name={name!r}: no such embedded data set; known: {', '.join(NAMES)}")
    return _digits()


def _digits() -> DataSet:
    """Handwritten digits, 8 x 8 pixels of 0 to 16 (Alpaydin and Kaynak, 1998, UCI), from scikit-learn.

    Of its 1797 records 1437 records train and 360 test. The split depends on row numbers only.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen, held_out = permuted_rows(len(x), 360, seed=0)
    whole = Table.from_arrays(x, y, target="digit")
    schema = Schema(records=len(chosen), classes=10, target="digit", bounds=(0, 16), shape=(8, 8))
    return DataSet("digits", whole.take(chosen), whole.take(held_out), schema)
