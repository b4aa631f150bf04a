"""Two classes: what noisy counts say beyond slope, shift and floor, as a curve of log odds; see `recalibrate`.

A fit may be surely wrong of some records, or right at both ends and wrong in between, which no slope, shift and floor
can follow. Where they state q and q + e is right, the counts of a bin of N records are off by N e, beside noise and
sampling. Beforehand e is a Gaussian process along the bins, of one of several heights and lengths, or nothing at all;
each of these is weighed by how well it explains the counts, and e is its mean over all of them. Where noise is larger
than what is off, nothing explains counts as well as the rest, and little changes.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from confide.models.calibrated import within
from confide.workflow.odds import MIDDLES, Bins, Counts

HEIGHTS, LENGTHS, NOTHING = (0.05, 0.1, 0.2, 0.4), (0.6, 2.0, 6.0), 0.5
"""Standard deviations of e, the larger the rarer; its lengths in bins; the belief in no e at all; docs/protocols.md."""
ROUNDS = 3
"""How often the records of a bin, which counts tell given the probability there, are found again with the curve."""
SMALLEST = 1e-4
"""Of a curve that is kept: below it, it is left out."""

Curve = tuple[tuple[float, float], ...]


def fitted(counts: Counts, records: int, level: float, slope: float, shift: float, floor: float) -> Curve:
    """Places, as log odds under slope and shift, and what is to be added to the probability of class 1 there."""
    places, stated = slope * MIDDLES + level + shift, torch.sigmoid(MIDDLES + level)
    q = ((1 - floor) * torch.sigmoid(places) + floor / 2).clamp(1e-12, 1 - 1e-12)
    now, (kernels, weights) = q, _expected(level)
    for _ in range(ROUNDS):
        bins = Bins.of(counts, records, stated, now)
        off = bins.left(q)
        root = torch.linalg.cholesky(bins.present[:, None] * kernels * bins.present + bins.covariance(now))
        pull = torch.cholesky_solve(off.expand(len(kernels), -1)[..., None], root)[..., 0]
        chance = weights - (pull @ off) / 2 - root.diagonal(dim1=1, dim2=2).log().sum(1)
        added = torch.einsum("h,hij,hj->i", chance.softmax(0), kernels, bins.present * pull)
        now = within(q, added)
    added = now - q
    if float(added.abs().max()) < SMALLEST:
        return ()
    pairs = zip(places.tolist(), added.tolist(), strict=True)
    return tuple((round(place, 6), round(height, 6)) for place, height in pairs)


def _expected(level: float) -> tuple[Tensor, Tensor]:
    """Covariances (kinds, bins, bins) along the bins, the first of them nothing, and logarithms of their weights."""
    place, share = torch.arange(len(MIDDLES), dtype=torch.float64), 1 / (1 + math.exp(-level))
    apart, unit = (place[:, None] - place).square(), 4 * share * (1 - share)  # less for a rare class
    kinds, weights = [torch.zeros_like(apart)], [NOTHING]
    for height, length in product(HEIGHTS, LENGTHS):
        kinds.append(unit * height**2 * torch.exp(-apart / (2 * length**2)))
        weights.append((1 - NOTHING) / (height * sum(1 / each for each in HEIGHTS) * len(LENGTHS)))
    return torch.stack(kinds), torch.tensor(weights, dtype=torch.float64).log()
