"""Sites of a generalised linear model f = w'(x, 1): Gaussian, probit or logistic, with any form of precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from confide.expectation.evidence import Evidence, evidence_for
from confide.expectation.natural import Covariance, GaussianFamily, least_eigenvalue
from confide.expectation.sites import ALL_BUT_NOTHING, as_target, scalar_factor
from confide.models.likelihoods import Likelihood, noise_scale_of


@dataclass(frozen=True)
class LinearSites:
    """With cavity N(m, S) the output is f ~ N(x'm, x'Sx), and a record says something about f alone.

    full                its factor (eta_f, lambda_f) on f is one on w of rank one: eta_f x and lambda_f x x'
    diagonal, scalar    the tilted mean m + g S x and covariance S - h S x x'S, as far as the family keeps it
    """

    family: GaussianFamily
    prior: Tensor
    likelihood: Likelihood

    @classmethod
    def of(
        cls, features: int, likelihood: Likelihood, scale: float = 1.0, covariance: Covariance = "full"
    ) -> LinearSites:
        """With a prior N(0, scale^2) on every weight and on the bias, which comes last."""
        family = GaussianFamily(features + 1, covariance)
        matrix = torch.eye(features + 1, dtype=torch.float64)[None] * scale**2
        prior = family.from_moments(torch.zeros(1, features + 1, dtype=torch.float64), family.restricted(matrix))
        return cls(family, prior, likelihood)

    @property
    def size(self) -> int:
        return self.family.size

    @property
    def evidence(self) -> Evidence:
        noise = (noise_scale_of(self.likelihood) or 1.0) ** 2
        return evidence_for(self.likelihood, torch.tensor(noise, dtype=torch.float64))

    def factors(self, cavity: Tensor, x: Tensor, y: Tensor) -> Tensor:
        inputs = with_ones(x)
        mean, covariance = self._moments(cavity)
        spread = self._applied(covariance, inputs)
        output, doubt = (inputs * mean).sum(-1), (inputs * spread).sum(-1)
        slope, curvature = self._derivatives(output, doubt, as_target(y))
        if self.family.covariance == "full":
            eta, precision = scalar_factor(slope, curvature, output, doubt, ALL_BUT_NOTHING)
            outer = inputs[:, :, None] * inputs[:, None, :]
            return self.family.pack((eta[:, None] * inputs)[:, None], (precision[:, None, None] * outer)[:, None])
        lost = curvature[:, None] * spread.square()
        lost = lost if self.family.covariance == "diagonal" else lost.mean(-1)
        left = covariance - torch.minimum(lost, ALL_BUT_NOTHING * covariance)
        return self.family.from_moments((mean + slope[:, None] * spread)[:, None], left[:, None]) - cavity

    def proper(self, theta: Tensor) -> Tensor:
        return self.family.project(theta, self.least_precision)

    @property
    def least_precision(self) -> float:
        """That of the prior: these likelihoods are log-concave, so a record never makes a weight less certain."""
        return least_eigenvalue(self.family, self.prior)

    def _moments(self, cavity: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., d) and covariance in the family's shape, without the axis of the single copy."""
        mean, covariance = self.family.moments(cavity)
        axis = {"full": -3, "diagonal": -2, "scalar": -1}[self.family.covariance]
        return mean.squeeze(-2), covariance.squeeze(axis)

    def _applied(self, covariance: Tensor, inputs: Tensor) -> Tensor:
        """S x for every record."""
        if self.family.covariance == "full":
            return (covariance @ inputs[..., None])[..., 0]
        return covariance * inputs if self.family.covariance == "diagonal" else covariance[..., None] * inputs

    def _derivatives(self, output: Tensor, doubt: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """g = d log Z / d mean and h = g^2 - 2 d log Z / d variance of f."""
        with torch.enable_grad():
            output, doubt = output.detach().requires_grad_(), doubt.detach().requires_grad_()
            total = self.evidence.log_normaliser(output[:, None], doubt[:, None], y).sum()
            slope, by_variance = torch.autograd.grad(total, (output, doubt))
        return slope, slope.square() - 2 * by_variance


def with_ones(x: Tensor) -> Tensor:
    """Inputs in float64 with a one for the bias."""
    x = x.to(torch.float64).flatten(1)
    return torch.cat([x, x.new_ones(len(x), 1)], 1)
