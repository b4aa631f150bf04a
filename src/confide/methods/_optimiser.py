"""What the methods that descend share: plain steps, momentum or Adam on a noisy mean gradient, all post-processing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.models.priors import GaussianPrior, Prior
from confide.sources.queries import Release

OptimiserName: TypeAlias = Literal["sgd", "momentum", "adam"]
OPTIMISERS: tuple[OptimiserName, ...] = ("sgd", "momentum", "adam")

LARGEST_STEP = 1.0
"""Cap on rate * C, the length by which one clipped record of mean norm C moves the parameters."""
LARGEST_NOISE = 0.15
"""Cap on the standard deviation that the noise of all steps together leaves in a parameter."""
UNCLIPPED_RATE = 0.1
"""The rate of plain steps where nothing is clipped, so that no bound on the gradients is known."""
ADAM_RATE = 0.01  # its largest: about the length of a step in every parameter, small beside a prior of scale 1
ADAM_WALK = 0.1
"""Adam walks at random by about rate * sqrt(steps) where noise dominates: its cap."""


@dataclass(frozen=True)
class DescentState:
    """step: releases told so far; first, second: running moments of the optimiser."""

    step: int = 0
    first: Tensor | None = field(default=None, repr=False)
    second: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Descent(Method):
    """Settings of every method that descends.

    prior          over all parameters, outside the clip
    optimiser      "sgd", "momentum" or "adam" (Kingma and Ba, ICLR 2015)
    learning_rate  None: by a public rule, see `rate`
    decay          step t has the rate eta_0 / t^decay, eta_0 the learning rate; 0: the same at every step
    momentum       averaging weight of the momentum optimiser
    """

    prior: Prior = field(default_factory=GaussianPrior)
    optimiser: OptimiserName = "sgd"
    learning_rate: float | None = None
    momentum: float = 0.9
    decay: float = 0.0
    may_stop: ClassVar[bool] = True
    follows_clip: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise Refusal(f"optimiser={self.optimiser!r}: must be one of {', '.join(OPTIMISERS)}")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise Refusal(f"learning_rate={rate}: must be a finite number > 0, or None for the optimiser's own")
        if not 0 <= self.decay <= 1:
            raise Refusal(f"decay={self.decay}: must be in [0, 1]; steps that fall faster add up to a finite way")
        if not 0 <= self.momentum < 1:
            raise Refusal(f"momentum={self.momentum}: must be in [0, 1)")

    def rate(self, problem: Problem) -> float:
        """The learning rate of the first step, from the plan alone where none is given.

        T plain steps of rate a leave noise of standard deviation a (s/b) sqrt(T) in every parameter (s the release's
        noise, b the expected batch): the rate is the largest at which that stays below LARGEST_NOISE and a clipped
        gradient moves the parameters by at most LARGEST_STEP; a loss more curved than the logistic one bounds it
        further. Momentum adds up 1 / (1 - momentum) steps. Steps that fall leave the noise of fewer: T is then the
        sum of t^(-2 decay).
        """
        if self.learning_rate is not None:
            return self.learning_rate
        plan = problem.plan
        if self.optimiser == "adam":
            return min(ADAM_RATE, ADAM_WALK / math.sqrt(self._noisy_steps(plan.steps)))
        clip, noise = plan.mechanism.clip, plan.mechanism.noise_std
        rate = LARGEST_STEP / clip if math.isfinite(clip) else UNCLIPPED_RATE
        if problem.curvature > 1:
            rate = min(rate, 0.5 / problem.curvature)
        if noise > 0:
            rate = min(rate, LARGEST_NOISE * plan.expected_batch / (noise * math.sqrt(self._noisy_steps(plan.steps))))
        return rate * (1 - self.momentum) if self.optimiser == "momentum" else rate

    def rate_at(self, problem: Problem, step: int) -> float:
        """The learning rate of step t, counted from 1."""
        return self.rate(problem) / math.pow(step, self.decay)

    def _noisy_steps(self, steps: int) -> float:
        if self.decay == 0:
            return float(steps)
        return float((torch.arange(1, steps + 1, dtype=torch.float64) ** (-2 * self.decay)).sum())

    def start(self, problem: Problem) -> DescentState:
        """The state before the first step."""
        zeros = torch.zeros_like(problem.position)
        if self.optimiser == "adam":
            return DescentState(0, zeros, zeros.clone())
        return DescentState(0, zeros if self.optimiser == "momentum" else None)

    def descend(self, problem: Problem, state: DescentState, gradient: Tensor) -> DescentState:
        """Move the position against `gradient`, which may be used as scratch."""
        step = state.step + 1
        problem.position.add_(self._direction(state, gradient, step), alpha=-self.rate_at(problem, step))
        return DescentState(step, state.first, state.second)

    def descend_on_sum(self, problem: Problem, state: DescentState, release: Release) -> DescentState:
        """A step on R / b + grad r / n, with r = -log prior over every parameter."""
        position, records = problem.position, problem.records
        if self.optimiser != "sgd":
            gradient = release.sum / release.expected_batch
            problem.prior(self.prior).add_energy_gradient_(position, gradient, factor=1 / records)
            return self.descend(problem, state, gradient)
        # Plain steps need no vector of their own.
        rate = self.rate_at(problem, state.step + 1)
        problem.prior(self.prior).add_energy_gradient_(position, position, factor=-rate / records)
        position.add_(release.sum, alpha=-rate / release.expected_batch)
        return DescentState(state.step + 1)

    def _direction(self, state: DescentState, gradient: Tensor, step: int) -> Tensor:
        if self.optimiser == "sgd":
            return gradient
        assert state.first is not None
        if self.optimiser == "momentum":
            return state.first.mul_(self.momentum).add_(gradient)
        assert state.second is not None
        state.first.mul_(0.9).add_(gradient, alpha=0.1)
        state.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (state.second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        return state.first / (1 - 0.9**step) / scale
