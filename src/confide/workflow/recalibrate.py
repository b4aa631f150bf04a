"""Class probabilities set right after the fit, privately: a slope, one shift per class, a floor, a power, and a curve.

Clipping, shrinkage and noise make a fit too sure or too unsure of itself. With q the fitted probabilities,

    q' = (1 - floor) softmax(slope * (log q - levels) + levels + shifts) + floor / classes.

Levels are the log shares of the classes that a fit has measured, where it has (the fact `levels`): what columns add to
them is what may be too much or too little, and a slope alone does not make a rare class rarer. The floor is for records
whose columns say nothing of their class, such as labels that are now and then wrong: however far odds go, probabilities
do not. Of two classes, a curve of the log odds is added to the probability of the second where counts say more than
that. Of several, a power of the log odds makes the likeliest class less likely where they are small and likelier where
they are large, or the other way round: where some classes look alike and others do not, a fit is too sure among the
former and not sure enough of the latter, whatever the slope. One release about all records tells all of it.

What a record tells of two classes is in `odds`, of several in `sureness`, the curve in `curve`. Probabilities are those
that predictions will have, means over all draws with the slope applied to their mean where outputs are linear in what
was drawn, and to each of them where they are not.

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
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.calibrated import Calibrated, stretched
from confide.models.likelihoods import Bernoulli, Categorical, Likelihood
from confide.models.predictive import ClassPredictive
from confide.models.tabular import TabularNetwork
from confide.posteriors.additive import AdditiveGaussian
from confide.posteriors.base import Posterior
from confide.posteriors.draws import Draws
from confide.posteriors.recordwise import recordwise
from confide.running.closing import Closing
from confide.sources.queries import Release, StatisticQuery
from confide.workflow import curve, odds, sureness
from confide.workflow.calibrate import one_release
from confide.workflow.choice import says_how
from confide.workflow.request import Request

PURPOSE = "recalibration"
SHARE = 0.25
"""Part of epsilon that the release may cost; it composes with the fit, which loses about eight per cent of mu^2, half
as much of mu: at 1000 records and epsilon 1 slopes and shifts would drown in noise with less; docs/protocols.md."""
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
    """After the last step: the posterior under a likelihood that one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        classes = _classes(posterior.likelihood)
        found = release.sum.double() / mechanism.clip
        noise, levels = release.noise_std / mechanism.clip, _levels(posterior, classes)
        right = told(found, noise, plan.records, classes, levels)
        shifts = [round(value, 4) for value in right.shifts]
        facts = {**posterior.facts, "slope": right.slope, "shifts": shifts, "floor": right.floor, "power": right.power}
        facts["curve"] = max((abs(added) for _, added in right.curve), default=0.0)
        if plan.target_epsilon is not None:
            facts["recalibration_epsilon"] = SHARE * plan.target_epsilon
        one_logit = isinstance(posterior.likelihood, Bernoulli)
        kept = () if right.power == 1 else tuple(levels.tolist())
        likelihood = Calibrated(
            classes, right.slope, right.shifts, one_logit, right.floor, right.curve, right.power, kept
        )
        return _narrowed(posterior, right.slope).with_likelihood(likelihood, facts)

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
    tell, levels = odds.counted if classes == 2 else sureness.told_by, _levels(posterior, classes)
    law = _keeping_doubt if _linear(posterior) else _scaling_doubt

    def answer(x: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(-1, 1).long().clamp(0, classes - 1)
        parts = zip(x.split(ROWS), y.split(ROWS), strict=True)
        rows = [tell(partial(law, *_as_if_new(posterior, part, own, mu), levels), own, levels) for part, own in parts]
        return clip * torch.cat(rows) if rows else torch.zeros(0, size, dtype=torch.float64)

    size = odds.SIZE if classes == 2 else sureness.size(classes)
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
        return logs - _own_pull(posterior, mean) * residual, weights
    level = logs - logs.mean(2, keepdim=True)
    level = level - torch.einsum("s,snk->nk", weights, level)
    deviation = torch.einsum("s,snk->nk", weights, level.square()).mean(1, keepdim=True).sqrt()
    return logs - OWN / math.hypot(1 / mu, 1 / WIDE) * deviation * residual, weights


def _own_pull(posterior: Posterior, mean: Tensor) -> Tensor:
    """What a fit knows from its steps, less what other records have taken back of it (the fact `pulled_back`).

    A record moves its logits by (1 / n) x' K x per residual, with K = (1 - exp(-T h C)) / (h C) for the covariance C of
    features, the curvature h and the length T of the way. On average that is T / n times the mean of
    (1 - exp(-T h l)) / (T h l) over the eigenvalues l of C, weighted by themselves. Where they have the law of Gamma of
    shape a half and mean m it is 2 / (1 + root(1 + 2 T h m)); see docs/protocols.md.
    """
    probabilities = mean.softmax(1)
    curvature = (1 - probabilities.square().sum(1, keepdim=True)) / (probabilities.shape[1] - 1)
    back = float(posterior.facts.get("pulled_back", 0.0)) * curvature
    return float(posterior.facts["own_pull"]) * 2 / (1 + (1 + 2 * back).sqrt())


def _levels(posterior: Posterior, classes: int) -> Tensor:
    """Log shares of the classes as the fit has measured them; even ones where it has not."""
    found = posterior.facts.get("levels", [0.0] * classes)
    return torch.tensor(found, dtype=torch.float64)


def _scaling_doubt(logs: Tensor, weights: Tensor, levels: Tensor, slope: float, power: float = 1.0) -> Tensor:
    """A slope of every draw."""
    return torch.einsum("s,snk->nk", weights, stretched(slope * logs + (1 - slope) * levels, levels, power))


def _keeping_doubt(logs: Tensor, weights: Tensor, levels: Tensor, slope: float, power: float = 1.0) -> Tensor:
    """A slope of the draws' mean, about which they differ by as much as before."""
    mean = torch.einsum("s,snk->nk", weights, logs)
    logits = logs + (slope - 1) * mean + (1 - slope) * levels
    return torch.einsum("s,snk->nk", weights, stretched(logits, levels, power))


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


# -- what it means ----------------------------------------------------------------------------------------------------


class Recalibration(NamedTuple):
    """Of a `Calibrated` likelihood; shifts with what levels keep of a slope."""

    slope: float
    shifts: tuple[float, ...]
    floor: float
    curve: curve.Curve = ()
    power: float = 1.0


def told(found: Tensor, noise: float, records: int, classes: int, levels: Tensor | None = None) -> Recalibration:
    """From the noisy sum of what all records tell."""
    levels = torch.zeros(classes, dtype=torch.float64) if levels is None else levels
    if classes == 2:
        counts, level = odds.Counts.of(found, noise), float(levels[1] - levels[0])
        slope, shift, floor = odds.fitted(counts, records, level)
        bent = curve.fitted(counts, records, level, slope, shift, floor)
        shift = shift + (1 - slope) * level
        return Recalibration(slope, (-shift / 2, shift / 2), floor, bent)
    slope, shifts, floor, power = sureness.fitted(found, noise, records, levels)
    kept = ((1 - slope) * (levels - levels.mean())).tolist()
    shifts = tuple(shift + level for shift, level in zip(shifts, kept, strict=True))
    return Recalibration(slope, shifts, floor, power=power)
