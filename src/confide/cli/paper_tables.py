"""Tables of papers on a terminal: words stay whole, and a table that is too wide for that is told row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from confide.papers.base import PaperTable

GAP = 2
"""Blanks between two columns."""
INDENT = 2
"""Of what is told of a row, under its name."""


def rendered(table: PaperTable, width: int) -> Group:
    """A table for a terminal of that width, its notes below."""
    from confide.papers.base import shown

    rows = [[shown(cell) for cell in row] for row in table.rows]
    widths = column_widths([table.columns, *rows], width)
    parts = _told(table.columns, rows) if widths is None else [_drawn(table.columns, rows, widths)]
    return Group(Text(table.title, style="italic"), *parts, *(Text(note) for note in table.notes))


def column_widths(lines: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Of every column: at least its longest word, more where lines are long; None where words do not fit."""
    columns = list(zip(*lines, strict=True))
    found = [max((len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    natural = [max(map(len, column)) for column in columns]
    spare = width - sum(found) - GAP * (len(columns) - 1)
    if spare < 0:
        return None
    for _ in range(spare):
        short = [whole - own for whole, own in zip(natural, found, strict=True)]
        if max(short) <= 0:
            break
        found[short.index(max(short))] += 1
    return found


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> RichTable:
    drawn = RichTable(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
        drawn.add_column(escape(column), justify="left" if place == 0 else "right", width=width)
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


def _told(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[RenderableType]:
    """Every row as a paragraph that begins with its name."""
    parts: list[RenderableType] = []
    for row in rows:
        cells = (f"{column}: {cell}" for column, cell in zip(columns[1:], row[1:], strict=True))
        parts += [Text(row[0], style="bold"), Padding(Text("; ".join(cells)), (0, 0, 0, INDENT))]
    return parts
