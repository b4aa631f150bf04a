"""The public side of an additive fit: its network, its clip, what its budget amounts to, and its likelihood."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods._additive import TARGET_BINS
from confide.methods.base import Problem
from confide.models.additive import AdditiveNetwork
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Probit

CLIP, CLIP_GROWTH, MOST_CLIP = 0.7, 0.15, 1.5
"""The clip at n mu = 1000, in units of a record's usual norm times the largest residual of a class, or CUT deviations
of a number. It grows with that power of n mu: noise counts less, and what the clip takes off counts more."""


def network_of(problem: Problem) -> AdditiveNetwork:
    assert isinstance(problem.module, AdditiveNetwork)  # `prepare` made it
    return problem.module


def clip_of(problem: Problem) -> float:
    clip = problem.plan.mechanism.clip
    return clip if math.isfinite(clip) else 1.0


def budget_of(problem: Problem) -> float:
    """n mu of the whole run, mu by the central limit theorem where batches are sampled; infinite without noise."""
    mechanism = problem.plan.mechanism
    if mechanism.noise_multiplier == 0:
        return math.inf
    return problem.records * mechanism.rate * math.sqrt(problem.plan.steps) / mechanism.noise_multiplier


def clip_share(problem: Problem) -> float:
    return min(CLIP * math.pow(budget_of(problem) / 1000, CLIP_GROWTH), MOST_CLIP)


def check_likelihood(likelihood: Likelihood) -> None:
    if not isinstance(likelihood, Bernoulli | Categorical | Gaussian | Probit):
        raise Refusal(
            f"likelihood={likelihood.name!r}: an additive model explains classes or a number; use categorical, "
            "bernoulli, probit or gaussian"
        )


def classes_of(likelihood: Likelihood) -> int | None:
    if isinstance(likelihood, Gaussian):
        return None
    return likelihood.classes if isinstance(likelihood, Categorical) else 2


def answers_of(problem: Problem) -> int:
    return classes_of(problem.likelihood) or TARGET_BINS


def curvature_weights(likelihood: Likelihood, shares: Tensor) -> Tensor:
    """Curvature of the loss in each output where nothing but the shares of the answers is known."""
    if isinstance(likelihood, Gaussian):
        return torch.ones(1, dtype=torch.float64)
    shares = shares.clamp(min=1e-6)
    if isinstance(likelihood, Categorical):
        return shares * (1 - shares)
    one = shares[1:] / shares.sum()
    if isinstance(likelihood, Probit):
        density = torch.exp(-torch.special.ndtri(one).square() / 2) / math.sqrt(2 * math.pi)
        return density.square() / (one * (1 - one))
    return one * (1 - one)
