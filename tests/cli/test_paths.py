"""Nothing is written outside of --out, whatever names the data and its owner bring along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Result

Run = Callable[..., Result]
HOSTILE = "../../escaped"


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def hostile_table(folder: Path) -> tuple[Path, Path]:
    """Column, class and data set names that are paths to somewhere else."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, 400)
    lines = [f'"{HOSTILE}","/etc/target"'] + [f"{value:.4f},{HOSTILE if value > 0 else '/tmp'}" for value in x]
    table, facts = folder / "inside" / "train.csv", folder / "inside" / "facts.toml"
    table.parent.mkdir()
    table.write_text("\n".join(lines))
    facts.write_text(
        f'records = 400\ntarget = "/etc/target"\nclasses = ["/tmp", "{HOSTILE}"]\n'
        f'[columns."{HOSTILE}"]\nbounds = [-1, 1]\n'
    )
    return table, facts


def test_names_that_are_paths_write_nothing_outside(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file named after a column, a class or the data set would land two folders up."""
    table, facts = hostile_table(tmp_path)
    monkeypatch.chdir(table.parent)
    before = everything(tmp_path)
    quick = ("--epsilon", 20, "--delta", 1e-3, "--steps", 10, "--batch", 60, "--json")
    fitted = run("fit", table, "--facts", facts, "--name", HOSTILE, "--out", "out/run", *quick)
    assert (fitted.code, fitted.err) == (0, "")
    exported = run("export", "out/run", "--to", "numpy", "--out", "out/numpy", "--json")
    assert (exported.code, exported.err) == (0, "")
    out = table.parent / "out"
    new = everything(tmp_path) - before
    assert new
    assert all(path == out or out in path.parents for path in new)


def test_a_link_in_the_place_of_out_is_refused(run: Run, tmp_path: Path) -> None:
    """Following it would write where the link points to, even where nothing is there yet."""
    table, facts = hostile_table(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    refused = run("fit", table, "--facts", facts, "--epsilon", 1, "--out", tmp_path / "link")
    assert refused.code == 2
    assert "exists already" in refused.err
    assert not (tmp_path / "elsewhere").exists()
