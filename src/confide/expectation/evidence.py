"""What a record says about a network's output: log Z = log E[p(y | f)] for f ~ N(mean, variance), output by output.

Moment matching needs log Z and its derivatives and nothing else. A Gaussian target and a probit link have closed forms;
the logistic link is integrated by Gauss-Hermite quadrature in one dimension, the softmax by a fixed set of public
quasi-random normals, the same for every record and step, so that a run can be repeated bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.errors import Refusal
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Probit

_NODES = 32  # Gauss-Hermite: exact for polynomials up to degree 63
_NORMALS = 64  # in pairs of opposite sign; every record of a batch is evaluated at each of them


class Evidence(Protocol):
    """`log_normaliser` is differentiable in mean and variance, both of shape (records, outputs)."""

    @property
    def outputs(self) -> int: ...

    def log_normaliser(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """log Z, one value per record."""

    def curvature_root(self, output: Tensor) -> Tensor:
        """W (inputs, outputs, rank) with W W' = E over y of the Hessian of -log p(y | f) at f = output."""


@dataclass(frozen=True)
class GaussianEvidence:
    """y ~ N(f, noise): Z = N(y; mean, variance + noise)."""

    noise: Tensor
    outputs: int = 1

    def log_normaliser(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        total = variance[:, 0] + self.noise
        return -0.5 * (torch.log(2 * math.pi * total) + (y - mean[:, 0]).square() / total)

    def curvature_root(self, output: Tensor) -> Tensor:
        return self.noise.rsqrt().expand(len(output), 1, 1)


@dataclass(frozen=True)
class ProbitEvidence:
    """P(y = 1) = Phi(f): Z = Phi(+- mean / sqrt(1 + variance))."""

    outputs: int = 1

    def log_normaliser(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        value: Tensor = torch.special.log_ndtr(_sign(y, mean) * mean[:, 0] / (1 + variance[:, 0]).sqrt())
        return value

    def curvature_root(self, output: Tensor) -> Tensor:
        density = -0.5 * (output.square() + math.log(2 * math.pi))
        log_fisher: Tensor = 2 * density - torch.special.log_ndtr(output) - torch.special.log_ndtr(-output)
        return (0.5 * log_fisher).exp()[:, :, None]


@dataclass(frozen=True)
class LogisticEvidence:
    """P(y = 1) = sigmoid(f), by quadrature."""

    outputs: int = 1

    def log_normaliser(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        nodes, log_weights = _hermite(_NODES)
        points = mean + variance.sqrt() * nodes
        return torch.logsumexp(F.logsigmoid(_sign(y, mean)[:, None] * points) + log_weights, -1)

    def curvature_root(self, output: Tensor) -> Tensor:
        return (0.5 * (F.logsigmoid(output) + F.logsigmoid(-output))).exp()[:, :, None]


@dataclass(frozen=True)
class SoftmaxEvidence:
    """P(y = k) = softmax(f)_k, by quasi-Monte Carlo."""

    outputs: int

    def log_normaliser(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        points = mean + variance.sqrt() * standard_normals(_NORMALS, self.outputs)[:, None, :]
        chosen = F.log_softmax(points, -1).gather(-1, y.expand(_NORMALS, -1)[..., None])[..., 0]
        return torch.logsumexp(chosen, 0) - math.log(_NORMALS)

    def curvature_root(self, output: Tensor) -> Tensor:
        # diag(p) - p p' = W W' with W = (I - p 1') diag(sqrt p).
        p = output.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]


def _sign(y: Tensor, like: Tensor) -> Tensor:
    return 2 * y.to(like.dtype) - 1


@cache
def _hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and log-weights for the mean over a standard normal."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(np.log(weights / weights.sum()))


@cache
def standard_normals(count: int, dimension: int) -> Tensor:
    """A fixed set of `count` points that stands for N(0, I): half of a Sobol sequence, and its mirror image."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=1)
    uniform = engine.draw(count // 2, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    half = torch.special.ndtri(uniform)
    points = torch.cat([half, -half])
    return points / points.square().mean(0).sqrt()


def evidence_for(likelihood: Likelihood, noise: Tensor) -> Evidence:
    """The evidence that belongs to a likelihood; `noise` is the noise variance of a Gaussian target."""
    if isinstance(likelihood, Gaussian):
        return GaussianEvidence(noise)
    if isinstance(likelihood, Bernoulli):
        return LogisticEvidence()
    if isinstance(likelihood, Probit):
        return ProbitEvidence()
    if isinstance(likelihood, Categorical):
        return SoftmaxEvidence(likelihood.classes)
    raise Refusal(
        f"likelihood={likelihood!r}: moment matching knows Gaussian, Bernoulli, Probit and Categorical; use one of them"
    )
