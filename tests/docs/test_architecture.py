"""The page about the architecture is true: a fit takes its walk, and types and files are where it says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import confide
from confide.data.schema import Schema
from confide.models import networks

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src" / "confide"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def walk() -> list[str]:
    """The file of every numbered line, in order."""
    return re.findall(r"^\d+\. [^`\n]*`([a-z_/]+\.py)`", section("The walk of one fit"), flags=re.M)


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of confide in the order in which a small fit calls into them."""
    folder = tmp_path_factory.mktemp("walk")
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    method, network = confide.methods.SGLD(), networks.mlp(3, 2, hidden=(4,))
    ledger, schema = confide.Ledger(folder / "budget.db"), Schema(classes=2, records=40)
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(HOUSE)) and frame.f_code.co_name != "<module>":
            found.append(Path(name).relative_to(HOUSE).as_posix())

    sys.setprofile(note)
    try:
        data = confide.PrivateData(x, (x.sum(1) > 1.5).long(), schema=schema, ledger=ledger, name="walk")
        plan = confide.plan(epsilon=3, delta=1e-3, records=40, batch=10, steps=4)
        run = confide.fit(method, network, data, plan, seed=0)
        run.posterior.predict(x[:2])
        run.save(str(folder / "run"))
        confide.load_posterior(folder / "run" / "posterior.safetensors")
    finally:
        sys.setprofile(None)
    return found


def out_of_order(named: Iterable[str], visited: Iterable[str]) -> str | None:
    """The first named file that is not visited after the ones before it."""
    rest = iter(visited)
    return next((name for name in named if name not in rest), None)


def test_the_walk_is_the_one_that_a_fit_takes(visited: list[str]) -> None:
    named = walk()
    assert len(named) == len(re.findall(r"^\d+\. ", section("The walk of one fit"), flags=re.M)) >= 20
    assert out_of_order(named, visited) is None


@pytest.mark.parametrize("fault", ["swapped", "renamed", "later"])
def test_a_walk_that_is_not_taken_is_caught(fault: str, visited: list[str]) -> None:
    named = walk()
    if fault == "swapped":  # the ledger after the first answer
        charge, answer = named.index("privacy/ledger/ledger.py"), named.index("mechanism/sampling.py")
        named[charge], named[answer] = named[answer], named[charge]
    elif fault == "renamed":
        named[3] = "privacy/accountants/moments.py"
    else:  # the report before the plan
        named.insert(0, "report/render.py")
    assert out_of_order(named, visited) is not None


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_central_types_live_where_the_page_says() -> None:
    table = rows("Central types")
    assert len(table) > 15
    for types, owner, _ in table:
        module = importlib.import_module("confide." + owner.strip("`").replace("/", "."))
        for name in re.findall(r"`(\w+)`", types):
            assert hasattr(module, name), f"{owner} has no {name}"


def test_the_rules_name_files_that_exist() -> None:
    table = rows("Rules of the boundary")
    assert len(table) > 15
    for _, enforced, tested in table:
        for text, bases in ((enforced, (HOUSE, HOUSE / "mechanism", HOUSE / "privacy")), (tested, (ROOT / "tests",))):
            for name in re.findall(r"`([a-z_]+/[a-z_/*]*)", text):
                assert any(list(base.glob(f"{name.rstrip('/*')}*")) for base in bases), name
