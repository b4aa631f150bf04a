"""The scale within which nine tenths of a number's residuals lie, from signs, and what is not known of it.

A record's bin says little where noise is large. A sign, whether its residual lies within the interval that would be
stated, says directly what share of the records does: the square of a sign is a record's whole norm, and half of the
records that leave the interval move it by two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from confide.methods._additive import EDGES
from confide.methods._additive_target import NOT_NORMAL

RUNGS = 4
"""Scales at which signs are asked."""
LEARNT_SINCE = 0.25
"""By how much the logarithm of the scale differs from that of the first look, a third of the way, as a deviation."""
MISTAKEN, MISTAKEN_BY = 0.1, 1.5
"""Chance that the first look found a scale that is far too small, as of a heap within a wide range, and by how much."""
ENDS = NormalDist().inv_cdf(0.95)
"""Of a normal interval of 90 %, in deviations."""
LEAST_SCALE, GRID = 0.001, 481
"""Of scales, in halves of the declared range; steps of one and a half per cent."""
SHAPES = (0.5, 0.3, 0.1, 0.1)
"""Chances beforehand that residuals are normal, have long tails (Student's of three degrees), are even, or lie in a
heap for one half: a number that is zero for half of the records."""
HEAP = 8.0
"""How many times narrower the heap is than the rest."""
STUDENT_ENDS = 2.3533634
"""Of an interval of 90 % of Student's law of three degrees."""
HALF_ENDS = NormalDist().inv_cdf(0.9)
"""Of an interval of four fifths of a normal law, which has nine tenths where the other half is a heap."""
SURELY_TAIL = 3.0
"""Deviations of noise beyond which records in the tails of residuals are counted."""
AT_LEAST, SURELY = 0.8, 0.975
"""Share of the records that stated intervals are to hold, with this chance: their mean alone is 90 %."""


@dataclass(frozen=True)
class Ninety:
    """likely   the scale in the middle of what is believed
    stated   such that intervals are honest about what is not known of it
    """

    likely: float
    stated: float


def rungs_of(scale: float, doubt: float) -> Tensor:
    """Scales at which signs are asked, around one whose logarithm is in doubt by so much."""
    apart = math.hypot(doubt, LEARNT_SINCE)
    return scale * torch.exp(apart * torch.linspace(-1.5, 1.5, RUNGS, dtype=torch.float64))


def beyond(place: Tensor) -> Tensor:
    """(shapes, ...): the share beyond so many scales of which nine tenths lie within the first, under every shape."""
    normal = 2 * torch.special.ndtr(-ENDS * place)
    t = STUDENT_ENDS * place / math.sqrt(3)
    student = 1 - 2 / math.pi * (t / (1 + t.square()) + t.atan())
    rest = HALF_ENDS * place
    heap = torch.special.ndtr(-rest) + torch.special.ndtr(-HEAP * rest)
    return torch.stack([normal, student, (1 - 0.9 * place).clamp(min=0), heap])


def ninety_of(
    signs: Tensor, noise: float, records: float, rungs: Tensor, before: tuple[float, float], own: float, most: float
) -> Ninety:
    """From mean signs of all records, +1 beyond a rung's interval, each with such noise.

    before   scale and doubt of its logarithm at the first look
    own      mean variance of the outputs by what is not known of weights: stated intervals have it beside the scale
    most     scale of an interval as wide as the declared range
    """
    scales = torch.logspace(math.log10(LEAST_SCALE), 0, GRID, dtype=torch.float64)
    whole = (scales.square() + own).sqrt()
    share = beyond((rungs.square() + own).sqrt()[:, None] / whole)  # (shapes, rungs, scales)
    expected = 2 * share - 1
    rest = share.clamp(1 / records, 1 - 1 / records)
    variance = noise**2 + 4 * rest * (1 - rest) / records + (2 * NOT_NORMAL * rest).square()
    misfit = ((signs[:, None] - expected).square() / variance + variance.log()).sum(1) / 2
    off, near = (scales / before[0]).log(), math.hypot(before[1], LEARNT_SINCE)
    far = near + MISTAKEN_BY
    law = (1 - MISTAKEN) / near * torch.exp(-(off / near).square() / 2)
    law = law + (off > 0) * MISTAKEN / far * torch.exp(-(off / far).square() / 2)
    misfit = misfit - law.clamp(min=1e-300).log()
    chance = _chance(misfit)
    likely = min(_middle(scales, chance), most)
    return Ninety(likely, max(likely, min(_stated(scales, chance, whole, own), most)))


def first_ninety(counts: Tensor, noise: float, records: float, guess: float) -> tuple[float, float]:
    """The scale and the doubt of its logarithm, from noisy counts of residuals between EDGES; before that no more than
    that it is about `guess`, times or over e."""
    scales = torch.logspace(math.log10(LEAST_SCALE), math.log10(2.0), GRID // 2, dtype=torch.float64)
    outside = beyond(torch.tensor(EDGES, dtype=torch.float64)[:, None] / (ENDS * scales))
    every, none = torch.ones_like(outside[:, :1]), torch.zeros_like(outside[:, :1])
    shares = -torch.cat([every, outside, none], 1).diff(dim=1)
    expected = records * shares
    variance = noise**2 + expected.clamp(min=1.0) + (NOT_NORMAL * expected).square()
    misfit = ((counts.double()[:, None] - expected).square() / variance + variance.log()).sum(1) / 2
    chance = _chance(misfit + (scales / guess).log().square() / 2)
    mean = chance @ scales.log()
    return _middle(scales, chance), float((chance @ (scales.log() - mean).square()).sqrt())


def surely_spread(counts: Tensor, noise: float, records: float) -> float:
    """A root mean square that residuals have at least, from the same counts, as far as tails are more than noise.

    Of a number that is zero for most records nine tenths lie within a heap, and steps that are cut there follow the
    zeros alone.
    """
    edges = torch.tensor(EDGES, dtype=torch.float64)
    beyond_it = counts.double().flip(0).cumsum(0).flip(0)[1:]  # of every edge
    bins = torch.arange(len(edges), 0, -1, dtype=torch.float64)
    share = ((beyond_it - SURELY_TAIL * noise * bins.sqrt()) / records).clamp(0, 1)
    squares = torch.cat([edges[:1].square(), edges.square().diff()])
    return math.sqrt(float(share @ squares))


def _chance(misfit: Tensor) -> Tensor:
    """Of every scale, over all shapes, from (shapes, scales)."""
    misfit = misfit - torch.tensor(SHAPES, dtype=torch.float64).log()[:, None]
    found: Tensor = (-misfit).flatten().softmax(0).view_as(misfit).sum(0)
    return found


def _middle(scales: Tensor, chance: Tensor) -> float:
    return float(scales[(chance.cumsum(0) >= 0.5).nonzero()[0, 0]])


def _stated(scales: Tensor, chance: Tensor, whole: Tensor, own: float) -> float:
    """The least scale with which intervals hold nine tenths on average, and AT_LEAST with chance SURELY."""
    held = 1 - beyond(whole[:, None] / whole)[0]  # (stated, true)
    enough = (held @ chance >= 0.9) & ((held >= AT_LEAST).double() @ chance >= SURELY)
    return float(scales[enough.nonzero()[0, 0]]) if enough.any() else float(scales[-1])
