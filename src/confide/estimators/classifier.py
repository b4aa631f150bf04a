"""`PrivateBayesClassifier`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from confide.data.labels import Label
from confide.data.schema import Task
from confide.data.table import Array
from confide.estimators.base import PrivateBayes
from confide.estimators.documented import documented
from confide.models.predictive import ClassPredictive
from confide.workflow.run import Outcome


@documented
@dataclass(eq=False, repr=False, kw_only=True)
class PrivateBayesClassifier(ClassifierMixin, PrivateBayes):  # type: ignore[misc]
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, validation: Any = None) -> PrivateBayesClassifier:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one label per record.

        sample_weight   what each record counts for, from 0 to `largest_weight`: it is private, as the record is
        validation      (X, y) that you declare to be public: `callbacks` see predictions on them and how good they are
        """
        self._fit(X, y, sample_weight, validation)
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
