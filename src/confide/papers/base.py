"""What a paper is made of: experiments that give tables and figures.

A table sets the paper's figure beside ours, with the sound epsilon of our run and its sentence of explanation. A cell
measured over several seeds is a `PaperMeasure`: mean and standard deviation. Results are written after every
experiment, so that a long run that is stopped loses nothing that was finished.

A run that is no result (quick, on stand-ins, or on files that are called like the published ones and differ) says so
in every table, figure, row and file: `Context.stamp`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from confide.data import catalogue
from confide.errors import Refusal
from confide.papers.parts import Parts, Value
from confide.running.processes import in_processes

Progress: TypeAlias = Callable[[str, int, int], None]

# Okabe and Ito (2008), told apart with every common kind of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#6B7280")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class PaperMeasure:
    """One figure, measured once per seed."""

    values: tuple[float, ...]
    digits: int = 4

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def finite(self) -> bool:
        """Whether no run fell apart."""
        return all(math.isfinite(value) for value in self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None for a single seed."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if self.finite else math.nan

    def __str__(self) -> str:
        if not self.finite:
            return "not finite"
        if self.deviation is None:
            return f"{self.mean:.{self.digits}f}"
        return f"{self.mean:.{self.digits}f} ± {self.deviation:.{self.digits}f}"


Cell: TypeAlias = PaperMeasure | float | int | str | None


@dataclass(frozen=True)
class PaperTable:
    """Rows under column heads, with sentences below that say what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    stamp: str = ""

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise Refusal(f"rows: {wrong} has {len(wrong)} cells under {len(self.columns)} columns")


@dataclass(frozen=True)
class Figure:
    """A drawing: `draw(figure)` fills an empty matplotlib figure of `size` inches."""

    name: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (6.4, 4.0)


@dataclass(frozen=True)
class PaperOutcome:
    """What an experiment found."""

    tables: tuple[PaperTable, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Context:
    """How an experiment is to be run.

    data      directory with the benchmark data sets; None: stand-ins that need no files, only with `quick`
    quick     about a minute for the whole paper: small, one seed, to see that everything works
    seeds     one run for each; they fix networks and starting points
    progress  called with what is being done, how much of it is done, and how much there is
    noise_seed   for tests only: fixes noise and sampling too, so that nothing may be claimed for the runs
    parts     where finished fits of long experiments are kept, so that a run that was stopped goes on with them
    """

    data: Path | None = None
    quick: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    progress: Progress = field(default=lambda what, done, total: None)
    noise_seed: int | None = None
    parts: Parts | None = None

    def part(self, made: Callable[..., Value], what: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
        """A fit or a row as plain values, not made twice where parts are kept. `what` says all that decides it but
        sources, data and the kind of run; `made` builds the value from its fields."""
        if self.parts is None:
            return compute()
        return self.parts.get(made, (*what, self.data and self.data.resolve(), self.quick, self.noise_seed), compute)

    @property
    def stamp(self) -> str:
        """What keeps a run from passing as a result; empty for a full one."""
        told = ["quick run: few seeds, short settings"] if self.quick else []
        told += ["stand-ins in place of the papers' data sets"] if self.data is None else []
        told += ["the noise was seeded"] if self.noise_seed is not None else []
        others = () if self.data is None else catalogue.differing(self.data)
        told += [f"files that differ from the copies that results are made on: {', '.join(others)}"] if others else []
        return f"Not a result ({'; '.join(told)})." if told else ""


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    minutes   of processor time that one seed of the full run takes: measured, or for runs of hours from the time of
              some of their steps; 0: not known
    once      whether it runs once, whatever the seeds
    quick     whether a quick run has it; one that only repeats another on a larger set need not
    needs     a file of the data directory without which it is left out
    """

    name: str
    about: str
    run: Callable[[Context], PaperOutcome]
    minutes: float = 0.0
    quick: bool = True
    needs: str = ""
    once: bool = False

    def lacks(self, data: Path | None) -> str:
        """Why it cannot be run on what is there; empty where it can."""
        if not self.needs or (data is not None and (data / self.needs).is_file()):
            return ""
        where = "no data directory was given" if data is None else f"the data directory holds no {self.needs}"
        return f"{self.name} was not run: {where}"


@dataclass(frozen=True)
class Place:
    """Where a figure stands: in an experiment, a table whose title begins so, a row that begins with these cells."""

    experiment: str
    table: str
    row: tuple[Cell, ...]
    column: str = "ours"


@dataclass(frozen=True)
class FigureComparison:
    """Our figure against the paper's, or against another figure of ours.

    epsilon   the claim is made for this one: a sound epsilon above it does not count
    higher    whether more is better
    margin    what still counts as equal, in the units of the figure
    factor    what the other figure is multiplied by, for claims like "within 5 %"
    price     the column with the sound epsilon of our figure
    """

    ours: Place
    theirs: float | Place
    epsilon: float | None = None
    higher: bool = True
    margin: float = 0.0
    factor: float = 1.0
    price: str = "sound epsilon"


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what decides whether it holds at a sound epsilon.

    theirs        the paper's figures, in its own words and units
    comparisons   what is measured; none for a claim that is proven or disproven
    why           a sentence for each verdict that may come out: "holds", "partly", "does not"
    proven        the verdict of a claim without comparisons, whose `why` says where the proof stands
    """

    text: str
    theirs: str
    comparisons: tuple[FigureComparison, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    proven: str = ""


@dataclass(frozen=True)
class Paper:
    """A published paper, the experiments of it that can be run, and the claims that they decide."""

    name: str
    title: str
    citation: str
    experiments: tuple[Experiment, ...]
    claims: tuple[Claim, ...] = ()

    def chosen(self, only: Sequence[str] = ()) -> tuple[Experiment, ...]:
        """The experiments of these names; all of them for none."""
        known = [experiment.name for experiment in self.experiments]
        unknown = next((name for name in only if name not in known), None)
        if unknown is not None:
            raise Refusal(f"only={unknown!r}: {self.name} has no such experiment; it has {', '.join(known)}")
        return tuple(experiment for experiment in self.experiments if not only or experiment.name in only)


@dataclass(frozen=True)
class Finished:
    """An experiment, what it found, how long it took, and the processor time of that."""

    experiment: Experiment
    outcome: PaperOutcome
    seconds: float
    processor_seconds: float


def run(
    paper: Paper,
    context: Context,
    out: Path | None = None,
    only: Sequence[str] = (),
    *,
    jobs: int = 1,
    source: Path | None = None,
) -> Iterator[Finished]:
    """Run a paper's experiments; with `out`, everything finished so far is written there.

    jobs     experiments that run at the same time, each in a process of its own
    source   the file of a paper that is not installed: other processes read it again
    """
    chosen = asked_for(paper, context, only)
    done: list[Finished] = []
    for finished in _in_turn(chosen, context) if jobs == 1 else _together(paper, chosen, context, jobs, source):
        done.append(finished)
        if out is not None:
            write(paper, context, done, out)
        yield finished


def asked_for(paper: Paper, context: Context, only: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """What a run has: without names, all that a quick run need not leave out and whose files are there."""
    chosen = paper.chosen(only)
    if not only:
        return tuple(each for each in chosen if not each.lacks(context.data) and (each.quick or not context.quick))
    lacking = next((each.lacks(context.data) for each in chosen if each.lacks(context.data)), "")
    if lacking:
        raise Refusal(f"only={', '.join(only)}: {lacking}")
    return chosen


def _in_turn(chosen: Sequence[Experiment], context: Context) -> Iterator[Finished]:
    for experiment in chosen:
        yield _finished(experiment, context)


def _together(
    paper: Paper, chosen: Sequence[Experiment], context: Context, jobs: int, source: Path | None
) -> Iterator[Finished]:
    """In order, as they are done. A worker gets names, and finds the experiment by itself."""
    import joblib

    silent = replace(context, progress=_silent)
    calls = (joblib.delayed(_in_worker)(paper.name, each.name, silent, source) for each in chosen)
    found = in_processes(calls, jobs, in_order=True)
    for place, (experiment, (outcome, seconds, processor)) in enumerate(zip(chosen, found, strict=True), 1):
        context.progress(paper.name, place, len(chosen))
        yield Finished(experiment, outcome, seconds, processor)


def _silent(what: str, done: int, total: int) -> None:
    """A worker has no terminal."""


def _in_worker(paper: str, name: str, context: Context, source: Path | None) -> tuple[PaperOutcome, float, float]:
    from confide import papers

    found = papers.get(paper) if source is None else papers.from_file(source)
    (experiment,) = found.chosen((name,))
    finished = _finished(experiment, context)
    return finished.outcome, finished.seconds, finished.processor_seconds


def _finished(experiment: Experiment, context: Context) -> Finished:
    started, before = time.perf_counter(), _processor_seconds(context)
    outcome = stamped(experiment.run(context), context.stamp)
    return Finished(experiment, outcome, time.perf_counter() - started, _processor_seconds(context) - before)


def _processor_seconds(context: Context) -> float:
    """Of this process, and of those that finished parts before it."""
    return time.process_time() + (0.0 if context.parts is None else context.parts.seconds)


def stamped(outcome: PaperOutcome, stamp: str) -> PaperOutcome:
    """Every table and figure with the stamp, where there is one: none of them can pass as a result."""
    if not stamp:
        return outcome
    tables = [replace(table, notes=(stamp, *table.notes), stamp=stamp) for table in outcome.tables]
    figures = [
        replace(figure, caption=f"{stamp} {figure.caption}", draw=_Stamped(figure.draw)) for figure in outcome.figures
    ]
    return PaperOutcome(tuple(tables), tuple(figures))


@dataclass(frozen=True)
class _Stamped:
    """A drawing with "not a result" across it."""

    draw: Callable[[Any], None]

    def __call__(self, canvas: Any) -> None:
        self.draw(canvas)
        canvas.text(0.5, 0.5, "not a result", fontsize=34, color="#B91C1C", alpha=0.25, rotation=25, ha="center")


def write(paper: Paper, context: Context, done: Sequence[Finished], out: Path) -> None:
    """results.json, tables.md and the newest experiment's figures (SVG and PNG)."""
    from confide.papers.drawing import save_figure

    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(to_dict(paper, context, done), indent=1, allow_nan=False) + "\n")
    (out / "tables.md").write_text(to_markdown(paper, done, context.stamp))
    for figure in done[-1].outcome.figures:
        save_figure(figure, out)


def to_dict(paper: Paper, context: Context, done: Sequence[Finished]) -> dict[str, Any]:
    """Plain JSON values of everything that was found."""
    from confide.report.trail import versions

    return {
        "paper": paper.name,
        "versions": versions(),
        "quick": context.quick,
        "stamp": context.stamp,
        "seeds": list(context.seeds),
        "rows": [row for item in done for table in item.outcome.tables for row in plain_rows(table)],
        "experiments": [
            {
                "name": item.experiment.name,
                "about": item.experiment.about,
                "seconds": round(item.seconds, 1),
                "processor_seconds": round(item.processor_seconds, 1),
                "tables": [table_values(table) for table in item.outcome.tables],
                "figures": [{"name": figure.name, "caption": figure.caption} for figure in item.outcome.figures],
            }
            for item in done
        ],
    }


def plain_rows(table: PaperTable) -> Iterator[dict[str, Any]]:
    """The rows of a table that has the columns "paper" and "ours" (or "sound"), as flat records.

    The name is what stands before the paper's figure; the epsilon is that of the column "sound epsilon" or "DP by PLD".
    """
    places = {name: place for place, name in enumerate(table.columns)}
    ours = places.get("ours", places.get("sound"))
    if "paper" not in places or ours is None:
        return
    epsilon_place = places.get("sound epsilon", places.get("DP by PLD"))
    for row in table.rows:
        cell = row[ours]
        epsilon = None if epsilon_place is None else row[epsilon_place]
        worst = max(epsilon.values) if isinstance(epsilon, PaperMeasure) else epsilon
        yield {
            "table": table.title,
            "name": " ".join(shown(part) for part in row[: places["paper"]]),
            "paper": _cell_value(row[places["paper"]]),
            "ours": _cell_value(cell)["mean"] if isinstance(cell, PaperMeasure) else _cell_value(cell),
            "std": _cell_value(cell)["deviation"] if isinstance(cell, PaperMeasure) else None,
            "epsilon": _cell_value(worst),
            "kind": _kind(worst),
            "stamp": table.stamp,
        }


def _kind(epsilon: Cell) -> str:
    if isinstance(epsilon, float | int):
        return "not private" if math.isinf(epsilon) else "upper bound"
    return "no epsilon belongs to this row"


def table_values(table: PaperTable) -> dict[str, Any]:
    """Plain JSON values of a table."""
    rows = [[_cell_value(cell) for cell in row] for row in table.rows]
    heads = {"title": table.title, "stamp": table.stamp, "columns": list(table.columns)}
    return {**heads, "rows": rows, "notes": list(table.notes)}


def _cell_value(cell: Cell) -> Any:
    if isinstance(cell, PaperMeasure):
        values = [value if math.isfinite(value) else None for value in cell.values]
        mean, deviation = (cell.mean, cell.deviation) if cell.finite else (None, None)
        return {"values": values, "digits": cell.digits, "mean": mean, "deviation": deviation}
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def shown(cell: Cell) -> str:
    """A cell as text: a missing figure is a dash, an infinite epsilon is "not private"."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return "not private" if math.isinf(cell) else f"{cell:.4g}"
    return str(cell)


def to_markdown(paper: Paper, done: Sequence[Finished], stamp: str = "") -> str:
    """All tables as one page."""
    parts = [f"# {paper.title}", paper.citation, *([f"**{stamp}**"] if stamp else [])]
    for item in done:
        parts.append(f"## {item.experiment.name}: {item.experiment.about}")
        for table in item.outcome.tables:
            lines = [" | ".join(table.columns), " | ".join("---" for _ in table.columns)]
            lines += [" | ".join(shown(cell) for cell in row) for row in table.rows]
            parts += [f"**{table.title}**", "\n".join(f"| {line} |" for line in lines)]
            parts += table.notes
        parts += [f"![{figure.caption}]({figure.name}.png)" for figure in item.outcome.figures]
    return "\n\n".join(parts) + "\n"
