"""Files as spreadsheets write them: the header alone says what separates the cells."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from confide.data import load_table
from confide.data.columns import Column
from confide.data.draft import header_of
from confide.data.schema import Schema
from confide.data.separators import separator_of
from confide.data.table import as_numbers
from confide.errors import DataError
from confide.export.predictor.rows import columns_of, encode, viewed

PLAIN = 'age,pay,"a note, here",y\n40,1.5,"x, y",no\n50,-2.25,"x\n; z",yes\n,0.5,x,no\n'
FACTS = Schema(
    classes=("no", "yes"), target="y", columns=(Column("age", bounds=(0, 90)), Column("pay", bounds=(-5, 5)))
)
WAYS = {
    "tabs": PLAIN.replace('"a note, here"', "note").replace('"x, y"', "x").replace(",", "\t"),
    "semicolons": 'age;pay;"a note, here";y\n40;1,5;"x, y";no\n50;-2,25;"x\n; z";yes\n;,5;x;no\n',
    "semicolons and points": 'age;pay;"a note, here";y\n40;1.5;"x, y";no\n50;-2.25;"x\n; z";yes\n;0.5;x;no\n',
    "bars": PLAIN.replace('"a note, here"', "note").replace('"x, y"', "x").replace(",", "|"),
    "a mark and carriage returns": "\ufeff" + PLAIN.replace("\n", "\r\n"),
    "one odd cell": 'age;pay;"a note, here";y\n40;1,5;"x, y";no\n50;-2,25;u;yes\n?;0,5;x;no\n',
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_way_gives_the_same_numbers(tmp_path: Path, way: str, packed: bool) -> None:
    path = tmp_path / ("rows.csv.gz" if packed else "rows.csv")
    content = WAYS[way].encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    table = load_table(path, "y", schema=FACTS)
    np.testing.assert_array_equal(table.columns["age"].astype(float), [40, 50, np.nan])
    np.testing.assert_array_equal(table.columns["pay"].astype(float), [1.5, -2.25, 0.5])
    assert table.labels is not None
    assert table.labels.tolist() == ["no", "yes", "no"]
    assert header_of(path) == [*table.columns, "y"]


@pytest.mark.parametrize("way", WAYS)
def test_an_exported_predictor_reads_them_alike(tmp_path: Path, way: str) -> None:
    facts = [
        {"name": name, "kind": "numeric", "low": low, "high": high, "missing": "category"}
        for name, low, high in (("age", 0.0, 90.0), ("pay", -5.0, 5.0))
    ]

    def encoded(text: str) -> np.ndarray:
        path = tmp_path / "rows.csv"
        path.write_text(text, encoding="utf-8", newline="")
        return encode(viewed(columns_of(path), facts), facts)

    np.testing.assert_array_equal(encoded(WAYS[way]), encoded(PLAIN))


def test_texts_that_are_declared_stay_as_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("size;y\n1,5;no\n2,5;yes\n")
    facts = Schema(classes=("no", "yes"), target="y", columns=(Column("size", categories=("1,5", "2,5")),))
    assert load_table(tmp_path / "rows.csv", "y", schema=facts).columns["size"].tolist() == ["1,5", "2,5"]


def test_a_comma_wins_and_quotes_do_not_count() -> None:
    assert separator_of("a;b,c") == ","
    assert separator_of('"a,b";c') == ";"
    assert separator_of("alone") == ","


def test_a_ragged_file_is_one_sentence_that_quotes_no_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a;b;y\n1;2;no\nsecret;3\n")
    with pytest.raises(DataError, match="row 3 has 2 cells where the header has 3") as said:
        load_table(tmp_path / "rows.csv", "y")
    assert "secret" not in str(said.value)


def test_text_as_a_number_to_predict_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"target 'y': holds text where .* or declare classes"):
        as_numbers(np.array(["low", "high"], dtype=object), "target 'y'")
