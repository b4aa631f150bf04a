"""`confide sample`: draws of linear models from a file to predictions, within the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.cli.app import main

FACTS = """
records = 300
target = "kind"
{target}
[columns.a]
bounds = [-1, 1]
[columns.b]
bounds = [-1, 1]
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    score = 2 * x[:, 0] - x[:, 1]
    for name, labels in {
        "two": np.where(score > 0, "yes", "no"),
        "three": np.where(score > 0.7, "high", np.where(score < -0.7, "low", "middle")),
        "number": np.clip(score / 3, -1, 1).round(4).astype(str),
    }.items():
        rows = [f"{a:.4f},{b:.4f},{label}" for (a, b), label in zip(x, labels, strict=True)]
        for part, some in (("", rows[:300]), ("_test", rows[300:])):
            (tmp_path / f"{name}{part}.csv").write_text("\n".join(["a,b,kind", *some]) + "\n")
        known = "target_bounds = [-1, 1]" if name == "number" else f"classes = {json.dumps(sorted(set(labels)))}"
        (tmp_path / f"{name}.toml").write_text(FACTS.format(target=known))
    return tmp_path


def words(files: Path, name: str, *more: str) -> list[str]:
    train, test, facts = (str(files / f"{name}{ending}") for ending in (".csv", "_test.csv", ".toml"))
    return [
        "sample",
        train,
        "--facts",
        facts,
        "--test",
        test,
        "--delta",
        "1e-4",
        "--json",
        "--out",
        str(files / "out"),
        *more,
    ]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("two", ["--draws", "2", "--width", "4"]),
        ("three", ["--width", "5"]),
        ("number", ["--width", "2"]),
        ("two", ["--hybrid", "--width", "4"]),
    ],
)
def test_from_a_file_to_predictions(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, more: list[str]
) -> None:
    assert main(words(files, name, "--epsilon", "4", *more)) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert 3.5 < found["privacy"]["epsilon"]["pld"] <= 4
    if name != "number":
        assert found["metrics"]["accuracy"] > 0.6
    predicted = files / "predicted.csv"
    assert main(["predict", str(files / "out"), str(files / f"{name}.csv"), "--out", str(predicted)]) == 0
    assert len(predicted.read_text().splitlines()) == 301


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--draws", "0"], "--draws=0"),
        (["--width", "-1"], "--width=-1"),
        (["--hybrid", "--draws", "2"], "--draws=2: a hybrid starts from one draw"),
    ],
)
def test_bad_input_gets_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], more: list[str], complaint: str
) -> None:
    assert main(words(files, "two", "--epsilon", "1", *more)) == 2
    assert complaint in capsys.readouterr().err
    assert not (files / "out").exists()


def test_the_ledger_is_charged_for_every_draw(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = files / "budget.ledger"
    more = ["--epsilon", "1", "--draws", "2", "--ledger", str(ledger), "--name", "people", "--width", "3"]
    assert main(words(files, "two", *more)) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["ledger", "show", str(ledger), "--json"]) == 0
    shown = capsys.readouterr().out
    assert "one posterior sample" in shown
