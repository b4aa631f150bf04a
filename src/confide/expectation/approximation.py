"""Which approximation belongs to a model: its sites, and where to start from. All of it from public facts."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.expectation.glm import LinearSites
from confide.expectation.mixture import MixtureOfGaussians, MixtureSites
from confide.expectation.moments import WeightLayout
from confide.expectation.natural import Covariance
from confide.expectation.sites import NetworkSites, network_prior
from confide.models.likelihoods import Gaussian, Likelihood, noise_scale_of
from confide.models.networks import Recipe, recipe_of

AnySites: TypeAlias = NetworkSites | LinearSites | MixtureSites

PRIOR_SHAPE = 6.0  # of the Gamma prior over the precision of the noise, as in probabilistic backpropagation


def sites_for(
    module: nn.Module,
    likelihood: Likelihood,
    records: float,
    *,
    scale: float = 1.0,
    covariance: Covariance = "diagonal",
    learn_noise: bool = True,
    inputs: Tensor | None = None,
) -> AnySites:
    """The sites of a network of confide's own or of a mixture.

    records      how many of them q will hold; each adds half a degree of freedom to the noise
    scale        of the prior over the weights; mixtures have a prior of their own
    learn_noise  of a Gaussian target with a diagonal covariance; its prior mean is the likelihood's noise variance
    inputs       public affine map of a network's inputs
    """
    if isinstance(module, MixtureOfGaussians):
        return MixtureSites.of(module, covariance)
    recipe = recipe_of(module)
    if recipe is None:
        raise Refusal("module: moments are known for networks of confide.networks and for mixtures; use one of them")
    if recipe.outputs != likelihood.outputs:
        raise Refusal(f"outputs={recipe.outputs}: the likelihood {likelihood.name} needs {likelihood.outputs}")
    layout = WeightLayout.of(recipe, inputs)
    if covariance != "diagonal":
        return _linear(recipe, likelihood, scale, covariance, learn_noise and isinstance(likelihood, Gaussian))
    prior = network_prior(layout, scale)
    if not learn_noise or not isinstance(likelihood, Gaussian):
        return NetworkSites(layout, prior, likelihood, None, inputs)
    rate = (PRIOR_SHAPE - 1) * likelihood.noise_scale**2
    return NetworkSites(
        layout, torch.cat([prior, prior.new_tensor([rate])]), likelihood, PRIOR_SHAPE + records / 2, inputs
    )


def _linear(recipe: Recipe, likelihood: Likelihood, scale: float, covariance: Covariance, learnt: bool) -> LinearSites:
    if recipe.hidden or recipe.outputs != 1:
        raise Refusal(
            f"covariance={covariance!r}: known for linear models with one output; use 'diagonal' for networks"
        )
    if learnt:
        raise Refusal("noise='learnt': needs covariance='diagonal'; declare the noise and set noise='fixed'")
    return LinearSites.of(recipe.features, likelihood, scale, covariance)


def starting_point(
    sites: AnySites, position: Tensor, certainty: float, generator: torch.Generator | None = None
) -> Tensor:
    """Natural parameters of a q that is `certainty` times as precise as the prior.

    A network's hidden layers start at random and its last layer at zero, so that it starts as the zero function; a
    mixture starts at `position`, its module's means.
    """
    if not isinstance(sites, NetworkSites):
        eta, precision = sites.family.unpack(sites.prior)
        if isinstance(sites, MixtureSites):
            eta = sites.family.times(precision, position.to(torch.float64).reshape(eta.shape))
        return sites.family.pack(certainty * eta, certainty * precision)
    weights = sites.weights
    precision = certainty * sites.prior[weights : 2 * weights]
    mean = torch.randn(weights, generator=generator, dtype=torch.float64) / sites.layout.fan_in().sqrt()
    units, inputs = sites.layout.shapes[-1]
    mean[-units * inputs :] = 0
    parts = [precision * mean, precision]
    if sites.shape is not None:
        parts.append(sites.prior[-1:] * (sites.shape - 1) / (PRIOR_SHAPE - 1))
    return torch.cat(parts)


def noise_of(sites: AnySites, theta: Tensor, likelihood: Likelihood) -> Tensor:
    """Variance of the noise of a Gaussian target under q."""
    if isinstance(sites, NetworkSites):
        return sites.noise(theta)
    return torch.tensor((noise_scale_of(likelihood) or 1.0) ** 2, dtype=torch.float64)
