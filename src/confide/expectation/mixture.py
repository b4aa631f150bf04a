"""A mixture of Gaussians with known covariances and weights; what is learnt is where its components stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.expectation.natural import Covariance, GaussianFamily, least_eigenvalue
from confide.models.networks import Recipe


class MixtureOfGaussians(nn.Module):
    """x ~ sum_j weight_j N(mean_j, covariance_j), with a prior N(centre, spread^2 I) on every mean.

    components, features   how many, and in how many dimensions
    scale                  standard deviation of every component, or its covariances (components, features, features)
    weights                equal unless given
    centre, spread         of the prior over the means; public
    generator              draws the means to start from; set `means` to start from a guess of your own

    `recipe` is its shape, features and components, so that a saved posterior can be read back.
    """

    covariances: Tensor
    weights: Tensor
    centre: Tensor

    def __init__(
        self,
        components: int,
        features: int,
        *,
        scale: float | Tensor = 1.0,
        weights: Tensor | None = None,
        centre: float | Tensor = 0.0,
        spread: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if components < 1 or features < 1:
            raise Refusal(f"components={components}, features={features}: both must be at least 1")
        if not (math.isfinite(spread) and spread > 0):
            raise Refusal(f"spread={spread}: must be a finite number > 0")
        self.recipe = Recipe(features, components)
        self.spread = spread
        shares = torch.full((components,), 1 / components) if weights is None else weights
        self.register_buffer("weights", _as_weights(shares, components))
        self.register_buffer("covariances", _as_covariances(scale, components, features))
        middle = torch.as_tensor(centre, dtype=torch.float64).expand(features).clone()
        self.register_buffer("centre", middle)
        start = torch.randn(components, features, generator=generator, dtype=torch.float64)
        self.means = nn.Parameter(middle + spread * start)

    def forward(self, x: Tensor) -> Tensor:
        """log weight_j N(x; mean_j, covariance_j): a softmax of it gives the responsibilities."""
        return log_joint(x, self.means, self.covariances, self.weights)


def _as_weights(weights: Tensor, components: int) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float64)
    if weights.shape != (components,) or not bool((weights > 0).all()):
        raise Refusal(f"weights={weights.tolist()}: need one number > 0 for each of {components} components")
    return weights / weights.sum()


def _as_covariances(scale: float | Tensor, components: int, features: int) -> Tensor:
    value = torch.as_tensor(scale, dtype=torch.float64)
    if value.ndim == 0:
        value = (value.square() * torch.eye(features, dtype=torch.float64)).expand(components, -1, -1).clone()
    if value.shape != (components, features, features):
        raise Refusal(f"scale={tuple(value.shape)}: need one number or ({components}, {features}, {features})")
    if not bool(torch.isfinite(value).all()) or float(torch.linalg.eigvalsh(value).min()) <= 0:
        raise Refusal("scale: covariances must be finite and positive definite")
    return value


def log_joint(x: Tensor, means: Tensor, covariances: Tensor, weights: Tensor) -> Tensor:
    """log weight_j N(x; mean_j, covariance_j) of shape (records, components)."""
    gap = x.to(means.dtype).flatten(1)[:, None, :] - means
    factor = torch.linalg.cholesky(covariances.to(means.dtype))
    white = torch.linalg.solve_triangular(factor, gap[..., None], upper=False)[..., 0]
    volume = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    constant = 0.5 * x.flatten(1).shape[1] * math.log(2 * math.pi)
    value: Tensor = weights.to(means.dtype).log() - 0.5 * white.square().sum(-1) - volume - constant
    return value


@dataclass(frozen=True)
class MixtureSites:
    """The factor of one record over all component means, by the moments of its tilted distribution.

    Under the cavity the means are independent, mean_j ~ N(m_j, V_j). The record belongs to component j with
    responsibility r_j proportional to weight_j N(x; m_j, V_j + covariance_j). If it does, mean_j moves by
    d_j = K_j (x - m_j) with K_j = V_j (V_j + covariance_j)^-1 and its covariance shrinks by K_j V_j; if not, it stays:

        E[mean_j] = m_j + r_j d_j,        Cov[mean_j] = V_j - r_j K_j V_j + r_j (1 - r_j) d_j d_j'.

    The responsibilities are integrated out exactly; the other covariances between components are dropped.
    """

    family: GaussianFamily
    prior: Tensor
    covariances: Tensor
    weights: Tensor

    @classmethod
    def of(cls, module: Any, covariance: Covariance = "full") -> MixtureSites:
        components, features = module.means.shape
        family = GaussianFamily(features, covariance, components)
        spread = torch.eye(features, dtype=torch.float64).expand(components, -1, -1) * module.spread**2
        centre = module.centre.to(torch.float64).expand(components, -1)
        prior = family.from_moments(centre, family.restricted(spread))
        return cls(family, prior, module.covariances.to(torch.float64), module.weights.to(torch.float64))

    @property
    def size(self) -> int:
        return self.family.size

    def factors(self, cavity: Tensor, x: Tensor, y: Tensor) -> Tensor:
        points = x.to(torch.float64).flatten(1)
        mean, covariance = self.family.moments(cavity)
        dense = self.family.dense(covariance)
        marginal = dense + self.covariances
        shares = self._responsibilities(points, mean, marginal)
        gap = points[:, None, :] - mean
        # K' = marginal^-1 V, so that K (x - m) and K V come from one solve.
        gain = torch.linalg.solve(marginal, dense)
        move = (gap[..., None, :] @ gain)[..., 0, :]
        part = shares[..., None, None]
        outer = move[..., :, None] * move[..., None, :]
        tilted = dense - part * (dense @ gain) + part * (1 - part) * outer
        kept = self.family.restricted((tilted + tilted.mT) / 2)
        return self.family.from_moments(mean + shares[..., None] * move, kept) - cavity

    def _responsibilities(self, points: Tensor, mean: Tensor, marginal: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(marginal)
        gap = (points[:, None, :] - mean)[..., None]
        white = torch.linalg.solve_triangular(factor, gap, upper=False)[..., 0]
        volume = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
        shares: Tensor = (self.weights.log() - 0.5 * white.square().sum(-1) - volume).softmax(-1)
        return shares

    def proper(self, theta: Tensor) -> Tensor:
        return self.family.project(theta, self.least_precision)

    @property
    def least_precision(self) -> float:
        """Half of the prior's: a record between two components makes their means less certain, not more."""
        return 0.5 * least_eigenvalue(self.family, self.prior)
