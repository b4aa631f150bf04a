"""Finished parts: a run that was stopped goes on, and nothing that other sources or other kinds of run made counts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from confide.cli.app import main
from confide.papers.base import Context, Experiment, Paper, PaperOutcome, PaperTable, run
from confide.papers.parts import Parts


@dataclass(frozen=True)
class Score:
    error: float
    epsilon: float


def _context(tmp_path: Path) -> Context:
    return Context(quick=True, parts=Parts.at(tmp_path / "parts"))


class Fits:
    """Two fits of which the second is interrupted, once."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.interrupted = True

    def fit(self, name: str, context: Context) -> Score:
        def compute() -> Score:
            if name == "second" and self.interrupted:
                raise KeyboardInterrupt
            self.made.append(name)
            began = time.process_time()
            while time.process_time() - began < 0.05:
                pass
            return Score(0.5, float("inf"))

        return context.part(Score, ("mine", name), compute)

    def run(self, context: Context) -> PaperOutcome:
        rows = tuple((name, None, *vars(self.fit(name, context)).values()) for name in ("first", "second"))
        return PaperOutcome((PaperTable("errors", ("name", "paper", "ours", "sound epsilon"), rows),))


def test_a_run_that_was_stopped_goes_on_and_counts_all_of_its_time(tmp_path: Path) -> None:
    fits = Fits()
    paper = Paper("mine", "", "", (Experiment("errors", "", fits.run),))
    with pytest.raises(KeyboardInterrupt):
        list(run(paper, _context(tmp_path)))
    fits.interrupted = False
    (finished,) = run(paper, _context(tmp_path))
    assert fits.made == ["first", "second"]
    assert finished.outcome.tables[0].rows[0] == ("first", None, 0.5, float("inf"))
    assert finished.processor_seconds > 0.1, "both fits, of which one was made by a run before"
    assert not list((tmp_path / "parts").glob("*.*[0-9]")), "no draft is left"


def test_only_parts_of_the_same_sources_and_kind_of_run_count(tmp_path: Path) -> None:
    fits = Fits()
    context = _context(tmp_path)
    fits.fit("first", context)
    own = tmp_path / "paper.py"
    own.write_text("PAPER = 1\n")
    others = [replace(context, parts=Parts.at(tmp_path / "parts", own)), replace(context, noise_seed=1)]
    others += [replace(context, quick=False), replace(context, data=tmp_path)]
    for other in others:
        fits.fit("first", other)
    own.write_text("PAPER = 2\n")
    fits.fit("first", replace(context, parts=Parts.at(tmp_path / "parts", own)))
    assert len(fits.made) == 6
    for other in (context, *others[1:]):
        fits.fit("first", other)
    assert len(fits.made) == 6


@pytest.mark.parametrize("broken", ["", "{", "[]", json.dumps({"value": 1})])
def test_a_part_that_cannot_be_read_is_made_anew(tmp_path: Path, broken: str) -> None:
    fits = Fits()
    fits.fit("first", _context(tmp_path))
    (file,) = (tmp_path / "parts").iterdir()
    file.write_text(broken)
    assert fits.fit("first", _context(tmp_path)) == Score(0.5, float("inf"))
    assert len(fits.made) == 2


def test_the_command_keeps_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["papers", "run", "dp-sep", "--only", "hyper-prior", "--quick", "--json", "--checkpoint"]
    assert main([*words, str(tmp_path / "parts")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(list((tmp_path / "parts").iterdir())) == 4
    assert main([*words, str(tmp_path / "parts")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]
    file = tmp_path / "file"
    file.write_text("")
    assert main([*words, str(file)]) == 2
    assert "--checkpoint=" in capsys.readouterr().err
