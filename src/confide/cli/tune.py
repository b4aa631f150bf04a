"""`confide tune`: the best of several settings, chosen privately within one budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import AdjacencyName, EpsilonGoal, Json, SamplingName
from confide.cli.output import emit_json, for_this_command, one_line, output, progress_bar
from confide.cli.paths import check_ledger, check_new_directory, ledger_by
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.cli.records import Records
    from confide.workflow.request import Request

MOST_JOBS = 64  # as of a comparison: more processes than any machine of one user has
PLAIN: dict[str, Callable[[str], Any]] = {
    "hidden": options.layers,
    "batch": int,
    "epochs": float,
    "steps": int,
    "clip": float,
}
"""Words of --try that belong to every method, and how each is read."""
EXAMPLES = (
    "confide tune train.csv --target income --facts facts.toml --epsilon 1 \\\n"
    "  --try 'method=additive' --try 'method=tabular' --out out/best",
    "confide tune digits --epsilon 8 --delta 1e-4 --try 'method=sgd clip=1' \\\n"
    "  --try 'method=sgd clip=4 averaging=0.3' --out out/digits",
)
Tries = Annotated[
    list[str],
    typer.Option(
        "--try",
        metavar="'NAME=VALUE ...'",
        help="One candidate: method, hidden, batch, epochs, steps, clip, or a setting of its method. Repeat it.",
        show_default=False,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(metavar="K", help="Fits that run at the same time; all are paid for before the first starts."),
]
DryRun = Annotated[
    bool,
    typer.Option("--outlook", help="Say what the search could find, charge nothing and stop."),
]


def tune(
    train: given.Train,
    *,
    tries: Tries,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    epsilon: EpsilonGoal,
    delta: given.Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    sampling: SamplingName = rules.SAMPLING,
    secure: given.Secure = False,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    key: given.LedgerKey = None,
    who: given.Who = None,
    out: given.Out,
    jobs: Jobs = 1,
    outlook: DryRun = False,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Choose the best of several settings privately, within one budget.

    Every candidate is fitted to most of the records and scored on the others; fits and scores, the losing ones as well,
    are paid for together before any record is read, and are within epsilon together. What the search can tell apart
    at this number of records and this epsilon is said first. DIR receives the winner.
    """
    from confide.cli import outcome
    from confide.cli.records import Records
    from confide.workflow.measure import check_test, measured
    from confide.workflow.search import prepare_search, run_search

    records = Records(train, target, test, facts, assume_public, data, split, options.task(task))
    plan = options.plan_options(epsilon, delta, None, None, None, None, sampling, adjacency, None)
    options.whole("--jobs", jobs, most=MOST_JOBS)
    options.seed(seed)
    changes = [candidate(text) for text in tries]
    records.check()
    check_new_directory("--out", out)
    for_this_command(ledger_by(ledger, key, who))
    check_ledger(ledger)
    chosen: dict[str, Any] = {**plan, "secure": secure, "ledger": ledger, "seed": seed}
    held_out = records.load().test
    with options.named():
        reopen = partial(opened, records, name, chosen, tuple(tries))
        request, _ = reopen()
        trials = prepare_search(request, changes)
        if held_out is not None:
            check_test(held_out, trials.held_out.encoder)
        _say(trials.outlook, as_json)
        if outlook:
            return
        with progress_bar(f"{len(changes)} settings on {records.train}") as progress:
            found = run_search(trials, progress, jobs, reopen if jobs > 1 else None)
    run, encoder = found.outcome.run, found.outcome.encoder
    evaluation, summary = outcome.save(
        run,
        out,
        lambda: None if held_out is None else measured(run.posterior, encoder, held_out, records.test_source),
        {**outcome.config_of(records, request, found.outcome.hidden), "try": list(tries), "chosen": tries[found.best]},
        encoder,
    )
    if as_json:
        emit_json({**summary, "chosen": tries[found.best], "scores": list(found.scores), "noise": found.noise})
        return
    for place, (text, score) in enumerate(zip(tries, found.scores, strict=True)):
        mark = "*" if place == found.best else " "
        noise = f"+- {found.noise:.3f} by privacy noise"
        output().print(f"{mark} {score:.3f} {noise}  {one_line(text)}", soft_wrap=True, markup=False)
    outcome.show(output(), run, summary, evaluation)


def _say(outlook: Any, as_json: bool) -> None:
    if not as_json:
        output().print(outlook.sentence(), soft_wrap=True, markup=False)


def candidate(text: str) -> dict[str, Any]:
    """What one --try changes of the request."""
    from confide.cli.settings import make_method

    change: dict[str, Any] = {}
    settings: list[str] = []
    method = "auto"
    for word in text.split():
        name, mark, value = word.partition("=")
        if not mark or not name:
            raise CommandError(f"--try={text}: {word} must have the form NAME=VALUE")
        if name == "method":
            method = value
        elif name in PLAIN:
            try:
                change[name] = PLAIN[name](value)
            except ValueError:
                raise CommandError(f"--try={text}: {word} must be a number") from None
        else:
            settings.append(word)
    if method != "auto" or settings:
        change["method"] = make_method(method, settings, None)
    return change


def opened(
    records: Records, name: str | None, chosen: dict[str, Any], tries: tuple[str, ...]
) -> tuple[Request, list[dict[str, Any]]]:
    """The request and its candidates; with --jobs called in every process, so that no record travels."""
    return records.request(records.load(), name, **chosen), [candidate(text) for text in tries]


def register(app: Any) -> None:
    teach(app, tune, EXAMPLES)
