"""The papers' framework: tables that fit, results that survive, stand-ins that say so."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import pytest

from confide import papers
from confide.cli.app import main
from confide.errors import Refusal
from confide.papers import base, kept, sets
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


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0), (math.nan,)])
def test_a_seed_that_fell_apart_does_not_end_the_run(values: tuple[float, ...], tmp_path: Path) -> None:
    """Catches a deviation of what is no number, which took the experiments after it along."""
    rows = (("one", PaperMeasure(values), math.nan),)
    outcome = PaperOutcome((PaperTable("T", ("row", "ours", "other"), rows),))
    paper = Paper("p", "t", "c", (Experiment("one", "a table", lambda context: outcome),))
    list(base.run(paper, Context(quick=True, seeds=(0, 1)), tmp_path))
    assert "not finite" in (tmp_path / "tables.md").read_text()
    found = json.loads((tmp_path / "results.json").read_text())["experiments"][0]["tables"][0]["rows"][0]
    assert (found[1]["mean"], found[2]) == (None, None)


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
        (["dp-sgmcmc", "--quick", "--jobs", "0"], "--jobs=0"),
        (["--quick"], "PAPER: missing"),
        (["all", "--quick", "--only", "adult"], "--only=adult: belongs to one paper"),
        (["--quick", "--from", "no_such.py"], "from='no_such.py': must be a Python file"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers", "run", *words]) == 2
    assert complaint in capsys.readouterr().err


SOURCE = """
from confide.papers.base import Experiment, Figure, Paper, PaperOutcome, PaperTable

def draw(canvas):
    canvas.subplots().plot((0, 1), (1, 0))

def table(number):
    def run(context):
        row = ("a row", 0.5, float(number), 1.0)
        made = PaperTable(f"Table {number}", ("what", "paper", "ours", "sound epsilon"), (row,))
        return PaperOutcome((made,), (Figure(f"figure{number}", "A line.", lambda canvas: draw(canvas)),))
    return run

PAPER = Paper("of-mine", "A title", "Me (2026)", tuple(Experiment(f"e{n}", "a table", table(n)) for n in (1, 2)))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


class TestFromFile:
    def test_a_file_is_run_by_the_command(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["papers", "run", "--from", str(file), "--quick", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["paper"] == "of-mine"
        assert [row["ours"] for row in found["rows"]] == [1, 2]
        assert main(["papers", "run", "another", "--from", str(file), "--quick"]) == 2
        assert "PAPER=another: the file of --from has of-mine" in capsys.readouterr().err

    def test_a_folder_with_files_of_its_own(self, tmp_path: Path) -> None:
        folder = tmp_path / "of_mine"
        folder.mkdir()
        (folder / "parts.py").write_text(SOURCE)
        (folder / "__init__.py").write_text("from .parts import PAPER\n")
        assert papers.from_file(folder).name == "of-mine"

    @pytest.mark.parametrize(
        ("text", "complaint"), [("1 / 0", "fails with ZeroDivisionError"), ("PAPER = 3", "there is no PAPER in it")]
    )
    def test_what_is_no_paper_gets_one_sentence(self, file: Path, text: str, complaint: str) -> None:
        file.write_text(text)
        with pytest.raises(Refusal, match=complaint):
            papers.from_file(file)

    def test_two_at_a_time_give_the_same(self, file: Path, tmp_path: Path) -> None:
        paper, context = papers.from_file(file), Context(quick=True)
        alone = [each.outcome.tables for each in base.run(paper, context)]
        steps: list[tuple[int, int]] = []
        shown = Context(quick=True, progress=lambda what, done, total: steps.append((done, total)))
        together = list(base.run(paper, shown, tmp_path / "out", jobs=2, source=file))
        assert [each.outcome.tables for each in together] == alone
        assert steps == [(1, 2), (2, 2)]
        assert (tmp_path / "out" / "figure2.png").stat().st_size > 1000


class TestPackages:
    def point(self, value: str) -> importlib.metadata.EntryPoint:
        return importlib.metadata.EntryPoint("mine", value, papers.ENTRY_POINTS)

    def found(self, monkeypatch: pytest.MonkeyPatch, value: str) -> dict[str, Paper]:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [self.point(value)])
        return papers.all_papers.__wrapped__()

    def test_the_paper_of_a_package_is_listed(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        assert "of-mine" in self.found(monkeypatch, "mine:PAPER")
        with pytest.warns(UserWarning, match=r"is no confide\.papers\.Paper"):
            assert "of-mine" not in self.found(monkeypatch, "mine:draw")

    def test_an_installed_package_is_named_with_its_version(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """What is kept of its runs says which version made them; the commit of confide alone would not."""
        about = tmp_path / "papers_of_mine-1.4.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: papers-of-mine\nVersion: 1.4\n")
        (about / "entry_points.txt").write_text("[confide.papers]\nbroken = nowhere:PAPER\nmine = mine:PAPER\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        papers.all_papers.cache_clear()
        try:
            with pytest.warns(UserWarning, match="cannot be imported"):
                assert papers.package_of("of-mine") == "papers-of-mine 1.4"
            assert papers.package_of("dp-sep") == ""
            context = Context(data=tmp_path, seeds=(0,))
            finished = next(base.run(papers.get("of-mine"), context))
            path = kept.keep(papers.get("of-mine"), context, finished, tmp_path / "results", kept.MadeFrom("0" * 40))
            assert json.loads(path.read_text())["package"] == "papers-of-mine 1.4"
        finally:
            papers.all_papers.cache_clear()

    def test_a_broken_package_does_not_hide_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(UserWarning, match="cannot be imported"):
            assert set(self.found(monkeypatch, "no_such_package:PAPER")) == set(papers.names())


class TestStamps:
    def test_a_quick_run_says_so_everywhere(self, tmp_path: Path) -> None:
        """Catches a quick run that could pass as a full one: in a table, a row, a file, a picture."""
        (item,) = base.run(_paper(), Context(quick=True), tmp_path / "out")
        stamp = Context(quick=True).stamp
        assert stamp.startswith("Not a result (quick run")
        assert "stand-ins" in stamp
        assert item.outcome.tables[0].notes[0] == stamp
        assert item.outcome.figures[0].caption.startswith(stamp)
        found = json.loads((tmp_path / "out" / "results.json").read_text())
        assert found["stamp"] == found["rows"][0]["stamp"] == stamp
        assert found["experiments"][0]["tables"][0]["stamp"] == stamp
        assert stamp in (tmp_path / "out" / "tables.md").read_text().splitlines()[4]
        assert "not a result" in (tmp_path / "out" / "curve.svg").read_text()

    def test_a_full_run_has_none(self, tmp_path: Path) -> None:
        context = Context(data=tmp_path)
        (item,) = base.run(_paper(), context, tmp_path / "out")
        assert context.stamp == ""
        assert item.outcome.tables[0].notes == ("A note.",)
        assert "not a result" not in (tmp_path / "out" / "curve.svg").read_text()
        assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]["stamp"] == ""

    def test_quick_settings_on_the_real_data_are_no_result_either(self, tmp_path: Path) -> None:
        assert Context(data=tmp_path, quick=True).stamp
        assert Context(data=tmp_path, noise_seed=3).stamp


def test_the_expected_time_says_what_was_not_measured() -> None:
    """A sum over what nobody measured is no time: it was told as one minute."""
    from confide.cli.papers import expected

    def paper(*minutes: float, once: bool = False) -> Paper:
        def part(place: int, each: float) -> Experiment:
            return Experiment(f"part{place}", "", lambda _: PaperOutcome(), minutes=each, once=once)

        return Paper("p", "", "", tuple(part(place, each) for place, each in enumerate(minutes)))

    told = expected(paper(2.0, 0.0), None, [], 5, 1)
    assert told == "p: about 10 min of processor time for 5 seeds, and part1, not measured"
    told = expected(paper(0.0), None, [], 1, 2)
    assert told == "p: how long part0 will take was not measured; 1 seed, by 2 processes"
    assert "not measured" not in expected(paper(1.0), None, [], 1, 1)
    assert expected(paper(4.0, once=True), None, [], 5, 1).startswith("p: about 4 min")


def test_an_experiment_whose_file_is_not_there_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    """`run all` must neither stop at it nor count its time; asked for by name, it is refused before anything runs."""
    from confide.cli.papers import expected

    ran: list[str] = []

    def part(name: str, needs: str = "") -> Experiment:
        return Experiment(name, "", lambda _: ran.append(name) or PaperOutcome(), minutes=1.0, needs=needs)

    paper, context = Paper("p", "", "", (part("small"), part("large", "large.zip"))), Context(data=tmp_path)
    list(base.run(paper, context))
    assert ran == ["small"]
    told = expected(paper, tmp_path, [], 1, 1)
    assert told.endswith("1 min of processor time for 1 seed; large was not run: the data directory holds no large.zip")
    with pytest.raises(Refusal, match=r"only=large: large was not run: .* holds no large\.zip"):
        list(base.run(paper, context, only=["large"]))
    (tmp_path / "large.zip").touch()
    list(base.run(paper, context, only=["large"]))
    assert ran == ["small", "large"]
