"""What the two estimators share: from parameters to a request, from records to a table, from an outcome to a fit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import nn

from confide import rules
from confide.data import trees
from confide.data.loaders import from_frame, refuse_loaders
from confide.data.preprocessing import Encoder
from confide.data.rows import one_each, read_rows
from confide.data.schema import Column, Schema, Task
from confide.data.table import Array, Table, plain_column
from confide.devices.default import default_aside
from confide.errors import BudgetExceeded, BudgetExceededInSearch, Refusal
from confide.estimators.frames import (
    declared,
    is_frame,
    labels_of,
    labels_seen,
    names_of,
    on_host,
    only,
    sorted_labels,
    without_cells,
)
from confide.methods.base import Method
from confide.models.likelihoods import Likelihood
from confide.models.priors import Prior
from confide.posteriors.base import Posterior
from confide.posteriors.prediction.summary import Summary
from confide.privacy.events import Adjacency, Sampling
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.report import PUBLIC, SEPARATE, Evaluation
from confide.running.callbacks import Moment, progress_line
from confide.running.fit import Run
from confide.running.journal import CheckpointPlace
from confide.sklearn_guard import frames, hides_errors, warn_of_readers
from confide.workflow.measure import check_test, measured
from confide.workflow.request import Request
from confide.workflow.run import Outcome, run_request

Kind = TypeVar("Kind")

ROWS_AT_ONCE = 8192
"""Records predicted at a time: some megabytes of outputs for a thousand draws."""


class _Estimated(BaseEstimator):  # type: ignore[misc]
    """What `fit` leaves behind, in a class of its own: these are no parameters."""

    posterior_: Posterior
    privacy_: Privacy
    run_: Run
    schema_: Schema
    encoder_: Encoder


@dataclass(eq=False, repr=False)
class PrivateBayes(_Estimated):
    """What the two estimators share. The constructor is made of the fields, where scikit-learn reads them too."""

    task: ClassVar[Task]
    method: str | Method = "auto"
    _: KW_ONLY
    epsilon: float = rules.EPSILON
    delta: float = rules.DELTA
    bounds: Iterable[Any] | Mapping[str, Any] | None = None
    records: int | None = None
    schema: Schema | None = None
    assume_public: bool = False
    module: nn.Module | None = None
    hidden: tuple[int, ...] | None = None
    likelihood: Likelihood | str | None = None
    prior: Prior | None = None
    batch: int | None = None
    epochs: float | None = None
    steps: int | None = None
    clip: float | None = None
    sampling: Sampling = rules.SAMPLING
    adjacency: Adjacency = rules.ADJACENCY
    secure: bool = False
    device: str | torch.device | None = None
    chains: int = 1
    checkpoint: CheckpointPlace = None
    ledger: Ledger | str | Path | None = None
    name: str = ""
    seed: int | None = None
    verbose: bool = False
    largest_weight: float = 1.0
    callbacks: Sequence[Callable[[Moment], Any]] = ()

    def _fit(self, X: Any, y: Any, sample_weight: Any, validation: Any) -> None:
        calling = frames()
        warn_of_readers(calling)
        request = self.as_request(*self.training_request(X, y, sample_weight))
        if validation is not None:
            request = replace(request, validation=self._public(validation, request.facts))
        try:
            outcome = run_request(request, progress_line(sys.stderr) if self.verbose else None)
        except BudgetExceeded as error:
            if not hides_errors(calling):
                raise
            raise BudgetExceededInSearch(f"{error} (scikit-learn would have made a score of NaN of it)") from error
        self.with_outcome(outcome)

    def training_request(self, X: Any, y: Any, sample_weight: Any = None) -> tuple[Table, Schema]:
        """The records and the facts of a request; what needs no record is refused before one is looked at."""
        refuse_loaders(X)
        X, y = on_host(X), on_host(y)
        facts = self._facts()
        self.as_request(Table(), facts).check()
        table = self._training_table(X, y, facts)
        if sample_weight is not None:
            weights = np.asarray(column_or_1d(one_each(sample_weight)))
            check_consistent_length(labels_of(table), weights)
            table = replace(table, weights=plain_column(weights, "sample_weight"))
        return table, self._with_classes(facts, table)

    def with_outcome(self, outcome: Outcome) -> Any:
        """This estimator with what was learnt."""
        self.run_, self.encoder_ = outcome.run, outcome.encoder
        self.posterior_, self.privacy_, self.schema_ = outcome.run.posterior, outcome.run.privacy, outcome.run.schema
        return self

    def as_request(self, table: Table, facts: Schema) -> Request:
        """The parameters as a request; those of the same name are passed on as they are."""
        same = self.get_params(deep=False)
        for fact in ("bounds", "classes", "target_bounds", "records", "schema", "verbose", "largest_weight"):
            same.pop(fact, None)
        return Request(table, facts=facts, task=self.task, **same)

    def _facts(self) -> Schema:
        """The schema with the facts given beside it; a fact given twice is refused."""
        schema = Schema() if self.schema is None else self.schema
        if not isinstance(schema, Schema):
            raise TypeError(f"schema={schema!r}: must be a confide.Schema")
        facts: dict[str, Any] = {}
        for name, value in self.get_params(deep=False).items():
            if name not in ("classes", "target_bounds", "records", "bounds") or value is None:
                continue
            if getattr(schema, name) is not None:
                raise Refusal(f"{name}: given as a parameter and in schema=; give it once")
            facts[name] = value
        by_name = facts.get("bounds")
        if isinstance(by_name, Mapping):
            if schema.columns:
                raise Refusal("bounds: given by column name, and schema= has columns too; declare all columns in one")
            del facts["bounds"]
            columns = (Column(name, bounds=pair, missing=schema.missing) for name, pair in by_name.items())
            facts["columns"] = tuple(columns)
        if self.largest_weight != 1.0:
            facts["largest_weight"] = self.largest_weight
        merged: Schema = replace(schema, **facts)
        return merged if merged.classes is None else replace(merged, classes=sorted_labels(merged.classes))

    def _with_classes(self, facts: Schema, table: Table) -> Schema:
        """With assume_public, the labels as scikit-learn understands them."""
        if self.task != "classification" or not self.assume_public or facts.classes is not None:
            return facts
        sources: Any = {**dict(facts.sources), "classes": "assumed public"}
        return replace(facts, classes=labels_seen(table), sources=sources)

    def _training_table(self, X: Any, y: Any, facts: Schema) -> Table:
        """Records and labels behind one type, whether they came as arrays or as a data frame.

        Where all facts are declared, nothing is refused for what one record holds: it counts for nothing instead.
        """
        if facts.inputs or trees.is_composed(X):
            labels = self._labels(one_each(y))
            return Table(labels=plain_column(labels, "y"), inputs=trees.named_arrays(read_rows(X, facts)))
        if is_frame(X):
            X = declared(X, facts, self.assume_public)
            validate_data(self, X, y, reset=True, skip_check_array=True)
            labels = self._labels(y) if self.assume_public else column_or_1d(one_each(y), warn=True)
            check_consistent_length(X, labels)
            return replace(from_frame(X), labels=plain_column(labels, "y"))
        if not self.assume_public:
            plain = X.to_numpy() if hasattr(X, "columns") and hasattr(X, "to_numpy") else X
            X = read_rows(plain, facts, raw=True)
        with without_cells(X):
            return self._array_table(X, y, facts)

    def _array_table(self, X: Any, y: Any, facts: Schema) -> Table:
        if not self.assume_public:
            X = validate_data(self, X, reset=True, allow_nd=True, ensure_all_finite=False)
            labels = column_or_1d(one_each(y), warn=True)
            check_consistent_length(X, labels)
            table = Table.from_arrays(X, labels)
            return replace(table, whole_labels=table.whole_labels and isinstance(y, np.ndarray | torch.Tensor))
        X, y = validate_data(
            self,
            X,
            y,
            reset=True,
            allow_nd=True,
            ensure_min_samples=2,
            ensure_all_finite=facts.missing == "refuse",
            y_numeric=self.task == "regression",
        )
        return Table.from_arrays(X, self._labels(y))

    def _new_table(self, X: Any) -> Table:
        """Records to predict."""
        if self.schema_.inputs:
            return Table(inputs=trees.named_arrays(X))
        refuse_loaders(X)
        X = on_host(X)
        if is_frame(X):
            # By name: columns may stand in another order, and others beside them.
            names = list(getattr(self, "feature_names_in_", ()))
            known = names and not set(names) - set(names_of(X))
            frame = only(X, names) if known else X
            validate_data(self, frame, reset=False, skip_check_array=True)
            return from_frame(frame)
        schema = self.schema_
        finite = schema.missing == "refuse" and all(column.missing == "refuse" for column in schema.columns)
        with without_cells(X):
            return Table.from_arrays(validate_data(self, X, reset=False, allow_nd=True, ensure_all_finite=finite))

    @staticmethod
    def _labels(y: Any) -> Array:
        labels: Array = column_or_1d(y, warn=True)
        return labels

    def save(self, directory: str | Path, *, test: tuple[Any, Any] | None = None, public: bool = False) -> Path:
        """Write posterior, run and report to a new directory, which `confide predict` reads.

        test     (X, y) as for `fit`: the report then measures on them, without noise, so they must be public or
                 separate from the records that were learnt from
        public   whether they are public; otherwise the report says that the guarantee does not cover them
        """
        from confide.running.artefacts import save_run

        check_is_fitted(self, "posterior_")
        evaluation = None if test is None else self._measured(test, public)
        return save_run(self.run_, directory, evaluation=evaluation, encoder=self.encoder_)

    def _public(self, pair: Any, facts: Schema) -> Table:
        """Records for callbacks, which whoever gives them declares to be public."""
        X, y = map(on_host, _pair("validation", pair))
        labels = plain_column(np.asarray(column_or_1d(y)), "y")
        if facts.inputs or trees.is_composed(X):
            return Table(labels=labels, inputs=trees.named_arrays(X))
        if is_frame(X):
            return replace(from_frame(declared(X, facts, self.assume_public)), labels=labels)
        return Table.from_arrays(np.asarray(X), labels)

    def _measured(self, test: tuple[Any, Any], public: bool) -> Evaluation:
        X, y = map(on_host, _pair("test", test))
        table, labels = self._new_table(X), column_or_1d(y)
        if not table.inputs:  # of which the table looks at every tensor
            check_consistent_length(X, labels)
        table = replace(table, labels=plain_column(np.asarray(labels), "y"))
        check_test(table, self.encoder_)
        return measured(self.posterior_, self.encoder_, table, PUBLIC if public else SEPARATE)

    def _parts(self, X: Any) -> Iterator[Summary]:
        """Averages over the posterior for some thousand records at a time: memory grows neither with X nor draws."""
        inputs = self._inputs(X)
        for start in range(0, trees.size_of(inputs), ROWS_AT_ONCE):
            yield self.posterior_.summary(trees.rows_of(inputs, slice(start, start + ROWS_AT_ONCE)))

    @default_aside
    def _inputs(self, X: Any) -> trees.Tree:
        check_is_fitted(self, "posterior_")
        return trees.tree_of(self.encoder_.features(self._new_table(X)))

    def __sklearn_clone__(self) -> Any:
        # A ledger is shared, never copied: a copy could spend the budget a second time.
        shell = copy.copy(self)
        shell.ledger = None
        cloned = super(PrivateBayes, shell).__sklearn_clone__()
        cloned.ledger = self.ledger
        return cloned

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.non_deterministic = self.seed is None
        tags.input_tags.allow_nan = self.schema is not None and self.schema.missing != "refuse"
        return tags


def _pair(argument: str, given: Any) -> tuple[Any, Any]:
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise Refusal(f"{argument}={type(given).__name__}: must be a pair (X, y)")
    return given[0], given[1]
