"""Embedded data: sets that come with an installed dependency and need no download."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from confide.data.columns import Column
from confide.data.schema import Schema
from confide.data.table import DataSet, Table, permuted_rows
from confide.errors import DataError

NAMES: tuple[str, ...] = ("digits", "diabetes")

_DIABETES = {
    "age": (18, 90),
    "sex": (1, 2),
    "bmi": (15, 45),
    "bp": (50, 140),
    "s1": (80, 320),
    "s2": (30, 260),
    "s3": (20, 100),
    "s4": (1, 10),
    "s5": (3, 6.5),
    "s6": (50, 130),
}
"""Round ranges of adults: years, body mass index, mean blood pressure, cholesterols in mg/dl, the ratio of total to HDL
cholesterol, the logarithm of triglycerides, and blood sugar in mg/dl."""


def load(name: str) -> DataSet:
    """An embedded data set by name, with its public schema and a fixed public split."""
    if name not in NAMES:
        raise DataError(f"name={name!r}: no such embedded data set; known: {', '.join(NAMES)}")
    return {"digits": _digits, "diabetes": _diabetes}[name]()


def _numbers(name: str, delimiter: str | None = None) -> np.ndarray:
    """A table of scikit-learn's, which is not imported for it: that takes a second in every process."""
    package = find_spec("sklearn")
    places = [] if package is None else [Path(place) / "datasets/data" / name for place in _folders(package)]
    for place in places:
        if place.exists():
            return np.loadtxt(place, delimiter=delimiter)
    raise DataError(f"{name}: the installed scikit-learn does not hold it; give the records as a file")


def _folders(package: ModuleSpec) -> list[str]:
    return list(package.submodule_search_locations or ())


def _digits() -> DataSet:
    """Handwritten digits, 8 x 8 pixels of 0 to 16 (Alpaydin and Kaynak, 1998, UCI), from scikit-learn.

    Of its 1797 records 1437 records train and 360 test. The split depends on row numbers only.
    """
    found = _numbers("digits.csv.gz", ",")
    x, y = found[:, :-1], found[:, -1].astype(np.int64)
    chosen, held_out = permuted_rows(len(x), 360, seed=0)
    whole = Table.from_arrays(x, y, target="digit")
    schema = Schema(records=len(chosen), classes=10, target="digit", bounds=(0, 16), shape=(8, 8))
    return DataSet("digits", whole.take(chosen), whole.take(held_out), schema)


def _diabetes() -> DataSet:
    """Progression of diabetes in a year, from ten measurements (Efron et al., 2004, Annals of Statistics), from
    scikit-learn.

    Of its 442 records 354 train and 88 test. The split depends on row numbers only. The target is a score that is
    known to lie between 25 and 346, and is declared to lie between 0 and 350.
    """
    x, y = _numbers("diabetes_data_raw.csv.gz"), _numbers("diabetes_target.csv.gz")
    chosen, held_out = permuted_rows(len(x), 88, seed=0)
    features = dict(zip(_DIABETES, x.T, strict=True))
    whole = Table(features, target="progression", labels=y)
    columns = tuple(Column(name, bounds=bounds) for name, bounds in _DIABETES.items())
    schema = Schema(records=len(chosen), target="progression", target_bounds=(0, 350), columns=columns)
    return DataSet("diabetes", whole.take(chosen), whole.take(held_out), schema)
