"""Raw cells as words, so that one value reads the same in every file: for recognising copies, and for nothing else.

A number is a number whether a file has it as text, as a whole number or in double precision; what is missing is missing
however it is spelt. Whatever else is text stands for itself, without blanks at its ends.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from confide.data.table import MISSING_TOKENS, Array, Table, as_text

Words: TypeAlias = NDArray[np.uint64]

# Records are worked on in pieces of so many numbers, 32 MB as words.
_PIECE = 1 << 22


def number_words(values: Array) -> Words:
    """Numbers in single precision, in which a copy in double precision or in whole numbers reads the same."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32) + np.float32(0)  # minus zero becomes zero
    single[np.isnan(single)] = np.nan  # one of the many
    words: Words = single.view(np.uint32).astype(np.uint64)
    return words


def pieces_of(table: Table, key: bytes) -> Iterator[tuple[int, Words]]:
    """The words of a table in pieces (row number of the first, rows by columns), every cell once; labels are a column.

    Pictures and tensors have a column for each number.
    """
    blocks = [*table.inputs.values(), *(() if table.block is None else (table.block,))]
    for block in blocks:
        if block.dtype.kind in "biuf":
            flat = block.reshape(len(block), -1)
            rows = max(1, _PIECE // max(1, flat.shape[1]))
            for start in range(0, len(flat), rows):
                yield start, number_words(flat[start : start + rows])
    beside = [values for values in (table.labels, table.weights) if values is not None]
    for values in (*table.columns.values(), *beside):
        for column in (values,) if values.ndim == 1 else values.T:
            yield 0, _column(column, key)[:, None]


def _column(values: Array, key: bytes) -> Words:
    if values.dtype.kind in "biuf":
        return number_words(values)
    known: dict[Any, int] = {}
    words = np.empty(len(values), dtype=np.uint64)
    for row, cell in enumerate(values.tolist()):
        try:
            word = known.get(cell)
            if word is None:
                word = known[cell] = _word(cell, key)
        except Exception:  # a list, or an object of somebody's: no error depends on a record
            word = _word(cell, key)
        words[row] = word
    return words


def _word(cell: Any, key: bytes) -> int:
    text = as_text(cell)
    text = "" if text is None else text.strip()
    if text in MISSING_TOKENS:
        return int(number_words(np.array([np.nan]))[0])
    if text.lower() in ("true", "false"):
        return int(number_words(np.array([text.lower() == "true"]))[0])
    try:
        return int(number_words(np.array([float(text)]))[0])
    except ValueError:
        return int.from_bytes(hmac.new(key, text.encode(errors="replace"), hashlib.sha256).digest()[:8], "little")
