"""Two classes: slope, shift and floor from noisy counts of records by their predicted odds; see `recalibrate`.

A record names the bin of its log odds l, the group of bins, and whether class 1 is its own, a vector of norm 1. In a
bin the counts c1 and c0, of records of the class and of others, are noisy, and c1 (1 - q) - c0 q, with q as predictions
state it, is N (q' - q) on average where slope, shift and floor are right and the bin holds N records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from confide.devices import HOST
from confide.models.additive import smoothed

FAR = 5.0
"""Log odds from which on bins are wide, and few records are in them."""


def _middle(low: float, high: float) -> float:
    """Of far bins odds seldom go much further than their nearer edge."""
    near, far = sorted((low, high), key=abs)
    return near + (far - near) / (3 if abs(near) >= FAR else 2)


def _both(above: Sequence[float]) -> Tensor:
    return torch.tensor([*(-edge for edge in reversed(above)), *above], dtype=torch.float64, device=HOST)


EDGES = _both((0.05, 0.15, 0.3, 0.5, 0.75, 1.25, 1.75, 2.25, 3.0, 3.75, 4.5, 6.5, 10.0, 16.0, 30.0))
"""Of bins of log odds, less those of the levels: half a unit apart where most records lie, for in between a sigmoid is
nearly a line. A fit that has learnt little has all records about its level, which is the middle of a bin: were it
anywhere in one, the difference would be taken for a shift. The far ones are empty unless a fit has gone astray, such as
one of hundreds of columns whose sum nobody could centre. And finer ones about the level: a network that had too few
steps says the right thing very softly, and a slope of ten is not seen where all odds share a bin."""
MIDDLES = torch.tensor(
    [-40.0, *(_middle(low, high) for low, high in pairwise(EDGES.tolist())), 40.0], dtype=torch.float64, device=HOST
)
"""The odds for which bins stand."""
LAW = torch.cat([EDGES.new_zeros(1), torch.sigmoid(EDGES), EDGES.new_ones(1)]).diff()
"""Shares of the bins, as expected beforehand: odds of a standard logistic law."""
GROUPS = torch.eye(7, dtype=torch.float64, device=HOST)[torch.bucketize(MIDDLES, _both((0.75, 2.25, 4.5)))]
"""Which of seven groups a bin belongs to, (bins, groups). A sum over many bins has the noise of all of them, and how
far odds are off over a whole stretch is what most fits need to know: a record names its group beside its bin."""
GROUPED = 0.5
"""Part of the square of a record's norm by which it names its group; docs/protocols.md."""
SIZE = 2 * sum(GROUPS.shape)
"""Of what a record tells."""


STEEPER, EXPECTED, TAILS, LEAST_SLOPE, LARGEST_SLOPE = 0.1, 0.15, 3.0, 0.02, 20.0
"""Of the slope's logarithm that is expected beforehand: its middle, for what shrinkage and clipping take off a fit is
seldom too little; its scale, which is that of a shift as well; and what a slope may be. By the logarithm, for else
noise in a few counts would now and then wipe out all that a fit has learnt. Both have Student's law of so many degrees:
most fits are nearly right, and those that are not may be far off, as counts then show."""
FLOORS, EXPECTED_FLOOR = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4), 0.05
"""Floors that are tried, and what is expected beforehand: exponential, for most tables have few wrong labels and some
have many. Read off the floors that test records of made-up tables would choose, see docs/protocols.md."""
LARGEST_SHIFT, POINTS, ZOOMS = 6.0, 61, 4
"""Of the search for slope and shift: the range of a shift, places along each of the two, and how often it is narrowed
to four standard deviations around the mean."""


class Sure(Protocol):
    """Probabilities (records, classes) of the predictive under a slope and, of several classes, a power."""

    def __call__(self, slope: float, power: float = 1.0) -> Tensor: ...


def counted(sure: Sure, y: Tensor, levels: Tensor) -> Tensor:
    q = sure(1.0).clamp(min=1e-30)
    place = torch.bucketize((q[:, 1:] / q[:, :1]).log() - (levels[1] - levels[0]), EDGES)
    bins, groups = GROUPS.shape
    rows = torch.zeros(len(q), SIZE, dtype=torch.float64)
    rows.scatter_(1, place + (1 - y) * bins, math.sqrt(1 - GROUPED))
    return rows.scatter_(1, 2 * bins + GROUPS.argmax(1)[place] + (1 - y) * groups, math.sqrt(GROUPED))


class Counts(NamedTuple):
    """Noisy counts of records, of class 1 and of class 0 by their bins, as bins and groups together tell them.

    Within a group their noise has the covariance variance * (identity - shared).
    """

    counts: Tensor
    noise: float
    variance: float
    shared: Tensor

    @classmethod
    def of(cls, found: Tensor, noise: float) -> Counts:
        """By least squares, from the sum of what records tell and the noise of each of its numbers."""
        bins, groups = GROUPS.shape
        fine, coarse = found[: 2 * bins].reshape(2, bins), found[2 * bins :].reshape(2, groups)
        told = math.sqrt(1 - GROUPED) * fine + math.sqrt(GROUPED) * coarse @ GROUPS.mT
        shared = GROUPED / (1 - GROUPED + GROUPED * GROUPS.sum(0))
        counts = (told - (told @ GROUPS * shared) @ GROUPS.mT) / (1 - GROUPED)
        return cls(counts, noise, noise**2 / (1 - GROUPED), shared)


def expected(off: Tensor) -> Tensor:
    """Log density of Student's law, up to a constant."""
    return -(TAILS + 1) / 2 * (1 + off.square() / TAILS).log()


def fitted(counts: Counts, records: int, level: float = 0.0) -> tuple[float, float, float]:
    """Slope, shift and floor that cost least by what noisy counts leave possible.

    Under every floor slope and shift have their posterior means, and what is believed of a bin is the mean over floors;
    of all three those are taken under which these beliefs are the least surprising. The likeliest floor alone would not
    do: where noise hides the few records that a fit is very sure of, the many in the middle ask for a slope that is
    ruinous for the former unless a floor goes with it.

    level   log odds that a slope leaves where they are, from which those of the bins are counted
    """
    low = torch.tensor([math.log(LEAST_SLOPE), -LARGEST_SHIFT], dtype=torch.float64)
    high = torch.tensor([math.log(LARGEST_SLOPE), LARGEST_SHIFT], dtype=torch.float64)
    ends, least, best = (low, high), (low, high), (1.0, 0.0, 0.0)
    floors = torch.tensor(FLOORS, dtype=torch.float64)[:, None, None]
    rarer = 2 / (1 + math.exp(abs(level)))  # 1 for even classes: a floor raises the share of a rare one
    stated = torch.sigmoid(MIDDLES + level)
    bins = Bins.of(counts, records, stated, stated)
    for _ in range(1 + ZOOMS):
        steep = torch.linspace(float(ends[0][0]), float(ends[1][0]), POINTS, dtype=torch.float64)
        shift = torch.linspace(float(ends[0][1]), float(ends[1][1]), POINTS, dtype=torch.float64)
        straight = torch.sigmoid(steep.exp()[:, None, None] * MIDDLES + level + shift[:, None])
        q = ((1 - floors[..., None]) * straight + floors[..., None] / 2).clamp(1e-12, 1 - 1e-12)
        chance = bins.evidence(q) - floors / (EXPECTED_FLOOR * rarer)
        chance = chance + expected((steep[:, None] - STEEPER) / EXPECTED) + expected(shift / EXPECTED)
        share = chance.flatten().softmax(0).view(chance.shape)
        under = share / share.sum((1, 2), keepdim=True).clamp(min=1e-300)  # every floor by itself
        slopes, shifts = ((under.sum(axis) * value).sum(1)[:, None] for axis, value in ((2, steep), (1, shift)))
        each = (1 - floors[:, 0]) * torch.sigmoid(slopes.exp() * MIDDLES + level + shifts) + floors[:, 0] / 2
        believed = share.sum((1, 2)) @ each
        cost = -(q.log() @ (bins.present * believed) + (1 - q).log() @ (bins.present * (1 - believed)))
        at = torch.unravel_index(cost.argmin(), cost.shape)
        best = float(steep[at[1]].exp()), float(shift[at[2]]), FLOORS[int(at[0])]
        bins = Bins.of(counts, records, stated, q[at])
        ends = _nearer(((share.sum((0, 2)), steep), (share.sum((0, 1)), shift)), ends, least)
    return best


Ends = tuple[Tensor, Tensor]


def _nearer(sides: Sequence[tuple[Tensor, Tensor]], ends: Ends, least: Ends) -> Ends:
    """Ends of a finer grid, four deviations around the mean of every (chances, places)."""
    mean = torch.stack([(weight * value).sum() for weight, value in sides])
    spread = torch.stack(
        [(weight * (value - at).square()).sum().sqrt() for (weight, value), at in zip(sides, mean, strict=True)]
    )
    reach = torch.maximum(4 * spread, 2 * (ends[1] - ends[0]) / (POINTS - 1))
    return torch.maximum(mean - reach, least[0]), torch.minimum(mean + reach, least[1])


class Bins(NamedTuple):
    """What noisy counts tell of probabilities, where predictions state others.

    With c1 records of the class and c0 others in a bin of N, c1 (1 - stated) - c0 stated is N (q - stated) on average.
    How many there are is told by the sum whose noise is not that of this difference. Were any number of them taken for
    possible, noise of many bins would be taken for slope and shift where so many records are not there at all.

    noise    variance of the difference by the noise of the bins alone
    along    (bins, groups): root of shares of it that the bins of a group have in common, with opposite sign
    present  N, and its variance, doubt
    """

    stated: Tensor
    off: Tensor
    noise: Tensor
    along: Tensor
    present: Tensor
    doubt: Tensor

    @classmethod
    def of(cls, counts: Counts, records: int, stated: Tensor, q: Tensor) -> Bins:
        """q: probabilities by which records of a bin are told from counts."""
        own, other = counts.counts
        # far from what is stated noise would count twofold
        seen = (q * stated + (1 - q) * (1 - stated)).clamp(min=0.25)
        squares = stated.square() + (1 - stated).square()
        found = (stated * own + (1 - stated) * other) / seen
        present = records * smoothed(found[None], math.sqrt(2) * counts.noise, records, LAW, LAW[None])[0]
        noise, alone = counts.variance * squares, 1 - GROUPS @ counts.shared
        doubt = 1 / (seen.square() / (noise * alone + 1e-9) + 1 / (present.square() + 1e-9))
        along = GROUPS * (noise[:, None] * counts.shared).sqrt()
        return cls(stated, own * (1 - stated) - other * stated, noise, along, present, doubt)

    def left(self, q: Tensor) -> Tensor:
        """What counts are off by under probabilities (..., bins)."""
        return self.off - self.present * (q - self.stated)

    def variance(self, q: Tensor) -> Tensor:
        """Of that, where these probabilities are right and groups do not tell of it."""
        return self.noise + self.present * q * (1 - q) + self.doubt * (q - self.stated).square() + 1e-9

    def covariance(self, q: Tensor) -> Tensor:
        """Of that, (bins, bins)."""
        return torch.diag(self.variance(q)) - self.along @ self.along.mT

    def evidence(self, q: Tensor) -> Tensor:
        """Log likelihood of probabilities (..., bins): Gaussian, the inverse by Sherman and Morrison."""
        variance, left = self.variance(q), self.left(q)
        lost = 1 - (1 / variance) @ self.along.square()
        together = ((left / variance) @ self.along).square() / lost
        squares: Tensor = (left.square() / variance + variance.log()).sum(-1) + (together + lost.log()).sum(-1)
        return -squares / 2
