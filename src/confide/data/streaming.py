"""More records than memory: a Parquet file, read once in order and answered from the disk.

    records = confide.data.streaming.from_parquet("train.parquet", target="y", schema=schema)
    data = confide.PrivateData(records, None, schema=schema)

Poisson sampling picks records from anywhere, which Parquet cannot give. So the columns are read once, group by group,
and written to a file of plain single-precision rows that is mapped into memory: a batch costs its own pages, and what
the process holds does not grow with the number of records, but for one byte each that says whether it is usable. The
file is private: it lies in a directory of yours, nobody else may open it, and it has no name from the first byte on, so
that it is gone when the process ends, however it ends.

Errors depend on the columns alone, never on a record: one with a missing value, or one too large for single precision,
counts as zero like any other that cannot answer.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from confide.data.schema import Schema
from confide.errors import Refusal

ROWS_AT_ONCE = 1 << 17  # a hundred columns of it in double precision are about 100 MB


@dataclass(frozen=True)
class MappedRecords:
    """features  (records, columns), float32; stays on the disk until it is asked for
    targets   (records,), class numbers (int64) or real values (float32); on the disk too
    usable    (records,), which records can answer; in memory
    """

    features: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    usable: Tensor = field(repr=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("MappedRecords: private records cannot be pickled")


def from_parquet(
    path: str | os.PathLike[str],
    *,
    target: str,
    schema: Schema,
    features: Sequence[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MappedRecords:
    """Write the numbers of a Parquet file where they can be sampled.

    features    columns to learn from, in order; all but the target unless given
    directory   a disk with room for four bytes a number; the usual place for temporary files unless given
    progress    called with rows done and rows in all, for the eyes of whoever holds the records
    """
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(os.fspath(path), pre_buffer=False) as source:  # would keep what it has read
            columns = _columns(source.schema_arrow, target, features, Path(path))
            return _copied(source, columns, target, schema, directory, progress)
    except (OSError, ArrowException) as error:
        said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise Refusal(f"path={os.fspath(path)!r}: not a readable Parquet file ({said})") from None


def _copied(
    source: Any,
    columns: Sequence[str],
    target: str,
    schema: Schema,
    directory: str | os.PathLike[str] | None,
    progress: Callable[[int, int], None] | None,
) -> MappedRecords:
    kind = np.dtype(np.float32 if schema.class_count is None else np.int64)
    usable, done = [np.zeros(0, dtype=np.bool_)], 0
    with _nameless(directory) as rows_file, _nameless(directory) as targets_file:
        for batch in source.iter_batches(batch_size=ROWS_AT_ONCE, columns=[*columns, target]):
            x, y, good = _cleaned(batch, columns, target, schema)
            _write(rows_file, x, directory)
            _write(targets_file, y.astype(kind), directory)
            usable.append(good)
            done += len(good)
            if progress is not None:
                progress(done, source.metadata.num_rows)
        rows_file.flush()
        targets_file.flush()
        # A mapping outlives the handle it was made from.
        x = _mapped(rows_file, np.dtype(np.float32), (done, len(columns)))
        y = _mapped(targets_file, kind, (done,))
    return MappedRecords(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(np.concatenate(usable)))


def _write(file: IO[bytes], numbers: np.ndarray[Any, Any], directory: str | os.PathLike[str] | None) -> None:
    try:
        file.write(numbers.data)
    except OSError as error:
        raise Refusal(f"directory={directory!r}: cannot hold the records ({error.strerror})") from None


def _nameless(directory: str | os.PathLike[str] | None) -> IO[bytes]:
    """A file that only this process can reach: mode 0600, its name removed before anything is written."""
    try:
        return tempfile.TemporaryFile(dir=directory)
    except OSError as error:
        raise Refusal(f"directory={directory!r}: cannot be written ({error.strerror})") from None


def _mapped(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if 0 in shape:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(file.fileno(), 0)
    if hasattr(memory, "madvise"):
        memory.madvise(mmap.MADV_RANDOM)  # a batch is scattered: reading ahead would read for nobody
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def _cleaned(
    batch: Any, columns: Sequence[str], target: str, schema: Schema
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows, targets and which are usable; what is not usable becomes zero, so that nothing odd is ever mapped."""
    x = np.empty((batch.num_rows, len(columns)), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for place, name in enumerate(columns):
            x[:, place] = _numbers(batch.column(name))
        y = _numbers(batch.column(target))
        good = np.isfinite(x).all(1)
        if schema.class_count is None:
            y = y.astype(np.float32)
            good &= np.isfinite(y)
        else:
            good &= (y >= 0) & (y < schema.class_count) & (y == np.floor(y))
    x[~good] = 0
    return x, np.where(good, y, 0), good


def _numbers(column: Any) -> np.ndarray[Any, Any]:
    """A column in double precision, missing values as NaN."""
    import pyarrow as pa

    found: np.ndarray[Any, Any] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def _columns(found: Any, target: str, features: Sequence[str] | None, path: Path) -> list[str]:
    """The names of the feature columns, once all that are needed exist and hold numbers."""
    from pyarrow import types

    chosen = [name for name in found.names if name != target] if features is None else list(features)
    if target in chosen:
        raise Refusal(f"features={chosen}: must not hold the target {target!r}")
    for name in (target, *chosen):
        if found.names.count(name) != 1:
            raise Refusal(f"path={str(path)!r}: needs exactly one column {name!r}; it has {', '.join(found.names)}")
        kind = found.field(name).type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise Refusal(f"path={str(path)!r}: column {name!r} holds {kind}, not numbers; encode it first")
    if not chosen:
        raise Refusal(f"path={str(path)!r}: has no column but the target {target!r}")
    return chosen
