"""A machine that stops while a run is kept and saved: what was not flushed is lost, torn or in another order.

A fit with a ledger, checkpoints and a folder of its own works in a process whose writes, flushes and names are in a log
(watched_writes.c). A crash is a place in that log. What was flushed is there; of later writes any part, in any order;
and a new name only if its directory was flushed, or by luck. From what is left the run must go on, or start anew, with
no more released than is booked; and a folder that has its final name must be whole.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import confide
from confide.errors import LedgerError, Refusal
from confide.privacy.ledger import Ledger
from confide.running.artefacts import load_run
from tests.privacy.ledger.test_lost_writes import COMPILER, OnDisk, Step

pytestmark = [
    pytest.mark.skipif(COMPILER is None or not sys.platform.startswith("linux"), reason="watches with C"),
    pytest.mark.slow,  # the quick form is that of the ledger
]
STEPS = 6
WORK = """
import os, sys
from pathlib import Path
import torch
import confide
from confide.privacy.ledger import Ledger
from confide.running.artefacts import save_run
from confide.running.journal import Checkpoints
place, said = Path(sys.argv[1]), open(sys.argv[2], "ab", buffering=0)
x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) %% 2
plan = confide.plan(noise_multiplier=1.0, delta=1e-3, records=40, batch=10, steps=%d)
with Ledger(place / "d.ledger") as ledger:
    data = confide.PrivateData(x, y, schema=confide.Schema(records=40, classes=2), ledger=ledger, name="d")
    run = confide.fit(confide.methods.SGD(), confide.networks.softmax(3, 2), data, plan,
                      checkpoint=Checkpoints(place / "kept", every=2), progress=lambda done, total: said.write(b"a"))
    save_run(run, place / "deep" / "run")
    said.write(b"s")
"""


@dataclass
class Disk:
    """Files by number, and the names of every directory: as flushed, and what came after."""

    files: dict[int, OnDisk] = field(default_factory=dict)
    now: dict[str, int | None] = field(default_factory=dict)  # path -> file, None for a directory
    kept: dict[str, int | None] = field(default_factory=dict)
    late: list[tuple[str, str | None, int | None]] = field(default_factory=list)  # path gone, path new, what it is

    def file(self, path: str) -> OnDisk:
        if path not in self.now and path.endswith(".safetensors"):
            # safetensors renames its draft by a call of the kernel that no library sees.
            draft = next((p for p in self.now if p.startswith(os.path.dirname(path) + "/.tmp")), None)
            if draft is not None:
                self.name(draft, path, self.now[draft])
        if path not in self.now:
            self.files[len(self.files)] = OnDisk()
            self.name(None, path, len(self.files) - 1)
        number = self.now[path]
        assert number is not None
        return self.files[number]

    def name(self, gone: str | None, new: str | None, what: int | None) -> None:
        _renamed(self.now, gone, new, what)
        self.late.append((gone or "", new, what))

    def flush(self, path: str, root: str) -> None:
        if path == root or (path in self.now and self.now[path] is None):
            mine = [one for one in self.late if os.path.dirname(one[1] or one[0]) == path]
            for one in mine:
                _renamed(self.kept, one[0] or None, one[1], one[2])
                self.late.remove(one)
        else:
            self.file(path).flush()

    def left(self, root: str, chance: random.Random) -> Iterator[tuple[str, bytes | None]]:
        """What is found after a crash: names that were flushed, some of the later ones, and their contents."""
        names = dict(self.kept)
        for one in self.late:
            if chance.random() < 0.5:
                _renamed(names, one[0] or None, one[1], one[2])
        for path in sorted(names):
            parents = [p for p in _parents(path) if len(p) > len(root)]
            if all(parent in names for parent in parents):
                number = names[path]
                yield path, None if number is None else self.files[number].left(chance)


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents]


def _renamed(names: dict[str, int | None], gone: str | None, new: str | None, what: int | None) -> None:
    """One change of names; with a directory goes all that is in it."""
    inside = {}
    if gone:
        inside = {path: names.pop(path) for path in [*names] if path == gone or path.startswith(gone + "/")}
    if new:
        names[new] = what
        for path, number in inside.items():
            if path != gone:
                names[new + path[len(gone or "") :]] = number


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Step]]:
    folder = tmp_path_factory.mktemp("watched")
    library, log, place = folder / "watched.so", folder / "log", folder / "place"
    place.mkdir()
    source = Path(__file__).parents[1] / "privacy" / "ledger" / "watched_writes.c"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    seen = {"LD_PRELOAD": str(library), "WATCHED_LOG": str(log), "WATCHED_NAME": str(folder / "place")}
    command = [sys.executable, "-c", WORK % STEPS, str(place), str(folder / "place.said")]
    subprocess.run(command, check=True, env=os.environ | seen)
    content, at, steps = log.read_bytes(), 0, []
    while at < len(content):
        kind = chr(content[at])
        length, offset, size = struct.unpack_from("<qqq", content, at + 1)
        path = content[at + 25 : at + 25 + length].decode().removesuffix(" (deleted)")
        at += 25 + length
        steps.append(Step(kind, path, offset, content[at : at + max(0, size)]))
        at += max(0, size)
    return str(place), steps


def replayed(root: str, steps: list[Step], deaf: str = "") -> tuple[Disk, str]:
    """The disk after these steps, and what was said by then. Flushes of paths that end in `deaf` do nothing."""
    disk, said = Disk(), ""
    for step in steps:
        if step.path.endswith(".said"):
            said += step.content.decode() if step.kind == "w" else ""
        elif step.kind == "w":
            disk.file(step.path).write(step.offset, step.content)
        elif step.kind == "f" and not (deaf and step.path.endswith(deaf)):
            disk.flush(step.path, root)
        elif step.kind == "t":
            disk.file(step.path).cut(step.offset)
        elif step.kind == "u":
            disk.name(step.path, None, None)
        elif step.kind == "d":
            disk.name(None, step.path, None)
        elif step.kind in "rl":
            target = step.content.decode()
            disk.file(step.path) if step.path not in disk.now else None
            disk.name(step.path if step.kind == "r" else None, target, disk.now[step.path])
    return disk, said


def laid_out(disk: Disk, root: str, here: Path, chance: random.Random) -> None:
    for path, content in disk.left(root, chance):
        target = here / os.path.relpath(path, root)
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
        elif not path.endswith("-shm"):  # memory that is shared is gone
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def test_the_log_is_whole(watched: tuple[str, list[Step]]) -> None:
    """After all of it the disk in the log is the disk: nothing was written that nobody saw."""
    root, steps = watched
    disk, said = replayed(root, steps)
    assert said == "a" * STEPS + "s"
    for path, number in disk.now.items():
        if number is not None and not path.endswith(("-shm", "lock", "-wal")):
            disk.files[number].flush()
            assert Path(path).read_bytes() == bytes(disk.files[number].flushed), path
    real = {str(path) for path in Path(root).rglob("*") if path.is_file() and path.stat().st_size}
    assert real <= set(disk.now)


def broken(watched: tuple[str, list[Step]], folder: Path, crashes: range, deaf: str = "") -> list[str]:
    """What is wrong after each of these crashes."""
    root, steps = watched
    starts = [place for place, step in enumerate(steps) if step.path.endswith(".said")]
    wrong = []
    for crash in crashes:
        chance = random.Random(crash)
        # Half of the crashes are behind the end of the fit, where its folder is written.
        begin = starts[-2] if crash % 2 else starts[0]
        disk, said = replayed(root, steps[: chance.randrange(begin, len(steps) + 1)], deaf)
        here = folder / f"crash {crash}"
        here.mkdir()
        laid_out(disk, root, here, chance)
        wrong += [f"crash {crash}: {found}" for found in faults(here, said)]
        shutil.rmtree(here)
    return wrong


def faults(here: Path, said: str) -> Iterator[str]:
    target = here / "deep" / "run"
    if target.exists():
        try:
            load_run(target)
        except Refusal as error:
            yield f"a folder with its final name is not whole: {error}"
    elif "s" in said:
        yield "a folder that was said to be written is gone"
    try:
        yield from _overspent(here, said.count("a"))
    except LedgerError as error:
        yield f"the ledger is gone: {error}"


def _overspent(here: Path, answered: int) -> Iterator[str]:
    with Ledger(here / "d.ledger") as ledger:
        ledger.verify()
        if sum(event.count for event in ledger.events("d")) < answered:
            yield "less is booked than was released"
        more = gone_on(here, ledger)
        if more is not None and sum(event.count for event in ledger.events("d")) < answered + more:
            yield f"less is booked than was released by both: {answered} and {more}"


def gone_on(here: Path, ledger: Ledger) -> int | None:
    """The run taken up again from what is left: how many answers it asked for; None where that is refused."""
    import torch

    from confide.running.journal import Checkpoints

    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    plan = confide.plan(noise_multiplier=1.0, delta=1e-3, records=40, batch=10, steps=STEPS)
    data = confide.PrivateData(x, y, schema=confide.Schema(records=40, classes=2), ledger=ledger, name="d")
    answers = 0

    def count(done: int, total: int) -> None:
        nonlocal answers
        answers += 1

    try:
        confide.fit(
            confide.methods.SGD(),
            confide.networks.softmax(3, 2),
            data,
            plan,
            checkpoint=Checkpoints(here / "kept", every=2),
            progress=count,
        )
    except Refusal:
        return None
    return answers


def test_a_run_outlives_crashes(watched: tuple[str, list[Step]], tmp_path: Path) -> None:
    assert broken(watched, tmp_path, range(100)) == []


@pytest.mark.parametrize("deaf", ["-wal", ".partial", "posterior.safetensors", "run.json"])
def test_a_disk_that_does_not_flush_is_found(watched: tuple[str, list[Step]], tmp_path: Path, deaf: str) -> None:
    """Planted: flushes of the ledger's log, of drafts or of a folder's files do nothing."""
    assert broken(watched, tmp_path, range(24), deaf)
