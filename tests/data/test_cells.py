"""One odd object in a column: it counts for nothing, raises nothing, and changes no other record."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from confide.data import Column, Encoder, Schema, Table
from confide.data.loaders import from_frame
from confide.data.table import as_text, plain_cell, plain_column

RECORDS, ODD = 12, 7


class Hostile:
    """Raises whatever it is asked."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("a cell was asked")

    __float__ = __str__ = __repr__ = __eq__ = __bool__ = __index__ = __len__ = __iter__ = _raise
    __hash__ = _raise  # type: ignore[assignment]


class HostileText(str):
    """A text that is equal to nothing without an error."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("a cell was compared")

    __hash__ = str.__hash__


class Colour(enum.Enum):
    RED = 1


CELLS: dict[str, Any] = {
    "hostile": Hostile(), "hostile text": HostileText("x"), "object": object(), "list": [1], "tuple": (1, 2),
    "mapping": {"a": 1}, "set": {1}, "bytes": b"ab\xff", "bytearray": bytearray(b"x"), "memory": memoryview(b"x"),
    "complex": 1j, "not a decimal": decimal.Decimal("sNaN"), "decimal": decimal.Decimal("0.5"),
    "fraction": fractions.Fraction(1, 3), "day": datetime.date(2020, 1, 1), "span": datetime.timedelta(1),
    "time": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), "clock": datetime.time(1), "uuid": uuid.UUID(int=3),
    "path": pathlib.Path("a"), "member": Colour.RED, "missing": pd.NA, "no time": pd.NaT, "none": None,
    "endless": float("inf"), "huge": 10**400, "longer than text": -(10**5000), "void": np.void(b"ab"),
    "array": np.zeros(3), "scalar array": np.array(1.0), "tensor": torch.zeros(2), "number": torch.tensor(1.0),
    "no tensor": torch.zeros(2, device="meta"), "class": int, "function": len, "error": ValueError("x"),
    "surrogate": "\ud800", "zero byte": "a\0b", "slice": slice(1), "series": pd.Series([1]),
    "interval": pd.Interval(0, 1), "period": pd.Period("2020"), "numpy time": np.datetime64("NaT"),
    "numpy span": np.timedelta64(3, "D"), "numpy flag": np.bool_(True), "module": np,
}  # fmt: skip
SCHEMA = Schema(
    columns=(Column("number", bounds=(-3, 3)), Column("kind", categories=("x", "y"))),
    records=RECORDS,
    classes=("no", "yes"),
    target="label",
)


def column(values: list[Any]) -> Any:
    """An array of objects, whatever they would like to become."""
    result = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        result[row] = value
    return result


def encoded(name: str | None = None, cell: Any = None) -> tuple[Any, Any]:
    """Inputs and labels of records with one odd cell."""
    values = {
        "number": [row / 10 for row in range(RECORDS)],
        "kind": ["xy"[row % 2] for row in range(RECORDS)],
        "label": [("no", "yes")[row % 2] for row in range(RECORDS)],
    }
    if name is not None:
        values[name][ODD] = cell
    held = {key: column(cells) for key, cells in values.items()}
    frame = pd.DataFrame({key: pd.Series(held[key], dtype=object) for key in ("number", "kind")})
    read = from_frame(frame, target_required=False)
    table = Table(columns=read.columns, target="label", labels=plain_column(held["label"], "label"))
    return Encoder(SCHEMA).training(table)


@pytest.mark.filterwarnings("ignore::confide.errors.CuratorNote")
@pytest.mark.parametrize("place", ["number", "kind", "label"])
def test_one_odd_cell_changes_no_other_record(place: str) -> None:
    x, y = encoded()
    others = [row for row in range(RECORDS) if row != ODD]
    for name, cell in CELLS.items():
        odd_x, odd_y = encoded(place, cell)
        np.testing.assert_array_equal(np.asarray(odd_x)[others], np.asarray(x)[others], err_msg=name)
        np.testing.assert_array_equal(np.asarray(odd_y)[others], np.asarray(y)[others], err_msg=name)


def test_what_cells_say() -> None:
    assert plain_cell(decimal.Decimal("0.5")) == 0.5
    assert plain_cell(datetime.date(2020, 1, 2)) == "2020-01-02"
    assert plain_cell(Hostile()) is None
    assert plain_cell(np.timedelta64(3, "D")) is None
    assert as_text(HostileText("x")) == "x"
    assert as_text("\ud800") is None
    assert as_text(10**5000) is None
    assert as_text("") == ""
    assert as_text(float("nan")) is None
