"""Readers of data sets in the form in which they are published: CIFAR-10, SVHN and YearPredictionMSD.

Nothing here executes what it reads. Of CIFAR-10 the binary version is read, which holds bytes and no pickle; an archive
is read as a stream, never unpacked to disk, and every member must have the length that its records have.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from confide.data.table import Array, Table, attempt, quoted
from confide.errors import DataError

Parts: TypeAlias = tuple[Table, Table]
PublishedReader: TypeAlias = Callable[[Path], Parts]
SIDE, CHANNELS, CLASSES = 32, 3, 10  # of pictures in CIFAR-10 and SVHN, as they were published
CIFAR_RECORD = 1 + CHANNELS * SIDE * SIDE  # bytes: the class, then the red, the green and the blue plane
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
LARGEST_CIFAR_PART = 10_000 * CIFAR_RECORD
"""Bytes of one published part; a longer member of an archive is not one of them."""
YEAR_FEATURES, YEAR_TRAIN = 90, 463_715
"""The published parting: no singer is in both, if the first so many records are the training part."""
YEAR_TEXT = "YearPredictionMSD.txt"


def cifar10(path: Path) -> Parts:
    """`cifar-10-binary.tar.gz`, the binary version."""
    with _opened(lambda: tarfile.open(path, "r|gz"), path) as archive:
        parts = attempt(lambda: _cifar_members(archive), _damaged(path), tarfile.TarError, OSError, EOFError)
    missing = next((name for name in (*CIFAR_TRAIN, CIFAR_TEST) if name not in parts), None)
    if missing is not None:
        raise DataError(f"data={quoted(path)}: holds no {missing}; it must be the binary version of CIFAR-10")
    train = [_cifar_records(parts[name], path, name) for name in CIFAR_TRAIN]
    images, labels = (np.concatenate(piece) for piece in zip(*train, strict=True))
    return _images(images, labels), _images(*_cifar_records(parts[CIFAR_TEST], path, CIFAR_TEST))


def _cifar_members(archive: Any) -> dict[str, bytes]:
    found = {}
    for member in archive:
        name = Path(member.name).name
        if member.isfile() and name in (*CIFAR_TRAIN, CIFAR_TEST) and member.size <= LARGEST_CIFAR_PART:
            found[name] = archive.extractfile(member).read()
    return found


def _cifar_records(content: bytes, path: Path, name: str) -> tuple[Array, Array]:
    if not content or len(content) % CIFAR_RECORD:
        raise DataError(f"data={quoted(path)}: {name} is not made of records of {CIFAR_RECORD} bytes; get it anew")
    rows = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
    labels = rows[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise DataError(f"data={quoted(path)}: {name} has a class above 9; it must be CIFAR-10, not CIFAR-100")
    return rows[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels


def svhn(path: Path) -> Parts:
    """`train_32x32.mat` with `test_32x32.mat` beside it: cropped digits; the published class 10 is the digit 0."""
    return _svhn_part(path), _svhn_part(path.with_name("test_32x32.mat"))


def _svhn_part(path: Path) -> Table:
    if not path.is_file():
        raise DataError(f"data={quoted(path)}: missing; SVHN has its test part in a file of its own")
    from scipy.io import loadmat

    faults = (OSError, ValueError, TypeError, NotImplementedError, KeyError, EOFError, MemoryError)
    found = attempt(lambda: loadmat(path, variable_names=("X", "y")), _damaged(path), *faults)
    images, labels = found.get("X"), found.get("y")
    shaped = (
        images is not None and labels is not None and images.ndim == 4 and images.shape[:3] == (SIDE, SIDE, CHANNELS)
    )
    if not shaped or images.dtype != np.uint8 or labels.size != images.shape[3]:
        raise DataError(f"data={quoted(path)}: must hold X of (32, 32, 3, records) and y, as SVHN is published")
    digits = labels.reshape(-1).astype(np.int64)
    if digits.min() < 1 or digits.max() > CLASSES:
        raise DataError(f"data={quoted(path)}: has classes outside of 1 to 10, which SVHN does not have")
    return _images(np.moveaxis(images, 3, 0), digits % CLASSES)


def _images(images: Array, labels: Array) -> Table:
    return Table.from_arrays(np.ascontiguousarray(images), labels, target="class")


def year(path: Path) -> Parts:
    """`YearPredictionMSD.txt`, or the zip that it is published in: the year, then 90 numbers, no header."""
    import pyarrow as arrow
    from pyarrow import csv

    names = ["year", *year_features()]

    def read() -> Any:
        options = csv.ReadOptions(column_names=names)
        types = csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.float64()))
        if path.suffix != ".zip":
            return csv.read_csv(path, read_options=options, convert_options=types)
        with zipfile.ZipFile(path) as archive, archive.open(YEAR_TEXT) as text:
            return csv.read_csv(text, read_options=options, convert_options=types)

    table = attempt(read, _damaged(path), OSError, KeyError, zipfile.BadZipFile, arrow.ArrowException)
    columns = {name: table.column(name).to_numpy() for name in names}
    years = columns.pop("year")
    whole = Table(columns, target="year", labels=years)
    if whole.rows <= 1:
        raise DataError(f"data={quoted(path)}: has {whole.rows} records; it must be the published file")
    train = YEAR_TRAIN if whole.rows > YEAR_TRAIN else max(1, whole.rows * 9 // 10)
    return whole.take(np.arange(train)), whole.take(np.arange(train, whole.rows))


def year_features() -> list[str]:
    """Twelve averages of timbre and their 78 covariances, in the order of the file."""
    return [f"average{place}" for place in range(1, 13)] + [f"covariance{place}" for place in range(1, 79)]


def _opened(action: Callable[[], Any], path: Path) -> Any:
    return attempt(action, _damaged(path), tarfile.TarError, OSError, EOFError)


def _damaged(path: Path) -> str:
    return f"data={quoted(path)}: cannot be read; get the published file anew"
