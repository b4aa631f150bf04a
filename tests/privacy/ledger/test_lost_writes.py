"""A machine that stops: writes that were not flushed are lost, torn or in another order; what was acknowledged stays.

A ledger works in a process whose writes and flushes are in a log (watched_writes.c). A crash is a place in that log:
of every file what was flushed is there, and of what was written after it any part, in any order. The file that is left
must open, hold every charge that was acknowledged before the crash, and verify.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from confide.errors import LedgerError
from confide.privacy.ledger import Ledger

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None or not sys.platform.startswith("linux"), reason="watches with C")
SECTOR = 512  # what a disk writes whole
CHARGES, CRASHES = 12, 60
WORK = """
import sys
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger
place, said = sys.argv[1:]
with Ledger(place) as ledger:
    with open(said, "ab", buffering=0) as told:
        for number in range(int(%d)):
            ledger.charge(GaussianEvent(50.0), f"charge {number}")
            told.write(b"x")
"""


@dataclass
class OnDisk:
    """A file: what is flushed, and what came after, one write at a time."""

    flushed: bytearray = field(default_factory=bytearray)
    later: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, content: bytes) -> None:
        self.later.append((offset, content))

    def flush(self) -> None:
        for offset, content in self.later:
            _put(self.flushed, offset, content)
        self.later.clear()

    def cut(self, size: int) -> None:
        self.flush()  # a file system keeps the length and the writes before it in order
        del self.flushed[size:]

    def left(self, chance: random.Random) -> bytes:
        """After a crash: some of the late writes, in any order, each perhaps torn at a sector."""
        found, late = bytearray(self.flushed), [one for one in self.later if chance.random() < 0.5]
        chance.shuffle(late)
        for offset, content in late:
            torn = chance.random() < 0.3 and len(content) > SECTOR
            end = SECTOR * chance.randrange(len(content) // SECTOR) if torn else len(content)
            _put(found, offset, content[:end])
        return bytes(found)


def _put(content: bytearray, offset: int, new: bytes) -> None:
    if len(content) < offset + len(new):
        content.extend(bytes(offset + len(new) - len(content)))
    content[offset : offset + len(new)] = new


@dataclass(frozen=True)
class Step:
    kind: str
    path: str
    offset: int
    content: bytes


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """What the disk was told while a ledger took charges; "said" is written after each that was acknowledged."""
    folder = tmp_path_factory.mktemp("watched")
    library, log = folder / "watched.so", folder / "log"
    source = Path(__file__).with_name("watched_writes.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    watched = {"LD_PRELOAD": str(library), "WATCHED_LOG": str(log), "WATCHED_NAME": str(folder / "place")}
    with Ledger(folder / "place.ledger"):  # made under another name, flushed, then linked: nobody sees half of one
        pass
    made = (folder / "place.ledger").read_bytes()
    command = [sys.executable, "-c", WORK % CHARGES, folder / "place.ledger", folder / "place.said"]
    subprocess.run(list(map(str, command)), check=True, env=os.environ | watched)
    content, place = log.read_bytes(), 0
    found = [Step("w", "place.ledger", 0, made), Step("f", "place.ledger", 0, b"")]
    while place < len(content):
        kind = chr(content[place])
        length, offset, size = struct.unpack_from("<qqq", content, place + 1)
        place += 25
        path = content[place : place + length].decode()
        place += length
        data = content[place : place + max(0, size)]
        place += max(0, size)
        found.append(Step(kind, Path(path).name.removesuffix(" (deleted)"), offset, data))
    return found


def after(steps: list[Step], stop: int, flushes: Callable[[Step], bool]) -> tuple[dict[str, OnDisk], int]:
    """The files after so many steps, and how many charges were acknowledged."""
    files: dict[str, OnDisk] = {}
    acknowledged = 0
    for step in steps[:stop]:
        file = files.setdefault(step.path, OnDisk())
        if step.path.endswith(".said"):
            acknowledged += step.kind == "w"
        elif step.kind == "w":
            file.write(step.offset, step.content)
        elif step.kind == "f" and flushes(step):
            file.flush()
        elif step.kind == "t":
            file.cut(step.offset)
        elif step.kind == "u":
            del files[step.path]
    return files, acknowledged


def lost(steps: list[Step], folder: Path, flushes: Callable[[Step], bool] = lambda step: True) -> int:
    """In how many crashes a charge that was acknowledged is gone, or the ledger is."""
    missing = 0
    starts = [place for place, step in enumerate(steps) if step.path.endswith(".said")]
    for crash in range(CRASHES):
        chance = random.Random(crash)
        files, acknowledged = after(steps, chance.randrange(starts[0], len(steps) + 1), flushes)
        here = folder / f"crash {crash}"
        here.mkdir()
        for name, file in files.items():
            if not name.endswith((".said", "-shm")):  # memory that is shared is gone
                (here / name).write_bytes(file.left(chance))
        try:
            with Ledger(here / "place.ledger") as ledger:
                ledger.verify()
                missing += len(ledger.entries()) < acknowledged
        except LedgerError:
            missing += 1
    return missing


def test_what_was_acknowledged_outlives_a_crash(steps: list[Step], tmp_path: Path) -> None:
    assert sum(step.kind == "f" for step in steps) >= CHARGES
    assert lost(steps, tmp_path) == 0


def test_a_disk_that_does_not_flush_is_found(steps: list[Step], tmp_path: Path) -> None:
    """Planted: flushes of the write-ahead log do nothing."""
    assert lost(steps, tmp_path, lambda step: not step.path.endswith("-wal")) > CRASHES // 4
