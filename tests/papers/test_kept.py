"""KeptResults results: only full runs from committed sources, and a page that follows from the files."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confide import papers
from confide.cli.app import main
from confide.errors import Refusal
from confide.papers import base, kept
from confide.papers.base import (
    Claim,
    Context,
    Experiment,
    FigureComparison,
    Paper,
    PaperMeasure,
    PaperOutcome,
    PaperTable,
    Place,
)
from confide.papers.kept import KeptResults, MadeFrom
from confide.papers.results_page import page

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef"
ORIGIN = MadeFrom(COMMIT)
COLUMNS = ("method", "epsilon asked for", "paper", "ours", "sound epsilon")


def _run(context: Context) -> PaperOutcome:
    rows = (
        ("ours", 1.0, 0.9, PaperMeasure((0.91, 0.93), 2), 0.999),
        ("other", 1.0, 0.9, PaperMeasure((0.95,), 2), 1.5),
        ("open", math.inf, 0.9, 0.97, math.inf),
    )
    return PaperOutcome((PaperTable("Table 1: accuracy", COLUMNS, rows, ("A note.",)),))


def _place(row: str) -> Place:
    return Place("first", "Table 1", (row,))


def _claim(*comparisons: FigureComparison) -> Claim:
    return Claim("it works", "0.9", comparisons, {"holds": "seen", "partly": "in part", "does not": "not seen"})


PAPER = Paper("made-up", "A paper", "Nobody (2020)", (Experiment("first", "a table", _run),), ())


OWN = """from confide.papers.base import Experiment, Paper, PaperOutcome

def run(context):
    return PaperOutcome()

PAPER = Paper("made-up", "A paper", "Nobody (2020)", (Experiment("first", "a table", run),))
"""


def _committed_elsewhere(folder: Path) -> Any:
    """As it is, but that confide's own sources, which may be changed while tests run, count as committed."""
    real = kept._committed
    return lambda where, what, called: real(where, what, called) if where == folder.resolve() else COMMIT


def _kept(folder: Path, **changes: Any) -> KeptResults:
    context = Context(data=folder, seeds=(0, 1))
    (finished,) = base.run(PAPER, context)
    path = kept.keep(PAPER, context, finished, folder, ORIGIN)
    if changes:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return KeptResults.of(folder)


class TestKeeping:
    def test_what_made_a_result_stands_in_its_file(self, tmp_path: Path) -> None:
        file = _kept(tmp_path).files["made-up", "first"]
        assert file["command"] == "confide papers run made-up --only first --data DIR --seeds 2"
        assert (file["commit"], file["seeds"]) == (COMMIT, [0, 1])
        assert file["processor_seconds"] >= 0
        assert str(tmp_path) not in json.dumps(file), "no path of a machine"

    @pytest.mark.parametrize("context", [Context(quick=True), Context(data=Path("x"), noise_seed=1)])
    def test_a_quick_or_seeded_run_cannot_enter(self, tmp_path: Path, context: Context) -> None:
        with pytest.raises(Refusal, match="Only a full run is kept"):
            kept.check_keeping(context)
        (finished,) = base.run(PAPER, context)
        with pytest.raises(Refusal, match="Only a full run is kept"):
            kept.keep(PAPER, context, finished, tmp_path, ORIGIN)
        with pytest.raises(
            Refusal, match="Only a full run is kept"
        ):  # nor under a context that claims to be a full one
            kept.keep(PAPER, Context(data=tmp_path), finished, tmp_path, ORIGIN)
        assert not list(tmp_path.rglob("*.json"))

    def test_other_records_under_a_published_name_cannot_enter(self, tmp_path: Path) -> None:
        """Catches a full run on a small or made-up file that is called as the published one is."""
        (tmp_path / "wine_red.csv.gz").write_bytes(b"made up")
        context = Context(data=tmp_path)
        assert "copies that results are made on: wine_red.csv.gz" in context.stamp
        with pytest.raises(Refusal, match="files that differ"):
            kept.check_keeping(context)
        (finished,) = base.run(PAPER, context)
        assert finished.outcome.tables[0].stamp == context.stamp

    def test_a_stamped_file_is_refused_by_the_page(self, tmp_path: Path) -> None:
        (finished,) = base.run(PAPER, Context(quick=True))
        stamped = [base.table_values(table) for table in finished.outcome.tables]
        with pytest.raises(Refusal, match=r"Not a result .* cannot stand among the results"):
            _kept(tmp_path, tables=stamped)

    @pytest.mark.parametrize("lacking", ["command", "commit", "seeds", "processor_seconds"])
    def test_a_file_that_does_not_say_what_made_it_is_refused(self, tmp_path: Path, lacking: str) -> None:
        with pytest.raises(Refusal, match=f"no {lacking}"):
            _kept(tmp_path, **{"processor_seconds": 1.0, lacking: None})

    def test_changed_sources_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        told = {"ls-files": "rules.py", "status": " M src/confide/rules.py", "rev-parse": COMMIT}
        monkeypatch.setattr(kept, "_git", lambda where, *words: told[words[0]])
        with pytest.raises(Refusal, match="changes that are in no commit"):
            kept.check_keeping(Context(data=tmp_path))
        told["status"] = ""
        assert kept.check_keeping(Context(data=tmp_path)) == ORIGIN
        monkeypatch.setattr(kept, "_git", lambda where, *words: None)
        with pytest.raises(Refusal, match="git clone"):
            kept.check_keeping(Context(data=tmp_path))

    def test_a_paper_of_ones_own_is_in_a_commit_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a result whose experiment stands in no commit, though confide's sources do."""

        def git(*words: str) -> None:
            call = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
            subprocess.run(call, cwd=tmp_path, check=True, capture_output=True)

        monkeypatch.setattr(kept, "_committed", _committed_elsewhere(tmp_path))
        mine, context = tmp_path / "mine.py", Context(data=tmp_path)
        mine.write_text(OWN)
        with pytest.raises(Refusal, match=r"mine\.py'?: not in a git clone"):
            kept.check_keeping(context, mine)
        git("init")
        (tmp_path / ".gitignore").write_text("mine.py\n")
        git("add", ".gitignore")
        git("commit", "-m", "one")
        with pytest.raises(Refusal, match="in no commit"):
            kept.check_keeping(context, mine)
        git("add", "-f", "mine.py")
        git("commit", "-m", "two")
        found = kept.check_keeping(context, mine)
        assert (found.commit, found.source, len(found.source_commit)) == (COMMIT, "mine.py", 40)
        mine.write_text(OWN + "\n")
        with pytest.raises(Refusal, match="in no commit"):
            kept.check_keeping(context, mine)
        (finished,) = base.run(PAPER, replace(context, seeds=(0,)))
        path = kept.keep(PAPER, context, finished, tmp_path / "results", found)
        assert json.loads(path.read_text())["command"].startswith("confide papers run --from mine.py --only first")
        assert f"(the paper's {found.source_commit[:10]})" in page([PAPER], KeptResults.of(tmp_path / "results"))

    def test_a_name_that_confide_has_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine.py").write_text(OWN.replace("made-up", "dp-sep"))
        call = ["papers", "run", "--from", str(tmp_path / "mine.py"), "--data", str(tmp_path), "--keep"]
        assert main([*call, str(tmp_path / "results")]) == 2
        assert "confide has a paper dp-sep too" in capsys.readouterr().err

    def test_the_command_refuses_before_it_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["papers", "run", "dp-sgmcmc", "--quick", "--keep", str(tmp_path / "results")]) == 2
        assert "Only a full run is kept" in capsys.readouterr().err


class TestVerdicts:
    @pytest.fixture
    def found(self, tmp_path: Path) -> KeptResults:
        return _kept(tmp_path)

    def verdict(self, found: KeptResults, *comparisons: FigureComparison) -> str:
        return kept.verdict([kept.judged("made-up", one, found) for one in comparisons])

    def test_by_the_figures(self, found: KeptResults) -> None:
        better, worse = FigureComparison(_place("ours"), 0.9, 1.0), FigureComparison(_place("ours"), 0.95, 1.0)
        assert self.verdict(found, better) == "holds"
        assert self.verdict(found, worse) == "does not"
        assert self.verdict(found, better, worse) == "partly"
        assert self.verdict(found, replace(worse, margin=0.04)) == "holds"
        assert self.verdict(found, replace(worse, higher=False)) == "holds"
        assert self.verdict(found, FigureComparison(_place("ours"), _place("other"), 1.0)) == "does not"
        assert self.verdict(found, FigureComparison(_place("ours"), _place("other"), 1.0, factor=0.9)) == "holds"

    def test_an_epsilon_above_the_claimed_one_does_not_count(self, found: KeptResults) -> None:
        """Catches a claim that is met by spending more, or without privacy at all."""
        assert self.verdict(found, FigureComparison(_place("other"), 0.9)) == "holds"
        assert self.verdict(found, FigureComparison(_place("other"), 0.9, 1.0)) == "does not"
        assert self.verdict(found, FigureComparison(_place("open"), 0.9, 1.0)) == "does not"

    def test_what_was_not_run_is_said(self, found: KeptResults) -> None:
        missing = FigureComparison(Place("second", "Table", ("x",)), 0.9)
        assert self.verdict(found, missing) == "not run"
        assert self.verdict(found, missing, FigureComparison(_place("ours"), 0.9)) == "partly"

    def test_a_row_that_is_not_there_is_an_error(self, found: KeptResults) -> None:
        with pytest.raises(Refusal, match="0 rows begin with"):
            self.verdict(found, FigureComparison(_place("nobody"), 0.9))


class TestPage:
    def test_claims_and_tables(self, tmp_path: Path) -> None:
        claims = (
            _claim(FigureComparison(_place("ours"), 0.9, 1.0)),
            Claim("a theorem", "Th. 1", (), {"does not": "D1"}, "does not"),
        )
        text = page([replace(PAPER, claims=claims)], _kept(tmp_path))
        assert "| it works | 0.9 | 0.92 at 0.999 | holds, 2 runs | seen |" in text
        assert "| a theorem | Th. 1 | by proof | does not | D1 |" in text
        assert "| ours | 1 | 0.9 | 0.92 ± 0.01 | 0.999 |" in text
        assert "2 seeds, too few for an honest spread" in text

    def test_the_reason_names_the_figures_as_they_came_out(self, tmp_path: Path) -> None:
        """Catches a sentence that is written beforehand where some of a claim's figures are not there."""
        better, worse = FigureComparison(_place("ours"), 0.9, 1.0), FigureComparison(_place("other"), 0.9, 1.0)
        missing = FigureComparison(Place("second", "Table", ("elsewhere",)), 0.9)
        found = _kept(tmp_path)

        def row(*comparisons: FigureComparison) -> str:
            text = page([replace(PAPER, claims=(_claim(*comparisons),))], found)
            return next(line for line in text.splitlines() if line.startswith("| it works"))

        told = "Holds for ours. Not for other. in part One seed: other."
        assert row(better, worse).endswith(
            f"| ours: 0.92 at 0.999; other: 0.95 at 1.5 | partly, 1 to 2 runs | {told} |"
        )
        assert row(better, missing).endswith(
            "elsewhere: not run | partly, 2 runs | Holds for ours. Not run: elsewhere. |"
        )
        assert row(worse, missing).endswith("| does not, one run | Not for other. Not run: elsewhere. not seen |")
        assert row(missing).endswith("| not run | not run | Would be decided by second. |")

    @pytest.mark.parametrize(
        ("own", "other", "runs", "told"),
        [
            (
                (0.905, 0.93),
                0.9,
                "2 runs",
                "Less than two standard errors apart.",
            ),  # 0.0175 away, with an error of 0.0125
            ((0.91, 0.92), 0.9, "2 runs", ""),
            ((0.91,), 0.9, "one run", ""),
            ((0.905,), 0.9, "one run", "Within a hundredth of it on one run, which may be chance."),
            ((0.91, 0.95), (0.90, 0.93), "2 runs", ""),  # 0.015 apart with an error of 0.005, seed by seed
            ((0.91, 0.95), (0.93, 0.90), "2 runs", "Less than two standard errors apart."),
            ((0.91, 0.95), (0.90,), "1 to 2 runs", "One seed."),
        ],
    )
    def test_how_sure_a_verdict_is(self, tmp_path: Path, own: Any, other: Any, runs: str, told: str) -> None:
        """Catches a verdict on one seed, or on noise, that looks like one on five."""

        def found(context: Context) -> PaperOutcome:
            rows = tuple(
                (row, 1.0, None, PaperMeasure(each), 1.0) for row, each in (("ours", own), ("b", other or own))
            )
            return PaperOutcome((PaperTable("Table 1", COLUMNS, rows),))

        against: Any = other
        if isinstance(other, float):
            other = ()
        else:
            against = _place("b")
        paper = replace(PAPER, experiments=(Experiment("first", "", found),))
        paper = replace(paper, claims=(_claim(FigureComparison(_place("ours"), against, 1.0)),))
        context = Context(data=tmp_path, seeds=(0, 1))
        (finished,) = base.run(paper, context)
        kept.keep(paper, context, finished, tmp_path, ORIGIN)
        text = page([paper], KeptResults.of(tmp_path))
        line = next(line for line in text.splitlines() if line.startswith("| it works"))
        assert line.endswith(f"| holds, {runs} | {' '.join(filter(None, ['seen', told]))} |")

    def test_what_was_not_run_says_what_it_would_take(self, tmp_path: Path) -> None:
        more = (Experiment("long", "", _run, minutes=90.0), Experiment("large", "", _run, needs="large.zip"))
        text = page([replace(PAPER, experiments=(*PAPER.experiments, *more))], _kept(tmp_path))
        told = "long (about 1.5 hours of processor time a seed), large (needs large.zip)"
        assert f"Not run, or not kept: {told}." in text

    def test_what_runs_once_has_no_spread(self, tmp_path: Path) -> None:
        once = replace(PAPER, experiments=(replace(PAPER.experiments[0], once=True),))
        text = page([once], _kept(tmp_path))
        assert ", run once, " in text
        assert "too few" not in text

    def test_the_page_of_a_paper_of_ones_own(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _kept(tmp_path / "results")
        (tmp_path / "mine.py").write_text(OWN)
        where = ["papers", "page", str(tmp_path / "results")]
        assert main([*where, "--from", str(tmp_path / "mine.py")]) == 0
        shown = capsys.readouterr().out
        assert "## made-up" in shown
        assert "## dp-sep" not in shown, "it has no results there"
        assert main(where) == 2
        assert "belongs to no experiment" in capsys.readouterr().err

    def test_a_file_that_nobody_owns_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(Refusal, match="made-up/first belongs to no experiment"):
            page([replace(PAPER, name="renamed")], _kept(tmp_path))

    def test_the_page_of_the_documentation_follows_from_the_files(self) -> None:
        made = page(papers.all_papers.__wrapped__().values(), KeptResults.of(ROOT / "results"))
        assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == made, (
            "run `confide papers page results --out docs/results.md`"
        )

    def test_every_result_names_a_commit_that_is_in_the_history(self) -> None:
        """A commit that was lost when branches were joined cannot be looked up by anybody."""
        if kept._git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
            pytest.skip("no history here")
        commits = {file["commit"]: "/".join(name) for name, file in KeptResults.of(ROOT / "results").files.items()}
        lost = [name for commit, name in commits.items() if kept._git(ROOT, "cat-file", "-e", commit) is None]
        assert not lost

    def test_every_claim_has_a_reason_for_its_verdict(self) -> None:
        found = KeptResults.of(ROOT / "results")
        for paper in papers.all_papers().values():
            for claim in paper.claims:
                judged = [kept.judged(paper.name, one, found) for one in claim.comparisons]
                decided = claim.proven or kept.verdict(judged)
                assert decided in ("holds", "partly", "not run") or claim.why[decided], claim.text
                assert claim.proven or all(claim.why.get(each) for each in ("holds", "does not")), claim.text
