"""`confide baseline`: expectation propagation without privacy, on records that nobody needs to protect."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import RUN, Json
from confide.cli.output import emit_json, output
from confide.errors import CommandError

EXAMPLES = (
    "confide baseline public.csv --target outcome --facts facts.toml \\\n  --test test.csv --method ep --not-private",
    "confide baseline power_plant --data ~/data --method adf --hidden 50 \\\n  --not-private",
)
METHODS = ("ep", "adf")
PASSES = {"ep": 80, "adf": 40}
"""Until factors stand still, and as many as Hernandez-Lobato and Adams (2015) have."""
DAMPING, BATCH = 0.2, 10
"""A fifth of the way for a factor of EP (docs/protocols.md); records at a time of ADF, whose steps stay small so."""
STAMP = (
    "Not private: no noise, no budget, no statement. The records were read as they are, on the word that they may be."
)

BaselineMethod = Annotated[
    str,
    typer.Option("--method", metavar="NAME", help="ep, with a factor for every record, or adf.", rich_help_panel=RUN),
]
Hidden = Annotated[
    str,
    typer.Option(
        "--hidden",
        metavar="W,W",
        help='Widths of the hidden layers, such as 50; "" for a linear model.',
        rich_help_panel=RUN,
    ),
]
Passes = Annotated[
    int | None,
    typer.Option("--passes", metavar="N", help="Over all records. Rule: 80 for ep, 40 for adf.", rich_help_panel=RUN),
]
NotPrivate = Annotated[
    bool,
    typer.Option("--not-private", metavar="", help="Your word that nobody needs to protect these records. Needed."),
]


def baseline(
    train: given.Train,
    *,
    target: given.Target = None,
    test: given.Test = None,
    facts: given.Facts = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    method: BaselineMethod = "ep",
    hidden: Hidden = "",
    passes: Passes = None,
    not_private: NotPrivate = False,
    seed: Annotated[int, typer.Option("--seed", metavar="K", help="Of the first weights and the order.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure expectation propagation or its filter without privacy, to see what a budget costs.

    EP keeps a factor for every record and ADF walks through them one by one: neither can be private, so they have no
    epsilon, and what they learnt is measured on --test and not written. DP-SEP is the private method of this kind:
    `confide fit --method sep`.
    """
    from confide.cli.records import Records

    if method not in METHODS:
        raise CommandError(f"--method={method}: must be one of {', '.join(METHODS)}")
    if not not_private:
        raise CommandError(
            f"--not-private: missing; {method} protects nobody, so say that nobody needs to protect these records, or "
            "use `confide fit --method sep`, which is private"
        )
    passed = PASSES[method] if passes is None else passes
    options.whole("--passes", passed, least=1, most=10_000)
    options.seed(seed)
    records = Records(train, target, test, facts, assume_public, data, split, options.task(task))
    records.check()
    dataset = records.load()
    if dataset.test is None:
        raise CommandError("--test: missing; what is learnt is measured there and not kept")
    with options.named():
        metrics = _measured(dataset, records, method, options.layers(hidden) or (), passed, seed)
    if as_json:
        emit_json({"method": method, "private": False, "stamp": STAMP, "passes": passed, "metrics": metrics})
        return
    console = output()
    console.print(escape(STAMP), highlight=False)
    for name, value in metrics.items():
        console.print(f"{name}: {value:.4f}")


def _measured(
    dataset: Any, records: Any, method: str, hidden: tuple[int, ...], passes: int, seed: int
) -> dict[str, float]:
    import torch

    from confide.data.schema import Schema
    from confide.methods._baselines import assumed_density_filtering, expectation_propagation
    from confide.models.networks import mlp
    from confide.workflow.facts import settle
    from confide.workflow.measure import check_test, measured
    from confide.workflow.network import likelihood_of, outputs_of
    from confide.workflow.request import Request

    # A request settles facts and encodes; its budget is not used.
    request = Request(
        dataset.train,
        epsilon=1.0,
        facts=dataset.schema or Schema(),
        assume_public=records.assume_public,
        task=records.task,
        hidden=hidden,
    )
    request.check()
    settled = settle(request)
    check_test(dataset.test, settled.encoder)
    generator = torch.Generator().manual_seed(seed)
    module = mlp(settled.features, outputs_of(request, settled.schema), hidden, generator=generator)
    order = torch.randperm(len(settled.y), generator=generator)
    x, y = torch.as_tensor(settled.x)[order].float(), torch.as_tensor(settled.y)[order]
    common: dict[str, Any] = {
        "likelihood": likelihood_of(request, settled.schema, module),
        "passes": passes,
        "generator": generator,
    }
    if method == "ep":
        found = expectation_propagation(module, x, y, damping=DAMPING, start=1 + len(y) / 10, **common)
    else:
        found = assumed_density_filtering(module, x, y, batch=BATCH, **common)
    return measured(found, settled.encoder, dataset.test).metrics()


def register(app: Any) -> None:
    teach(app, baseline, EXAMPLES)
