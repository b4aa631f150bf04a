"""What the additive method makes of the histogram of a number that it is to learn, where noise drowns single bins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TARGET_BINS = 64
"""Of a regression target over its declared range: its mean and spread are all that is read off them."""
POOLED, WORSE = 8, 20.0
"""Of them together are compared with a normal law, too, and decide where they speak against it by so much: whole
numbers fill few bins, the fullest of which the narrowest law would explain best."""
LEGIBLE = 0.05
"""Noise in the mean of a number, of half its declared range, up to which its bins are read one by one."""
FINE = 0.3
"""The same, of the deviation of the law that describes the number best: bins that are nothing but noise would seem to
be the spread of a number that fills a hundredth of its range."""
EXPECTED_MEAN, EXPECTED_SPREAD, SPREAD_DOUBT = 0.4, 0.3, 0.6
"""What a number is taken for before anything is known, in halves of its declared range: how far its mean may be from
the middle, its deviation (a range of six or seven of them), and the deviation of the logarithm of that."""
NOT_NORMAL = 0.1
"""Part of a count by which numbers and residuals are not quite normal."""


def legible(noise: float, records: float) -> bool:
    return noise * math.sqrt(TARGET_BINS / 3) <= LEGIBLE * records


def fine(noise: float, records: float, shares: Tensor) -> bool:
    """Whether bins are read one by one for a number that has about these shares."""
    middles = (torch.arange(TARGET_BINS, dtype=torch.float64) + 0.5) / TARGET_BINS * 2 - 1
    spread = (shares * (middles - shares @ middles).square()).sum().sqrt()
    return noise * math.sqrt(TARGET_BINS / 3) <= FINE * float(spread) * records


def normal_shares(counts: Tensor, noise: float, records: float) -> Tensor:
    """Of the bins of a number, under the likeliest mean and deviation with a prior; see `residual_scale`."""
    means = torch.linspace(-1.0, 1.0, 81, dtype=torch.float64)  # wide bounds leave a number at one end of them
    scales = torch.logspace(math.log10(0.015), math.log10(0.6), 31, dtype=torch.float64)
    places = torch.linspace(-1, 1, TARGET_BINS + 1, dtype=torch.float64)
    below = torch.special.ndtr((places - means[:, None, None]) / scales[:, None])
    shares = below.diff(dim=-1)
    shares = shares / shares.sum(-1, keepdim=True)
    off = (means / EXPECTED_MEAN).square()[:, None] + ((scales / EXPECTED_SPREAD).log() / SPREAD_DOUBT).square()
    fine = pooled = off
    if math.isfinite(noise):
        fine, pooled = (off + _misfit(counts, shares, noise, records, width) for width in (1, POOLED))
    best = fine.flatten().argmin()
    if pooled.flatten()[best] > pooled.min() + WORSE:
        best = pooled.flatten().argmin()
    found: Tensor = shares.reshape(-1, TARGET_BINS)[best]
    return found


def _misfit(counts: Tensor, shares: Tensor, noise: float, records: float, width: int) -> Tensor:
    """Of laws (..., bins), in groups of so many bins."""
    expected = records * shares.unflatten(-1, (-1, width)).sum(-1)
    variance = width * noise**2 + expected + (NOT_NORMAL * expected).square()
    off = counts.unflatten(-1, (-1, width)).sum(-1) - expected
    misfit: Tensor = (off.square() / variance + variance.log()).sum(-1)
    return misfit
