"""Class probabilities set right after the fit, privately: a slope, one shift per class, and a floor.

Clipping, shrinkage and noise make a fit too sure or too unsure of itself. With q the fitted probabilities,

    q' = (1 - floor) softmax(slope * log q + shifts) + floor / classes.

The floor is for records whose columns say nothing of their class, such as labels that are now and then wrong: however
far odds go, probabilities do not. One release about all records tells all of it.

Two classes: a record names the bin of its log odds l and whether class 1 is its own, a vector of norm 1. In a bin the
counts c1 and c0, of records of the class and of others, are noisy, and c1 (1 - q') - c0 q' is zero on average where
slope, shift and floor are right, whatever the number of records in the bin.

Several: softmax(slope * log q) multiplies the log odds of any two classes by the slope, and those of one class against
all others by a number that depends on how these share the rest. So a record whose class is one of its two likeliest
names the bin of their log odds, and which it is; others name none. Shifts are read off the sums of [y = k] - q_k, whose
norm is at most the root of 2 however many classes there are, and of q_k (1 - q_k), by which they grow with a shift, at
two slopes, for which slope is right is not known when they are asked.

A small budget moves all of them little from what is expected beforehand, and a fit that learnt noise alone is
flattened as far as the counts show it. The release shares the epsilon of the fit, whose plan is calibrated with it in
mind (`spent`), and all of it is charged in one go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.additive import smoothed
from confide.models.likelihoods import Bernoulli, Calibrated, Categorical, Likelihood
from confide.posteriors.base import Posterior
from confide.posteriors.recordwise import recordwise
from confide.running.closing import Closing
from confide.sources.queries import Release, StatisticQuery
from confide.workflow.calibrate import one_release
from confide.workflow.choice import says_how
from confide.workflow.request import Request

PURPOSE = "recalibration"
SHARE = 0.15
"""Part of epsilon that the release may cost; it composes with the fit, which loses about two per cent of mu^2."""
EDGES = (-5.0, -4.0, -3.25, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.25, 4.0, 5.0)
"""Of the bins of log odds: half a unit apart where most records lie, for in between a sigmoid is nearly a line."""
MIDDLES = (-6.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 6.0)
"""Of the bins, for which they stand; beyond the last edges odds seldom go further than one more unit."""
STEEPER, EXPECTED, LEAST_SLOPE, LARGEST_SLOPE = 0.2, 0.5, 0.02, 6.0
"""Mean of the slope's logarithm that is expected beforehand, for what shrinkage and clipping take off a fit is seldom
too little; its standard deviation and that of a shift; and what a slope may be. By the logarithm, for else noise in a
few counts would now and then wipe out all that a fit has learnt."""
FLOORS, EXPECTED_FLOOR = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4), 0.02
"""Floors that are tried, and what is expected beforehand: exponential, so that there is none unless counts show it."""
LARGEST_SHIFT, POINTS, ZOOMS = 2.5, 41, 3
"""Of the search for slope and shift: the range of a shift, places along each of the two, and how often it is narrowed
to four standard deviations around the mean."""
LIKELIEST = 0.75
"""Of the square of a record's norm belongs to the slope, where there are several classes. See docs/protocols.md."""
SLOPES = (0.75, 1.5)
"""At which shifts are asked; in between, and a little beyond, sums are about linear in the slope's logarithm."""
COUPLED = 1.5
"""By which q (1 - q) understates how a sum grows with shifts: 1 where a class has many rivals, 2 where it has one."""


def mechanism_of(request: Request, task: Task, method: Method) -> SampledGaussian | None:
    """For methods that want it, and whichever "auto" takes where nothing else is said; not for a named likelihood."""
    wanted = method.recalibrates or (request.method == "auto" and not says_how(request))
    applies = task == "classification" and wanted and request.likelihood is None
    return one_release(request, SHARE) if applies else None


def closing_of(mechanism: SampledGaussian, plan: Plan) -> Closing:
    """After the last step: the posterior under a likelihood whose slope, shifts and floor one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        classes = _classes(posterior.likelihood)
        found = release.sum.double() / mechanism.clip
        slope, shifts, floor = told(found, release.noise_std / mechanism.clip, plan.records, classes)
        facts = {**posterior.facts, "slope": slope, "shifts": [round(value, 4) for value in shifts], "floor": floor}
        if plan.target_epsilon is not None:
            facts["recalibration_epsilon"] = SHARE * plan.target_epsilon
        one_logit = isinstance(posterior.likelihood, Bernoulli)
        return posterior.with_likelihood(Calibrated(classes, slope, shifts, one_logit, floor), facts)

    return Closing(mechanism, PURPOSE, lambda posterior: odds_of(posterior, mechanism.clip), tell)


def _classes(likelihood: Likelihood) -> int:
    if isinstance(likelihood, Bernoulli):
        return 2
    assert isinstance(likelihood, Categorical)  # the usual one of classes, where none was given
    return likelihood.classes


def _middles(classes: int) -> Tensor:
    """Of the bins: odds of one class of two lie on both sides, those of the likeliest against the next on one."""
    found = torch.tensor(MIDDLES, dtype=torch.float64)
    return found if classes == 2 else found[found > 0]


def _weights(classes: int) -> tuple[float, float]:
    """What bins and sums are multiplied by, for a norm of 1 in all: sums at one slope have at most the root of 2."""
    if classes == 2:
        return 1.0, 0.0
    return math.sqrt(LIKELIEST), math.sqrt((1 - LIKELIEST) / (2 * len(SLOPES)))


# -- what a record tells ----------------------------------------------------------------------------------------------


def odds_of(posterior: Posterior, clip: float) -> StatisticQuery:
    """Of one record: the bin of its odds, among those of its own class or of the other, and sums of several classes."""
    classes = _classes(posterior.likelihood)
    edges, middles = torch.tensor(EDGES, dtype=torch.float64), _middles(classes)
    if classes > 2:
        edges = edges[edges > 0]
    bin_weight, sum_weight = (clip * weight for weight in _weights(classes))

    def answer(x: Tensor, y: Tensor) -> Tensor:
        q = posterior.summary(x).centre.double().clamp(1e-9, 1 - 1e-9)
        y = y.reshape(-1, 1).long().clamp(0, classes - 1)
        if classes == 2:
            pair = torch.tensor([1, 0]).expand(len(x), -1)
        else:
            pair = q.topk(2, 1).indices
        odds = q.gather(1, pair).log()
        place = torch.bucketize((odds[:, :1] - odds[:, 1:]).contiguous(), edges)
        named = (pair == y).double() * bin_weight  # of the first or of the second; none where it is neither
        rows = torch.zeros(len(x), 2 * len(middles), dtype=torch.float64)
        rows = rows.scatter(1, torch.cat([place, place + len(middles)], 1), named)
        return rows if classes == 2 else torch.cat([rows, sum_weight * _sums(q, y)], 1)

    size = 2 * len(middles) + (0 if classes == 2 else 2 * len(SLOPES) * classes)
    return StatisticQuery(recordwise(answer, posterior), size)


def _sums(q: Tensor, y: Tensor) -> Tensor:
    """Of every slope [y = k] - q_k and q_k (1 - q_k), whose squares add up to 2 at most: to 1 - 2 q_y + |q|^2 and, no
    more than a quarter of 1 - |q|^2."""
    own = torch.zeros_like(q).scatter(1, y, 1.0)
    parts = []
    for slope in SLOPES:
        sharper = (slope * q.log()).softmax(1)
        parts += [own - sharper, sharper * (1 - sharper)]
    return torch.cat(parts, 1)


# -- what it means ----------------------------------------------------------------------------------------------------


def told(found: Tensor, noise: float, records: int, classes: int) -> tuple[float, tuple[float, ...], float]:
    """Slope, shifts and floor from the noisy sum of what all records tell."""
    middles, (bin_weight, sum_weight) = _middles(classes), _weights(classes)
    counts = found[: 2 * len(middles)].reshape(2, -1) / bin_weight
    slope, shift, floor = fitted(counts, noise / bin_weight, records, middles, shifted=classes == 2)
    if classes == 2:
        return slope, (-shift / 2, shift / 2), floor
    sums = found[2 * len(middles) :].reshape(len(SLOPES), 2, classes) / sum_weight
    return slope, shifts_of(sums, noise / sum_weight, slope), floor


def fitted(counts: Tensor, noise: float, records: int, middles: Tensor, *, shifted: bool) -> tuple[float, float, float]:
    """The mean slope and shift under their posterior, and the most probable floor, given noisy counts (2, bins).

    shifted   whether a shift is looked for; else it is 0
    """
    low = torch.tensor([math.log(LEAST_SLOPE), -LARGEST_SHIFT], dtype=torch.float64)
    high = torch.tensor([math.log(LARGEST_SLOPE), LARGEST_SHIFT], dtype=torch.float64)
    if not shifted:
        low[1] = high[1] = 0.0
    ends, least, floor = (low, high), (low, high), 0.0
    present = _present(counts, torch.sigmoid(middles), noise, records)
    mean = torch.zeros(2, dtype=torch.float64)
    for _ in range(1 + ZOOMS):
        steep = torch.linspace(float(ends[0][0]), float(ends[1][0]), POINTS, dtype=torch.float64)
        shift = torch.linspace(float(ends[0][1]), float(ends[1][1]), POINTS if shifted else 1, dtype=torch.float64)
        straight = torch.sigmoid(steep.exp()[:, None, None] * middles + shift[:, None])
        floors = torch.tensor(FLOORS, dtype=torch.float64)[:, None, None, None]
        chance = _evidence(counts, noise, present, (1 - floors) * straight + floors / 2)
        chance = chance - ((steep[:, None] - STEEPER) / EXPECTED).square() / 2 - (shift / EXPECTED).square() / 2
        best = int(
            (chance.flatten(1).logsumexp(1) - torch.tensor(FLOORS, dtype=torch.float64) / EXPECTED_FLOOR).argmax()
        )
        floor, share = FLOORS[best], chance[best].flatten().softmax(0).view(chance.shape[1:])
        sides = ((share.sum(1), steep), (share.sum(0), shift))
        mean = torch.stack([(weight * value).sum() for weight, value in sides])
        spread = torch.stack(
            [(weight * (value - at).square()).sum().sqrt() for (weight, value), at in zip(sides, mean, strict=True)]
        )
        reach = torch.maximum(4 * spread, 2 * (ends[1] - ends[0]) / (POINTS - 1))
        ends = (torch.maximum(mean - reach, least[0]), torch.minimum(mean + reach, least[1]))
        q = (1 - floor) * torch.sigmoid(mean[0].exp() * middles + mean[1]) + floor / 2
        present = _present(counts, q, noise, records)
    return float(mean[0].exp()), float(mean[1]), floor


def _evidence(counts: Tensor, noise: float, present: Tensor, q: Tensor) -> Tensor:
    """Log likelihood of counts under probabilities (..., bins), whatever the number of records in a bin."""
    own, other = counts
    squares = q.square() + (1 - q).square()
    variance = noise**2 + present * q * (1 - q) / squares + 1e-9
    off = (own * (1 - q) - other * q).square() / squares
    chance: Tensor = -((off / variance + variance.log()) / 2).sum(-1)
    return chance


def _present(counts: Tensor, q: Tensor, noise: float, records: int) -> Tensor:
    """How many records a bin holds, without the noise that would speak for itself in an empty one.

    Of the sums whose mean is that number, the one whose noise is not that of the difference which slope and shifts are
    read off: a bin would otherwise weigh more where noise has made its class frequent.
    """
    own, other = counts
    found = (q * own + (1 - q) * other) / (q.square() + (1 - q).square())
    even = torch.full((len(q),), 1 / len(q), dtype=torch.float64)
    return records * smoothed(found[None], math.sqrt(2) * noise, records, even)[0]


def shifts_of(sums: Tensor, noise: float, slope: float) -> tuple[float, ...]:
    """Of all classes, from sums (slopes, 2, classes) at SLOPES: one Newton step, held back by noise and sampling."""
    first, last = (math.log(value) for value in SLOPES)
    part = min(max((math.log(slope) - first) / (last - first), -0.5), 1.5)
    off, steep = (1 - part) * sums[0] + part * sums[1]
    noise = noise * math.hypot(1 - part, part)
    steep = COUPLED * steep.clamp(min=0)
    variance = noise**2 + steep
    found = steep * off / (steep.square() + variance / EXPECTED**2).clamp(min=1e-12)
    found = found.clamp(-1, 1)  # a Newton step from far away may overshoot
    return _centred(found.tolist())


def _centred(values: Sequence[float]) -> tuple[float, ...]:
    mean = sum(values) / len(values)
    return tuple(value - mean for value in values)
