"""Private Bayesian learning in the scikit-learn manner.

    model = PrivateBayesClassifier(epsilon=1.0, delta=1e-5, bounds=(0, 16), classes=range(10))
    model.fit(X, y)
    model.predict_proba(X_test)            # posterior predictive
    model.predictive(X_test).epistemic     # and .aleatoric, .interval(0.9)
    model.privacy_.statement()

What is checked first, what is public and what is charged is settled in `confide.workflow`; this file holds the two
classes that a user sees.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import nn

from confide.data.labels import Label
from confide.data.preprocessing import Encoder
from confide.data.schema import Schema, Task
from confide.data.table import Array
from confide.methods.base import Method
from confide.models.likelihoods import Likelihood
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.models.priors import Prior
from confide.posteriors.base import Posterior
from confide.posteriors.prediction.summary import Summary
from confide.privacy.ledger import Ledger
from confide.privacy.statement import Privacy
from confide.running.fit import Run
from confide.workflow import estimation
from confide.workflow.rules import DEFAULT_CLIP, in_units

ROWS_AT_ONCE = 8192

PARAMETERS = """
    Parameters
    ----------
    method : "auto", the name of a method (see `confide.methods.names()`) or a Method
        "auto" is SGLD on a network by public sizes alone: one hidden layer of 64 units where
        records * epsilon >= 10 * (weights of that network), and no hidden layer otherwise.
    epsilon, delta : the budget of one fit, for adding or removing one record
    bounds : (low, high), one such pair per feature, or {{column name: (low, high)}}
        Public range of the features. Values outside are clamped, and the range is scaled to [-1, 1].
    {target}
    records : public nominal number of records; need not be exact
        Not declared: the records are counted privately, for a tenth of epsilon at most; batches then are a twentieth
        of the data, so that their size rests on no count. Declare it for fewer than a thousand records.
    schema : a confide.Schema, for all of these facts at once and for categories by column name
    assume_public : read the facts that are left open off the data; the privacy statement then says so
    module : any torch Module; records with more than one dimension reach it as (n, channels, height, width)
    hidden : widths of the hidden layers of confide's own network; None is the rule of "auto", else no hidden layer
    likelihood, prior : from confide.likelihoods and confide.priors; None is the default of task and method. The noise
        of a regression target then is learnt privately from a histogram of residuals, for a fifth of epsilon at most
    batch, epochs or steps, clip : the plan; None is the public rule of the command line
    ledger : a Ledger or the path of one; None keeps no account over fits
    name : the data set's name in the ledger
    seed : for tests only: noise that can be reproduced protects nothing, and the statement claims nothing

    Attributes
    ----------
    posterior_, privacy_, run_ : the posterior, what it cost and the whole run; `save(directory)` writes them
    schema_ : the public facts and whose word each of them is
    n_features_in_, feature_names_in_ : as in scikit-learn{more}

    What leaks in spite of this class
    ---------------------------------
    - A step before it in a Pipeline that learns from the data, such as StandardScaler, PCA or OneHotEncoder, reads all
      records in silence, and this class cannot see it. Leave it out: the declared bounds scale the features.
    - `score` on training or held-out private records is an unprotected reading of them, and so are the results of
      `cross_val_score` and `GridSearchCV`. Use public records, or keep the numbers to yourself.
    - Every fit spends. `cross_val_score` with k folds fits k times: each record is in k - 1 of the training sets, and
      the ledger, which does not know the folds, charges all k. Together they cost what k releases of this budget
      compose to: less than k * epsilon, far more than epsilon. A ledger with a limit refuses the fit that would exceed
      it (BudgetExceeded) before a record is read. With several processes give the ledger's path.
"""


class _PrivateBayes(BaseEstimator):  # type: ignore[misc]
    """What the two estimators share."""

    task: ClassVar[Task]
    posterior_: Posterior
    privacy_: Privacy
    run_: Run
    schema_: Schema
    encoder_: Encoder

    def _fit(self, X: Any, y: Any) -> None:
        request = estimation.request_of(self)
        table = estimation.training_table(self, X, y, request)
        outcome = estimation.run_request(request, table)
        self.run_, self.encoder_ = outcome.run, outcome.encoder
        self.posterior_, self.privacy_, self.schema_ = outcome.run.posterior, outcome.run.privacy, outcome.run.schema

    def save(self, directory: str | Path) -> Path:
        """Write posterior, run and report to a new directory, which `confide predict` reads."""
        from confide.running.artefacts import save_run

        check_is_fitted(self, "posterior_")
        return save_run(self.run_, directory, encoder=self.encoder_)

    def _parts(self, X: Any) -> Iterator[Summary]:
        """Averages over the posterior for some thousand records at a time: memory grows neither with X nor draws."""
        inputs = self._inputs(X)
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            yield self.posterior_.summary(inputs[start : start + ROWS_AT_ONCE])

    def _inputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self, "posterior_")
        table = estimation.new_table(self, X, self.schema_)
        return torch.as_tensor(self.encoder_.features(table))

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


class PrivateBayesClassifier(ClassifierMixin, _PrivateBayes):  # type: ignore[misc]
    __doc__ = "A Bayesian classifier under differential privacy.\n" + PARAMETERS.format(
        target="classes : the public labels, or their number for 0, 1, ...; records of other labels count as nothing",
        more="\n    classes_ : the declared labels, sorted",
    )

    task: ClassVar[Task] = "classification"
    classes_: Array

    def __init__(
        self,
        method: str | Method = "auto",
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        bounds: Iterable[Any] | Mapping[str, Any] | None = None,
        classes: int | Iterable[Label] | None = None,
        records: int | None = None,
        schema: Schema | None = None,
        assume_public: bool = False,
        module: nn.Module | None = None,
        hidden: tuple[int, ...] | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        batch: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        clip: float = DEFAULT_CLIP,
        ledger: Ledger | str | Path | None = None,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        self.method = method
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.classes = classes
        self.records = records
        self.schema = schema
        self.assume_public = assume_public
        self.module = module
        self.hidden = hidden
        self.likelihood = likelihood
        self.prior = prior
        self.batch = batch
        self.epochs = epochs
        self.steps = steps
        self.clip = clip
        self.ledger = ledger
        self.name = name
        self.seed = seed

    def fit(self, X: Any, y: Any) -> PrivateBayesClassifier:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one label per record."""
        self._fit(X, y)
        assert self.schema_.classes is not None  # a request for classification settles them
        self.classes_ = np.asarray(self.schema_.classes)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Posterior predictive probabilities, of shape (n, classes), in the order of `classes_`."""
        parts = [part.centre.double().numpy() for part in self._parts(X)]
        probabilities: Array = np.concatenate(parts)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities

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


class PrivateBayesRegressor(RegressorMixin, _PrivateBayes):  # type: ignore[misc]
    __doc__ = "Bayesian regression under differential privacy.\n" + PARAMETERS.format(
        target="target_bounds : (low, high), the public range of the target; values outside are clamped", more=""
    )

    task: ClassVar[Task] = "regression"

    def __init__(
        self,
        method: str | Method = "auto",
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        bounds: Iterable[Any] | Mapping[str, Any] | None = None,
        target_bounds: Iterable[float] | None = None,
        records: int | None = None,
        schema: Schema | None = None,
        assume_public: bool = False,
        module: nn.Module | None = None,
        hidden: tuple[int, ...] | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        batch: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        clip: float = DEFAULT_CLIP,
        ledger: Ledger | str | Path | None = None,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        self.method = method
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.records = records
        self.schema = schema
        self.assume_public = assume_public
        self.module = module
        self.hidden = hidden
        self.likelihood = likelihood
        self.prior = prior
        self.batch = batch
        self.epochs = epochs
        self.steps = steps
        self.clip = clip
        self.ledger = ledger
        self.name = name
        self.seed = seed

    def fit(self, X: Any, y: Any) -> PrivateBayesRegressor:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one number per record."""
        self._fit(X, y)
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

    @staticmethod
    def _labels(y: Any) -> Array:
        labels: Array = column_or_1d(y, warn=True)
        return labels
