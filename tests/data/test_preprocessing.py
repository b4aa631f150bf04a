"""Records become inputs in [-1, 1] by public facts alone, one record at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.data import Column, DataSet, Encoder, Schema, Table, curator_notes, load_dataset, prepare
from confide.errors import DataError


def text(*values: object) -> np.ndarray:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def one(column: Column, values: np.ndarray) -> np.ndarray:
    return Encoder(Schema(columns=[column])).features(Table({column.name: values}))


def test_numbers_are_scaled_from_bounds_and_clamped() -> None:
    x = one(Column("a", bounds=(17, 90)), np.array([17, 53.5, 90, -1e308, 1e308]))
    np.testing.assert_array_equal(x[:, 0], np.float32([-1, 0, 1, -1, 1]))
    assert x.dtype == np.float32


@pytest.mark.parametrize("bounds", [(-1.7e308, 1.7e308), (1, 1 + 2**-52), (0, 1e-290), (1e308, 1.7e308)])
def test_extreme_bounds_neither_overflow_nor_leave_the_interval(bounds: tuple[float, float]) -> None:
    """high - low overflows for the first pair, and rounding leaves [-1, 1] for the second."""
    values = np.array([*bounds, 0.0, 1.0, -1e308, 1e308])
    x = one(Column("a", bounds=bounds), values)
    assert np.isfinite(x).all()
    assert (np.abs(x) <= 1).all()
    assert x[0, 0] < x[1, 0]


def test_missing_numbers_follow_the_declared_policy() -> None:
    values = np.array([0.0, np.nan, np.inf, -np.inf, 1.0])
    middle = one(Column("a", bounds=(0, 1), missing="middle"), values)
    np.testing.assert_array_equal(middle[:, 0], [-1, 0, 0, 0, 1])
    own = one(Column("a", bounds=(0, 1), missing="category"), values)
    np.testing.assert_array_equal(own, [[-1, 0], [0, 1], [0, 1], [0, 1], [1, 0]])
    with pytest.raises(DataError, match=r"column 'a': has missing .* declare missing"):
        one(Column("a", bounds=(0, 1)), values)


def test_categories_become_one_hot_and_unknown_ones_zero() -> None:
    values = text("a", " b ", "never declared", "?", None)
    own = one(Column("c", categories=("a", "b"), missing="category"), values)
    np.testing.assert_array_equal(own, [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]])
    share = one(Column("c", categories=("a", "b"), missing="middle"), values)
    np.testing.assert_array_equal(share, [[1, 0], [0, 1], [0, 0], [0.5, 0.5], [0.5, 0.5]])
    with pytest.raises(DataError, match="column 'c'"):
        one(Column("c", categories=("a", "b")), values)


def test_a_declared_category_wins_over_the_marks_for_missing() -> None:
    x = one(Column("country", categories=("NA", "DE")), text("NA", "DE"))
    np.testing.assert_array_equal(x, [[1, 0], [0, 1]])


def test_categories_of_other_types_are_found_by_value() -> None:
    numbers = one(Column("c", categories=(1, "2", 0.5)), np.array([1.0, 2.0, 0.5]))
    np.testing.assert_array_equal(numbers, np.eye(3))
    booleans = one(Column("c", categories=("True", False)), np.array([True, False]))
    np.testing.assert_array_equal(booleans, np.eye(2))


def test_text_in_a_numeric_column_names_the_column_and_no_cell() -> None:
    with pytest.raises(DataError) as caught:
        one(Column("age", bounds=(0, 1)), text("secret", "3"))
    assert "'age'" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_objects_that_are_numbers_are_numbers() -> None:
    x = one(Column("a", bounds=(0, 1), missing="middle"), text(True, False, 0.5, None, 10**400))
    np.testing.assert_array_equal(x[:, 0], [1, -1, 0, 0, 0])


def test_a_record_is_encoded_without_regard_to_the_others() -> None:
    """An encoder that looked at the data (a mean, a maximum, the categories found) would fail this."""
    rng = np.random.default_rng(1)
    columns = [Column("a", bounds=(-1, 2)), Column("b", categories=("x", "y"), missing="category")]
    encoder = Encoder(Schema(columns=columns, target="t", target_bounds=(0, 5)))
    a, b = rng.normal(size=50) * 3, text(*rng.choice(["x", "y", "z", ""], 50))
    whole = Table({"a": a, "b": b}, target="t", labels=rng.normal(size=50) * 9)
    x, y = encoder.encode(whole)
    for row in range(50):
        alone, label = encoder.encode(whole.take([row]))
        assert label is not None
        assert y is not None
        np.testing.assert_array_equal(alone[0], x[row])
        assert label[0] == y[row]


def test_labels_not_declared_become_minus_one() -> None:
    encoder = Encoder(Schema(classes=["<=50K", ">50K"], bounds=(0, 1)))
    y = encoder.targets(text("<=50K", ">50K ", "?", None, "other"))
    assert y.tolist() == [0, 1, -1, -1, -1]
    assert y.dtype == np.int64
    numbers = Encoder(Schema(classes=range(3), bounds=(0, 1)))
    assert numbers.targets(np.array([2.0, 0.0, 7.0, np.nan, 0.5, np.inf])).tolist() == [2, 0, -1, -1, -1, -1]
    assert numbers.targets(text("2", "0.0", "1")).tolist() == [2, 0, 1]
    assert encoder.label_of(1) == ">50K"


def test_regression_targets_scale_there_and_back() -> None:
    encoder = Encoder(Schema(target_bounds=(0.95, 1.0), bounds=(0, 1)))
    y = encoder.targets(np.array([0.95, 0.975, 1.0, 3.0]))
    np.testing.assert_allclose(y, [-1, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(encoder.decode_mean(y), [0.95, 0.975, 1.0, 1.0], atol=1e-8)
    rng = np.random.default_rng(2)
    draws = rng.normal(0.2, 0.1, 100_000)
    np.testing.assert_allclose(encoder.decode_variance(draws.var()), encoder.decode_mean(draws).var(), rtol=1e-9)
    assert encoder.target_scale == pytest.approx(0.025)
    with pytest.raises(DataError, match="no finite value"):
        encoder.targets(np.array([0.96, np.nan]))
    with pytest.raises(DataError, match="text"):
        encoder.targets(text("0.96", "a"))
    with pytest.raises(DataError, match="neither classes nor target_bounds"):
        Encoder(Schema(bounds=(0, 1))).targets(np.zeros(3))


def test_images_are_flat_or_kept() -> None:
    block = np.arange(2 * 28 * 28, dtype=np.int64).reshape(2, 28, 28).astype(np.uint8)
    schema = Schema(classes=10, bounds=(0, 255), shape=(28, 28))
    flat, kept = Encoder(schema), Encoder(schema, layout="image")
    assert flat.features(block).shape == (2, 784)
    assert kept.features(block).shape == (2, 1, 28, 28)
    assert kept.output_shape == (1, 28, 28)
    np.testing.assert_array_equal(kept.features(block).reshape(2, 784), flat.features(block))
    np.testing.assert_allclose(flat.features(block)[0, :3], [-1, -1 + 2 / 255, -1 + 4 / 255], atol=1e-7)


def test_channels_go_first() -> None:
    block = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3)).astype(np.uint8)
    kept = Encoder(Schema(bounds=(0, 255), shape=(5, 4, 3)), layout="image")
    x = kept.features(block)
    assert x.shape == (2, *kept.output_shape) == (2, 3, 5, 4)
    np.testing.assert_allclose(x[1, 2], block[1, :, :, 2] / 127.5 - 1, atol=1e-6)
    already = Encoder(Schema(bounds=(0, 255), shape=(3, 5, 4)), layout="image")
    assert already.features(np.moveaxis(block, -1, 1)).shape == (2, 3, 5, 4)


def test_large_blocks_are_converted_in_pieces(monkeypatch) -> None:
    from confide.data import preprocessing

    block = np.random.default_rng(0).normal(size=(37, 5))
    encoder = Encoder(Schema(bounds=[(-1, 1), (-2, 2), (0, 1), (-1, 0), (-3, 3)]))
    whole = encoder.features(block)
    monkeypatch.setattr(preprocessing, "_CHUNK", 20)
    np.testing.assert_array_equal(encoder.features(block), whole)
    np.testing.assert_allclose(whole[:, 1], np.clip(block[:, 1] / 2, -1, 1), atol=1e-7)


def test_plain_arrays_with_holes_and_of_the_wrong_width() -> None:
    block = np.array([[0.0, 1.0], [np.nan, 0.5]])
    with pytest.raises(DataError, match="feature 0"):
        Encoder(Schema(bounds=(0, 1))).features(block)
    filled = Encoder(Schema(bounds=(0, 1), missing="middle")).features(block)
    np.testing.assert_array_equal(filled, [[-1, 1], [0, 0]])
    with pytest.raises(DataError, match="2 features"):
        Encoder(Schema(bounds=(0, 1), shape=3)).features(block)
    with pytest.raises(DataError, match="dimensions"):
        Encoder(Schema(bounds=(0, 1))).features(np.zeros(3))
    named = Encoder(Schema(columns=[Column("a", bounds=(0, 1)), Column("b", bounds=(0, 2))]))
    np.testing.assert_array_equal(named.features(np.array([[1.0, 1.0]])), [[1, 0]])
    with pytest.raises(DataError, match="2 columns"):
        named.features(np.zeros((3, 4)))


@pytest.mark.parametrize(
    ("schema", "layout"),
    [
        (Schema(), "flat"),
        (Schema(columns=[Column("a")]), "flat"),
        (Schema(columns=[Column("a", kind="categorical")]), "flat"),
        (Schema(bounds=(0, 1), missing="category"), "flat"),
        (Schema(bounds=(0, 1), shape=3), "image"),
        (Schema(bounds=(0, 1)), "image"),
        (Schema(bounds=(0, 1)), "tall"),
    ],
)
def test_open_facts_are_refused_before_any_data_is_seen(schema: Schema, layout: str) -> None:
    with pytest.raises(DataError):
        Encoder(schema, layout)  # type: ignore[arg-type]


def test_an_encoder_survives_json_and_serves_new_records() -> None:
    columns = [Column("a", bounds=(0, 10)), Column("b", categories=("x", "y"), missing="category")]
    encoder = Encoder(Schema(columns=columns, target="t", classes=["n", "p"]))
    again = Encoder.from_dict(json.loads(json.dumps(encoder.to_dict(), allow_nan=False)))
    assert again == encoder
    assert again.feature_names == ("a", "b=x", "b=y", "b is missing")
    # Other order, an extra column, no target: only the declared columns count.
    new = Table({"extra": np.zeros(2), "b": text("y", "?"), "a": np.array([10.0, 99.0])})
    np.testing.assert_array_equal(again.features(new), [[1, 0, 1, 0], [1, 0, 0, 1]])
    with pytest.raises(DataError, match="'a' not among the 1 of the data"):
        again.features(Table({"b": text("y")}))
    for bad in ({}, {"layout": "flat"}, {"layout": "flat", "schema": {}, "more": 1}, 3):
        with pytest.raises(DataError):
            Encoder.from_dict(bad)  # type: ignore[arg-type]


def _labelled(labels: np.ndarray) -> Table:
    return Table({"a": np.zeros(len(labels))}, target="y", labels=labels)


@pytest.mark.parametrize(
    ("table", "schema", "words"),
    [
        (_labelled(np.zeros(3)), {"classes": 2}, "same class"),
        (_labelled(np.full(3, 7.0)), {"classes": 2}, "no record has a declared class"),
        (_labelled(np.full(3, 7.0)), {"target_bounds": (0, 9)}, "constant"),
        (_labelled(np.array([1.0, np.nan, 2.0])), {"target_bounds": (0, 9)}, "records: 1 of 3 have a cell"),
        (_labelled(np.arange(3.0)), {"target_bounds": (0, 9), "records": 60_000}, "records=60000"),
    ],
)
def test_the_curator_hears_of_unusable_training_data(table: Table, schema: dict[str, Any], words: str) -> None:
    """And the run exists all the same: that it does must not tell of a record."""
    facts = Schema(bounds=(0, 1), **{"records": 3, **schema})
    ready = prepare(DataSet("d", table, schema=facts))
    assert len(ready.x) == 3
    assert any(words in note for note in ready.notes)


def test_sound_records_get_no_notes() -> None:
    table = _labelled(np.array([0.0, 1.0, 1.0]))
    schema = Schema(classes=2, records=3, bounds=(0, 1)).for_table(table)
    assert curator_notes(table, schema, *Encoder(schema).training(table)) == ()
    with pytest.raises(DataError, match="no target"):
        Encoder(schema).training(Table({"a": np.zeros(3)}))


ODD: dict[str, Any] = {
    "missing": "",
    "a mark": "NA",
    "no number": "abc",
    "not finite": "inf",
    "beyond floats": "1e999",
    "true": "true",
    "a date": "2020-01-02",
    "spaces": " 5 ",
    "a formula": "=1+1",
}


@pytest.mark.parametrize("cell", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("column", ["n", "c", "y"])
@pytest.mark.parametrize("classes", [True, False])
def test_one_odd_cell_changes_no_other_record(cell: str, column: str, classes: bool, tmp_path: Path) -> None:
    """Whether there is a run, and what all others say, is the same with any record in the place of one."""
    declared: dict[str, Any] = {"classes": ["0", "1"]} if classes else {"target_bounds": (0, 1)}
    columns = [Column("n", bounds=(0, 10)), Column("c", categories=("p", "q"))]
    schema = Schema(records=4, target="y", columns=columns, **declared)
    others = ["1,p,0", "2.5,q,1", "7,p,1"]
    found = []
    for odd in ({}, {column: cell}):
        row = {"n": "3", "c": "q", "y": "0", **odd}
        path = tmp_path / f"{len(odd)}.csv"
        path.write_text("\n".join(["n,c,y", *others, ",".join(row.values())]) + "\n")
        ready = prepare(load_dataset(path, schema=schema))
        found.append((ready.x[:3], ready.y[:3]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_refused_cell_of_a_private_record_is_no_number() -> None:
    """So that the boundary answers zero for the record; of a record to predict it is an error."""
    columns = [Column("n", bounds=(0, 10)), Column("c", categories=("p", "q"))]
    encoder = Encoder(Schema(records=3, classes=2, columns=columns))
    table = Table({"n": np.array([5.0, np.nan, 5.0]), "c": text("p", "q", "?")}, target="y", labels=np.zeros(3))
    x, _ = encoder.training(table)
    assert np.isfinite(x).all(1).tolist() == [True, False, False]
    with pytest.raises(DataError, match="column 'n': has missing"):
        encoder.features(table)


def test_prepare_settles_the_facts() -> None:
    data = load_dataset("digits")
    ready = prepare(data, layout="image")
    assert ready.x.shape == (1437, 1, 8, 8)
    assert ready.x_test is not None
    assert ready.x_test.shape == (360, 1, 8, 8)
    assert set(ready.y.tolist()) == set(range(10))
    bare = DataSet("bare", data.train)
    with pytest.raises(DataError, match="public facts not declared"):
        prepare(bare)
    with pytest.raises(DataError, match="records, the nominal size, not declared"):
        prepare(bare, Schema(classes=10, bounds=(0, 16)))
    assumed = prepare(bare, Schema(classes=10, bounds=(0, 16)), assume_public=True)
    assert dict(assumed.encoder.schema.sources) == {"records": "assumed public"}
    np.testing.assert_array_equal(assumed.x, prepare(data).x)
