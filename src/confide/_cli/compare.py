"""`confide compare`: several methods on one data set with the same budget each, in one table and one report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confide._cli import fit_options as given
from confide._cli import options
from confide._cli.options import OUTPUT, RUN, AdjacencyName, EpsilonGoal, Json, SamplingName
from confide._cli.shell import CommandError, emit_json, one_line, output, progress_bar, remarks
from confide._cli.teaching import teach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confide._cli.training import Model, Schedule, Source
    from confide.comparison import Comparison, Trial
    from confide.data import DataSet, Prepared
    from confide.plan import Plan
    from confide.report import Evaluation

EXAMPLES = (
    "confide compare digits --epsilon 3 --methods all --out out/compare",
    "confide compare train.csv --target income --test test.csv --bounds facts.toml \\\n"
    "  --epsilon 1 --methods sgld,bbp,sgd --out out/compare",
)
MOST_REPEATS = 100
TITLES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "rmse": "RMSE",
    "log_likelihood": "log-lik.",
    "coverage_90": "90% inside",
    "width_90": "width",
    "crps": "CRPS",
}

Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="A,B,C",
        help="The methods, separated by commas, or all that fit the task.",
        rich_help_panel=RUN,
    ),
]
Hidden = Annotated[
    str | None,
    typer.Option(
        metavar="W,W",
        help='Widths of the hidden layers, "" for a linear model. Left out: the public rule of method="auto".',
        rich_help_panel=RUN,
        show_default=False,
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
    bounds: given.Bounds = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    methods: Methods = "all",
    hidden: Hidden = None,
    repeats: Repeats = 1,
    batch: given.Batch = None,
    epochs: given.Epochs = None,
    steps: given.Steps = None,
    clip: given.Clip = 2.0,
    noise_scale: given.NoiseScale = 0.2,
    epsilon: EpsilonGoal,
    delta: given.Delta = 1e-5,
    adjacency: AdjacencyName = "add-remove",
    sampling: SamplingName = "poisson",
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    out: Out = None,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Compare methods on one data set: utility, calibration, time, memory and storage at the same epsilon.

    Every method is fitted to the private records and charged, so k methods cost what k runs compose to; the total is
    stated. Settings come from public rules, never from tuning on the records. The test records are public or separate
    on your word, and a comparison needs them.
    """
    from confide._cli import training
    from confide._cli.fit import layers_of, task_of

    source = training.Source(train, target, test, bounds, assume_public, data, split, task_of(task))
    schedule = training.Schedule(epsilon, delta, batch, epochs, steps, clip, sampling, adjacency)
    training.check_schedule_options(schedule)
    training.check_source(source)
    if out is not None:
        training.check_new_directory("--out", out)
    options.number("--noise-scale", noise_scale, above=0, most=1e6)
    options.whole("--repeats", repeats, most=MOST_REPEATS)
    if seed is not None:
        options.whole("--seed", seed, least=0, most=2**31)
    training.check_ledger(ledger)
    widths = None if hidden is None else layers_of(hidden)
    asked = _asked(methods)

    dataset = training.load(source)
    if dataset.test is None:
        raise CommandError("--test: missing; a comparison is measured on test records that you declare to be public")
    prepared = training.settle(dataset, source, schedule)
    contest = _Contest(source, schedule, dataset, prepared, widths, noise_scale, seed, ledger, name or dataset.name)
    names, not_run = contest.fitting(asked)
    contest.check_budget(len(names) * repeats)
    with _directory(out) as directory, progress_bar(f"{len(names)} methods on {dataset.name}") as progress:
        found = contest.run(names, not_run, repeats, directory, progress)
        summary = {**summary_of(found, contest), "out": None if out is None else str(out)}
        if out is not None:
            _save(found, summary, contest, directory)
    if as_json:
        emit_json(summary)
    else:
        show(output(), found, summary)


def _asked(text: str) -> list[str] | None:
    """The methods by name, each once; None for all."""
    from confide import methods

    if text.strip() == "all":
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise CommandError("--methods: missing; give all, or names separated by commas")
    for name in names:
        options.choice("--methods", name, methods.names())
    return list(dict.fromkeys(names))


@contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    """Where the runs go: a draft beside `out` that is renamed at the end, or a place that is thrown away."""
    parent = None if out is None else out.absolute().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".confide-compare-", dir=parent) as base:
        draft = Path(base) / "comparison"
        draft.mkdir()
        yield draft
        if out is not None:
            draft.rename(out)


class _Contest:
    """The data, the plan and the network that all methods share."""

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        dataset: DataSet,
        prepared: Prepared,
        widths: tuple[int, ...] | None,
        noise_scale: float,
        seed: int | None,
        ledger: Path | None,
        name: str,
    ) -> None:
        from confide._cli import training
        from confide.rules import default_hidden

        self.source, self.schedule, self.dataset, self.prepared = source, schedule, dataset, prepared
        self.noise_scale, self.seed, self.ledger, self.name = noise_scale, seed, ledger, name
        schema = prepared.encoder.schema
        self.task = "regression" if schema.classes is None else "classification"
        self.plan: Plan = training.plan_of(schedule, schema)
        features, outputs = prepared.x[0].size, schema.class_count or 1
        rule = default_hidden(self.plan.records, features, outputs, schedule.epsilon)
        self.widths = rule if widths is None else widths

    def fitting(self, asked: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
        """The methods for this task; one that was asked for by name and is not for it is refused."""
        from confide import methods

        names, not_run = [], {}
        for name in asked or methods.names():
            tasks = getattr(methods.get(name), "tasks", (self.task,))
            if self.task in tasks:
                names.append(name)
            elif asked is None:
                not_run[name] = f"is for {' and '.join(tasks)}"
            else:
                raise CommandError(f"--methods={name}: is for {' and '.join(tasks)}, and this is {self.task}")
        return names, not_run

    def check_budget(self, fits: int) -> None:
        """Refuse before the first fit what the ledger could not pay for in full."""
        from confide.privacy.ledger import Ledger

        if self.ledger is None or not self.ledger.exists():
            return
        with Ledger(self.ledger) as book:
            ceiling, spent = book.ceiling, book.events(self.name)
        if ceiling is None:
            return
        trial = Ledger()
        trial.limit(ceiling.epsilon, ceiling.delta, ceiling.adjacency)
        if spent:
            trial.charge_all(spent, purpose="spent before", dataset=self.name)
        trial.charge_all(self.plan.events() * fits, purpose="comparison", dataset=self.name)

    def run(
        self,
        names: Sequence[str],
        not_run: dict[str, str],
        repeats: int,
        directory: Path,
        progress: Callable[[int, int], None],
    ) -> Comparison:
        from confide.comparison import Comparison, baseline_of, ranked

        trials: list[Trial] = []
        evaluation: Evaluation | None = None
        # A book of one's own shows what was charged, also for a fit that failed after its charge.
        book = self.ledger or directory.parent / "ledger.db"
        spent_before = len(self.charged(book))
        total = len(names) * repeats * self.plan.steps
        for place, (name, turn) in enumerate((name, turn) for name in names for turn in range(repeats)):
            if name in not_run:
                continue
            before = place * self.plan.steps
            try:
                trial, evaluation = self.one(name, turn, directory, book, _offset(progress, before, total))
                trials.append(trial)
            except CommandError as error:
                not_run[name] = str(error).partition(": ")[2]
            except ValueError as error:
                not_run[name] = str(error)
        if not trials or evaluation is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in not_run.items())
            raise CommandError(f"--methods={','.join(names)}: none of them could be fitted ({reasons})")
        utility = "accuracy" if self.task == "classification" else "rmse"
        return Comparison(
            ranked([trial for trial in trials if trial.method not in not_run], utility),
            not_run,
            baseline_of(evaluation),
            utility,
            evaluation.inputs,
            evaluation.source,
            self.charged(book)[spent_before:],
            self.plan.delta,
            self.plan.adjacency,
            self.schedule.epsilon,
            self.seed is not None,
        )

    def charged(self, book: Path) -> tuple[Any, ...]:
        from confide.privacy.ledger import Ledger

        if not book.exists():
            return ()
        with Ledger(book) as ledger:
            return tuple(entry.event for entry in ledger.entries(self.name))

    def one(
        self, name: str, turn: int, directory: Path, book: Path, progress: Callable[[int, int], None]
    ) -> tuple[Trial, Evaluation]:
        """One fit of one method, saved and measured."""
        from confide._cli import training
        from confide._cli.settings import make_method
        from confide.artefacts import POSTERIOR, save_run
        from confide.comparison import peak_memory, trial_of

        model = self.model(make_method(name, (), None), turn)
        with peak_memory() as peak:
            run = training.run_fit(model, self.prepared, self.plan, book, self.name, progress)
        evaluation = training.evaluate(run, self.prepared, self.dataset, self.source)
        assert evaluation is not None  # the command refuses data without a test part
        target = directory / (name if turn == 0 else f"{name}-{turn + 1}")
        config = training.config_of(self.source, model, self.ledger, self.name)
        save_run(run, target, evaluation=evaluation, config=config, encoder=self.prepared.encoder)
        return trial_of(name, evaluation, run.seconds, peak.mb, target / POSTERIOR), evaluation

    def model(self, method: Any, turn: int) -> Model:
        from confide._cli.training import Model

        return Model(method, self.widths, self.noise_scale, None if self.seed is None else self.seed + turn)


def _offset(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)


def summary_of(found: Comparison, contest: _Contest) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "data": contest.dataset.name,
        "task": contest.task,
        "delta": found.delta,
        "adjacency": found.adjacency,
        "epsilon_each": found.epsilon_each,
        "epsilon_total": found.total_epsilon,
        "fits": found.fits,
        "hidden": list(contest.widths),
        "steps": contest.plan.steps,
        "batch": contest.plan.expected_batch,
        "clip": contest.plan.mechanism.clip,
        "noise_multiplier": contest.plan.mechanism.noise_multiplier,
        "test_records": found.inputs,
        "test": found.source,
        "baseline": {found.utility: found.baseline},
        "seeded": found.seeded,
        "rows": [row.flat() for row in found.rows],
        "not_run": [{"method": name, "reason": reason} for name, reason in found.not_run.items()],
    }


def _save(found: Comparison, summary: dict[str, Any], contest: _Contest, directory: Path) -> None:
    import json

    from confide.artefacts import strict
    from confide.report.comparison import render_comparison

    page = render_comparison(found, summary, contest.prepared.encoder.schema)
    (directory / "report.html").write_text(page, encoding="utf-8")
    text = json.dumps(strict(summary), allow_nan=False, indent=2, ensure_ascii=False)
    (directory / "comparison.json").write_text(text + "\n", encoding="utf-8")


def show(console: Console, found: Comparison, summary: dict[str, Any]) -> None:
    """The table, and what it cost."""
    console.print(_table(found))
    console.print()
    console.print(
        f"* the best by {TITLES[found.utility]}; ~ not told from it by {found.inputs} test records ({found.source}; "
        "not protected). ± is one standard error."
    )
    baseline = "most frequent class" if found.utility == "accuracy" else "mean of the test records"
    console.print(f"Without learning, the {baseline} gives {TITLES[found.utility]} {found.baseline:.4f}.")
    for name, reason in found.not_run.items():
        console.print(escape(one_line(f"{name} did not run: {reason}")))
    console.print()
    console.print(escape(cost_sentence(found)))
    if summary["out"]:
        console.print(f"Written to {escape(one_line(summary['out']))}: report.html, comparison.json")
    else:
        remarks().print("Add --out DIR for the report and the fitted models.")


def cost_sentence(found: Comparison) -> str:
    if found.seeded:
        return "Seeded: no privacy claim. The noise can be computed by anyone who knows the seed."
    return (
        f"Each fit alone costs epsilon {found.epsilon_each:g}. Comparing reads the records once per fit: the "
        f"{found.fits} fits of this table together cost epsilon {_upward(found.total_epsilon)} at delta "
        f"{found.delta:g}, and that is what was spent."
    )


def _upward(epsilon: float) -> str:
    import math

    return f"{math.ceil(epsilon * 1e3 * (1 - 1e-12)) / 1e3:.3f}" if math.isfinite(epsilon) else "infinite"


def _table(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    columns = [name for name in found.columns if name not in ("brier", "width_90")]  # these stand in the report
    for name in (*(TITLES[column] for column in columns), "time", "memory", "stored"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        mark = " *" if row.best else " ~" if row.as_good else ""
        cells = [_cell(row.metrics[name], row.errors.get(name), name == found.utility) for name in columns]
        peak = "-" if row.peak_mb is None else f"{row.peak_mb:.0f} MB"
        numbers = (f"{row.seconds:.1f} s", peak, f"{row.storage_mb * 1024:.0f} kB")
        table.add_row(row.method + mark, *cells, *numbers, style="bold" if row.best else "")
    return table


def _cell(value: float, error: float | None, with_error: bool) -> str:
    text = f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"
    return f"{text} ±{error:.2g}" if with_error and error is not None else text


def register(app: Any) -> None:
    teach(app, compare, EXAMPLES)
