"""From an estimator's parameters to a finished run, in the order that keeps data and budget safe:

request    the parameters, checked before any record is looked at; public facts that are missing are refused
table      the records, checked for the curator
settle     which facts are public, and whose word they are
plan       the noise, from public sizes
charge     the ledger, then fit: no record is used before it is paid for

Where the number of records is not declared, it is learnt privately: one full-batch Gaussian count, and then a fit whose
rate and steps do not depend on the count, so that both releases are fixed in advance and compose as they stand.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_consistent_length, validate_data
from torch import nn

from confide import methods
from confide.data.loaders import from_frame
from confide.data.preprocessing import Encoder, check_training
from confide.data.schema import Column, Schema, Task
from confide.data.table import Array, Table, plain_column
from confide.errors import DataError, Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.likelihoods import Gaussian
from confide.models.networks import MLP, Recipe
from confide.privacy.calibration import check_target, noise_multiplier_for
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.running.fit import Run, default_likelihood, make_problem
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery
from confide.workflow.noise import fit_learning_noise, histogram_for
from confide.workflow.rules import (
    DEFAULT_METHOD,
    DEFAULT_NOISE_SCALE,
    assumptions_of,
    default_batch,
    default_epochs,
    default_hidden,
    generator_of,
)

COUNT_SHARE = 0.1
"""Part of epsilon that a private count may cost. It composes with the fit, so that the fit loses far less."""
COUNTED_RATE = 0.05
COUNTED_EPOCHS = 40.0
"""Rate and passes of a fit whose number of records was counted: constants, so that the plan rests on no count."""
_REHEARSAL_RECORDS = 1000


@dataclass(frozen=True)
class Request:
    """An estimator's parameters after the checks that need no record."""

    task: Task
    declared: Schema
    options: Any  # the estimator; its parameters are read, nothing is written

    @property
    def counted(self) -> bool:
        return self.declared.records is None and not self.options.assume_public


@dataclass(frozen=True)
class Outcome:
    run: Run
    encoder: Encoder


# -- request -------------------------------------------------------------------------------------------------


def request_of(estimator: Any) -> Request:
    """Check every parameter that can be checked without a record."""
    check_target(estimator.epsilon, estimator.delta)
    for name in ("batch", "steps", "epochs"):
        value = getattr(estimator, name)
        if value is not None and not value > 0:
            raise Refusal(f"{name}={value}: must be greater than 0, or None for the public rule")
    if estimator.epochs is not None and estimator.steps is not None:
        raise Refusal(f"epochs={estimator.epochs}, steps={estimator.steps}: give one of the two")
    if estimator.module is not None and estimator.hidden is not None:
        raise Refusal(f"hidden={estimator.hidden}: is for confide's own network; leave it out beside module=")
    request = Request(estimator.task, _declared(estimator), estimator)
    _refuse_what_leaks(request)
    method_of(request)
    return request


def _declared(estimator: Any) -> Schema:
    """The schema with the facts given beside it; a fact given twice is refused."""
    schema = Schema() if estimator.schema is None else estimator.schema
    if not isinstance(schema, Schema):
        raise TypeError(f"schema={schema!r}: must be a confide.Schema")
    facts: dict[str, Any] = {}
    for name in ("classes", "target_bounds", "records", "bounds"):
        value = getattr(estimator, name, None)
        if value is None:
            continue
        if getattr(schema, name) is not None:
            raise Refusal(f"{name}: given as a parameter and in schema=; give it once")
        facts[name] = value
    by_name = facts.get("bounds")
    if isinstance(by_name, Mapping):
        if schema.columns:
            raise Refusal("bounds: given by column name, and schema= has columns too; declare all columns in one")
        del facts["bounds"]
        facts["columns"] = tuple(Column(name, bounds=pair, missing=schema.missing) for name, pair in by_name.items())
    merged: Schema = replace(schema, **facts)
    return merged if merged.classes is None else replace(merged, classes=_sorted(merged.classes))


def _sorted(classes: tuple[Any, ...]) -> tuple[Any, ...]:
    """scikit-learn's metrics take the columns of probabilities to be in the order of the sorted labels."""
    return tuple(np.unique(np.asarray(classes)).tolist())


def _refuse_what_leaks(request: Request) -> None:
    declared, options = request.declared, request.options
    if request.task == "classification" and declared.target_bounds is not None:
        raise Refusal("schema: has target_bounds, which are for regression; use PrivateBayesRegressor")
    if request.task == "regression" and declared.classes is not None:
        raise Refusal("schema: has classes, which are for classification; use PrivateBayesClassifier")
    if options.assume_public:
        return
    way = "or set assume_public=True if what the data shows of it is public"
    if request.task == "classification" and declared.classes is None:
        raise DataError(
            f"classes=None: the labels that occur in private records are private; list them in classes=, {way}"
        )
    if request.task == "regression" and declared.target_bounds is None:
        raise DataError(
            f"target_bounds=None: the range of a private target is private; give target_bounds=(low, high), {way}"
        )
    if declared.bounds is None and not declared.columns:
        raise DataError(
            f"bounds=None: the range of private features is private; give bounds=(low, high) or one pair per feature, "
            f"{way}; a StandardScaler before this estimator would read it in silence, so it is no way out"
        )
    if request.counted and options.batch is not None:
        raise DataError(
            f"batch={options.batch}: needs the nominal number of records, which is private unless declared; give "
            "records=, set assume_public=True, or leave batch out to have the records counted privately"
        )


def method_of(request: Request) -> Method:
    """The method by name with the given prior, or the method that was given."""
    given, prior = request.options.method, request.options.prior
    if not isinstance(given, str):
        if not isinstance(given, Method):
            raise TypeError(f"method={given!r}: must be a method's name or a Method")
        if prior is not None:
            raise Refusal(f"prior={prior!r}: give it to the method itself, or name the method")
        return given
    cls = methods.get(DEFAULT_METHOD if given == "auto" else given)
    if request.task not in cls.tasks:
        raise Refusal(f"method={given!r}: is not for {request.task}; try {', '.join(methods.for_task(request.task))}")
    if prior is None:
        return cls()
    if "prior" not in {field.name for field in fields(cls)}:
        raise Refusal(f"prior={prior!r}: {given} has no prior of its own; leave it out")
    make: Callable[..., Method] = cls
    return make(prior=prior)


# -- table ---------------------------------------------------------------------------------------------------


def training_table(estimator: Any, X: Any, y: Any, request: Request) -> Table:
    """Records and labels behind one type, whether they came as arrays or as a data frame."""
    if is_frame(X):
        validate_data(estimator, X, y, reset=True, skip_check_array=True)
        labels = estimator._labels(y)
        check_consistent_length(X, labels)
        return replace(from_frame(X), labels=plain_column(labels, "y"))
    finite = request.declared.missing == "refuse"
    X, y = validate_data(
        estimator,
        X,
        y,
        reset=True,
        allow_nd=True,
        ensure_min_samples=2,
        ensure_all_finite=finite,
        y_numeric=request.task == "regression",
    )
    return Table.from_arrays(X, estimator._labels(y))


def new_table(estimator: Any, X: Any, schema: Schema) -> Table:
    """Records to predict."""
    if is_frame(X):
        validate_data(estimator, X, reset=False, skip_check_array=True)
        return from_frame(X)
    finite = schema.missing == "refuse" and all(column.missing == "refuse" for column in schema.columns)
    return Table.from_arrays(validate_data(estimator, X, reset=False, allow_nd=True, ensure_all_finite=finite))


def is_frame(X: Any) -> bool:
    """A data frame whose columns have names; one with numbers for names is taken as a plain array."""
    names = getattr(X, "columns", None)
    if names is None or not any(hasattr(X, mark) for mark in ("iloc", "__dataframe__", "__arrow_c_stream__")):
        return False
    return all(isinstance(name, str) for name in names)


# -- settle --------------------------------------------------------------------------------------------------


def settled(request: Request, table: Table) -> Schema:
    """The public facts, with the structure of the table; what is left open is read off it only by assume_public."""
    schema = request.declared
    if request.options.assume_public:
        if request.task == "classification" and schema.classes is None:
            sources: Any = {**dict(schema.sources), "classes": "assumed public"}
            schema = replace(schema, classes=_labels_seen(table), sources=sources)
        schema = Schema.assume_public(table, declared=schema, task=request.task)
    schema = schema.for_table(table)
    check_training(table, schema)
    size = schema.records or table.rows
    if request.options.delta >= 1 / size:
        raise DataError(
            f"delta={request.options.delta:g}: must be below 1 / records = {1 / size:.3g}, or a record could be "
            "published outright"
        )
    return schema


def _labels_seen(table: Table) -> Any:
    assert table.labels is not None  # a training table has them
    labels = table.labels
    if labels.dtype.kind == "f" and type_of_target(labels) in ("binary", "multiclass"):
        labels = labels.astype(np.int64)
    return np.unique(labels.astype(str) if labels.dtype.kind == "O" else labels).tolist()


def network_of(request: Request, schema: Schema, inputs: Array, records: int) -> nn.Module:
    """The user's module, or a fully connected network by the public rule."""
    options = request.options
    if options.module is not None:
        if not isinstance(options.module, nn.Module):
            raise TypeError(f"module={options.module!r}: must be a torch Module")
        return options.module
    features, outputs = math.prod(inputs.shape[1:]), schema.class_count or 1
    if options.likelihood is not None:
        outputs = options.likelihood.outputs
    hidden = options.hidden
    if hidden is None:
        hidden = default_hidden(records, features, outputs, options.epsilon) if options.method == "auto" else ()
    return MLP(Recipe(features, outputs, tuple(hidden)), generator_of(options.seed))


def likelihood_of(request: Request, schema: Schema, module: nn.Module) -> Any:
    if request.options.likelihood is not None:
        return request.options.likelihood
    return Gaussian(DEFAULT_NOISE_SCALE) if schema.classes is None else default_likelihood(module, schema)


# -- plan ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _noise(
    epsilon: float, delta: float, steps: int, rate: float, spent: tuple[Event, ...] = (), full: bool = False
) -> float:
    sampling = "full-batch" if full else "poisson"
    return noise_multiplier_for(epsilon, delta, steps, rate, sampling, spent=spent)  # type: ignore[arg-type]


def count_of(request: Request) -> SampledGaussian:
    """The mechanism of a private count: each record answers 1."""
    options = request.options
    noise = _noise(COUNT_SHARE * options.epsilon, options.delta, 1, 1.0, full=True)
    return SampledGaussian(noise, 1.0, 1.0, 1, "full-batch")


def noise_histogram_of(request: Request, method: Method) -> SampledGaussian | None:
    """The mechanism that learns the noise of a regression target; None where it is given, or the method learns it."""
    options = request.options
    if request.task != "regression" or options.likelihood is not None:
        return None
    return histogram_for(method, options.epsilon, options.delta)


def plan_of(request: Request, records: int, spent: tuple[Event, ...] = ()) -> Plan:
    """The calibrated plan of a fit, together with what was `spent` within epsilon."""
    options = request.options
    if request.counted:
        rate, epochs = COUNTED_RATE, options.epochs or COUNTED_EPOCHS
    else:
        batch = default_batch(records) if options.batch is None else options.batch
        if not 1 <= batch <= records:
            raise Refusal(f"batch={batch}: must be between 1 and records={records}")
        rate, epochs = batch / records, options.epochs or default_epochs(records)
    steps = options.steps or max(1, round(epochs / rate))
    noise = _noise(options.epsilon, options.delta, steps, rate, spent)
    mechanism = SampledGaussian(noise, options.clip, rate, records)
    return Plan(((mechanism, steps),), options.delta, target_epsilon=options.epsilon)


# -- charge and fit ------------------------------------------------------------------------------------------


def run_request(request: Request, table: Table) -> Outcome:
    """Settle, plan, charge, fit. Whatever can be refused is refused before the first charge."""
    schema = settled(request, table)
    images = request.options.module is not None and table.block is not None and table.block.ndim > 2
    encoder = Encoder(schema, "image" if images else "flat")
    x, y = encoder.encode(table)
    assert y is not None  # check_training refuses data without a target
    with _book(request.options.ledger) as book:
        data = _private(request, schema, book, x, y)
        spent: tuple[Event, ...] = ()
        if request.counted:
            counting = count_of(request)
            spent = (counting.event(),)
            _rehearse(request, schema, x, data, plan_of(request, _REHEARSAL_RECORDS, spent))
            schema = _with_count(schema, data, counting)
            encoder = replace(encoder, schema=schema)
            data = _private(request, schema, book, x, y)
        run = _fitted(request, schema, x, data, spent)
    return Outcome(run, encoder)


def _private(request: Request, schema: Schema, book: Ledger, x: Array, y: Array) -> PrivateData:
    return PrivateData(x, y, schema=schema, ledger=book, name=request.options.name, seed=request.options.seed)


def _rehearse(request: Request, schema: Schema, x: Array, data: PrivateData, plan: Plan) -> None:
    """A network that cannot be clipped fails here, before the count is charged."""
    method, module = method_of(request), network_of(request, schema, x, plan.records)
    problem = make_problem(method, module, schema, plan, likelihood_of(request, schema, module), request.options.seed)
    data.rehearse(method.ask(problem, method.init(problem)))


def _with_count(schema: Schema, data: PrivateData, counting: SampledGaussian) -> Schema:
    """The schema with the number of records as a noisy count shows it, at least the count's standard deviation."""
    query = StatisticQuery(Recordwise(lambda x, _: torch.ones(len(x), 1, dtype=torch.float64)), 1)
    seen = data.answer(query, counting, purpose="count the records").sum.item()
    records = max(2, math.ceil(counting.noise_std), round(seen))
    sources: Any = {**dict(schema.sources), "records": "learnt privately"}
    return replace(schema, records=records, sources=sources)


def _fitted(request: Request, schema: Schema, x: Array, data: PrivateData, spent: tuple[Event, ...]) -> Run:
    assert schema.records is not None  # declared, assumed or counted by now
    method = method_of(request)
    histogram = noise_histogram_of(request, method)
    beside = () if histogram is None else (histogram.event(),)
    plan = plan_of(request, schema.records, (*spent, *beside))
    module = network_of(request, schema, x, schema.records)
    likelihood = likelihood_of(request, schema, module)
    options = request.options
    run = fit_learning_noise(method, module, data, plan, histogram, likelihood=likelihood, seed=options.seed)
    if not bool(torch.isfinite(run.posterior.sample(16)).all()):
        raise Refusal(
            f"method={run.method.name!r}: ran away, its draws are not finite; the run stays charged, and a method with "
            "a smaller step size or learning rate keeps the next one within bounds"
        )
    privacy: Privacy = replace(run.privacy, events=(*spent, *run.privacy.events), assumptions=assumptions_of(schema))
    return replace(run, privacy=privacy)


@contextmanager
def _book(ledger: Any) -> Iterator[Ledger]:
    """The given ledger, or one opened for this fit."""
    if ledger is None:
        yield Ledger()
    elif isinstance(ledger, str | os.PathLike):
        with Ledger(ledger) as book:
            yield book
    elif isinstance(ledger, Ledger):
        yield ledger
    else:
        raise TypeError(f"ledger={ledger!r}: must be a Ledger or the path of one")
