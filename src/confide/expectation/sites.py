"""Sites: the factor of natural parameters that each record asks for, for models whose tilted moments are known.

Expectation propagation replaces every likelihood term by a factor of the exponential family. The factor of a record is

    theta_i = natural(moments of cavity * p(record | w)) - cavity,

and everything here computes it for a whole batch at once, from a cavity shared by all records (SEP, ADF) or from one
cavity per record (EP).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from confide.expectation.evidence import Evidence, GaussianEvidence, evidence_for
from confide.expectation.moments import WeightLayout, slopes
from confide.expectation.natural import GaussianFamily
from confide.models.likelihoods import Likelihood, noise_scale_of

LARGEST_SHARE = 0.9
"""Of a weight's precision after a record, at most this share may come from that record in a network: where propagated
moments make the tilted variance negative, or nearly so, they say nothing."""
ALL_BUT_NOTHING = 1 - 1e-9
"""The same where the moments are exact: a guard against rounding alone."""


class Sites(Protocol):
    """`prior` holds the natural parameters of the prior, in the layout of a factor."""

    @property
    def prior(self) -> Tensor: ...

    @property
    def size(self) -> int:
        """Numbers in a factor."""

    def factors(self, cavity: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """One factor (records, size) for every record; `cavity` is (size,) or (records, size)."""

    def proper(self, theta: Tensor) -> Tensor:
        """`theta` with precisions that are positive."""


@dataclass(frozen=True)
class PlainChart:
    """The natural parameters as they stand: what the paper clips, and what it adds noise to."""

    sites: Sites
    theta: Tensor

    @property
    def size(self) -> int:
        """Numbers in an answer."""
        return self.sites.size

    def encode(self, differences: Tensor) -> Tensor:
        return differences

    def advance(self, coordinates: Tensor) -> Tensor:
        return self.sites.proper(self.theta + coordinates)


def as_target(y: Tensor) -> Tensor:
    """Class numbers as they are, real targets in float64; one entry per record."""
    y = y.reshape(len(y))
    return y if y.dtype == torch.int64 else y.to(torch.float64)


def scalar_factor(
    slope: Tensor, curvature: Tensor, mean: Tensor, variance: Tensor, most: float = LARGEST_SHARE
) -> tuple[Tensor, Tensor]:
    """The Gaussian factor of one variable with cavity N(mean, variance), from the derivatives of log Z.

    With g = d log Z / d mean and h = g^2 - 2 d log Z / d variance the tilted moments are mean + variance g and
    variance - variance^2 h, so that the factor has

        precision = h / (1 - variance h),        eta = (g + mean h) / (1 - variance h).

    `most` is the largest share of the precision that may come from the record.
    """
    curvature = torch.minimum(curvature, most / variance)
    rest = 1 - variance * curvature
    return (slope + mean * curvature) / rest, curvature / rest


def noise_rate(rate: Tensor, shape: float, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The rate that a record adds to q(precision of the noise) = Gamma(shape, rate), by matching E[precision].

    Z(shape) = N(y; mean, variance + rate / (shape - 1)), and E[precision] under the tilted law is
    shape / rate * Z(shape + 1) / Z(shape). A record adds half a degree of freedom, as it does where variance = 0.
    """
    here = GaussianEvidence(rate / (shape - 1)).log_normaliser(mean, variance, y)
    above = GaussianEvidence(rate / shape).log_normaliser(mean, variance, y)
    return rate * torch.expm1(math.log1p(0.5 / shape) + here - above)


@dataclass(frozen=True)
class NetworkSites:
    """A ReLU network (or a linear model) with independent Gaussian weights, by moment propagation.

    layout      the network's weights
    prior       [eta, precision] of the weights, and the rate of the noise if it is learnt
    likelihood  how outputs explain targets
    shape       of q(precision of the noise) = Gamma(shape, rate): half its degrees of freedom, public; a record brings
                half a one. None: the noise is known
    inputs      public affine map of the inputs, (seen by the network, features + 1): first the matrix, then the shift
    """

    layout: WeightLayout
    prior: Tensor
    likelihood: Likelihood
    shape: float | None = None
    inputs: Tensor | None = None

    @property
    def weights(self) -> int:
        return self.layout.size

    @property
    def features(self) -> int:
        return self.layout.widths[0]

    @property
    def size(self) -> int:
        return 2 * self.weights + (self.shape is not None)

    @property
    def family(self) -> GaussianFamily:
        return GaussianFamily(self.weights, "diagonal")

    def moments(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every weight."""
        eta, precision = theta[..., : self.weights], theta[..., self.weights : 2 * self.weights]
        return eta / precision, precision.reciprocal()

    def noise(self, theta: Tensor) -> Tensor:
        """Variance of the noise of a Gaussian target; of no meaning for classes."""
        if self.shape is not None:
            return theta[..., -1] / (self.shape - 1)
        return torch.tensor((noise_scale_of(self.likelihood) or 1.0) ** 2, dtype=torch.float64)

    def evidence(self, theta: Tensor) -> Evidence:
        return evidence_for(self.likelihood, self.noise(theta))

    def transformed(self, x: Tensor) -> Tensor:
        """Inputs as the first layer sees them."""
        x = x.to(torch.float64).flatten(1)
        return x if self.inputs is None else x @ self.inputs[:, :-1].mT + self.inputs[:, -1]

    def factors(self, cavity: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(cavity)
        shape = None if self.shape is None else self.shape - 0.5
        evidence = replace(self, shape=shape).evidence(cavity)
        target = as_target(y)
        found = slopes(
            self.layout, mean, variance, self.transformed(x), lambda m, v: evidence.log_normaliser(m, v, target)
        )
        curvature = found.mean.square() - 2 * found.variance
        parts = list(scalar_factor(found.mean, curvature, mean, variance))
        if shape is not None:
            parts.append(noise_rate(cavity[..., -1], shape, found.output_mean, found.output_variance, target)[:, None])
        return torch.cat(parts, 1)

    def proper(self, theta: Tensor) -> Tensor:
        """Weights are at least as well known as under the prior, and the noise keeps a thousandth of its prior rate."""
        weights = self.weights
        precision = torch.maximum(theta[..., weights : 2 * weights], self.prior[weights : 2 * weights])
        rest = theta[..., 2 * weights :]
        return torch.cat([theta[..., :weights], precision, torch.maximum(rest, 1e-3 * self.prior[2 * weights :])], -1)


def network_prior(layout: WeightLayout, scale: float) -> Tensor:
    """[eta, precision] of independent weights: N(0, scale^2), divided by the inputs of the unit in deep networks.

    So the outputs of a network are of one size at any width; a linear model keeps the prior that was asked for.
    """
    precision = layout.fan_in() if len(layout.shapes) > 1 else torch.ones(layout.size, dtype=torch.float64)
    precision = precision / scale**2
    return torch.cat([torch.zeros_like(precision), precision])
