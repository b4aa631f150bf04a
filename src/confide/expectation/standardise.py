"""Standardised inputs under privacy: means and covariances of the features, from noisy clipped sums.

A network learns from few noisy steps only if its inputs are centred, of one size and not nearly collinear. The moments
that this takes are asked for like everything else, in two rounds:

    means        the answer of one record is (1, x)
    covariances  the answer is (1, (x - m)(x - m)'), about the released means m, packed without loss of norm

each in units of the norm that is usual for features in [-1, 1]. A record that is clipped counts with a weight below one
in all moments, its own count included, so that the quotients stay means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from confide.expectation.natural import pack_symmetric, packed_size, unpack_symmetric

MANY_FEATURES = 128
"""Beyond so many a network sees public directions of its inputs instead of single features: the answers of records, and
the covariances above all (half a million numbers for an image), would take longer than everything else."""
DIRECTIONS = 24  # of the inputs, where features are many: SEP then takes below ten times as long as SGLD on images
LEAST_VARIANCE = 1e-3  # a direction of smaller variance, for inputs in [-1, 1], is as good as constant


@cache
def public_directions(features: int) -> Tensor | None:
    """An affine map (DIRECTIONS, features + 1) of many features onto few, by which distances are kept up to a factor:
    orthonormal rows, drawn once and for all (Johnson and Lindenstrauss 1984). None where features are few.

    They are scaled so that features in [-1, 1] give numbers of about that size, even where all of them agree.
    """
    if features <= MANY_FEATURES:
        return None
    drawn = torch.randn(features, DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.linalg.qr(drawn)[0].mT / math.sqrt(3)
    return torch.cat([rows, torch.zeros(DIRECTIONS, 1, dtype=torch.float64)], 1)


def after(first: Tensor | None, second: Tensor) -> Tensor:
    """One affine map after another, as one."""
    if first is None:
        return second
    matrix, shift = second[:, :-1], second[:, -1:]
    return torch.cat([matrix @ first[:, :-1], matrix @ first[:, -1:] + shift], 1)


@dataclass(frozen=True)
class InputMoments:
    """The two queries: their sizes, their rows, and how much noise a mean of them carries."""

    features: int

    @property
    def sizes(self) -> tuple[int, int]:
        return 1 + self.features, 1 + packed_size(self.features, "full")

    @property
    def units(self) -> tuple[float, float]:
        """Usual norms: features spread evenly have a mean square of 1/3, and about half of that about their mean."""
        return math.sqrt(1 + self.features / 3), math.hypot(1, self.features / 6)

    def mean_rows(self, x: Tensor) -> Tensor:
        x = x.to(torch.float64).flatten(1)
        return torch.cat([x.new_ones(len(x), 1), x], 1) / self.units[0]

    def covariance_rows(self, x: Tensor, centre: Tensor) -> Tensor:
        gap = x.to(torch.float64).flatten(1) - centre
        outer = pack_symmetric(gap[:, :, None] * gap[:, None, :])
        return torch.cat([gap.new_ones(len(gap), 1), outer], 1) / self.units[1]

    def error(self, noise_multiplier: float, batch: float, steps: int) -> float:
        """Standard deviation of the noise in one covariance, from so many releases."""
        return noise_multiplier * self.units[1] / (batch * math.sqrt(steps))


def centre_of(total: Tensor) -> Tensor:
    """The means of the features, kept in the range of encoded inputs."""
    return (total[1:] / total[0].clamp(min=1e-12)).clamp(-1, 1)


def standardiser(total: Tensor, centre: Tensor, error: float) -> tuple[Tensor, Tensor]:
    """The affine map x -> S^(-1/2) (x - m), as (features, features + 1), and a root of the covariance under it.

    S is the released covariance, with its off-diagonal entries shrunk as far as noise of standard deviation `error` may
    have made them, plus a ridge of the size of the noise that is left in its eigenvalues: no direction is blown
    up that noise alone could have made small. The symmetric root turns the features as little as possible.
    """
    features = len(centre)
    covariance = unpack_symmetric(total[1:] / total[0].clamp(min=1e-12), features)
    diagonal = torch.diag(torch.diagonal(covariance))
    beside = covariance - diagonal
    # An off-diagonal entry is stored times sqrt 2, so its noise is error / sqrt 2, and there are features^2 - features.
    noise = features * (features - 1) * error**2 / 2
    kept = float((1 - noise / beside.square().sum().clamp(min=1e-30)).clamp(min=0))
    values, vectors = torch.linalg.eigh(diagonal + kept * beside)
    ridge = max(LEAST_VARIANCE, error * (1 + kept * math.sqrt(features)))
    values = values.clamp(min=0)
    matrix = (vectors * (values + ridge).rsqrt()) @ vectors.mT
    # symmetric, so that it does not depend on which axes and signs a machine gives
    spread = (vectors * ((values + ridge / 2) / (values + ridge)).sqrt()) @ vectors.mT
    return torch.cat([matrix, -(matrix @ centre)[:, None]], 1), spread
