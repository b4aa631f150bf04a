"""`confide plan`: how much noise a budget asks for, before any data is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from confide import rules
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import RUN, AdjacencyName, Delta, EpsilonGoal, Json, SamplingName
from confide.cli.output import emit_json, one_line, output
from confide.cli.paths import check_page
from confide.cli.privacy_table import show_privacy
from confide.errors import CommandError
from confide.wording import up

if TYPE_CHECKING:
    from confide.mechanism.plan import Plan

SAMPLERS = ("sgld", "sghmc", "sgnht")
STEP_SIZE_CONVENTION = "w' = w - eta (mean clipped gradient + prior / n) + N(0, eta / n)"
EXAMPLES = (
    "confide plan --epsilon 1 --delta 1e-5 --records 60000 --batch 256 --epochs 15",
    "confide plan --epsilon 0.1 --delta 1e-5 --records 50000 --batch 128 \\\n  --steps 10000 --method sgld --clip 1",
)

Records = Annotated[
    int,
    typer.Option(metavar="N", help="Public number of records.", rich_help_panel=RUN, show_default=False),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="B",
        help="Expected records per step. Left out for full-batch.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(metavar="E", help="Passes over the data; or give --steps.", rich_help_panel=RUN, show_default=False),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="T", help="Number of steps; or give --epochs.", rich_help_panel=RUN, show_default=False),
]
Clip = Annotated[float, typer.Option(metavar="C", help="Largest norm of one record's answer.", rich_help_panel=RUN)]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="sgld, sghmc or sgnht: also print the largest step sizes whose own noise keeps the budget.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="R",
        help="Say how much faster R processes under torchrun would be; needs --weights.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Weights = Annotated[
    int | None,
    typer.Option(metavar="D", help="Weights of the network, for --ranks.", rich_help_panel=RUN, show_default=False),
]
Friction = Annotated[
    float,
    typer.Option(metavar="A", help="Friction of sghmc and sgnht.", rich_help_panel=RUN),
]

Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write a page, a new .html file.", show_default=False),
]


def plan(
    *,
    epsilon: EpsilonGoal,
    delta: Delta,
    records: Records,
    batch: Batch = None,
    epochs: Epochs = None,
    steps: Steps = None,
    clip: Clip = rules.CLIP,
    method: MethodName = None,
    friction: Friction = 0.1,
    sampling: SamplingName = rules.SAMPLING,
    adjacency: AdjacencyName = rules.ADJACENCY,
    ranks: Ranks = None,
    weights: Weights = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Find the noise that keeps a run within a budget. No data is read.

    With --method also the step sizes at which a sampler's own noise is all the noise that is needed. With --ranks also
    whether several processes would be faster than one. With --report a page that shows epsilon against noise, batch and
    epochs, with what an attacker can do.
    """
    check_budget(epsilon, delta, records)
    if report is not None:
        check_page("--report", report)
    check_ranks(ranks, weights, sampling)
    found = make_plan(
        epsilon=epsilon,
        delta=delta,
        records=records,
        batch=batch,
        epochs=epochs,
        steps=steps,
        clip=clip,
        sampling=sampling,
        adjacency=adjacency,
    )
    values = plan_values(found)
    if method is not None:
        values["step_size"] = step_sizes(found, epsilon, method, friction)
        values["step_size_convention"] = STEP_SIZE_CONVENTION
    if ranks is not None and weights is not None:
        values["ranks"] = ranks_values(weights, found.expected_batch, ranks)
    if report is not None:
        from confide.report.plan_page import render_plan

        report.write_text(render_plan(found), encoding="utf-8")
        values["report"] = str(report)
    if as_json:
        emit_json(values)
        return
    _show(found, values)


def check_budget(epsilon: float, delta: float, records: int) -> None:
    options.epsilon(epsilon)
    options.whole("--records", records, least=2)
    options.delta(delta, records)


def check_ranks(ranks: int | None, weights: int | None, sampling: str) -> None:
    if ranks is None:
        if weights is not None:
            raise CommandError(f"--weights={weights}: is for --ranks; leave it out")
        return
    options.whole("--ranks", ranks, most=1_000_000)
    if weights is None:
        raise CommandError("--weights: missing; --ranks needs the number of weights of the network")
    options.whole("--weights", weights, most=10**15)
    if ranks > 1 and sampling not in ("poisson", "full-batch"):
        raise CommandError(f"--sampling={sampling}: several ranks draw poisson or full-batch; use one of them")


def ranks_values(weights: int, batch: float, ranks: int) -> dict[str, Any]:
    """What the model of a step's cost says; see docs/scaling.md."""
    from confide.distributed.cost import advice, step_cost

    one, each = step_cost(weights, batch), step_cost(weights, batch, ranks)
    return {
        "ranks": ranks,
        "weights": weights,
        "step_seconds_one": one.seconds,
        "step_seconds": each.seconds,
        "times_as_fast": one.seconds / each.seconds,
        "bytes_sent_per_step": each.sent,
        "advice": advice(weights, batch, ranks),
    }


def make_plan(
    *,
    epsilon: float,
    delta: float,
    records: int,
    batch: int | None,
    epochs: float | None,
    steps: int | None,
    clip: float,
    sampling: str,
    adjacency: str,
) -> Plan:
    """`confide.plan` with every option checked under the name it was typed with."""
    from confide.mechanism.plan import plan as calibrate

    kind = options.sampling(sampling)
    options.check_pair(sampling, adjacency)
    check_schedule(records, batch, epochs, steps, full_batch=kind == "full-batch")
    options.number("--clip", clip, above=0, most=1e12)
    return calibrate(
        epsilon=epsilon,
        delta=delta,
        records=records,
        batch=batch,
        epochs=epochs,
        steps=steps,
        clip=clip,
        sampling=kind,
        adjacency=options.adjacency(adjacency),
    )


def check_schedule(
    records: int, batch: int | None, epochs: float | None, steps: int | None, *, full_batch: bool
) -> None:
    if epochs is not None and steps is not None:
        raise CommandError(f"--epochs={epochs:g} and --steps={steps}: give one of the two")
    if epochs is None and steps is None:
        raise CommandError("--epochs: missing; give --epochs E passes over the data or --steps T steps")
    if epochs is not None:
        options.number("--epochs", epochs, above=0, most=1e7)
        if batch and epochs * records / batch > options.MOST_STEPS:
            raise CommandError(
                f"--epochs={epochs:g}: makes more than {options.MOST_STEPS} steps; use fewer or larger batches"
            )
    if steps is not None:
        options.whole("--steps", steps, most=options.MOST_STEPS)
    if full_batch:
        if batch not in (None, records):
            raise CommandError(
                f"--batch={batch}: full-batch uses all {records} records at every step; leave --batch out"
            )
        return
    if batch is None:
        raise CommandError(f"--batch: missing; give the expected records per step, between 1 and {records}")
    if not 1 <= batch <= records:
        raise CommandError(f"--batch={batch}: must be between 1 and the {records} records")


def plan_values(found: Plan) -> dict[str, Any]:
    """The plan for `--json`: the mechanism first, then what it costs."""
    from confide.privacy.statement import Privacy

    mechanism = found.mechanism
    return {
        "noise_multiplier": mechanism.noise_multiplier,
        "rate": mechanism.rate,
        "steps": found.steps,
        "records": found.records,
        "batch": found.expected_batch,
        "clip": mechanism.clip,
        **Privacy(found.events(), found.delta, found.adjacency).to_dict(),
    }


def step_sizes(found: Plan, epsilon: float, method: str, friction: float) -> dict[str, float]:
    """The largest step sizes within the budget, in the convention of `STEP_SIZE_CONVENTION`."""
    from confide.privacy.calibration import step_size_for

    name = options.choice("--method", method, SAMPLERS)
    options.number("--friction", friction, above=0, below=1)
    if found.mechanism.sampling != "poisson":
        raise CommandError(f"--sampling={found.mechanism.sampling}: step sizes are known for poisson sampling only")
    facts: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": found.delta,
        "records": found.records,
        "batch": round(found.expected_batch),
        "steps": found.steps,
        "clip": found.mechanism.clip,
        "method": name,
        "friction": friction,
        "adjacency": found.adjacency,
    }
    fixed = step_size_for(schedule="fixed", **facts)
    decreasing = step_size_for(schedule="decreasing", **facts)
    return {"fixed": fixed.step_size, "decreasing_first": decreasing.step_size, "wang2015": fixed.wang2015}


def _show(found: Plan, values: dict[str, Any]) -> None:
    console = output()
    mechanism = found.mechanism
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    noise = f"[bold]noise multiplier {up(mechanism.noise_multiplier, decimals=4)}[/bold]"
    console.print(f"{noise} for {steps} at rate {mechanism.rate:.6g}")
    console.print()
    show_privacy(console, values)
    if "ranks" in values:
        console.print()
        console.print(values["ranks"]["advice"])
    if "report" in values:
        console.print()
        console.print(f"Written: {escape(one_line(values['report']))}", soft_wrap=True)
    if "step_size" in values:
        console.print()
        console.print(_step_size_table(values["step_size"]))
        console.print(f"for {STEP_SIZE_CONVENTION}", style="dim")


def _step_size_table(sizes: dict[str, float]) -> Table:
    titles = {
        "fixed": "largest fixed step size",
        "decreasing_first": "largest first step size, falling as t^(-1/3)",
        "wang2015": "by Wang, Fienberg and Smola (2015)",
    }
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, size in sizes.items():
        table.add_row(titles[name], f"{size:.4g}")
    return table


def register(app: Any) -> None:
    teach(app, plan, EXAMPLES)
