"""How a sampler moves on a program: in units of what one record says, at a pace that follows from the plan alone.

At a position u let F be the information of one record about u by the program itself (`models.program_sharpness`:
made-up inputs, no record), P the curvature of the prior, and A = F + P / n. With A^-1 = R R^T a move is u' = u + R d,
and what is asked of a record is the gradient in d at d = 0, R^T grad l, whose curvature is about one in every
direction. So one step size suits all parameters, and a clip cuts all of them alike: the plan's clip is the bound, and
the loss is scaled so that it is as wide as noise allows. R is looked for anew on the way, and stays when draws begin.

*Clipping.* Scores are nought on average at the truth; clipped ones are not where their law is skewed, and n records
make many deviations of a small shift. What a clip takes on average by the program's own law is put back (Fisher
consistency: Hampel et al., Robust Statistics, 1986).

*Pace.* With steps of a / n on the sum, batches of b out of n and K steps that count, a chain on a Gaussian posterior is

    h(a) = ( max(1, a p) + a (n - b) / (2 b) ) / (1 - a / 2),       p = n z^2 C^2 / (2 b^2),

times too wide in variance (privacy noise beyond the sampler's own, batches, steps of finite size). It is worth K a / 2
draws, whose scatter is too narrow by a factor of 1 - 2 / (K a), and whose mean is off by as much. Intervals hold what
they should where the two make up for each other, h (1 - 4 / (K a)) = 1: the pace is the a that solves this. It goes to
zero for long chains.

Positions are released already, so all of this is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.devices import HOST
from confide.layers.programs import WhitenedProgram
from confide.methods._trace import LocalPrior
from confide.methods.base import Problem
from confide.models.priors import Prior
from confide.models.program_sharpness import clipped_score, information
from confide.models.programs import Program, ProgramLikelihood
from confide.sources.queries import GradientQuery, Loss

MOST_PARAMETERS = 256
"""A matrix of their information is made and inverted."""
FASTEST = 0.3
"""Of the pace: chains of few steps would be faster than where the posterior is a Gaussian at all."""
LEAST_CLIP = 2.0
"""In roots of the number of parameters, which a record's gradient has on average: a narrower one takes too much."""
UNCUT = 50.0
"""In the same: a clip beyond takes next to nothing, and what that is need not be looked for."""
LOOKS = 8
"""How often R is looked for before draws begin."""
FARTHEST_MOVE = 2.0
"""Of a step, in deviations of the prior: where a record seems to say next to nothing, axes are long."""


@dataclass(frozen=True)
class Scaled:
    """A loss times a factor: gradients of another length under the same clip, which is another clip for the loss."""

    loss: Loss
    factor: float

    def __call__(self, output: Any, y: Tensor) -> Tensor:
        return self.loss(output, y) * self.factor


@dataclass(frozen=True)
class Pace:
    """rate: a, the step on the mean gradient; clip: of the loss, along R; factor: what the loss is multiplied by."""

    rate: float
    clip: float
    factor: float

    def at(self, step: int, burn_in: int) -> float:
        """The rate of a step: while nothing counts yet, chains may be as hot as they are fast."""
        return FASTEST if 2 * step < burn_in else self.rate


def pace_of(problem: Problem, counted: int) -> Pace:
    """counted: steps after burn-in."""
    plan, size = problem.plan, problem.position.numel()
    records, batch, mechanism = plan.records, plan.expected_batch, plan.mechanism
    least = LEAST_CLIP * math.sqrt(size)
    noise = mechanism.noise_std / mechanism.clip if mechanism.noise_std > 0 else 0.0
    heat = records * (noise * least) ** 2 / (2 * batch**2)
    rate = _rate(heat, max(0.0, records / batch - 1) / 2, counted)
    if noise == 0:
        return Pace(rate, mechanism.clip, 1.0)
    clip = max(least, batch * math.sqrt(2 / (rate * records)) / noise)
    return Pace(rate, clip, mechanism.clip / clip)


def _rate(heat: float, batches: float, counted: int) -> float:
    def spare(rate: float) -> float:
        wide = (max(1.0, rate * heat) + rate * batches) / (1 - rate / 2)
        return wide * (1 - 4 / (counted * rate)) - 1

    if spare(FASTEST) <= 0:
        return FASTEST
    low, high = 0.0, FASTEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spare(middle) > 0 else (middle, high)
    return high


def looks(burn_in: int) -> frozenset[int]:
    """Steps after which R is looked for again: the last one well before draws begin."""
    return frozenset(burn_in * look // (LOOKS + 1) for look in range(1, LOOKS + 1)) - {0}


def axes_of(problem: Problem, own: Prior) -> tuple[Tensor, Tensor] | None:
    """R at the present position, and how far a step may go; None where the program does not say what a record tells.

    None for networks as well, whose steps do not follow from this.
    """
    program, likelihood, position = problem.module, problem.likelihood, problem.position
    if not isinstance(program, Program) or not isinstance(likelihood, ProgramLikelihood) or likelihood.form is None:
        return None
    if position.numel() > MOST_PARAMETERS or position.device != HOST:
        return None
    prior = problem.prior(own)
    try:
        found = information(program, position.detach(), *likelihood.form)
        if found is None:
            return None
        bend = LocalPrior.at(prior.energy, position.detach().double()).precision
        root = torch.linalg.cholesky(found + bend / problem.records)
        axes, reach = torch.linalg.inv(root).mT, FARTHEST_MOVE / bend.diagonal().sqrt()
    except Exception:  # whatever the program does not like here: its own errors come up in the rehearsal
        return None
    good = bool(torch.isfinite(axes).all() and torch.isfinite(reach).all())
    return (axes.to(position.dtype), reach.to(position.dtype)) if good else None


def query_of(problem: Problem, axes: Tensor, pace: Pace) -> GradientQuery:
    """The gradient in d at d = 0."""
    asked = problem.whitened
    assert isinstance(asked, WhitenedProgram)
    asked.axes.copy_(axes)
    return GradientQuery(asked, Scaled(problem.likelihood.loss, pace.factor))


def slope_of(problem: Problem, own: Prior, axes: Tensor, total: Tensor, pace: Pace, expected_batch: float) -> Tensor:
    """R^T grad U: of the records by what was released and what the clip took of it; of the prior as it is."""
    slope = problem.prior(own).add_energy_gradient_(problem.position, torch.zeros_like(problem.position))
    found = total * (problem.records / (expected_batch * pace.factor)) + axes.mT @ slope
    taken = taken_by_clip(problem, axes, pace)
    return found if taken is None else found.add_(taken.to(found.dtype), alpha=problem.records)


def taken_by_clip(problem: Problem, axes: Tensor, pace: Pace) -> Tensor | None:
    """Of a record's gradient along R, on average; None where the program does not tell."""
    program, likelihood = problem.module, problem.likelihood
    assert isinstance(program, Program)
    assert isinstance(likelihood, ProgramLikelihood)
    if likelihood.form is None or pace.clip > UNCUT * math.sqrt(problem.position.numel()):
        return None
    return clipped_score(program, problem.position.detach(), likelihood.form, axes, pace.clip)


def move_(problem: Problem, axes: Tensor, reach: Tensor, step: Tensor) -> None:
    """By R d, no further than a step may go."""
    move = axes @ step
    beyond = float((move / reach).abs().max())
    if not beyond <= 1:
        move = move / beyond if math.isfinite(beyond) else torch.zeros_like(move)
    problem.position.add_(move)
