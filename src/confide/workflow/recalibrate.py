"""Class probabilities set right after the fit, privately: a slope, one shift per class, and a floor.

Clipping, shrinkage and noise make a fit too sure or too unsure of itself. With q the fitted probabilities,

    q' = (1 - floor) softmax(slope * (log q - levels) + levels + shifts) + floor / classes.

Levels are the log shares of the classes that a fit has measured, where it has (the fact `levels`): what columns add to
them is what may be too much or too little, and a slope alone does not make a rare class rarer. The floor is for records
whose columns say nothing of their class, such as labels that are now and then wrong: however far odds go, probabilities
do not. One release about all records tells all of it.

Two classes: a record names the bin of its log odds l and whether class 1 is its own, a vector of norm 1. In a bin the
counts c1 and c0, of records of the class and of others, are noisy, and c1 (1 - q') - c0 q' is zero on average where
slope, shift and floor are right, whatever the number of records in the bin.

Several: a record tells whether its likeliest class is its own, less how sure the prediction is of that under one slope,
and how sure it would be under others. Sums over all records have the noise of one count: read off bins of odds, the
same would be known three times worse. The same times how sure it is shows whether it takes a floor. Probabilities
are those that predictions will have, means over all draws with the slope applied to their mean where outputs are linear
in what was drawn, and to each of them where they are not. Shifts are read off the sums
of [y = k] - q_k, whose norm is at most the root of 2 however many classes there are, and of q_k (1 - q_k), by which
they grow with a shift, at two slopes, for which slope is right is not known when they are asked.

A fit is surer of the records that it has learnt from than of others, and what a record has moved its own odds by is
taken off before it tells anything. A method may know that from its steps (the fact `own_pull`) or by linear response
(`leverage`, per unit of a residual). Else a record moves its own logit by mu times the noise that the logit has, in
deviations.

A small budget moves all of them little from what is expected beforehand, and a fit that learnt noise alone is
flattened as far as the counts show it. The release shares the epsilon of the fit, whose plan is calibrated with it in
mind (`spent`), and all of it is charged in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.additive import smoothed
from confide.models.likelihoods import Bernoulli, Calibrated, Categorical, Likelihood
from confide.models.predictive import ClassPredictive
from confide.models.tabular import TabularNetwork
from confide.posteriors.additive import AdditiveGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.posteriors.recordwise import recordwise
from confide.running.closing import Closing
from confide.sources.queries import Release, StatisticQuery
from confide.workflow.calibrate import one_release
from confide.workflow.choice import says_how
from confide.workflow.request import Request

PURPOSE = "recalibration"
FAR = 5.0
"""Log odds from which on bins are wide, and few records are in them."""


def _middle(low: float, high: float) -> float:
    near, far = sorted((low, high), key=abs)
    return near + (far - near) / (3 if abs(near) >= FAR else 2)


SHARE = 0.15
"""Part of epsilon that the release may cost; it composes with the fit, which loses about two per cent of mu^2."""
EDGES = tuple(
    sign * edge
    for sign, edges in (
        (-1, (30.0, 16.0, 10.0, 6.5, 4.5, 3.75, 3.0, 2.25, 1.75, 1.25, 0.75, 0.25)),
        (1, (0.25, 0.75, 1.25, 1.75, 2.25, 3.0, 3.75, 4.5, 6.5, 10.0, 16.0, 30.0)),
    )
    for edge in edges
)
"""Of the bins of log odds, less those of the levels: half a unit apart where most records lie, for in between a sigmoid
is nearly a line. A fit that has learnt little has all records about its level, which is the middle of a bin: were it
anywhere in one, the difference would be taken for a shift. The far ones are empty unless a fit has gone astray, such as
one of hundreds of columns whose sum nobody could centre."""
MIDDLES = (-40.0, *(_middle(low, high) for low, high in pairwise(EDGES)), 40.0)
"""Of the bins, for which they stand; of the far ones odds seldom go much further than their nearer edge."""
STEEPER, EXPECTED, TAILS, LEAST_SLOPE, LARGEST_SLOPE = 0.1, 0.15, 3.0, 0.02, 6.0
"""Of the slope's logarithm that is expected beforehand: its middle, for what shrinkage and clipping take off a fit is
seldom too little; its scale, which is that of a shift as well; and what a slope may be. By the logarithm, for else
noise in a few counts would now and then wipe out all that a fit has learnt. Both have Student's law of so many degrees:
most fits are nearly right, and those that are not may be far off, as counts then show."""
EXPECTED_SHIFT = 0.3
"""Of a shift of several classes, the standard deviation."""
FLOORS, EXPECTED_FLOOR = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4), 0.02
"""Floors that are tried, and what is expected beforehand: exponential, so that there is none unless counts show it."""
LARGEST_SHIFT, POINTS, ZOOMS = 6.0, 61, 4
"""Of the search for slope and shift: the range of a shift, places along each of the two, and how often it is narrowed
to four standard deviations around the mean."""
SURENESS = (0.6, 1.2, 2.4, 4.8)
"""Slopes under which a record tells how sure its prediction is; in between it is about linear in their logarithms."""
USUAL = 1
"""Place of the slope among them that is expected beforehand."""
LEVEL_WEIGHT, FLOOR_WEIGHT, SHIFT_SHARE = 0.5, 0.5, 0.15
"""Of several classes: what the sureness itself, and what all that is told once more times it are multiplied by; and
what shifts have of the square of a record's norm. See docs/protocols.md."""
SLOPES = (0.75, 1.5)
"""At which shifts are asked; in between, and a little beyond, sums are about linear in the slope's logarithm."""
COUPLED = 1.5
"""By which q (1 - q) understates how a sum grows with shifts: 1 where a class has many rivals, 2 where it has one."""
SCATTERED = 0.6
"""Of the sampling noise that all predictions would have were they as sure as their mean: some are nearly certain."""
OWN, WIDE = 1.2, 0.7
"""What a record has moved its own logits by: OWN deviations of them times mu; and mu from which on the width of a
posterior is due to records rather than to noise. Settled on made-up tables, see docs/protocols.md."""
WHOLE = 0.5
"""Length of a residual from which on a record pulls with all its might, for it is clipped."""
ROWS = 4096
"""Records at once: 64 draws of twenty classes for them are 40 MB."""


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
        noise, levels = release.noise_std / mechanism.clip, _levels(posterior, classes)
        slope, shifts, floor = told(found, noise, plan.records, classes, levels)
        facts = {**posterior.facts, "slope": slope, "shifts": [round(value, 4) for value in shifts], "floor": floor}
        if plan.target_epsilon is not None:
            facts["recalibration_epsilon"] = SHARE * plan.target_epsilon
        one_logit = isinstance(posterior.likelihood, Bernoulli)
        return _narrowed(posterior, slope).with_likelihood(Calibrated(classes, slope, shifts, one_logit, floor), facts)

    return Closing(mechanism, PURPOSE, lambda posterior: odds_of(posterior, mechanism.clip, mu_of(plan)), tell)


def mu_of(plan: Plan) -> float:
    """Of the fit, by the central limit theorem: infinite without noise."""
    parts = [(mechanism.rate, mechanism.noise_multiplier, count) for mechanism, count in plan.blocks]
    if any(noise == 0 for _, noise, _ in parts):
        return math.inf
    return math.sqrt(sum(count * (rate / noise) ** 2 for rate, noise, count in parts))


def _classes(likelihood: Likelihood) -> int:
    if isinstance(likelihood, Bernoulli):
        return 2
    assert isinstance(likelihood, Categorical)  # the usual one of classes, where none was given
    return likelihood.classes


# -- what a record tells ----------------------------------------------------------------------------------------------


def odds_of(posterior: Posterior, clip: float, mu: float) -> StatisticQuery:
    """Of one record: the bin of its odds, among those of its own class or of the other; or what several classes tell.

    mu   of the fit, for what a record has moved its own odds by
    """
    classes = _classes(posterior.likelihood)
    tell, levels = _two if classes == 2 else _several, _levels(posterior, classes)

    law = _keeping_doubt if _linear(posterior) else _scaling_doubt

    def answer(x: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(-1, 1).long().clamp(0, classes - 1)
        parts = zip(x.split(ROWS), y.split(ROWS), strict=True)
        rows = [tell(partial(law, *_as_if_new(posterior, part, own, mu), levels), own, levels) for part, own in parts]
        return clip * torch.cat(rows) if rows else torch.zeros(0, size, dtype=torch.float64)

    size = 2 * len(MIDDLES) if classes == 2 else 2 * (len(SURENESS) + 1) + 2 * len(SLOPES) * classes
    return StatisticQuery(recordwise(answer, posterior), size)


def _as_if_new(posterior: Posterior, x: Tensor, y: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Log probabilities of every draw (draws, records, classes) less what the records moved them by, and weights."""
    predictive = posterior.predict(x)
    assert isinstance(predictive, ClassPredictive)
    weights, logs = predictive.weights.double(), predictive.draws.double().clamp(min=1e-30).log()
    mean = torch.einsum("s,snk->nk", weights, logs)
    residual = torch.zeros_like(mean).scatter(1, y, 1.0) - mean.softmax(1)
    if "leverage" in posterior.facts:
        return logs - float(posterior.facts["leverage"]) * residual, weights
    residual = residual / residual.norm(dim=1, keepdim=True).clamp(min=WHOLE)
    if "own_pull" in posterior.facts:
        return logs - float(posterior.facts["own_pull"]) * residual, weights
    level = logs - logs.mean(2, keepdim=True)
    level = level - torch.einsum("s,snk->nk", weights, level)
    deviation = torch.einsum("s,snk->nk", weights, level.square()).mean(1, keepdim=True).sqrt()
    return logs - OWN / math.hypot(1 / mu, 1 / WIDE) * deviation * residual, weights


def _levels(posterior: Posterior, classes: int) -> Tensor:
    """Log shares of the classes as the fit has measured them; even ones where it has not."""
    found = posterior.facts.get("levels", [0.0] * classes)
    return torch.tensor(found, dtype=torch.float64)


Sure = Callable[[float], Tensor]
"""Probabilities (records, classes) of the predictive under a slope."""


def _scaling_doubt(logs: Tensor, weights: Tensor, levels: Tensor, slope: float) -> Tensor:
    """A slope of every draw."""
    return torch.einsum("s,snk->nk", weights, (slope * logs + (1 - slope) * levels).softmax(2))


def _keeping_doubt(logs: Tensor, weights: Tensor, levels: Tensor, slope: float) -> Tensor:
    """A slope of the draws' mean, about which they differ by as much as before."""
    mean = torch.einsum("s,snk->nk", weights, logs)
    return torch.einsum("s,snk->nk", weights, (logs + (slope - 1) * mean + (1 - slope) * levels).softmax(2))


def _linear(posterior: Posterior) -> bool:
    """Whether draws of the weights about their mean are draws of the outputs about theirs."""
    if isinstance(posterior, AdditiveGaussian):
        return True
    return isinstance(posterior, Draws) and isinstance(posterior.module, TabularNetwork)


def _narrowed(posterior: Posterior, slope: float) -> Posterior:
    """With deviations that have their size again once outputs are multiplied by the slope.

    A slope says by how much a fit falls short of what its columns say. It does not say that less is known of that: were
    doubt to grow with it, the surest predictions, which hang on most columns, would be flattened most.
    """
    if isinstance(posterior, AdditiveGaussian):
        return replace(posterior, spread=posterior.spread / slope)
    if isinstance(posterior, Draws) and _linear(posterior):
        mean = posterior.mean()
        return replace(posterior, draws=mean + (posterior.draws - mean) / slope)
    return posterior


def _two(sure: Sure, y: Tensor, levels: Tensor) -> Tensor:
    q = sure(1.0).clamp(min=1e-30)
    odds = (q[:, 1:] / q[:, :1]).log() - (levels[1] - levels[0])
    place = torch.bucketize(odds, torch.tensor(EDGES, dtype=torch.float64))
    rows = torch.zeros(len(q), 2 * len(MIDDLES), dtype=torch.float64)
    return rows.scatter(1, place + (1 - y) * len(MIDDLES), 1.0)


def _several(sure: Sure, y: Tensor, levels: Tensor) -> Tensor:
    """In norm about 1 at most; a record beyond it is clipped."""
    probabilities = [sure(slope) for slope in SURENESS]
    likeliest = probabilities[USUAL].argmax(1, keepdim=True)
    lowest, usual, higher, highest = (value.gather(1, likeliest) for value in probabilities)
    right = (likeliest == y).double()
    rows = torch.cat([right - usual, lowest - usual, higher - usual, highest - higher, LEVEL_WEIGHT * (usual - 0.5)], 1)
    rows = torch.cat([rows, FLOOR_WEIGHT * (2 * usual - 1) * rows], 1)
    level_weight, sum_weight = _weights()
    return torch.cat([level_weight * rows, sum_weight * _sums(sure, y)], 1)


def _weights() -> tuple[float, float]:
    """What sureness and sums are multiplied by, for a norm of 1: sums at one slope have at most the root of 2."""
    level = (1 + LEVEL_WEIGHT**2 / 4) * (1 + FLOOR_WEIGHT**2)
    return math.sqrt((1 - SHIFT_SHARE) / level), math.sqrt(SHIFT_SHARE / (2 * len(SLOPES)))


def _sums(sure: Sure, y: Tensor) -> Tensor:
    """Of every slope [y = k] - q_k and q_k (1 - q_k), whose squares add up to 2 at most: to 1 - 2 q_y + |q|^2 and, no
    more than a quarter of 1 - |q|^2."""
    parts = []
    for slope in SLOPES:
        q = sure(slope)
        parts += [torch.zeros_like(q).scatter(1, y, 1.0) - q, q * (1 - q)]
    return torch.cat(parts, 1)


# -- what it means ----------------------------------------------------------------------------------------------------


def told(
    found: Tensor, noise: float, records: int, classes: int, levels: Tensor | None = None
) -> tuple[float, tuple[float, ...], float]:
    """Slope, shifts and floor from the noisy sum of what all records tell; shifts with what levels keep of a slope."""
    levels = torch.zeros(classes, dtype=torch.float64) if levels is None else levels
    if classes == 2:
        middles, level = torch.tensor(MIDDLES, dtype=torch.float64), float(levels[1] - levels[0])
        slope, shift, floor = fitted(found.reshape(2, -1), noise, records, middles, level)
        shift = shift + (1 - slope) * level
        return slope, (-shift / 2, shift / 2), floor
    level_weight, sum_weight = _weights()
    split = 2 * (len(SURENESS) + 1)
    slope, floor = sure_enough(found[:split].reshape(2, -1) / level_weight, noise / level_weight, records, classes)
    sums = found[split:].reshape(len(SLOPES), 2, classes) / sum_weight
    shifts = shifts_of(sums, noise / sum_weight, slope)
    kept = ((1 - slope) * (levels - levels.mean())).tolist()
    return slope, tuple(shift + level for shift, level in zip(shifts, kept, strict=True)), floor


def sure_enough(found: Tensor, noise: float, records: int, classes: int) -> tuple[float, float]:
    """The mean slope under its posterior and the most probable floor, from sums (2, len(SURENESS) + 1).

    With e(s) how much surer predictions are under s than under the usual slope, the likeliest classes of all records
    are right as often as stated where the first sum is e(s), and so are those that are surer where the second is.
    """
    steep = torch.linspace(math.log(0.3), math.log(LARGEST_SLOPE), 3 * POINTS, dtype=torch.float64)
    floors = torch.tensor(FLOORS, dtype=torch.float64)
    parts = _pieces(steep)
    spread = 1 + parts.square().sum(1)  # of the noise of what is right and of how much surer
    sure = (found[0, -1] / LEVEL_WEIGHT + records / 2).clamp(records / classes, records)
    chance = _expected((steep - STEEPER) / EXPECTED)[:, None].repeat(1, len(floors))
    for row, weight, total in ((found[0], 1.0, float(records)), (found[1], FLOOR_WEIGHT, float(2 * sure - records))):
        right, surer, level = row[0] / weight, parts @ (row[1:-1] / weight), row[-1] / weight / LEVEL_WEIGHT
        if weight == 1:
            surer = parts @ torch.cat([row[1:2].clamp(max=0), row[2:-1].clamp(min=0)])
            mean = ((sure + surer) / records).clamp(1 / classes, 0.999)
        square = 1.0 if weight == 1 else float((2 * level / records).clamp(0.05, 1))  # of the sureness, on average
        variance = (noise / weight) ** 2 * spread + SCATTERED * records * square * mean * (1 - mean)
        stated = level + total / 2 + surer
        off = right - surer[:, None] + floors * (stated[:, None] - total / classes)
        chance = chance - (off.square() / variance[:, None] + variance.log()[:, None]) / 2
    best = int((chance.logsumexp(0) - floors / EXPECTED_FLOOR).argmax())
    return float((chance[:, best].softmax(0) * steep).sum().exp()), FLOORS[best]


def _expected(off: Tensor) -> Tensor:
    """Log density of Student's law, up to a constant."""
    return -(TAILS + 1) / 2 * (1 + off.square() / TAILS).log()


def _pieces(steep: Tensor) -> Tensor:
    """By which the steps between SURENESS are multiplied for how much surer predictions are under each slope."""
    places = torch.tensor(SURENESS, dtype=torch.float64).log()
    below = (places[USUAL] - steep) / (places[USUAL] - places[USUAL - 1])
    above = (steep[:, None] - places[USUAL:-1]) / places[USUAL:].diff()
    above[:, :-1] = above[:, :-1].clamp(max=1)
    return torch.cat([below.clamp(min=0)[:, None], above.clamp(min=0)], 1)


def fitted(
    counts: Tensor, noise: float, records: int, middles: Tensor, level: float = 0.0
) -> tuple[float, float, float]:
    """Slope, shift and floor that cost least by what noisy counts (2, bins) leave possible.

    Under every floor slope and shift have their posterior means, and what is believed of a bin is the mean over floors;
    of all three those are taken under which these beliefs are the least surprising. The likeliest floor alone would not
    do: where noise hides the few records that a fit is very sure of, the many in the middle ask for a slope that is
    ruinous for the former unless a floor goes with it.

    middles   of the bins, in log odds beyond the level
    level     log odds that a slope leaves where they are
    """
    low = torch.tensor([math.log(LEAST_SLOPE), -LARGEST_SHIFT], dtype=torch.float64)
    high = torch.tensor([math.log(LARGEST_SLOPE), LARGEST_SHIFT], dtype=torch.float64)
    ends, least, best = (low, high), (low, high), (1.0, 0.0, 0.0)
    floors = torch.tensor(FLOORS, dtype=torch.float64)[:, None, None]
    rarer = 2 / (1 + math.exp(abs(level)))  # 1 for even classes: a floor raises the share of a rare one
    present = _present(counts, torch.sigmoid(middles + level), noise, records)
    for _ in range(1 + ZOOMS):
        steep = torch.linspace(float(ends[0][0]), float(ends[1][0]), POINTS, dtype=torch.float64)
        shift = torch.linspace(float(ends[0][1]), float(ends[1][1]), POINTS, dtype=torch.float64)
        straight = torch.sigmoid(steep.exp()[:, None, None] * middles + level + shift[:, None])
        q = ((1 - floors[..., None]) * straight + floors[..., None] / 2).clamp(1e-12, 1 - 1e-12)
        chance = _evidence(counts, noise, present, q) - floors / (EXPECTED_FLOOR * rarer)
        chance = chance + _expected((steep[:, None] - STEEPER) / EXPECTED) + _expected(shift / EXPECTED)
        share = chance.flatten().softmax(0).view(chance.shape)
        under = share / share.sum((1, 2), keepdim=True).clamp(min=1e-300)  # every floor by itself
        slopes, shifts = ((under.sum(axis) * value).sum(1)[:, None] for axis, value in ((2, steep), (1, shift)))
        each = (1 - floors[:, 0]) * torch.sigmoid(slopes.exp() * middles + level + shifts) + floors[:, 0] / 2
        believed = share.sum((1, 2)) @ each
        cost = -(q.log() @ (present * believed) + (1 - q).log() @ (present * (1 - believed)))
        at = torch.unravel_index(cost.argmin(), cost.shape)
        best = float(steep[at[1]].exp()), float(shift[at[2]]), FLOORS[int(at[0])]
        present = _present(counts, q[at], noise, records)
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
    found = steep * off / (steep.square() + variance / EXPECTED_SHIFT**2).clamp(min=1e-12)
    found = found.clamp(-1, 1)  # a Newton step from far away may overshoot
    return _centred(found.tolist())


def _centred(values: Sequence[float]) -> tuple[float, ...]:
    mean = sum(values) / len(values)
    return tuple(value - mean for value in values)
