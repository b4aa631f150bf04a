"""What the additive method is made of: its schedule, the histogram of all columns, and the law of its own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from confide.mechanism.clipping import Recordwise
from confide.methods._additive_columns import MOMENTS, column_laws, moments
from confide.methods._additive_levels import LEAST_WEIGHT, believed_shares
from confide.methods._additive_target import NOT_NORMAL, TARGET_BINS, fine, law_of_target, legible
from confide.models.additive import (
    EVEN_SHARE,
    NUMBER,
    REACH,
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

Phase = Literal["scale", "together", "means", "learn", "look"]

SCALE_SHARE = 0.06
"""Of all releases, and so of mu^2, goes to the histogram of all columns; looks at residuals cost the same each."""
LEAST_STEPS = 8
"""Releases below which none is spared for looking at residuals."""
TARGET_SHARE = 0.25
"""Of the square of a record's norm in the histogram belongs to the target: everything starts from its shares, and among
many columns they would drown in noise."""
LARGEST_TARGET_SHARE = 0.5
"""The same where no bin of a column could be read, and columns tell two means of themselves alone."""
MOMENTS_SHARE = 0.25
"""Of the square of what a number adds to that norm belongs to these means, where bins can be read: means say where to
begin and need little, for a mean over all bins has eight times the noise of one."""
EDGES = tuple(2.0 * 2 ** (-step / 2) for step in range(20, -1, -1))
"""Of absolute residuals of a target scaled to [-1, 1], from a thousandth of its range up to all of it."""

FAR = 3.5
"""Deviations beyond which bins of residuals hold next to none: noise of all of them would be most of what is known of
the 90 %, so that they count as far as they hold more than noise."""
STEEP, USUAL_MOVE = 0.339, 0.2
"""By how much the share within the 90 % of a normal law grows with the logarithm of its scale; and by how much that
logarithm differs, as a standard deviation, from one that is right for the 90 % of residuals that are not normal."""


@dataclass(frozen=True)
class Schedule:
    """Which release does what: (phase, releases) in order, from public numbers alone."""

    phases: tuple[tuple[Phase, int], ...]

    @classmethod
    def of(cls, steps: int, looks: int, asked: Sequence[Phase] = ()) -> Schedule:
        """looks   at residuals: 2 after a third of the steps and at the end, 1 the former alone, or 0
        asked   after the histogram: where the middles of columns are, which columns move together"""
        share = max(1, round(SCALE_SHARE * steps))
        if steps < 3:
            return cls((("learn", steps),))
        before: tuple[tuple[Phase, int], ...] = (("scale", share),)
        if steps < LEAST_STEPS:
            return cls((*before, ("learn", steps - share)))
        before += tuple((phase, share) for phase in asked)
        left = steps - (len(before) + looks) * share
        if not looks:
            return cls((*before, ("learn", left)))
        first = left // 3
        phases: tuple[tuple[Phase, int], ...] = (
            ("learn", first), ("look", share), ("learn", left - first), ("look", share)
        )  # fmt: skip
        return cls((*before, *phases[: 2 + looks]))

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

    @property
    def rests(self) -> tuple[int, ...]:
        """Steps of learning after which weights may be moved to where they are believed: before the first look, and in
        the middle of what follows it."""
        first = next((count for phase, count in self.phases if phase == "learn"), 0)
        return (first, *range(first + 2, self.learning, 2))

    def learnt(self, step: int) -> int:
        """Steps of learning before this release."""
        done = 0
        for phase, count in self.phases:
            done += min(max(step, 0), count) if phase == "learn" else 0
            step -= count
        return done


# -- the histogram of all columns -----------------------------------------------------------------------------------


def histogram_size(recipe: AdditiveRecipe, answers: int) -> int:
    each = bins(len(recipe.numbers)) + MOMENTS
    return len(recipe.numbers) * each + len(recipe.categories) + answers


def column_unit(recipe: AdditiveRecipe, share: float) -> float:
    """What a column adds to a record's norm, of a norm of 1 in all."""
    return math.sqrt((1 - share) / len(recipe.blocks))


def number_units(recipe: AdditiveRecipe, share: float) -> tuple[float, float]:
    """What the bin of a number and its means add to a record's norm; bins nothing where they could not be read."""
    unit = column_unit(recipe, share)
    part = MOMENTS_SHARE if share < LARGEST_TARGET_SHARE else 1.0
    return unit * math.sqrt(1 - part), unit * math.sqrt(part)


def target_share(recipe: AdditiveRecipe, budget: float) -> float:
    """Of the square of a record's norm in the histogram: what belongs to the target, by a histogram's n mu.

    Where noise is larger than any difference between halves of a number's range, no bin would be believed (see
    `smoothed`), and none is asked for: `LARGEST_TARGET_SHARE` stands for that. Categories are single counts, which show
    earlier.
    """
    if budget <= 0 or not recipe.numbers:
        return TARGET_SHARE
    noise = REACH / (budget * number_units(recipe, TARGET_SHARE)[0])
    return TARGET_SHARE if noise * math.sqrt(bins(len(recipe.numbers))) / 2 < 0.5 else LARGEST_TARGET_SHARE


def histogram(recipe: AdditiveRecipe, classes: int | None, clip: float, share: float = TARGET_SHARE) -> StatisticQuery:
    """Of one record: bin and `moments` of every number, its categories, and the bin or class of its target.

    In norm the clip at most: every column adds the same to its square, or less, and the target adds that share.
    """
    numbers, categories = torch.tensor(recipe.numbers), torch.tensor(recipe.categories)
    answers = classes or TARGET_BINS
    unit, weight = clip * column_unit(recipe, share), clip * math.sqrt(share)
    bin_unit, moment_unit = (clip * part for part in number_units(recipe, share))
    each = bins(len(numbers))
    wide = len(numbers) * each
    first = wide + MOMENTS * len(numbers)  # of the categories

    def answer(x: Tensor, y: Tensor) -> Tensor:
        x = x.flatten(1)
        rows = torch.zeros(len(x), histogram_size(recipe, answers), dtype=torch.float64)
        if len(categories):
            rows[:, first:-answers] = x[:, categories].double().clamp(0, 1) * unit
        if len(numbers):
            rows[:, wide:first] = moment_unit * moments(x[:, numbers])
            rows = rows.scatter(1, torch.arange(len(numbers)) * each + bin_of(x[:, numbers]), bin_unit)
        return rows.scatter(1, (first + len(categories) + answer_of(y, classes))[:, None], weight)

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
    waves_alike: Tensor


def scale_of(
    recipe: AdditiveRecipe,
    classes: int | None,
    counts: Tensor | None,
    noise: float,
    records: float,
    share: float = TARGET_SHARE,
) -> Scale:
    """From noisy counts in a record's units; None: what is known without any, which is the plain scale."""
    answers = classes or TARGET_BINS
    numbers = len(recipe.numbers)
    width = edges(numbers).diff()
    parts = [numbers * bins(numbers), numbers * MOMENTS, len(recipe.categories), answers]
    if counts is None:
        shares, found = width.repeat(numbers, 1), None
        told = answers_told(torch.zeros(answers, dtype=torch.float64), math.inf, records, classes)
        error = math.inf
    else:
        cells, means, found, last = counts.double().split(parts)
        told = answers_told(last / math.sqrt(share), noise / math.sqrt(share), records, classes)
        shares = _column_shares(recipe, cells, means, noise, records, share)
        unit, own = column_unit(recipe, share), number_units(recipe, share)[0]
        error = noise / (own * records) if own > 0 else math.inf
        found, noise = found / unit, noise / unit
    heights = heights_of(shares)
    mean, variance, alike = wave_moments(shares, heights, recipe.waves, error)
    present = _present(recipe, found, noise / records, records)
    # A share that was taken for less than it is would make steps too long.
    doubt = 0.0 if counts is None else noise / records
    centres = torch.cat([torch.zeros(1, dtype=torch.float64), mean.flatten(), present])
    spread = (present * (1 - present)).clamp(min=max(doubt, 1 / records))
    variances = torch.cat([torch.ones(1, dtype=torch.float64), variance.flatten(), spread])
    return Scale(heights, centres, variances, told, alike)


def _column_shares(
    recipe: AdditiveRecipe, cells: Tensor, means: Tensor, noise: float, records: float, share: float
) -> Tensor:
    """Of the bins of every number: what its two means say, and from there what its bins do, where they were asked."""
    numbers = len(recipe.numbers)
    width = edges(numbers).diff()
    if not numbers:
        return width.repeat(0, 1)
    bin_unit, moment_unit = number_units(recipe, share)
    error = noise / (moment_unit * records)
    laws = column_laws(means.view(numbers, MOMENTS) / (moment_unit * records), error, numbers)
    if bin_unit == 0:
        return (1 - EVEN_SHARE) * laws + EVEN_SHARE * width
    return smoothed(cells.view(numbers, -1) / bin_unit, noise / bin_unit, records, width, laws)


def answers_told(counts: Tensor, noise: float, records: float, classes: int | None) -> Tensor:
    """Shares of the classes, or of the bins of a number: those of a normal law where noise would drown single bins."""
    even = torch.full((len(counts),), 1 / len(counts), dtype=torch.float64)
    if classes is None:
        law = law_of_target(counts, noise, records)
        if not legible(noise, records) or not fine(noise, records, law):
            return law
        return smoothed(counts[None], noise, records, even)[0]
    return even if math.isinf(noise) else believed_shares(counts / records, noise / records)[0]


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

    def answer(x: Tensor, y: Tensor) -> Tensor:
        bins = bin_of_residual(module(x).reshape(-1).double() - y.reshape(-1).double())
        rows = torch.zeros(len(x), len(EDGES) + 1, dtype=torch.float64)
        return rows.scatter(1, bins[:, None], clip)

    return StatisticQuery(Recordwise(answer, module), len(EDGES) + 1)


def bin_of_residual(residual: Tensor) -> Tensor:
    return torch.bucketize(residual.abs(), torch.tensor(EDGES, dtype=torch.float64))


@cache
def _candidates() -> tuple[Tensor, Tensor]:
    """Standard deviations from a 500th of the range up to all of it, and the shares of the bins under each."""
    scales = torch.logspace(math.log10(0.002), math.log10(2.0), 200, dtype=torch.float64)
    normal = NormalDist()
    below = torch.tensor([[2 * normal.cdf(edge / float(scale)) - 1 for edge in EDGES] for scale in scales])
    below = torch.cat([torch.zeros(200, 1), below, torch.ones(200, 1)], 1).double()
    return scales, below.diff(dim=1)


def residual_scale(counts: Tensor, noise: float, records: float, guess: float) -> float:
    """The standard deviation of residuals from noisy counts of their bins, such that 90 % lie where a normal law has
    them: that of the likeliest normal law, with a prior, moved by what the counts say of the 90 %.

    Each count has the release's noise, its own sampling noise, and a tenth of itself by which residuals are not quite
    normal. The prior, log s ~ N(log guess, 1), decides where the counts say nothing. Residuals with a long tail, or
    that are larger for some records than for others, have a deviation that is too wide for most of them.
    """
    scales, shares = _candidates()
    expected = records * shares
    variance = noise**2 + expected + (NOT_NORMAL * expected).square()
    misfit = ((counts.double() - expected).square() / variance + variance.log()).sum(1) / 2
    scale = float(scales[(misfit + (scales / guess).log().square() / 2).argmin()])
    return scale * math.exp(_towards_ninety(counts.double(), noise, records, scale))


def _towards_ninety(counts: Tensor, noise: float, records: float, scale: float) -> float:
    """By how much the logarithm of a normal scale is to move so that 90 % of the residuals lie within its 90 %.

    Counted from the far end, where few bins hold records. Between two edges the normal deviate of a share is about a
    line. What is found is shrunk by its error against the usual deviation of such a move.
    """
    edges, wanted = torch.tensor(EDGES, dtype=torch.float64), NormalDist().inv_cdf(0.95)
    far = int((edges < FAR * scale).sum()) + 1
    held = REACH * noise * math.sqrt(max(0, len(counts) - far)) / max(1e-12, float(counts[far:].sum().abs()))
    counts = torch.cat([counts[:far], max(0.0, 1 - held**2) * counts[far:]])
    beyond = counts.flip(0).cumsum(0).flip(0)[1:] / records  # of every edge
    deviates = torch.special.ndtri(1 - beyond.clamp(1e-4, 1 - 1e-4) / 2)
    near = int((edges <= wanted * scale).sum())
    places = range(max(0, near - 3), min(near + 2, len(edges) - 1))  # twice as far and half as far
    place = next((place for place in reversed(places) if deviates[place] < wanted), places[0])
    steps = deviates[place + 1] - deviates[place]
    share = float(((wanted - deviates[place]) / steps).clamp(0, 1)) if steps > 0 else 0.5
    found = float(torch.lerp(edges[place], edges[place + 1], share)) / wanted
    error = math.hypot(noise * math.sqrt(max(1, far - 1 - place)), math.sqrt(0.09 * records)) / records / STEEP
    return math.log(found / scale) / (1 + (error / USUAL_MOVE) ** 2)


# -- what steps have measured -----------------------------------------------------------------------------------------


def told(position: Tensor, gradient: Tensor, noise: float) -> Tensor:
    """What one step says of every weight: (3, outputs, features), to be added up over steps.

    A gradient is curvature times (position - where the weight belongs) + noise, wherever steps may have led: the weight
    1 / noise^2 of the step, and its position and gradient with it.
    """
    found = torch.stack([torch.ones_like(position), position, gradient])
    return found / noise**2 if noise > 0 else found


def measured(
    sums: Tensor, curvature: Tensor, alike: float = 1.0, reached: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Where every weight belongs by all steps that were added up, and the variance of that by their noise.

    Each step by itself says position - gradient / curvature, whose noise does not depend on the way before it. Columns
    that move together by a factor `alike` meet a curvature that is sharper by as much, and noise says less. Where the
    curvature is that at the end, `reached` is the one at the positions in units of it.
    """
    weight, position, gradient = sums / sums[0].clamp(min=LEAST_WEIGHT)
    weight, curvature = sums[0].clamp(min=LEAST_WEIGHT), curvature.clamp(min=1e-12)
    return position * reached - gradient / (curvature * alike), 1 / (weight * (curvature * alike).square())


class BelievedWeights(NamedTuple):
    """Mean and variance of all weights (outputs, features), the scale of every column, how far a record moves its own
    outputs per unit of its residual, and how many times wider effects of single columns are in doubt than by these
    variances, which are those that outputs need."""

    mean: Tensor
    variance: Tensor
    scales: Tensor
    leverage: float
    wider: float = 1.0


def leverage_of(kept: Tensor, found: Tensor, curvature: Tensor, variances: Tensor, alike: float) -> float:
    """By linear response: a record adds its residual times a feature to the gradient, so 1 / curvature of it to what is
    measured, and as much as is believed of that counts."""
    believed = (kept / torch.where(found == 0, 1.0, found)).clamp(0, 1)
    believed[:, 0] = 1.0
    return float((believed * variances / (curvature.clamp(min=1e-12) * alike)).sum(1).mean())


def shrunk(found: Tensor, variance: Tensor, groups: list[slice], usual: float) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior means and variances of weights (outputs, features) from measurements, and the scale of every group.

    Weights of one column are N(0, tau^2), and tau has a heavy tail (half a Student's t of three degrees) around the
    scale that all columns have in common, which is half-normal with deviation `usual` and taken at its mode. The tau of
    a column is integrated out over a grid: a column that says nothing beyond its noise is shrunk away, whatever the
    others say.
    """
    mean, doubt = found.clone(), variance.clone()
    scales = torch.zeros(len(groups), dtype=torch.float64)
    every = torch.cat([torch.arange(group.start, group.stop) for group in groups])
    grid = usual * torch.logspace(-3, 1, 41, dtype=torch.float64)
    chance = _evidence(grid, found[:, every], variance[:, every]) + grid.log() - (grid / usual).square() / 2
    common = float(grid[chance.argmax()])
    grid = common * torch.logspace(-2, 1.5, 36, dtype=torch.float64)
    for place, group in enumerate(groups):
        value, error = found[:, group], variance[:, group]
        chance = (_evidence(grid, value, error) + grid.log() - 2 * (1 + (grid / common).square()).log()).softmax(0)
        square = grid.square()[:, None, None]
        gain = square / (square + error)
        weights = chance[:, None, None]
        mean[:, group] = (weights * gain).sum(0) * value
        doubt[:, group] = (weights * (gain * error + (gain * value).square())).sum(0) - mean[:, group].square()
        scales[place] = (chance * grid).sum()
    return mean, doubt.clamp(min=0), scales


def _evidence(grid: Tensor, value: Tensor, error: Tensor) -> Tensor:
    """Of every tau, given measurements (outputs, features) with such error variances.

    Outputs of a softmax add up to zero, so that one of them says nothing that the others have not said.
    """
    total = grid.square()[:, None] + error.flatten()
    free = 1.0 if len(value) == 1 else 1 - 1 / len(value)
    return -free * (total.log() + value.flatten().square() / total).sum(1) / 2


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
