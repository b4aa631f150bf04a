"""`torchrun -m confide fit` is one fit; `confide plan --ranks` says when that is worth it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import confide
from tests.cli.conftest import call
from tests.distributed.launch import ROOT, environment, free_port

FACTS = """
target = "y"
classes = ["no", "yes"]
records = 600

[columns.a]
bounds = [0, 1]

[columns.b]
bounds = [0, 1]
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of two columns and a label, with its facts."""
    (tmp_path / "facts.toml").write_text(FACTS)
    draw = np.random.default_rng(0)
    a, b = draw.random(600), draw.random(600)
    labels = np.where(a > b, "yes", "no")
    whole = pa.table({"a": a, "b": b, "y": labels})
    parquet.write_table(whole.slice(0, 250), tmp_path / "train-0.parquet")
    parquet.write_table(whole.slice(250), tmp_path / "train-1.parquet")
    return tmp_path


def torchrun(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [*launcher, "--master-port", str(free_port()), "-m", "confide", *map(str, words)]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_one_fit_on_two_ranks(table: Path) -> None:
    options = ["--target", "y", "--facts", table / "facts.toml", "--epsilon", 1, "--steps", 20, "--batch", 60]
    places = ["--ledger", table / "budget.db", "--name", "d", "--checkpoint", table / "kept", "--out", table / "run"]
    parts = sorted(table.glob("*.parquet"))
    ended = torchrun(table, "fit", *parts, *options, *places, "--method", "sgd", "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    said = json.loads(ended.stdout)  # one object: rank 1 is silent
    assert said["steps"] == 20
    assert "ranks" not in " ".join(said["assumptions"])
    with confide.Ledger(table / "budget.db") as ledger:
        assert sum(event.count for event in ledger.events("d")) == 20
    assert (table / "run" / "posterior.safetensors").exists()


def test_several_files_are_one_table(table: Path) -> None:
    """As the shell or a pattern in quotes names them; a copy, another table and a test part among them are refused."""
    options = ("--target", "y", "--facts", table / "facts.toml", "--epsilon", 1, "--steps", 5, "--method", "sgd")
    found = call("fit", table / "train-*.parquet", *options, "--out", table / "run", "--json").json
    assert found["steps"] == 5
    (table / "train-2.parquet").write_bytes((table / "train-0.parquet").read_bytes())
    parquet.write_table(pa.table({"a": [0.5], "y": ["no"]}), table / "other.parquet")
    first = table / "train-0.parquet"
    for named, words in (
        ((table / "train-*.parquet",), "is a copy of"),
        ((first, table / "other.parquet"), "other columns or types"),
        ((first, table / "facts.toml"), "must be .parquet"),
        ((table / "none-*.parquet",), "names no file"),
        ((first, table / "train-1.parquet", "--test", table / "train-1.parquet"), "is the training file"),
    ):
        ended = call("fit", *named, *options, "--out", table / "none")
        assert ended.code == 2
        assert words in " ".join(ended.err.split())


PLAN = ("plan", "--epsilon", 1, "--delta", 1e-6, "--records", 100_000, "--steps", 100)


@pytest.mark.parametrize(("batch", "weights", "words"), [(1024, 2_400_000, "times as fast"), (256, 7_850, "no faster")])
def test_plan_says_when_ranks_are_worth_it(batch: int, weights: int, words: str) -> None:
    found = call(*PLAN, "--batch", batch, "--ranks", 2, "--weights", weights, "--json").json["ranks"]
    assert words in found["advice"]
    assert found["times_as_fast"] == pytest.approx(found["step_seconds_one"] / found["step_seconds"])
    assert words in call(*PLAN, "--batch", batch, "--ranks", 2, "--weights", weights).out.replace("\n", " ")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ranks", 2], "--weights: missing"),
        (["--weights", 10], "--weights=10: is for --ranks"),
        (["--ranks", 0, "--weights", 10], "--ranks=0"),
        (["--ranks", 2, "--weights", 10, "--sampling", "fixed-size", "--adjacency", "replace-one"], "poisson"),
    ],
)
def test_plan_refuses(more: list[object], words: str) -> None:
    ended = call(*PLAN, "--batch", 100, *more)
    assert ended.code == 2
    assert words in ended.err
