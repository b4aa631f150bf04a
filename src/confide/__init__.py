"""confide: differentially private Bayesian learning for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confide import methods
from confide.data.schema import Schema
from confide.mechanism.plan import Plan, plan
from confide.models import likelihoods, networks, priors
from confide.posteriors.files import load_posterior
from confide.privacy.ledger import BudgetExceeded, Ledger
from confide.privacy.statement import Privacy
from confide.running.chains import fit_chains
from confide.running.fit import Run, fit
from confide.sources.private_data import PrivateData

if TYPE_CHECKING:
    from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor

__all__ = [
    "BudgetExceeded",
    "Ledger",
    "Plan",
    "Privacy",
    "PrivateBayesClassifier",
    "PrivateBayesRegressor",
    "PrivateData",
    "Run",
    "Schema",
    "fit",
    "fit_chains",
    "likelihoods",
    "load_posterior",
    "methods",
    "networks",
    "plan",
    "priors",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml holds the one number; what is installed knows it
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("confide")
        except PackageNotFoundError:
            return "unknown"
    # The estimators bring scikit-learn, which is slow to import and not needed by those who do without them.
    if name in ("PrivateBayesClassifier", "PrivateBayesRegressor"):
        from confide import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
