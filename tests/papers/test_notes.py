"""Notes under tables follow the run: another setting is another note, and no size of a full run is typed into one."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from confide import papers
from confide.papers import dp_sep, mnist_best, protocol, sets
from confide.papers import dp_variational_dropout as variational
from confide.papers.base import Context, PaperMeasure
from confide.papers.dp_sep import fits
from confide.papers.dp_sgmcmc import adult, teachers
from confide.papers.dp_variational_dropout import printed
from confide.papers.dp_variational_dropout.fits import pixels

QUICK = Context(quick=True, seeds=(0,), noise_seed=1)
SIZES = "records|images|epochs|passes|steps|seeds|splits|teachers|units|draws|simulations|queries|clusters"
TYPED_IN = re.compile(rf"\b\d[\d ]*\d? (?:{SIZES})\b")
OF_OTHERS = {"claims.py": 4, "teachers.py": 2}
"""Sentences about what others published, and about looks of the past, which no run can know."""


def typed_in(source: str) -> list[str]:
    """Sizes within strings that are neither documentation nor computed."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documents]
    return [found for node in strings if isinstance(node.value, str) for found in TYPED_IN.findall(node.value)]


def test_no_size_of_a_run_is_typed_in() -> None:
    for path in sorted(Path(papers.__file__).parent.rglob("*.py")):
        found = typed_in(path.read_text())
        assert len(found) <= OF_OTHERS.get(path.name, 0), (path.name, found)


def test_a_typed_in_size_is_caught() -> None:
    """Planted."""
    assert typed_in('NOTES = ("Fits here read all 60 000 records.",)') == ["60 000 records"]
    assert not typed_in('"""Documentation of 60 000 records."""\nnote = f"{records} records"')


def test_notes_of_adult_follow_its_schedule() -> None:
    problem, trial = adult.load(QUICK)
    taken = protocol.Protocol("a part", "loss", {("one",): protocol.Choice({}, (1.0,))})
    before, after = (" ".join(adult._notes(each, taken)) for each in (problem, replace(problem, batch=77, most=123)))
    assert f"batches of {problem.batch} on average" in before
    assert "batches of 77 on average" in after
    assert "at most 123" in after
    assert f"{len(problem.x)} private records" in before
    assert adult._before(replace(trial, real=replace(problem, batch=77)), "sgld", 1.0).startswith("batch 77, clip 1")


def test_notes_of_votes_follow_the_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sets.load("mnist", QUICK)
    data = teachers.Votable(found.x, found, found.x_test[:30], found.x_test[30:], found.y_test[30:])
    assert teachers._notes(data, QUICK)[0].startswith(f"{teachers.QUICK_TEACHERS} teachers")
    monkeypatch.setattr(teachers, "QUICK_TEACHERS", 7)
    monkeypatch.setattr(teachers, "SEPARATION", {"supervised": 6.5})
    changed = " ".join(teachers._notes(data, replace(QUICK, seeds=(3, 4))))
    assert changed.startswith("7 teachers")
    assert "6.5 (supervised)" in changed
    assert "seeds 3, 4" in changed


def test_notes_of_networks_follow_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sets.load("wine_red", QUICK)
    assert "81 weights and 2000 records of wine_red" in dp_sep._noise_note([given], QUICK)
    monkeypatch.setattr(fits, "hidden_units", lambda name, context: 20)
    assert "161 weights" in dp_sep._noise_note([given], QUICK)
    monkeypatch.setattr(fits, "PRINTED_CLIP", 7.5)
    assert "clipped to 7.5 " in dp_sep._as_printed_note()
    monkeypatch.setattr(fits, "VARIATIONAL_EPOCHS", 11)
    assert "11 passes" in dp_sep._about(given, QUICK)
    assert fits._before("DP-VI", given, QUICK) == f"batch {fits.batch_of(given)}, clip {fits.CLIP:g}, 11 passes"


def test_notes_of_falling_rates_follow_the_run() -> None:
    """Catches a sentence about private rows that stands there whatever came out."""
    setting = printed.PrintedSetting(10, 0.1, 1.0, 0.05)
    rows = [("AC", 0.9, PaperMeasure((0.25, 0.75)), 1.0), (printed.OPEN, 0.9, PaperMeasure((0.95,)), math.inf)]
    told = printed._reach(setting, [*rows, ("zCDP", 0.9, PaperMeasure((0.9,)), 1.0)])
    assert "10 steps that fall as 1 / t^1 add up to 2.93 first rates" in told
    assert told.endswith("private rows end between 0.500 and 0.900.")


def test_notes_of_digits_follow_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    data, full = pixels("digits", QUICK), replace(QUICK, quick=False)
    before = variational._noise_amounts(data, full)
    assert [one.split()[3] for one in before] == ["10", "1", "0.1"]
    doubled = {epsilon: replace(one, clip=100 * one.clip) for epsilon, one in variational.SETTINGS["digits"].items()}
    monkeypatch.setattr(variational, "SETTINGS", {"digits": doubled})
    for one, other in zip(before, variational._noise_amounts(data, full), strict=True):
        assert float(other.split()[0]) == pytest.approx(100 * float(one.split()[0]), rel=0.1)


def test_notes_of_the_linear_classifier_follow_its_setting() -> None:
    given = sets.load("mnist", QUICK)
    setting = replace(mnist_best.QUICK, steps=31, clip=0.25)
    told = mnist_best._did(setting, given, 12, QUICK)
    assert f"{given.records} records of 12 features" in told
    assert "31 steps, clip 0.25" in told
