"""Benchmark data sets: schemas by hand, files from the user's directory, splits by row number."""

from __future__ import annotations

import gzip
import zipfile

import numpy as np
import pytest

from confide.data import Encoder, catalogue
from confide.errors import DataError


def write_csv(directory, name: str, rows: int = 20) -> None:
    """A made-up file of the documented form: every column at its bounds or among its categories."""
    schema = catalogue.schema(name)
    rng = np.random.default_rng(0)
    columns = []
    for column in schema.columns:
        if column.bounds is not None:
            columns.append([f"{value:.6g}" for value in rng.uniform(*column.bounds, rows)])
        else:
            marks = ["?"] if column.missing == "category" else []
            columns.append(list(rng.choice([*column.categories, *marks], rows)))
    if schema.classes is not None:
        columns.append([str(schema.classes[row % len(schema.classes)]) for row in range(rows)])
    else:
        assert schema.target_bounds is not None
        columns.append([f"{value:.6g}" for value in rng.uniform(*schema.target_bounds, rows)])
    header = ",".join([*(column.name for column in schema.columns), schema.target or ""])
    text = "\n".join([header, *(",".join(map(str, row)) for row in zip(*columns, strict=True))])
    parts = ("adult_train.csv.gz", "adult_test.csv.gz") if name == "adult" else (f"{name}.csv.gz",)
    for part in parts:
        (directory / part).write_bytes(gzip.compress(text.encode()))


PUBLISHED = ("cifar10", "svhn", "year")
TABLES = [name for name in catalogue.names() if name not in ("mnist", *PUBLISHED)]
SPLIT = [name for name in TABLES if name not in ("adult", "abalone")]


@pytest.fixture
def directory(tmp_path):
    for name in TABLES:
        write_csv(tmp_path, name)
    order = np.random.default_rng(0).permutation(20).astype(np.int32)
    arrays = {f"{name}_train": np.stack([order[:18], order[2:]]) for name in SPLIT}
    arrays |= {f"{name}_test": np.stack([order[18:], order[:2]]) for name in SPLIT}
    np.savez(tmp_path / "uci_splits.npz", **arrays)
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 28)).astype(np.uint8)
    digits = np.arange(30) % 10
    np.savez(tmp_path / "mnist.npz", x_train=images[:20], y_train=digits[:20], x_test=images[20:], y_test=digits[20:])
    return tmp_path


def test_the_names() -> None:
    assert catalogue.names() == (
        "mnist", "adult", "abalone", "naval", "kin8nm", "power_plant", "wine_red", "protein", "cifar10", "svhn", "year",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mnist", *TABLES])
def test_every_set_loads_and_encodes(directory, monkeypatch, name: str) -> None:
    monkeypatch.setenv("CONFIDE_DATA", str(directory))
    data = catalogue.load(name)
    assert data.schema is not None
    x, y = Encoder(data.schema).encode(data.train)
    assert x.shape == (20, data.schema.features)
    assert np.isfinite(x).all()
    assert (np.abs(x) <= 1).all()
    assert y is not None
    assert y.min() >= (0 if data.schema.classes else -1)
    assert all(fact.source == "declared" for fact in data.schema.public_facts())
    assert (data.test is not None) == (name in ("mnist", "adult"))


def test_the_known_shapes_of_the_inputs() -> None:
    """Adult has 6 numbers, 99 categories and three columns with missing values: 108 inputs."""
    widths = {name: catalogue.schema(name).features for name in catalogue.names()}
    assert widths == {
        "mnist": 784, "adult": 108, "abalone": 10, "naval": 16, "kin8nm": 8, "power_plant": 4, "wine_red": 11,
        "protein": 9, "cifar10": 3072, "svhn": 3072, "year": 90,
    }  # fmt: skip
    records = {name: catalogue.schema(name).records for name in catalogue.names()}
    assert records["adult"] == 32_561
    assert records["protein"] == 45_730


def test_splits_are_published_or_by_row_number(directory) -> None:
    naval = catalogue.load("naval", directory)
    part = naval.split(1)
    assert part.schema is not None
    assert part.test is not None
    assert (part.train.rows, part.test.rows, part.schema.records) == (18, 2, 18)
    train, test = catalogue.splits("naval", directory)[1]
    assert sorted([*train, *test]) == list(range(20))
    np.testing.assert_array_equal(part.test.columns["fuel_flow_kg_s"], naval.train.columns["fuel_flow_kg_s"][test])
    with pytest.raises(DataError, match="number=2"):
        naval.split(2)
    abalone = catalogue.load("abalone", directory)
    first, second = abalone.split(0), abalone.split(1)
    assert first.train.rows == 18
    assert first.train.columns["length"].tolist() != second.train.columns["length"].tolist()
    with pytest.raises(DataError, match="no published splits"):
        catalogue.splits("adult", directory)


def test_absent_data_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CONFIDE_DATA", raising=False)
    with pytest.raises(DataError, match=r"adult_train.csv.gz and adult_test.csv.gz .* --data DIR or CONFIDE_DATA"):
        catalogue.load("adult")
    with pytest.raises(DataError, match=r"holds no file kin8nm.csv.gz"):
        catalogue.load("kin8nm", tmp_path)
    with pytest.raises(DataError, match="no such data set"):
        catalogue.load("iris")
    assert catalogue.schema("adult").records == 32_561  # the facts need no data


def test_verification_notices_another_file(directory) -> None:
    with pytest.raises(DataError, match="differs"):
        catalogue.load("wine_red", directory, verify=True)


@pytest.mark.parametrize("header", [b"{'descr': '<f8', (((", b"{'descr': '<f8', 'fortran_order': \x22\x22\x22,"])
def test_a_damaged_header_of_splits_is_refused(directory, header: bytes) -> None:
    """Numpy reads the header as a literal, and fails on it as Python fails on source."""
    path = directory / "uci_splits.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("kin8nm_train", "kin8nm_test"):
            text = header.ljust(118) + b"\n"
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(DataError, match="cannot be read"):
        catalogue.splits("kin8nm", directory)


def test_broken_splits_are_refused(directory) -> None:
    np.savez(directory / "uci_splits.npz", other=np.zeros(3))
    with pytest.raises(DataError, match="naval_train"):
        catalogue.load("naval", directory)
