"""`confide fit --module FILE:NAME`: a network of the user's own from the command line to a prediction."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Result, call, is_refusal

NETWORKS = """
import torch
from torch import nn


class Crossed(nn.Module):
    '''Two columns that matter by their product; counts its features by itself.'''

    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def wide(width):
    return nn.Linear(2, width)


def words():
    return "no network"


def broken():
    raise RuntimeError("not today")


number = 3
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    with (tmp_path / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "y"])
        for a, b in generator.uniform(-1, 1, (200, 2)).round(3):
            rows.writerow([a, b, "yes" if a * b > 0 else "no"])
    (tmp_path / "net.py").write_text(NETWORKS)
    return tmp_path


def fitted(place: Path, *more: Any) -> Result:
    common = ("--target", "y", "--assume-public", "--epsilon", 8, "--delta", 1e-3, "--steps", 10, "--batch", 50)
    return call("fit", place / "train.csv", *common, "--out", place / "run", "--method", "sgld", *more)


def test_from_fit_to_a_prediction(place: Path) -> None:
    named = f"{place / 'net.py'}:Crossed"
    found = fitted(place, "--module", named)
    assert found.code == 0, found.err
    assert json.loads((place / "run" / "run.json").read_text())["config"]["module"] == named
    asked = ("predict", place / "run", place / "train.csv", "--out")
    assert call(*asked, place / "one.csv", "--module", named).code == 0
    assert call(*asked, place / "two.csv", "--module", named).code == 0
    rows = list(csv.DictReader((place / "one.csv").read_text().splitlines()))
    assert len(rows) == 200
    assert {row["predicted"] for row in rows} <= {"yes", "no"}
    assert (place / "one.csv").read_bytes() == (place / "two.csv").read_bytes(), "draws, not first weights, predict"
    without = call(*asked, place / "three.csv")
    assert is_refusal(without)
    assert "--module" in without.err


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("net.py:wide", "without arguments"),
        ("net.py:words", "must give a torch module"),
        ("net.py:broken", "not today"),
        ("net.py:number", "is int"),
        ("net.py:absent", "defines no absent"),
        ("absent.py:Net", "there is no file"),
        ("net.py", "must be FILE.py:NAME"),
    ],
)
def test_what_is_no_network_is_said_in_one_sentence(place: Path, named: str, said: str) -> None:
    found = fitted(place, "--module", f"{place}/{named}")
    assert is_refusal(found), found.err
    assert said in found.err
    assert not (place / "run").exists()


def test_widths_are_for_a_network_of_confide(place: Path) -> None:
    found = fitted(place, "--module", f"{place / 'net.py'}:Crossed", "--hidden", "4")
    assert is_refusal(found)
    assert "--hidden" in found.err
