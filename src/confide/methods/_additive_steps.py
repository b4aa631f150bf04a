"""Steps of the additive method: what they are divided by, and how long they may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.models.additive import AdditiveRecipe

RATE, MOMENTUM, HORIZON = 0.3, 0.5, 4.8
"""Of the steps; where there are many, rates are such that they add up to HORIZON."""
STABLE = 2.4
"""Rate times sharpest curvature that momentum bears with some room: the limit is 2 (1 + momentum)."""


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


def largest_rate(recipe: AdditiveRecipe, sharpest: tuple[float, ...], pull: Tensor, steps: int) -> float:
    """At most STABLE over the sharpest curvature there can be, of so many steps of learning.

    Features of one column are uncorrelated once steps are divided, those of different columns may be all the same: the
    curvature is at most the sum of the columns' own, in units of what steps are divided by, and the constant's. What
    the last steps met counts twice, for other directions may be sharper.
    """
    most = sum(float(pull[:, group].max()) for group in [slice(0, 1), *recipe.groups()])
    if sharpest:
        most = min(most, max(2 * max(sharpest), 1.0))
    return min(RATE, HORIZON / steps, STABLE / most)
