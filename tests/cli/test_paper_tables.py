"""Tables of papers on a terminal: no word is broken, and no line is wider than the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from confide.cli.paper_tables import column_widths, rendered
from confide.papers.base import PaperMeasure, PaperTable, shown

WIDE = PaperTable(
    "Table I: abalone, delta = 1e-05",
    ("run", "accuracy, paper", "accuracy, ours (%)", "paper", "product (paper's rule)", "Hoelder", "DP by PLD", "kept"),
    (("abalone, DP-SGLD at DP epsilon 1", "76 %", PaperMeasure((75.1, 76.2), 2), 0.5, 1.092, 1.299, 1.0, "assumed"),),
    ("A note that is as long as it has to be, and goes on where the line ends, as notes do on a page of this width.",),
)
TIGHT = PaperTable("Two", ("method", "accuracy on the held-out part"), (("a method of many words", 0.25),))


def lines(table: PaperTable, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(rendered(table, width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("table", [WIDE, TIGHT], ids=["wide", "tight"])
def test_words_stay_whole_and_lines_fit(table: PaperTable, width: int) -> None:
    """Catches "accurac" above "y": a column that is narrower than its longest word."""
    found = lines(table, width)
    assert max(map(len, found)) <= width
    words = {word.strip(":;") for line in found for word in line.split()}
    for cell in (*table.columns[1:], *(shown(cell) for row in table.rows for cell in row)):
        assert set(cell.split()) <= words, cell


def test_a_table_that_is_too_wide_is_told_row_by_row() -> None:
    assert "  accuracy, paper: 76 %; accuracy, ours (%): 75.65" in "\n".join(lines(WIDE, 60))
    assert lines(WIDE, 200)[1].split()[:2] == ["run", "accuracy,"]


def test_spare_room_goes_where_lines_are_long() -> None:
    assert column_widths([("a", "four words of text"), ("b", "x")], 40) == [1, 18]
    assert column_widths([("a", "four words of text"), ("b", "x")], 12) == [1, 9]
    assert column_widths([("a", "unbreakable"), ("b", "x")], 12) is None
