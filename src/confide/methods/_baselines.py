"""Expectation propagation without privacy: EP itself and assumed density filtering, for comparison.

Both read records directly. EP keeps one factor per record, which is private in itself, so it cannot run behind the
boundary at all. What they return is marked as not private; it must not leave the trusted side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.expectation.approximation import PRIOR_SHAPE, AnySites, noise_of, sites_for, starting_point
from confide.expectation.natural import Covariance
from confide.expectation.sites import NetworkSites
from confide.models.flat import trainable
from confide.models.likelihoods import Gaussian
from confide.posteriors.natural import NaturalGaussian

_NUMBERS_AT_ONCE = 1 << 18  # of factors computed in one piece: larger tensors cost more to allocate than to fill


def expectation_propagation(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: Any = None,
    scale: float = 1.0,
    covariance: Covariance = "diagonal",
    learn_noise: bool = True,
    passes: int = 50,
    damping: float = 1.0,
    start: float = 1.0,
    generator: torch.Generator | None = None,
) -> NaturalGaussian:
    """EP with a factor for every record, refined a block of records at a time: NOT PRIVATE.

        cavity_i = theta - theta_i,    theta_i' = theta_i + damping * (factor(cavity_i, record i) - theta_i),

    and theta moves by what its block's factors moved before the next block is asked, so that a pass over n records
    takes as many steps as it has blocks. Records come in a new order for every pass if there is a generator.

    damping   below 1 where records do not determine the weights one by one: 0.1 to 0.3 for networks
    start     the precision of the first q in units of the prior's
    """
    likelihood = Gaussian() if likelihood is None else likelihood
    sites = sites_for(module, likelihood, len(x), scale=scale, covariance=covariance, learn_noise=learn_noise)
    theta = starting_point(sites, _position(module), start, generator)
    factors = ((theta - sites.prior) / len(x)).repeat(len(x), 1)
    rows = max(1, _NUMBERS_AT_ONCE // sites.size)
    with torch.no_grad():
        for _ in range(passes):
            total = sites.prior + factors.sum(0)  # anew, so that roundings do not add up over passes
            order = torch.arange(len(x)) if generator is None else torch.randperm(len(x), generator=generator)
            for part in order.split(rows):
                known = factors[part]
                found = sites.factors(sites.proper(sites.proper(total) - known), x[part], y[part])
                change = damping * (torch.nan_to_num(found, 0.0, 0.0, 0.0) - known)
                factors[part] = known + change
                total = total + change.sum(0)
    theta = sites.proper(sites.prior + factors.sum(0))
    return _posterior(module, likelihood, sites, theta, "EP, not private")


def assumed_density_filtering(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: Any = None,
    scale: float = 1.0,
    covariance: Covariance = "diagonal",
    learn_noise: bool = True,
    passes: int = 1,
    batch: int = 1,
    generator: torch.Generator | None = None,
) -> NaturalGaussian:
    """One record after the other, each multiplied into q once: probabilistic backpropagation. NOT PRIVATE.

    The filter is sequential by nature, so this walks through the records in the given order, `batch` at a time. More
    than one pass counts every record as often, as Hernandez-Lobato and Adams do: the posterior is then too narrow.
    """
    likelihood = Gaussian() if likelihood is None else likelihood
    sites = sites_for(module, likelihood, 0, scale=scale, covariance=covariance, learn_noise=learn_noise)
    theta = starting_point(sites, _position(module), 1.0, generator)
    seen = 0
    with torch.no_grad():
        for part in torch.arange(len(x)).split(batch) * passes:
            # The factor is that of a cavity, which here is all of q so far.
            ahead = _with_records(sites, seen + 1)
            found = torch.nan_to_num(ahead.factors(theta, x[part], y[part]), 0.0, 0.0, 0.0)
            theta = sites.proper(theta + found.sum(0))
            seen += len(part)
    return _posterior(module, likelihood, _with_records(sites, seen), theta, "ADF, not private")


def _with_records(sites: AnySites, records: int) -> AnySites:
    """The same sites for a q that holds so many records."""
    if isinstance(sites, NetworkSites) and sites.shape is not None:
        return replace(sites, shape=PRIOR_SHAPE + records / 2)
    return sites


def _position(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(module)])


def _posterior(module: nn.Module, likelihood: Any, sites: AnySites, theta: Tensor, variant: str) -> NaturalGaussian:
    facts = {"variant": variant, "private": False, "covariance": sites.family.covariance}
    noise = noise_of(sites, theta, likelihood)
    return NaturalGaussian(module, likelihood, theta[: sites.family.size], noise, None, facts)
