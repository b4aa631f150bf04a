"""Whether a statistic that predicts can be asked about a whole batch: only if nothing in it was written by the user."""

from __future__ import annotations

from confide.expectation.mixture import MixtureOfGaussians
from confide.mechanism.clipping import Recordwise
from confide.mechanism.clipping.statistics import Statistic
from confide.models.likelihoods import LIKELIHOODS
from confide.posteriors.additive import AdditiveGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.posteriors.mapped import MappedDraws
from confide.posteriors.natural import NaturalGaussian
from confide.posteriors.variational import DiagonalGaussian, DropoutNetwork

OWN = (Draws, MappedDraws, DiagonalGaussian, DropoutNetwork, NaturalGaussian, AdditiveGaussian)


def recordwise(function: Statistic, posterior: Posterior) -> Statistic:
    """The statistic, believed as far as the posterior's network is proven to keep records apart."""
    if type(posterior) not in OWN or type(posterior.likelihood) not in LIKELIHOODS.values():
        return function
    own = type(posterior.module) is MixtureOfGaussians
    return Recordwise(function, None if own else posterior.module)
