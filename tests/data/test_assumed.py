"""Facts read off the data carry the mark "assumed public", and declared facts stand."""

from __future__ import annotations

import numpy as np
import pytest

from confide.data import Column, Encoder, Schema, Table
from confide.errors import DataError


def text(*values: object) -> np.ndarray:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def table(labels: np.ndarray) -> Table:
    columns = {
        "age": np.array([17.0, 90.0, 30.0, np.nan]),
        "job": text("b", "a", "?", "b"),
        "flag": np.array([True, False, True, True]),
        "still": np.full(4, 288.0),
    }
    return Table(columns, target="y", labels=labels)


def test_every_fact_that_is_read_is_marked() -> None:
    schema = Schema.assume_public(table(text("no", "yes", "no", "yes")), "y")
    assert (schema.records, schema.classes, schema.target) == (4, ("no", "yes"), "y")
    assert schema.columns[0].bounds == (17, 90)
    assert schema.columns[1].categories == ("a", "b")
    assert schema.columns[2].categories == ("false", "true")
    facts = [fact for fact in schema.public_facts() if fact.fact != "target"]
    assert len(facts) == 6
    assert {fact.source for fact in facts} == {"assumed public"}


def test_holes_get_an_input_and_constants_the_middle() -> None:
    data = table(text("no", "yes", "no", "yes"))
    encoder = Encoder(Schema.assume_public(data))
    x, y = encoder.encode(data)
    assert encoder.feature_names is not None
    by_name = dict(zip(encoder.feature_names, x.T, strict=True))
    assert by_name["age is missing"].tolist() == [0, 0, 0, 1]
    assert by_name["job is missing"].tolist() == [0, 0, 1, 0]
    assert by_name["still"].tolist() == [0, 0, 0, 0]
    assert y is not None
    assert y.tolist() == [0, 1, 0, 1]


def test_declared_facts_stand_and_keep_their_mark() -> None:
    declared = Schema(
        records=1000, columns=[Column("age", bounds=(0, 120), missing="middle")], ignore=("job",), classes=["no", "yes"]
    )
    schema = Schema.assume_public(table(text("no", "yes", "no", "yes")), declared=declared)
    assert schema.records == 1000
    assert [column.name for column in schema.columns] == ["age", "flag", "still"]
    assert schema.columns[0] == declared.columns[0]
    assert schema.sources == ()
    assert schema.columns[2].source == "assumed public"


@pytest.mark.parametrize(
    ("labels", "task", "expected"),
    [
        (np.array([0.0, 1.0, 2.0, 1.0]), None, "classification"),
        (np.array([0.0, 1.0, 2.0, 1.0]), "regression", "regression"),
        (np.array([0.0, 1.5, 2.0, 1.0]), None, "regression"),
        (np.array([0.0, 1.5, 2.0, 1.0]), "classification", "classification"),
        (text("a", "b", "a", "b"), None, "classification"),
        (np.array([True, False, True, True]), None, "classification"),
    ],
)
def test_the_task_is_read_off_the_target_or_told(labels: np.ndarray, task, expected: str) -> None:
    schema = Schema.assume_public(table(labels), task=task)
    assert schema.task == expected
    check = Encoder(schema).targets(labels)
    assert check.min() >= (0 if expected == "classification" else -1)


def test_many_whole_numbers_are_a_quantity() -> None:
    data = Table({"a": np.zeros(50)}, target="y", labels=np.arange(50.0))
    assert Schema.assume_public(data).target_bounds == (0, 49)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Table({"a": np.zeros(3)}, target="y", labels=np.zeros(3)), "needs at least two"),
        (Table({"a": np.zeros(3)}, target="y", labels=np.full(3, 0.5)), "constant"),
        (Table({"a": np.zeros(1)}, target="y", labels=np.zeros(1)), "1 rows"),
        (Table({"a": np.full(2, np.nan)}, target="y", labels=np.arange(2.0)), "no finite number"),
        (Table({"a": text("?", None)}, target="y", labels=np.arange(2.0)), "missing values only"),
        (Table({"a": np.zeros(2)}, target="y", labels=np.full(2, np.nan)), "missing values only"),
        (Table({"a": text(*map(str, range(1001)))}, target="y", labels=np.arange(1001.0)), "identifier"),
    ],
)
def test_what_cannot_be_assumed_is_refused(data: Table, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Schema.assume_public(data)


def test_plain_arrays_have_bounds_per_feature_and_images_one_pair() -> None:
    rng = np.random.default_rng(0)
    flat = Table.from_arrays(np.c_[rng.uniform(0, 1, 9), rng.uniform(50, 60, 9), np.full(9, 3.0)], np.arange(9) % 2)
    schema = Schema.assume_public(flat)
    assert schema.bounds is not None
    assert len(schema.bounds) == 3
    assert schema.source_of("bounds") == "assumed public"
    x = Encoder(schema).features(flat)
    assert x.min(axis=0).tolist() == [-1, -1, 0]
    images = Table.from_arrays(rng.integers(0, 200, (9, 4, 4)).astype(np.uint8), np.arange(9) % 2)
    assert images.block is not None
    assert Schema.assume_public(images).bounds == (images.block.min(), images.block.max())


@pytest.mark.parametrize("cell", [4711e300, 10**5000, 4711e-320], ids=["large", "huge", "tiny"])
def test_messages_about_assumed_facts_quote_no_cell(cell: float) -> None:
    """Declared values are quoted in messages; here they are cells, so the checks must come first."""
    for labels in (text(cell, 0, 1), text(cell, "a", "b"), text(cell, cell, 0), text(cell, 0.0, 0.0)):
        for task in ("classification", "regression", None):
            try:
                Schema.assume_public(Table({"a": labels}, target="y", labels=labels), task=task)  # type: ignore[arg-type]
            except DataError as error:
                message = str(error)
            else:
                continue
            assert "4711" not in message
            assert "4.711" not in message
