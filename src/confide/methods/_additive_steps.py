"""Steps of the additive method: what they are divided by, and how long they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.methods._additive_state import Together
from confide.models.additive import AdditiveRecipe

RATE, MOMENTUM, HORIZON = 0.3, 0.5, 4.8
"""Of the steps; where there are many, rates are such that they add up to HORIZON."""
STABLE = 2.4
"""Rate times sharpest curvature that momentum bears with some room: the limit is 2 (1 + momentum)."""

SURELY = 6.0
"""Deviations of noise after which columns are said not to move together: a way that is mostly noise goes where they do
not."""
BEYOND = 1.5
"""How much sharper than what was met (see `steepness`) the sharpest direction may be: steps that are too long for it
make it grow threefold and are then met in full, but residuals that are cut hide it once it is large."""


def wave_matrix(curvature: Tensor, divisor: Tensor, alike: Tensor) -> Tensor:
    """(outputs, numbers, waves, waves): what steps of waves are divided by, in units of their divisors' roots.

    Of what a wave's step is divided by the records have a share; waves are correlated as far as that goes.

    curvature, divisor   (outputs, features)
    alike                (numbers, waves, waves): correlations
    """
    numbers, waves, _ = alike.shape
    part = slice(1, 1 + numbers * waves)
    share = (curvature[:, part] / divisor[:, part]).clamp(max=1).sqrt().view(len(divisor), numbers, waves)
    even = torch.eye(waves, dtype=torch.float64)
    return even + share[..., :, None] * (alike - even) * share[..., None, :]


def divided(push: Tensor, divisor: Tensor, matrix: Tensor) -> Tensor:
    """Of (outputs, features): by the divisors and, for waves of one number, by their matrix."""
    outputs, numbers, waves, _ = matrix.shape
    part = slice(1, 1 + numbers * waves)
    scaled = push / divisor.sqrt()
    turned = torch.linalg.solve(matrix, scaled[:, part].reshape(outputs, numbers, waves, 1))
    scaled[:, part] = turned.reshape(outputs, -1)
    return scaled / divisor.sqrt()


@dataclass(frozen=True)
class StepMetric:
    """What steps are divided by: numbers of their own, or of one output a whole matrix, where it is known which columns
    move together.

    divisor   (outputs, features);  matrix: of waves of one number (see `wave_matrix`), or (features, features) of all,
              in units of the divisors' roots
    """

    divisor: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, curvature: Tensor, divisor: Tensor, alike: Tensor, together: Together | None) -> StepMetric:
        if together is None:
            return cls(divisor, wave_matrix(curvature, divisor, alike))
        share = (curvature / divisor)[0].clamp(max=1).sqrt()
        even = torch.eye(len(share), dtype=torch.float64)
        return cls(divisor, even + share[:, None] * (together.correlations - even) * share)

    @property
    def whole(self) -> bool:
        return self.matrix.dim() == 2

    def divided(self, push: Tensor) -> Tensor:
        if not self.whole:
            return divided(push, self.divisor, self.matrix)
        root = self.divisor.sqrt()
        found: Tensor = torch.linalg.solve(self.matrix, (push / root).mT).mT / root
        return found

    def square(self, way: Tensor) -> float:
        """Of a way, in units of what steps are divided by."""
        if not self.whole:
            return float((self.divisor * way.square()).sum())
        scaled = (self.divisor.sqrt() * way)[0]
        return float(scaled @ self.matrix @ scaled)

    def noise(self, change: Tensor) -> tuple[float, float, float, float]:
        """Square of a change of gradients over what steps are divided by; then of the inverse of that its trace, the
        root of the sum of its squares, and its largest value."""
        if not self.whole:
            inverse = 1 / self.divisor
            square = float((change.square() * inverse).sum())
            return square, float(inverse.sum()), float(inverse.square().sum().sqrt()), float(inverse.max())
        root = self.divisor[0].rsqrt()
        whole = root[:, None] * torch.linalg.inv(self.matrix) * root
        largest = float(torch.linalg.matrix_norm(whole, 2))
        return float(change[0] @ whole @ change[0]), float(whole.trace()), float(whole.norm()), largest


@dataclass(frozen=True)
class Axes:
    """Of every number's waves: the directions in which they are not correlated, and variances along all features.

    Waves of one number are correlated, so that a gradient in one of them speaks of the others too. Along these axes it
    does not; a prior that is the same for all waves of a column is the same for all axes.

    turns       (numbers, waves, waves), axes in the rows
    variances   (features,), the same as before but for waves
    before      variances of the features themselves
    """

    turns: Tensor
    variances: Tensor
    before: Tensor

    @classmethod
    def of(cls, variances: Tensor, alike: Tensor) -> Axes:
        numbers, waves, _ = alike.shape
        root = variances[1 : 1 + numbers * waves].view(numbers, waves).sqrt()
        values, vectors = torch.linalg.eigh(root[:, :, None] * alike * root[:, None, :])
        own = variances.clone()
        own[1 : 1 + numbers * waves] = values.clamp(min=0).flatten()
        return cls(vectors.mT.contiguous(), own, variances)

    def along(self, weights: Tensor) -> Tensor:
        """Of (..., features)."""
        return self._turned(self.turns, weights)

    def back(self, weights: Tensor) -> Tensor:
        return self._turned(self.turns.mT, weights)

    def variances_back(self, variances: Tensor) -> Tensor:
        """Of weights by themselves, from those along the axes: such that outputs vary as much on average, though
        features keep no word of how weights of one column vary together."""
        found = self._turned(self.turns.mT.square(), variances)
        numbers, waves, _ = self.turns.shape
        part = slice(1, 1 + numbers * waves)
        wanted, had = (
            (one * weight)[..., part].unflatten(-1, (numbers, waves)).sum(-1, keepdim=True)
            for one, weight in ((variances, self.variances), (found, self.before))
        )
        found[..., part] *= (wanted / had.clamp(min=1e-300)).expand(*had.shape[:-1], waves).flatten(-2)
        return found

    def _turned(self, turns: Tensor, weights: Tensor) -> Tensor:
        numbers, waves, _ = turns.shape
        part, found = slice(1, 1 + numbers * waves), weights.clone()
        own = weights[..., part].unflatten(-1, (numbers, waves))
        found[..., part] = (turns @ own[..., None])[..., 0].flatten(-2)
        return found


def sharpness(
    before: tuple[Tensor, ...],
    sharpest: tuple[float, ...],
    alike: float,
    position: Tensor,
    gradient: Tensor,
    assumed: float,
    noise: float,
) -> tuple[tuple[float, ...], float]:
    """Curvature along the last two steps over the assumed one, and the largest so far that is no noise.

    The former with two deviations of noise on top, the latter with as many taken off.

    before    position and gradient of the step before, and what it has in common with its noise; nothing at first
    assumed   the way since, squared in units of what steps are divided by
    """
    if not before:
        return (), 1.0
    if assumed <= 0:
        return sharpest, alike
    way, change = position - before[0], gradient - before[1]
    # The way was taken by the noise of the gradient before: what the two have in common is no curvature.
    common, spread = before[2].tolist()
    found = (float((way * change).sum()) - common) / assumed
    doubt = 2 * math.hypot(math.sqrt(2) * noise * float(way.norm()), spread) / assumed
    return (*sharpest, found + doubt)[-2:], max(alike, found - doubt)


def along_the_way(first: tuple[Tensor, ...], sums: Tensor, curvature: Tensor) -> float:
    """Curvature from the first step to where those were taken that count, over the assumed one, with SURELY deviations
    of noise on top.

    first   way from the origin, gradient and variance of its noise;  sums: of the steps that count, see `told`
    """
    weight = float(sums[0].max())
    way, change = ((one - before) * (curvature > 0) for one, before in zip(sums[1:] / weight, first[:2], strict=True))
    assumed = float((curvature * way.square()).sum())
    if assumed <= 0:
        return math.inf
    noise = math.sqrt(1 / weight + float(first[2])) * float(way.norm())
    return (float((way * change).sum()) + SURELY * noise) / assumed


def steepness(before: tuple[Tensor, ...], gradient: Tensor, metric: StepMetric, assumed: float, noise: float) -> float:
    """How much a gradient has changed over the last way, both in units of what steps are divided by, less what may be
    noise: no more than the sharpest curvature there is, and close to it where a way had any part in its direction.

    The mean curvature along a way says little of it: of a way that goes in twenty directions, one of which is twenty
    times as sharp, it is two.
    """
    if not before or assumed <= 0:
        return 0.0
    square, trace, root, largest = metric.noise(gradient - before[1])
    own, spread = 2 * noise**2 * trace, 2 * noise**2 * math.sqrt(2) * root
    both = 2 * math.sqrt(2) * noise * math.sqrt(square * largest)
    return math.sqrt(max(0.0, square - own - 2 * math.hypot(spread, both)) / assumed)


def largest_rate(
    recipe: AdditiveRecipe,
    sharpest: tuple[float, ...],
    steepest: float,
    pull: Tensor,
    steps: int,
    loose: float = 0.0,
) -> float:
    """At most STABLE over the sharpest curvature there can be, of so many steps of learning.

    Features of one column are uncorrelated once steps are divided, those of different columns may be all the same: the
    curvature is at most the sum of the columns' own, in units of what steps are divided by, and the constant's. What
    the last steps met counts twice, for other directions may be sharper, and what any way had a part in by a half more.
    Features that are not in the middle have a `loose` curvature on top; it is known beforehand, and where residuals are
    cut no step meets it.
    """
    most = loose + sum(float(pull[:, group].max()) for group in [slice(0, 1), *recipe.groups()])
    if sharpest:
        most = min(most, max(2 * max(sharpest), BEYOND * steepest, 1.0 + loose))
    return min(RATE, HORIZON / steps, STABLE / most)
