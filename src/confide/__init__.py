"""confide: differentially private Bayesian learning for PyTorch."""

from confide import methods
from confide.boundary import PrivateData
from confide.chains import fit_chains
from confide.data.schema import Schema
from confide.fit import Run, fit
from confide.models import likelihoods, networks, priors
from confide.plan import Plan, plan
from confide.posteriors import load_posterior
from confide.privacy.ledger import BudgetExceeded, Ledger
from confide.privacy.statement import Privacy

__version__ = "0.1.0"

__all__ = [
    "BudgetExceeded",
    "Ledger",
    "Plan",
    "Privacy",
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
