"""`confide compare`: several methods on one data set with the same budget each, in one table and one report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import OUTPUT, RUN, AdjacencyName, EpsilonGoal, Json, SamplingName
from confide.cli.output import emit_json, for_this_command, output, progress_bar
from confide.cli.paths import check_ledger, check_new_directory, ledger_by
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.cli.records import Records
    from confide.data.table import Table
    from confide.workflow.request import Request

EXAMPLES = (
    "confide compare digits --epsilon 3 --methods all --out out/compare",
    "confide compare train.csv --target income --test test.csv --facts facts.toml \\\n"
    "  --epsilon 1 --methods sgld,bbp,sgd --out out/compare",
)
MOST_JOBS = 1024
"""More processes than any machine has cores is a mistake in typing."""
MOST_REPEATS = 100
"""Each fit is charged: more would leave nothing of any budget."""

Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="A,B,C",
        help="The methods, separated by commas, or all that fit the task.",
        rich_help_panel=RUN,
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        metavar="R",
        help="Fits of each method, which shows what the privacy noise does. Each fit is charged.",
        rich_help_panel=RUN,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Fits that run at the same time, in processes of their own. All are charged before the first starts.",
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="New directory for comparison.json, report.html and one directory per method.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]


def compare(
    train: given.Train,
    *,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    methods: Methods = "all",
    hidden: given.Hidden = None,
    repeats: Repeats = 1,
    batch: given.Batch = None,
    epochs: given.Epochs = None,
    steps: given.Steps = None,
    clip: given.Clip = None,
    noise_scale: given.NoiseScale = None,
    epsilon: EpsilonGoal,
    delta: given.Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    sampling: SamplingName = rules.SAMPLING,
    secure: given.Secure = False,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    key: given.LedgerKey = None,
    who: given.Who = None,
    out: Out = None,
    seed: given.Seed = None,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> None:
    """Compare methods on one data set: utility, calibration, time, memory and storage at the same epsilon.

    Every method is fitted to the private records and charged, so k methods cost what k runs compose to; the total is
    stated. Settings come from public rules, never from tuning on the records. The test records are public or separate
    on your word, and a comparison needs them.
    """
    from confide.running.processes import begin

    # Imports take seconds, here and in other processes, so these begin at once.
    beginning = begin(jobs, "confide.workflow.tickets") if 1 < jobs <= MOST_JOBS else None
    from confide.cli.comparison_table import show
    from confide.cli.records import Records
    from confide.workflow.compare import compare as contest
    from confide.workflow.tickets import Workers

    records = Records(train, target, test, facts, assume_public, data, split, options.task(task))
    plan = options.plan_options(epsilon, delta, batch, epochs, steps, clip, sampling, adjacency, noise_scale)
    widths = options.layers(hidden)
    options.whole("--repeats", repeats, most=MOST_REPEATS)
    options.whole("--jobs", jobs, most=MOST_JOBS)
    options.seed(seed)
    records.check()
    if out is not None:
        check_new_directory("--out", out)
    for_this_command(ledger_by(ledger, key, who))
    check_ledger(ledger)
    asked = _asked(methods)

    chosen: dict[str, Any] = {**plan, "hidden": widths, "secure": secure, "ledger": ledger, "seed": seed}
    reopen = partial(opened, records, name, chosen)
    for _ in beginning or ():
        pass
    with Workers(jobs, reopen) as workers:  # they open the records while this process does
        request, held_out = reopen()
        config = {**records.typed(), "ledger": None if ledger is None else str(ledger), "name": request.name}
        with options.named(), progress_bar(f"methods on {records.train}") as progress:
            found = contest(
                request,
                held_out,
                asked,
                repeats=repeats,
                test_source=records.test_source,
                out=out,
                config={**config, "noise_scale": noise_scale, "seed": seed},
                progress=progress,
                jobs=jobs,
                reopen=workers,
            )
    summary = {**found.to_dict(), "out": None if out is None else str(out)}
    if as_json:
        emit_json(summary)
    else:
        show(output(), found, summary)


def opened(records: Records, name: str | None, chosen: dict[str, Any]) -> tuple[Request, Table]:
    """The request and the test records; with --jobs called in every process, so that no record travels."""
    dataset = records.load()
    if dataset.test is None:
        raise CommandError("--test: missing; a comparison is measured on test records that you declare to be public")
    return records.request(dataset, name, **chosen), dataset.test


def _asked(text: str) -> list[str] | None:
    """The methods by name, each once; None for all."""
    from confide import methods

    if text.strip() == "all":
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise CommandError("--methods: missing; give all, or names separated by commas")
    return list(dict.fromkeys(options.choice("--methods", name, methods.names()) for name in names))


def register(app: Any) -> None:
    teach(app, compare, EXAMPLES)
