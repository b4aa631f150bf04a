"""`confide papers`: published experiments, run again under a sound epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable

from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import Json
from confide.cli.output import emit_json, output, progress_bar
from confide.cli.paper_tables import rendered
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.papers.base import Experiment, Finished, Paper

LIST_EXAMPLE = "confide papers list"
PAGE_EXAMPLE = "confide papers page results --out docs/results.md"
RUN_EXAMPLES = (
    "confide papers run dp-sgmcmc --quick",
    "confide papers run dp-bnn --data ~/data --out out/papers/dp-bnn",
    "confide papers run all --data ~/data --jobs 2 --out out/papers",
    "confide papers run --from my_paper.py --quick",
    "confide papers run dp-sep --only mixture --data ~/data --seeds 5 \\\n  --keep results",
)
ALL = "all"
MOST_JOBS = 64  # More processes than any machine here would have cores; a slip of the finger starts them all.
MOST_SEEDS = 20  # More would take days and hardly narrow a standard error.

Name = Annotated[
    str,
    typer.Argument(
        metavar="[PAPER]",
        help="A name from `confide papers list`, or all; not needed with --from.",
        show_default=False,
    ),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A paper of your own: a Python file, or a folder, that has a PAPER; it is run.",
        show_default=False,
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", help="Experiments that run at the same time.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Directory with the data sets; not needed with --quick.", show_default=False
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="About a minute: small, one seed, to see that it all works.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="EXPERIMENT", help="Run this experiment; may be repeated.", show_default=False),
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="K", help="Runs of each row, for mean and deviation.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="New directory for results.json, tables.md and the figures.", show_default=False
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep",
        metavar="DIR",
        help="Folder of results to keep each experiment in: a full run from committed sources alone.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Keep finished fits of long experiments there: after an interruption the same command goes on with them.",
        show_default=False,
    ),
]
Results = Annotated[Path, typer.Argument(metavar="RESULTS", help="The folder that --keep wrote to.")]
PageFrom = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="A paper of your own: the page has it beside those that results are kept of; the file is run.",
        show_default=False,
    ),
]
Page = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; else it is shown.")]


def list_papers(as_json: Json = False) -> None:
    """List the papers and their experiments: those that come with confide, and those of installed packages."""
    from confide import papers

    every = papers.all_papers()
    if as_json:
        emit_json({"papers": {name: _described(paper) for name, paper in every.items()}})
        return
    console = output()
    for name, paper in every.items():
        console.print(f"[bold]{escape(name)}[/bold]  {escape(paper.title)}")
        console.print(Padding(f"[dim]{escape(paper.citation)}[/dim]", (0, 0, 0, 2)))
        console.print(Padding(_listed(paper.experiments), (0, 0, 0, 2)))


def _listed(experiments: Sequence[Experiment]) -> RichTable:
    """Names and what they are about, in two columns, so that a long line goes on under its own beginning."""
    drawn = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    drawn.add_column(no_wrap=True)
    drawn.add_column()
    for experiment in experiments:
        drawn.add_row(escape(experiment.name), escape(experiment.about))
    return drawn


def run(
    paper: Name = "",
    *,
    source: From = None,
    data: Data = None,
    quick: Quick = False,
    only: Only = None,
    seeds: Seeds = 3,
    jobs: Jobs = 1,
    out: Out = None,
    keep: Keep = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
) -> None:
    """Run a paper's experiments: its figure, ours, and the sound epsilon of our run, row by row.

    The data sets are public benchmarks. Settings are those that the paper or a public rule gives; where any was
    chosen by looking at results, the table says so. A quick run is stamped as one in every table, figure and file.
    """
    from confide.cli.paths import check_new_directory

    options.whole("--seeds", seeds, least=1, most=MOST_SEEDS)
    options.whole("--jobs", jobs, least=1, most=MOST_JOBS)
    if data is not None and not data.is_dir():
        raise CommandError(f"--data={data}: not a directory")
    chosen = _chosen(paper, source, only)
    if data is None and not quick:
        raise CommandError("--data: missing; name the directory of the data sets, or try --quick, which needs none")
    if out is not None:
        check_new_directory("--out", out)
    if checkpoint is not None and checkpoint.exists() and not checkpoint.is_dir():
        raise CommandError(f"--checkpoint={checkpoint}: not a directory")
    if keep is not None:
        if source is not None:
            _check_own_name(chosen[0])
        from confide.papers.base import Context
        from confide.papers.kept import check_keeping

        check_keeping(Context(data, quick), source)
    several = paper == ALL
    told = []
    for found in chosen:
        place = out / found.name if several and out is not None else out
        told.append(
            _run_one(
                found,
                data,
                quick,
                1 if quick else seeds,
                only or [],
                jobs,
                source,
                place,
                keep,
                checkpoint,
                not as_json,
            )
        )
    if as_json:
        emit_json({"papers": told} if several else told[0])
    elif out is not None:
        what = "results.json, tables.md and the figures"
        output().print(f"Written: {escape(str(out))}/{'PAPER/' if several else ''}{what}")


def _chosen(paper: str, source: Path | None, only: list[str] | None) -> list[Paper]:
    """The papers that were asked for, with one sentence where that is not clear."""
    from confide import papers

    if source is not None:
        found = papers.from_file(source)
        if paper not in ("", found.name):
            raise CommandError(f"PAPER={paper}: the file of --from has {found.name}; leave the name out")
        return [found]
    if paper == ALL and only:
        raise CommandError(f"--only={only[0]}: belongs to one paper; name it instead of all")
    if not paper:
        raise CommandError(f"PAPER: missing; one of {', '.join(papers.names())}, or all, or a file by --from")
    return list(papers.all_papers().values()) if paper == ALL else [papers.get(paper)]


def _check_own_name(paper: Paper) -> None:
    from confide import papers

    if paper.name in papers.names():
        raise CommandError(f"--keep: confide has a paper {paper.name} too, and its results would be lost; rename yours")


def _run_one(
    paper: Paper,
    data: Path | None,
    quick: bool,
    seeds: int,
    only: list[str],
    jobs: int,
    source: Path | None,
    out: Path | None,
    keep: Path | None,
    checkpoint: Path | None,
    shows: bool,
) -> dict[str, Any]:
    """One paper, its tables shown as they are finished; what goes into results.json."""
    from confide.papers import base, kept
    from confide.papers.parts import Parts

    done: list[Finished] = []
    origin = None if keep is None else kept.check_keeping(base.Context(data, quick), source)
    base.asked_for(paper, base.Context(data, quick), only)  # a sentence before anything runs
    if shows and not quick:
        output().print(f"[dim]{escape(expected(paper, data, only, seeds, jobs))}[/dim]")
    with progress_bar(paper.name) as bar:
        # The bar counts the steps of what is running now; its label stays the paper's name.
        context = base.Context(
            data,
            quick,
            tuple(range(seeds)),
            lambda what, now, total: bar(now, total),
            parts=None if checkpoint is None else Parts.at(checkpoint, source),
        )
        for finished in base.run(paper, context, out, only, jobs=jobs, source=source):
            done.append(finished)
            if keep is not None and origin is not None:
                kept.keep(paper, context, finished, keep, origin)
            if shows:
                show(output(), finished)
    return base.to_dict(paper, context, done)


def expected(paper: Paper, data: Path | None, only: list[str], seeds: int, jobs: int) -> str:
    """How long a full run will take, by what it took before, and what it leaves out for want of a file."""
    from confide.papers import base

    chosen = base.asked_for(paper, base.Context(data), only)
    lacking = [each.lacks(data) for each in paper.chosen(only) if each.lacks(data)]
    minutes = sum(experiment.minutes * (1 if experiment.once else seeds) for experiment in chosen)
    unknown = ", ".join(experiment.name for experiment in chosen if not experiment.minutes)
    shared = f", by {jobs} processes" if jobs > 1 else ""
    runs = "1 seed" if seeds == 1 else f"{seeds} seeds"
    if not minutes:
        told = f"how long {unknown} will take was not measured; {runs}{shared}"
    else:
        beside = f", and {unknown}, not measured" if unknown else ""
        told = f"about {max(1, round(minutes))} min of processor time for {runs}{shared}{beside}"
    return "; ".join((f"{paper.name}: {told}", *lacking))


def page(results: Results, *, source: PageFrom = None, out: Page = None) -> None:
    """Make the page of results from kept files: claims with their verdicts, then every table."""
    from confide import papers
    from confide.papers.kept import KeptResults
    from confide.papers.results_page import page as made

    if not results.is_dir():
        raise CommandError(f"RESULTS={results}: not a directory; `confide papers run PAPER --keep {results}` makes it")
    kept, every = KeptResults.of(results), list(papers.all_papers().values())
    if source is not None:
        own, with_results = papers.from_file(source), {name for name, _ in kept.files}
        every = [*(paper for paper in every if paper.name in with_results - {own.name}), own]
    text = made(every, kept)
    if out is None:
        output().print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        out.write_text(text, encoding="utf-8")
        output().print(f"Written: {escape(str(out))}")


def show(console: Console, finished: Finished) -> None:
    """The tables of one experiment."""
    for table in finished.outcome.tables:
        console.print(rendered(table, console.width))
    times = f"{finished.seconds:.0f} s, {finished.processor_seconds:.0f} s of processor time"
    console.print(f"[dim]{escape(finished.experiment.name)}: {times}[/dim]\n")


def _described(paper: Paper) -> dict[str, Any]:
    experiments = {experiment.name: experiment.about for experiment in paper.experiments}
    return {"title": paper.title, "citation": paper.citation, "experiments": experiments}


def register(app: Any) -> None:
    group = typer.Typer(help="Run the experiments of published papers under a sound epsilon.", rich_markup_mode=None)
    teach(group, list_papers, (LIST_EXAMPLE,), name="list")
    teach(group, run, RUN_EXAMPLES)
    teach(group, page, (PAGE_EXAMPLE,))
    app.add_typer(group, name="papers")
