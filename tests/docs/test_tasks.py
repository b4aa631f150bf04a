"""The thirty tasks of docs/tasks.md run as they are written, one after the other, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
QUICK = (4, 6, 27)
"""Tasks of a second or so; the slow form runs all of them."""


def tasks() -> tuple[str, dict[int, str]]:
    """The block that makes the data, and the commands of every task."""
    first, *rest = re.split(r"^### (?=\d+\.)", PAGE.read_text(encoding="utf-8"), flags=re.M)
    block = re.compile(r"^```sh\n(.*?)^```", flags=re.S | re.M)
    found = {int(text.split(".")[0]): "".join(block.findall(text)) for text in rest}
    return "".join(block.findall(first)), found


def run(commands: str, folder: Path) -> str:
    """As a shell would, with `confide` and `python` of this environment."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name, what in (("confide", "-m confide"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["sh", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_there_are_thirty_and_each_has_its_command() -> None:
    made, found = tasks()
    assert made
    assert list(found) == list(range(1, 31))
    assert all("confide " in commands for commands in found.values())


def test_tasks_of_a_second_run(tmp_path: Path) -> None:
    made, found = tasks()
    run(made, tmp_path)
    run("".join(found[number] for number in QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(
    3600
)  # thirty processes, most of which load torch: five minutes on a machine that does nothing else
def test_all_tasks_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, found = tasks()
    run(made, tmp_path)
    for number, commands in found.items():
        started = time.perf_counter()
        run(commands, tmp_path)
        with capsys.disabled():
            sys.stdout.write(f"task {number}: {time.perf_counter() - started:.1f} s\n")
            sys.stdout.flush()
    for name in (
        "plan.html",
        "learnt.toml",
        "one_predicted.csv",
        "budget.html",
        "deployed-onnx/model.onnx",
        "compared/report.html",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert "ada" in run("confide ledger show budget.db", tmp_path)


def test_a_task_that_fails_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such file"):
        run("confide facts nowhere.csv --target x --out facts.toml\n", tmp_path)
