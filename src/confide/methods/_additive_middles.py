"""Where the middles of an additive model's features lie, from one release, and what is left unknown of them.

Features are taken to be centred. Of hundreds of columns that are nearly all zero a histogram does not tell where they
lie, and means that are each a little off are a long vector together. Along it all outputs move alike, the curvature is
its square times the records, and steps that are divided by variances alone throw outputs from one side of the records
to the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.mechanism.clipping import Recordwise
from confide.methods._additive_state import AdditiveState
from confide.models.additive import AdditiveNetwork, AdditiveRecipe
from confide.sources.queries import StatisticQuery

LEAST_COLUMNS = 16
"""Below which features' means are not asked for: few columns are not far off together, and each release counts."""
LEGIBLE_MIDDLE = 0.1
"""Noise in what all features' means have in common up to which they are asked for."""
USUAL_OFFSET = 0.3
"""Deviation of what the features of one kind are off by in common."""


@dataclass(frozen=True)
class Middles:
    """Of all features before their amplitudes: where they lie, how much they vary at most, and variances of what is
    left unknown of where they lie."""

    centres: Tensor
    variances: Tensor
    doubts: Tensor


def asked(recipe: AdditiveRecipe, budget: float) -> bool:
    """Whether means are worth a release of that n mu."""
    return len(recipe.blocks) >= LEAST_COLUMNS and budget * LEGIBLE_MIDDLE >= math.sqrt(2)


def longest(recipe: AdditiveRecipe, centres: Tensor, amplitudes: Tensor) -> float:
    """The norm of a record's features without the constant, at most: cosines lie within 1, and of one column's
    categories at most one is there."""
    waves = slice(1, 1 + len(recipe.numbers) * recipe.waves)
    square = float((amplitudes[waves] * (1 + centres[waves].abs())).square().sum())
    for group in (one for one, width in zip(recipe.groups(), recipe.blocks, strict=True) if width):
        shares, weight = centres[group], float(amplitudes[group].max())
        none = float(shares.square().sum())
        square += weight**2 * max(none, none + 1 - 2 * float(shares.min()))
    return math.sqrt(square)


def means(network: AdditiveNetwork, clip: float) -> StatisticQuery:
    """Of one record: its features without the constant, in norm the clip at most."""
    features = network.features
    most = longest(network.recipe, features.centres.double(), features.amplitudes.double())
    scale = clip / max(most, 1e-300)

    def answer(x: Tensor, y: Tensor) -> Tensor:
        rows: Tensor = features(x.flatten(1))[:, 1:].double() * scale
        return rows

    return StatisticQuery(Recordwise(answer, network), network.recipe.features - 1)


def middles_of(recipe: AdditiveRecipe, told: Tensor, noise: float, state: AdditiveState, amplitudes: Tensor) -> Middles:
    """From a release over records in units of its clip, with that noise in every number.

    amplitudes   of all features as they were asked, zero where they are not used
    """
    most = longest(recipe, state.centres, amplitudes)
    used = amplitudes[1:] > 0
    unit = torch.where(used, most / amplitudes[1:].clamp(min=1e-300), torch.zeros_like(amplitudes[1:]))
    off, doubts = torch.zeros_like(state.centres), torch.zeros_like(state.centres)
    for kind in _kinds(recipe):
        part = kind[used[kind - 1]]
        if len(part):
            off[part], doubts[part] = _believed(told.double()[part - 1] * unit[part - 1], noise * unit[part - 1])
    lower, upper = torch.full_like(off, -1.0), torch.ones_like(off)
    lower[1 + len(recipe.numbers) * recipe.waves :] = 0.0
    centres = torch.maximum(torch.minimum(state.centres + off, upper), lower)
    centres[0] = 0.0
    return Middles(centres, (upper - centres) * (centres - lower) + doubts, doubts)


def _kinds(recipe: AdditiveRecipe) -> list[Tensor]:
    """Features that have something in common: waves of one order of all numbers, and all categories."""
    numbers, waves = len(recipe.numbers), recipe.waves
    orders = 1 + torch.arange(numbers * waves).view(numbers, waves).T
    return [*orders, torch.arange(1 + numbers * waves, recipe.features)]


def _believed(found: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Values that lie around one in common as far as noise allows, and variances of what is left unknown."""
    square, count = noise.square(), len(found)
    between = (found.var(correction=0) - square.mean()).clamp(min=0) if count > 1 else torch.tensor(USUAL_OFFSET**2)
    together = (between + square.mean()) / count
    common = found.mean() * USUAL_OFFSET**2 / (USUAL_OFFSET**2 + together)
    value = common + between / (between + square).clamp(min=1e-300) * (found - common)
    # How far values differ is itself known only as well as so many of them tell.
    most = between + square.mean() * math.sqrt(2 / count)
    return value, most * square / (most + square).clamp(min=1e-300)


def loose_curvature(curvature: Tensor, variances: Tensor, doubts: Tensor, divisor: Tensor) -> float:
    """The curvature along what is unknown of the features' middles, at most, in units of what steps are divided by.

    Of n d d' for a vector d of such variances: the mean of d' (n / D) d, the only curvature that it has.

    curvature, divisor   (outputs, features);  variances, doubts: of all features with their amplitudes
    """
    each = curvature[:, :1] / variances[0]  # the constant has variance 1 and is where it is said to be
    return float((each * doubts / divisor).sum(1).max())
