"""`confide sample`: draws from a tempered posterior of a linear model, each private by itself, or a chain from one."""

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
from confide.cli.options import RUN, AdjacencyName, EpsilonGoal, Json
from confide.cli.output import emit_json, for_this_command, output
from confide.cli.paths import check_ledger, check_new_directory, ledger_by
from confide.errors import CommandError

EXAMPLES = (
    "confide sample train.csv --target income --facts facts.toml \\\n  --epsilon 1 --out out/draw",
    "confide sample train.csv --target income --facts facts.toml \\\n  --epsilon 1 --hybrid --out out/hybrid",
)
WIDTH = 10.0
"""By how much a record's logit may vary: less forgets strong effects, more costs noise."""
NOISE_SCALE = 0.5
"""Of a number around a linear model, where its bounds are scaled to [-1, 1]: half of what is known without a model."""
HYBRID_SHARE = 0.5
"""Of epsilon that a hybrid spends on its draw."""
MOST_DRAWS = 1000  # Each has a part of the budget: so many would hardly depend on the records.

Draws = Annotated[
    int,
    typer.Option("--draws", metavar="N", help="Independent draws, which share epsilon evenly.", rich_help_panel=RUN),
]
Width = Annotated[
    float,
    typer.Option("--width", metavar="W", help="Largest product of a record and the coefficients.", rich_help_panel=RUN),
]
NoiseScale = Annotated[
    float,
    typer.Option(
        "--noise-scale",
        metavar="S",
        help="Numbers: standard deviation of the target around the line, where its bounds are scaled to [-1, 1].",
        rich_help_panel=RUN,
    ),
]
Hybrid = Annotated[
    bool,
    typer.Option(
        "--hybrid", metavar="", help="One draw for half of epsilon, and SGLD from there on.", rich_help_panel=RUN
    ),
]


def sample(
    train: given.Train,
    *,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    draws: Draws = 1,
    hybrid: Hybrid = False,
    width: Width = WIDTH,
    noise_scale: NoiseScale = NOISE_SCALE,
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
    """Draw from a tempered posterior of a linear model: a draw is private by itself.

    Logistic regression for two classes, softmax for more, a line for numbers. A draw is charged before it reads a
    record. DIR receives the posterior and run.json with the privacy statement, which `confide predict` reads.
    """
    from confide.cli.records import Records
    from confide.data.schema import Schema
    from confide.workflow.facts import settle
    from confide.workflow.measure import check_test, measured
    from confide.workflow.request import Request

    records = Records(train, target, test, facts, assume_public, data, None, options.task(task))
    options.whole("--draws", draws, least=1, most=MOST_DRAWS)
    options.number("--width", width, above=0, most=1e3)
    options.number("--noise-scale", noise_scale, above=0, most=1e6)
    if hybrid and draws != 1:
        raise CommandError(f"--draws={draws}: a hybrid starts from one draw; leave one of the two out")
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
            task=records.task,
            noise_scale=noise_scale,
            ledger=ledger,
            name=name or dataset.name,
            seed=seed,
        )
        request.check()
        settled = settle(request)
        if dataset.test is not None:
            check_test(dataset.test, settled.encoder)
        posterior, privacy = _drawn(request, settled, draws, width, hybrid)
    test_part = dataset.test
    found = _saved(
        posterior,
        privacy,
        settled.encoder,
        out,
        {"draws": draws, "hybrid": hybrid, "width": width},
        lambda: None if test_part is None else measured(posterior, settled.encoder, test_part).metrics(),
    )
    if as_json:
        emit_json(found)
        return
    console = output()
    for metric, value in found["metrics"].items():
        console.print(f"{metric}: {value:.4f}")
    console.print(escape(privacy.statement()), highlight=False)
    console.print(f"Written: {escape(str(out))}")


def _drawn(request: Any, settled: Any, draws: int, width: float, hybrid: bool) -> tuple[Any, Any]:
    """Posterior and statement; the mechanism follows from public facts alone."""
    from confide.mechanism.posterior_sampling import PosteriorSampling
    from confide.mechanism.sampled_losses import SampledModel
    from confide.sources.private_data import PrivateData
    from confide.workflow.facts import assumptions_of

    schema = settled.schema
    if schema.records is None:
        raise CommandError("records: missing among the facts; declare the nominal number, or add --assume-public")
    classes = schema.class_count
    # Every input lies in [-1, 1], and of a categorical column at most one is not zero.
    bound = math.sqrt(1 + (len(schema.columns) or settled.features))
    model: SampledModel = "linear" if classes is None else "logistic" if classes == 2 else "softmax"
    mechanism = PosteriorSampling(
        request.epsilon * (HYBRID_SHARE if hybrid else 1 / draws),
        width / bound,
        bound,
        adjacency=request.adjacency,
        tolerance=min(1e-6, request.delta / 100 / draws / (1 + math.exp(min(request.epsilon, 50.0)))),
        model=model,
        classes=classes or 2,
        noise_scale=request.noise_scale,
    )
    source = PrivateData(
        settled.x,
        settled.y,
        schema=schema,
        ledger=request.ledger,
        name=request.name,
        seed=request.seed,
        vouched=assumptions_of(schema),
        read=request.data,
    )
    return _run(source, settled.features, mechanism, request, draws, hybrid)


def _run(source: Any, features: int, mechanism: Any, request: Any, draws: int, hybrid: bool) -> tuple[Any, Any]:
    from dataclasses import replace

    from confide.mechanism.plan import plan
    from confide.methods.sgld import SGLD
    from confide.running import posterior_sample as room

    if hybrid:
        made = plan(
            delta=request.delta,
            records=source.schema.records,
            batch=rules.default_batch(source.schema.records),
            epochs=rules.EPOCHS,
            epsilon=request.epsilon,
            adjacency=request.adjacency,
            spent=(mechanism.event(),),
        )
        run = room.hybrid(source, features, mechanism, SGLD(), made, seed=request.seed)
        return run.posterior, run.privacy
    sampled = room.one_posterior_sample(source, features, mechanism, delta=request.delta, draws=draws)
    vouched = (*sampled.privacy.assumptions, *source.assumptions)
    return sampled.posterior, replace(sampled.privacy, assumptions=vouched)


def _saved(
    posterior: Any, privacy: Any, encoder: Any, out: Path, settings: dict[str, Any], score: Any
) -> dict[str, Any]:
    """A directory like that of `confide fit`; what was paid for is written, whatever the test part does."""
    from confide.running.artefacts import save_posterior

    metrics: dict[str, float] = {}
    about = {"method": {"name": "sample", "parameters": settings}}
    try:
        metrics = score() or {}
    finally:
        save_posterior(posterior, privacy, encoder.schema, out, encoder=encoder, metrics=metrics, about=about)
    return {"metrics": metrics, "privacy": privacy.to_dict(), "statement": privacy.statement(), "out": str(out)}


def register(app: Any) -> None:
    teach(app, sample, EXAMPLES)
