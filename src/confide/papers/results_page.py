"""docs/results.md, made from the kept results alone: claims first, then every table with what made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from confide.errors import Refusal
from confide.papers.base import Cell, Claim, Experiment, Paper, Place, shown
from confide.papers.kept import NOT_RUN, SMALLEST_SPREAD, Judged, KeptResults, judged, verdict

STATES = (True, False, None)
CLOSE = 2.0
"""Standard errors below which two figures are said to be close."""
NEAR = 0.01
"""Part of the other figure within which a figure of one run, whose spread is not known, is said to be near it."""
ONE_RUN = ", one run"
"""After a verdict that no figure of several runs has a part in."""
LONG = 30.0
"""Minutes of processor time from which on the page says why an experiment may not have been run."""

HEAD = """# Results

Published claims beside what comes out here at a sound epsilon (differential privacy, PLD, add/remove unless a row says
otherwise). This page is made by `confide papers page results` from the files under `results/`, each of which names its
command, commit, seeds and processor time; a test holds the page to the files. A claim *holds* when every figure that
decides it is at least as good as the paper's at no more than its epsilon, and holds *partly* when some are; means
decide. The verdict says over how many runs (seeds or splits), and the last column which figures are of one seed, which
of these lie within a hundredth of the other figure, and which are less than two standard errors, over several runs,
from it. What was not run is said to be not run.
"""


def page(papers: Iterable[Paper], kept: KeptResults) -> str:
    """The whole page. An experiment that no paper has any more is refused, so that no file is left behind unread."""
    every = list(papers)
    known = {(paper.name, experiment.name) for paper in every for experiment in paper.experiments}
    strange = sorted(set(kept.files) - known)
    if strange:
        raise Refusal(f"results: {'/'.join(strange[0])} belongs to no experiment; delete the file, or name the paper")
    return "\n\n".join([HEAD.rstrip(), *(_section(paper, kept) for paper in every)]) + "\n"


def written(papers: Iterable[Paper], folder: Path, out: Path) -> None:
    """Write the page of a folder of results."""
    out.write_text(page(papers, KeptResults.of(folder)), encoding="utf-8")


def _section(paper: Paper, kept: KeptResults) -> str:
    parts = [f"## {paper.name}", f"*{paper.title}*. {paper.citation}."]
    if paper.claims:
        rows = [_claim_row(paper.name, claim, kept) for claim in paper.claims]
        parts.append(_table(("claim", "theirs", "ours", "verdict", "why"), rows))
    absent = [each for each in paper.experiments if (paper.name, each.name) not in kept.files]
    if absent:
        parts.append(f"Not run, or not kept: {', '.join(map(_absent, absent))}.")
    for experiment in paper.experiments:
        file = kept.files.get((paper.name, experiment.name))
        if file is not None:
            parts += _experiment(file, experiment.once)
    return "\n\n".join(parts)


def _absent(experiment: Experiment) -> str:
    """With what it would take: a file that was not there, or hours."""
    if experiment.needs:
        return f"{experiment.name} (needs {experiment.needs})"
    if experiment.minutes < LONG:
        return experiment.name
    each = "" if experiment.once else " a seed"
    return f"{experiment.name} (about {experiment.minutes / 60:.1f} hours of processor time{each})"


def _claim_row(paper: str, claim: Claim, kept: KeptResults) -> tuple[str, ...]:
    if claim.proven:
        return claim.text, claim.theirs, "by proof", claim.proven, claim.why[claim.proven]
    found = [judged(paper, comparison, kept) for comparison in claim.comparisons]
    names, decided = _names(found), verdict(found)
    if decided == NOT_RUN:
        lacking = dict.fromkeys(one.ours.experiment for one in claim.comparisons)
        return claim.text, claim.theirs, NOT_RUN, decided, f"Would be decided by {', '.join(lacking)}."
    ours = "; ".join(_with_name(name, one) for name, one in zip(names, found, strict=True))
    return claim.text, claim.theirs, ours, f"{decided}{_runs(found)}", _why(claim, decided, names, found)


def _runs(found: Sequence[Judged]) -> str:
    """How many runs a verdict rests on, seeds or splits; nothing where its figures come of one computation."""
    known = [one for one in found if one.holds is not None]
    counts = {len(values) for one in known for values in (one.own_values, one.other_values) if values}
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    if most == 1:
        return ONE_RUN
    return f", {most} runs" if least == most else f", {least} to {most} runs"


def _names(found: Sequence[Judged]) -> list[str]:
    """What tells the figures of a claim apart: cells of our rows that differ, else of those they are set against."""
    ours = [one.comparison.ours.row for one in found]
    theirs = [one.comparison.theirs.row if isinstance(one.comparison.theirs, Place) else () for one in found]
    told = _differing(ours) if len(set(ours)) > 1 else _differing(theirs)
    if len(set(told)) < len(told):  # one figure of ours against several: what the other has and ours has not
        others = [[shown(cell) for cell in row if cell not in own] for own, row in zip(ours, theirs, strict=True)]
        told = [", ".join((name, *other)) for name, other in zip(told, others, strict=True)]
    return [
        _epsilon(one) if _epsilon(one) == f"epsilon {name}" else name for name, one in zip(told, found, strict=True)
    ]


def _differing(rows: Sequence[tuple[Cell, ...]]) -> list[str]:
    differ = [place for place, cells in enumerate(zip(*rows, strict=True)) if len(set(cells)) > 1]
    return [", ".join(shown(row[place]) for place in differ) for row in rows]


def _epsilon(one: Judged) -> str:
    return f"epsilon {one.comparison.epsilon:g}" if one.comparison.epsilon is not None else ""


def _with_name(name: str, one: Judged) -> str:
    """An epsilon is told after the figure already."""
    return str(one) if not name or (name == _epsilon(one) and one.ours is not None) else f"{name}: {one}"


def _why(claim: Claim, decided: str, names: Sequence[str], found: Sequence[Judged]) -> str:
    """Which figures hold and which do not, as they came out, and the claim's own sentence where all bear it out."""
    by = {state: [name for name, one in zip(names, found, strict=True) if one.holds is state] for state in STATES}
    parts = [f"Holds for {'; '.join(by[True])}."] if by[True] and (by[False] or by[None]) else []
    parts += [f"Not for {'; '.join(by[False])}."] if by[False] and (by[True] or by[None]) else []
    parts += [f"Not run: {'; '.join(by[None])}."] if by[None] else []
    if by[False] or not by[None]:
        parts.append(claim.why.get(decided, ""))
    return " ".join(filter(None, [*parts, *_doubts(names, found)]))


def _doubts(names: Sequence[str], found: Sequence[Judged]) -> list[str]:
    """How sure the figures are: which of them are of one seed, and which of several lie close to the other."""
    known = [(name, one) for name, one in zip(names, found, strict=True) if one.holds is not None]
    single = [] if _runs(found) == ONE_RUN else [name for name, one in known if one.single]
    close = [name for name, one in known if one.standard_errors is not None and one.standard_errors < CLOSE]
    near = [name for name, one in known if one.single and one.apart < NEAR]
    told = []
    for what, some in (
        ("One seed", single),
        ("Within a hundredth of it on one run, which may be chance", near),
        ("Less than two standard errors apart", close),
    ):
        if some:
            told.append(f"{what}." if len(some) == len(known) else f"{what}: {'; '.join(some)}.")
    return told


def _experiment(file: dict[str, Any], once: bool) -> list[str]:
    count = len(file["seeds"])
    seeds = "run once" if once else f"{count} seed{'s' if count > 1 else ''}"
    rough = "" if once or count >= SMALLEST_SPREAD else ", too few for an honest spread"
    minutes = file["processor_seconds"] / 60
    own = f" (the paper's {file['source_commit'][:10]})" if "source_commit" in file else ""
    own = f" (the paper's package: {file['package']})" if "package" in file else own
    commit = f"commit {file['commit'][:10]}{own}"
    made = f"`{file['command']}`, {commit}, {seeds}{rough}, {minutes:.1f} min of processor time."
    parts = [f"### {_heading(file)}", made]
    for table in file["tables"]:
        rows = [
            tuple(_shown(cell, head) for cell, head in zip(row, table["columns"], strict=True)) for row in table["rows"]
        ]
        parts += [f"**{table['title']}**", _table(table["columns"], rows), *table["notes"]]
    return parts


def _heading(file: dict[str, Any]) -> str:
    return f"{file['paper']}: {file['experiment']}, {file['about']}"


def _shown(cell: Any, column: str) -> str:
    if cell is None:
        return "none" if column in ("sound epsilon", "DP by PLD") else "-"
    if isinstance(cell, dict):
        if cell["mean"] is None:
            return "not finite"
        digits = cell["digits"]
        spread = "" if cell["deviation"] is None else f" ± {cell['deviation']:.{digits}f}"
        return f"{cell['mean']:.{digits}f}{spread}"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(columns)
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
