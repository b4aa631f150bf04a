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

CLIP, CLIP_GROWTH, LEAST_CLIP, MOST_CLIP = 0.7, 0.15, 0.65, 1.5
"""The clip at n mu = 1000, in units of a record's usual norm times the largest residual of a class, or CUT deviations
of a number. It grows with that power of n mu: noise counts less, and what the clip takes off counts more. A residual of
a half, with which two classes start, must pass whole for most records, or gradients would not follow the weights."""

NEAR = 0.7
"""Logits within which a sigmoid's slope is near that of its middle: within a tenth."""
CUT = 1.0
"""Deviations of a number at which its residual is cut, times the share of the clip."""


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
    return min(max(CLIP * math.pow(budget_of(problem) / 1000, CLIP_GROWTH), LEAST_CLIP), MOST_CLIP)


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
        # Along directions in which outputs add up to zero, the only ones that count: exact for even shares.
        return shares * (1 - shares) * likelihood.classes / max(1, likelihood.classes - 1)
    one = shares[1:] / shares.sum()
    if isinstance(likelihood, Probit):
        density = torch.exp(-torch.special.ndtri(one).square() / 2) / math.sqrt(2 * math.pi)
        return density.square() / (one * (1 - one))
    return one * (1 - one)


def within(likelihood: Likelihood, gradient: Tensor) -> tuple[Tensor, float]:
    """A noisy gradient (outputs, features) without what can only be noise, and the part of its deviation that is left.

    The softmax does not see what all outputs have in common: a record's gradients add up to zero over the outputs.
    """
    if not isinstance(likelihood, Categorical) or likelihood.classes < 2:
        return gradient, 1.0
    return gradient - gradient.mean(0), math.sqrt(1 - 1 / likelihood.classes)


def wander(variances: Tensor, error: Tensor, unit: float) -> float:
    """How much harder than the data the prior pulls while steps are taken, where noise would carry outputs far off.

    Far off a sigmoid is flat and residuals are cut, and nothing is as the law of the noise has it. The pull is a part
    of that law.

    error   of every weight (outputs, features), as noise alone would have it after all steps, in units of its prior
    unit    of the prior, in logits or in deviations of a number around the effects
    """
    carried = math.sqrt(float((variances * error.nan_to_num(posinf=1.0).clamp(max=1.0).square()).sum(1).max()))
    return max(0.0, unit * carried / NEAR - 1)


def passed(problem: Problem) -> float:
    """Share of the residuals of a number that the clip leaves whole, if they are normal: what is cut does not follow
    the weights. Those of classes pass by the choice of the clip."""
    if not isinstance(problem.likelihood, Gaussian):
        return 1.0
    return math.erf(clip_share(problem) * CUT / math.sqrt(2))


def flatness(likelihood: Likelihood, variances: Tensor, weights: Tensor) -> float:
    """Part of the assumed curvature that is left where steps were taken, since effects spread logits out.

    Of normal logits, by the probit's approximation of the sigmoid.
    """
    if isinstance(likelihood, Gaussian):
        return 1.0
    spread = (variances * weights.square())[:, 1:].sum(1)
    # A logit is the difference of two outputs, and all outputs add up to zero.
    both = 2 * len(spread) / max(1, len(spread) - 1) if isinstance(likelihood, Categorical) else 1.0
    return float((1 + math.pi / 8 * both * spread.mean()).rsqrt())


def own_noise(noise: float, rate: float, divisor: Tensor) -> Tensor:
    """Mean and standard deviation of what a step and the noise that it was taken by have in common."""
    square = rate * noise**2
    return torch.tensor([square * float((1 / divisor).sum()), square * math.sqrt(2 * float(divisor.pow(-2).sum()))])
