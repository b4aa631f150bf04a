"""`confide mixture`: where the components of a mixture of Gaussians stand, by private EM or expectation propagation."""

from __future__ import annotations

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
    "confide mixture train.csv --facts facts.toml --components 4 \\\n  --epsilon 1 --out out/mixture",
    "confide mixture train.csv --facts facts.toml --components 4 \\\n  --method sep --epsilon 1 --out out/mixture",
)
METHODS = ("em", "sep")
SCALE, SPREAD = 0.25, 0.6
"""Of a component and of the prior on its mean, where declared bounds are [-1, 1]: an even spread over them has 0.58."""
STEPS, BATCH_SHARE = 100, 0.1
"""Ten passes over the records: a mixture of few components stands still long before."""
MOST_COMPONENTS = 100  # More would each have a part of the records that noise hides.

FactsFile = Annotated[
    Path,
    typer.Option("--facts", metavar="FILE", help="Public facts: records, and bounds of every column.", exists=True),
]
Components = Annotated[int, typer.Option("--components", metavar="K", help="Components of the mixture.")]
MixtureMethod = Annotated[
    str,
    typer.Option("--method", metavar="NAME", help="em, or sep for a posterior of every mean.", rich_help_panel=RUN),
]
Scale = Annotated[
    float,
    typer.Option(
        "--scale",
        metavar="S",
        help="Standard deviation of a component, where declared bounds are scaled to [-1, 1].",
        rich_help_panel=RUN,
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", help="Releases, each of a tenth.", rich_help_panel=RUN)]


def mixture(
    train: given.Train,
    *,
    facts: FactsFile,
    components: Components,
    method: MixtureMethod = "em",
    scale: Scale = SCALE,
    steps: Steps = STEPS,
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
    """Learn where the components of a mixture of Gaussians stand: no target, numbers only.

    Components have one known scale and equal weights. DIR receives the posterior of their means and run.json with the
    privacy statement; the means are shown in the columns' own units. EP and ADF cannot be private: `confide papers run
    dp-sep` compares with them on a mixture, `confide baseline` on networks.
    """
    options.whole("--components", components, least=1, most=MOST_COMPONENTS)
    options.whole("--steps", steps, least=1, most=100_000)
    options.number("--scale", scale, above=0, most=2)
    options.seed(seed)
    if method not in METHODS:
        raise CommandError(f"--method={method}: must be one of {', '.join(METHODS)}")
    check_new_directory("--out", out)
    for_this_command(ledger_by(ledger, key, who))
    check_ledger(ledger)
    with options.named():
        run, encoder = _fitted(
            Path(train),
            facts,
            (components, method, scale, steps),
            {"epsilon": epsilon, "delta": delta, "adjacency": options.adjacency(adjacency)},
            {"ledger": ledger, "name": name or Path(train).name, "seed": seed},
        )
    found = _saved(run, encoder, components, out)
    if as_json:
        emit_json(found)
        return
    console = output()
    for place, mean in enumerate(found["means"]):
        told = ", ".join(f"{column} {value:.4g}" for column, value in mean.items())
        console.print(escape(f"component {place + 1}: {told}"), highlight=False)
    console.print(escape(run.privacy.statement()), highlight=False)
    console.print(f"Written: {escape(str(out))}")


def _fitted(
    train: Path, facts: Path, model: tuple[int, str, float, int], budget: dict[str, Any], source: dict[str, Any]
) -> tuple[Any, Any]:
    """The run, and the encoder of its columns: both follow from declared facts."""
    import torch

    from confide.data import Schema, load_table
    from confide.data.preprocessing import Encoder
    from confide.expectation.mixture import MixtureOfGaussians
    from confide.mechanism.plan import plan
    from confide.methods.em import EM
    from confide.methods.sep import SEP
    from confide.running.fit import fit
    from confide.sources.private_data import PrivateData
    from confide.workflow.facts import assumptions_of

    schema = Schema.from_toml(facts)
    if schema.records is None:
        raise CommandError(f"--facts={facts}: declares no records; a mixture needs their nominal number")
    if not schema.columns or any(column.bounds is None or column.width != 1 for column in schema.columns):
        raise CommandError(f"--facts={facts}: a mixture takes columns of numbers, each with bounds, and no others")
    components, method, scale, steps = model
    table = load_table(train, part="train", schema=schema, target_required=False)
    encoder = Encoder(schema, "flat", "unit")
    x = torch.as_tensor(encoder.private_features(table)).double()
    module = MixtureOfGaussians(
        components, x.shape[1], scale=scale, spread=SPREAD, generator=_generator(torch, source["seed"])
    )
    batch = max(1, round(BATCH_SHARE * schema.records))
    made = plan(records=schema.records, batch=batch, steps=steps, clip=rules.CLIP, **budget)
    data = PrivateData(
        x,
        torch.zeros(len(x)),
        schema=Schema(records=schema.records),
        vouched=assumptions_of(schema),
        read=table,
        **source,
    )
    return fit(EM() if method == "em" else SEP(), module, data, made, seed=source["seed"]), encoder


def _generator(torch: Any, seed: int | None) -> Any:
    found = torch.Generator()
    if seed is None:
        found.seed()
    else:
        found.manual_seed(seed)
    return found


def _saved(run: Any, encoder: Any, components: int, out: Path) -> dict[str, Any]:
    from confide.running.artefacts import save_posterior

    about = {"method": {"name": run.method.name, "parameters": {"components": components, "steps": run.plan.steps}}}
    save_posterior(run.posterior, run.privacy, run.schema, out, about=about)
    columns = encoder.schema.columns
    means = run.posterior.mean().reshape(components, len(columns)).clamp(-1, 1).tolist()
    return {
        "means": [
            {column.name: _in_units(value, *column.bounds) for column, value in zip(columns, mean, strict=True)}
            for mean in means
        ],
        "privacy": run.privacy.to_dict(),
        "statement": run.privacy.statement(),
        "out": str(out),
    }


def _in_units(value: float, low: float, high: float) -> float:
    return low + (value + 1) / 2 * (high - low)


def register(app: Any) -> None:
    teach(app, mixture, EXAMPLES)
