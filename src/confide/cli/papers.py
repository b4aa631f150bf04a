"""`confide papers`: published experiments, run again under a sound epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import Json
from confide.cli.output import emit_json, output, progress_bar
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.papers.base import Finished, Paper, PaperTable

LIST_EXAMPLE = "confide papers list"
RUN_EXAMPLES = (
    "confide papers run dp-sgmcmc --quick",
    "confide papers run dp-bnn --data ~/data --out out/papers/dp-bnn",
)
MOST_SEEDS = 20  # More would take days and hardly narrow a standard error.

Name = Annotated[str, typer.Argument(metavar="PAPER", help="A name from `confide papers list`.", show_default=False)]
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


def list_papers(as_json: Json = False) -> None:
    """List the papers and their experiments."""
    from confide import papers

    every = papers.all_papers()
    if as_json:
        emit_json({"papers": {name: _described(paper) for name, paper in every.items()}})
        return
    console = output()
    for name, paper in every.items():
        console.print(f"[bold]{escape(name)}[/bold]  {escape(paper.title)}")
        console.print(f"  [dim]{escape(paper.citation)}[/dim]")
        for experiment in paper.experiments:
            console.print(f"  {escape(experiment.name):<14} {escape(experiment.about)}")


def run(
    paper: Name,
    *,
    data: Data = None,
    quick: Quick = False,
    only: Only = None,
    seeds: Seeds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run a paper's experiments: its figure, ours, and the sound epsilon of our run, row by row.

    The data sets are public benchmarks. Settings are those that the paper or a public rule gives; where any was
    chosen by looking at results, the table says so.
    """
    from confide import papers
    from confide.cli.paths import check_new_directory
    from confide.papers import base

    options.whole("--seeds", seeds, least=1, most=MOST_SEEDS)
    if data is not None and not data.is_dir():
        raise CommandError(f"--data={data}: not a directory")
    if data is None and not quick:
        raise CommandError("--data: missing; name the directory of the data sets, or try --quick, which needs none")
    if out is not None:
        check_new_directory("--out", out)
    found = papers.get(paper)
    done: list[Finished] = []
    with progress_bar(found.name) as bar:
        # The bar counts the steps of what is running now; its label stays the paper's name.
        context = base.Context(
            data, quick, tuple(range(1 if quick else seeds)), lambda what, now, total: bar(now, total)
        )
        for finished in base.run(found, context, out, only or ()):
            done.append(finished)
            if not as_json:
                show(output(), finished)
    if as_json:
        emit_json(base.to_dict(found, context, done))
    elif out is not None:
        output().print(f"Written: {escape(str(out))}/results.json, tables.md and the figures")


def show(console: Console, finished: Finished) -> None:
    """The tables of one experiment."""
    for table in finished.outcome.tables:
        console.print(rendered(table))
    console.print(f"[dim]{escape(finished.experiment.name)}: {finished.seconds:.0f} s[/dim]\n")


def rendered(table: PaperTable) -> Group:
    """A table for the terminal, its notes below."""
    from confide.papers.base import shown

    drawn = RichTable(title=escape(table.title), title_justify="left", box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="left" if place == 0 else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(escape(shown(cell)) for cell in row))
    return Group(drawn, *(Text(note) for note in table.notes))


def _described(paper: Paper) -> dict[str, Any]:
    experiments = {experiment.name: experiment.about for experiment in paper.experiments}
    return {"title": paper.title, "citation": paper.citation, "experiments": experiments}


def register(app: Any) -> None:
    group = typer.Typer(help="Run the experiments of published papers under a sound epsilon.", rich_markup_mode="rich")
    teach(group, list_papers, (LIST_EXAMPLE,), name="list")
    teach(group, run, RUN_EXAMPLES)
    app.add_typer(group, name="papers")
