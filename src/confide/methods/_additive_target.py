"""What the additive method makes of the histogram of a number that it is to learn, where noise drowns single bins."""

from __future__ import annotations

import math
from functools import cache

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
HEAPS, NEEDED = 3, 10.0
"""How many of the fullest bins may be heaps, and by how much every normal law must be further off (in squared
deviations): a number that lies within one bin is no heap beside something else."""
HEAP_SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
"""Of the records, that are tried to lie in it: a release seldom tells them apart more finely."""
PLAIN_GRID, NARROWEST, BELIEVED_WIDTH = (129, 41), 0.004, 0.015
"""Means and deviations of normal laws that are tried, the least of them, and the least that is believed."""
REST_GRID, REST_SPREAD, REST_DOUBT = (41, 19), 0.2, 0.8
"""Means and deviations that are tried for the records outside a heap, and what is expected of the latter."""
ROOMS, LEAST_BIAS, ROUNDS = (1.0, 1.4, 2.0, 2.8, 4.0), 0.1, 50
"""By how much further out residuals may be cut, and how far from the mean, in deviations, cutting may lead."""
WITHIN, SHAPELESS = 4, 2.0
"""Places within a bin, over which its records are spread; and halves of a bin's width, below which deviation nothing
is known of a number's shape."""
NOT_NORMAL = 0.1
"""Part of a count by which numbers and residuals are not quite normal."""


def legible(noise: float, records: float) -> bool:
    return noise * math.sqrt(TARGET_BINS / 3) <= LEGIBLE * records


def fine(noise: float, records: float, shares: Tensor) -> bool:
    """Whether bins are read one by one for a number that has about these shares."""
    middles = (torch.arange(TARGET_BINS, dtype=torch.float64) + 0.5) / TARGET_BINS * 2 - 1
    spread = (shares * (middles - shares @ middles).square()).sum().sqrt()
    return noise * math.sqrt(TARGET_BINS / 3) <= FINE * float(spread) * records


def law_of_target(counts: Tensor, noise: float, records: float) -> Tensor:
    """Shares of the bins of a number under the likeliest law: normal, or a heap in one bin with a normal rest.

    A number that is zero for most records is no narrow normal one: its mean would be that of the zeros, and steps would
    cut whatever differs from them. Laws with a heap are believed where counts speak against every other.
    """
    laws, off = _normal_laws(*PLAIN_GRID)
    if not math.isfinite(noise):
        return laws[off.argmin()]
    plain, count = _blurred(laws), len(laws)
    found = [(laws, off), *(_heaped_laws(place) for place in counts.topk(HEAPS).indices.tolist())]
    laws, off = (torch.cat(parts) for parts in zip(*found, strict=True))
    misfits = [_misfit(counts, laws, noise, records, width) for width in (1, POOLED)]
    fine, pooled = (off + misfit for misfit in misfits)
    by_pools = bool(pooled[fine.argmin()] > pooled.min() + WORSE)
    normal, heaped = (misfits[by_pools]).split([count, len(laws) - count])
    told = pooled if by_pools else fine
    if normal.min() <= heaped.min() + NEEDED:
        return plain[told[:count].argmin()]
    heaped = (-told[count:] / 2).softmax(0)
    among: Tensor = heaped @ laws[count:]
    return among


def _blurred(laws: Tensor) -> Tensor:
    """Normal laws of PLAIN_GRID as they are believed: which part of a bin a narrow number lies in nobody knows."""
    each = laws.view(*PLAIN_GRID, TARGET_BINS)
    within = _grid(*PLAIN_GRID)[1][0].lt(BELIEVED_WIDTH).sum()
    return torch.where((torch.arange(PLAIN_GRID[1]) < within)[:, None], each[:, within : within + 1], each).flatten(
        0, 1
    )


@cache
def _normal_laws(places: int, widths: int) -> tuple[Tensor, Tensor]:
    """(laws, bins) of so many means and deviations, and minus twice what is expected of each beforehand."""
    means, scales = _grid(places, widths)
    edges = torch.linspace(-1, 1, TARGET_BINS + 1, dtype=torch.float64)
    shares = torch.special.ndtr((edges - means[..., None]) / scales[..., None]).diff(dim=-1)
    off = (means / EXPECTED_MEAN).square()
    off = off + ((scales.clamp(min=BELIEVED_WIDTH) / EXPECTED_SPREAD).log() / SPREAD_DOUBT).square()
    return (shares / shares.sum(-1, keepdim=True)).flatten(0, 1), -2 * (-off.flatten() / 2).log_softmax(0)


@cache
def _heaped_laws(place: int) -> tuple[Tensor, Tensor]:
    """The same of laws with a heap in that bin. The rest lies beside it, as widely as it lies far from it; or anywhere
    else, which is less likely (Cauchy's law)."""
    rest, _ = _normal_laws(*REST_GRID)
    means, scales = _grid(*REST_GRID)
    away = (means - (2 * place + 1) / TARGET_BINS + 1) / (2 * scales)
    chance = -(1 + away.square()).log() - scales.log() - ((scales / REST_SPREAD).log() / REST_DOUBT).square() / 2
    chance = chance.flatten().log_softmax(0) + math.log(1 / HEAPS / len(HEAP_SHARES))
    heap = torch.zeros(TARGET_BINS, dtype=torch.float64)
    heap[place] = 1.0
    laws = torch.cat([share * heap + (1 - share) * rest for share in HEAP_SHARES])
    return laws, -2 * chance.repeat(len(HEAP_SHARES))


def _grid(places: int, widths: int) -> tuple[Tensor, Tensor]:
    """Means, for wide bounds leave a number at one end of them, and deviations: both (places, widths)."""
    means = torch.linspace(-1.0, 1.0, places, dtype=torch.float64)
    scales = torch.logspace(math.log10(NARROWEST), math.log10(0.6), widths, dtype=torch.float64)
    return means[:, None].expand(-1, widths), scales.expand(places, -1)


def _misfit(counts: Tensor, shares: Tensor, noise: float, records: float, width: int) -> Tensor:
    """Of laws (..., bins), in groups of so many bins."""
    expected = records * shares.unflatten(-1, (-1, width)).sum(-1)
    variance = width * noise**2 + expected.clamp(min=1.0) + (NOT_NORMAL * expected).square()
    off = counts.unflatten(-1, (-1, width)).sum(-1) - expected
    misfit: Tensor = (off.square() / variance + variance.log()).sum(-1)
    return misfit


def room_of(shares: Tensor, cut: float) -> float:
    """How many times further out residuals are to be cut than at `cut` deviations, for a number with these shares.

    Steps that cut follow the mean only of what lies evenly around it. Of a number that is zero for most records they
    would follow the zeros, and whatever explains the others would be cut off.
    """
    places = (torch.arange(WITHIN * TARGET_BINS, dtype=torch.float64) + 0.5) / (WITHIN * TARGET_BINS) * 2 - 1
    shares = shares.repeat_interleave(WITHIN) / WITHIN
    mean = shares @ places
    spread = float((shares @ (places - mean).square()).sqrt())
    if spread < SHAPELESS / TARGET_BINS:
        return 1.0
    for room in ROOMS[:-1]:
        place, most = mean, room * cut * spread
        for _ in range(ROUNDS):
            place = place + shares @ (places - place).clamp(-most, most)
        if abs(float(place - mean)) <= LEAST_BIAS * spread:
            return room
    return ROOMS[-1]
