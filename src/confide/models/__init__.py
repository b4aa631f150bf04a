"""Models: networks, likelihoods and priors, each in a file of its own, and programs in the place of a network."""

from confide.models.programs import program

__all__ = ["program"]
