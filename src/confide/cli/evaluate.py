"""`confide evaluate`: measure a fitted model on records that are public, or on private ones against payment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import DATA, PRIVACY, RUN, AdjacencyName, Json
from confide.cli.output import emit_json, for_this_command, one_line, output
from confide.cli.own_code import OwnModule, saved_run
from confide.cli.paths import check_ledger, ledger_by, same_file
from confide.errors import CommandError

if TYPE_CHECKING:
    from confide.data import Encoder
    from confide.data.table import Table as RawRecords
    from confide.evaluate.private import PrivateScores
    from confide.running.artefacts import SavedRun

EXAMPLES = (
    "confide evaluate out/run hospital.csv --epsilon 0.1 --records 5000 \\\n  --ledger budget.db",
    "confide evaluate out/run published.csv --public",
)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `confide fit` wrote.", show_default=False)
]
Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Records with the columns of the training file.", show_default=False),
]
Public = Annotated[
    bool,
    typer.Option(
        "--public",
        metavar="",
        help="Declare the records public, or separate ones that need no protection: every metric, without noise.",
        rich_help_panel=DATA,
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        metavar="E",
        help="Private records: what this measurement may cost. It adds to what their ledger holds already.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Size = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Private records: their number, if it is public. Left out: counted in the same release.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="A,B",
        help="Private records: some of accuracy, brier, nll, ece; or of rmse, coverage_90. Fewer are less noisy.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]
NllBound = Annotated[
    float,
    typer.Option(
        metavar="B", help="Private records: a negative log-likelihood beyond B counts as B.", rich_help_panel=RUN
    ),
]
ErrorBound = Annotated[
    float | None,
    typer.Option(
        metavar="B",
        help="Private records: an error beyond B counts as B, in units of the target. Left out: half its range.",
        rich_help_panel=RUN,
        show_default=False,
    ),
]


def evaluate(
    directory: Directory,
    data: Data,
    *,
    public: Public = False,
    epsilon: Epsilon = None,
    delta: given.Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    records: Size = None,
    metrics: Metrics = None,
    nll_bound: NllBound = 5.0,
    error_bound: ErrorBound = None,
    module: OwnModule = None,
    secure: given.Secure = False,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    key: given.LedgerKey = None,
    who: given.Who = None,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Measure a fitted model on records that it has not learnt from, or that you pay for.

    Records are private unless you say --public. A metric on private records is released with noise, for --epsilon, and
    charged before a record is read; records that the model has learnt from are charged under the --name of the fit.
    """
    from confide.evaluate.private import CLASS_SCORES, REAL_SCORES, private_scores
    from confide.sources.private_data import PrivateData

    _check_declaration(public, epsilon, data)
    options.number("--nll-bound", nll_bound, above=0, most=1e6)
    if error_bound is not None:
        options.number("--error-bound", error_bound, above=0, most=1e300)
    if not public:
        options.epsilon(epsilon or 0.0)
        options.delta(delta, records)
        options.adjacency(adjacency)
        check_ledger(ledger)
    if records is not None:
        options.whole("--records", records, least=2)
    options.seed(seed)
    for_this_command(ledger_by(ledger, key, who))

    saved, encoder, table = _loaded(directory, data, public, module)
    if public:
        _measure_openly(saved, encoder, table, data, as_json)
        return
    if encoder.schema.targets or encoder.schema.observed:
        raise CommandError(
            f"--epsilon={epsilon:g}: metrics of several targets and of times are not made private; measure on records "
            "that are --public"
        )
    numbers = encoder.schema.classes is None
    unit, reach = (encoder.target_scale, encoder.target_reach) if numbers else (1.0, 1.0)
    names = _asked(metrics, REAL_SCORES if encoder.schema.classes is None else CLASS_SCORES)
    x, y = encoder.training(table)
    found = private_scores(
        saved.posterior,
        PrivateData(
            x,
            y,
            schema=replace(encoder.schema, records=records),
            ledger=ledger,
            name=name or Path(data).name,
            seed=seed,
            read=table,
        ),
        epsilon=epsilon or 0.0,
        delta=delta,
        metrics=names,
        nll_bound=nll_bound,
        error_bound=(reach if error_bound is None else error_bound) / unit,
        adjacency=options.adjacency(adjacency),
        secure=secure,
    )
    _hand_out(found, unit, as_json)


def _check_declaration(public: bool, epsilon: float | None, data: str) -> None:
    if public and epsilon is not None:
        raise CommandError(f"--public and --epsilon={epsilon:g}: public records cost nothing; give one of the two")
    if not public and epsilon is None:
        raise CommandError(
            f"DATA={data}: is private unless you say otherwise, and metrics would publish it; pay for them with "
            "--epsilon E, or declare with --public that these records need no protection"
        )


def _asked(text: str | None, known: tuple[str, ...]) -> list[str] | None:
    if text is None:
        return None
    return [options.choice("--metrics", word.strip(), known) for word in text.split(",")]


def _loaded(directory: Path, data: str, public: bool, module: str | None) -> tuple[SavedRun, Encoder, RawRecords]:
    from confide.data import Encoder, load_table
    from confide.data.roles import arranged

    saved = saved_run(directory, module)
    if saved.encoder is None:
        raise CommandError(
            f"DIR={directory}: its run does not say how records become inputs; fit again with `confide fit`"
        )
    encoder = Encoder.from_dict(saved.encoder)
    table = arranged(load_table(data, part="test", schema=encoder.schema), encoder.schema)
    if table.labels is None:
        raise CommandError(f"DATA={data}: has no target column, so nothing can be measured on it")
    # Of private records none is refused for its label: it counts for nothing.
    if public and encoder.schema.classes is not None and (encoder.targets(table.labels) < 0).any():
        raise CommandError(
            f"DATA={data}: some labels are not among the declared classes; remove those records, or fit with them"
        )
    return saved, encoder, table


def _measure_openly(saved: SavedRun, encoder: Encoder, table: RawRecords, data: str, as_json: bool) -> None:
    from confide.cli import outcome
    from confide.report import PUBLIC
    from confide.workflow.measure import measured

    config = saved.record.get("config")
    trained_on = config.get("train") if isinstance(config, dict) else None
    if isinstance(trained_on, str) and same_file(Path(data), trained_on):
        raise CommandError(f"DATA={data}: is the file that the model has learnt from; pay for it with --epsilon E")
    evaluation = measured(saved.posterior, encoder, table, PUBLIC)
    found = evaluation.metrics()
    if as_json:
        emit_json({"metrics": found, "inputs": evaluation.inputs, "test": PUBLIC})
        return
    console = output()
    console.print(f"Measured on {evaluation.inputs} records ({PUBLIC}; not protected):")
    console.print(outcome.metric_table(found))


def _hand_out(found: PrivateScores, unit: float, as_json: bool) -> None:
    """The scores; errors of regression in units of the target, of which `unit` is half the declared range."""
    from confide.wording import METRICS, measure, measure_spread

    units = {"rmse": unit}
    values = {name: score.value * units.get(name, 1.0) for name, score in found.scores.items()}
    errors = {name: score.standard_error * units.get(name, 1.0) for name, score in found.scores.items()}
    cost = found.privacy.to_dict()
    if as_json:
        counted = {"records": found.records, "counted": found.counted}
        emit_json({"metrics": values, "noise": errors, **counted, **cost, "test": "private, with noise"})
        return
    console = output()
    size = f"about {found.records:.0f} records, counted privately" if found.counted else f"{found.records:.0f} records"
    console.print(f"Measured on {size} (private; ± is the standard deviation of the noise):")
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for metric, value in values.items():
        table.add_row(METRICS[metric].heading, measure(metric, value), measure_spread(metric, errors[metric]))
    console.print(table)
    console.print()
    console.print(escape(one_line(found.privacy.statement(), 5000)))


def register(app: Any) -> None:
    teach(app, evaluate, EXAMPLES)
