"""What holds for all tests."""

import os
import shutil
import tempfile

import pytest

import confide as confide  # before the first product of the process: what it asks for is looked at once

# Before torch is loaded: no matrix extension of the processor. Some virtual machines name it (AMX) and do not grant it,
# and there a product in bfloat16 ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ABOUT_DRAWINGS = ("report", "evaluate", "docs")
IN_MEMORY = "/dev/shm"
# What takes long in one piece begins first, so that no worker waits for another at the end; then what searches all that
# a process has loaded, which is little at the beginning.
FIRST = (
    "tests/devices/test_pretended.py",
    "tests/mechanism/clipping/",
    "tests/sources/",
    "tests/auditing/",
    "tests/docs/",
)


def _has_room(place: str) -> bool:
    return os.access(place, os.W_OK | os.X_OK) and shutil.disk_usage(place).free > 4 << 30


# What tests write stays in memory where that has room: they wait for the disk, file by file, a fifth of their time.
if "TMPDIR" not in os.environ and _has_room(IN_MEMORY):
    os.environ["TMPDIR"] = tempfile.tempdir = IN_MEMORY


@pytest.fixture(autouse=True)
def _drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is not about pages their drawings are empty: the real ones take a third of the time of its fit."""
    if request.node.path.parent.name not in ABOUT_DRAWINGS:
        monkeypatch.setattr("confide.evaluate.drawing._drawn", lambda draw, height: '<svg width="1" height="1"></svg>')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        return next((place for place, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST))

    items.sort(key=turn)
