"""`confide mixture`: means of a mixture from a file, in the columns' own units, within the budget."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from confide.cli.app import main

CENTRES = np.array([[20.0, 1.0], [60.0, 4.0]])
FACTS = "records = 2000\n[columns.age]\nbounds = [0, 80]\n[columns.size]\nbounds = [0, 5]\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    which = rng.integers(2, size=2000)
    x = np.clip(CENTRES[which] + rng.normal(size=(2000, 2)) * [6.0, 0.4], 0, [80, 5])
    (tmp_path / "train.csv").write_text("age,size\n" + "".join(f"{a:.3f},{b:.3f}\n" for a, b in x))
    (tmp_path / "facts.toml").write_text(FACTS)
    return tmp_path


def words(files: Path, *more: str) -> list[str]:
    named = [str(files / "train.csv"), "--facts", str(files / "facts.toml"), "--out", str(files / "out")]
    return ["mixture", *named, "--components", "2", "--epsilon", "3", "--steps", "40", "--json", *more]


@pytest.mark.parametrize("method", ["em", "sep"])
def test_means_are_found_in_their_own_units(files: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    assert main(words(files, "--method", method, "--seed", "3")) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    means = np.array(sorted((mean["age"], mean["size"]) for mean in found["means"]))
    assert np.abs(means - CENTRES).max(0)[0] < 6
    assert np.abs(means - CENTRES).max(0)[1] < 0.5
    assert found["privacy"]["epsilon"]["pld"] <= 3
    assert (files / "out" / "run.json").is_file()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--method", "ep"], "--method=ep: must be one of em, sep"),
        (["--components", "0"], "--components=0"),
        (["--scale", "-1"], "--scale=-1"),
    ],
)
def test_bad_input_gets_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], more: list[str], complaint: str
) -> None:
    assert main(words(files, *more)) == 2
    assert complaint in capsys.readouterr().err
    assert not (files / "out").exists()


def test_a_record_that_is_none_counts_for_nothing_and_is_not_told(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (files / "train.csv").read_text().splitlines()
    rows[5:8] = ["nobody,1.0", ",", "1e400,2.0"]
    (files / "train.csv").write_text("\n".join(rows) + "\n")
    assert main(words(files)) == 0
    told = capsys.readouterr()
    assert "nobody" not in told.out + told.err


def test_columns_need_bounds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "facts.toml").write_text(
        'records = 2000\n[columns.age]\nbounds = [0, 80]\n[columns.size]\nkind = "categorical"\ncategories = ["a"]\n'
    )
    assert main(words(files)) == 2
    assert "columns of numbers" in capsys.readouterr().err
