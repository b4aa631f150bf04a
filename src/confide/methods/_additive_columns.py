"""Where a number lies between its declared bounds, and how widely, from two noisy means of it.

A histogram of a hundred bins shows nothing where the noise of a bin is as large as what it holds. A number that fills a
fifth of its bounds was then taken to fill them all, and what steps measured of its effect was too small by the square
of that. Two means say enough: of cos(pi u) where the records are, and of cos(2 pi u) how far from there they lie, u
being the plain scale between the bounds. They are the first waves of the additive model themselves: the squares of
the first, by which its gradients are divided, are told by the second.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from confide.models.additive import edges, plain_scale

MOMENTS = 2
"""Means of every number."""
WEIGHTS = (math.sqrt(0.4), math.sqrt(0.6))
"""What the two cosines are multiplied by, for a norm of 1 at most: widths are what matters more."""
PLACES, WIDTHS = 33, 24
"""Of the laws that are tried: means between the bounds, and deviations on a logarithmic scale."""
NARROWEST, WIDEST_LAW = 0.003, 3.0
"""Deviations of such a law, of the declared range: the waves that little noise leaves tell no narrower one, and the
widest is even between the bounds."""
USUAL_WIDTH, WIDTH_DOUBT, COLUMN_DOUBT = 0.2, 1.0, 0.5
"""Deviation that is expected beforehand (bounds five deviations apart), and deviations of logarithms: of the usual one
of a table, which its columns have in common, and of a column around that."""
USUAL_PLACE = 0.25
"""Deviation of a column's place around the middle of its bounds."""
NOT_NORMAL_COLUMN = 0.02
"""By which means of numbers that are not normal differ from those of the law that describes them best."""


def moments(inputs: Tensor) -> Tensor:
    """(records, numbers * MOMENTS) of what an encoder makes of numbers; of every number a vector of norm 1 at most."""
    angle = torch.pi * plain_scale(inputs)
    rows = torch.stack([weight * torch.cos((k + 1) * angle) for k, weight in enumerate(WEIGHTS)], 2)
    return rows.flatten(1)


@cache
def _laws(numbers: int) -> tuple[Tensor, Tensor]:
    """(places, widths, bins): shares of the bins under normal laws between the bounds; and (places, widths, MOMENTS)
    the means that they have."""
    place = torch.linspace(0, 1, PLACES, dtype=torch.float64)[:, None, None]
    width = _widths()[:, None]
    below = torch.special.ndtr((edges(numbers) - place) / width)
    shares = below.diff(dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    middle = (edges(numbers)[1:] + edges(numbers)[:-1]) / 2
    waves = torch.stack([weight * torch.cos((k + 1) * torch.pi * middle) for k, weight in enumerate(WEIGHTS)], 1)
    return shares, shares @ waves


def _widths() -> Tensor:
    return torch.logspace(math.log10(NARROWEST), math.log10(WIDEST_LAW), WIDTHS, dtype=torch.float64)


def column_laws(found: Tensor, noise: float, numbers: int) -> Tensor:
    """Shares of the bins of every number (numbers, bins), from noisy means (numbers, MOMENTS): means over all laws.

    Columns share the width that is usual in their table, so that many of them tell together what one does not.
    """
    shares, means = _laws(numbers)
    places, widths = torch.linspace(0, 1, PLACES, dtype=torch.float64), _widths().log()
    variance = noise**2 + (NOT_NORMAL_COLUMN * torch.tensor(WEIGHTS)).square()
    misfit = ((found[:, None, None] - means).square() / variance).sum(-1)
    fits = -(misfit + ((places - 0.5) / USUAL_PLACE).square()[:, None]) / 2  # (numbers, places, widths)
    usual = widths  # every width may be the usual one
    around = -((widths[:, None] - usual) / COLUMN_DOUBT).square() / 2
    around = around - around.logsumexp(0)
    each = fits.logsumexp(1)  # (numbers, widths)
    evidence = (each[:, :, None] + around).logsumexp(1)  # of every usual width, by each number
    chance = evidence.sum(0) - ((usual - math.log(USUAL_WIDTH)) / WIDTH_DOUBT).square() / 2
    expected = (around + chance.log_softmax(0)).logsumexp(1)
    law = (fits + expected).flatten(1).softmax(1).view(fits.shape)
    return torch.einsum("npw,pwb->nb", law, shares)
