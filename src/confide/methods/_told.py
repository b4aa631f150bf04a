"""The belief of a program's short chain: what its releases tell of the peak and of the information (`_whitened`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confide.devices import HOST
from confide.layers.programs import packed_matrix, unpacked
from confide.methods._trace import curvatures_of, drawn
from confide.methods._whitened import TRUST, Local, Pace, TakenByClip, cut_of
from confide.methods.base import Problem
from confide.models.priors import Prior
from confide.sources.queries import Release

LARGEST_CHANGE = 4.0
"""Of what records tell along any direction, from one look to the next: noise may look like more."""


@dataclass(frozen=True)
class Told:
    """What a chain was told after burn-in, one row for every question.

    points     where it asked: the unbounded vector
    slopes     along R, of the negative log-likelihood of all records, as they were released
    products   mean of c s s^T over a batch, packed
    noise      variances of the known noise in every slope and in every product
    """

    points: tuple[Tensor, ...] = field(default=(), repr=False)
    slopes: tuple[Tensor, ...] = field(default=(), repr=False)
    products: tuple[Tensor, ...] = field(default=(), repr=False)
    noise: tuple[tuple[float, float], ...] = ()

    def with_one(self, problem: Problem, slope: Tensor, release: Release, pace: Pace) -> Told:
        each = release.expected_batch * pace.factor
        noise = (problem.records * release.noise_std / each) ** 2, (release.noise_std / (each * pace.share)) ** 2
        product = -release.sum[len(slope) :] / (each * pace.share)
        return Told(
            (*self.points, problem.position.to(HOST, torch.float64, copy=True)),
            (*self.slopes, slope.to(HOST, torch.float64, copy=True)),
            (*self.products, product.to(HOST, torch.float64)),
            (*self.noise, noise),
        )


@dataclass(frozen=True)
class ToldBelief:
    """Draws of the unbounded vector.

    way      how far their mean is from where was asked, in their deviations
    excess   of the scatter of slopes over what is known of their noise
    trust    how far the information that was released was believed against the program's own guess
    """

    draws: Tensor
    way: float
    excess: float
    trust: float


def belief_of(problem: Problem, own: Prior, axes: Tensor, told: Told, pace: Pace, met: Tensor | None) -> ToldBelief:
    """In d, about the mean of the points: u = centre + R d. pace: with the clip that questions had."""
    wide, points, slopes = axes.to(HOST, torch.float64), torch.stack(told.points), torch.stack(told.slopes)
    centre, slope, count = points.mean(0), slopes.mean(0), len(points)
    here = Local.at(problem, own, centre.to(axes.dtype), met)
    cut = None if here is None else cut_of(problem, here, pace, centre.to(axes.dtype), (pace.clip,))
    mean, error, trust = _information(problem, here, wide, cut, told, TRUST**2)
    noise = torch.randn(curvatures_of(len(centre)), len(mean), generator=problem.generator, dtype=torch.float64)
    curvatures = problem.records * _of_one_sign(unpacked(mean + math.sqrt(error) * noise, len(centre)), 0.0, math.inf)
    curvature = curvatures.mean(0)
    of_noise, size = sum(one for one, _ in told.noise) / count, len(centre)
    of_batches = max(0.0, problem.records / problem.plan.expected_batch - 1)
    errors = of_noise * torch.eye(size, dtype=torch.float64) + of_batches * curvature
    off = slopes - slope - torch.linalg.solve(wide, (points - centre).mT).mT @ curvature
    excess = float(off.square().sum() / max(1, count - 1) / errors.trace())
    errors = errors * max(1.0, excess) / count
    energy, nought = problem.prior(own).energy, torch.zeros_like(centre)
    if cut is not None:
        slope, errors = slope + problem.records * cut.scores, errors + cut.doubt(problem.records)
    draws = drawn(curvatures, nought, slope, errors, lambda at: energy(centre + wide @ at), nought, problem.generator)
    way = float((draws.mean(0).square() / draws.var(0)).mean().sqrt())
    return ToldBelief(centre + draws @ wide.mT, way, excess, trust)


def met_anew(problem: Problem, own: Prior, axes: Tensor, told: Told, pace: Pace, met: Tensor | None) -> Tensor | None:
    """N after what was told along R = (L N)^-T: the root of N B N^T, B being information and prior along R."""
    wide, centre = axes.to(HOST, torch.float64), torch.stack(told.points).mean(0)
    here = Local.at(problem, own, centre.to(axes.dtype), met)
    if here is None:
        return met
    cut = cut_of(problem, here, pace, centre.to(axes.dtype), (pace.clip,))
    mean, _, _ = _information(problem, here, wide, cut, told, 0.0)
    whole = unpacked(mean, len(centre)) + wide.mT @ here.prior @ wide / problem.records
    whole = whole if cut is None else whole - cut.products  # what was taken is negative
    seen = _of_one_sign(whole, 1 / LARGEST_CHANGE, LARGEST_CHANGE)
    before = torch.eye(len(centre), dtype=torch.float64) if met is None else met
    found: Tensor = torch.linalg.cholesky(before @ seen @ before.mT)
    return found


def _information(
    problem: Problem, here: Local | None, axes: Tensor, cut: TakenByClip | None, told: Told, least: float
) -> tuple[Tensor, float, float]:
    """A along R, packed, the variance of each of its numbers, and how much of what was released is in it.

    least   mean square by which records differ from what is expected of them, where noise hides it
    """
    seen = torch.stack(told.products).mean(0)
    error = sum(one for _, one in told.noise) / len(told.noise) ** 2
    if here is None:
        return seen, error, 1.0
    expected = here.told_along(axes, problem.records)
    guess = packed_matrix(expected if cut is None else expected + cut.products)
    by_chance = 1 + 2 * math.sqrt(2 / len(seen))  # two deviations of a mean of squares
    beyond = max(least, float((seen - guess).square().mean()) - error * by_chance)
    share = beyond / (beyond + error) if beyond > 0 else 0.0
    return guess + share * (seen - guess), share * error, share


def _of_one_sign(matrices: Tensor, low: float, high: float) -> Tensor:
    """The same matrices with their eigenvalues between these."""
    sizes, vectors = torch.linalg.eigh(matrices)
    found: Tensor = (vectors * sizes.clamp(low, high)[..., None, :]) @ vectors.mT
    return found
