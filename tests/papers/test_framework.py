"""The papers' framework: tables that fit, results that survive, stand-ins that say so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from confide import papers
from confide.cli.app import main
from confide.papers import base, sets
from confide.papers.base import Context, Experiment, Figure, Paper, PaperMeasure, PaperOutcome, PaperTable


def _draw(figure: Any) -> None:
    figure.subplots().plot((0, 1), (1, 0))


def _paper(*, fails: bool = False) -> Paper:
    def table(context: Context) -> PaperOutcome:
        cells = ("accuracy", 0.9, PaperMeasure((0.91, 0.93), 2), math.inf)
        shown = PaperTable("Table 1", ("what", "paper", "ours", "sound epsilon"), (cells,), ("A note.",))
        return PaperOutcome((shown,), (Figure("curve", "A falling line.", _draw),))

    def broken(context: Context) -> PaperOutcome:
        raise RuntimeError("a machine that stops")

    second = (Experiment("second", "fails", broken),) if fails else ()
    return Paper("made-up", "A paper", "Nobody (2020)", (Experiment("first", "a table", table), *second))


def test_a_finished_experiment_is_written_before_the_next_one_begins(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a machine that stops"):
        list(base.run(_paper(fails=True), Context(quick=True), tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    row = found["experiments"][0]["tables"][0]["rows"][0]
    assert row[2]["values"] == [0.91, 0.93]
    assert row[3] is None, "an infinite epsilon is not a JSON number"
    assert found["rows"][0]["name"] == "accuracy"
    assert found["rows"][0]["ours"] == pytest.approx(0.92)
    assert found["rows"][0]["kind"] == "not private"
    page = (tmp_path / "out" / "tables.md").read_text()
    assert "| accuracy | 0.9 | 0.92 ± 0.01 | not private |" in page
    assert (tmp_path / "out" / "curve.svg").stat().st_size > 1000
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        PaperTable("t", ("one",), ((1, 2),))


def test_an_unknown_experiment_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"only='third'.*it has first"):
        _paper().chosen(("third",))


@pytest.mark.parametrize("name", ["mnist", "adult", "abalone"])
def test_stand_ins_say_that_they_are(name: str) -> None:
    found = sets.load(name, Context(quick=True))
    assert found.stand_in
    assert found.notes
    assert len(found.x) == found.records


def test_the_full_run_needs_the_real_data() -> None:
    with pytest.raises(ValueError, match="--data DIR"):
        sets.load("mnist", Context())


def test_every_paper_is_listed_with_its_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["papers"]
    assert set(listed) == set(papers.names())
    assert all(entry["experiments"] for entry in listed.values())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nothing", "--quick"], "paper='nothing': unknown"),
        (["dp-sgmcmc"], "--data: missing"),
        (["dp-sgmcmc", "--data", "no/such"], "--data=no/such: not a directory"),
        (["dp-sgmcmc", "--quick", "--seeds", "0"], "--seeds=0"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "run", *words]) == 2
    assert complaint in capsys.readouterr().err
