"""A first draft of a file of facts, which reads no record unless the user vouches for what it shows.

What a draft may take is a question of privacy. Names of columns are structure, the same whoever is in the data, so they
are read: from the header of a CSV file or the schema of a Parquet file, and not a line more. Types, bounds, categories,
classes and the number of records depend on records: they are given by the curator, left to declare, or, on the user's
word (`assume_public`), read off the data and marked so in the file, from which reports repeat it.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confide.data.columns import Column
from confide.data.loaders import checked_names
from confide.data.schema import Schema
from confide.data.separators import header_line, names_in
from confide.data.table import listed, quoted
from confide.errors import DataError

_IDENTIFIER = re.compile(
    r"(^|[_\W])(id|uuid|guid|ssn|e?mail|phone|name|address|passport|iban|unnamed)($|[_\W])", re.IGNORECASE
)
_DATE = re.compile(r"(^|[_\W])(date|time|timestamp|datetime|dob|birthday)($|[_\W])|_(at|on)$", re.IGNORECASE)

DATE_LINES = ('date = "ISO"                # or a format such as "%d/%m/%Y"', "bounds = [2000-01-01, 2029-12-31]")
"""How a column of dates is declared."""


def header_of(source: str | Path) -> list[str]:
    """The names of the columns of a file, and nothing else of it."""
    path = Path(source)
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            from pyarrow import parquet

            return [str(one) for one in parquet.read_schema(path).names]
        if not name.endswith((".csv", ".csv.gz")):
            raise DataError(f"source={quoted(source)}: facts are drafted for .csv, .csv.gz and .parquet files")
        names = names_in(header_line(path))
    except DataError:
        raise
    except (OSError, ValueError, EOFError, csv.Error):
        names = []
    if not names:
        raise DataError(f"source={quoted(source)}: its first line is no header; write one")
    if any(_looks_like_a_number(one) for one in names):
        # Then it may be the first record. Its cells are quoted nowhere, and a draft would write them down.
        raise DataError(f"source={quoted(source)}: its first line holds numbers, so it may be a record; write a header")
    return checked_names(names, f"source={quoted(source)}")


def _looks_like_a_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def draft_text(
    names: Sequence[str],
    target: str,
    *,
    regression: bool = False,
    ignore: Sequence[str] = (),
    numeric: Sequence[str] = (),
    categorical: Sequence[str] = (),
    records: int | None = None,
) -> str:
    """A file of facts by names alone: what is to be declared stands there as a comment.

    Columns whose names speak of identifiers or dates are proposed for `ignore`.
    """
    unknown = [one for one in (target, *ignore, *numeric, *categorical) if one not in names]
    if unknown:
        raise DataError(f"columns: {listed(unknown)} not in the header of the file; check the spelling")
    named = {target, *numeric, *categorical}
    left_out = [
        one
        for one in names
        if one in ignore or (one not in named and (sounds_like_identifier(one) or sounds_like_date(one)))
    ]
    lines = [
        "# A draft: what stands behind a # is yours to declare, from public knowledge and not from these records.",
        f"records = {records}" if records is not None else "# records = 1000          # nominal size; or it is counted",
        f"target = {_text(target)}",
        "# target_bounds = [low, high]" if regression else '# classes = ["no", "yes"]',
        f"ignore = {_list(left_out)}",
    ]
    for one in left_out:
        if one not in ignore:
            why = (
                "sounds like an identifier"
                if sounds_like_identifier(one)
                else "sounds like a date: to use it, take it out of ignore and declare"
            )
            lines.append(f"# {_comment(one)}: {why}")
            if not sounds_like_identifier(one):
                lines += [f"# [columns.{_text(one)}]", *(f"# {line}" for line in DATE_LINES)]
    for one in names:
        if one == target or one in left_out:
            continue
        lines += ["", f"[columns.{_text(one)}]"]
        if one in numeric:
            lines.append("# bounds = [low, high]")
        elif one in categorical:
            lines += ['kind = "categorical"', '# categories = ["a", "b"]']
        else:
            lines.append('# bounds = [low, high]     # or: categories = ["a", "b"]')
            lines.append('# date = "ISO"             # of dates, beside bounds; buckets = 64 of texts too many to list')
        lines.append('# missing = "category"      # or "middle"; left out, a record without a value counts for nothing')
    return "\n".join(lines) + "\n"


def facts_text(schema: Schema) -> str:
    """A schema as a file of facts, with whose word each fact is; `Schema.from_toml` is the inverse."""
    lines = [] if schema.records is None else [f"records = {schema.records}"]
    if schema.target is not None:
        lines.append(f"target = {_text(schema.target)}")
    if schema.classes is not None:
        lines.append(f"classes = {_list(schema.classes)}")
    if schema.target_bounds is not None:
        lines.append(f"target_bounds = {_list(schema.target_bounds)}")
    if schema.ignore:
        lines.append(f"ignore = {_list(schema.ignore)}")
    if schema.sources:
        lines += ["", "[sources]", *(f"{fact} = {_text(source)}" for fact, source in schema.sources)]
    if schema.learnt is not None:
        lines += ["", "[learnt]", *(f"{name} = {_value(value)}" for name, value in schema.learnt.to_dict().items())]
    for place, column in enumerate(schema.columns):
        lines += ["", f"[columns.{_text(column.name)}]", *_column_lines(schema, place, column)]
    return "\n".join(lines) + "\n"


def _column_lines(schema: Schema, place: int, column: Column) -> list[str]:
    if column.buckets:
        lines = [f"buckets = {column.buckets}"]
    elif column.kind == "categorical":
        lines = [f"categories = {_list(column.categories)}"]
    else:
        bounds = schema.bounds_of(place, column)
        lines = [] if bounds is None else [f"bounds = {_list(bounds)}"]
    views = (("of", column.of), ("date", column.date), ("part", column.part))
    lines += [f"{name} = {_text(value)}" for name, value in views if value]
    lines.append(f"missing = {_text(column.missing)}")
    return lines if column.source == "declared" else [*lines, f"source = {_text(column.source)}"]


def sounds_like_identifier(name: str) -> bool:
    return _IDENTIFIER.search(name) is not None


def sounds_like_date(name: str) -> bool:
    return _DATE.search(name) is not None


def _list(values: Sequence[Any]) -> str:
    return f"[{', '.join(_value(value) for value in values)}]"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _text(value: str) -> str:
    """A basic string of TOML: JSON's escapes are TOML's, but for the one character that JSON lets stand.

    Letters of any script stay as they are; JSON would write those beyond 16 bits as two halves, which TOML refuses.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return " ".join(quoted(text).split())
