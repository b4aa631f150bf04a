"""Class probabilities set right after the fit, privately: a slope and one shift per class.

Clipping and shrinkage make a fit too sure or too unsure of itself. With q the fitted probabilities, and l = log q
before slope and shifts, kept within REACH of its middle,

    q = softmax(slope * l + shifts),      score = sum over records of ((y - q) . l,  y - q)

is zero where probabilities are right on average. One release about all records shows the score and its curvature,
each with noise; slope and shifts take a Newton step that is shrunk by what the noise leaves open, so that a small
budget moves them little. Every record's answer is bounded by rule (`_SCALE`), the release shares the epsilon of the
fit, the plan of the fit is calibrated with it in mind (`spent`), and all of it is charged in one go.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
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
REACH = 3.0
"""Largest distance of a logarithm of a probability from the middle of the likeliest and the least likely class: beyond
exp(-6) a probability is rare enough for its exact size not to matter here."""
EXPECTED = 0.4
"""Standard deviation of the logarithm of the slope, and of a shift, that is expected beforehand."""
LARGEST_STEP = math.log(2)
"""Of the logarithm of the slope: a Newton step reaches no further than that."""
_SCALE = 1 / math.sqrt(1 + 2 + 0.25**2 + 0.5**2)
"""Of a record's row before it is clipped to 1. |(y - q) . l| <= 2 REACH, and is divided by that; |y - q|^2 <= 2; the
variance of l is at most REACH^2, and is divided by (2 REACH)^2; sum (q (1 - q))^2 <= 1/4."""


def mechanism_of(request: Request, task: Task, method: Method) -> SampledGaussian | None:
    """For methods that want it, unless a likelihood was named."""
    applies = task == "classification" and method.recalibrates and request.likelihood is None
    return one_release(request, SHARE) if applies else None


def closing_of(mechanism: SampledGaussian, plan: Plan) -> Closing:
    """After the last step: the posterior under a likelihood whose slope and shifts one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        classes = _classes(posterior.likelihood)
        step = _newton(release.sum.double() / _SCALE, release.noise_std / _SCALE)
        slope = math.exp(max(-LARGEST_STEP, min(LARGEST_STEP, float(step[0]))))
        shifts = tuple((step[1:] - step[1:].mean()).tolist())
        facts = {**posterior.facts, "slope": slope, "shifts": [round(value, 4) for value in shifts]}
        if plan.target_epsilon is not None:
            facts["recalibration_epsilon"] = SHARE * plan.target_epsilon
        one_logit = isinstance(posterior.likelihood, Bernoulli)
        return posterior.with_likelihood(Calibrated(classes, slope, shifts, one_logit), facts)

    return Closing(mechanism, PURPOSE, _score, tell)


def _classes(likelihood: Likelihood) -> int:
    if isinstance(likelihood, Bernoulli):
        return 2
    assert isinstance(likelihood, Categorical)  # the usual one of classes, where none was given
    return likelihood.classes


def _score(posterior: Posterior) -> StatisticQuery:
    """Of one record: score of the slope's logarithm and of the shifts, then the curvature of each."""
    classes = _classes(posterior.likelihood)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        q = posterior.summary(x).centre.double().clamp(1e-12, 1)
        log = q.log()
        log = log - (log.amax(1, keepdim=True) + log.amin(1, keepdim=True)) / 2
        log = log.clamp(-REACH, REACH)
        off = torch.nn.functional.one_hot(y.reshape(-1).long().clamp(0, classes - 1), classes).double() - q
        mean = (q * log).sum(1, keepdim=True)
        variance = (q * (log - mean).square()).sum(1, keepdim=True)
        rows = [(off * log).sum(1, keepdim=True) / (2 * REACH), off, variance / (2 * REACH) ** 2, q * (1 - q)]
        return torch.cat(rows, 1) * _SCALE

    return StatisticQuery(recordwise(answer, posterior), 2 * (1 + classes))


def _newton(sums: Tensor, noise: float) -> Tensor:
    """A step of the slope's logarithm and of the shifts from nothing, shrunk by what sampling and noise leave open."""
    size = len(sums) // 2
    unit = torch.ones(size, dtype=torch.float64)
    unit[0] = 2 * REACH
    score, curvature = sums[:size] * unit, sums[size:] * unit.square()
    # A curvature that noise made small would make a long step of nothing.
    curvature = torch.maximum(curvature, 2 * noise * unit.square()).clamp(min=1e-9)
    error = ((noise * unit).square() + curvature) / curvature.square()
    return score / curvature * EXPECTED**2 / (EXPECTED**2 + error)
