"""Class probabilities set right after the fit, privately: a slope and one shift per class.

Clipping, shrinkage and noise make a fit too sure or too unsure of itself. With q the fitted probabilities,

    q' = softmax(slope * log q + shifts).

One release about all records shows how often each class was the answer where the fit had given it about such odds: for
every class a record names the bin of log(q / (1 - q)) and whether the class is its own, a vector of norm 1. Of several
classes the likeliest is told once more, whichever it is, and has the most of that norm: the slope needs no more than
this, and would drown in the noise of many classes. In a bin of odds l the counts c1 and c0, of records of the class and
of others, are noisy, and

    c1 (1 - q') - c0 q',      q' = sigmoid(e + slope * (l - e) + shift),      e = -log(classes - 1),

with e the odds of a class among even ones, which a slope leaves where they are, is zero on average where slope and
shift are right, whatever the number of records in the bin. Both are the most probable ones, given noise, sampling and
what is expected beforehand: a small budget moves them little, and a fit that learnt noise alone is flattened as far as
the counts show it. The release shares the epsilon of the fit, whose plan is calibrated with it in mind (`spent`), and
all of it is charged in one go.
"""

from __future__ import annotations

import math
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
from confide.workflow.request import Request

PURPOSE = "recalibration"
SHARE = 0.15
"""Part of epsilon that the release may cost; it composes with the fit, which loses about two per cent of mu^2."""
EDGES = (-5.0, -4.0, -3.25, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.25, 4.0, 5.0)
"""Of the bins of log odds: half a unit apart where most records lie, for in between a sigmoid is nearly a line."""
MIDDLES = (-6.0, *((low + high) / 2 for low, high in pairwise(EDGES)), 6.0)
"""Of the bins, for which they stand; beyond the last edges odds seldom go further than one more unit."""
EXPECTED, LEAST_SLOPE, LARGEST_SLOPE = 0.5, 0.02, 2.0
"""Standard deviation of the slope's logarithm and of a shift that is expected beforehand; and what a slope may be. By
the logarithm, for else noise in a few counts would now and then wipe out all that a fit has learnt. Where a larger one
would fit, odds are a step rather than a line, and large ones would become far too sure (xor: log loss .88 with 4)."""
ROUNDS, LOOKS = 60, 5
"""Of the search for the most probable slope and shifts, which a dozen usually end; and in how many of them, every third
from the first on, it is looked at how many records each bin holds."""
LIKELIEST = 0.75
"""Of the square of a record's norm belongs to its likeliest class, where there are several. See docs/protocols.md."""


def mechanism_of(request: Request, task: Task, method: Method) -> SampledGaussian | None:
    """For methods that want it, unless a likelihood was named."""
    applies = task == "classification" and method.recalibrates and request.likelihood is None
    return one_release(request, SHARE) if applies else None


def closing_of(mechanism: SampledGaussian, plan: Plan) -> Closing:
    """After the last step: the posterior under a likelihood whose slope and shifts one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        classes = _classes(posterior.likelihood)
        named = _named(classes)
        weights = _weights(classes)[:, None, None] * mechanism.clip
        counts = release.sum.double().reshape(len(weights), 2, len(MIDDLES)) / weights
        noise = release.noise_std / weights[:, 0]
        slope, found = fitted(counts, noise, plan.records, named, -math.log(max(1, classes - 1)))
        shifts = tuple((found - found.mean()).tolist()) if named > 1 else (-float(found) / 2, float(found) / 2)
        facts = {**posterior.facts, "slope": slope, "shifts": [round(value, 4) for value in shifts]}
        if plan.target_epsilon is not None:
            facts["recalibration_epsilon"] = SHARE * plan.target_epsilon
        one_logit = isinstance(posterior.likelihood, Bernoulli)
        return posterior.with_likelihood(Calibrated(classes, slope, shifts, one_logit), facts)

    return Closing(mechanism, PURPOSE, lambda posterior: odds_of(posterior, mechanism.clip), tell)


def _classes(likelihood: Likelihood) -> int:
    if isinstance(likelihood, Bernoulli):
        return 2
    assert isinstance(likelihood, Categorical)  # the usual one of classes, where none was given
    return likelihood.classes


def _named(classes: int) -> int:
    """Classes whose odds a record tells: of two the second says it all."""
    return 1 if classes == 2 else classes


def _weights(classes: int) -> Tensor:
    """What every row of counts adds to a record's norm: classes, and after several of them the likeliest; 1 in all."""
    named = _named(classes)
    if named == 1:
        return torch.ones(1, dtype=torch.float64)
    rows = torch.full((named,), math.sqrt((1 - LIKELIEST) / named), dtype=torch.float64)
    return torch.cat([rows, torch.tensor([math.sqrt(LIKELIEST)], dtype=torch.float64)])


def odds_of(posterior: Posterior, clip: float) -> StatisticQuery:
    """Of one record: for every class that is told, the bin of its odds, among those of its own class or of others."""
    classes = _classes(posterior.likelihood)
    named, edges, weights = _named(classes), torch.tensor(EDGES, dtype=torch.float64), clip * _weights(classes)
    size = len(weights) * 2 * len(MIDDLES)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        q = posterior.summary(x).centre.double().clamp(1e-9, 1 - 1e-9)
        y = y.reshape(-1, 1).long().clamp(0, classes - 1)
        told = torch.arange(classes - named, classes).expand(len(x), -1)
        if named > 1:
            told = torch.cat([told, q.argmax(1, keepdim=True)], 1)
        odds = torch.logit(q.gather(1, told)).contiguous()
        row = 2 * torch.arange(len(weights)) + (told != y).long()
        place = torch.bucketize(odds, edges) + len(MIDDLES) * row
        return torch.zeros(len(x), size, dtype=torch.float64).scatter(1, place, weights.expand(len(x), -1))

    return StatisticQuery(recordwise(answer, posterior), size)


def fitted(counts: Tensor, noise: Tensor, records: int, named: int, even_odds: float = 0.0) -> tuple[float, Tensor]:
    """The most probable slope, and shifts of the named classes, given noisy counts (rows, own or other, bins).

    noise   of every row of counts (rows, 1); rows beyond the named classes have no shift of their own
    """
    own, other = counts[:, 0], counts[:, 1]
    middles = torch.tensor(MIDDLES, dtype=torch.float64) - even_odds
    steepness, shifts = torch.zeros((), dtype=torch.float64), torch.zeros(named, dtype=torch.float64)
    present = torch.zeros_like(own)
    size = 1 + named
    prior = torch.eye(size, dtype=torch.float64) / EXPECTED**2
    for place in range(ROUNDS):
        slope = steepness.exp()
        q = torch.sigmoid(
            even_odds + slope * middles + torch.cat([shifts, shifts.new_zeros(len(own) - named)])[:, None]
        )
        if place % 3 == 0 and place < 3 * LOOKS:
            present = _present(own, other, q, noise, records)
        off = own * (1 - q) - other * q
        variance = noise**2 * ((1 - q).square() + q.square()) + present * q * (1 - q) + 1e-9
        steep = present * q * (1 - q)  # of the expected difference: what noise added to the counts counts for nothing
        design = torch.zeros(*q.shape, size, dtype=torch.float64)
        design[..., 0] = steep * middles * slope
        design[range(named), :, range(1, size)] = steep[:named]
        weighed = design / variance[..., None]
        information = torch.einsum("kbi,kbj->ij", weighed, design) + prior
        gradient = torch.einsum("kbi,kb->i", weighed, off)
        gradient = gradient - prior @ torch.cat([steepness[None], shifts])
        step = torch.linalg.solve(information, gradient)
        step = step / max(1.0, float(step.abs().max()) / 0.5)  # a Newton step from far away may overshoot
        steepness = (steepness + step[0]).clamp(math.log(LEAST_SLOPE), math.log(LARGEST_SLOPE))
        shifts = shifts + step[1:]
        if float(step.abs().max()) < 1e-6 and place >= 3 * LOOKS:
            break
    return float(steepness.exp()), shifts


def _present(own: Tensor, other: Tensor, q: Tensor, noise: Tensor, records: int) -> Tensor:
    """How many records a bin holds, without the noise that would speak for itself in an empty one.

    Of the sums whose mean is that number, the one whose noise is not that of the difference which slope and shifts are
    read off: a bin would otherwise weigh more where noise has made its class frequent.
    """
    squares = q.square() + (1 - q).square()
    found = (q * own + (1 - q) * other) / squares
    even = torch.full((len(MIDDLES),), 1 / len(MIDDLES), dtype=torch.float64)
    rows = (
        smoothed(row[None], math.sqrt(2) * float(error), records, even) for row, error in zip(found, noise, strict=True)
    )
    return records * torch.cat(list(rows))
