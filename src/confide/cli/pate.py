"""`confide pate`: teachers on disjoint parts of the records vote on public records, and a student learns from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import AdjacencyName, EpsilonGoal, Json
from confide.cli.output import emit_json, for_this_command, output
from confide.cli.paths import check_ledger, check_new_directory, ledger_by, same_file
from confide.errors import CommandError

EXAMPLES = (
    "confide pate train.csv --target label --facts facts.toml \\\n  --public unlabelled.csv --epsilon 1 --out out/pate",
)
STUDENTS = ("supervised", "semi-supervised")
TEACHERS = 250
"""As many as the published runs have; fewer teachers know more, more teachers bear more noise."""
SEPARATION = {"supervised": 4.0, "semi-supervised": 5.0}
"""Deviations of noise that queries leave to teachers who agree, where no number of queries is given."""
MOST_QUERIES = 300  # Of a graph: beyond this its clusters are finer than its classes need.

PublicFile = Annotated[
    Path,
    typer.Option(
        "--public",
        metavar="FILE",
        help="Records that nobody needs to protect; a target in it is not read.",
        show_default=False,
    ),
]
Teachers = Annotated[int, typer.Option("--teachers", metavar="N", help="Parts that private records are split into.")]
Queries = Annotated[
    int | None,
    typer.Option("--queries", metavar="N", help="Public records to ask about; else by rule.", show_default=False),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="VOTES",
        help="Answer only where so many agree; the test is paid for too.",
        show_default=False,
    ),
]
Estimate = Annotated[
    float | None,
    typer.Option(
        "--estimate",
        metavar="EPSILON",
        help="Part of epsilon for releasing what the votes cost on these records: an estimate, no bound.",
        show_default=False,
    ),
]
StudentName = Annotated[str, typer.Option("--student", metavar="KIND", help="supervised or semi-supervised.")]
Kernel = Annotated[
    float | None,
    typer.Option(
        "--kernel",
        metavar="WIDTH",
        help="A student that is not linear: kernel ridge regression, by a Gaussian kernel of so many median distances "
        "of the public records, such as 0.5. It bears wrong answers better.",
        show_default=False,
    ),
]


def pate(
    train: given.Train,
    *,
    public: PublicFile,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    data: given.DataDirectory = None,
    teachers: Teachers = TEACHERS,
    queries: Queries = None,
    threshold: Threshold = None,
    estimate: Estimate = None,
    student: StudentName = "semi-supervised",
    kernel: Kernel = None,
    epsilon: EpsilonGoal,
    delta: given.Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    key: given.LedgerKey = None,
    who: given.Who = None,
    out: given.Out,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Learn a classifier from votes of teachers on public records (PATE).

    Every private record belongs to one teacher, by a coin of its own. All queries are charged before a record is read,
    answered or not. DIR receives the student's posterior and run.json with the privacy statement, which
    `confide predict` reads.
    """
    from confide.cli.records import Records
    from confide.data import load_table
    from confide.data.schema import Schema
    from confide.workflow.facts import settle
    from confide.workflow.measure import check_test
    from confide.workflow.request import Request

    records = Records(train, target, test, facts, assume_public, data, None, "classification")
    if student not in STUDENTS:
        raise CommandError(f"--student={student}: must be one of {', '.join(STUDENTS)}")
    if same_file(public, train):
        raise CommandError(f"--public={public}: is the training file; its records are private")
    if kernel is not None and not (math.isfinite(kernel) and kernel > 0):
        raise CommandError(f"--kernel={kernel:g}: must be > 0, in median distances of the public records")
    options.whole("--teachers", teachers, least=2, most=100_000)
    options.seed(seed)
    records.check()
    check_new_directory("--out", out)
    for_this_command(ledger_by(ledger, key, who))
    check_ledger(ledger)
    dataset = records.load()
    with options.named():
        request = Request(
            dataset.train,
            epsilon=epsilon,
            delta=delta,
            adjacency=options.adjacency(adjacency),
            facts=dataset.schema or Schema(),
            assume_public=assume_public,
            task="classification",
            ledger=ledger,
            name=name or dataset.name,
            seed=seed,
        )
        request.check()
        settled = settle(request)
        if dataset.test is not None:
            check_test(dataset.test, settled.encoder)
        inputs = load_table(public, part="test", schema=settled.schema, target_required=False)
        run = _run(request, settled, inputs, teachers, queries, threshold, estimate, student, kernel)
    summary = _saved(run, settled.encoder, dataset.test, out)
    if as_json:
        emit_json(summary)
        return
    console = output()
    if summary["accuracy"] is not None:
        console.print(f"Test accuracy of the student: {summary['accuracy']:.4f}")
    console.print(f"{run.answered} of {run.plan.mechanism.queries} queries answered, {teachers} teachers")
    console.print(escape(run.privacy.statement()), highlight=False)
    told = summary["estimated_epsilon"]
    if told is not None:
        console.print(f"On these votes epsilon is about {told['value']:.2f}: {told['kind']}.", highlight=False)
    console.print(f"Written: {escape(str(out))}")


def _run(
    request: Any,
    settled: Any,
    table: Any,
    teachers: int,
    queries: int | None,
    threshold: float | None,
    estimate: float | None,
    student: str,
    kernel: float | None,
) -> Any:
    """Everything but files: the plan by public sizes, then the votes."""
    import torch

    from confide import pate as room
    from confide.sources.private_data import PrivateData
    from confide.workflow.facts import assumptions_of

    inputs = torch.as_tensor(settled.encoder.features(table))
    if queries is None:
        most = min(MOST_QUERIES, len(inputs)) if student == "semi-supervised" else len(inputs)
        queries = min(most, room.queries_for(request.epsilon, request.delta, teachers, SEPARATION[student]))
    made = room.plan(
        epsilon=request.epsilon,
        delta=request.delta,
        teachers=teachers,
        queries=queries,
        threshold=threshold,
        estimate=estimate,
        adjacency=request.adjacency,
    )
    private = PrivateData(
        settled.x,
        settled.y,
        schema=settled.schema,
        ledger=request.ledger,
        name=request.name,
        seed=request.seed,
        vouched=assumptions_of(settled.schema),
        read=request.data,
    )
    kind = room.SemiSupervised if student == "semi-supervised" else room.Supervised
    learner = kind(kernel=kernel)
    return room.fit(room.LinearTeacher(), private, inputs, made, student=learner, seed=request.seed)


def _saved(run: Any, encoder: Any, test: Any, out: Path) -> dict[str, Any]:
    """A directory like that of `confide fit`; what fails after the posterior is written leaves it there."""
    from dataclasses import asdict

    from confide.evaluate.metrics import accuracy
    from confide.mechanism.vote_costs import ESTIMATE
    from confide.models.predictive import of_classes
    from confide.running.artefacts import save_posterior
    from confide.workflow.measure import measured

    score, estimated = None, run.estimated_epsilon
    about = {"method": {"name": "pate", "parameters": asdict(run.plan.mechanism)}, "answered": run.answered}
    try:
        if test is not None:
            found = measured(run.posterior, encoder, test)
            score = accuracy(of_classes(found.predictive).probabilities, found.y)
    finally:  # what was paid for is written, whatever the test part does
        metrics = {} if score is None else {"accuracy": score}
        save_posterior(run.posterior, run.privacy, encoder.schema, out, encoder=encoder, metrics=metrics, about=about)
    return {
        "accuracy": score,
        "plan": asdict(run.plan.mechanism),
        "answered": run.answered,
        "estimated_epsilon": None if estimated is None else {"value": estimated, "kind": ESTIMATE},
        "privacy": run.privacy.to_dict(),
        "statement": run.privacy.statement(),
        "encoder": encoder.to_dict(),
    }


def register(app: Any) -> None:
    teach(app, pate, EXAMPLES)
