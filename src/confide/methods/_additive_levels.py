"""Constants of an additive fit: what steps and the histogram say of the classes' shares, and levels that give them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from confide.expectation.evidence import standard_normals

LEAST_WEIGHT = 1e-60
"""Of steps that were not taken yet: so little that nothing is believed, and its inverse is still a number."""
EVEN = 4.0
"""Of every class, in the law of shares that are about even: two classes lie between .2 and .8 then. Where noise hides
the shares of a few hundred records, Jeffreys' prior alone would take it for a rare class; see docs/protocols.md."""
LEVEL_DRAWS, LEVEL_ROUNDS = 256, 30
"""Of the search for constants that give the shares: more of either move no share by a thousandth."""


def free_part(outputs: int) -> float:
    """Of the outputs of a softmax, which add up to zero; a logit by itself is free.

    Variances of such outputs are understated by as much where each is drawn by itself.
    """
    return 1.0 if outputs == 1 else 1 - 1 / outputs


def believed_shares(found: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean and deviation of shares that were found with such noise; means add up to 1.

    Beforehand shares are as likely about even (Dirichlet's law of EVEN for every class) as anything (Jeffreys' prior).
    A share that noise has made negative is not taken for none: a class that is never expected costs most.
    """
    noise = torch.as_tensor(noise, dtype=torch.float64).clamp(min=1e-12).expand(len(found))
    places = torch.sigmoid(torch.linspace(-9, 9, 721, dtype=torch.float64))
    about_even, anything = _beta(places, EVEN, EVEN * (len(found) - 1)), _beta(places, 0.5, 0.5)
    chance = torch.logaddexp(about_even, anything) - ((found[:, None] - places) / noise[:, None]).square() / 2
    chance = chance.softmax(1)
    mean = chance @ places
    spread = (chance @ places.square() - mean.square()).clamp(min=0).sqrt()
    inside = (found > 4 * noise) & (found < 1 - 4 * noise)  # where no end is near, and finer than the places are
    mean, spread = torch.where(inside, found, mean), torch.where(inside, noise, spread)
    return mean / mean.sum(), spread


def _beta(share: Tensor, first: float, second: float) -> Tensor:
    """Log density of the log odds of a share under the law Beta(first, second)."""
    size = math.lgamma(first + second) - math.lgamma(first) - math.lgamma(second)
    return size + first * share.log() + second * (1 - share).log()


def passing(expected: Tensor, clip: float) -> Tensor:
    """Part of its residual that the clip leaves to a record of every class, where a fit expects such shares.

    A class that is seldom expected has long residuals, and what a clip takes off them looks like fewer records of it.

    clip   of a record of the usual norm, in units of the longest residual there is
    """
    length = (1 - 2 * expected + expected.square().sum()).clamp(min=1e-12).sqrt()
    return (math.sqrt(2) * clip / length).clamp(max=1)


def unclipped(residual: Tensor, expected: Tensor, clip: float) -> Tensor:
    """Mean residuals as they would be without the clip.

    With it they are sum_j share_j passing_j (expected_k - [j = k]), which tells the shares.
    """
    kept = passing(expected, clip)
    total = (1 + (residual / kept).sum()) / (expected / kept).sum()
    return expected - (expected * total - residual) / kept


def of_all_classes(logits: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Of two classes the second may have an output alone."""
    if len(logits) > 1:
        return logits, residual
    return torch.cat([0 * logits, logits]), torch.cat([-residual, residual])


def own_residuals(sums: Tensor, level: Tensor, feature: float, records: float, spread: Tensor, clip: float) -> Tensor:
    """Residuals without the clip and their deviations by noise, (2, outputs), where steps were taken; see `shares_of`.

    level   constants there
    """
    weight = sums[0].clamp(min=LEAST_WEIGHT)
    logits, residual = of_all_classes(level, sums[2] / weight / (records * feature))
    expected = mean_shares(logits, spread)
    noise = weight.rsqrt() / (records * feature) / passing(expected, clip)[-len(level) :]
    return torch.stack([unclipped(residual, expected, clip)[-len(level) :], noise])


def shares_of(
    sums: Tensor,
    start: Tensor,
    feature: float,
    records: float,
    spread: Tensor,
    counted: tuple[Tensor, float],
    clip: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Shares of the classes and their deviations, from sums (3, outputs) of steps about the weights of the constant.

    Its gradient is the difference between the shares that the positions expect and those of the records. So steps
    measure the shares, which may lie far from where a first step was taken. What the positions expect is known as far
    as effects are normal: where these move the shares much, those of the histogram are the better ones.

    spread   variances of the outputs where steps were taken
    counted  shares of the histogram and their noise
    clip     see `passing`
    """
    weight = sums[0].clamp(min=LEAST_WEIGHT)
    logits = start + sums[1] / weight * feature
    residual = sums[2] / weight / (records * feature)
    logits, residual = of_all_classes(logits, residual)
    expected = mean_shares(logits, spread)
    # Shares are at most one: a deviation of ten says nothing, and before the first step it would be no number.
    noise = min(10.0, float(weight[0].rsqrt() / (records * feature)))
    found = expected - unclipped(residual, expected, clip)
    error = (noise / passing(expected, clip)).square() + (expected - logits.softmax(0)).square().max()
    shares, doubt = counted
    share = error / (error + doubt**2)
    return believed_shares(torch.lerp(found, shares, share), (error * (1 - share)).sqrt())


def mean_shares(level: Tensor, spread: Tensor) -> Tensor:
    """Of classes whose outputs lie around these levels with such variances, one of which may stand for two outputs."""
    return (level + _around(spread)).softmax(1).mean(0)


def mean_curvature(level: Tensor, spread: Tensor) -> Tensor:
    """E p (1 - p) of every output over outputs around these levels with such variances: by Stein's lemma what the mean
    of a normal feature times p grows by with the feature's weight, for any logits and however rare a class is."""
    chances = (level + _around(spread)).softmax(1)
    return (chances * (1 - chances)).mean(0)


def _around(spread: Tensor) -> Tensor:
    """Fixed draws of outputs with such variances. Those of a softmax add up to zero, so that two of them differ by more
    than if each were by itself: independent draws are that much wider."""
    outputs = spread / free_part(len(spread)) if len(spread) > 1 else torch.cat([0 * spread, spread])
    return standard_normals(LEVEL_DRAWS, len(outputs)) * outputs.sqrt()


def levels_of(shares: Tensor, error: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Constants of the outputs of a softmax, or of the logit of the second class, that give such shares on average over
    outputs with these variances around them; and the constants' own variances.

    Outputs that are spread out bring shares together, so that constants must be further apart than without. Found in
    rounds, over fixed quasi-random outputs.
    """
    doubt, around = (error / (shares * (1 - shares))).square(), _around(spread)
    level = shares.log()
    for _ in range(LEVEL_ROUNDS):
        level = level + shares.log() - (level + around).softmax(1).mean(0).log()
    if len(spread) == 1:
        return level[1:] - level[:1], doubt[1:]
    return level - level.mean(), doubt * free_part(len(spread))


def constants_of(
    shares: tuple[Tensor, Tensor], spread: Tensor, steps: Tensor, before: Tensor, measured: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Constants of all outputs, in logits, and their variances.

    By the shares alone they are right if effects are normal around zero. By steps they are right whatever effects are,
    as far as a Newton step is: from where steps have led by what the gradient says, and then by what it takes to go
    from the spread of the positions to that of the belief. The former is off by what the two differ by, the latter by
    what such a step leaves out and by its noise: each weighs by the square of that.

    spread    variances of the outputs under the belief
    steps     the same where steps were taken
    before    constants there
    measured  constants by the steps' own measurement, and their variances by its noise
    """
    level, error = levels_of(*shares, spread)
    there, _ = levels_of(*shares, steps)
    found, noise = measured
    off, newton = (found - there).square().max(), ((found - before).square() / 2).square().max()
    return torch.lerp(level, found + level - there, float(off / (off + newton + noise.max()))), error
