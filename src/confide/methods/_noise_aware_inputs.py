"""Expected scores and curvatures of Gaussian inputs in closed form: the smooth part of what a linear model releases.

Inputs z, the constant last, have N = sum of weights, mean m and covariance C: moments = N (C + m m^T). A sigmoid is
taken as a sum of normal distribution functions, sigmoid(f) ~ sum_k p_k Phi(l_k f). The weight of a record in the
curvature is then a sum of Gaussians in f = z theta, and inputs that are weighted by one of them are Gaussian again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NORMALS = ((0.161081, 0.363620), (0.583136, 0.576372), (0.255783, 0.905425))
"""Shares and slopes of three normal distribution functions, whose sum is the logistic function to 5e-5 everywhere:
least squares over [0, 12]. A single one is off by a hundredth, most in the ends, where far truths are seen."""


def clipped_square(scale: Tensor) -> Tensor:
    """E min(r^2, 1) for r ~ N(0, scale^2)."""
    inside = torch.erf(1 / (scale * math.sqrt(2)))
    return scale**2 * inside - scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 / scale**2) + 1 - inside


def clipped_mean(offset: Tensor, scale: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """P(|r| < reach) and E clip(r) for r ~ N(offset, scale^2): by Stein's lemma the slope in z, and the mean."""
    upper, lower = (reach - offset) / scale, (-reach - offset) / scale
    inside = torch.special.ndtr(upper) - torch.special.ndtr(lower)
    density = (torch.exp(-(lower**2) / 2) - torch.exp(-(upper**2) / 2)) / math.sqrt(2 * math.pi)
    mean = offset * inside + scale * density + reach * (torch.special.ndtr(-upper) - torch.special.ndtr(lower))
    return inside, mean


def _parts(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """N, m, C, with an axis for points."""
    count = moments[..., None, -1, -1].clamp(min=1e-9)
    mean = moments[..., None, :, -1] / count[..., None]
    return count, mean, moments / count[..., None] - mean.mT @ mean


def _weighted(moments: Tensor, points: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of every part of the sigmoid and every point: the mean weight of a record, the mean of inputs so weighted, and
    what their covariance lacks of the whole, as the vector whose product with itself it is."""
    _, mean, covariance = _parts(moments)
    across, level = points @ covariance, (points * mean).sum(-1)
    variance = (across * points).sum(-1).clamp(min=0)
    for share, slope in NORMALS:
        spread = 1 + slope**2 * variance
        centre = mean - slope**2 * across * (level / spread)[..., None]
        yield share * _height(slope, level, spread), centre, slope * across / spread.sqrt()[..., None]


def tilted_curvature(moments: Tensor, points: Tensor) -> Tensor:
    """Sum of sigmoid'(z point) z z^T, for every row of points."""
    count, _, covariance = _parts(moments)
    found = torch.zeros((), dtype=points.dtype)
    for height, centre, lack in _weighted(moments, points):
        own = covariance[..., None, :, :] - lack[..., None] * lack[..., None, :]
        found = found + height[..., None, None] * (own + centre[..., None] * centre[..., None, :])
    return count[..., None, None] * found


def mean_curvature(moments: Tensor, points: Tensor) -> Tensor:
    """The mean of `tilted_curvature` over the rows of points."""
    count, _, covariance = _parts(moments)
    found = torch.zeros((), dtype=points.dtype)
    for height, centre, lack in _weighted(moments, points):
        weights = height[..., None]
        inner = centre.mT @ (centre * weights) - lack.mT @ (lack * weights)
        found = found + inner + weights.sum(-2, keepdim=True) * covariance
    return count[..., None] * found / points.shape[-2]


def tilted_scores(moments: Tensor, points: Tensor) -> Tensor:
    """Sum of sigmoid(z point) z, for every row of points."""
    count, mean, covariance = _parts(moments)
    across, level = points @ covariance, (points * mean).sum(-1)
    variance, found = (across * points).sum(-1).clamp(min=0), torch.zeros_like(across)
    for share, slope in NORMALS:
        spread = 1 + slope**2 * variance
        reached = share * torch.special.ndtr(slope * level / spread.sqrt())
        found = found + mean * reached[..., None] + across * (share * _height(slope, level, spread))[..., None]
    return count[..., None] * found


def tilted_products(moments: Tensor, points: Tensor, vectors: Tensor) -> Tensor:
    """Every row of `tilted_curvature` at points times a vector, without the matrices: the gradient of `tilted_scores`
    times it."""
    count, _, covariance = _parts(moments)
    whole, found = vectors @ covariance, torch.zeros_like(vectors)
    for height, centre, lack in _weighted(moments, points):
        own = whole - lack * (lack * vectors).sum(-1, keepdim=True)
        found = found + height[..., None] * (own + centre * (centre * vectors).sum(-1, keepdim=True))
    return count[..., None] * found


def _height(slope: float, level: Tensor, spread: Tensor) -> Tensor:
    """Mean over inputs of the derivative of Phi(slope f)."""
    bell = torch.exp(-((slope * level) ** 2) / (2 * spread))
    return slope / math.sqrt(2 * math.pi) * bell / spread.sqrt()


@dataclass(frozen=True)
class Doubt:
    """A symmetric error of a curvature: axes^T e axes, the entries of e independent but for symmetry.

    variances   of the entries of e; noise that is alike in all directions has v on the diagonal and v / 2 off it
    """

    axes: Tensor
    variances: Tensor

    def at(self, place: int) -> Doubt:
        """Of one of several curvatures, which stand on the last axis but two; with axes for pairs of stages."""
        return Doubt(self.axes[..., None, None, place, :, :], self.variances[..., None, None, place, :, :])

    def of_products(self, moments: Tensor) -> Tensor:
        """cov(E a, E b) where E a b^T = moments."""
        inside = self.axes @ moments @ self.axes.mT
        across = inside.mT * self.variances
        alone = (inside.diagonal(dim1=-2, dim2=-1)[..., None, :] * self.variances).sum(-1)
        across = across - torch.diag_embed(across.diagonal(dim1=-2, dim2=-1) - alone)
        return self.axes.mT @ across @ self.axes


def cleaned(curvatures: Tensor, noise: Tensor, own: float, centred: bool) -> tuple[Tensor, Doubt]:
    """Curvatures without what can only be noise, and what is still unsure of them.

    noise   variance of their entries, of which 1 / own is the precision of the public guess
    own     variance of entries about that guess, before any release

    Noise of entry variance v spreads eigenvalues over 2 r, r^2 = 2 size v (Wigner's semicircle). One that stands out
    from the median by d > r is known to stand out by (d + sqrt(d^2 - r^2)) / 2. The others are drawn to their mean by
    the share of their scatter that v explains: the variance t^2 of a true curvature's entries is found from that
    scatter, t being anything up to sqrt(own), and t^2 v / (t^2 + v) or so is left of the error. So inputs that vary
    alike in all directions are soon known to do so, and a direction in which they hardly vary does not by chance seem
    to be known. For one output it is done to the covariance of the features: their mean is known far better, and how
    far outputs are off on average is what a fit knows first.
    """
    size = curvatures.shape[-1]
    eye = torch.eye(size, dtype=torch.float64)
    if not centred:
        found, vectors, variances = _drawn_together(curvatures, noise, noise, own)
        return found, Doubt(vectors.mT, variances)
    count = curvatures[..., -1:, -1:].clamp(min=1e-9)
    means = curvatures[..., :-1, -1:] / count
    shift = eye.expand(curvatures.shape).clone()
    shift[..., -1:, :-1] = means.mT  # of weights: the constant's is where outputs are at the features' mean
    inner = curvatures[..., :-1, :-1] - count * means @ means.mT
    # An error of the means is in the covariance twice over, and that of the count once.
    mean_square = means.square().mean((-2, -1))
    found, vectors, features = _drawn_together(inner, noise * (1 + 2 * mean_square + mean_square**2), noise, own)
    whole = torch.zeros_like(curvatures)
    whole[..., :-1, :-1], whole[..., -1:, -1:] = found, count
    axes = eye.expand(curvatures.shape).clone()
    axes[..., :-1, :-1] = vectors.mT
    variances = noise[..., None, None] / 2 * (1 + eye)
    variances[..., :-1, :-1] = features
    variances[..., :-1, -1] += noise[..., None] * means[..., 0].square()
    variances[..., -1, :-1] = variances[..., :-1, -1]
    return shift.mT @ whole @ shift, Doubt(axes @ shift, variances)


def _drawn_together(matrices: Tensor, noise: Tensor, given: Tensor, own: float) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices, their eigenvectors, and variances of errors between these; given: the noise as it was pooled."""
    values, vectors = torch.linalg.eigh(matrices)
    size = values.shape[-1]
    seen = (1 - given / own).clamp(min=1e-6)[..., None]  # the releases' share in what was pooled with the guess
    released = noise[..., None] / seen
    radius = (2 * size * noise)[..., None].sqrt()
    apart = values - values.median(-1, keepdim=True).values
    alike = apart.abs() <= radius
    number = alike.sum(-1, keepdim=True)
    middle = (values * alike).sum(-1, keepdim=True) / number
    off = (values - middle) / seen
    scatter, freedom = (off.square() * alike).sum(-1, keepdim=True), number * (number + 1) / 2 - 1
    steps = torch.arange(1, 61, dtype=torch.float64) / 60
    true = own * steps**6  # t goes by cubes, close where it is small; any t is as likely as any other
    both = true + released
    weights = torch.softmax(2 * steps.log() - (freedom * both.log() + scatter / both) / 2, -1)
    kept = (weights * true / both).sum(-1, keepdim=True)
    left = (weights @ true)[..., None] * (1 - kept) ** 2 + kept**2 * released
    standing = middle + (apart + apart.sign() * (apart.square() - radius**2).clamp(min=0).sqrt()) / 2
    sizes = torch.where(alike, middle + kept * off, standing).clamp(min=0)
    whole = (vectors * sizes[..., None, :]) @ vectors.mT
    pairs = (alike[..., None] & alike[..., None, :]).double()
    eye = torch.eye(size, dtype=torch.float64)
    variances = (pairs * left[..., None] + (1 - pairs) * released[..., None]) / 2 * (1 + eye)
    # The mean that eigenvalues are drawn to has an error of its own in the place of one of theirs.
    return whole, vectors, variances + torch.diag_embed(alike * (noise[..., None] - left).clamp(min=0) / number)
