"""A posterior from the trace of a run: from where gradients were asked and what was released. Post-processing alone.

Near the truth a likelihood bends like a bowl. A release at the point theta_s, as a sum over all records, is then

    G_s = H (theta_s - theta_hat) + noise_s,        theta_hat ~ N(theta, H^-1) given the truth theta:

theta_hat is where the records' own likelihood has its peak, H its curvature, and noise_s privacy and batch noise, whose
size is public. A regression of the G_s on the theta_s finds H and H theta_hat with their errors, and the belief about
theta follows from both: N(prior) times N(theta_hat; theta, H^-1 + noise). H is drawn from its own error first, so that
a curvature which is hardly known makes the belief wide, and where nothing was learnt it is the prior.

The line is believed where it is needed: the last stage counts as its noise says, and an earlier one only as far as it
lies on the line of those after it. Residuals that are larger than the known noise, by batches or bends, widen it all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from confide.expectation.natural import signed_axes
from confide.methods._carried import carried

Energy: TypeAlias = Callable[[Tensor], Tensor]
DRAWS, MOST_CURVATURES = 1000, 200
"""Draws of the belief, and curvatures drawn from their error for them; of many parameters fewer, which take long."""
RIDGE = 1e-3
"""Weight of the guess that nothing bends, in observations at a usual distance: what no point explored stays flat."""
UNSEEN = 1e-10
"""Of the most explored direction: what is explored less, having fewer points than parameters, is known by rounding."""
DOUBT = 2.0
"""Variances of the curvature's error that are taken off its square."""
LEAST_PRECISION = 1e-2
"""Of the prior, seen as a Gaussian where the belief is: a prior may bend the other way far out."""


@dataclass(frozen=True)
class Trace:
    """What was asked and released, one row each, of sums over all records.

    points, gradients   theta_s and G_s, the gradient of the negative log-likelihood
    noise               variance of the known noise in every number of G_s
    stages              rising numbers; questions of one stage lie about one point
    """

    points: Tensor
    gradients: Tensor
    noise: Tensor
    stages: Tensor

    @property
    def usual(self) -> Tensor:
        """Second moments of the points of the last stage about their mean: what a usual distance is."""
        last = self.points[self.stages == self.stages.max()]
        centred = last - last.mean(0)
        return centred.mT @ centred / len(last)


@dataclass(frozen=True)
class Line:
    """G = gradient + curvature (theta - point), with what is unsure of it.

    scatter    weighted second moments of the points: the precision of the curvature's rows
    explored   the same with the ridge
    weight     precision of every number of `gradient`
    excess     of every stage: its residuals' mean square over the known noise, 1 at least
    """

    point: Tensor
    gradient: Tensor
    curvature: Tensor
    scatter: Tensor
    explored: Tensor
    weight: float
    excess: Tensor

    def residuals(self, trace: Trace) -> Tensor:
        """In units of the known noise."""
        found: Tensor = trace.gradients - self.gradient - (trace.points - self.point) @ self.curvature
        return found / trace.noise[:, None].sqrt()


def fitted_line(trace: Trace) -> Line:
    """From the last stage, then with one stage before it after the other."""
    size, last = trace.points.shape[1], int(trace.stages.max())
    excess = torch.full((last + 1,), torch.inf, dtype=torch.float64)
    excess[last] = 1.0
    line = _weighted(trace, excess)
    own = line.residuals(trace)[trace.stages == last]
    free = max(1.0, own.numel() - size - size * (size + 1) / 2)
    excess[last] = max(1.0, float(own.square().sum()) / free)
    for stage in range(last, -1, -1):
        own = line.residuals(trace)[trace.stages == stage]
        if stage < last and len(own):
            together = len(own) * float(own.mean(0).square().mean())  # off the line as a whole
            excess[stage] = max(1.0, float(own.square().mean()), together)
        line = _weighted(trace, excess)
    return line


def _weighted(trace: Trace, excess: Tensor) -> Line:
    """Least squares with a symmetric curvature: S H + H S = C + C^T, solved in the axes of S."""
    weights = 1 / (trace.noise * excess[trace.stages])
    total = weights.sum()
    point, gradient = weights @ trace.points / total, weights @ trace.gradients / total
    away = trace.points - point
    scatter = away.mT @ (away * weights[:, None])
    across = (trace.gradients - gradient).mT @ (away * weights[:, None])
    explored = scatter + RIDGE * total * trace.usual
    values, vectors = torch.linalg.eigh(explored)
    both, sums = vectors.mT @ (across + across.mT) @ vectors, values[:, None] + values[None]
    seen = sums > UNSEEN * values.max()  # else nothing is divided by nothing
    curvature = vectors @ torch.where(seen, both / sums, 0.0) @ vectors.mT
    return Line(point, gradient, curvature, scatter, explored, float(total), excess)


def drawn_curvatures(line: Line, count: int, generator: torch.Generator) -> Tensor:
    """Curvatures as likely as the noise allows, none of them negative; where no point went they stay flat."""
    values, vectors = signed_axes(line.explored)
    values = values.clamp(min=1e-12 * float(values.max()) + 1e-300)
    share = ((vectors.mT @ line.scatter @ vectors).diagonal() / values).clamp(0, 1).sqrt()
    share = torch.where(values > UNSEEN * values.max(), share, 0.0)
    deviation = (values[:, None] + values[None]).rsqrt() * share[:, None] * share[None]
    noise = torch.randn(count, *deviation.shape, generator=generator, dtype=torch.float64)
    upper = torch.triu(noise, 1)
    even = upper + upper.mT + math.sqrt(2) * torch.diag_embed(noise.diagonal(dim1=1, dim2=2))
    drawn = line.curvature + vectors @ (even * deviation) @ vectors.mT
    sizes, axes = torch.linalg.eigh((drawn + drawn.mT) / 2)
    # What a draw has of noise, that of the line and its own, is not taken for curvature.
    inside = vectors.mT @ axes
    error = DOUBT * (inside.square() / values[:, None]).sum(1)
    kept = sizes.clamp(min=0) * (1 - error / sizes.square().clamp(min=1e-300)).clamp(min=0)
    found: Tensor = (axes * kept[:, None, :]) @ axes.mT
    return found


@dataclass(frozen=True)
class LocalPrior:
    """A prior as the Gaussian that it is about a point: precision, and precision times mean."""

    precision: Tensor
    weighted_mean: Tensor

    @classmethod
    def at(cls, energy: Energy, point: Tensor, least: Tensor | None = None) -> LocalPrior:
        """least: a precision that it has in any direction. A prior of effects whose spread is unknown bends the other
        way at some points, where the Gaussian nearest to it would have no end."""
        slope = torch.autograd.functional.jacobian(energy, point)
        bend = torch.autograd.functional.hessian(energy, point)
        root = torch.eye(len(point), dtype=bend.dtype) if least is None else torch.linalg.cholesky(least)
        scaled = torch.linalg.solve_triangular(root, (bend + bend.mT) / 2, upper=False)
        scaled = torch.linalg.solve_triangular(root, scaled.mT, upper=False)
        values, vectors = torch.linalg.eigh((scaled + scaled.mT) / 2)
        across = root @ vectors
        precision = (across * values.clamp(min=LEAST_PRECISION if least is None else 1.0)) @ across.mT
        return cls(precision, precision @ point - slope)

    def energies(self, draws: Tensor) -> Tensor:
        return ((draws @ self.precision) * draws).sum(1) / 2 - draws @ self.weighted_mean


def believed(line: Line, energy: Energy, about: Tensor, generator: torch.Generator, unsure: Tensor | None) -> Tensor:
    """Draws of the belief, (draws, parameters).

    energy   of the prior; draws are those of the Gaussian that it is about the point `about`, carried to what it is
    unsure   covariance of an error of the gradient beside the noise, such as what clipping may have moved
    """
    size = len(about)
    curvatures = drawn_curvatures(line, curvatures_of(size), generator)
    errors = torch.eye(size, dtype=torch.float64) / line.weight
    errors = errors if unsure is None else errors + unsure
    return drawn(curvatures, line.point, line.gradient, errors, energy, about, generator)


def curvatures_of(size: int) -> int:
    """How many curvatures are drawn for a belief about so many parameters."""
    return max(10, min(MOST_CURVATURES, 6400 // size))


def drawn(
    curvatures: Tensor,
    point: Tensor,
    gradient: Tensor,
    errors: Tensor,
    energy: Energy,
    about: Tensor,
    generator: torch.Generator,
    least: Tensor | None = None,
) -> Tensor:
    """Draws of a belief, from a gradient at a point with the covariance of its error, and draws of the curvature.

    least   precision of the prior in any direction, for where draws begin
    """
    prior, size, count = LocalPrior.at(energy, about, least), len(about), len(curvatures)
    pulled = curvatures @ point - gradient  # H theta_hat
    through = torch.linalg.solve(curvatures + errors, curvatures)  # (H + errors)^-1 H
    told = curvatures @ through
    told = (told + told.mT) / 2
    towards = (through.mT @ pulled[..., None])[..., 0]
    root = torch.linalg.cholesky(prior.precision + told)
    mean = torch.cholesky_solve((prior.weighted_mean + towards)[..., None], root)
    each = DRAWS // count
    noise = torch.randn(count, size, each, generator=generator, dtype=torch.float64)
    draws = (mean + torch.linalg.solve_triangular(root.mT, noise, upper=True)).mT  # (curvatures, each, numbers)
    if _is_gaussian(prior, energy, draws.reshape(-1, size)):
        found: Tensor = draws.reshape(-1, size)
        return found
    sloped = torch.vmap(torch.func.grad_and_value(energy))

    def energies(points: Tensor) -> tuple[Tensor, Tensor]:
        slopes, values = sloped(points)
        here = points.reshape(count, each, size)
        pull = here @ told - towards[:, None]
        bowl = (here * (pull - towards[:, None])).sum(2) / 2
        return values + bowl.reshape(-1), slopes + pull.reshape(-1, size)

    typical = torch.linalg.cholesky(prior.precision + told.mean(0))
    return carried(draws.reshape(-1, size), energies, typical, generator)


def _is_gaussian(prior: LocalPrior, energy: Energy, draws: Tensor) -> bool:
    """Whether the prior differs from its Gaussian by one constant at all draws."""
    off = prior.energies(draws) - torch.vmap(energy)(draws)
    return bool(off.max() - off.min() < 1e-6)
