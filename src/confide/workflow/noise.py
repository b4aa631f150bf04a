"""The noise of a regression target, learnt privately after the fit from one histogram.

Gradients of a noise parameter are clipped hardest where the residuals are large, which biases it low, and intervals
come out too narrow. A histogram has no such bias. Every record answers with the bin of its absolute residual, a vector
of norm 1, and the noise scale is the most probable one, given that every count has the noise of the release, its own
sampling noise, and that residuals are not quite normal (`residual_scale`). Where counts say little, a scale near the
rule's is expected, and none is larger than intervals within the declared range allow.

Edges are public: residuals of a target scaled to [-1, 1] and predictions nearby lie in [0, 2], in steps of
2^(1/2): finer ones would add the noise of more bins.

The histogram is a release of its own beside the fit's. It may cost SHARE of epsilon at most, the plan of the fit is
calibrated with it in mind (`spent`), and both are charged in one go: a budget that does not suffice for both refuses
both.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from confide import rules
from confide.data.schema import Task
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods._additive import EDGES, residual_scale
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
LARGEST = 1 / NormalDist().inv_cdf(0.95)
"""Noise scale at which a 90 % interval is as wide as the declared range, whose half is 1."""


def residual_bins(posterior: Posterior) -> StatisticQuery:
    """Of one record: one-hot, below the first edge, between two edges, or beyond the last."""
    edges = torch.tensor(EDGES, dtype=torch.float64)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        distance = (posterior.summary(x).centre.double() - y.reshape(-1).double()).abs()
        return torch.nn.functional.one_hot(torch.bucketize(distance, edges), len(EDGES) + 1).double()

    return StatisticQuery(recordwise(answer, posterior), len(EDGES) + 1)


def scale_of(counts: Tensor, noise: float, records: int) -> float:
    """The noise scale from counts with such noise, within what the declared range allows."""
    return min(residual_scale(counts, noise, records, rules.NOISE_SCALE), LARGEST)


def mechanism_of(request: Request, task: Task, method: Method) -> SampledGaussian | None:
    """The mechanism of the histogram, for SHARE of epsilon; None where the noise is given or the method learns it."""
    if task != "regression" or request.likelihood is not None or request.noise_scale is not None or method.learns_noise:
        return None
    return one_release(request, SHARE)


def closing_of(histogram: SampledGaussian, plan: Plan) -> Closing:
    """After the last step: the posterior under a Gaussian likelihood of the noise scale that one release shows."""

    def tell(posterior: Posterior, release: Release) -> Posterior:
        scale = scale_of(release.sum, release.noise_std, plan.records)
        facts = {**posterior.facts, "noise_scale": scale, "noise_scale_from": "private histogram of residuals"}
        if plan.target_epsilon is not None:
            facts["noise_scale_epsilon"] = SHARE * plan.target_epsilon
        return posterior.with_likelihood(Gaussian(scale), facts)

    return Closing(histogram, PURPOSE, residual_bins, tell)
