"""`confide compare`: several methods on one data set with the same budget each, in one table and one report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.comparison_table import show
from confide.cli.help_texts import teach
from confide.cli.options import OUTPUT, RUN, AdjacencyName, EpsilonGoal, Json, SamplingName
from confide.cli.output import emit_json, output, progress_bar
from confide.errors import BudgetExceeded, CommandError, Unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confide.cli.training import Model, Schedule, Source
    from confide.data import DataSet, Prepared
    from confide.mechanism.gaussian import SampledGaussian
    from confide.mechanism.plan import Plan
    from confide.privacy.events import Event
    from confide.report import Evaluation
    from confide.workflow.compare import Comparison, Trial

EXAMPLES = (
    "confide compare digits --epsilon 3 --methods all --out out/compare",
    "confide compare train.csv --target income --test test.csv --bounds facts.toml \\\n"
    "  --epsilon 1 --methods sgld,bbp,sgd --out out/compare",
)
MOST_REPEATS = 100
DEFAULT_METHOD = "sgld"  # whose plan stands for that of the others, which differ from it in their noise alone

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
    noise_scale: given.NoiseScale = None,
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
    from confide.cli import training
    from confide.cli.fit import layers_of, task_of

    source = training.Source(train, target, test, bounds, assume_public, data, split, task_of(task))
    schedule = training.Schedule(epsilon, delta, batch, epochs, steps, clip, sampling, adjacency)
    training.check_schedule_options(schedule)
    training.check_source(source)
    if out is not None:
        training.check_new_directory("--out", out)
    training.check_noise_scale(noise_scale)
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
    contest.check_budget(names, repeats)
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
    """Where the runs go: a draft beside `out` that is renamed at the end, or a place that is thrown away.

    Runs that are paid for are kept whatever happens after them.
    """

    parent = None if out is None else out.absolute().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".confide-compare-", dir=parent) as base:
        draft = Path(base) / "comparison"
        draft.mkdir()
        try:
            yield draft
        except BaseException as error:
            if out is None or not any(draft.iterdir()):
                raise
            draft.rename(out)
            if isinstance(error, BudgetExceeded) or not isinstance(error, Exception):
                raise
            message = f"--out={out}: could not be finished ({error}); the runs that were paid for are in it"
            raise Unfinished(message, out) from error
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
        noise_scale: float | None,
        seed: int | None,
        ledger: Path | None,
        name: str,
    ) -> None:
        from confide.workflow.rules import default_hidden

        self.source, self.schedule, self.dataset, self.prepared = source, schedule, dataset, prepared
        self.noise_scale, self.seed, self.ledger, self.name = noise_scale, seed, ledger, name
        schema = prepared.encoder.schema
        self.task = "regression" if schema.classes is None else "classification"
        self._plans: dict[SampledGaussian | None, Plan] = {}
        features, outputs = prepared.x[0].size, schema.class_count or 1
        assert schema.records is not None  # `prepare` refuses a schema without it
        rule = default_hidden(schema.records, features, outputs, schedule.epsilon)
        self.widths = rule if widths is None else widths
        self.histogram, self.plan = self.priced(self.model(DEFAULT_METHOD))

    def priced(self, model: Model) -> tuple[SampledGaussian | None, Plan]:
        """What one fit releases: the histogram of residuals, if the method needs one, and the steps."""
        from confide.cli import training

        schema = self.prepared.encoder.schema
        histogram = training.histogram_of(model, self.schedule, schema)
        if histogram not in self._plans:
            spent = () if histogram is None else (histogram.event(),)
            self._plans[histogram] = training.plan_of(self.schedule, schema, spent)
        return histogram, self._plans[histogram]

    def fitting(self, asked: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
        """The methods for this task; one that was asked for by name and is not for it is refused."""
        from confide import methods

        names, not_run = [], {}
        for name in asked or methods.names():
            tasks = methods.get(name).tasks
            if self.task in tasks:
                names.append(name)
            elif asked is None:
                not_run[name] = f"is for {' and '.join(tasks)}"
            else:
                raise CommandError(f"--methods={name}: is for {' and '.join(tasks)}, and this is {self.task}")
        return names, not_run

    def check_budget(self, names: Sequence[str], repeats: int) -> None:
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
        trial.charge_all(self.events(names) * repeats, purpose="comparison", dataset=self.name)

    def events(self, names: Sequence[str]) -> tuple[Event, ...]:
        """What one fit of each of the methods costs."""
        found: list[Event] = []
        for name in names:
            histogram, plan = self.priced(self.model(name))
            found += [*([] if histogram is None else [histogram.event()]), *plan.events()]
        return tuple(found)

    def run(
        self,
        names: Sequence[str],
        not_run: dict[str, str],
        repeats: int,
        directory: Path,
        progress: Callable[[int, int], None],
    ) -> Comparison:
        from confide.workflow.compare import Comparison, baseline_of, ranked

        trials: list[Trial] = []
        evaluation: Evaluation | None = None
        # A book of one's own shows what was charged, also for a fit that failed after its charge.
        book = self.ledger or directory.parent / "ledger.db"
        spent_before = len(self.charged(book))
        total = len(names) * repeats * self.plan.steps
        self.warm_up()
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

    def warm_up(self) -> None:
        """One step on made-up records: what is loaded once for all methods is not counted as the first one's memory."""
        from dataclasses import replace

        import numpy as np

        from confide.cli.training import run_fit

        x, y = (np.zeros((2, *part.shape[1:]), part.dtype) for part in (self.prepared.x, self.prepared.y))
        plan = replace(self.plan, blocks=((self.plan.mechanism, 1),))
        run_fit(self.model(DEFAULT_METHOD), replace(self.prepared, x=x, y=y), plan, None, "", lambda *_: None)

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
        from confide.cli import training
        from confide.running.artefacts import POSTERIOR, save_run
        from confide.workflow.compare import peak_memory, trial_of

        model = self.model(name, turn)
        histogram, plan = self.priced(model)
        with peak_memory() as peak:
            run = training.run_fit(model, self.prepared, plan, book, self.name, progress, histogram)
        evaluation = training.evaluate(run, self.prepared, self.dataset, self.source)
        assert evaluation is not None  # the command refuses data without a test part
        target = directory / (name if turn == 0 else f"{name}-{turn + 1}")
        config = training.config_of(self.source, model, self.ledger, self.name)
        try:
            save_run(run, target, evaluation=evaluation, config=config, encoder=self.prepared.encoder)
        except Unfinished as error:
            if error.kept != target:  # else the model is there, and only its own report is not
                raise
        return trial_of(name, evaluation, run.seconds, peak.mb, target / POSTERIOR), evaluation

    def model(self, name: str, turn: int = 0) -> Model:
        from confide.cli.settings import make_method
        from confide.cli.training import model_of

        seed = None if self.seed is None else self.seed + turn
        return model_of(make_method(name, (), None), self.widths, self.noise_scale, seed)


def _offset(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(before + done, total)


def summary_of(found: Comparison, contest: _Contest) -> dict[str, Any]:
    """What `--json` prints."""
    from confide.workflow.noise import SHARE

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
        "noise_scale": contest.noise_scale if contest.histogram is None else "learnt",
        "noise_scale_epsilon": None if contest.histogram is None else SHARE * found.epsilon_each,
        "test_records": found.inputs,
        "test": found.source,
        "baseline": {found.utility: found.baseline},
        "seeded": found.seeded,
        "rows": [row.flat() for row in found.rows],
        "not_run": [{"method": name, "reason": reason} for name, reason in found.not_run.items()],
    }


def _save(found: Comparison, summary: dict[str, Any], contest: _Contest, directory: Path) -> None:
    from confide.report.comparison import render_comparison
    from confide.wording import json_text

    (directory / "comparison.json").write_text(json_text(summary, pretty=True), encoding="utf-8")
    page = render_comparison(found, summary, contest.prepared.encoder.schema)
    (directory / "report.html").write_text(page, encoding="utf-8")


def register(app: Any) -> None:
    teach(app, compare, EXAMPLES)
