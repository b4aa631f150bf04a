"""Results that are kept: one small JSON file per experiment, and the page that follows from them.

`confide papers run PAPER --data DIR --keep results` writes results/PAPER/EXPERIMENT.json with the command, commit,
seeds and processor time that made it. A run that is no result (quick, on stand-ins, seeded) and one from changed
sources are refused before they begin. `confide papers page results` makes docs/results.md from the files alone.

The page judges claims by the figures. A claim is a list of comparisons: all hold, it holds; none, it does not; else
partly. A comparison holds when our mean is not worse than the other figure, and the sound epsilon is not above the
one that the claim is made for.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confide.errors import Refusal
from confide.papers.base import Context, FigureComparison, Finished, Paper, Place, table_values
from confide.wording import up

HOLDS, PARTLY, DOES_NOT, NOT_RUN = "holds", "partly", "does not", "not run"
SMALLEST_SPREAD = 5
"""A spread from fewer seeds than this is said to be a rough one."""
ROUNDING = 1 + 1e-6  # A calibrated epsilon may end a last place above the one that was asked for.


@dataclass(frozen=True)
class MadeFrom:
    """The commits that made a result: of confide, and of the paper's own file or folder where it has one."""

    commit: str
    source: str = ""
    source_commit: str = ""


def check_keeping(context: Context, source: Path | None = None) -> MadeFrom:
    """What runs now; one sentence where the results could not be kept."""
    if context.stamp:
        raise Refusal(f"keep: {context.stamp} Only a full run is kept; leave --keep out")
    commit = _committed(Path(__file__).parent.parent, ".", "the sources of confide")
    if source is None:
        return MadeFrom(commit)
    file = source.resolve()
    return MadeFrom(commit, file.name, _committed(file.parent, file.name, f"from={str(source)!r}"))


def _committed(where: Path, what: str, called: str) -> str:
    """The commit that holds it as it stands. A file that git ignores has no changes, so it must be known as well."""
    known = _git(where, "ls-files", "--", what)
    changed = _git(where, "status", "--porcelain", "--", what)
    commit = _git(where, "rev-parse", "HEAD")
    if changed is None or commit is None:
        raise Refusal(f"keep: {called}: not in a git clone, so that no commit can be named; run it from one")
    if changed or not known:
        raise Refusal(f"keep: {called}: there are changes that are in no commit; commit them first")
    return commit


def _git(where: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def keep(paper: Paper, context: Context, finished: Finished, folder: Path, origin: MadeFrom) -> Path:
    """Write one experiment's file; a stamped table is refused, whatever the context says."""
    stamps = [table.stamp for table in finished.outcome.tables if table.stamp]
    if context.stamp or stamps:
        raise Refusal(f"keep: {context.stamp or stamps[0]} Only a full run is kept; leave --keep out")
    from confide.papers import package_of
    from confide.report.trail import versions

    package = "" if origin.source else package_of(paper.name)
    name = finished.experiment.name
    called = f"--from {origin.source}" if origin.source else paper.name
    values = {
        "paper": paper.name,
        "experiment": name,
        "about": finished.experiment.about,
        "command": f"confide papers run {called} --only {name} --data DIR --seeds {len(context.seeds)}",
        "commit": origin.commit,
        **({"source_commit": origin.source_commit} if origin.source else {}),
        **({"package": package} if package else {}),
        "seeds": list(context.seeds),
        "processor_seconds": round(finished.processor_seconds, 1),
        "versions": versions(),
        "tables": [table_values(table) for table in finished.outcome.tables],
    }
    path = folder / paper.name / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class KeptResults:
    """The files of one folder, by paper and experiment."""

    files: dict[tuple[str, str], dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> KeptResults:
        """Read all files; one that is stamped, or lacks what a result must have, is refused."""
        found = {}
        for path in sorted(folder.glob("*/*.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            missing = [name for name in NEEDED if values.get(name) in (None, "", [])]
            if missing:
                raise Refusal(f"{path}: no {missing[0]}; a result names {', '.join(NEEDED)}")
            stamp = next((table["stamp"] for table in values["tables"] if table["stamp"]), "")
            if stamp:
                raise Refusal(f"{path}: {stamp} It cannot stand among the results")
            found[path.parent.name, path.stem] = values
        return cls(found)

    def cell(self, paper: str, place: Place, column: str | None = None) -> Any:
        """What stands at a place; None where the experiment has not been kept."""
        file = self.files.get((paper, place.experiment))
        if file is None:
            return None
        tables = [table for table in file["tables"] if table["title"].startswith(place.table)]
        rows = [(table["columns"], row) for table in tables for row in table["rows"] if _begins(row, place.row)]
        if len(rows) != 1:
            where = f"{paper}/{place.experiment}, table {place.table!r}"
            raise Refusal(f"{where}: {len(rows)} rows begin with {place.row}; a claim needs one")
        columns, row = rows[0]
        name = column or place.column
        return row[columns.index(name)] if name in columns else None


NEEDED = ("paper", "experiment", "command", "commit", "seeds", "processor_seconds", "tables")


def _begins(row: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return [str(cell) for cell in row[: len(wanted)]] == [str(cell) for cell in wanted]


def number_of(cell: Any) -> float | None:
    """The mean of several seeds, or the one figure."""
    value = cell["mean"] if isinstance(cell, dict) else cell
    return float(value) if isinstance(value, int | float) else None


def values_of(cell: Any) -> tuple[float, ...]:
    """One figure per seed, of a cell that has them."""
    values = cell["values"] if isinstance(cell, dict) else []
    return tuple(values) if None not in values else ()


@dataclass(frozen=True)
class Judged:
    """One comparison with the figures in it, and those of single seeds where a figure is a mean over them."""

    comparison: FigureComparison
    ours: float | None
    theirs: float | None
    epsilon: float | None
    own_values: tuple[float, ...] = ()
    other_values: tuple[float, ...] = ()

    @property
    def single(self) -> bool:
        """Whether a figure of one seed decides it."""
        return 1 in (len(self.own_values), len(self.other_values))

    @property
    def standard_errors(self) -> float | None:
        """How many of them the two figures are apart; None where single seeds tell nothing of it. Figures of one
        experiment are of the same seeds or splits, so that their differences count, one by one."""
        own, factor, other = self.own_values, self.comparison.factor, self.comparison.theirs
        others = tuple(factor * value for value in self.other_values)
        if len(own) < 2 or (isinstance(other, Place) and len(others) < 2) or self.theirs is None:
            return None
        difference = statistics.fmean(own) - factor * self.theirs
        variance = statistics.variance(own) / len(own)
        if isinstance(other, Place) and other.experiment == self.comparison.ours.experiment and len(own) == len(others):
            variance = statistics.variance(map(float.__sub__, own, others)) / len(own)
        elif isinstance(other, Place):
            variance += statistics.variance(others) / len(others)
        return abs(difference) / math.sqrt(variance) if variance > 0 else math.inf

    @property
    def apart(self) -> float:
        """How far the two figures are from one another, as a part of the other one."""
        if self.ours is None or self.theirs is None:
            return math.inf
        other = self.comparison.factor * self.theirs
        return abs(self.ours - other) / abs(other) if other else math.inf

    @property
    def holds(self) -> bool | None:
        """None: not run."""
        if self.ours is None or self.theirs is None:
            return None
        limit = self.comparison.epsilon
        if limit is not None and (self.epsilon is None or self.epsilon > limit * ROUNDING):
            return False
        difference = self.ours - self.comparison.factor * self.theirs
        return difference >= -self.comparison.margin if self.comparison.higher else difference <= self.comparison.margin

    def __str__(self) -> str:
        if self.ours is None:
            return NOT_RUN
        at = "" if self.epsilon is None or self.comparison.epsilon is None else f" at {up(self.epsilon)}"
        against = f" against {self.theirs:.4g}" if isinstance(self.comparison.theirs, Place) else ""
        return f"{self.ours:.4g}{against}{at}"


def judged(paper: str, comparison: FigureComparison, kept: KeptResults) -> Judged:
    """The figures of a comparison, looked up."""
    ours = kept.cell(paper, comparison.ours)
    other = kept.cell(paper, comparison.theirs) if isinstance(comparison.theirs, Place) else comparison.theirs
    epsilon = number_of(kept.cell(paper, comparison.ours, comparison.price))
    return Judged(comparison, number_of(ours), number_of(other), epsilon, values_of(ours), values_of(other))


def verdict(found: Sequence[Judged]) -> str:
    """Over all comparisons of a claim; those that were not run leave it open only if none was."""
    known = [one.holds for one in found if one.holds is not None]
    if not known:
        return NOT_RUN
    if all(known):
        return HOLDS if len(known) == len(found) else PARTLY
    return PARTLY if any(known) else DOES_NOT
