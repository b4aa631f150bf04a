"""What separates the cells of a text file, told by its header line alone: names of columns are public, cells are not.

A comma, wherever the header has one outside of quotes; else a tab, a semicolon or a bar. Where a semicolon separates,
the comma is free to stand in numbers, and spreadsheets that write semicolons do so for that reason: "3,5" is then a
number like "3.5". Each cell is looked at by itself, and texts that facts declare stay as they are written.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

SEPARATORS = (",", "\t", ";", "|")
LONGEST_HEADER = 1 << 24  # bytes; a file without line ends is no table
DECIMAL_COMMA = r"^\s*([+-]?[0-9]*),([0-9]+(?:[eE][+-]?[0-9]+)?)\s*$"
_QUOTED = re.compile(r'"[^"]*"')


def header_line(path: Path) -> str:
    """The first line of a file that may be compressed; no byte behind it is decoded."""
    opened: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:  # bytes, for a reader of text would look at the records behind the line too
        line: bytes = file.readline(LONGEST_HEADER)
    return line.split(b"\r")[0].decode("utf-8-sig")


def separator_of(header: str) -> str:
    outside = _QUOTED.sub("", header)
    return next((one for one in SEPARATORS if one in outside), ",")


def names_in(header: str) -> list[str]:
    return next(csv.reader([header], delimiter=separator_of(header)), [])


def with_decimal_commas(table: Any, text: Collection[str], missing: Collection[str]) -> Any:
    """An Arrow table whose columns of texts, but for those declared as such, hold numbers where cells are numbers."""
    import pyarrow as pa
    from pyarrow import compute

    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if name in text or not pa.types.is_string(column.type):
            continue
        column = compute.replace_substring_regex(column, DECIMAL_COMMA, r"\1.\2")
        try:
            none = compute.is_in(compute.utf8_trim_whitespace(column), pa.array(missing))
            column = compute.if_else(none, pa.scalar(None, pa.string()), column).cast(pa.float64())
        except pa.ArrowException:  # some cell is no number, so that each is read by itself, as in any such column
            pass
        table = table.set_column(place, name, column)
    return table
