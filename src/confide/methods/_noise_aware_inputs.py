"""Expected scores and curvatures of Gaussian inputs in closed form: the smooth part of what a linear model releases.

Inputs z, the constant last, have N = sum of weights, mean m and covariance C: moments = N (C + m m^T). A sigmoid is
taken as a normal distribution function, sigmoid(f) ~ Phi(lambda f) with lambda^2 = pi / 8. The weight of a record in
the curvature is then Gaussian in f = z theta, and weighted inputs are Gaussian again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PROBIT = math.pi / 8  # The logistic function is close to a normal distribution function of this scale, squared.


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
    """N, m, C."""
    count = moments[-1, -1].clamp(min=1e-9)
    mean = moments[:, -1] / count
    return count, mean, moments / count - torch.outer(mean, mean)


def tilted_curvature(moments: Tensor, point: Tensor) -> Tensor:
    """Sum of sigmoid'(z point) z z^T."""
    count, mean, covariance = _parts(moments)
    across, level = covariance @ point, mean @ point
    spread = 1 + PROBIT * (across @ point).clamp(min=0)
    height = torch.exp(-PROBIT * level**2 / (2 * spread)) / (4 * spread.sqrt())
    centre = mean - PROBIT * across * level / spread
    narrowed: Tensor = covariance - PROBIT * torch.outer(across, across) / spread + torch.outer(centre, centre)
    return count * height * narrowed


def tilted_scores(moments: Tensor, point: Tensor) -> Tensor:
    """Sum of sigmoid(z point) z."""
    count, mean, covariance = _parts(moments)
    across, level = covariance @ point, mean @ point
    spread = 1 + PROBIT * (across @ point).clamp(min=0)
    height = torch.exp(-PROBIT * level**2 / (2 * spread)) / (4 * spread.sqrt())
    # Phi with slope lambda phi: 1/4 at zero is lambda / sqrt(2 pi).
    share: Tensor = torch.special.ndtr(math.sqrt(PROBIT) * level / spread.sqrt())
    return count * (mean * share + across * height)


def denoised(curvature: Tensor, entry: float, centred: bool) -> Tensor:
    """A curvature with symmetric Gaussian noise of this entry variance, its eigenvalues set right.

    The noise spreads eigenvalues over 2 r, r^2 = 2 size entry (Wigner's semicircle). Those that lie within r of their
    median cannot be told apart and become their mean; one that stands out by d is known to stand out by
    (d + sqrt(d^2 - r^2)) / 2; none is negative. Without this a direction that inputs hardly vary in would by chance
    seem to be known. For one output it is done to the covariance of the features, so that their mean, which is known
    far better, does not enter.
    """
    if not centred:
        return _spiked(curvature, entry)
    count = curvature[-1, -1].clamp(min=1e-9)
    column = curvature[:, -1:]
    whole = column @ column.mT / count
    whole[:-1, :-1] += _spiked(curvature[:-1, :-1] - whole[:-1, :-1], entry)
    return whole


def _spiked(matrix: Tensor, entry: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    radius = math.sqrt(2 * len(values) * entry)
    apart = values - values.median()
    alike = apart.abs() <= radius
    middle = values[alike].mean()
    standing = middle + (apart + apart.sign() * (apart.square() - radius**2).clamp(min=0).sqrt()) / 2
    whole: Tensor = (vectors * torch.where(alike, middle, standing).clamp(min=0)) @ vectors.mT
    return whole
