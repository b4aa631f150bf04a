"""The public metric in which a network's steps are clipped and noised.

Weights of a network act together: their posterior is far from independent, and steps that treat them one by one are
slow where the data speak loudest. The Gauss-Newton matrix knows better, and it needs no record. With J(x) the
derivative of the outputs and W W' the curvature of the loss,

    H = r P + n E_x[ J' W W' J ],        x from a public reference distribution, P the prior precision, n records.

In coordinates u = H^(1/2) (w - m) one record's slope has norm of about sqrt(d / n), with d directions of which the data
speak: all records alike, so that little is lost to the clip, and noise of one size in every direction moves
predictions, not single weights. Directions of which they hardly speak, with eigenvalues of P^-1 n E[..] below r, stay
where they are: noise would make them wander, since nothing pulls them back.

How many directions a budget can pay for: with steps of damping a that fall linearly to 0 and add up to T, the last
noise counts most. After K steps with noise that amounts to mu-Gaussian differential privacy in all, the mean squared
error that noise adds to the predictions is, in noise variances,

    sqrt(pi T / 8) c^2 d^2 / (mu n)^2,        c being the clip over sqrt(d / n),

because sum over t of a_t^2 exp(-2 sum of later a) = sqrt(pi T / 8) / K. The strongest directions are kept, as many as
stay below a given excess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from confide.expectation.moments import jacobians
from confide.expectation.natural import signed_axes
from confide.expectation.sites import NetworkSites

MEDIAN = 0.6744897501960817  # of |N(0, 1)|: the median norm of an answer, in units of sqrt(d / n)
RIDGE = 10.0  # r: the prior's own curvature, ten times over, as the reference inputs are not the records
_NUMBERS_AT_ONCE = 1 << 18  # of derivatives computed in one piece: larger tensors cost more to allocate than to fill
LARGEST = 2000  # weights, beyond which the matrix is too large to be worth its cost


@cache
def _uniform(count: int, features: int) -> Tensor:
    engine = torch.quasirandom.SobolEngine(features, scramble=True, seed=2)
    return engine.draw(count, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)


def reference_inputs(count: int, features: int, spread: Tensor | None) -> Tensor:
    """Public inputs: normal with the covariance spread spread', or uniform on [-1, 1], where encoders put records."""
    uniform = _uniform(count, features)
    return 2 * uniform - 1 if spread is None else torch.special.ndtri(uniform) @ spread.mT


@dataclass(frozen=True)
class Metric:
    """root: (weights, directions) with root root' = H^-1 on the directions kept, or None for independent weights;
    reach: the median norm of a record's answer."""

    root: Tensor | None
    reach: float


def independent(sites: NetworkSites, records: int) -> Metric:
    """The metric of q itself, weight by weight."""
    return Metric(None, MEDIAN * math.sqrt(sites.weights / records))


def gauss_newton(
    sites: NetworkSites, theta: Tensor, records: int, directions: int, spread: Tensor | None = None
) -> Metric:
    """The metric at the present weights, with so many of the strongest directions.

    `spread` is a root of the covariance of standardised inputs; None: they are uniform on [-1, 1].
    """
    mean, variance = sites.moments(theta)
    count = min(max(2 * sites.weights, 512), 4096)
    inputs = reference_inputs(count, sites.features, spread)
    evidence, scale = sites.evidence(theta), sites.prior[sites.weights : 2 * sites.weights].rsqrt()
    curvature = torch.zeros(sites.weights, sites.weights, dtype=torch.float64)
    for part in inputs.split(max(1, _NUMBERS_AT_ONCE // (sites.weights * evidence.outputs))):
        output, slopes = jacobians(sites.layout, mean, variance, part)
        curved = torch.einsum("iod,ior->ird", slopes, evidence.curvature_root(output)).flatten(0, 1) * scale
        curvature.addmm_(curved.mT, curved, alpha=records / count)
    values, vectors = signed_axes(curvature)
    values, vectors = values[-directions:], vectors[:, -directions:]
    # Answers keep one size over a run: weak directions are there, and count for nothing.
    values = torch.where(values > RIDGE, values, 0.0)
    root = scale[:, None] * vectors * torch.where(values > 0, (values + RIDGE).rsqrt(), 0.0)
    effective = max(1.0, float((values / (values + RIDGE)).sum()))
    return Metric(root, MEDIAN * math.sqrt(effective / records))


def affordable_directions(records: int, mu: float, clip: float, horizon: float, excess: float) -> float:
    """d at which noise adds `excess` to the predictions, for a clip in units of `Metric.reach`."""
    return records * mu / (MEDIAN * clip) * math.sqrt(excess / math.sqrt(math.pi * horizon / 8))


@dataclass(frozen=True)
class NetworkChart:
    """Clipped coordinates of a network's natural parameters about the present approximation, in units of `reach`.

        u         root' (eta - Lambda m), the change of the means, in the metric of H
        Lambda_u  weight * Lambda / (present Lambda), the change of the precisions
        rate      the change of the noise's rate in units of the noise, within its own share of the clip

    (u, Lambda_u) is clipped to C sqrt(1 - share^2) and the rate to C share, so that all of it has norm at most C: the
    rate's clip would be biased towards small residuals if the large ones, clipped for what they say about the
    weights, were to count for less.

    widest   largest change of the rate that a record may ask for, in units of the noise
    trust    largest factor by which a precision or the rate may change in one step
    floor    smallest precision, in prior precisions
    longest  largest norm of a step in the metric: sqrt(n) moves predictions by one standard deviation of the noise
    """

    sites: NetworkSites
    theta: Tensor
    metric: Metric
    clip: float
    weight: float
    share: float = 0.2
    widest: float = 2.0
    trust: float = 1.5
    floor: float = 1.0
    longest: float = math.inf

    @property
    def directions(self) -> int:
        return self.sites.weights if self.metric.root is None else self.metric.root.shape[1]

    @property
    def size(self) -> int:
        """Numbers in an answer."""
        return self.directions + self.sites.size - self.sites.weights

    def encode(self, differences: Tensor) -> Tensor:
        mean, variance = self.sites.moments(self.theta)
        weights = self.sites.weights
        precision = differences[:, weights : 2 * weights]
        centred = differences[:, :weights] - precision * mean
        root = self.metric.root
        step = centred * variance.sqrt() if root is None else centred @ root
        rows = torch.cat([step, self.weight * precision * variance], 1) / self.metric.reach
        if self.sites.shape is None:
            return rows
        rate = differences[:, -1:] / self.sites.noise(self.theta)
        if not math.isfinite(self.clip):
            return torch.cat([rows, rate], 1)
        bound = self.clip * math.sqrt(1 - self.share**2)
        rows = rows * (bound / rows.norm(dim=1, keepdim=True).clamp(min=bound))
        return torch.cat([rows, rate.clamp(-self.widest, self.widest) * self._rate_unit], 1)

    def advance(self, coordinates: Tensor) -> Tensor:
        """The next approximation, from the coordinates of the step."""
        kept, weights = self.directions, self.sites.weights
        mean, variance = self.sites.moments(self.theta)
        change = coordinates[kept : kept + weights] * self.metric.reach / self.weight
        least = self.floor * self.sites.prior[weights : 2 * weights]
        precision = torch.maximum((1 + change).clamp(1 / self.trust, self.trust) / variance, least)
        step, root = self._shortened(coordinates[:kept] * self.metric.reach), self.metric.root
        mean = mean + (step / variance.sqrt() / precision if root is None else root @ step)
        parts = [precision * mean, precision]
        if self.sites.shape is not None:
            unit = self._rate_unit if math.isfinite(self.clip) else 1.0
            growth = coordinates[-1:] / unit * self.sites.noise(self.theta) / self.theta[-1:]
            parts.append(self.theta[-1:] * (1 + growth).clamp(1 / self.trust, self.trust))
        return torch.cat(parts)

    def _shortened(self, step: Tensor) -> Tensor:
        return step * (self.longest / step.norm().clamp(min=self.longest)) if math.isfinite(self.longest) else step

    @property
    def _rate_unit(self) -> float:
        return self.clip * self.share / self.widest
