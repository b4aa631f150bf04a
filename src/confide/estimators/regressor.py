"""`PrivateBayesRegressor`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from confide.data.schema import Task
from confide.data.table import Array
from confide.estimators.base import PrivateBayes
from confide.estimators.documented import documented
from confide.models.predictive import RealPredictive
from confide.workflow.measure import in_units


@documented
@dataclass(eq=False, repr=False, kw_only=True)
class PrivateBayesRegressor(RegressorMixin, PrivateBayes):  # type: ignore[misc]
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, validation: Any = None) -> PrivateBayesRegressor:
        """Check everything, charge the whole run, then learn. X: an array or a data frame; y: one number per record.

        sample_weight   what each record counts for, from 0 to `largest_weight`: it is private, as the record is
        validation      (X, y) that you declare to be public: `callbacks` see predictions on them and how good they are
        """
        self._fit(X, y, sample_weight, validation)
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
