"""Hostile tables: whatever comes in, the outcome is a DataError or finite inputs in [-1, 1], and nothing else."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from confide.data import Column, DataSet, Encoder, Schema, Table, load_table, prepare
from confide.errors import DataError

CELLS = st.one_of(
    st.sampled_from(
        [
            *("", "?", "NA", "nan", "NaN", "inf", "-inf", "Infinity", "1e308", "-1e308", "1e999", "5e-324", "true"),
            *("99999999999999999999999", "-170141183460469231731687303715884105728", "9" * 400, "1_000", "1,5", "0x1F"),
            *("2020-01-01", "12:30", "2020-01-01 12:30:00", '"', "\0", "\r", "\ufeff", "\u202e", "=1+1", "01", " 1 "),
        ]
    ),
    st.floats(allow_nan=True).map(repr),
    st.integers().map(str),
    st.text(max_size=6),
)
NAMES = st.one_of(st.sampled_from(["a", "b", "y", "", " ", "naïve", "列", "\0", "x" * 200]), st.text(max_size=5))
ENDS = st.sampled_from(["\n", "\r\n", "\r", "\n\n"])
FAST = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def csv_files(draw: Any) -> bytes:
    """A header and rows, mostly of the right width; quoted or not; sometimes cut or with stray bytes."""
    width = draw(st.integers(1, 5))
    names = draw(st.lists(NAMES, min_size=width, max_size=width))
    if draw(st.integers(0, 9)) > 1:  # most files have a usable header, so that the later stages are reached
        names = [f"{name.strip()}{place}" for place, name in enumerate(names)]
        names[-1] = "y"
    kinds = [draw(st.sampled_from([CELLS, st.floats(-10, 10).map(repr), st.sampled_from("abc")])) for _ in names]
    rows = draw(st.integers(0, 8))
    lines = [names, *([draw(kind) for kind in kinds] for _ in range(rows))]
    if draw(st.integers(0, 9)) == 0 and lines:
        lines[-1] = lines[-1][:-1]
    quote = draw(st.booleans())
    text = io.StringIO()
    for line in lines:
        text.write(",".join('"' + cell.replace('"', '""') + '"' if quote else cell for cell in line) + draw(ENDS))
    data = text.getvalue().encode("utf-8", "surrogatepass")
    return data + draw(st.sampled_from([b"", b"", b"", b"\xff\xfe", b'"']))


POLICIES = st.sampled_from(["refuse", "middle", "category"])
BOUNDS = st.sampled_from([(0, 1), (-10, 10), (-1.7e308, 1.7e308), (0, 1e-200), (1e307, 1.7e308)])


def sound(x: np.ndarray, y: np.ndarray | None, schema: Schema, private: bool = False) -> None:
    """In [-1, 1]. Of private records some may have no input: the boundary leaves them out."""
    assert x.dtype == np.float32
    kept = np.isfinite(x.reshape(len(x), -1)).all(1) & (True if y is None else np.isfinite(y))
    assert private or kept.all()
    x, y = x[kept], None if y is None else y[kept]
    assert (np.abs(x) <= 1).all()
    if y is not None:
        assert y.min(initial=0) >= -1
        assert y.max(initial=0) <= (1 if schema.classes is None else len(schema.classes) - 1)


def loaded(path: Any, data: bytes, **arguments: Any) -> Table | None:
    path.write_bytes(data)
    try:
        return load_table(path, **arguments)
    except DataError as error:
        sentence = str(error)
    assert "\n" not in sentence
    return None


@given(data=csv_files(), task=st.sampled_from([None, "regression", "classification"]))
@FAST
def test_hostile_csv_with_facts_assumed(tmp_path, data: bytes, task: Any) -> None:
    table = loaded(tmp_path / "t.csv", data, target="y", target_required=False)
    if table is None:
        return
    try:
        ready = prepare(DataSet("t", table, table), assume_public=True, task=task)
    except DataError:
        return
    sound(ready.x, ready.y, ready.encoder.schema, private=True)
    again = Encoder.from_dict(ready.encoder.to_dict())
    np.testing.assert_array_equal(again.features(table), ready.x)


@given(data=csv_files(), choices=st.data())
@FAST
def test_hostile_csv_with_facts_declared(tmp_path, data: bytes, choices: st.DataObject) -> None:
    """Declared at random and mostly wrongly: numbers called categories, text called numbers."""
    first = loaded(tmp_path / "t.csv", data, target="y", target_required=False)
    if first is None:
        return
    columns = [
        Column(name, bounds=choices.draw(BOUNDS), missing=choices.draw(POLICIES))
        if choices.draw(st.booleans())
        else Column(name, categories=("a", "b", "NA", 1, 0.5), missing=choices.draw(POLICIES))
        for name in first.names
    ]
    facts: dict[str, Any] = {"classes": ["a", 1]} if choices.draw(st.booleans()) else {"target_bounds": (-1, 10)}
    schema = Schema(columns=columns, target="y", records=5, **facts)
    table = loaded(tmp_path / "t.csv", data, schema=schema, target_required=False)
    assert table is not None
    try:
        x, y = Encoder(schema).encode(table)
    except DataError:
        return
    sound(x, y, schema)


NUMBERS = hnp.arrays(
    st.sampled_from([np.float64, np.float32, np.float16, np.longdouble, np.int64, np.uint64, np.int8, np.bool_]),
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
)


@given(block=NUMBERS, labels=hnp.arrays(st.sampled_from([np.float64, np.int64, np.bool_, "U3"]), st.integers(0, 4)))
@FAST
def test_hostile_arrays(block: np.ndarray, labels: np.ndarray) -> None:
    for missing in ("refuse", "middle"):
        schema = Schema(bounds=(-1, 1), classes=3, missing=missing)  # type: ignore[arg-type]
        try:
            x, y = Encoder(schema).encode(block, labels)
        except DataError:
            continue
        sound(x, y, schema)
    try:
        ready = prepare(DataSet("t", Table.from_arrays(block, labels)), Schema(missing="middle"), assume_public=True)
    except DataError:
        return
    sound(ready.x, ready.y, ready.encoder.schema, private=True)


OBJECTS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**5000), st.binary(max_size=3),
    st.just([1]), st.just(1j),
)  # fmt: skip


@given(cells=st.lists(OBJECTS, min_size=2, max_size=6), seed=st.integers(0, 3))
@FAST
def test_hostile_objects(cells: list[Any], seed: int) -> None:
    values = np.empty(len(cells), dtype=object)
    values[:] = cells
    table = Table({"a": values}, target="y", labels=np.roll(values, seed))
    for columns in ([Column("a", bounds=(0, 1), missing="middle")], [Column("a", categories=("a", 1))], []):
        try:
            ready = prepare(DataSet("t", table), Schema(columns=columns), assume_public=True)
        except DataError:
            continue
        sound(ready.x, ready.y, ready.encoder.schema, private=True)


def test_the_property_can_fail() -> None:
    """Scaling without the clamp, the commonest slip, leaves the interval and is noticed."""
    with pytest.raises(AssertionError):
        sound(np.array([[3.0]], np.float32), None, Schema())
    with pytest.raises(AssertionError):
        sound(np.array([[np.nan]], np.float32), None, Schema())


def test_enough_hostile_tables_reach_the_encoder(tmp_path) -> None:
    """A generator whose files all fail at the header would prove nothing about the encoder."""
    seen = {"encoded": 0, "refused": 0}

    @given(data=csv_files())
    @settings(FAST, derandomize=True, database=None)
    def count(data: bytes) -> None:
        table = loaded(tmp_path / "t.csv", data, target="y", target_required=False)
        try:
            assert table is not None
            prepare(DataSet("t", table), assume_public=True)
            seen["encoded"] += 1
        except (DataError, AssertionError):
            seen["refused"] += 1

    count()
    assert seen["encoded"] >= 30
    assert seen["refused"] >= 30
