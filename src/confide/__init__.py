"""confide: differentially private Bayesian learning for PyTorch.

Everything below is imported when it is first used: `import confide` itself loads neither torch nor scikit-learn. It
asks the library that makes torch's products to add up in one order wherever a row stands (docs/soundness.md, "Sums as
they are computed"). That listens once, at the first product of a process; where it is not there nobody hears.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confide import data, distributed, federated, methods, models, pate
    from confide.data.schema import Schema
    from confide.errors import BudgetExceeded
    from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor
    from confide.mechanism.plan import Plan, plan
    from confide.models import likelihoods, networks, priors
    from confide.posteriors.files import load_posterior
    from confide.privacy.ledger import Ledger
    from confide.privacy.statement import Privacy
    from confide.private_search import PrivateSearchCV
    from confide.running.chains import fit_chains
    from confide.running.fit import Run, fit
    from confide.running.sharded import fit_sharded
    from confide.sources.private_data import PrivateData
    from confide.workflow.compare import compare
    from confide.workflow.request import Request
    from confide.workflow.run import run_request

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = [
    "BudgetExceeded",
    "Ledger",
    "Plan",
    "Privacy",
    "PrivateBayesClassifier",
    "PrivateBayesRegressor",
    "PrivateData",
    "PrivateSearchCV",
    "Request",
    "Run",
    "Schema",
    "callbacks",
    "compare",
    "data",
    "distributed",
    "federated",
    "fit",
    "fit_chains",
    "fit_sharded",
    "likelihoods",
    "load_posterior",
    "methods",
    "models",
    "networks",
    "pate",
    "plan",
    "priors",
    "run_request",
]

_HOMES = {
    "BudgetExceeded": "errors",
    "Ledger": "privacy.ledger",
    "Plan": "mechanism.plan",
    "Privacy": "privacy.statement",
    "PrivateBayesClassifier": "estimators",
    "PrivateBayesRegressor": "estimators",
    "PrivateData": "sources.private_data",
    "PrivateSearchCV": "private_search",
    "Request": "workflow.request",
    "Run": "running.fit",
    "Schema": "data.schema",
    "compare": "workflow.compare",
    "fit": "running.fit",
    "fit_chains": "running.chains",
    "fit_sharded": "running.sharded",
    "load_posterior": "posteriors.files",
    "plan": "mechanism.plan",
    "run_request": "workflow.run",
}
_MODULES = {
    "callbacks": "running.callbacks",
    "data": "data",
    "distributed": "distributed",
    "federated": "federated",
    "likelihoods": "models.likelihoods",
    "methods": "methods",
    "models": "models",
    "networks": "models.networks",
    "pate": "pate",
    "priors": "models.priors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml holds the one number; what is installed knows it
        found: Any = _version()
    elif name in _MODULES:
        found = import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("confide")
    except PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
