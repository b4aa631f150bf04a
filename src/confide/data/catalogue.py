"""Catalogue: benchmark data sets in a directory of the user's, with the public facts about them.

The directory is given as `--data DIR` or in the environment variable CONFIDE_DATA. Tables are comma-separated
CSV (gzip) in original units with a header and the target in the last column; images are npz files with
x_train, y_train, x_test, y_test; CIFAR-10, SVHN and Year are read as published (`published`). Column names are those
of the schemas below, in the same order.

Bounds and categories are written by hand, as round figures from what the quantities are (a percentage, a joint
angle, a rating out of ten), with the ranges of these long-published files in view: they are public for these data
sets and would not be for new records. Where a few records lie outside they are clamped. No data is shipped with
confide.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from confide.data import published
from confide.data.columns import Column, Missing
from confide.data.decoding import NPZ_FAULTS
from confide.data.loaders import load_dataset
from confide.data.published import PublishedReader
from confide.data.schema import Schema
from confide.data.table import Array, DataSet, attempt, quoted
from confide.errors import DataError

ENVIRONMENT = "CONFIDE_DATA"
SPLITS_FILE = "uci_splits.npz"


@dataclass(frozen=True)
class Benchmark:
    """One data set: its files, where they come from, and its public schema."""

    train: str
    schema: Schema
    origin: str
    test: str | None = None
    has_splits: bool = False
    reader: PublishedReader | None = None


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return tuple(_ENTRIES)


def schema(name: str) -> Schema:
    """The public facts about a data set; needs no data."""
    return _entry(name).schema


def load(name: str, directory: str | Path | None = None, *, verify: bool = False) -> DataSet:
    """A benchmark data set with its schema, its official test part or its published splits where it has them.

    verify=True compares the files with the checksums of the copies that the benchmarks were run on; there are none of
    CIFAR-10, SVHN and Year, which were not at hand.
    """
    entry = _entry(name)
    train = _file(entry.train, name, entry, directory, verify and entry.reader is None)
    if entry.reader is not None:
        records, held_out = entry.reader(train)
        return DataSet(name, records, held_out, entry.schema.for_table(records))
    test = None if entry.test is None else _file(entry.test, name, entry, directory, verify)
    read = load_dataset(train, entry.schema.target, test=test, schema=entry.schema)
    pairs = splits(name, directory, verify=verify) if entry.has_splits else ()
    return DataSet(name, read.train, read.test, entry.schema.for_table(read.train), pairs)


@cache
def differing(directory: Path) -> tuple[str, ...]:
    """The files of a directory that have a published name and are not the copy that the benchmarks were run on."""
    found = [(name, directory / name) for name in _SHA256 if (directory / name).is_file()]
    return tuple(name for name, path in found if hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[name])


def splits(name: str, directory: str | Path | None = None, *, verify: bool = False) -> tuple[tuple[Array, Array], ...]:
    """The usual 90/10 splits of a UCI regression set, as pairs of row numbers (train, test).

    They are those of Hernandez-Lobato and Adams, "Probabilistic Backpropagation", ICML 2015.
    """
    entry = _entry(name)
    if not entry.has_splits:
        known = ", ".join(key for key, value in _ENTRIES.items() if value.has_splits)
        raise DataError(f"name={name!r}: has no published splits; those with splits are {known}")
    path = _file(SPLITS_FILE, name, entry, directory, verify)

    def read() -> tuple[Array, Array]:
        with np.load(path, allow_pickle=False) as archive:
            return archive[f"{name}_train"], archive[f"{name}_test"]

    complaint = f"data={quoted(path)}: cannot be read; it must hold the arrays {name}_train and {name}_test"
    train, test = attempt(read, complaint, *NPZ_FAULTS)
    return tuple(zip(train, test, strict=False))


def _entry(name: str) -> Benchmark:
    if name not in _ENTRIES:
        raise DataError(f"name={name!r}: no such data set; known: {', '.join(_ENTRIES)}")
    return _ENTRIES[name]


def _file(file: str, name: str, entry: Benchmark, directory: str | Path | None, verify: bool) -> Path:
    chosen = directory if directory is not None else os.environ.get(ENVIRONMENT)
    wanted = " and ".join(part for part in (entry.train, entry.test) if part)
    way_out = f"put {wanted} (from {entry.origin}) in one directory and name it with --data DIR or {ENVIRONMENT}"
    if not chosen:
        raise DataError(f"data set {name!r}: no data directory given; {way_out}")
    path = Path(chosen) / file
    if not path.is_file():
        raise DataError(f"data={quoted(chosen)}: holds no file {file}; {way_out}")
    if verify and hashlib.sha256(path.read_bytes()).hexdigest() != _SHA256[file]:
        raise DataError(f"data={quoted(path)}: differs from the copy the benchmarks were run on; leave out verify")
    return path


def _numeric(pairs: Mapping[str, tuple[float, float]]) -> tuple[Column, ...]:
    return tuple(Column(name, bounds=bounds) for name, bounds in pairs.items())


def _categories(name: str, text: str) -> Column:
    """A categorical column of Adult, its categories separated by blanks; '?' in the files is missing."""
    missing: Missing = "category" if name in ("workclass", "occupation", "native_country") else "refuse"
    return Column(name, categories=tuple(text.split()), missing=missing)


_ADULT = (
    Column("age", bounds=(17, 90)),
    _categories(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    ),
    Column("fnlwgt", bounds=(0, 1_500_000)),
    _categories(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
        "1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Column("education_num", bounds=(1, 16)),
    _categories(
        "marital_status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse",
    ),
    _categories(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv "
        "Protective-serv Armed-Forces",
    ),
    _categories("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _categories("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _categories("sex", "Female Male"),
    Column("capital_gain", bounds=(0, 99_999)),
    Column("capital_loss", bounds=(0, 4_400)),
    Column("hours_per_week", bounds=(1, 99)),
    _categories(
        "native_country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan "
        "Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal "
        "Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua "
        "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
    ),
)

_ABALONE = (
    Column("sex", categories=("M", "F", "I")),
    *_numeric(
        {  # millimetres and grams, divided by 200
            "length": (0, 1),
            "diameter": (0, 0.8),
            "height": (0, 0.3),
            "whole_weight": (0, 3),
            "shucked_weight": (0, 1.5),
            "viscera_weight": (0, 0.8),
            "shell_weight": (0, 1.1),
        }
    ),
)

_NAVAL = _numeric(
    {
        "lever_position": (1, 9.3),
        "ship_speed_kn": (3, 27),
        "gt_shaft_torque_kNm": (0, 75_000),
        "gt_rate_rpm": (1_200, 3_600),
        "gg_rate_rpm": (6_500, 10_000),
        "stbd_prop_torque_kN": (0, 650),
        "port_prop_torque_kN": (0, 650),
        "hp_turbine_exit_temp": (400, 1_150),
        "gt_comp_inlet_temp": (280, 300),
        "gt_comp_outlet_temp": (500, 800),
        "hp_turbine_exit_pressure_bar": (1, 5),
        "gt_comp_inlet_pressure_bar": (0.9, 1.1),
        "gt_comp_outlet_pressure_bar": (5, 25),
        "gt_exhaust_pressure_bar": (1, 1.06),
        "turbine_injection_control_pct": (0, 100),
        "fuel_flow_kg_s": (0, 2),
    }
)

_WINE = _numeric(
    {
        "fixed_acidity": (4, 16),
        "volatile_acidity": (0, 1.6),
        "citric_acid": (0, 1),
        "residual_sugar": (0, 16),
        "chlorides": (0, 0.65),
        "free_sulfur_dioxide": (0, 75),
        "total_sulfur_dioxide": (0, 300),
        "density": (0.99, 1.004),
        "pH": (2.7, 4.1),
        "sulphates": (0.3, 2),
        "alcohol": (8, 15),
    }
)

_PROTEIN = _numeric(
    {
        "F1": (2_000, 40_000),
        "F2": (400, 15_500),
        "F3": (0, 0.6),
        "F4": (0, 375),
        "F5": (300_000, 5_500_000),
        "F6": (0, 600),
        "F7": (0, 106_000),
        "F8": (0, 350),
        "F9": (15, 56),
    }
)

_POWER = _numeric({"AT": (0, 40), "V": (25, 82), "AP": (990, 1_035), "RH": (25, 101)})
_ANGLES = _numeric({f"theta{joint}": (-1.5708, 1.5708) for joint in range(1, 9)})
# Loudness in decibels above the softest, then timbres about 0; covariances of these. The file was not at hand, so these
# are widths that timbres of this kind have, and what lies outside is clamped.
_YEAR = _numeric(
    {
        name: (0, 65) if name == "average1" else (-200, 200) if name.startswith("average") else (-2000, 2000)
        for name in published.year_features()
    }
)
_UCI = "archive.ics.uci.edu, "


def _regression(file: str, n: int, target: str, bounds: tuple[float, float], columns: tuple[Column, ...]) -> Benchmark:
    described = Schema(records=n, target=target, target_bounds=bounds, columns=columns)
    origin = "the Delve archive, kin8nm" if file.startswith("kin8nm") else _UCI + file.split(".")[0].replace("_", " ")
    return Benchmark(file, described, origin, has_splits=not file.startswith("abalone"))


_ENTRIES: dict[str, Benchmark] = {
    "mnist": Benchmark(
        "mnist.npz",
        Schema(60_000, 10, "digit", bounds=(0, 255), shape=(28, 28)),
        "the MNIST files",
        test="mnist.npz",
    ),
    "adult": Benchmark(
        "adult_train.csv.gz",
        Schema(32_561, ("<=50K", ">50K"), "income", columns=_ADULT),
        _UCI + "adult",
        test="adult_test.csv.gz",
    ),
    "abalone": _regression("abalone.csv.gz", 4_177, "rings", (0, 30), _ABALONE),
    "naval": _regression("naval.csv.gz", 11_934, "gt_compressor_decay", (0.95, 1), _NAVAL),
    "kin8nm": _regression("kin8nm.csv.gz", 8_192, "y", (0, 1.5), _ANGLES),
    "power_plant": _regression("power_plant.csv.gz", 9_568, "PE", (420, 496), _POWER),
    "wine_red": _regression("wine_red.csv.gz", 1_599, "quality", (0, 10), _WINE),
    "protein": _regression("protein.csv.gz", 45_730, "RMSD", (0, 21), _PROTEIN),
}

_ENTRIES |= {
    "cifar10": Benchmark(
        "cifar-10-binary.tar.gz",
        Schema(50_000, 10, "class", bounds=(0, 255), shape=(32, 32, 3)),
        "the CIFAR-10 page, binary version",
        reader=published.cifar10,
    ),
    "svhn": Benchmark(
        "train_32x32.mat",
        Schema(73_257, 10, "class", bounds=(0, 255), shape=(32, 32, 3)),
        "the SVHN page, cropped digits; test_32x32.mat beside it",
        reader=published.svhn,
    ),
    "year": Benchmark(
        f"{published.YEAR_TEXT}.zip",
        Schema(published.YEAR_TRAIN, None, "year", target_bounds=(1920, 2012), columns=_YEAR),
        _UCI + "YearPredictionMSD",
        reader=published.year,
    ),
}

_SHA256: dict[str, str] = {
    "mnist.npz": "4b1f37750a2604ed781d8a2b578444519f698b6469bde9d3d8c91ea5b88a4e51",
    "adult_train.csv.gz": "a833df349bf96e939cb2de65a084d3a21cd64c4781a95551430453ac6892bb3b",
    "adult_test.csv.gz": "8b1e351af7a41f3745edeff5bf1aaf280319e11af13ee030b230d8ad83115396",
    "abalone.csv.gz": "7b21ed0fe41518f4ec3c135404b0c8bac0a29490ccec9ffa29bc4a5a83d02363",
    "naval.csv.gz": "893670a6afc78a64fa528b8effea68ad867e9ab670f4757cefa7e691461e2568",
    "kin8nm.csv.gz": "0bfc160393b078105a841ad00b321b03d5799b7600ec1b5a4f774ed93761bf40",
    "power_plant.csv.gz": "a5c1c9ebe84fc4e39bb4c1ed41d3116bd88b5797e254e3682fb379239a5c3448",
    "wine_red.csv.gz": "a68f76349dc024f38a5448782ba44ff74b36ee704f71d7fe1ef8caa7228f358f",
    "protein.csv.gz": "5dafcc9ce4127885ce5db37383ffe8c4706738d0f9483eb9f0521a44b717f81c",
    SPLITS_FILE: "6030d6433502d248ff608bfa365b47e4760c204786e1b9d06bedb3adb35336fe",
}
