"""The public side of an additive fit: its network, its clip, what its budget amounts to, and its likelihood."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods._additive_levels import levels_of, mean_curvature, passing
from confide.methods._additive_steps import StepMetric
from confide.methods._additive_target import EXPECTED_MEAN, TARGET_BINS
from confide.methods.base import Problem
from confide.models.additive import AdditiveNetwork
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Probit

CLIP, CLIP_GROWTH, LEAST_CLIP, MOST_CLIP = 0.7, 0.15, 0.65, 1.5
"""The clip at n mu = 1000, in units of a record's usual norm times the largest residual of a class, or CUT deviations
of a number. It grows with that power of n mu: noise counts less, and what the clip takes off counts more. A residual of
a half, with which two classes start, must pass whole for most records, or gradients would not follow the weights."""

RECORDS_PER_WAVE = 6.0
"""n mu that pays for one more wave in every column."""
HOPELESS = 3.0
"""n mu for a column at which noise in its effect is as large as the effect that is expected, by the clip and the number
of columns that share a record's norm."""
UNKNOWN_START, START_SHIFT = 2.0, 1.0
"""Standard deviations of a constant, in logits: nothing is known of it, or the odds over all records are."""
LEAST_COUNTED, MOST_COUNTED, COUNTED_GROWTH = 0.25, 0.75, 3.0
"""Share of the steps that count as measurements, from little noise to a sixth of what is expected of a column."""
LARGEST = 0.6
"""Deviation of a number, of half its declared range, with which 90 % intervals are just not wider than that."""
FLATTEST = 0.25
"""Part of the curvature at even odds that steps rely on at least: were they divided by less wherever outputs have gone
far, steps that went too far would grow."""
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


def start_of(problem: Problem, shares: Tensor) -> tuple[Tensor, float]:
    """The constant of every output as the answers' shares give it, and the deviation of a number."""
    likelihood = problem.likelihood
    if isinstance(likelihood, Gaussian):
        middles = (torch.arange(TARGET_BINS, dtype=torch.float64) + 0.5) / TARGET_BINS * 2 - 1
        mean = (shares * middles).sum()
        spread = float((shares * (middles - mean).square()).sum().sqrt())
        return mean[None], max(spread, 1e-3)
    shares = shares.clamp(min=1 / problem.records)
    if isinstance(likelihood, Categorical):
        return shares.log() - shares.log().mean(), 1.0
    one = shares[1:] / shares.sum()
    return torch.special.ndtri(one) if isinstance(likelihood, Probit) else torch.logit(one), 1.0


def to_explain(problem: Problem, shares: Tensor) -> float:
    """Spread of what the model has to explain: about one logit, or the deviation of the target."""
    return start_of(problem, shares)[1]


def start_doubt(problem: Problem, shares: Tensor, doubt: float) -> float:
    """How far the constant may be from its start, at most as far as one that is not known at all.

    Shares have the noise of the release; and the odds of a class over all records are not those of a record
    whose columns add nothing, from which they differ by about START_SHIFT.
    """
    if isinstance(problem.likelihood, Gaussian):
        # Of a mean over bins that are a noisy release each, within [-1, 1].
        spread = start_of(problem, shares)[1]
        return min(EXPECTED_MEAN, math.hypot(doubt * math.sqrt(TARGET_BINS / 3), spread / 3))
    least = float(curvature_weights(problem.likelihood, shares).min())
    return min(UNKNOWN_START, math.hypot(doubt / least, START_SHIFT))


def rarity(likelihood: Likelihood, shares: Tensor) -> float:
    """How many times fewer records would say as much of an effect if they were of two even classes.

    A gradient has the same noise whatever the shares are, and the curvature that it is divided by is less where classes
    are many or rare: one class in eighty shows its effects as a twentieth of the records would.
    """
    if isinstance(likelihood, Gaussian):
        return 1.0
    even = torch.full((2,), 0.5, dtype=torch.float64)
    largest = 0.5 if isinstance(likelihood, Categorical) else float(curvature_weights(likelihood, even))
    return max(1.0, largest / float(curvature_weights(likelihood, shares).mean()))


def amplitudes_of(problem: Problem, smoothness: float, shares: Tensor) -> Tensor:
    """Of all features; 0 for waves beyond what the budget pays for where answers have these shares."""
    recipe = network_of(problem).recipe
    wave = RECORDS_PER_WAVE * rarity(problem.likelihood, shares) * len(recipe.blocks)
    affordable = min(budget_of(problem) / wave, recipe.waves)
    order = torch.arange(1, recipe.waves + 1, dtype=torch.float64)
    waves = order**-smoothness * (order <= max(1, int(affordable)))
    ones = torch.ones(len(recipe.categories), dtype=torch.float64)
    first = torch.tensor([constant_of(problem, shares)], dtype=torch.float64)
    return torch.cat([first, waves.repeat(len(recipe.numbers)), ones])


def hopeless(problem: Problem, shares: Tensor) -> float:
    """Noise in the effect of a column over the effect that is expected, about."""
    columns = len(network_of(problem).recipe.blocks)
    return HOPELESS * columns * rarity(problem.likelihood, shares) / budget_of(problem)


def constant_of(problem: Problem, shares: Tensor) -> float:
    """The constant feature, 1 unless columns cannot be learnt anyway: then more of a record's norm is its own."""
    return math.hypot(1.0, hopeless(problem, shares))


def counted_share(problem: Problem, shares: Tensor) -> float:
    """Share of the steps, the last ones, that count as measurements.

    Under much noise nearly all; under little those at the end, since what is learnt bends sigmoids, and columns that
    say the same have to settle first.
    """
    return min(LEAST_COUNTED + COUNTED_GROWTH * hopeless(problem, shares), MOST_COUNTED)


def uncounted(problem: Problem, shares: Tensor, learning: int) -> int:
    """Steps of so many, the first ones, that do not count as measurements."""
    return int((1 - counted_share(problem, shares)) * learning)


def within(likelihood: Likelihood, gradient: Tensor) -> tuple[Tensor, float]:
    """A noisy gradient (outputs, features) without what can only be noise, and the part of its deviation that is left.

    The softmax does not see what all outputs have in common: a record's gradients add up to zero over the outputs.
    """
    if not isinstance(likelihood, Categorical) or likelihood.classes < 2:
        return gradient, 1.0
    return gradient - gradient.mean(0), math.sqrt(1 - 1 / likelihood.classes)


def tremor(variances: Tensor, noise: float, pull: Tensor, divisor: Tensor) -> float:
    """Variance that the noise of steps gives to an output in the long run, the largest, for a rate of 1.

    Of a step x' = x - rate (pull x + noise) / divisor, of every weight by itself.
    """
    return float((variances * noise**2 / (2 * divisor * pull.clamp(min=1e-300))).sum(1).max())


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


def bend_of(likelihood: Likelihood, level: Tensor, spread: Tensor) -> Tensor:
    """Curvature of the loss in each output of classes, on average over outputs around these levels."""
    if len(spread) == 1:
        return mean_curvature(torch.cat([0 * level, level]), spread)[1:]
    return mean_curvature(level, spread) * len(spread) / (len(spread) - 1)  # see `curvature_weights`


def bend_at(problem: Problem, shares: tuple[Tensor, Tensor], spread: Tensor) -> Tensor:
    """By how much clipped gradients in each output grow with what is true of the records, where classes have these
    shares and true outputs these variances.

    By Stein's lemma the mean of a normal feature times (p - y) is its weight where a step was taken, times the mean
    curvature there, less the true weight times the mean curvature at the truth. The two are the same where steps have
    come to the end; where noise holds weights back, the former alone would leave large effects too small.
    """
    level, _ = levels_of(*shares, spread)
    kept = passing(shares[0], clip_share(problem))
    share, each = shares[0][-len(spread) :], kept[-len(spread) :]
    least = FLATTEST * curvature_weights(problem.likelihood, shares[0])
    bend = torch.maximum(bend_of(problem.likelihood, level, spread), least)
    return bend * (each * (1 - share) + (shares[0] * kept).sum() * share)


def own_noise(noise: float, rate: float, metric: StepMetric) -> Tensor:
    """Mean and standard deviation of what a step and the noise that it was taken by have in common."""
    square = rate * noise**2
    _, trace, root, _ = metric.noise(torch.zeros_like(metric.divisor))
    return torch.tensor([square * trace, square * math.sqrt(2) * root])
