"""The public facts: what is accepted, how it is written down, and whose word it is."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest

from confide.data import Column, Schema, Table
from confide.errors import DataError

ADULT = """
records = 32561
target = "income"
classes = ["<=50K", ">50K"]
missing = "middle"
ignore = ["id"]
[columns.age]
bounds = [17, 90]
[columns.workclass]
categories = ["Private", "State-gov"]
missing = "category"
"""


def test_researchers_need_one_line() -> None:
    schema = Schema(classes=10, records=60_000)
    assert schema.classes == tuple(range(10))
    assert (schema.class_count, schema.records, schema.task) == (10, 60_000, "classification")
    assert schema.features is None
    assert Schema(classes=range(10)) == Schema(classes=np.arange(10)) == Schema(classes=10)


def test_regression_is_the_absence_of_classes() -> None:
    schema = Schema(target_bounds=[0, 30], records=np.int64(100))
    assert (schema.task, schema.class_count, schema.target_bounds) == ("regression", None, (0.0, 30.0))


def test_it_is_frozen_and_hashable() -> None:
    schema = Schema(classes=3, columns=[Column("a", bounds=(0, 1))])
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.records = 5  # type: ignore[misc]
    assert hash(schema) == hash(Schema.from_dict(schema.to_dict()))


def test_widths_count_the_inputs_of_a_flat_model() -> None:
    columns = [
        Column("age", bounds=(0, 1)),
        Column("height", bounds=(0, 1), missing="category"),
        Column("job", categories=("a", "b", "c"), missing="category"),
        Column("sex", categories=("f", "m"), missing="middle"),
    ]
    assert [column.width for column in columns] == [1, 2, 4, 2]
    assert Schema(columns=columns).features == 9
    assert Schema(shape=(28, 28), bounds=(0, 255)).features == 784
    assert Schema(bounds=[(0, 1), (0, 2), (0, 3)]).features == 3


def test_toml_reads_the_documented_format(tmp_path) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(ADULT)
    schema = Schema.from_toml(path)
    assert schema.records == 32561
    assert schema.classes == ("<=50K", ">50K")
    assert schema.ignore == ("id",)
    age, workclass = schema.columns
    assert (age.kind, age.bounds, age.missing) == ("numeric", (17.0, 90.0), "middle")
    assert (workclass.kind, workclass.categories, workclass.missing) == (
        "categorical",
        ("Private", "State-gov"),
        "category",
    )
    assert all(fact.source == "declared" for fact in schema.public_facts())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("record = 5", "'record'"),
        ("[columns.age]\nbound = [0, 1]", "'bound'"),
        ("[columns.age]\nsource = 'learnt privately'", "'source'"),  # a file cannot claim to be paid for
        ("sources = {records = 'learnt privately'}", "'sources'"),
        ("records = ", "TOML"),
        ("columns = 3", "columns"),
        ("[columns]\nage = 3", "age"),
        ("records = 'many'", "records='many'"),
        ("classes = 'ab'", "classes"),
        ("target = 3", "target=3"),
        ("ignore = [1]", "ignore"),
        ("bounds = 3", "bounds"),
        ("[columns.age]\nbounds = 'ab'", "'age'"),
        ("[columns.age]\ncategories = 3", "'age'"),
        ("[columns.age]\nmissing = 'drop'", "'drop'"),
    ],
)
def test_toml_refuses_what_it_does_not_know(tmp_path, text: str, key: str) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        Schema.from_toml(path)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_toml_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(DataError, match="no such file"):
        Schema.from_toml(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"target = '\xff'")
    with pytest.raises(DataError, match="cannot be read"):
        Schema.from_toml(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        {"records": 1},
        {"records": 0},
        {"records": -5},
        {"records": 3.0},
        {"records": True},
        {"records": "10"},
        {"classes": 1},
        {"classes": ["only"]},
        {"classes": []},
        {"classes": "ab"},
        {"classes": [1, 1.0]},
        {"classes": ["a", "a "]},
        {"classes": [float("nan"), 1]},
        {"classes": [None, 1]},
        {"classes": 10**9},
        {"classes": 2.5},
        {"classes": True},
        {"target": ""},
        {"target_bounds": (1, 1)},
        {"target_bounds": (2, 1)},
        {"target_bounds": (0, float("inf"))},
        {"target_bounds": (0, float("nan"))},
        {"target_bounds": (0, 1, 2)},
        {"target_bounds": (0, 5e-324)},
        {"target_bounds": (0, 10**400)},
        {"classes": 2, "target_bounds": (0, 1)},
        {"columns": [Column("a"), Column("a")]},
        {"columns": [Column("a")], "target": "a"},
        {"columns": [Column("a")], "ignore": ["a"]},
        {"columns": [Column("a")], "shape": 3},
        {"columns": [Column("a")], "bounds": [(0, 1), (0, 1)]},
        {"shape": ()},
        {"shape": (0, 3)},
        {"shape": (2,), "bounds": [(0, 1)] * 3},
        {"bounds": []},
        {"bounds": (1, 0)},
        {"bounds": [(0, 1), 3]},
        {"missing": "drop"},
        {"sources": {"colour": "declared"}},
        {"sources": {"records": "guessed"}},
    ],
)
def test_impossible_facts_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        Schema(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": ""},
        {"name": "a", "kind": "text"},
        {"name": "a", "kind": "categorical", "bounds": (0, 1)},
        {"name": "a", "bounds": (0, 1), "categories": ("x",)},
        {"name": "a", "bounds": (1, 0)},
        {"name": "a", "categories": ("x", "x")},
        {"name": "a", "source": "guessed"},
    ],
)
def test_impossible_columns_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        Column(**arguments)


def test_json_round_trip_keeps_every_fact_and_source() -> None:
    schema = Schema(
        records=10,
        classes=["a", 2, 0.5, True],
        target="t",
        columns=[Column("x", bounds=(0, 1), source="learnt privately"), Column("y", categories=("p", "q"))],
        ignore=("z",),
        missing="middle",
        sources={"records": "assumed public"},
    )
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict(), allow_nan=False)))
    assert again == schema
    assert again.public_facts() == schema.public_facts()
    plain = Schema(bounds=[(0, 1), (0, 2)], shape=2, target_bounds=(0, 1))
    assert Schema.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


@pytest.mark.parametrize(
    "values",
    [
        {"colour": 3},
        {"columns": [{"name": "a", "colour": 3}]},
        {"columns": [{"kind": "numeric"}]},
        {"columns": {"a": {}}},
        {"columns": [3]},
        {"records": {}},
        {"shape": "ab"},
        [],
    ],
)
def test_dict_of_another_form_is_refused(values: object) -> None:
    with pytest.raises(DataError):
        Schema.from_dict(values)  # type: ignore[arg-type]


def test_report_rows_say_whose_word_each_fact_is() -> None:
    schema = Schema(
        records=100,
        classes=2,
        target="t",
        columns=[Column("x", bounds=(0, 1), source="learnt privately"), Column("y", bounds=(0, 2))],
        sources={"records": "assumed public"},
    )
    rows = {row.fact: (row.value, row.source) for row in schema.public_facts()}
    assert rows["records"] == ("100", "assumed public")
    assert rows["classes"] == ("0, 1", "declared")
    assert rows["column x"] == ("0 to 1", "learnt privately")
    assert rows["column y"] == ("0 to 2", "declared")


def _table() -> Table:
    columns = {"id": np.arange(4.0), "a": np.arange(4.0), "b": np.arange(4.0)}
    return Table(columns, target="t", labels=np.arange(4.0))


def test_undeclared_columns_take_shared_bounds_or_are_refused() -> None:
    schema = Schema(bounds=(0, 16), ignore=("id",)).for_table(_table())
    assert [column.name for column in schema.columns] == ["a", "b"]
    assert schema.target == "t"
    assert [schema.bounds_of(place, column) for place, column in enumerate(schema.columns)] == [(0, 16)] * 2
    with pytest.raises(DataError, match="columns 1, 3 of the data's features not declared"):
        Schema(columns=[Column("a", bounds=(0, 1))]).for_table(_table())
    with pytest.raises(DataError, match="'c' not among the 3 of the data"):
        Schema(columns=[Column("c", bounds=(0, 1))]).for_table(_table())


def test_structure_of_plain_arrays() -> None:
    images = Table(block=np.zeros((3, 4, 5)))
    assert Schema(bounds=(0, 1)).for_table(images).shape == (4, 5)
    assert Schema(bounds=(0, 1), shape=20).for_table(images).shape == (20,)
    with pytest.raises(DataError, match="shape"):
        Schema(bounds=(0, 1), shape=(4, 4)).for_table(images)
    with pytest.raises(DataError, match="columns"):
        Schema(columns=[Column("a")]).for_table(images)
    with pytest.raises(DataError, match="named columns"):
        Schema(shape=2).for_table(_table())


@pytest.mark.parametrize(
    "text",
    [
        f"records = {'9' * 5000}",
        f"records = {'9' * 4000}",
        f"records = 10\nbounds = [0, {'9' * 5000}]",
        f"records = 10\nclasses = [1, {'9' * 4000}]",
        f"records = 10\nshape = [{'9' * 400}]",
        f"records = 10\nclasses = {'[' * 20_000}",
        f"records = 1e{'9' * 400}",
        "records = nan",
        "records = inf\n",
        f"[columns.{'a.' * 3000}b]\nbounds = [0, 1]",
    ],
)
def test_endless_numbers_and_lists_are_one_sentence(tmp_path, text: str) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        Schema.from_toml(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("fact", ["records", "classes", "shape"])
@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
def test_numbers_that_python_does_not_write(fact: str, value: int) -> None:
    with pytest.raises(DataError, match=f"{fact}=.*must be|{fact}=.*at most"):
        Schema(**{fact: value})  # type: ignore[arg-type]


def test_the_schema_is_linear_in_columns() -> None:
    """Four times the columns take about four times as long; with a search per column they took sixteen times."""

    def seconds(count: int) -> float:
        names = [f"c{place}" for place in range(count)]
        table = Table({name: np.zeros(2) for name in names})
        ignored = Schema(bounds=(0, 1), ignore=tuple(names[::2]))
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            ignored.for_table(table)
            Schema(columns=[Column(name, bounds=(0, 1)) for name in names], ignore=tuple(f"d{n}" for n in names))
            best = min(best, time.process_time() - started)
        return best

    assert seconds(12_000) < 8 * seconds(3000)
