"""Files become raw tables; what cannot be read is told to the curator without quoting a cell."""

from __future__ import annotations

import gzip
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from confide.data import Column, Encoder, Schema, Table, from_frame, from_pairs, load_dataset, load_table
from confide.data.loaders import load_parts
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
    "repeated": ("t.csv", b"a,a,y\n1,2,3\n", "columns 1, 2 have the same name"),
    "unnamed": ("t.csv", b"a,,y\n1,2,3\n", "column 2 without a name"),
    "not utf-8": ("t.csv", b"a,y\n\xff\xfe,1\n", "UTF-8"),
    "not utf-8 in the header": ("t.csv", b"a\xff,y\n1,1\n", "UTF-8"),
    "no such target": ("t.csv", b"a,b\n1,2\n", "target='y': no such column; source="),
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


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_byte_that_is_no_text_is_its_own_records_affair(tmp_path, kind: str, place: int) -> None:
    """One cell in another encoding, with facts declared: the other records are read as they are without it."""
    rows = [[b"1.5", b"red", b"no"], [b"2.5", b"blue", b"yes"], [b"3.5", b"red", b"no"]]
    schema = Schema(
        columns=[Column("a", bounds=(0, 9)), Column("b", categories=("red", "blue"))], target="y", classes=("no", "yes")
    )

    def read(rows: list[list[bytes]], name: str) -> Table:
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            columns = [pa.array(cells, pa.binary()) for cells in zip(*rows, strict=True)]
            texts = [pa.Array.from_buffers(pa.string(), len(rows), one.buffers()) for one in columns]
            pq.write_table(pa.table(dict(zip("aby", texts, strict=True))), path)
        else:
            text = b"a,b,y\n" + b"".join(b",".join(row) + b"\n" for row in rows)
            path.write_bytes(gzip.compress(text) if kind == "csv.gz" else text)
        return load_table(path, schema=schema)

    sound = Encoder(schema).training(read(rows, "sound"))
    rows[1][place] = b"caf\xe9"
    odd = Encoder(schema).training(read(rows, "odd"))
    assert not any(np.isnan(one[[0, 2]]).any() for one in sound)
    assert all(np.array_equal(one[[0, 2]], other[[0, 2]]) for one, other in zip(odd, sound, strict=True))


HEADERLESS = {
    "numbers": "39,77516,13.5,1\n40,1,2,0\n",
    "repeated cells": f"{SECRET},{SECRET},1\nb,c,2\n",
    "text alone": f"{SECRET},Private,yes\nb,c,no\n",
    "an empty cell": f"{SECRET},,yes\nb,c,no\n",
    "one column": f"{SECRET}\nb\n",
}


@pytest.mark.parametrize("case", HEADERLESS)
def test_the_first_record_of_a_file_without_a_header_is_not_shown(tmp_path, case: str) -> None:
    """Whoever reads it: the loader, a schema that misses columns, an encoder."""
    path = write(tmp_path / "t.csv", HEADERLESS[case])
    declared = Schema(records=2, target="y", classes=2, columns=[Column("age", bounds=(0, 1))])
    said = []
    for action in (
        lambda: load_table(path, "y"),
        lambda: declared.for_table(load_table(path)),
        lambda: Schema(columns=declared.columns, ignore=("age",)),
        lambda: Schema(classes=2).for_table(load_table(path)),
        lambda: Encoder(declared).features(load_table(path)),
    ):
        with pytest.raises(DataError) as caught:
            action()
        told = "".join(traceback.format_exception(caught.value)).replace(str(path), "")
        said.append(re.sub(r"pytest-\d+", "", told))  # of the path, a number by chance
    cells = set(HEADERLESS[case].splitlines()[0].split(",")) - {"", "1"}
    assert not [cell for cell in cells for text in said if cell in text.rpartition("DataError")[2]]
    assert SECRET not in "".join(said)


@pytest.mark.parametrize("header", ["0,1,2,y", "2019,2020,2021,y", "a1,b2,y"])
def test_columns_may_be_counted(tmp_path, header: str) -> None:
    cells = ",".join("1" * header.count(",")) + ",0"
    assert load_table(write(tmp_path / "t.csv", f"{header}\n{cells}\n"), "y").rows == 1


def bomb(path: Path) -> Path:
    """A small file that becomes a few megabytes."""
    if path.name.endswith(".csv.gz"):
        return write(path, gzip.compress(b"a,y\n" + b"1,2\n" * 1_000_000))
    if path.suffix == ".parquet":
        table = pa.table({"a": np.zeros(500_000), "y": np.zeros(500_000)})
        if "text" in path.name:  # a long text, once in the file and meant many times
            table = pa.table({"a": pa.array(["x" * 100_000] * 50), "y": np.zeros(50)})
        pq.write_table(table, path)
        return path
    np.savez_compressed(path, x_train=np.zeros((500_000, 1)), y_train=np.zeros(500_000))
    return path


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet", "text.parquet", "t.npz"])
def test_what_a_small_file_becomes_is_limited(tmp_path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(tmp_path / name)
    assert path.stat().st_size < 50_000
    monkeypatch.setenv("CONFIDE_LARGEST_TABLE", "2000000")
    with pytest.raises(DataError, match=r"more than 2000000 bytes .* CONFIDE_LARGEST_TABLE") as caught:
        load_dataset(path, "y")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CONFIDE_LARGEST_TABLE", "100000000")
    assert load_dataset(path, "y").train.rows in (50, 500_000, 1_000_000)
    monkeypatch.setenv("CONFIDE_LARGEST_TABLE", "much")
    with pytest.raises(DataError, match="CONFIDE_LARGEST_TABLE='much'"):
        load_dataset(path, "y")


def test_short_cells_count_for_what_they_become(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes of text are two million cells."""
    path = bomb(tmp_path / "t.csv.gz")
    monkeypatch.setenv("CONFIDE_LARGEST_TABLE", "20000000")
    with pytest.raises(DataError, match="becomes more than 20000000 bytes"):
        load_dataset(path, "y")


def test_members_of_an_npz_that_are_no_arrays(tmp_path) -> None:
    import zipfile

    for content in (b"plain bytes", b"", b"\x93NUMPY"):
        with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
            archive.writestr("x_train", content)
            archive.writestr("y_train", b"1")
        with pytest.raises(DataError, match="cannot be read as an npz of plain arrays"):
            load_dataset(tmp_path / "t.npz")
    for values in (np.array([1j, 2]), np.array(["a", "b"]), np.array([b"a", b"b"]), np.zeros(2, "M8[s]")):
        np.savez(tmp_path / "t.npz", x_train=values[:, None], y_train=values)
        with pytest.raises(DataError):
            load_dataset(tmp_path / "t.npz")


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


def test_one_of_several_parquet_files_may_be_empty(tmp_path) -> None:
    """Whether a part holds records is private: an empty one is a part like the others."""
    whole = pa.table({"job": ["cook", "baker", "cook"], "age": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    paths = [tmp_path / f"{place}.parquet" for place in range(3)]
    for path, part in zip(paths, (whole[:0], whole[:2], whole[2:]), strict=True):
        pq.write_table(part, path)
    found = load_parts(paths, "y")
    assert len(found.labels) == 3
    assert found.columns["job"].tolist() == ["cook", "baker", "cook"]


def test_nested_parquet_is_refused_by_its_place(tmp_path) -> None:
    pq.write_table(pa.table({"deep": [[1], [2]], "y": [0, 1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 1: holds nested values"):
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


@pytest.mark.parametrize(
    "names",
    [
        ("X_train", "y_train", "X_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("images", "labels"),
        ("X", "y"),
    ],
)
def test_arrays_of_an_npz_go_by_the_names_that_people_give_them(tmp_path, names: tuple[str, ...]) -> None:
    """A file without parts is all training records, and what is measured on itself would be no test."""
    x, y = np.arange(96, dtype=np.uint8).reshape(6, 4, 4), np.arange(6)[:, None]
    parts = [x[:4], y[:4], x[4:], y[4:]] if len(names) == 4 else [x[:4], y[:4]]
    np.savez(tmp_path / "t.npz", **dict(zip(names, parts, strict=True)), val_images=x, other=np.zeros(3))
    data = load_dataset(tmp_path / "t.npz")
    assert data.train.block is not None
    np.testing.assert_array_equal(data.train.block, x[:4])
    np.testing.assert_array_equal(np.ravel(data.train.labels), np.arange(4))
    assert (data.test is None) == (len(names) == 2)
    if data.test is not None:
        np.testing.assert_array_equal(data.test.block, x[4:])


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
        {"test_images": np.zeros((2, 2)), "y_train": np.zeros(2)},
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
    assert from_frame(pd.DataFrame({"a": [1, "x", {}]})).columns["a"].tolist() == ["1", "x", None]
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
    with pytest.raises(DataError, match="not two of them"):
        Table({"a": np.zeros(2)}, block=np.zeros((2, 2)))
    with pytest.raises(DataError, match="row numbers"):
        Table({"a": np.zeros(2)}).take([2])


def test_a_table_looks_at_each_column_a_few_times_however_many_there_are() -> None:
    """A look at all columns for each of them makes sixteen thousand of them take seconds."""

    class Counted(dict[str, Any]):
        looks = 0

        def values(self) -> Any:
            for one in super().values():
                self.looks += 1
                yield one

    columns = Counted({f"c{place}": np.zeros(2) for place in range(300)})
    table = Table(columns, target="y", labels=np.zeros(2))
    assert table.rows == 2
    assert columns.looks <= 2 * len(columns)


@pytest.mark.parametrize("odd", ["text", b"bytes", [1], 10**400, object(), None, float("nan"), True])
def test_one_odd_cell_of_a_frame_changes_no_other_record(odd: Any) -> None:
    pd = pytest.importorskip("pandas")
    schema = Schema(
        records=3, target="y", classes=2, columns=[Column("a", bounds=(0, 4)), Column("b", categories=(1, 2))]
    )
    found = []
    for cell in (2.0, odd):
        frame = pd.DataFrame({"a": [1.5, 3.0, 0.1], "b": [1, 2, 1], "y": [0, 1, 0]}, dtype=object)
        for column in ("a", "b"):
            frame.loc[2, column] = None
            frame.at[2, column] = cell
        found.append(Encoder(schema).training(from_frame(frame, "y"))[0][:2])
    np.testing.assert_array_equal(found[0], found[1])
