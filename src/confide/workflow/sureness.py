"""Several classes: slope, power, shifts and floor from noisy sums over all records; see `recalibrate`.

A record tells whether its likeliest class is its own, less how sure the prediction is of that under one slope, and how
sure it would be under others. Sums over all records have the noise of one count: read off bins of odds, the same would
be known three times worse. The same, where records count by how sure they are and where the surest count alone, shows
whether it takes a floor or a power: labels that are wrong make the surest wrong most, and where some classes are alike
and the others are not, predictions are too sure of the former and not sure enough of the latter. Shifts are read off
the sums of [y = k] - q_k, whose norm is at most the root of 2 however many classes there are, and of q_k (1 - q_k), by
which they grow with a shift, at two slopes, for which slope is right is not known when they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from confide.workflow.odds import (
    EXPECTED,
    EXPECTED_FLOOR,
    FLOORS,
    LARGEST_SLOPE,
    LEAST_SLOPE,
    POINTS,
    STEEPER,
    Sure,
    expected,
)

EXPECTED_SHIFT = 0.15
"""Of a shift of several classes, the standard deviation."""
SURENESS = (0.6, 0.85, 1.2, 1.7, 2.4, 4.8, 9.6, 19.2)
"""Slopes under which a record tells how sure its prediction is; in between it is about a parabola of their logarithms.
They are close to each other where most fits need theirs: at twice the distance it is off by up to .005 of all
records, and many tell more surely than that. The steep ones are for chains of many weights, whose draws differ so much
that their mean is unsure of everything."""
POWERS = (0.7, 1.5)
"""Powers under which a record tells the same at the usual slope; in between it is a parabola of their logarithms."""
TRIED_POWERS = (0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 1.0, 1.07, 1.15, 1.25, 1.4, 1.6, 1.8, 2.0)
"""As good as a sum can tell them apart. What is expected of their logarithms is what is of a slope's, about zero."""
USUAL = 2
"""Place of the slope among them that is expected beforehand."""
LEVEL_WEIGHT, FLOOR_WEIGHTS, SHIFT_SHARE, VERY_SURE, SUREST = 0.5, (1.0, 0.5, 0.7), 0.15, (2.0, 4.0), 0.47
"""What the sureness itself is multiplied by, and all that is told of all records, the surer and the surest ones; what
shifts have of the square of a record's norm; log odds from which on a prediction counts among the surest, and from
which on fully; and by how much such a one is surer than even, on average. See docs/protocols.md."""
SLOPES = (0.75, 1.5)
"""At which shifts are asked; in between, and a little beyond, sums are about linear in the slope's logarithm."""
TOLD = len(SURENESS) + len(POWERS) + 1
"""Numbers that a record tells of its likeliest class, for each of the floor's weights."""
COUPLED = 1.5
"""By which q (1 - q) understates how a sum grows with shifts: 1 where a class has many rivals, 2 where it has one."""
INEXACT = 0.002
"""Share of the records by which sums may be off under a slope and a power, however little noise they have: sureness is
told at some slopes, and under powers at the usual one alone."""
NEARLY_EVEN = 0.99
"""Share of the rarest class over an even share from which on classes are taken to be alike under a slope of zero."""
SCATTERED = 0.6
"""Of the sampling noise that all predictions would have were they as sure as their mean: some are nearly certain."""


def told_by(sure: Sure, y: Tensor, levels: Tensor) -> Tensor:
    """In norm about 1 at most; a record beyond it is clipped."""
    probabilities = [sure(slope) for slope in SURENESS]
    likeliest = probabilities[USUAL].argmax(1, keepdim=True)
    stated = [value.gather(1, likeliest) for value in probabilities]
    usual, right = stated[USUAL], (likeliest == y).double()
    steps = [value - usual for value in stated[:USUAL]] + [after - before for before, after in pairwise(stated[USUAL:])]
    bent = [sure(SURENESS[USUAL], power).gather(1, likeliest) - usual for power in POWERS]
    rows = torch.cat([right - usual, *steps, *bent, LEVEL_WEIGHT * (usual - 0.5)], 1)
    shares = zip(FLOOR_WEIGHTS, _sure_shares(usual), strict=True)
    level_weight, sum_weight = weights()
    return torch.cat(
        [*(level_weight * weight * share * rows for weight, share in shares), sum_weight * _sums(sure, y)], 1
    )


def _sure_shares(usual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What records count for by how sure a prediction is: all the same, those that are surer, the surest alone."""
    odds = torch.logit(usual.clamp(1e-12, 1 - 1e-12))
    return torch.ones_like(usual), 2 * usual - 1, ((odds - VERY_SURE[0]) / (VERY_SURE[1] - VERY_SURE[0])).clamp(0, 1)


def weights() -> tuple[float, float]:
    """What sureness and sums are multiplied by, for a norm of 1: sums at one slope have at most the root of 2."""
    level = (1 + LEVEL_WEIGHT**2 / 4) * sum(weight**2 for weight in FLOOR_WEIGHTS)
    return math.sqrt((1 - SHIFT_SHARE) / level), math.sqrt(SHIFT_SHARE / (2 * len(SLOPES)))


def _sums(sure: Sure, y: Tensor) -> Tensor:
    """Of every slope [y = k] - q_k and q_k (1 - q_k), whose squares add up to 2 at most: to 1 - 2 q_y + |q|^2 and, no
    more than a quarter of 1 - |q|^2."""
    parts = []
    for slope in SLOPES:
        q = sure(slope)
        parts += [torch.zeros_like(q).scatter(1, y, 1.0) - q, q * (1 - q)]
    return torch.cat(parts, 1)


def size(classes: int) -> int:
    """Of what a record tells."""
    return len(FLOOR_WEIGHTS) * TOLD + 2 * len(SLOPES) * classes


# -- what it means ----------------------------------------------------------------------------------------------------


def fitted(found: Tensor, noise: float, records: int, levels: Tensor) -> tuple[float, tuple[float, ...], float, float]:
    """Slope, shifts, floor and power from the noisy sum of what all records tell; levels: log shares of the classes."""
    classes = len(levels)
    level_weight, sum_weight = weights()
    told, sums = found.split([len(FLOOR_WEIGHTS) * TOLD, 2 * len(SLOPES) * classes])
    told, sums = told.reshape(len(FLOOR_WEIGHTS), -1) / level_weight, sums.reshape(len(SLOPES), 2, classes) / sum_weight
    rarer = classes * float(levels.softmax(0).min())  # 1 for even classes: a floor raises the share of a rare one
    slope, floor, power = sure_enough(
        told, noise / level_weight, records, classes, EXPECTED_FLOOR * rarer, rarer > NEARLY_EVEN
    )
    return slope, shifts_of(sums, noise / sum_weight, slope, records), floor, power


def sure_enough(
    found: Tensor, noise: float, records: int, classes: int, expected_floor: float, even: bool
) -> tuple[float, float, float]:
    """Slope, floor and power by their posterior means, from sums (3, TOLD): see `_sure_shares`.

    even   whether all classes are alike under a slope of zero

    With e how much surer predictions are under a slope and a power than under the usual slope, the likeliest classes of
    all records are right as often as stated where the first sum is e, and so are those that are surer, and the surest,
    where the others are.
    """
    steep = torch.linspace(math.log(LEAST_SLOPE), math.log(LARGEST_SLOPE), 3 * POINTS, dtype=torch.float64)
    floors, powers = torch.tensor(FLOORS, dtype=torch.float64), torch.tensor(TRIED_POWERS, dtype=torch.float64).log()
    parts, bends = _pieces(steep, even), _bends(powers)
    flat = _flattened(steep) if even else torch.zeros_like(steep)
    # of the noise of what is right and of how much surer, (slopes, powers, 1)
    of_slopes = parts.square().sum(1) + (flat / LEVEL_WEIGHT).square()
    spread = 1 + of_slopes[:, None, None] + bends.square().sum(1)[:, None]
    found = found / torch.tensor(FLOOR_WEIGHTS, dtype=torch.float64)[:, None]
    first, second, third = found[:, -1] / LEVEL_WEIGHT
    sure = float((first + records / 2).clamp(records / classes, records))
    surest, square = float((third / SUREST).clamp(0, records)), float((2 * second / records).clamp(0.05, 1))
    totals = (records, 2 * sure - records, surest)  # what all records count for, and their squares add up to
    squares = (SCATTERED * records, SCATTERED * records * square, surest)
    chance = expected((steep - STEEPER) / EXPECTED)[:, None, None] + expected(powers / EXPECTED)[:, None]
    chance = chance - floors / expected_floor
    slopes = len(SURENESS)
    for place, (row, total, count) in enumerate(zip(found, totals, squares, strict=True)):
        below, above = row[1 : 1 + USUAL], row[1 + USUAL : slopes]
        pieces = row[1:slopes] if place == 1 else torch.cat([below.clamp(max=0), above.clamp(min=0)])
        usual = row[-1] / LEVEL_WEIGHT + total / 2
        surer = (parts @ pieces - flat * (usual - total / classes))[:, None, None] + (bends @ row[slopes:-1])[:, None]
        stated = usual + surer
        lost = floors * (stated - total / classes)
        mean = ((stated - lost) / max(total, 1.0)).clamp(1 / classes, 0.995)
        variance = (noise / FLOOR_WEIGHTS[place]) ** 2 * spread + count * mean * (1 - mean) + (INEXACT * count) ** 2
        chance = chance - ((row[0] - surer + lost).square() / variance + variance.log()) / 2
    share = chance.flatten().softmax(0).view(chance.shape)
    slope, power = (share.sum((1, 2)) @ steep).exp(), (share.sum((0, 2)) @ powers).exp()
    return float(slope), float(share.sum((0, 1)) @ floors), float(power)


def _bends(powers: Tensor) -> Tensor:
    """By which what POWERS add is multiplied for what each of these logarithms of powers adds: a parabola through both
    and no power, and lines beyond them."""
    low, high = (math.log(power) for power in POWERS)
    near, past = powers.clamp(low, high), torch.stack([(powers / low).clamp(min=1), (powers / high).clamp(min=1)], 1)
    parts = [near * (near - high) / (low * (low - high)), near * (near - low) / (high * (high - low))]
    return torch.stack(parts, 1) * past


def _pieces(steep: Tensor, even: bool) -> Tensor:
    """By which the steps between SURENESS are multiplied for how much surer predictions are under each slope.

    A parabola through the three slopes that are nearest by their logarithms. Below the first it goes on for half an
    octave, for it turns round before long, or else towards what is known of a slope of zero (`_flattened`). Steps below
    the usual slope begin there, and others where the last one ends.
    """
    places = torch.tensor(SURENESS, dtype=torch.float64).log()
    held = steep.clamp(float(places[0]) - math.log(2) / 2, float(places[-1]))
    nearest = (held[:, None] - places).abs().argmin(1).clamp(1, len(places) - 2)
    a, b, c = (places[nearest + off] for off in (-1, 0, 1))
    shares = steep.new_zeros(len(steep), len(places))
    for place, at, one, other in ((nearest - 1, a, b, c), (nearest, b, a, c), (nearest + 1, c, a, b)):
        part = (held - one) * (held - other) / ((at - one) * (at - other))
        shares.scatter_(1, place[:, None], part[:, None])
    if even:
        below = steep < places[0]
        shares[below] = 0.0
        shares[below, :2] = _towards_zero(steep[below].exp())
    above = len(places) - 1 - USUAL
    steps = torch.block_diag(torch.eye(USUAL), torch.zeros(1, 0), torch.ones(above, above).tril())
    found: Tensor = shares @ steps.double()
    return found


def _towards_zero(slopes: Tensor) -> Tensor:
    """(slopes, 2): shares of the first two SURENESS in a parabola through them and through nothing at zero."""
    first, second = SURENESS[:2]
    one = slopes * (slopes - second) / (first * (first - second))
    return torch.stack([one, slopes * (slopes - first) / (second * (second - first))], 1)


def _flattened(steep: Tensor) -> Tensor:
    """Share of what predictions at the usual slope are surer than even ones that is lost at small slopes beside what
    `_pieces` tells: under a slope of zero it is all of it, which nobody has to tell."""
    slopes = steep.exp()
    return torch.where(slopes < SURENESS[0], 1 - _towards_zero(slopes).sum(1), 0.0)


def shifts_of(sums: Tensor, noise: float, slope: float, records: int) -> tuple[float, ...]:
    """Of all classes, from sums (slopes, 2, classes) at SLOPES: one Newton step, held back by noise and sampling.

    q (1 - q) is a quarter at most: where noise alone says more, it would be taken for a sum that tells much of a shift.
    """
    first, last = (math.log(value) for value in SLOPES)
    part = min(max((math.log(slope) - first) / (last - first), -0.5), 1.5)
    off, steep = (1 - part) * sums[0] + part * sums[1]
    noise = noise * math.hypot(1 - part, part)
    steep = COUPLED * steep.clamp(0, records / 4)
    variance = noise**2 + steep
    found = steep * off / (steep.square() + variance / EXPECTED_SHIFT**2).clamp(min=1e-12)
    found = found.clamp(-1, 1)  # a Newton step from far away may overshoot
    return _centred(found.tolist())


def _centred(values: Sequence[float]) -> tuple[float, ...]:
    mean = sum(values) / len(values)
    return tuple(value - mean for value in values)
