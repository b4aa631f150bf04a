"""A folder of pictures as a table: each is brought to the declared size by itself, and its class is where it lies.

    pictures/cat/1.png, pictures/dog/7.jpg     the class is the name of the sub-folder
    pictures/1.png, ..., pictures/labels.csv   or stands in a file with the columns file and label
    pictures/train/..., pictures/test/...      both parts in one folder

The size is public: `shape = [28, 28]` for grey pictures or `[32, 32, 3]` for colours, among the facts. Whatever cannot
be read as a picture counts for nothing when private records are learnt from (its label is left out), and is refused
where records are to be predicted: whether a run exists must not tell of one picture.
"""

from __future__ import annotations

import csv
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from confide.data.decoding import largest_table
from confide.data.pictures import is_picture
from confide.data.table import Array, Table, attempt, quoted
from confide.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
LABELS = "labels.csv"
PARTS = ("train", "test")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""How a picture of so many channels is decoded."""


def read_folder(path: Path, shape: tuple[int, ...] | None, part: str, *, target: str | None, private: bool) -> Table:
    """The pictures of a part, as whole numbers from 0 to 255, and their labels if they have any.

    private   whether they are learnt from: what cannot be read is then kept, without a label
    """
    where = f"source={quoted(path)}"
    height, width, channels = _declared(shape, where)
    files, labels = _listed(part_of(path, part), where)
    if len(files) * height * width * channels > largest_table():
        raise DataError(f"{where}: {len(files)} pictures of the declared size are more than a table may hold")
    block = np.zeros((len(files), height, width, channels), dtype=np.uint8)
    for place, file in enumerate(files):
        found = _decoded(file, height, width, MODES[channels])
        if found is not None:
            block[place] = found.reshape(height, width, channels)
        elif not private:
            raise DataError(f"{where}: picture {place + 1} of {len(files)} cannot be read; remove it")
        elif labels is not None:
            labels[place] = None
    block = block[..., 0] if channels == 1 and shape is not None and len(shape) == 2 else block
    return Table(block=block, target=target or "y", labels=labels)


def part_of(path: Path, part: str) -> Path:
    """The folder of a part, where a folder has both."""
    return path / part if all((path / name).is_dir() for name in PARTS) else path


def has_test(path: Path) -> bool:
    return part_of(path, "test") != path


def _declared(shape: tuple[int, ...] | None, where: str) -> tuple[int, int, int]:
    if shape is None or not is_picture(shape):
        raise DataError(
            f"{where}: is a directory; for pictures declare their size in the facts, shape = [28, 28] or [32, 32, 3]"
        )
    channels = shape[2] if len(shape) == 3 else 1
    if channels not in MODES:
        raise DataError(f"shape={shape}: pictures of a folder have 1, 3 or 4 channels, which stand last")
    return shape[0], shape[1], channels


def _listed(path: Path, where: str) -> tuple[list[Path], Any]:
    """The files in the order of their names, and their labels; None where there are none."""

    def found() -> list[Path]:
        return sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())

    files = attempt(found, f"{where}: cannot be listed", OSError)
    if not files:
        raise DataError(f"{where}: holds no pictures; they end in {', '.join(SUFFIXES)}")
    listed = (path / LABELS).is_file()
    if listed:
        by_name = attempt(lambda: _labels_in(path / LABELS), f"{where}: {LABELS} cannot be read as a table", *_FAULTS)
        names = [by_name.get(file.relative_to(path).as_posix()) for file in files]
    else:
        names = [file.relative_to(path).parts[0] if file.parent != path else None for file in files]
    labels = np.empty(len(files), dtype=object)
    labels[:] = names
    # Whether there are labels is told by the list or the sub-folders, never by what one picture has.
    labelled = listed or any(place.is_dir() for place in path.iterdir())
    return files, labels if labelled else None


_FAULTS = (OSError, csv.Error, ValueError)


def _labels_in(path: Path) -> dict[str, str]:
    """Each line by itself: one that cannot be read has no label, and a quote that is left open takes no other along."""
    found = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header = next(csv.reader([file.readline()]), [])
        name, label = header.index("file"), header.index("label")
        for line in file:
            with suppress(csv.Error, IndexError, StopIteration):
                cells = next(csv.reader([line]))
                found[cells[name]] = cells[label]
    return found


def _decoded(file: Path, height: int, width: int, mode: str) -> Array | None:
    """The picture in the declared size; None where it cannot be read, or is far too large to be one."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a picture of a hundred million pixels warns before it is unpacked
            with Image.open(file) as opened:
                picture = opened.convert(mode)
        if picture.size != (width, height):
            shrunk = picture.width > width or picture.height > height
            picture = picture.resize((width, height), Image.Resampling.BOX if shrunk else Image.Resampling.BILINEAR)
        return np.asarray(picture, dtype=np.uint8)
    except Exception:  # decoders raise whatever they like, and what they say quotes the file
        return None
