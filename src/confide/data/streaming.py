"""More records than memory: Parquet files, read once in order and answered from the disk.

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

import errno
import filecmp
import glob
import hashlib
import itertools
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from confide.data.overlap import SampledFiles
from confide.data.schema import Schema
from confide.errors import RanksDisagree, Refusal

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, or somebody's share of it, has no room
ROWS_AT_ONCE = 1 << 17  # a hundred columns of it in double precision are about 100 MB


@dataclass(frozen=True)
class MappedRecords:
    """features  (records, columns), float32; stays on the disk until it is asked for
    targets   (records,), class numbers (int64) or real values (float32); on the disk too
    usable    (records,), which records can answer; in memory
    dealt     which share of the files this is; None: they are whole
    """

    features: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    usable: Tensor = field(repr=False)
    dealt: Dealt | None = field(default=None, repr=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("MappedRecords: private records cannot be pickled")


class Share(Protocol):
    """Which share of the row groups is read: rank 0, ..., size - 1, as of `confide.distributed.Ranks`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def together(self, work: Callable[[], T]) -> T:
        """Work that every rank does for itself: where it fails for one, it fails for all."""

    def told(self, message: bytes) -> bytes:
        """What rank 0 says."""

    def everybody(self, message: bytes, what: str) -> list[bytes]:
        """What all ranks say, in their order."""


@dataclass(frozen=True)
class Dealt:
    """A share of some files, which no other share meets: its number, of how many, and a hash of what was dealt out."""

    rank: int
    size: int
    deck: str


class _Group(NamedTuple):
    """One row group of one file."""

    path: Path
    number: int
    rows: int


def from_parquet(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    target: str,
    schema: Schema,
    features: Sequence[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    shard: Share | None = None,
) -> MappedRecords:
    """Write the numbers of Parquet files where they can be sampled.

    path        a file, several, or a pattern such as "train/*.parquet"; all with the same columns
    features    columns to learn from, in order; all but the target unless given
    directory   a disk with room for four bytes a number; the usual place for temporary files unless given
    progress    called with rows done and rows in all, for the eyes of whoever holds the records
    shard       `confide.distributed.Ranks`: every rank reads the row groups that are dealt to it, and no others
    """
    from pyarrow import ArrowException

    def read() -> tuple[MappedRecords, SampledFiles]:
        try:
            files = _files(path)
            columns, deck, dealt = _deck(files, target, features)
            mine = deck if shard is None else _share(deck, shard)
            whose = None if shard is None else Dealt(shard.rank, shard.size, dealt)
            seen = SampledFiles(files, key)
            return replace(_copied(mine, columns, target, schema, directory, progress, seen), dealt=whose), seen
        except (OSError, ArrowException) as error:
            if isinstance(error, OSError) and error.errno in _FULL:  # also when what is left is written on closing
                raise Refusal(f"directory={directory!r}: cannot hold the records ({error.strerror})") from None
            said = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise Refusal(f"path={_shown(path)}: not a readable Parquet file ({said})") from None

    key = secrets.token_bytes(32)
    if shard is None:
        records, seen = read()
        seen.check()
        return records
    key = shard.told(key)
    # A damaged row group, or a disk that is full, is one rank's alone; the others would wait for it at the next call.
    records, seen = shard.together(read)
    assert records.dealt is not None  # given above
    deck = records.dealt.deck.encode()
    said = shard.everybody(deck + seen.to_bytes(), "rows of files")
    if not all(one.startswith(deck) for one in said):
        raise RanksDisagree("path: these are other files than those of another rank; give all ranks the same ones")
    seen.joined([one[len(deck) :] for one in said]).check()
    return records


def _shown(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str:
    return repr(os.fspath(path)) if isinstance(path, str | os.PathLike) else repr([os.fspath(each) for each in path])


def _files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that are meant, sorted, each once: a file that is listed twice would count its records twice."""
    if isinstance(path, str | os.PathLike):
        name = os.fspath(path)
        found = [name] if Path(name).exists() or not glob.has_magic(name) else glob.glob(name)
    else:
        found = [os.fspath(each) for each in path]
    if not found:
        raise Refusal(f"path={_shown(path)}: no such file")
    real = [os.path.realpath(each) for each in found]
    if len(set(real)) < len(real):
        raise Refusal(f"path={_shown(path)}: names a file twice, and its records would count twice")
    return sorted(Path(each) for each in found)


def _deck(files: Sequence[Path], target: str, features: Sequence[str] | None) -> tuple[list[str], list[_Group], str]:
    """The columns, all row groups, and a hash of names, sizes and footers, by which others know the same files."""
    from pyarrow import parquet

    columns: list[str] | None = None
    groups, seen, code = [], dict[bytes, Path](), hashlib.sha256()
    for path in files:
        with parquet.ParquetFile(os.fspath(path), pre_buffer=False) as source:  # would keep what it has read
            own = _columns(source.schema_arrow, target, features, path)
            columns = own if columns is None else columns
            if own != columns:
                raise Refusal(
                    f"path={str(path)!r}: has columns {own}, but {str(files[0])!r} has {columns}; where all files have "
                    "those you need, name them in features"
                )
            facts = source.metadata
            groups += [_Group(path, each, facts.row_group(each).num_rows) for each in range(facts.num_row_groups)]
        footer = _footer(path)
        # Files without a row, as parallel writers leave them, are all alike.
        if facts.num_rows and footer in seen and filecmp.cmp(path, seen[footer], shallow=False):
            raise Refusal(f"path={str(path)!r}: is a copy of {str(seen[footer])!r}, and its records would count twice")
        seen[footer] = path
        code.update(path.name.encode() + b"\0" + footer)
    return columns or [], groups, code.hexdigest()


def _footer(path: Path) -> bytes:
    """A hash of a file's length and of its footer, which holds the place, length and range of every column."""
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 8))
        footer = min(length, 8 + int.from_bytes(file.read(4), "little"))
        file.seek(length - footer)
        return hashlib.sha256(length.to_bytes(8, "big") + file.read()).digest()


def _share(deck: Sequence[_Group], shard: Share) -> list[_Group]:
    """Row groups for one rank: dealt largest first to whoever holds least. Every one goes to exactly one rank."""
    load, mine = [0] * shard.size, []
    for group in sorted(deck, key=lambda group: (-group.rows, group.path, group.number)):
        rank = load.index(min(load))
        load[rank] += group.rows
        if rank == shard.rank:
            mine.append(group)
    return sorted(mine)


def _copied(
    deck: Sequence[_Group],
    columns: Sequence[str],
    target: str,
    schema: Schema,
    directory: str | os.PathLike[str] | None,
    progress: Callable[[int, int], None] | None,
    seen: SampledFiles,
) -> MappedRecords:
    kind = np.dtype(np.float32 if schema.class_count is None else np.int64)
    usable, done, rows = [np.zeros(0, dtype=np.bool_)], 0, sum(group.rows for group in deck)
    with _nameless(directory) as rows_file, _nameless(directory) as targets_file:
        for path, batch in _batches(deck, [*columns, target]):
            x, y, good = _cleaned(batch, columns, target, schema)
            if len(seen.files) > 1:
                seen.add(path, x[good], y[good])
            _write(rows_file, x, directory)
            _write(targets_file, y.astype(kind), directory)
            usable.append(good)
            done += len(good)
            if progress is not None:
                progress(done, rows)
        _write(rows_file, None, directory)
        _write(targets_file, None, directory)
        # A mapping outlives the handle it was made from.
        x = _mapped(rows_file, np.dtype(np.float32), (done, len(columns)))
        y = _mapped(targets_file, kind, (done,))
    return MappedRecords(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(np.concatenate(usable)))


def _batches(deck: Sequence[_Group], columns: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    from pyarrow import parquet

    for path, groups in itertools.groupby(deck, key=lambda group: group.path):
        with parquet.ParquetFile(os.fspath(path), pre_buffer=False) as source:
            numbers = [group.number for group in groups]
            for batch in source.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=numbers, columns=list(columns)):
                yield path, batch


def _write(file: IO[bytes], numbers: np.ndarray[Any, Any] | None, directory: str | os.PathLike[str] | None) -> None:
    """Numbers into a file; None: what the system has not taken yet."""
    try:
        file.flush() if numbers is None else file.write(numbers.data)
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
