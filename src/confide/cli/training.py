"""From files and options to a finished run, in the order that keeps data and budget safe:

check     every option and every path, before any file is opened
load      the records, and settle which facts about them are public
plan      the noise, from public sizes
charge    the ledger, then fit: no record is used before it is paid for
save      all results at once, so that a failure leaves nothing behind
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from confide.cli import options
from confide.cli.plan import make_plan
from confide.data import DataSet, Prepared, Schema, catalogue, load_dataset, load_table, prepare
from confide.data.embedded import NAMES as EMBEDDED
from confide.data.schema import Task
from confide.errors import CommandError
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.models.likelihoods import Gaussian
from confide.models.networks import MLP, Recipe
from confide.models.predictive import RealPredictive
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.report import PUBLIC, SEPARATE, Evaluation
from confide.running.fit import Run, default_likelihood
from confide.sources.private_data import PrivateData
from confide.workflow.noise import fit_learning_noise, histogram_for
from confide.workflow.rules import (
    DEFAULT_NOISE_SCALE,
    assumptions_of,
    default_batch,
    default_epochs,
    generator_of,
    in_units,
    weight_count,
)

MOST_PARAMETERS = 10**7


@dataclass(frozen=True)
class Source:
    """Where the records are, and whose word the public facts about them are."""

    train: str
    target: str | None
    test: Path | None
    bounds: Path | None
    assume_public: bool
    directory: Path | None
    split: int | None
    task: Task | None

    @property
    def is_benchmark(self) -> bool:
        return self.train in catalogue.names()

    @property
    def has_own_facts(self) -> bool:
        return self.is_benchmark or self.train in EMBEDDED


@dataclass(frozen=True)
class Schedule:
    """The typed part of the plan; None is filled in by the public rule."""

    epsilon: float
    delta: float
    batch: int | None
    epochs: float | None
    steps: int | None
    clip: float
    sampling: str
    adjacency: str


@dataclass(frozen=True)
class Model:
    """What is fitted: the method, the hidden layers, the noise of a regression target, and a seed for tests.

    noise_scale   as typed; None: learnt from the records, and paid for
    """

    method: Any
    hidden: tuple[int, ...]
    noise_scale: float | None
    seed: int | None


def model_of(method: Any, hidden: tuple[int, ...], noise_scale: float | None, seed: int | None) -> Model:
    """The model; a method that would learn the noise of the target by itself keeps to a noise that was typed."""
    if noise_scale is not None and method.learns_noise:
        method = method.with_given_noise()
    return Model(method, hidden, noise_scale, seed)


def check_noise_scale(noise_scale: float | None) -> None:
    if noise_scale is not None:
        options.number("--noise-scale", noise_scale, above=0, most=1e6)


def check_schedule_options(schedule: Schedule) -> None:
    """What can be said about the plan before the number of records is known."""
    options.epsilon(schedule.epsilon)
    options.delta(schedule.delta)
    options.number("--clip", schedule.clip, above=0, most=1e12)
    options.sampling(schedule.sampling)
    options.adjacency(schedule.adjacency)
    options.check_pair(schedule.sampling, schedule.adjacency)
    if schedule.epochs is not None and schedule.steps is not None:
        raise CommandError(f"--epochs={schedule.epochs:g} and --steps={schedule.steps}: give one of the two")
    if schedule.batch is not None:
        options.whole("--batch", schedule.batch)


def check_source(source: Source) -> None:
    """What can be said about the source before a file is opened."""
    if source.is_benchmark and source.directory is None and not os.environ.get(catalogue.ENVIRONMENT):
        raise CommandError(f"--data: missing; {source.train} is read from a directory of yours, named by --data DIR")
    if source.split is not None and not source.is_benchmark:
        raise CommandError(f"--split={source.split}: {source.train} has no published splits; leave it out")
    if source.test is not None and same_file(source.test, source.train):
        raise CommandError(
            f"--test={source.test}: is the training file; what is measured on private records would publish them"
        )
    if source.bounds is None and not source.assume_public and not source.has_own_facts:
        raise CommandError(
            "--bounds: missing; declare the public facts in a file with --bounds FILE.toml, or say with "
            "--assume-public that the ranges of the columns, the classes and the number of records are public"
        )


def same_file(one: Path, other: str) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def check_new_directory(option: str, path: Path) -> None:
    """The results overwrite nothing, and can be written once the budget is spent."""
    if not path.name or path.name == "..":
        raise CommandError(f"{option}={path}: must name a new directory")
    if os.path.lexists(path):
        raise CommandError(f"{option}={path}: exists already; name a new directory")
    check_writable(option, path)


def check_writable(option: str, path: Path) -> None:
    parent = path.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not _takes_files(parent):
        raise CommandError(f"{option}={path}: {parent} is not a directory that can be written to")


def _takes_files(directory: Path) -> bool:
    """Whether a file can be written there. Permissions alone do not tell: disks are full, or mounted read-only."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".confide-", dir=directory) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError:
        return False
    return True


def check_ledger(path: Path | None) -> None:
    """An existing ledger must be sound; a new one is made only when it is charged."""
    if path is None:
        return
    if path.exists():
        Ledger(path).close()
    elif not path.absolute().parent.is_dir():
        raise CommandError(f"--ledger={path}: the folder {path.absolute().parent} does not exist; create it first")
    else:
        check_writable("--ledger", path)


def load(source: Source) -> DataSet:
    """The records, their test part if there is one, and the facts that were declared or come with them."""
    declared = None if source.bounds is None else Schema.from_toml(source.bounds)
    target = source.target or (declared.target if declared else None)
    if source.is_benchmark:
        found = catalogue.load(source.train, source.directory)
        found = found.split(source.split or 0) if found.splits else found
    elif target is None and not source.has_own_facts and not source.train.lower().endswith(".npz"):
        raise CommandError("--target: missing; name the column to predict")
    else:
        found = load_dataset(source.train, target, schema=declared)
    facts = declared or found.schema
    if source.has_own_facts and source.target is not None and facts is not None and source.target != facts.target:
        raise CommandError(f"--target={source.target}: the target of {source.train} is {facts.target}; leave it out")
    held_out = found.test
    if source.test is not None:
        held_out = load_table(source.test, target or found.train.target, part="test", schema=facts)
    return DataSet(found.name, found.train, held_out, facts)


def settle(dataset: DataSet, source: Source, schedule: Schedule) -> Prepared:
    """Fix the public facts, check the records for the curator and encode them."""
    prepared = prepare(dataset, assume_public=source.assume_public, task=source.task)
    schema = prepared.encoder.schema
    if schedule.sampling in ("fixed-size", "shuffle") and schema.records != dataset.train.rows:
        raise CommandError(
            f"--sampling={schedule.sampling}: makes the number of records public, so it must be declared exactly; "
            "poisson keeps it private"
        )
    if dataset.test is not None:
        _check_test(dataset, prepared)
    return prepared


def _check_test(dataset: DataSet, prepared: Prepared) -> None:
    if prepared.y_test is None:
        raise CommandError("--test: has no target column, so nothing can be measured on it; leave it out")
    if prepared.encoder.schema.classes is not None and (prepared.y_test < 0).any():
        raise CommandError(
            "--test: some labels are not among the declared classes; declare them, or remove those records"
        )


def histogram_of(model: Model, schedule: Schedule, schema: Schema, secure: bool = False) -> SampledGaussian | None:
    """The release that the noise of a regression target is learnt from; None where nothing needs one."""
    if schema.classes is not None or model.noise_scale is not None:
        return None
    adjacency = options.adjacency(schedule.adjacency)
    return histogram_for(model.method, schedule.epsilon, schedule.delta, adjacency, secure)


def plan_of(schedule: Schedule, schema: Schema, spent: Iterable[Event] = ()) -> Plan:
    """The calibrated plan, with the rule's values where none were typed; `spent` shares its epsilon."""
    records = schema.records
    assert records is not None  # `prepare` refuses a schema without it
    options.delta(schedule.delta, records)
    batch, epochs = schedule.batch, schedule.epochs
    if batch is None and schedule.sampling != "full-batch":
        batch = default_batch(records)
    if epochs is None and schedule.steps is None:
        epochs = default_epochs(records)
    return make_plan(
        epsilon=schedule.epsilon,
        delta=schedule.delta,
        records=records,
        batch=batch,
        epochs=epochs,
        steps=schedule.steps,
        clip=schedule.clip,
        sampling=schedule.sampling,
        adjacency=schedule.adjacency,
        spent=spent,
    )


def run_fit(
    model: Model,
    prepared: Prepared,
    plan: Plan,
    ledger: Path | None,
    name: str,
    progress: Callable[[int, int], None],
    histogram: SampledGaussian | None = None,
) -> Run:
    """Charge and fit; with a histogram, learn the noise of the target too."""
    schema = prepared.encoder.schema
    module = make_network(model, prepared)
    scale = DEFAULT_NOISE_SCALE if model.noise_scale is None else model.noise_scale
    likelihood = Gaussian(scale) if schema.classes is None else default_likelihood(module, schema)
    data = PrivateData(prepared.x, prepared.y, schema=schema, ledger=ledger, name=name, seed=model.seed)
    rest: dict[str, Any] = {"likelihood": likelihood, "seed": model.seed, "progress": progress}
    run = fit_learning_noise(model.method, module, data, plan, histogram, **rest)
    _check_finite(run)
    return replace(run, privacy=replace(run.privacy, assumptions=assumptions_of(schema)))


def _check_finite(run: Run) -> None:
    if not bool(torch.isfinite(run.posterior.sample(16)).all()):
        raise CommandError(
            f"--method={run.method.name}: ran away, its draws are not finite; the run stays charged, and a smaller "
            "step size or learning rate (--set) keeps the next one within bounds"
        )


def make_network(model: Model, prepared: Prepared) -> MLP:
    """A fully connected network for the encoded records; its first weights come from the seed, if there is one."""
    recipe = Recipe(prepared.x[0].size, prepared.encoder.schema.class_count or 1, model.hidden)
    parameters = weight_count((recipe.features, *recipe.hidden, recipe.outputs))
    if parameters > MOST_PARAMETERS:
        raise CommandError(
            f"--hidden={','.join(map(str, model.hidden))}: gives {parameters} weights; {MOST_PARAMETERS} at most"
        )
    return MLP(recipe, generator_of(model.seed))


def evaluate(run: Run, prepared: Prepared, dataset: DataSet, source: Source) -> Evaluation | None:
    """Predictions beside the truth on the declared test records, in the units of the target."""
    if dataset.test is None or dataset.test.labels is None or prepared.x_test is None or prepared.y_test is None:
        return None
    whose = PUBLIC if source.has_own_facts and source.test is None else SEPARATE
    predictive = run.posterior.predict(torch.as_tensor(prepared.x_test))
    if not isinstance(predictive, RealPredictive):
        return Evaluation(predictive, torch.as_tensor(prepared.y_test), whose)
    # The encoder clamps targets to their declared bounds; predictions are judged against the values as they are.
    truth = torch.as_tensor(dataset.test.labels.astype("float64"))
    return Evaluation(in_units(predictive, prepared.encoder), truth, whose)


def config_of(source: Source, model: Model, ledger: Path | None, name: str) -> dict[str, Any]:
    """What was typed, for the record of the run."""
    paths = {"test": source.test, "bounds": source.bounds, "data": source.directory, "ledger": ledger}
    return {
        "train": source.train,
        **{key: None if path is None else str(path) for key, path in paths.items()},
        "assume_public": source.assume_public,
        "split": source.split,
        "name": name,
        "hidden": list(model.hidden),
        "noise_scale": model.noise_scale,
        "seed": model.seed,
    }
