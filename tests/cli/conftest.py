"""The command line in process: `run("fit", ...)` gives the exit code and what was written to stdout and stderr."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.cli.app import main
from tests.privacy.ledger.conftest import server  # noqa: F401 (a fixture)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as one strict JSON object."""
        assert self.code == 0, self.err
        value = json.loads(self.out, parse_constant=_refuse)
        assert isinstance(value, dict)
        assert self.out.count("\n") == 1
        return value


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def call(*arguments: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def is_refusal(result: Result, code: int = 2) -> bool:
    """One sentence on stderr, nothing on stdout, no traceback, no box around it."""
    line = result.err.removesuffix("\n")
    sentence = bool(line) and "\n" not in line and line.startswith("confide")
    return result.code == code and not result.out and sentence and "Traceback" not in line and "╭" not in line


@pytest.fixture
def run() -> Callable[..., Result]:
    return call


FACTS = """
records = 120
target = "ill"
classes = ["no", "yes"]
[columns.age]
bounds = [0, 100]
[columns.dose]
bounds = [0, 1]
[columns.ward]
categories = ["north", "south"]
"""


def patients(rows: int, seed: int) -> str:
    """A small table whose label follows from its columns, so that a model can learn it."""
    random = np.random.RandomState(seed)
    lines = ["age,dose,ward,ill"]
    for _ in range(rows):
        age, dose, ward = random.uniform(0, 100), random.uniform(), random.choice(["north", "south"])
        ill = age / 100 - dose + random.normal() * 0.1 > 0
        lines.append(f"{age:.2f},{dose:.3f},{ward},{'yes' if ill else 'no'}")
    return "\n".join(lines) + "\n"


def heights(rows: int, seed: int) -> str:
    random = np.random.RandomState(seed)
    lines = ["a,b,height"]
    for _ in range(rows):
        a, b = random.uniform(-1, 1, 2)
        lines.append(f"{a:.4f},{b:.4f},{150 + 30 * a - 10 * b + random.normal():.3f}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a training file, a test file and the public facts about them."""
    (tmp_path / "train.csv").write_text(patients(120, 0))
    (tmp_path / "test.csv").write_text(patients(60, 1))
    (tmp_path / "facts.toml").write_text(FACTS)
    return tmp_path
