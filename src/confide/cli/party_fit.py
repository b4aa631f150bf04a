"""`confide party fit`: one fit over the parties of several owners, asked through their sockets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.options import DATA, OUTPUT, PRIVACY, RUN, EpsilonGoal, Json
from confide.cli.output import emit_json, one_line, output, progress_bar
from confide.cli.paths import check_new_directory
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.federated import Federation
    from confide.running.fit import Run

EXAMPLE = "confide party fit north=north.sock south=south.sock --epsilon 1 --out out/run"

Parties = Annotated[
    list[str],
    typer.Argument(metavar="NAME=SOCKET", help="The parties by name, with their sockets.", show_default=False),
]
TrustName = Annotated[
    str,
    typer.Option(
        "--trust",
        metavar="T",
        help="nobody: every party adds noise for its own epsilon. sum: a secure sum of parties that know each other.",
        rich_help_panel=PRIVACY,
    ),
]
LevelName = Annotated[
    str,
    typer.Option(
        "--level",
        metavar="L",
        help="What is protected. record: one record of a party. client: everything that a party holds, for very many "
        "parties; every one answers every step.",
        rich_help_panel=PRIVACY,
    ),
]
Missing = Annotated[
    int | None,
    typer.Option(
        metavar="A",
        help="How many parties may be missing at a step, where nobody is trusted; 0 if left out.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
Spare = Annotated[
    int,
    typer.Option(
        metavar="T",
        help="Steps of a secure sum that are paid for, within epsilon, in place of those that a missing party spoils.",
        rich_help_panel=RUN,
    ),
]
Local = Annotated[
    int,
    typer.Option(
        metavar="L",
        help="Steps that every party makes by itself before it hears of the others: methods sep, for networks, and "
        "bbp, with --trust nobody. Fewer messages at the same price.",
        rich_help_panel=RUN,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="S", help="Seconds within which a party must reply.", rich_help_panel=RUN),
]
SharedKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The key that the parties were started with, where they have one.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="New directory for posterior.safetensors, run.json and report.html.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]


def fit(
    parties: Parties,
    *,
    method: given.MethodName = "auto",
    hidden: given.Hidden = None,
    batch: given.Batch = None,
    epochs: given.Epochs = None,
    steps: given.Steps = None,
    clip: given.Clip = None,
    setting: given.Settings = None,
    missing: Missing = None,
    spare: Spare = 0,
    local: Local = 1,
    timeout: Timeout = 60.0,
    epsilon: EpsilonGoal,
    delta: given.Delta = rules.DELTA,
    trust: TrustName = "nobody",
    level: LevelName = "record",
    key: SharedKey = None,
    out: Out,
    as_json: Json = False,
) -> None:
    """Learn one model from the records of several owners, who are asked through their parties.

    Every party tries the run first, then every party charges its own ledger, and only then is a record used. The model
    is one of confide's own networks; what the parties declare about their records must be the same but for its number.
    """
    from confide.cli.settings import make_method

    places = _places(parties)
    chosen = make_method(method, setting or (), None)
    widths = options.layers(hidden)
    values = options.plan_options(epsilon, delta, batch, epochs, steps, clip, "poisson", rules.ADJACENCY, None)
    options.number("--timeout", timeout, above=0, most=1e6)
    how = {"trust": options.choice("--trust", trust, ("nobody", "sum")), "missing": missing, "spare": spare}
    how["local"] = local
    how["level"] = options.choice("--level", level, ("record", "client"))
    if level == "client" and batch is not None:
        raise CommandError(f"--batch={batch}: with --level client every party answers every step; leave it out")
    check_new_directory("--out", out)
    from confide.data.fingerprint import read_key
    from confide.federated import Federation, Sockets

    shared = None if key is None else dict.fromkeys(places, read_key(key))
    with options.named(), Sockets(places, timeout) as courier:
        found = _fitted(Federation(courier, keys=shared, **how), chosen, widths, values)
    found.save(out)
    said = {"out": str(out), "parties": list(places), "epsilon": found.privacy.epsilon(), "delta": found.privacy.delta}
    if as_json:
        emit_json({**said, "method": chosen.name, "trust": how["trust"], "steps": found.plan.steps})
        return
    output().print(found.privacy.statement(), soft_wrap=True)
    output().print(f"Written: {one_line(str(out))}", soft_wrap=True)


def _places(parties: list[str]) -> dict[str, str]:
    places: dict[str, str] = {}
    for text in parties:
        name, separator, place = text.partition("=")
        if not separator or not name or not place or name in places:
            raise CommandError(f"NAME=SOCKET={text}: must have the form north=north.sock, each name once")
        places[name] = place
    return places


def _fitted(data: Federation, method: Any, hidden: tuple[int, ...] | None, values: dict[str, Any]) -> Run:
    """The fit, with what was left open filled in by the public rules."""
    from confide.mechanism.plan import plan
    from confide.models.likelihoods import Gaussian
    from confide.models.networks import mlp
    from confide.running.fit import fit as fit_federated

    facts, whole = data.schema, data.level == "client"
    records, features = facts.records or 0, data.features
    outputs = facts.class_count or 1
    options.delta(values["delta"], records)
    if hidden is None:
        hidden = rules.default_hidden(records, features, outputs, values["epsilon"], regression=facts.classes is None)
    made = plan(
        epsilon=values["epsilon"],
        delta=values["delta"],
        records=records,
        **({"sampling": "full-batch"} if whole else {"batch": values["batch"] or rules.default_batch(records)}),
        steps=values["steps"],
        epochs=values["epochs"] or (rules.EPOCHS if values["steps"] is None else None),
        clip=values["clip"] or rules.CLIP,
    )
    likelihood = Gaussian(rules.NOISE_SCALE) if facts.classes is None else None
    with progress_bar(f"{method.name} over {data.name}") as progress:
        return fit_federated(
            method, mlp(features, outputs, hidden), data, made, likelihood=likelihood, progress=progress
        )
