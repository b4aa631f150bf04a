"""What a sigmoid's bend does to a belief: its moments by draws from the density itself, not from a line through it.

Of two classes all stages together say G - m(theta) ~ N(0, W), where m bends: far from zero scores hardly grow, so that
a truth that is far away is told less well than one that is near. The line that fits best over a Gaussian belief cannot
say this. In many directions at once it matters: with twenty features weights came out a quarter too small, however
wide the belief was. So the line finds the belief, and draws from it mend its mean and covariance.

Everything is post-processing: Hamiltonian Monte Carlo from fixed draws, so that the same releases give the same belief.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.methods._noise_aware_inputs import tilted_products, tilted_scores

CHAINS, CHAINS_PER_WEIGHT = 64, 4
"""At least, and for every weight: covariances of draws are to be known in all directions."""
SETTLING, KEPT = 6, 16
"""Moves of every chain, which starts in the belief by lines: those that only lead away from there, and the others."""
LEAPS, LEAP = 5, 0.3
"""Steps of one move, and their length in deviations of the belief: a quarter of a turn, and nearly all are accepted."""


@dataclass(frozen=True)
class BentScores:
    """Of two classes, all stages together: log density b h - h Q h / 2 less the prior's, h the scores' way from `mean`.

    moments     of inputs, see `tilted_scores`
    mean        from where ways are counted
    off         what the released curvature has beyond the formula's there
    seen        b: what the stages say of h, each by its precision;  precision: Q
    prior       precision of the prior, of every weight
    """

    moments: Tensor
    mean: Tensor
    off: Tensor
    seen: Tensor
    precision: Tensor
    prior: Tensor

    def at(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Log density and its gradient at points (..., chains, weights)."""
        middle = self.mean[..., None, :]
        away = points - middle
        way = tilted_scores(self.moments, points) - tilted_scores(self.moments, middle) + away @ self.off
        pull = self.seen[..., None, :] - way @ self.precision
        density = ((self.seen[..., None, :] + pull) * way).sum(-1) / 2 - (self.prior * points.square()).sum(-1) / 2
        return density, tilted_products(self.moments, points, pull) + pull @ self.off - self.prior * points


def moments_of_draws(
    density: Callable[[Tensor], tuple[Tensor, Tensor]], mean: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance under a log density, by chains that start from N(mean, root root^T).

    density   of points (..., chains, weights): its logarithm, up to a constant, and the gradient of that
    """
    size = mean.shape[-1]
    pairs = max(CHAINS, CHAINS_PER_WEIGHT * size) // 2
    shape = (*mean.shape[:-1], 2 * pairs, size)
    generator = torch.Generator().manual_seed(size)

    def fresh() -> Tensor:
        # The same for all fits, so that each has what it has by itself; in pairs of opposite ones, whose errors in the
        # mean of a Gaussian density cancel.
        half = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
        return torch.cat([half, -half]).expand(shape)

    def there(place: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = density(mean[..., None, :] + place @ root.mT)
        return value, gradient @ root

    place = fresh()
    value, gradient = there(place)
    kept = []
    for move in range(SETTLING + KEPT):
        speed = fresh()
        energy, end, slope, reached = value - speed.square().sum(-1) / 2, place, gradient, value
        for _ in range(LEAPS):
            half = speed + LEAP / 2 * slope
            end = end + LEAP * half
            reached, slope = there(end)
            speed = half + LEAP / 2 * slope
        chance = torch.rand(pairs, generator=generator, dtype=torch.float64).log().repeat(2)
        taken = chance < reached - speed.square().sum(-1) / 2 - energy
        place = torch.where(taken[..., None], end, place)
        gradient = torch.where(taken[..., None], slope, gradient)
        value = torch.where(taken, reached, value)
        if move >= SETTLING:
            kept.append(place)
    draws = torch.cat(kept, -2)
    middle = draws.mean(-2, keepdim=True)
    spread = (draws - middle).mT @ (draws - middle) / (draws.shape[-2] - 1)
    return (mean[..., None, :] + middle @ root.mT)[..., 0, :], root @ spread @ root.mT
