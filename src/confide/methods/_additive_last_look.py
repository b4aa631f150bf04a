"""The last look at a number's residuals: how large they are, and whether what was learnt explains the target at all.

The second is a line from what was learnt to the target, from five means over all records. Whatever went wrong before,
effects that say nothing come out as none of them, and a constant that was measured beside other weights is put right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.mechanism.clipping import Recordwise
from confide.methods._additive_ninety import ENDS
from confide.models.additive import REACH, AdditiveNetwork
from confide.sources.queries import StatisticQuery

LINE_SHARE = 0.1
"""Of the square of a record's norm in this look belongs to the line; to signs of how large its residual is the rest."""
WIDEST = 2.5
"""Deviations from the constant that count at most, of the target and of what was learnt."""
MOST_EXPLAINED = 2.0
"""Mean square of what was learnt, over that of the target, above which it cannot be meant: what explains a target
varies less than the target itself. There means that are cut tell nothing of a line."""
USUAL = 0.3
"""By which a level differs from 0, and a slope from 1, where something is wrong, as a standard deviation."""
MEANS = 5
"""Of the target, of what was learnt, of both squares and of the product."""
LEAST_LEFT = 0.1
"""Part of the squares of residuals that a line leaves, at least."""


@dataclass(frozen=True)
class TargetLine:
    """target = constant + level + slope effects, in the target's deviations; and what that leaves of residuals' own."""

    level: float = 0.0
    slope: float = 1.0
    left: float = 1.0


def last_look(
    network: AdditiveNetwork, constant: float, spread: float, clip: float, rungs: Tensor, doubt: Tensor
) -> StatisticQuery:
    """Of one record: whether its residual lies beyond the interval that would be stated with each of these scales, as
    signs, and the means of a line; in norm the clip at most.

    constant, spread   of the network, and the target's deviation as it was found
    doubt              variances of the weights, which widen an interval beside the scale
    """
    sign, line = clip * ((1 - LINE_SHARE) / len(rungs)) ** 0.5, clip * (LINE_SHARE / MEANS) ** 0.5

    def answer(x: Tensor, y: Tensor) -> Tensor:
        learnt, target = network(x).reshape(-1).double(), y.reshape(-1).double()
        # Summed by rows, each by itself: a product may round a row by its place, and a sign hides no last digit.
        own = (network.features(x.flatten(1)).double().square() * doubt).sum(1)
        reach = ENDS * (rungs.square() + own[:, None]).sqrt()
        beyond = sign * (2 * ((learnt - target).abs()[:, None] > reach).double() - 1)
        first, second = (((one - constant) / spread / WIDEST).clamp(-1, 1) for one in (target, learnt))
        rows: Tensor = torch.cat(
            [beyond, line * torch.stack([first, second, first**2, first * second, second**2], 1)], 1
        )
        return rows

    return StatisticQuery(Recordwise(answer, network), len(rungs) + MEANS)


def parts_of(told: Tensor, noise: float) -> tuple[Tensor, float, Tensor, float]:
    """Signs with their noise, and the means of a line with theirs, from a release in units of its clip."""
    sign, line = ((1 - LINE_SHARE) / (len(told) - MEANS)) ** 0.5, (LINE_SHARE / MEANS) ** 0.5
    return told[:-MEANS] / sign, noise / sign, told[-MEANS:] / line, noise / line


def line_of(told: Tensor, noise: float) -> TargetLine:
    """From the means over all records, each with that noise.

    A slope is 1 and a level 0 as far as means tell no more than noise: where nothing is wrong, looking costs nothing.
    """
    target, learnt = (float(one) * WIDEST for one in told[:2])
    own, product, square = (float(one) * WIDEST**2 for one in told[2:])
    error, errors = noise * WIDEST, noise * WIDEST**2
    if square > MOST_EXPLAINED * (max(own, 0.0) + 2 * errors) + 2 * errors:
        return TargetLine(_beyond(target, error), 0.0, 1.0)
    spread = max(square - learnt**2, 1e-6)
    missing = product - target * learnt - spread  # nothing, where the slope is 1
    slope = 1 + _beyond(missing / spread, math.sqrt(2) * math.hypot(errors, error) / spread)
    slope = min(max(slope, 0.0), 1.0)
    level = _beyond(target - slope * learnt, math.sqrt(2) * error)
    before = own - 2 * product + square
    after = before - (1 - slope) * ((1 + slope) * square - 2 * product)
    after -= level * (2 * (target - slope * learnt) - level)
    kept = after / before if before > 4 * errors and after > 0 else 1.0
    return TargetLine(level, slope, math.sqrt(min(max(kept, LEAST_LEFT), 1.0)))


def _beyond(found: float, error: float) -> float:
    """What is more than noise of that size, and no larger than is likely."""
    return found * max(0.0, 1 - (REACH * error / max(abs(found), 1e-300)) ** 2) / (1 + (error / USUAL) ** 2)
