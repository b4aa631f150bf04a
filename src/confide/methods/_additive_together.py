"""Which columns of an additive model move together, from one release, and what their weights are believed to be then.

Columns that all move with one size have gradients that are larger by their number along what they have in common, and
smaller along their differences: by each column's own curvature the former would be overshot and the latter shrunk away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from confide.mechanism.clipping import Recordwise
from confide.methods._additive import BelievedWeights
from confide.methods._additive_levels import LEAST_WEIGHT
from confide.methods._additive_state import AdditiveState, Together
from confide.models.additive import NUMBER, AdditiveNetwork, AdditiveRecipe
from confide.sources.queries import StatisticQuery

MOST_TOGETHER = 48
"""Numbers and categories whose products are asked for, at most: noise grows with that to the power of 3 / 2, and time
with its square."""
ROOM = 1.3
"""Square of a record's first waves, each over its deviation, that is not cut, over the number of them: columns that
move together are far from the middle together."""
UNEVEN = 0.2
"""Deviation of such squares from one column to the next."""
USUAL_CORRELATION = 0.3
"""Deviation of correlations nothing is known of."""
FLATTEST_DIRECTION = 0.02
"""Least curvature of any direction in units of a column's own: differences of columns that are all but the same."""
ALLOWED = 0.5
"""By how much curvatures of single directions are wrong at most, in parts of them."""
ROUNDS = 12
"""In which weights and the scales of their columns are found from each other."""


def firsts(recipe: AdditiveRecipe) -> Tensor:
    """Places among the features of every number's first wave, then of all categories."""
    numbers = len(recipe.numbers)
    first = 1 + recipe.waves * torch.arange(numbers)
    return torch.cat([first, 1 + recipe.waves * numbers + torch.arange(len(recipe.categories))])


def asked(recipe: AdditiveRecipe, budget: float) -> bool:
    """Whether products of columns could be told apart from noise at a release's n mu, if all columns were the same."""
    count = len(recipe.numbers) + len(recipe.categories)
    if len(recipe.blocks) < 2 or count > MOST_TOGETHER:
        return False
    return edge(count, 1 / budget if budget > 0 else math.inf) < count


def edge(count: int, noise: float) -> float:
    """Of the eigenvalues that noise alone gives, for the noise of a release over records (Wigner's semicircle)."""
    return 2 * math.sqrt(count) * entry_noise(count, noise)


def entry_noise(count: int, noise: float) -> float:
    """In a product of two columns."""
    return ROOM * count * noise / math.sqrt(2)


def products(network: AdditiveNetwork, variances: Tensor, clip: float) -> StatisticQuery:
    """Of one record: products of its first waves and categories, each over its deviation; in norm the clip at most.

    variances   of all features as the network gives them
    """
    places = firsts(network.recipe)
    count = len(places)
    scale = variances[places].clamp(min=1e-12).rsqrt()
    rows, columns = torch.triu_indices(count, count)
    pack = torch.where(rows == columns, 1.0, math.sqrt(2.0)).double() * clip / (ROOM * count)
    features = network.features

    def answer(x: Tensor, y: Tensor) -> Tensor:
        own = features(x.flatten(1))[:, places].double() * scale
        own = own * (math.sqrt(ROOM * count) / own.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        rows_of: Tensor = own[:, rows] * own[:, columns] * pack
        return rows_of

    return StatisticQuery(Recordwise(answer, network), count * (count + 1) // 2)


def together_of(recipe: AdditiveRecipe, told: Tensor, noise: float, alike: Tensor) -> Together:
    """From a release over records in units of its clip, with noise of that size in every number.

    Of few large eigenvalues under symmetric noise the root of the square less the noise's own edge is the best guess
    (Gavish and Donoho, IEEE Transactions on Information Theory 2017).

    alike   (numbers, waves, waves): correlations of every number's waves
    """
    count = len(firsts(recipe))
    rows, columns = torch.triu_indices(count, count)
    matrix = torch.zeros(count, count, dtype=torch.float64)
    matrix[rows, columns] = told.double() * ROOM * count / torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()
    matrix = matrix + matrix.mT - matrix.diag().diag()
    error = entry_noise(count, noise)
    own = _own(matrix.diag(), math.sqrt(2) * error)
    matrix = matrix / (own[:, None] * own).sqrt()
    values, vectors = torch.linalg.eigh(matrix - matrix.diag().diag())
    kept = values.sign() * (values.square() - edge(count, noise) ** 2).clamp(min=0).sqrt()
    found = vectors @ kept.diag() @ vectors.mT
    found = (found - found.diag().diag()).clamp(-0.99, 0.99) + torch.eye(count, dtype=torch.float64)
    known = 1 / (error**-2 + USUAL_CORRELATION**-2) if error > 0 else 0.0
    whole = feature_correlations(recipe, alike, _at_least(found, FLATTEST_DIRECTION))
    return Together(whole, math.sqrt(known))


def _own(found: Tensor, error: float) -> Tensor:
    """Squares of single columns that were not cut: of all columns on average, and of each as far as it is no noise."""
    mean = found.mean().clamp(0.4, 1.2)
    own: Tensor = mean + (found - mean) / (1 + (error / UNEVEN) ** 2)
    return own.clamp(0.2, 3.0)


def _at_least(matrix: Tensor, least: float) -> Tensor:
    """The same with no eigenvalue below that, and ones on the diagonal."""
    values, vectors = torch.linalg.eigh(matrix)
    found = vectors @ values.clamp(min=least).diag() @ vectors.mT
    scale = found.diag().rsqrt()
    evened: Tensor = scale[:, None] * found * scale
    return evened


def feature_correlations(recipe: AdditiveRecipe, alike: Tensor, between: Tensor) -> Tensor:
    """(features, features): of waves of one number as they are known, of those of two numbers as far as the numbers
    move together.

    Of two normal numbers with correlation r, functions of order k are correlated by r^k, and functions of other orders
    are not (Mehler's formula). The constant is by itself.

    alike     (numbers, waves, waves): correlations of every number's waves
    between   those of the first waves and the categories
    """
    numbers, waves = len(recipe.numbers), recipe.waves
    places, found = firsts(recipe), torch.eye(recipe.features, dtype=torch.float64)
    for order in range(2, waves + 1):
        at = places[:numbers] + order - 1
        found[at[:, None], at] = between[:numbers, :numbers] ** order
    found[places[:, None], places] = between
    root, part = torch.eye(recipe.features, dtype=torch.float64), slice(1, 1 + numbers * waves)
    # By Gram and Schmidt, from the first wave on: of a number of five values the ninth wave is a sum of the first four.
    # A number of few values has waves that are sums of others, as far as it is known where the values lie.
    values, vectors = torch.linalg.eigh(alike)
    room = vectors @ torch.diag_embed(values.clamp(min=1e-6)) @ vectors.mT
    scale = room.diagonal(dim1=1, dim2=2).rsqrt()
    room = scale[:, :, None] * room * scale[:, None, :]
    root[part, part] = torch.block_diag(*torch.linalg.cholesky(room))
    whole: Tensor = root @ found @ root.mT
    return whole


def weighed_together(
    state: AdditiveState, recipe: AdditiveRecipe, curvature: Tensor, sampling: float, usual: float
) -> BelievedWeights:
    """What steps say of all weights of one output, with what is expected of columns beforehand.

    curvature   of every feature by itself
    """
    assert state.together is not None
    weight, root = float(state.sums[0].max().clamp(min=LEAST_WEIGHT)), curvature.sqrt()
    seen = Seen(state.sums[1, 0] / weight, state.sums[2, 0] / weight, 1 / weight)
    whole = state.alike * root[:, None] * state.together.correlations * root
    mean, doubt, scales, wider = believed(seen, whole, sampling, state.together.doubt, recipe, usual)
    used = (state.variances > 0).double()
    return BelievedWeights((mean * used)[None], (doubt * used)[None], scales, 0.0, wider)


class Seen(NamedTuple):
    """What steps have told of all weights (features,): their mean position and gradient, with a variance of noise."""

    position: Tensor
    gradient: Tensor
    noise: float


def believed(
    seen: Seen, curvature: Tensor, sampling: float, doubt: float, recipe: AdditiveRecipe, usual: float
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Means and variances of all weights (features,), the scale of every column, and how many times wider effects of
    single columns are in doubt than by these variances.

    A mean gradient is H (position - weights), with the records' own noise of covariance `sampling` H, that of releases,
    and what is wrong with H times the way that is left. Weights are N(0, tau^2), with one tau for the first wave of a
    number, which is nearly its line, and one for the others; tau as in `shrunk`, by variational Bayes.

    curvature   (features, features), H;  doubt: of every correlation in it
    """
    told = curvature @ seen.position - seen.gradient
    root = curvature.diagonal().clamp(min=0).sqrt()
    noise = sampling * curvature + seen.noise * torch.eye(len(told))
    scales = _commons(Scales.of(recipe, root > 0, usual), told, curvature, noise)
    weights = seen.position  # where steps have led: the way that is left begins there
    correlations = curvature / (root[:, None] * root).clamp(min=1e-300)
    values, axes = torch.linalg.eigh(correlations)
    # What is wrong between two axes is no more than positive curvature allows.
    wrong = torch.minimum(doubt**2 * torch.ones_like(curvature), _allowed(values))
    for turn in range(ROUNDS):
        spread = scales.spread
        way = (axes.mT @ (root * (weights - seen.position))).square() * (turn >= ROUNDS // 2)  # scales are about right
        off = root[:, None] * (axes * (wrong @ way) @ axes.mT) * root
        total = curvature * spread @ curvature + noise + off
        total = total + 1e-12 * total.diagonal().diag()
        gain = spread[:, None] * torch.linalg.solve(total, curvature).mT
        weights = gain @ told
        covariance = spread.diag() - gain @ (curvature * spread)
        doubts = covariance.diagonal().clamp(min=0)
        scales = scales.after(weights.square() + doubts)
    doubts, wider = _by_themselves(curvature, covariance, recipe)
    return weights, doubts, torch.stack([spread[group].max().sqrt() for group in recipe.groups()]), wider


def _by_themselves(curvature: Tensor, covariance: Tensor, recipe: AdditiveRecipe) -> tuple[Tensor, float]:
    """Variances with which weights are drawn by themselves, such that outputs vary as much on average as with this
    covariance; and how many times wider effects of single columns are in doubt.

    Of columns that say the same it is in doubt which of them it is that counts, and hardly what they add together.
    """
    doubts = covariance.diagonal().clamp(min=0).clone()

    def evened(part: slice) -> float:
        own = curvature[part, part]
        wanted, had = (own * covariance[part, part]).sum(), own.diagonal() @ doubts[part]
        share = float((wanted / had.clamp(min=1e-300)).clamp(0, 1))
        doubts[part] *= share
        return share

    for group in recipe.groups():
        evened(group)
    return doubts, 1 / math.sqrt(max(evened(slice(1, len(doubts))), 1e-6))


def _allowed(values: Tensor) -> Tensor:
    """Squares of what may be wrong between axes of such curvatures."""
    least = values.clamp(min=0)
    return ALLOWED**2 * least[:, None] * least


@dataclass(frozen=True)
class Scales:
    """Beliefs about the scales of weights.

    parts    which weights share a scale: two lists, lines and levels, and waves beyond the first
    commons  the scale that all parts of a list have in common
    spread   (features,): prior variances of weights, the inverse mean of 1 / tau^2
    """

    parts: tuple[list[Tensor], list[Tensor]]
    usual: float
    commons: tuple[float, float]
    spread: Tensor

    @classmethod
    def of(cls, recipe: AdditiveRecipe, used: Tensor, usual: float) -> Scales:
        lines, waves = [], []
        for group, width in zip(recipe.groups(), recipe.blocks, strict=True):
            places = torch.arange(group.start, group.stop)
            lines.append(places[:1] if width == NUMBER else places)
            waves.append(places[1:] if width == NUMBER else places[:0])
        spread = torch.full((len(used),), usual**2, dtype=torch.float64)
        spread[0] = 1.0  # a target lies within [-1, 1]: next to nothing is expected of the constant
        parts = tuple([places[used[places]] for places in one if used[places].any()] for one in (lines, waves))
        return cls((parts[0], parts[1]), usual, (usual, usual), spread)

    def after(self, squares: Tensor) -> Scales:
        """Once the mean squares of all weights (features,) are those."""
        spread = self.spread.clone()
        grid = self.usual * torch.logspace(-4, 1.5, 56, dtype=torch.float64)
        commons = list(self.commons)
        for place, parts in enumerate(self.parts):
            if not parts:
                continue
            count = torch.tensor([len(part) for part in parts], dtype=torch.float64)[:, None]
            square = torch.stack([squares[part].sum() for part in parts])[:, None]
            around = _around(grid, grid)  # of every tau, of every common scale
            held = torch.tensor(commons[place], dtype=torch.float64)
            chance = -count * grid.log() - square / (2 * grid.square()) + _around(grid, held[None])[:, 0]
            chance = chance.softmax(1)
            fits = (chance @ around).sum(0) + _around(grid, torch.tensor([self.usual]).double())[:, 0]
            commons[place] = float(grid[fits.argmax()])
            for part, one in zip(parts, chance, strict=True):
                spread[part] = 1 / (one / grid.square()).sum()
        return Scales(self.parts, self.usual, (commons[0], commons[1]), spread)


def _around(tau: Tensor, common: Tensor) -> Tensor:
    """(taus, commons): half a Student's t of three degrees, on a logarithmic grid of tau."""
    ratio = tau[:, None] / common
    return ratio.log() - 2 * (1 + ratio.square()).log()


def _commons(scales: Scales, told: Tensor, curvature: Tensor, noise: Tensor) -> Scales:
    """With the likeliest scales that all lines and all waves have in common, one after the other."""
    usual = torch.tensor([scales.usual], dtype=torch.float64)
    grid = scales.usual * torch.logspace(-2, 1.5, 15, dtype=torch.float64)
    expected = _around(grid, usual)[:, 0]
    for place in (0, 1, 0):
        if not scales.parts[place]:
            continue
        weights = torch.cat(scales.parts[place])
        tried = []
        for tau in grid:
            spread = scales.spread.clone()
            spread[weights] = tau**2
            tried.append(spread)
        chance = torch.stack([_chance(told, curvature * spread @ curvature + noise) for spread in tried]) + expected
        best = int(chance.argmax())
        commons = [float(grid[best]) if one == place else scales.commons[one] for one in (0, 1)]
        scales = Scales(scales.parts, scales.usual, (commons[0], commons[1]), tried[best])
    return scales


def _chance(told: Tensor, total: Tensor) -> Tensor:
    """Logarithm of the density of what was told, with that covariance."""
    root = torch.linalg.cholesky(total + 1e-12 * total.diagonal().diag())
    white = torch.linalg.solve_triangular(root, told[:, None], upper=False)
    found: Tensor = -root.diagonal().log().sum() - white.square().sum() / 2
    return found
