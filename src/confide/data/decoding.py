"""Bytes of a file become arrays, up to a declared size: a megabyte of csv.gz, Parquet or npz may hold six gigabytes.

The limit is on what the file becomes, counted while it is read and before it is kept. It is LARGEST bytes unless the
environment says otherwise in CONFIDE_LARGEST_TABLE. Plain CSV is as large as it looks and needs none.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from confide.data.separators import SEPARATORS, header_line, separator_of, with_decimal_commas
from confide.data.table import MISSING_TOKENS, Array, attempt, quoted
from confide.errors import DataError

LARGEST = 4 << 30  # four gigabytes: more than a table for one machine's memory usually is, less than what fills it
LIMIT_NAME = "CONFIDE_LARGEST_TABLE"
NPZ_FAULTS = (
    OSError,
    ValueError,
    SyntaxError,  # numpy reads the header of an array as a literal
    TokenError,
    KeyError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    TypeError,
)
_BLOCK_BYTES = 1 << 24  # one line must fit into a block; wide tables have long lines
_CELL_BYTES = 16  # of one cell in memory, as Arrow has it and as the table does: "1," is two bytes of text
_CELLS_AT_ONCE = 1 << 21  # decoded before they are counted
_RAGGED = re.compile(r"\ACSV parse error: Row #([0-9]+): Expected ([0-9]+) columns, got ([0-9]+)")


def largest_table() -> int:
    """The limit in bytes."""
    given = os.environ.get(LIMIT_NAME, "").strip()
    if not given:
        return LARGEST
    if not (given.isascii() and given.isdigit() and len(given) < 19 and int(given) > 0):
        raise DataError(f"{LIMIT_NAME}={quoted(given)}: must be a number of bytes, such as {LARGEST}")
    return int(given)


def _too_large(path: Path, limit: int) -> DataError:
    return DataError(
        f"source={quoted(path)}: becomes more than {limit} bytes when it is read; if the file is to be trusted, set "
        f"{LIMIT_NAME} to a larger number of bytes"
    )


class _Counted(io.RawIOBase):
    """What a compressed file becomes, up to a limit: its text, or its cells if they take more, as short ones do."""

    def __init__(self, source: gzip.GzipFile, limit: int) -> None:
        self._source, self._limit, self.exceeded = source, limit, False
        self._text = self._cells = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._source.read(len(buffer))
        self._text += len(piece)
        self._cells += piece.count(b"\n") + max(piece.count(sign.encode()) for sign in SEPARATORS)
        if max(self._text, _CELL_BYTES * self._cells) > self._limit:
            self.exceeded = True
            raise OSError("too large")
        buffer[: len(piece)] = piece
        return len(piece)


def read_csv(path: Path, text: Iterable[str]) -> Any:
    """An Arrow table; the columns in `text` are kept as they are written, in bytes."""
    if not path.name.lower().endswith(".gz"):
        with path.open("rb") as file:
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(f"source={quoted(path)}: is text in UTF-16; save it as UTF-8")
        return _parsed(path, path, text)
    limit = largest_table()
    with gzip.open(path, "rb") as source:
        counted = _Counted(source, limit)
        try:
            return _parsed(counted, path, text)
        except DataError:
            if counted.exceeded:
                raise _too_large(path, limit) from None
            raise


def _parsed(source: Any, path: Path, text: Iterable[str]) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    text = list(text)

    def read() -> Any:
        separator = separator_of(header_line(path))
        found = csv.read_csv(
            source,
            read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types={name: pa.binary() for name in text},  # a byte that is no text is its own cell's affair
                null_values=list(MISSING_TOKENS),
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
                strings_can_be_null=False,
            ),
        )
        return with_decimal_commas(found, text, MISSING_TOKENS) if separator == ";" else found

    fault = "cannot be read as UTF-8 text with a header and cells between commas, tabs, semicolons or bars"
    try:
        return read()
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        # The reader's message quotes the row. Only its three numbers are taken over, and the rest is dropped.
        ragged = _RAGGED.search(str(error))
        if ragged:
            fault = "row {0} has {2} cells where the header has {1}".format(*ragged.groups())
    raise DataError(f"source={quoted(path)}: {fault}; correct the file")


def read_parquet(path: Path) -> Any:
    """An Arrow table. Texts stay dictionaries while they are read: one long text may be meant a million times."""
    import pyarrow as pa

    limit = largest_table()
    complaint = f"source={quoted(path)}: cannot be read as Parquet; write the file again"
    kinds = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
    found = attempt(lambda: _parquet_batches(path, limit), complaint, *kinds)
    if found is None:
        raise _too_large(path, limit)
    return found


def _parquet_batches(path: Path, limit: int) -> Any:
    """The table, or None if it is larger than the limit."""
    import pyarrow as pa
    from pyarrow import parquet, types

    with parquet.ParquetFile(path) as file:
        about, fields = file.metadata, file.schema_arrow
        stated = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
        if max(stated, about.num_rows * max(1, len(fields))) > limit:
            return None
        texts = [field.name for field in fields if types.is_string(field.type) or types.is_binary(field.type)]
    rows = max(1, _CELLS_AT_ONCE // max(1, len(fields)))
    batches, size = [], 0
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=rows):
            size += sum(_decoded_bytes(column) for column in batch.columns)
            if size > limit:
                return None
            batches.append(batch)
        return pa.Table.from_batches(batches) if batches else file.schema_arrow.empty_table()


def _decoded_bytes(column: Any) -> int:
    import pyarrow as pa
    from pyarrow import compute

    if not isinstance(column, pa.DictionaryArray):
        return int(column.nbytes)
    lengths = compute.binary_length(column.dictionary).take(column.indices)
    return int(compute.sum(lengths.cast(pa.int64())).as_py() or 0) + 8 * len(column)


NPZ_NAMES = {
    "train": (("x_train", "y_train"), ("X_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("X_test", "y_test"), ("test_images", "test_labels")),
}
NPZ_WHOLE = (("x", "y"), ("X", "y"), ("images", "labels"))
"""Inputs and labels of a part, and of a file that has no parts, by the names that people give them."""


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays that a data set may hold, by name; members that are no plain arrays are refused."""
    limit = largest_table()
    complaint = f"source={quoted(path)}: cannot be read as an npz of plain arrays; save it with numpy.savez"

    def size() -> int:
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())

    def read() -> dict[str, Any]:
        with np.load(path, allow_pickle=False) as archive:
            known = {name for pairs in (*NPZ_NAMES.values(), NPZ_WHOLE) for pair in pairs for name in pair}
            return {name: archive[name] for name in sorted(known) if name in archive.files}

    if attempt(size, complaint, *NPZ_FAULTS) > limit:
        raise _too_large(path, limit)
    found = attempt(read, complaint, *NPZ_FAULTS)
    if not all(isinstance(values, np.ndarray) for values in found.values()):  # numpy gives other members as bytes
        raise DataError(complaint)
    return found
