"""`confide tune`: the outlook first, one charge, the winner in a directory, and refusals in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.cli.tune import candidate
from confide.errors import CommandError
from confide.privacy.ledger import Ledger
from tests.cli.conftest import Result, is_refusal

Run = Callable[..., Result]
FACTS = "records = 300\nclasses = 2\nbounds = [-1, 1]\n"
TRIES = ("--try", "method=sgd steps=4 learning-rate=1", "--try", "method=sgd steps=4 learning-rate=1e-6")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (300, 2))
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(int))
    (tmp_path / "facts.toml").write_text(FACTS)
    return {"data": tmp_path / "data.npz", "facts": tmp_path / "facts.toml", "out": tmp_path / "out"}


def _command(files: dict[str, Path], *more: Any) -> list[Any]:
    budget = ("--epsilon", "3", "--delta", "1e-4")
    return ["tune", files["data"], "--facts", files["facts"], *TRIES, *budget, "--out", files["out"], *more]


def test_the_winner_is_saved_and_all_is_charged(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    ledger = tmp_path / "budget.db"
    result = run(*_command(files, "--ledger", ledger, "--name", "toy", "--json"))
    assert result.json["chosen"] in TRIES
    assert len(result.json["scores"]) == 2
    assert (files["out"] / "report.html").exists()
    book = Ledger(ledger)
    assert len({entry.plan for entry in book.entries("toy") if entry.event is not None}) == 1
    book.close()


def test_the_outlook_charges_nothing(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    result = run(*_command(files, "--ledger", tmp_path / "budget.db", "--outlook"))
    assert result.code == 0
    assert "2 settings within epsilon 3" in result.out
    assert "cannot be told apart" in result.out
    assert not (tmp_path / "budget.db").exists()
    assert not files["out"].exists()


def test_one_candidate_and_wrong_words_are_refused(run: Run, files: dict[str, Path]) -> None:
    command = [*_command(files)[:4], "--try", "method=sgd", "--epsilon", "3", "--delta", "1e-4", "--out", files["out"]]
    assert is_refusal(run(*command))
    with pytest.raises(CommandError, match="form NAME=VALUE"):
        candidate("method")
    with pytest.raises(CommandError, match="clip=x must be a number"):
        candidate("clip=x")
    with pytest.raises(CommandError, match="has no setting colour"):
        candidate("method=sgd colour=red")
    assert candidate("hidden=8,4 clip=2") == {"hidden": (8, 4), "clip": 2.0}
