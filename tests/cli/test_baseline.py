"""`confide baseline`: EP and ADF without privacy: on the user's word alone, stamped, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from confide.cli.app import main

FACTS = """
records = 300
target = "y"
target_bounds = [-3, 3]
[columns.a]
bounds = [-1, 1]
[columns.b]
bounds = [-1, 1]
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, count in (("train", 300), ("test", 100)):
        x = rng.uniform(-1, 1, (count, 2))
        y = np.clip(x[:, 0] - 2 * x[:, 1] + 0.1 * rng.normal(size=count), -3, 3)
        rows = "".join(f"{a:.4f},{b:.4f},{c:.4f}\n" for (a, b), c in zip(x, y, strict=True))
        (tmp_path / f"{name}.csv").write_text("a,b,y\n" + rows)
    (tmp_path / "facts.toml").write_text(FACTS)
    return tmp_path


def words(files: Path, *more: str) -> list[str]:
    return ["baseline", str(files / "train.csv"), "--facts", str(files / "facts.toml"), "--json", *more]


@pytest.mark.parametrize("method", ["ep", "adf"])
def test_a_line_is_learnt_measured_and_stamped(files: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    before = set(files.iterdir())
    asked = words(files, "--test", str(files / "test.csv"), "--method", method, "--not-private", "--passes", "20")
    assert main(asked) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["rmse"] < 0.15  # noise of 0.1 around a line that spreads by 1.3
    assert found["private"] is False
    assert found["stamp"].startswith("Not private")
    assert set(files.iterdir()) == before


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--test", "test.csv"], "--not-private: missing"),
        (["--not-private"], "--test: missing"),
        (["--not-private", "--test", "test.csv", "--method", "sep"], "--method=sep: must be one of ep, adf"),
        (["--not-private", "--test", "test.csv", "--passes", "0"], "--passes=0"),
    ],
)
def test_bad_input_gets_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], more: list[str], complaint: str
) -> None:
    assert main(words(files, *(str(files / word) if word == "test.csv" else word for word in more))) == 2
    assert complaint in capsys.readouterr().err
