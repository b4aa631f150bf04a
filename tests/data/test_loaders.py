"""Files become raw tables; what cannot be read is told to the curator without quoting a cell."""

from __future__ import annotations

import gzip
import pickle
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from confide.data import Column, Schema, Table, from_frame, from_pairs, load_dataset, load_table
from confide.errors import DataError

SECRET = "Schrodinger-secret-cell"
CSV = "age,job,score,y\n39,Private,0.5,yes\n?, State-gov,NA,no\n51,NA,1e3,yes\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "T.CSV"])
def test_csv_numbers_text_and_missing(tmp_path, name: str) -> None:
    data = gzip.compress(CSV.encode()) if name.endswith("gz") else CSV.encode()
    table = load_table(write(tmp_path / name, data), target="y")
    assert table.names == ("age", "job", "score")
    np.testing.assert_array_equal(table.columns["age"], [39.0, np.nan, 51.0])
    np.testing.assert_array_equal(table.columns["score"], [0.5, np.nan, 1000.0])
    # Text keeps its cells as they are: whether "NA" is a category is for the schema to say.
    assert table.columns["job"].tolist() == ["Private", " State-gov", "NA"]
    assert table.labels is not None
    assert table.labels.tolist() == ["yes", "no", "yes"]


def test_repr_hides_the_records(tmp_path) -> None:
    table = load_table(write(tmp_path / "t.csv", f"a,b,y\n{SECRET},4711,1\n{SECRET},4712,0\n"), "y")
    data = load_dataset(tmp_path / "t.csv", "y")
    assert SECRET not in repr(table) + repr(data)
    assert "471" not in repr(table) + repr(data)


def test_codes_with_leading_zeros_stay_text_when_declared(tmp_path) -> None:
    path = write(tmp_path / "t.csv", "code,y\n01,01\n1,1\n")
    schema = Schema(classes=["01", "1"], target="y", columns=[Column("code", categories=("01", "1"))])
    declared = load_table(path, schema=schema)
    assert declared.columns["code"].tolist() == ["01", "1"]
    assert declared.labels is not None
    assert declared.labels.tolist() == ["01", "1"]
    assert load_table(path, "y").columns["code"].tolist() == [1.0, 1.0]


def test_a_quoted_cell_may_hold_a_line_break_and_a_byte_order_mark_is_skipped(tmp_path) -> None:
    table = load_table(write(tmp_path / "t.csv", '\ufeffa,b\n"x\ny",1\nz,2\n'))
    assert table.names == ("a", "b")
    assert table.columns["a"].tolist() == ["x\ny", "z"]


def test_types_far_into_a_file_are_still_seen(tmp_path) -> None:
    rows = "".join(f"{row},1\n" for row in range(30_000))
    table = load_table(write(tmp_path / "t.csv", "a,b\n" + rows + "text,2\n"))
    assert table.columns["a"].dtype == object
    assert table.rows == 30_001


BAD_FILES = {
    "empty": ("t.csv", b"", "empty"),
    "header only": ("t.csv", b"a,b,y\n", "no records"),
    "ragged": ("t.csv", f"a,b,y\n1,2,3\n{SECRET},2\n".encode(), "row 3 has 2 cells where the header has 3"),
    "repeated": ("t.csv", b"a,a,y\n1,2,3\n", "'a' occurs more than once"),
    "unnamed": ("t.csv", b",a,y\n1,2,3\n", "column 1 has no name"),
    "semicolons": ("t.csv", b"a;b;y\n1;2;3\n", "commas"),
    "not utf-8": ("t.csv", b"a,y\n\xff\xfe,1\n", "UTF-8"),
    "not utf-8 in the header": ("t.csv", b"a\xff,y\n1,1\n", "UTF-8"),
    "no such target": ("t.csv", b"a,b\n1,2\n", "target='y': no such column; the columns are 'a', 'b'"),
    "target alone": ("t.csv", b"y\n1\n2\n", "no feature columns"),
    "not gzip": ("t.csv.gz", b"a,y\n1,2\n", "cannot be read"),
    "cut gzip": ("t.csv.gz", gzip.compress(b"a,y\n" + b"1,2\n" * 9999)[:-20], "cannot be read"),
    "not parquet": ("t.parquet", b"a,y\n1,2\n", "cannot be read"),
    "not npz": ("t.npz", b"a,y\n1,2\n", "cannot be read"),
    "pickle as npz": ("t.npz", pickle.dumps([1, 2]), "cannot be read"),
    "unknown extension": ("t.xlsx", b"a,y\n1,2\n", "unknown kind of file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_get_one_clear_sentence(tmp_path, case: str) -> None:
    name, content, words = BAD_FILES[case]
    with pytest.raises(DataError) as caught:
        load_table(write(tmp_path / name, content), "y")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_directories_and_impossible_paths(tmp_path) -> None:
    for source, words in [
        (tmp_path / "no.csv", "no such file"),
        (tmp_path, "directory"),
        ("a\0.csv", "no such file|usable"),
    ]:
        with pytest.raises(DataError, match=words):
            load_table(source)
    with pytest.raises(DataError, match="part"):
        load_table("digits", part="validation")  # type: ignore[arg-type]


def test_no_trace_of_a_cell_in_the_error_or_its_context(tmp_path) -> None:
    """pyarrow quotes the offending row; an error chained to it would print it in every traceback and log."""
    path = write(tmp_path / "t.csv", f"a,b,y\n1,2,3\n{SECRET},2\n")
    with pytest.raises(DataError) as caught:
        load_table(path, "y")
    assert caught.value.__context__ is None
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(pa.ArrowInvalid, match=SECRET):  # what it would have said
        pa.csv.read_csv(path)


def test_parquet_of_many_types(tmp_path) -> None:
    table = pa.table(
        {
            "whole": pa.array([1, None, 3], pa.int32()),
            "huge": pa.array([2**63, 1, 2], pa.uint64()),
            "half": pa.array(np.array([1, 2, 3], np.float16)),
            "yes": pa.array([True, False, True]),
            "perhaps": pa.array([True, None, False]),
            "text": pa.array(["a", None, "c"]),
            "coded": pa.array(["a", "b", "a"]).dictionary_encode(),
            "day": pa.array([1, 2, 3], pa.date32()),
            "nothing": pa.nulls(3),
            "y": pa.array([0, 1, 0]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    loaded = load_table(tmp_path / "t.parquet", "y").columns
    np.testing.assert_array_equal(loaded["whole"], [1.0, np.nan, 3.0])
    np.testing.assert_array_equal(loaded["huge"], [2.0**63, 1.0, 2.0])
    assert loaded["half"].tolist() == [1.0, 2.0, 3.0]
    assert loaded["yes"].dtype == bool
    assert loaded["perhaps"].tolist() == [True, None, False]
    assert loaded["text"].tolist() == ["a", None, "c"]
    assert loaded["coded"].tolist() == ["a", "b", "a"]
    assert loaded["day"].tolist() == ["1970-01-02", "1970-01-03", "1970-01-04"]
    assert np.isnan(loaded["nothing"]).all()


def test_nested_parquet_is_refused_by_name(tmp_path) -> None:
    pq.write_table(pa.table({"deep": [[1], [2]], "y": [0, 1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'deep': holds nested values"):
        load_table(tmp_path / "t.parquet", "y")


def test_npz_has_two_parts(tmp_path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (6, 4, 4), dtype=np.uint8), np.arange(6) % 3
    np.savez(tmp_path / "t.npz", x_train=x[:4], y_train=y[:4, None], x_test=x[4:], y_test=y[4:])
    data = load_dataset(tmp_path / "t.npz")
    assert data.train.block is not None
    assert data.test is not None
    assert data.test.block is not None
    np.testing.assert_array_equal(data.train.block, x[:4])
    np.testing.assert_array_equal(data.test.block, x[4:])
    assert data.test.labels is not None
    np.testing.assert_array_equal(data.test.labels, y[4:])


def test_npz_never_unpickles(tmp_path) -> None:
    """A pickled array runs code when it is read; this one would raise an error of its own."""

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (eval, ("1 / 0",))

    hostile = np.empty(2, dtype=object)
    hostile[:] = [Bomb(), Bomb()]
    np.savez(tmp_path / "t.npz", x_train=hostile, y_train=np.arange(2))
    with pytest.raises(ZeroDivisionError):
        np.load(tmp_path / "t.npz", allow_pickle=True)["x_train"]
    with pytest.raises(DataError, match="plain arrays"):
        load_table(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": np.zeros((2, 2))},
        {"x_train": np.zeros((0, 2)), "y_train": np.zeros(0)},
        {"x_train": np.zeros(3), "y_train": np.zeros(3)},
        {"x_train": np.float64(3)},
        {"x_train": np.zeros((3, 2)), "y_train": np.zeros(2)},
        {"x_train": np.zeros((3, 2)), "y_train": np.zeros((3, 2))},
        {"x_train": np.zeros((3, 2), complex), "y_train": np.zeros(3)},
        {"x_train": np.array([["a"], ["b"]]), "y_train": np.zeros(2)},
        {"x_train": np.zeros((3, 2)), "y_train": np.zeros(3, complex)},
        {"x_train": np.zeros((3, 2)), "y_train": np.zeros(3, "datetime64[s]")},
    ],
)
def test_npz_of_another_form_is_refused(tmp_path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(DataError):
        load_table(tmp_path / "t.npz")


def test_digits_are_embedded_with_a_fixed_public_split() -> None:
    data, again = load_dataset("digits"), load_dataset("digits")
    assert data.test is not None
    assert (data.train.rows, data.test.rows) == (1437, 360)
    assert data.schema is not None
    assert (data.schema.bounds, data.schema.classes, data.schema.records) == ((0, 16), tuple(range(10)), 1437)
    np.testing.assert_array_equal(data.train.block, again.train.block)
    assert data.train.block is not None
    # The fingerprint pins the split: a new numpy or scikit-learn must not move records between the parts.
    assert int((data.train.block.sum(axis=1) * np.arange(1437)).sum()) == 322180032


def test_diabetes_is_embedded_with_bounds_that_hold() -> None:
    """Bounds narrower than the values would clamp records in silence."""
    data = load_dataset("diabetes")
    assert data.test is not None
    assert data.schema is not None
    assert (data.train.rows, data.test.rows, data.schema.records) == (354, 88, 354)
    for column in data.schema.columns:
        assert column.bounds is not None
        low, high = column.bounds
        for part in (data.train, data.test):
            assert low <= part.columns[column.name].min() <= part.columns[column.name].max() <= high
    assert data.train.labels is not None
    assert int((data.train.labels * np.arange(354)).sum()) == 9677415


def test_new_records_may_lack_the_target(tmp_path) -> None:
    path = write(tmp_path / "t.csv", "a,b\n1,2\n")
    table = load_table(path, "y", target_required=False)
    assert table.target is None
    assert table.labels is None


def test_a_separate_test_file(tmp_path) -> None:
    train, test = write(tmp_path / "a.csv", "a,y\n1,0\n2,1\n"), write(tmp_path / "b.csv", "a,y\n3,1\n")
    data = load_dataset(train, "y", test=test)
    assert data.test is not None
    assert data.test.columns["a"].tolist() == [3.0]


def test_frames_and_pairs() -> None:
    import pandas as pd
    import torch
    from torch.utils.data import TensorDataset

    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None], "y": [0, 1]}, index=["r", "s"])
    table = from_frame(frame, "y")
    assert table.names == ("a", "b")
    assert table.columns["b"].tolist() == ["x", None]
    with pytest.raises(DataError, match="frame"):
        from_frame(pd.DataFrame({"a": [1, "x", {}]}))
    with pytest.raises(DataError, match="frame"):
        from_frame(3)
    pairs = from_pairs(TensorDataset(torch.zeros(5, 2, 3), torch.arange(5)))
    assert pairs.block is not None
    assert pairs.block.shape == (5, 2, 3)
    assert pairs.labels is not None
    assert pairs.labels.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="dataset"):
        from_pairs([(np.zeros(2), 0), (np.zeros(3), 1)])


def test_tables_check_their_own_form() -> None:
    with pytest.raises(DataError, match="'b'"):
        Table({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(DataError, match="labels"):
        Table({"a": np.zeros(2)}, labels=np.zeros(3))
    with pytest.raises(DataError, match="not both"):
        Table({"a": np.zeros(2)}, block=np.zeros((2, 2)))
    with pytest.raises(DataError, match="row numbers"):
        Table({"a": np.zeros(2)}).take([2])
