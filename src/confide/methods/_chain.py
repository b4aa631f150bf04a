"""What the samplers share: a schedule of steps, burn-in, thinning, and the draws that were kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from confide.devices import HOST, normals
from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.models.priors import GaussianPrior, Prior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery

MOST_DRAWS = 100  # by default: predictions cost in proportion, and draws of one chain resemble each other


@dataclass(frozen=True)
class ChainState:
    """step: releases told so far; draws: kept positions; weights: the step size at each."""

    step: int = 0
    draws: tuple[Tensor, ...] = field(default=(), repr=False)
    weights: tuple[float, ...] = ()


StateType = TypeVar("StateType", bound=ChainState)


@dataclass(frozen=True)
class Chain(Method):
    """Settings of every sampler.

    prior       over all parameters, outside the clip
    step_size   at the first step; None: such that the release's noise is exactly what the sampler needs
    decay       the step at time t is step_size * t^(-decay); 1/3 in Li et al. (2019), 0 for a fixed step
    burn_in     fraction of the steps that is thrown away
    thinning    keep one in so many positions after burn-in; None: as few as give at most 100 draws
    """

    prior: Prior = field(default_factory=GaussianPrior)
    step_size: float | None = None
    decay: float = 0.0
    burn_in: float = 0.5
    thinning: int | None = None
    may_stop: ClassVar[bool] = True
    noise_in_width: ClassVar[str] = "counted, as far as the chain has mixed"
    follows_clip: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.step_size is not None and not (math.isfinite(self.step_size) and self.step_size > 0):
            raise Refusal(f"step_size={self.step_size}: must be a finite number > 0, or None to follow the noise")
        if not 0 <= self.decay < 1:
            raise Refusal(f"decay={self.decay}: must be in [0, 1)")
        if not 0 <= self.burn_in < 1:
            raise Refusal(f"burn_in={self.burn_in}: must be a fraction in [0, 1)")
        if self.thinning is not None and self.thinning < 1:
            raise Refusal(f"thinning={self.thinning}: must be at least 1")

    def ask(self, problem: Problem, state: Any) -> GradientQuery:
        return problem.gradient_query

    def keep(self, problem: Problem, state: StateType, eta: float) -> StateType:
        """Count the step, and keep the position if it is one of the draws. Decreasing steps weigh draws by eta."""
        step, steps = state.step + 1, problem.plan.steps
        # Counted from the end, so that the last position is always kept.
        if step <= self._burn_in(steps) or (steps - step) % self._thinning(steps):
            return replace(state, step=step)
        draws = (*state.draws, problem.position.to(HOST, copy=True))  # on the host, where there is room for many
        return replace(state, step=step, draws=draws, weights=(*state.weights, eta))

    def draws_of(self, steps: int) -> int:
        """How many draws a chain of so many steps keeps."""
        return (steps - self._burn_in(steps) - 1) // self._thinning(steps) + 1

    def burn_in_steps(self, problem: Problem) -> int:
        return self._burn_in(problem.plan.steps)

    def _burn_in(self, steps: int) -> int:
        return min(int(self.burn_in * steps), steps - 1)

    def _thinning(self, steps: int) -> int:
        return self.thinning or math.ceil((steps - self._burn_in(steps)) / MOST_DRAWS)

    def collected(self, problem: Problem, state: ChainState, facts: dict[str, Any]) -> Draws:
        """The posterior of the kept draws."""
        weights = torch.tensor(state.weights, dtype=problem.position.dtype)
        about = {**facts, "draws": len(state.draws), "burn_in_steps": self.burn_in_steps(problem)}
        draws = torch.stack(state.draws)
        return Draws(problem.module, problem.likelihood, draws, weights / weights.sum(), about)


def energy_gradient_(prior: Prior, problem: Problem, total: Tensor, expected_batch: float) -> Tensor:
    """(n/b) R + grad r(theta): the noisy gradient of the negative log posterior."""
    gradient = total * (problem.records / expected_batch)
    return problem.prior(prior).add_energy_gradient_(problem.position, gradient)


def add_normal_(problem: Problem, out: Tensor, std: float | Tensor) -> Tensor:
    """Noise from the method's own stream, for what the release's noise leaves missing."""
    noise = normals(out.shape, problem.generator, out.dtype, out.device)
    return out.add_(noise.mul_(std))
