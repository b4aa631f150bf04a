"""Parts of dates and buckets of a public hash: by declared facts alone, and the same in an exported predictor."""

from __future__ import annotations

import math
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.data import load_table
from confide.data.columns import Column
from confide.data.loaders import from_frame
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema
from confide.data.table import Table
from confide.data.views import KNOWN_BOUNDS, PARTS, bucket_of, moment_of, part_of
from confide.errors import DataError
from confide.export.models import _column
from confide.export.predictor.rows import encode, viewed

COLUMNS = (
    Column("city", buckets=16, missing="category"),
    Column("when time", of="when", date="ISO", part="time", bounds=("2015-01-01", "2025-01-01"), missing="category"),
    *(
        Column(f"when {part}", of="when", date="ISO", part=part, missing="middle")
        for part in PARTS
        if part in KNOWN_BOUNDS
    ),
    Column("month", of="when", date="ISO", part="month", categories=range(1, 13), missing="middle"),
    Column("year", of="born", date="%d/%m/%Y", part="year", bounds=(1900, 2030), missing="middle"),
)
ROWS: list[dict[str, Any]] = [
    {"city": "Łódź", "when": "2024-02-29", "born": "31/12/1999"},
    {"city": " Łódź ", "when": "2019-07-01T18:30:00+02:00", "born": "1999-12-31"},
    {"city": "?", "when": "2031-01-01 00:00", "born": None},
    {"city": None, "when": "yesterday", "born": "01/01/1850"},
    {"city": "3.0", "when": None, "born": " 02/03/2004 "},
]


def test_an_exported_predictor_sees_the_same() -> None:
    schema = Schema(classes=2, target="y", columns=COLUMNS)
    encoder = Encoder(schema)
    names = ("city", "when", "born")
    table = Table({name: np.array([row[name] for row in ROWS], dtype=object) for name in names})
    expected = encoder.features(table)
    facts = [_column(encoder, place) for place in range(len(COLUMNS))]
    columns = viewed({name: [row[name] for row in ROWS] for name in names}, facts)
    assert np.array_equal(encode(columns, facts), expected)
    assert np.isfinite(expected).all()
    assert np.array_equal(expected[0, :16], expected[1, :16])
    assert expected[0, :16].sum() == 1
    assert expected[2, 16] == expected[3, 16] == 1
    with pytest.raises(ValueError, match="'born'"):
        viewed({"city": [], "when": []}, facts)
    with pytest.raises(DataError, match="'born'"):
        encoder.features(Table({"city": table.columns["city"], "when": table.columns["when"]}))


def test_parts_of_a_date() -> None:
    when = datetime(2024, 2, 29, 18)  # a Thursday
    assert [part_of(when, part) for part in ("year", "month", "day", "weekday", "hour")] == [2024, 2, 29, 4, 18]
    assert part_of(when, "time") == (date(2024, 2, 29) - date(1970, 1, 1)).days + 0.75
    assert part_of(datetime(2024, 2, 26), "week-cos") == pytest.approx(1.0)  # Monday, where the week begins
    assert math.hypot(part_of(when, "year-sin"), part_of(when, "year-cos")) == pytest.approx(1.0)
    for part, (low, high) in KNOWN_BOUNDS.items():
        assert low <= part_of(when, part) <= high


def test_buckets_are_public_and_stay() -> None:
    assert [bucket_of(text, 64) for text in ("Paris", "Rome", "")] == [54, 6, 20]


def test_frames_with_dates_and_files(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    schema = Schema(classes=2, target="y", columns=[Column("when", date="ISO", bounds=["2020-01-01", "2021-01-01"])])
    frame = pd.DataFrame({"when": pd.to_datetime(["2020-01-01", "2020-07-02"]), "more": [1, 2]})
    from_memory = Encoder(schema).features(from_frame(frame))
    (tmp_path / "a.csv").write_text("more,when\n1,2020-01-01\n2,2020-07-02\n", encoding="utf-8")
    from_file = Encoder(schema).features(load_table(tmp_path / "a.csv", schema=schema, target_required=False))
    assert np.array_equal(from_memory, from_file)
    assert from_memory.ravel().tolist() == [-1.0, 0.0]


def test_a_file_of_facts_names_dates_once(tmp_path: Path) -> None:
    text = '[columns.visit]\ndate = "ISO"\nbounds = [2015-01-01, 2024-12-31]\n'
    text += 'parts = ["time", "year", "month"]\nmissing = "middle"\n'
    (tmp_path / "facts.toml").write_text(text + "[columns.city]\nbuckets = 8\n", encoding="utf-8")
    schema = Schema.from_toml(tmp_path / "facts.toml")
    assert [column.name for column in schema.columns] == ["visit time", "visit year", "visit month", "city"]
    assert schema.columns[1].bounds == (2015, 2024)
    assert schema.columns[2].bounds == (1, 12)
    assert schema == Schema.from_dict(schema.to_dict())
    assert schema.features == 3 + 8


@pytest.mark.parametrize(
    "facts",
    [
        {"date": "no format"},
        {"part": "month"},
        {"date": "ISO", "part": "century"},
        {"date": "ISO", "bounds": ["soon", "later"]},
        {"buckets": 1},
        {"buckets": 8, "categories": ["a", "b"]},
        {"buckets": 8, "bounds": (0, 1)},
        {"buckets": True},
    ],
)
def test_what_cannot_be_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="column 'a'"):
        Column("a", **facts)


def test_cells_that_are_no_dates_are_missing_and_no_error() -> None:
    for cell in ("", "31/31/2020", None, 5, float("nan"), "2020-13-01", "9" * 1000, "\0"):
        assert moment_of(cell, "ISO") is None
        assert moment_of(cell, "%d/%m/%Y") is None
    encoder = Encoder(Schema(classes=2, columns=[Column("a", date="ISO", bounds=("2000-01-01", "2020-01-01"))]))
    table = Table({"a": np.array(["never", "2010-01-01"], dtype=object)}, labels=np.array([0.0, 1.0]), target="y")
    x, _ = encoder.training(table)
    assert np.isnan(x[:, 0]).tolist() == [True, False]


@pytest.mark.parametrize("bounds", [("01.02.2018", "31.12.2023"), ("2018-02-01", "2023-12-31")])
def test_bounds_are_dates_of_the_column_or_of_the_calendar(bounds: tuple[str, str]) -> None:
    found = Column("day", date="%d.%m.%Y", bounds=bounds).bounds
    assert found == Column("day", date="ISO", bounds=("2018-02-01", "2023-12-31")).bounds


def test_bounds_in_another_format_are_told_which() -> None:
    with pytest.raises(DataError, match=r"of the format %d\.%m\.%Y"):
        Column("day", date="%d.%m.%Y", bounds=("02/01/2018", "12/31/2023"))
