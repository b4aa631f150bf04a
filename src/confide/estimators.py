"""Private Bayesian learning in the scikit-learn manner.

    model = PrivateBayesClassifier(epsilon=1.0, delta=1e-5, bounds=(0, 16), classes=range(10))
    model.fit(X, y)
    model.predict_proba(X_test)            # posterior predictive
    model.predictive(X_test).epistemic     # and .aleatoric, .interval(0.9)
    model.privacy_.statement()

An estimator turns its parameters into a `confide.Request` and shows the outcome; what is checked first, what is public
and what is charged is settled in `confide.workflow`, for every door alike.

What leaks in spite of these classes:

- A step before them in a Pipeline that learns from the data, such as StandardScaler, PCA or OneHotEncoder, reads all
  records in silence, and the estimator cannot see it. Leave it out: the declared bounds scale the features.
- `score` on training or held-out private records is an unprotected reading of them, and so are the results of
  `cross_val_score` and `GridSearchCV`. Use public records, or keep the numbers to yourself.
- Every fit spends. `cross_val_score` with k folds fits k times: each record is in k - 1 of the training sets, and the
  ledger, which does not know the folds, charges all k. Together they cost what k releases of this budget compose to:
  less than k * epsilon, far more than epsilon. A ledger with a limit refuses the fit that would exceed it
  (BudgetExceeded) before a record is read. With several processes give the ledger's path.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import nn

from confide import rules
from confide.data import trees
from confide.data.labels import Label
from confide.data.loaders import from_frame, refuse_loaders
from confide.data.preprocessing import Encoder
from confide.data.schema import Column, Schema, Task
from confide.data.table import Array, Table, plain_column
from confide.errors import BudgetExceeded, BudgetExceededInSearch, Refusal
from confide.methods.base import Method
from confide.models.likelihoods import Likelihood
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.models.priors import Prior
from confide.posteriors.base import Posterior
from confide.posteriors.prediction.summary import Summary
from confide.privacy.events import Adjacency, Sampling
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.report import PUBLIC, SEPARATE, Evaluation
from confide.running.callbacks import progress_line
from confide.running.fit import Run
from confide.running.journal import CheckpointPlace
from confide.sklearn_guard import frames, hides_errors, warn_of_readers
from confide.workflow.measure import check_test, in_units, measured
from confide.workflow.request import Request
from confide.workflow.run import Outcome, run_request

Kind = TypeVar("Kind")

ROWS_AT_ONCE = 8192
"""Records predicted at a time: some megabytes of outputs for a thousand draws."""


SHARED_PARAMETERS = """\
method : str or Method, default="auto"
    The name of a method (see `confide.methods.names()`) or a method with its settings. "auto" is
    the public rule (`confide.rules.default_method`): models of columns for tables, SGLD for other networks and
    for many classes of many columns.
epsilon : float, default=1.0
    The budget of one fit: everything that it releases, together.
delta : float, default=1e-5
    Probability with which the budget may fail; must be below 1 / records.
bounds : (low, high), sequence of pairs, or mapping of column name to pair, default=None
    Public range of the features. Values outside are clamped, and the range is scaled to [-1, 1].
records : int, default=None
    Public nominal number of records; need not be exact. None: the records are counted privately, for a tenth of
    epsilon at most; batches then are a twentieth of the data, so that their size rests on no count. Declare it for
    fewer than a thousand records.
schema : Schema, default=None
    All of these facts at once, and categories by column name.
assume_public : bool, default=False
    Read the facts that are left open off the data; the privacy statement then says so.
module : torch.nn.Module, default=None
    A network of one's own; records with more than one dimension reach it as (n, channels, height, width). X may be a
    tuple or a dictionary of arrays, or ids, with schema=Schema(inputs=...): they reach it as they are.
hidden : tuple of int, default=None
    Widths of the hidden layers of confide's own network, () for a linear model. None is the public rule, whatever
    the method: one layer of 64 where records * epsilon >= 10 * its weights, epsilon counted as 1 at most in
    regression, and no hidden layer otherwise.
likelihood : Likelihood or str, default=None
    From `confide.likelihoods`, or the name of one: "poisson" and "negative-binomial" for counts, "laplace" and
    "student-t" for numbers with outliers (whose scale is `noise_scale`), "ordinal" for labels whose sorted order means
    something. None is categorical for labels and Gaussian for numbers.
prior : Prior, default=None
    From `confide.priors`, for a method given by name; None is the method's own.
batch : int, default=None
    Expected records per step; None is the public rule, a 32nd of the records but at least 128.
epochs : float, default=None
    Passes over the data; None is the public rule, 40.
steps : int, default=None
    Number of steps, instead of `epochs`.
clip : float, default=None
    Largest norm of one record's answer; None is the public rule, 2.
sampling : {"poisson", "fixed-size", "shuffle", "full-batch"}, default="poisson"
    How a batch is drawn.
adjacency : {"add-remove", "replace-one"}, default="add-remove"
    What one person changes: their record is there or not, or it has other values.
secure : bool, default=False
    Noise on a lattice, against attacks on the low-order bits of floating-point numbers; same epsilon.
device : str or torch.device, default=None
    Where the network is, such as "cuda"; None: where `module` is, or else on the host.
chains : int, default=1
    Independent chains of a sampler, all of them together within the budget.
checkpoint : path or Checkpoints, default=None
    A directory in which the run is kept while it lasts: the same fit goes on from it after it was killed.
ledger : Ledger or path, default=None
    Where fits are charged; None keeps no account over fits.
name : str, default=""
    The data set's name in the ledger.
seed : int, default=None
    For tests only: noise that can be reproduced protects nothing, and the statement claims nothing.
verbose : bool, default=False
    Show on one line how many steps are done; nothing else of a fit that is not over is to be seen.
largest_weight : float, default=1.0
    Public bound of `sample_weight`: a record of this weight counts as one, any other as its share of it. Weights
    outside of [0, largest_weight] are moved to the nearer end.
"""
FITTED_ATTRIBUTES = """\
posterior_ : Posterior
    What was learnt.
privacy_ : Privacy
    What it cost; `privacy_.statement()` says it in one paragraph.
run_ : Run
    The whole run; `save(directory)` writes it.
schema_ : Schema
    The public facts, and whose word each of them is.
n_features_in_ : int
    Number of features seen during `fit`.
feature_names_in_ : ndarray
    Names of the columns seen during `fit`, where the records came as a data frame.
"""
"""What both estimators document; `_documented` puts it before what a class says of its own."""


class _Estimated(BaseEstimator):  # type: ignore[misc]
    """What `fit` leaves behind, in a class of its own: these are no parameters."""

    posterior_: Posterior
    privacy_: Privacy
    run_: Run
    schema_: Schema
    encoder_: Encoder


@dataclass(eq=False, repr=False)
class _PrivateBayes(_Estimated):
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

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        calling = frames()
        warn_of_readers(calling)
        request = self.as_request(*self.training_request(X, y, sample_weight))
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
        facts = self._facts()
        self.as_request(Table(), facts).check()
        table = self._training_table(X, y, facts)
        if sample_weight is not None:
            weights = np.asarray(column_or_1d(sample_weight))
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
        return merged if merged.classes is None else replace(merged, classes=_sorted(merged.classes))

    def _with_classes(self, facts: Schema, table: Table) -> Schema:
        """With assume_public, the labels as scikit-learn understands them."""
        if self.task != "classification" or not self.assume_public or facts.classes is not None:
            return facts
        sources: Any = {**dict(facts.sources), "classes": "assumed public"}
        return replace(facts, classes=_labels_seen(table), sources=sources)

    def _training_table(self, X: Any, y: Any, facts: Schema) -> Table:
        """Records and labels behind one type, whether they came as arrays or as a data frame.

        Where all facts are declared, nothing is refused for what one record holds: it counts for nothing instead.
        """
        if facts.inputs or trees.is_composed(X):
            labels = self._labels(y)
            return Table(labels=plain_column(labels, "y"), inputs=trees.named_arrays(X))
        if _is_frame(X):
            validate_data(self, X, y, reset=True, skip_check_array=True)
            labels = self._labels(y) if self.assume_public else column_or_1d(y, warn=True)
            check_consistent_length(X, labels)
            return replace(from_frame(_declared(X, facts)), labels=plain_column(labels, "y"))
        if not self.assume_public:
            X = validate_data(self, X, reset=True, allow_nd=True, ensure_all_finite=False)
            labels = column_or_1d(y, warn=True)
            check_consistent_length(X, labels)
            return Table.from_arrays(X, labels)
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
        if _is_frame(X):
            # By name: columns may stand in another order, and others beside them.
            names = list(getattr(self, "feature_names_in_", ()))
            known = names and not set(names) - set(X.columns)
            frame = X[names] if known else X
            validate_data(self, frame, reset=False, skip_check_array=True)
            return from_frame(frame)
        schema = self.schema_
        finite = schema.missing == "refuse" and all(column.missing == "refuse" for column in schema.columns)
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

    def _measured(self, test: tuple[Any, Any], public: bool) -> Evaluation:
        if not (isinstance(test, tuple | list) and len(test) == 2):
            raise Refusal(f"test={type(test).__name__}: must be a pair (X, y)")
        table, labels = self._new_table(test[0]), column_or_1d(test[1])
        if not table.inputs:  # of which the table looks at every tensor
            check_consistent_length(test[0], labels)
        table = replace(table, labels=plain_column(np.asarray(labels), "y"))
        check_test(table, self.encoder_)
        return measured(self.posterior_, self.encoder_, table, PUBLIC if public else SEPARATE)

    def _parts(self, X: Any) -> Iterator[Summary]:
        """Averages over the posterior for some thousand records at a time: memory grows neither with X nor draws."""
        inputs = self._inputs(X)
        for start in range(0, trees.size_of(inputs), ROWS_AT_ONCE):
            yield self.posterior_.summary(trees.rows_of(inputs, slice(start, start + ROWS_AT_ONCE)))

    def _inputs(self, X: Any) -> trees.Tree:
        check_is_fitted(self, "posterior_")
        return trees.tree_of(self.encoder_.features(self._new_table(X)))

    def __sklearn_clone__(self) -> Any:
        # A ledger is shared, never copied: a copy could spend the budget a second time.
        shell = copy.copy(self)
        shell.ledger = None
        cloned = super(_PrivateBayes, shell).__sklearn_clone__()
        cloned.ledger = self.ledger
        return cloned

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.non_deterministic = self.seed is None
        tags.input_tags.allow_nan = self.schema is not None and self.schema.missing != "refuse"
        return tags


def _documented(kind: type[Kind]) -> type[Kind]:
    """The class with the shared parameters and attributes in its documentation, before its own ones."""
    if kind.__doc__:  # Python leaves documentation out with -OO
        for title, shared in (("Parameters", SHARED_PARAMETERS), ("Attributes", FITTED_ATTRIBUTES)):
            heading = f"{title}\n{'-' * len(title)}\n"
            kind.__doc__ = inspect.cleandoc(kind.__doc__).replace(heading, heading + shared)
    return kind


@_documented
@dataclass(eq=False, repr=False, kw_only=True)
class PrivateBayesClassifier(ClassifierMixin, _PrivateBayes):  # type: ignore[misc]
    """A Bayesian classifier under differential privacy.

    Parameters
    ----------
    classes : int or sequence of labels, default=None
        The public labels, or their number for 0, 1, ...; records of other labels count as nothing.
    class_weight : mapping of labels to numbers, default=None
        Public weights of classes, 1 for those not named; the largest counts as one record. "balanced" is refused: how
        often classes occur is private.

    Attributes
    ----------
    classes_ : ndarray
        The declared labels, sorted.

    Examples
    --------
    >>> model = PrivateBayesClassifier(epsilon=1.0, bounds=(0, 16), classes=10, records=1437)
    >>> model.fit(X, y).predict_proba(X_test)  # doctest: +SKIP
    """

    task: ClassVar[Task] = "classification"
    classes: int | Iterable[Label] | None = None
    class_weight: Mapping[Any, float] | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateBayesClassifier:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one label per record.

        sample_weight   what each record counts for, from 0 to `largest_weight`: it is private, as the record is
        """
        self._fit(X, y, sample_weight)
        return self

    def with_outcome(self, outcome: Outcome) -> PrivateBayesClassifier:
        """This estimator with what was learnt."""
        super().with_outcome(outcome)
        assert self.schema_.classes is not None  # a request for classification settles them
        self.classes_: Array = np.asarray(self.schema_.classes)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Posterior predictive probabilities, of shape (n, classes), in the order of `classes_`."""
        parts = [part.centre.double().numpy() for part in self._parts(X)]
        probabilities: Array = np.concatenate(parts)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the posterior predictive probabilities."""
        with np.errstate(divide="ignore"):  # a probability that rounds to zero
            logarithms: Array = np.log(self.predict_proba(X))
        return logarithms

    def predict(self, X: Any) -> Array:
        """The most probable label of every record."""
        labels: Array = self.predict_proba(X).argmax(axis=1)
        chosen: Array = self.classes_[labels]
        return chosen

    def predictive(self, X: Any) -> ClassPredictive:
        """The whole predictive distribution: .probabilities, .epistemic, .aleatoric, .interval(0.9), as tensors."""
        found: ClassPredictive = self.posterior_.predict(self._inputs(X))  # type: ignore[assignment]
        return found

    @staticmethod
    def _labels(y: Any) -> Array:
        labels: Array = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        return labels


@_documented
@dataclass(eq=False, repr=False, kw_only=True)
class PrivateBayesRegressor(RegressorMixin, _PrivateBayes):  # type: ignore[misc]
    """Bayesian regression under differential privacy.

    Parameters
    ----------
    target_bounds : (low, high), default=None
        Public range of the target. Values outside are clamped.
    noise_scale : float, default=None
        Standard deviation of the target around the model, where its bounds are scaled to [-1, 1]. None: learnt
        privately from a histogram of residuals, for a fifth of epsilon at most; the whole fit stays within epsilon.

    Attributes
    ----------

    Examples
    --------
    >>> model = PrivateBayesRegressor(epsilon=1.0, bounds=(-1, 1), target_bounds=(0, 100), records=5000)
    >>> mean, deviation = model.fit(X, y).predict(X_test, return_std=True)  # doctest: +SKIP
    """

    task: ClassVar[Task] = "regression"
    target_bounds: Iterable[float] | None = None
    noise_scale: float | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateBayesRegressor:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one number per record.

        sample_weight   what each record counts for, from 0 to `largest_weight`: it is private, as the record is
        """
        self._fit(X, y, sample_weight)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Predictive means in the target's units, and on request the standard deviations of a new observation."""
        check_is_fitted(self, "posterior_")
        scale, shift = self.encoder_.target_scale, self.encoder_.target_centre
        parts = [part.double().rescaled(scale, shift) for part in self._parts(X)]
        mean: Array = np.concatenate([part.centre.numpy() for part in parts])
        if not return_std:
            return mean
        return mean, np.sqrt(np.concatenate([part.total.numpy() for part in parts]))

    def predictive(self, X: Any) -> RealPredictive:
        """The whole predictive distribution: .mean, .epistemic, .aleatoric, .interval(0.9), in the target's units."""
        found: RealPredictive = self.posterior_.predict(self._inputs(X))  # type: ignore[assignment]
        return in_units(found, self.encoder_)


def _sorted(classes: tuple[Any, ...]) -> tuple[Any, ...]:
    """scikit-learn's metrics take the columns of probabilities to be in the order of the sorted labels."""
    return tuple(np.unique(np.asarray(classes)).tolist())


def _labels_seen(table: Table) -> Any:
    assert table.labels is not None  # a training table has them
    labels = table.labels
    if labels.dtype.kind == "f" and type_of_target(labels) in ("binary", "multiclass"):
        labels = labels.astype(np.int64)
    return np.unique(labels.astype(str) if labels.dtype.kind == "O" else labels).tolist()


def labels_of(table: Table) -> Array:
    assert table.labels is not None  # a training table has them
    return table.labels


def _declared(frame: Any, facts: Schema) -> Any:
    """A frame without the columns that the facts leave out."""
    extra = [name for name in frame.columns if name in facts.ignore]
    return frame if not extra else frame[[name for name in frame.columns if name not in extra]]


def _is_frame(X: Any) -> bool:
    """A data frame whose columns have names; one with numbers for names is taken as a plain array."""
    names = getattr(X, "columns", None)
    if names is None or not any(hasattr(X, mark) for mark in ("iloc", "__dataframe__", "__arrow_c_stream__")):
        return False
    return all(isinstance(name, str) for name in names)
