"""`confide fit`: learn a posterior from private records, and write it down with its privacy statement."""

from __future__ import annotations

from typing import Any

from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import aligned, teach
from confide.cli.options import AdjacencyName, EpsilonGoal, Json, SamplingName
from confide.cli.output import emit_json, output, progress_bar
from confide.cli.settings import descriptions, make_method
from confide.errors import CommandError

EXAMPLES = (
    "confide fit digits --method sgld --epsilon 3 --delta 1e-4 --out out/digits",
    "confide fit train.csv --target income --bounds facts.toml --test test.csv \\\n  --epsilon 1 --out out/run",
)
MOST_UNITS = 100_000


def fit(
    train: given.Train,
    *,
    target: given.Target = None,
    test: given.Test = None,
    bounds: given.Bounds = None,
    assume_public: given.AssumePublic = False,
    task: given.TaskName = None,
    data: given.DataDirectory = None,
    split: given.Split = None,
    method: given.MethodName = "sgld",
    hidden: given.Hidden = "",
    batch: given.Batch = None,
    epochs: given.Epochs = None,
    steps: given.Steps = None,
    clip: given.Clip = 2.0,
    prior_scale: given.PriorScale = None,
    noise_scale: given.NoiseScale = None,
    setting: given.Settings = None,
    epsilon: EpsilonGoal,
    delta: given.Delta = 1e-5,
    adjacency: AdjacencyName = "add-remove",
    sampling: SamplingName = "poisson",
    secure: given.Secure = False,
    ledger: given.LedgerFile = None,
    name: given.DataName = None,
    out: given.Out,
    seed: given.Seed = None,
    as_json: Json = False,
) -> None:
    """Learn a Bayesian model from private records within a privacy budget.

    Everything is checked first, then the whole run is charged, and only then is a record used. DIR receives the
    posterior, a record of the run and a report. Of a run that fails nothing is written there; what was paid for is
    kept, and if the report cannot be written, the posterior is.
    """
    from confide.cli import outcome, training

    source = training.Source(train, target, test, bounds, assume_public, data, split, task_of(task))
    schedule = training.Schedule(epsilon, delta, batch, epochs, steps, clip, sampling, adjacency)
    model = training.model_of(make_method(method, setting or (), prior_scale), layers_of(hidden), noise_scale, seed)
    training.check_schedule_options(schedule)
    training.check_source(source)
    training.check_new_directory("--out", out)
    training.check_noise_scale(noise_scale)
    if seed is not None:
        options.whole("--seed", seed, least=0, most=2**31)
    training.check_ledger(ledger)

    dataset = training.load(source)
    prepared = training.settle(dataset, source, schedule)
    schema = prepared.encoder.schema
    histogram = training.histogram_of(model, schedule, schema, secure)
    plan = training.plan_of(schedule, schema, () if histogram is None else (histogram.event(),))
    plan = plan.secured() if secure else plan
    charged_as = name or dataset.name
    with progress_bar(f"{method} on {dataset.name}") as progress:
        run = training.run_fit(model, prepared, plan, ledger, charged_as, progress, histogram)
    config = training.config_of(source, model, ledger, charged_as)
    evaluation, summary = outcome.save(
        run, out, lambda: training.evaluate(run, prepared, dataset, source), config, prepared.encoder
    )
    if as_json:
        emit_json(summary)
    else:
        outcome.show(output(), run, summary, evaluation)


def layers_of(text: str) -> tuple[int, ...]:
    """The widths in "64,64"; none for a linear model."""
    if not text.strip():
        return ()
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--hidden={text}: must be whole numbers separated by commas, such as 64,64") from None
    if min(widths) < 1 or sum(widths) > MOST_UNITS:
        raise CommandError(f"--hidden={text}: every width must be at least 1, and all together at most {MOST_UNITS}")
    return widths


def task_of(name: str | None) -> Any:
    return None if name is None else options.choice("--task", name, ("classification", "regression"))


def register(app: Any) -> None:
    teach(app, fit, EXAMPLES, closing=f"Methods, with the settings that --set takes:\n{aligned(descriptions())}")
