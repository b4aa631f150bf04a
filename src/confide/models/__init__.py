"""Models: networks, likelihoods and priors, each in a file of its own, and programs in the place of a network."""

from confide.models.programs import program
from confide.models.pyro_models import from_pyro

__all__ = ["from_pyro", "program"]
