"""PrivateSearchCV: scikit-learn's GridSearchCV under differential privacy. One budget pays for all settings.

    search = PrivateSearchCV(PrivateBayesClassifier(epsilon=1.0, bounds=(0, 1), classes=2, records=20_000),
                             {"method": ["additive", "tabular"], "clip": [1.0, 2.0]})
    search.fit(X, y)                   # says first what it can find, charges everything, and only then reads
    search.best_params_, search.cv_results_["noisy_test_score"], search.privacy_.statement()

epsilon of the estimator is the price of the whole search: every fit and every score, the ones that lose as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.model_selection import ParameterGrid
from sklearn.utils.validation import check_is_fitted

from confide.errors import PrivacyWarning, Refusal
from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor
from confide.workflow.search import Searched, prepare_search, run_search

CHOICES = ("method", "module", "hidden", "likelihood", "prior", "noise_scale", "batch", "epochs", "steps", "clip")
"""Parameters that a search may vary: those that are neither the budget nor facts about the records."""


class PrivateSearchCV(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """The best of several settings of a private estimator, within its one budget.

    Parameters
    ----------
    estimator : PrivateBayesClassifier or PrivateBayesRegressor
        Its epsilon and delta are those of the whole search; its facts (bounds, classes, records) are declared.
    param_grid : dict or list of dict
        Lists of values by parameter, as for GridSearchCV; of the estimator's, those that are neither budget nor facts.

    Attributes
    ----------
    best_estimator_ : the winner, fitted; `predict` and the like are its own
    best_params_, best_index_, best_score_ : of the winner; its score is noisy, and too high by what made it win
    cv_results_ : dict with "params", "noisy_test_score" and "noise", the standard deviation of what was added
    outlook_ : what could be told apart, as it was said before the charge
    privacy_ : of the whole search
    """

    def __init__(self, estimator: Any, param_grid: Any) -> None:
        self.estimator = estimator
        self.param_grid = param_grid

    def fit(self, X: Any, y: Any) -> PrivateSearchCV:
        """Say what can be found, charge all fits and scores, then fit, score and choose."""
        base, candidates = self._checked()
        table, facts = base.training_request(X, y)
        request = base.as_request(table, facts)
        trials = prepare_search(request, candidates)
        self.outlook_ = trials.outlook
        if not trials.outlook.pays_off:
            warnings.warn(trials.outlook.sentence(), PrivacyWarning, stacklevel=2)
        self._keep(base, candidates, run_search(trials))
        return self

    def _checked(self) -> tuple[Any, list[dict[str, Any]]]:
        if not isinstance(self.estimator, PrivateBayesClassifier | PrivateBayesRegressor):
            raise TypeError(f"estimator={self.estimator!r}: must be a PrivateBayesClassifier or PrivateBayesRegressor")
        grids = [self.param_grid] if isinstance(self.param_grid, Mapping) else self.param_grid
        if not isinstance(grids, Iterable) or not all(isinstance(grid, Mapping) for grid in grids):
            raise TypeError("param_grid: must be a dictionary of lists, or a list of such dictionaries")
        candidates = [dict(values) for values in ParameterGrid(grids)]
        for name in dict.fromkeys(name for values in candidates for name in values):
            if name not in CHOICES:
                raise Refusal(
                    f"param_grid: {name} is not to be searched; budget and facts are the same for all settings, "
                    f"and these may differ: {', '.join(CHOICES)}"
                )
        return clone(self.estimator), candidates

    def _keep(self, base: Any, candidates: list[dict[str, Any]], found: Searched) -> None:
        self.best_index_, self.best_params_ = found.best, candidates[found.best]
        self.best_score_ = found.scores[found.best]
        self.best_estimator_ = base.set_params(**self.best_params_).with_outcome(found.outcome)
        self.privacy_ = found.outcome.run.privacy
        noise = np.full(len(candidates), found.noise)
        self.cv_results_ = {"params": candidates, "noisy_test_score": np.array(found.scores), "noise": noise}

    def predict(self, X: Any, **options: Any) -> Any:
        """Of the winner."""
        return self._winner().predict(X, **options)

    def predict_proba(self, X: Any) -> Any:
        """Of the winner, where it is a classifier."""
        return self._winner().predict_proba(X)

    def predictive(self, X: Any) -> Any:
        """Of the winner."""
        return self._winner().predictive(X)

    def score(self, X: Any, y: Any) -> float:
        """Of the winner, without noise: on public or separate records only."""
        return float(self._winner().score(X, y))

    def save(self, directory: Any, **options: Any) -> Any:
        """Of the winner; its statement is about the whole search."""
        return self._winner().save(directory, **options)

    def _winner(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    @property
    def classes_(self) -> Any:
        return self._winner().classes_

    def __sklearn_clone__(self) -> PrivateSearchCV:
        return PrivateSearchCV(clone(self.estimator), self.param_grid)  # the ledger is shared, see the estimators
