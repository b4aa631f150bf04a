"""What the additive method knows while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from confide.methods._additive_levels import LEAST_WEIGHT


@dataclass(frozen=True)
class Together:
    """correlations   of all features (features, features);  doubt: deviation of each of them"""

    correlations: Tensor
    doubt: float


@dataclass(frozen=True)
class AdditiveState:
    """Functions of releases alone.

    gathered    sums of the present phase of counting
    heights, centres, variances, answers    the scale, see `Scale`
    unit        by which features are multiplied, so that the plan's clip is the one that is wanted
    start       where the constant of every output started, with the standard deviation of what it was read off
    velocity    of the weights, in units of features that are not multiplied
    anchor      where weights are held, from their origin
    sums        of what the last steps have told of every weight, see `told`
    deviation   of the target around the network, for numbers
    before      position and gradient of the step before, for the curvature along the way
    first       way from the origin of the first step, its gradient and the variance of its noise
    sharpest    curvature of the two steps before in units of the assumed one, at most
    waves_alike (numbers, waves, waves): correlations of every number's waves
    alike       the largest curvature so far that is no noise: how many columns move together, about
    together    which columns move together, where it was asked
    steepest    the sharpest curvature that any way had a part in
    loose       (features,): variances of what is unknown of the features' middles, where they were asked for
    looked      deviation that the first look at residuals found
    tails       a deviation that residuals have at least, as their tails at the first look tell
    line        from what was learnt to the target, as the last look tells
    doubt       of the logarithm of the deviation that the first look found
    stated      noise scale of a number that intervals are made with, once the last look has told it
    """

    step: int
    heights: Tensor = field(repr=False)
    centres: Tensor = field(repr=False)
    variances: Tensor = field(repr=False)
    answers: Tensor = field(repr=False)
    unit: float
    start: Tensor
    start_doubt: float
    deviation: float
    velocity: Tensor = field(repr=False)
    anchor: Tensor = field(repr=False)
    sums: Tensor = field(repr=False)
    waves_alike: Tensor = field(repr=False)
    before: tuple[Tensor, ...] = field(default=(), repr=False)
    first: tuple[Tensor, ...] = field(default=(), repr=False)
    sharpest: tuple[float, ...] = ()
    alike: float = 1.0
    together: Together | None = field(default=None, repr=False)
    steepest: float = 1.0
    gathered: Tensor | None = field(default=None, repr=False)
    loose: Tensor | None = field(default=None, repr=False)
    looked: float = math.inf
    tails: float = 0.0
    line: tuple[float, float] = (0.0, 1.0)
    doubt: float = 1.0
    stated: float = math.nan


def origin_of(state: AdditiveState) -> Tensor:
    """Where weights were before the first step: (outputs, features), zero but for the constants."""
    origin = torch.zeros_like(state.velocity)
    origin[:, 0] = state.start
    return origin


def reached_by(state: AdditiveState) -> Tensor:
    """Mean position of the steps that count."""
    return state.sums[1] / state.sums[0].clamp(min=LEAST_WEIGHT) + origin_of(state)


def spread_of(state: AdditiveState) -> Tensor:
    """Variances of the outputs where the steps that count were taken."""
    reached = state.sums[1] / state.sums[0].clamp(min=LEAST_WEIGHT)
    return (state.variances * reached.square())[:, 1:].sum(1)


def held_at(state: AdditiveState, mean: Tensor, counted: bool) -> AdditiveState:
    """The state with weights at rest there; what steps have told so far counts at the end, or does not."""
    sums = state.sums if counted else torch.zeros_like(state.sums)
    still = torch.zeros_like(state.velocity)
    return replace(state, anchor=mean - origin_of(state), velocity=still, before=(), sharpest=(), sums=sums)
