"""The noise of a regression target, learnt privately after the fit from one histogram.

Gradients of a noise parameter are clipped hardest where the residuals are large, which biases it low, and intervals
come out too narrow. A histogram has no such bias. Every record answers with the bin of its absolute residual, a vector
of norm 1, so that one full-batch Gaussian release shows how many residuals lie beyond each edge; the noise scale is
the one for which the stated share of them does:

    P(|residual| > q) = 1 - LEVEL   as released,        noise_scale = q / z    with P(|N(0, 1)| > z) = 1 - LEVEL.

Edges are public: residuals of a target scaled to [-1, 1] and predictions nearby lie in [0, 2], in steps of
2^(1/2): finer ones would add the noise of more bins to each tail.

The histogram is a release of its own beside the fit's. It may cost SHARE of epsilon at most, the plan of the fit is
calibrated with it in mind (`spent`), and both are charged in one go: a budget that does not suffice for both refuses
both.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method
from confide.models.likelihoods import Gaussian
from confide.posteriors.base import Posterior
from confide.posteriors.recordwise import recordwise
from confide.running.closing import Closing
from confide.sources.queries import Release, StatisticQuery
from confide.workflow.calibrate import one_release
from confide.workflow.request import Request

PURPOSE = "noise of the target"
SHARE = 0.2
"""Part of epsilon that the histogram may cost; it composes with the fit, so that the fit loses far less."""
LEVEL = 0.9
"""Intervals are reported for this share, so they are right where they are read; further out lie too few records."""
EDGES = tuple(2.0 * 2 ** (-step / 2) for step in range(20, -1, -1))
"""From 0.002 to 2: the finest scale is a thousandth of the target's range."""


def residual_bins(posterior: Posterior) -> StatisticQuery:
    """Of one record: one-hot, below the first edge, between two edges, or beyond the last."""
    edges = torch.tensor(EDGES, dtype=torch.float64)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        distance = (posterior.summary(x).centre.double() - y.reshape(-1).double()).abs()
        return torch.nn.functional.one_hot(torch.bucketize(distance, edges), len(EDGES) + 1).double()

    return StatisticQuery(recordwise(answer, posterior), len(EDGES) + 1)


def scale_of(counts: Tensor, records: int) -> float:
    """The noise scale from noisy counts: the edge beyond which a share 1 - LEVEL of the records lies, over z."""
    wanted = (1 - LEVEL) * records
    beyond = counts.flip(0).cumsum(0).flip(0)[1:].tolist()  # records beyond each edge
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    for place in range(len(EDGES) - 1, -1, -1):
        if beyond[place] >= wanted:
            above = beyond[place + 1] if place + 1 < len(EDGES) else 0.0
            share = (beyond[place] - wanted) / max(beyond[place] - above, 1.0)
            ratio = EDGES[min(place + 1, len(EDGES) - 1)] / EDGES[place]
            return float(EDGES[place] * ratio ** min(1.0, share) / z)
    return EDGES[0] / z


def mechanism_of(request: Request, task: Task, method: Method) -> SampledGaussian | None:
    """The mechanism of the histogram, for SHARE of epsilon; None where the noise is given or the method learns it."""
    if task != "regression" or request.likelihood is not None or request.noise_scale is not None or method.learns_noise:
        return None
    return one_release(request, SHARE)


def closing_of(histogram: SampledGaussian, plan: Plan) -> Closing:
    """After the last step: the posterior under a Gaussian likelihood of the noise scale that one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        scale = scale_of(release.sum.clone(), plan.records)
        facts = {**posterior.facts, "noise_scale": scale, "noise_scale_from": "private histogram of residuals"}
        if plan.target_epsilon is not None:
            facts["noise_scale_epsilon"] = SHARE * plan.target_epsilon
        return posterior.with_likelihood(Gaussian(scale), facts)

    return Closing(histogram, PURPOSE, residual_bins, tell)
