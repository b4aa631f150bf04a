"""What a person with a card runs (make test-gpu), run here on the emulated device, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "tests/devices/on_device", "-p", "no:cacheprovider", "-m", which]
    environment = {**os.environ, "CONFIDE_DEVICE": "pretend"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_everything_runs_on_the_emulated_device() -> None:
    run("gpu and not slow")


@pytest.mark.slow
def test_the_long_ones_too() -> None:
    run("gpu and slow")
