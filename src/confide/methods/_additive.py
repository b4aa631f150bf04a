"""What the additive method is made of: its schedule, the histogram of all columns, and the law of its own noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor, nn

from confide.mechanism.clipping import Recordwise
from confide.models.additive import (
    NUMBER,
    AdditiveNetwork,
    AdditiveRecipe,
    bin_of,
    bins,
    edges,
    heights_of,
    smoothed,
    wave_moments,
)
from confide.sources.queries import StatisticQuery

Phase = Literal["scale", "learn", "look"]

SCALE_SHARE = 0.06
"""Of all releases, and so of mu^2, goes to the histogram of all columns; looks at residuals cost the same each."""
LEAST_STEPS = 8
"""Releases below which none is spared for looking at residuals."""
TARGET_SHARE = 0.25
"""Of the square of a record's norm in the histogram belongs to the target: everything starts from its shares, and among
many columns they would drown in noise."""
TARGET_BINS = 64
"""Of a regression target over its declared range: its mean and spread are all that is read off them."""
EDGES = tuple(2.0 * 2 ** (-step / 2) for step in range(20, -1, -1))
"""Of absolute residuals of a target scaled to [-1, 1], from a thousandth of its range up to all of it."""


@dataclass(frozen=True)
class Schedule:
    """Which release does what: (phase, releases) in order, from public numbers alone."""

    phases: tuple[tuple[Phase, int], ...]

    @classmethod
    def of(cls, steps: int, looks: int) -> Schedule:
        """looks   at residuals: 2 after a third of the steps and at the end, 1 the former alone, or 0"""
        share = max(1, round(SCALE_SHARE * steps))
        if steps < 3:
            return cls((("learn", steps),))
        if not looks or steps < LEAST_STEPS:
            return cls((("scale", share), ("learn", steps - share)))
        left = steps - (1 + looks) * share
        first = left // 3
        phases: tuple[tuple[Phase, int], ...] = (
            ("scale", share), ("learn", first), ("look", share), ("learn", left - first), ("look", share)
        )  # fmt: skip
        return cls(phases[: 3 + looks])

    def at(self, step: int) -> tuple[Phase, int, int]:
        """The phase of a release, its place in the phase, and how many the phase has."""
        for phase, count in self.phases:
            if step < count:
                return phase, step, count
            step -= count
        raise IndexError(step)

    @property
    def learning(self) -> int:
        return sum(count for phase, count in self.phases if phase == "learn")

    def learnt(self, step: int) -> int:
        """Steps of learning before this release."""
        done = 0
        for phase, count in self.phases:
            done += min(max(step, 0), count) if phase == "learn" else 0
            step -= count
        return done


# -- the histogram of all columns -----------------------------------------------------------------------------------


def histogram_size(recipe: AdditiveRecipe, answers: int) -> int:
    return len(recipe.numbers) * bins(len(recipe.numbers)) + len(recipe.categories) + answers


def column_unit(recipe: AdditiveRecipe) -> float:
    """What a column adds to a record's norm, of a norm of 1 in all."""
    return math.sqrt((1 - TARGET_SHARE) / len(recipe.blocks))


def histogram(recipe: AdditiveRecipe, classes: int | None, clip: float) -> StatisticQuery:
    """Of one record: the bin of every number, its categories, and the bin or class of its target, in norm the clip.

    Every column adds the same to the square of a record's norm at most, and the target adds TARGET_SHARE.
    """
    numbers, categories = torch.tensor(recipe.numbers), torch.tensor(recipe.categories)
    answers = classes or TARGET_BINS
    unit, weight = clip * column_unit(recipe), clip * math.sqrt(TARGET_SHARE)
    each = bins(len(numbers))
    wide = len(numbers) * each

    def answer(x: Tensor, y: Tensor) -> Tensor:
        x = x.flatten(1)
        rows = torch.zeros(len(x), histogram_size(recipe, answers), dtype=torch.float64)
        places = [torch.arange(len(numbers)) * each + bin_of(x[:, numbers])] if len(numbers) else []
        if len(categories):
            rows[:, wide:-answers] = x[:, categories].double().clamp(0, 1) * unit
        if places:
            rows = rows.scatter(1, places[0], unit)
        return rows.scatter(1, (wide + len(categories) + answer_of(y, classes))[:, None], weight)

    return StatisticQuery(Recordwise(answer), histogram_size(recipe, answers))


def answer_of(y: Tensor, classes: int | None) -> Tensor:
    """The class of a target, or its bin."""
    if classes is not None:
        return y.reshape(-1).long().clamp(0, classes - 1)
    share = (y.reshape(-1).double().clamp(-1, 1) + 1) / 2
    return (share * TARGET_BINS).long().clamp(max=TARGET_BINS - 1)


@dataclass(frozen=True)
class Scale:
    """What the histogram says: quantile scales, centres and variances of all features, and shares of the answers."""

    heights: Tensor
    centres: Tensor
    variances: Tensor
    answers: Tensor


def scale_of(recipe: AdditiveRecipe, answers: int, counts: Tensor | None, noise: float, records: float) -> Scale:
    """From noisy counts in a record's units; None: what is known without any, which is the plain scale."""
    numbers = len(recipe.numbers)
    width = edges(numbers).diff()
    parts = [numbers * bins(numbers), len(recipe.categories), answers]
    if counts is None:
        shares, found = width.repeat(numbers, 1), None
        told = torch.full((answers,), 1 / answers, dtype=torch.float64)
    else:
        cells, found, last = counts.double().split(parts)
        last, told_noise = last / math.sqrt(TARGET_SHARE), noise / math.sqrt(TARGET_SHARE)
        cells, found, noise = cells / column_unit(recipe), found / column_unit(recipe), noise / column_unit(recipe)
        shares = smoothed(cells.view(numbers, -1), noise, records, width) if numbers else width.repeat(0, 1)
        told = smoothed(last[None], told_noise, records, torch.full((answers,), 1 / answers, dtype=torch.float64))[0]
    heights = heights_of(shares)
    mean, variance = wave_moments(shares, heights, recipe.waves)
    present = _present(recipe, found, noise / records, records)
    # A share that was taken for less than it is would make steps too long.
    doubt = 0.0 if counts is None else noise / records
    centres = torch.cat([torch.zeros(1, dtype=torch.float64), mean.flatten(), present])
    spread = (present * (1 - present)).clamp(min=max(doubt, 1 / records))
    return Scale(heights, centres, torch.cat([torch.ones(1, dtype=torch.float64), variance.flatten(), spread]), told)


def _present(recipe: AdditiveRecipe, counts: Tensor | None, doubt: float, records: float) -> Tensor:
    """Shares of the records in every category: an even share, unless the counts say more than noise."""
    widths = [width for width in recipe.blocks if width != NUMBER]
    even = torch.cat([torch.full((width,), 1 / max(2, width), dtype=torch.float64) for width in widths] or [_empty()])
    if counts is None:
        return even
    deviation = counts / records - even
    kept = (1 - (2 * doubt / deviation.abs().clamp(min=1e-30)).square()).clamp(min=0)
    return (even + kept * deviation).clamp(0, 1)


def _empty() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


# -- residuals ------------------------------------------------------------------------------------------------------


def residuals(module: nn.Module, clip: float) -> StatisticQuery:
    """Of one record: the bin of its absolute residual, in norm the clip."""
    borders = torch.tensor(EDGES, dtype=torch.float64)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        distance = (module(x).reshape(-1).double() - y.reshape(-1).double()).abs()
        rows = torch.zeros(len(x), len(EDGES) + 1, dtype=torch.float64)
        return rows.scatter(1, torch.bucketize(distance, borders)[:, None], clip)

    return StatisticQuery(Recordwise(answer, module), len(EDGES) + 1)


@cache
def _candidates() -> tuple[Tensor, Tensor]:
    """Standard deviations from a 500th of the range up to all of it, and the shares of the bins under each."""
    scales = torch.logspace(math.log10(0.002), math.log10(2.0), 200, dtype=torch.float64)
    normal = NormalDist()
    below = torch.tensor([[2 * normal.cdf(edge / float(scale)) - 1 for edge in EDGES] for scale in scales])
    below = torch.cat([torch.zeros(200, 1), below, torch.ones(200, 1)], 1).double()
    return scales, below.diff(dim=1)


def residual_scale(counts: Tensor, noise: float, records: float, guess: float) -> float:
    """The standard deviation of residuals from noisy counts of their bins: the likeliest, with a prior.

    Each count has the release's noise, its own sampling noise, and a tenth of itself by which residuals are not quite
    normal. The prior, log s ~ N(log guess, 1), decides where the counts say nothing.
    """
    scales, shares = _candidates()
    expected = records * shares
    variance = noise**2 + expected + (0.1 * expected).square()
    misfit = ((counts.double() - expected).square() / variance + variance.log()).sum(1) / 2
    return float(scales[(misfit + (scales / guess).log().square() / 2).argmin()])


# -- the law of the method's own noise --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisyPass:
    """One step in the eyes of its noise: every weight for itself, curvature as assumed.

    pull     the share of a weight's distance that the gradient takes back, H / D
    decay    the same for the prior, P / D
    noise    standard deviation of the step, relative to its rate
    """

    pull: Tensor
    decay: Tensor
    noise: Tensor
    rate: float
    momentum: float
    averaging: float


def after(step: NoisyPass, response: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (..., 3) and covariance (..., 3, 3) of (weight, velocity, running average) after one more step.

    The mean is that of a weight whose data would have it at 1 and that started from 0: what it reaches. With both, an
    average of positions is a measurement of where the weight belongs, of known gain and known noise.
    """
    rate, a = step.rate, step.averaging
    total = step.pull + step.decay
    zero, one = torch.zeros_like(total), torch.ones_like(total)
    velocity = torch.stack([total, step.momentum * one, zero], -1)
    weight = torch.stack([1 - rate * total, -rate * step.momentum * one, zero], -1)
    average = torch.cat([a * weight[..., :2], ((1 - a) * one)[..., None]], -1)
    move = torch.stack([weight, velocity, average], -2)
    way = torch.tensor([-rate, 1.0, -a * rate], dtype=torch.float64)
    response = (move @ response[..., None])[..., 0] - step.pull[..., None] * way
    kick = step.noise[..., None] * way
    return response, move @ covariance @ move.mT + kick[..., :, None] * kick[..., None, :]


def shrunk(found: Tensor, variance: Tensor, groups: list[slice], usual: float) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior means and variances of weights (outputs, features) from measurements, and the scale of every group.

    Weights of one column are N(0, tau^2), and tau is half-Cauchy around the scale that all columns have in common,
    which is half-Cauchy around `usual` and taken at its mode. The tau of a column is integrated out over a grid: a
    column that says nothing beyond its noise is shrunk away, whatever the others say.
    """
    mean, doubt = found.clone(), variance.clone()
    scales = torch.zeros(len(groups), dtype=torch.float64)
    every = torch.cat([torch.arange(group.start, group.stop) for group in groups])
    grid = usual * torch.logspace(-3, 1, 41, dtype=torch.float64)
    common = float(grid[_log_posterior(grid, found[:, every], variance[:, every], usual).argmax()])
    grid = common * torch.logspace(-2, 1.5, 36, dtype=torch.float64)
    for place, group in enumerate(groups):
        value, error = found[:, group], variance[:, group]
        chance = _log_posterior(grid, value, error, common).softmax(0)
        square = grid.square()[:, None, None]
        gain = square / (square + error)
        weights = chance[:, None, None]
        mean[:, group] = (weights * gain).sum(0) * value
        doubt[:, group] = (weights * (gain * error + (gain * value).square())).sum(0) - mean[:, group].square()
        scales[place] = (chance * grid).sum()
    return mean, doubt.clamp(min=0), scales


def _log_posterior(grid: Tensor, value: Tensor, error: Tensor, around: float) -> Tensor:
    """Of every tau of an even grid of logarithms, given measurements with such error variances."""
    total = grid.square()[:, None] + error.flatten()
    evidence = -(total.log() + value.flatten().square() / total).sum(1) / 2
    return evidence + grid.log() - (1 + (grid / around).square()).log()


def network_for(module: nn.Module, waves: int) -> AdditiveNetwork | None:
    """The additive network itself, or one of as many numbers as a fully connected network has inputs."""
    from confide.models.networks import recipe_of

    if isinstance(module, AdditiveNetwork):
        return module
    recipe = recipe_of(module)
    if recipe is None:
        return None
    made = AdditiveNetwork(AdditiveRecipe((NUMBER,) * recipe.features, recipe.outputs, waves))
    return made.to(next(module.parameters()).dtype)
