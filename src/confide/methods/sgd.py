"""DP-SGD: the point estimate, with plain steps, momentum or Adam as post-processing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from confide.methods.base import Problem
from confide.models.priors import Gaussian, Prior
from confide.posteriors import Draws
from confide.queries import GradientQuery, Release

DEFAULT_LEARNING_RATES = {"sgd": 0.5, "momentum": 0.1, "adam": 0.01}


@dataclass(frozen=True)
class State:
    """step: releases told so far; first, second: running moments of the optimiser."""

    step: int = 0
    first: Tensor | None = field(default=None, repr=False)
    second: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SGD:
    """Minimise the mean loss plus the prior's share, from noisy clipped sums:

        g = R / b + grad r(theta) / n,        theta' = theta - rate * direction(g).

    R is a release, b the expected batch, n the number of records, r = -log prior. The direction is g itself, its
    momentum average, or Adam's; each reads g alone, so it is post-processing and costs nothing.

    Papers: Song, Chaudhuri and Sarwate, GlobalSIP 2013; Abadi et al., CCS 2016; Kingma and Ba, ICLR 2015 (Adam).

    prior          over all parameters, outside the clip; a Gaussian is weight decay
    optimiser      "sgd", "momentum" or "adam"
    learning_rate  None: 0.5, 0.1 and 0.01 for the three
    momentum       averaging weight of the momentum optimiser
    """

    prior: Prior = field(default_factory=Gaussian)
    optimiser: Literal["sgd", "momentum", "adam"] = "sgd"
    learning_rate: float | None = None
    momentum: float = 0.9
    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        if self.optimiser not in DEFAULT_LEARNING_RATES:
            raise ValueError(f"optimiser={self.optimiser!r}: must be one of {', '.join(DEFAULT_LEARNING_RATES)}")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"learning_rate={rate}: must be a finite number > 0, or None for the optimiser's own")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: must be in [0, 1)")

    def init(self, problem: Problem) -> State:
        zeros = torch.zeros_like(problem.position)
        if self.optimiser == "adam":
            return State(0, zeros, zeros.clone())
        return State(0, zeros if self.optimiser == "momentum" else None)

    def ask(self, problem: Problem, state: State) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: State, release: Release) -> State:
        position, step = problem.position, state.step + 1
        rate = self.learning_rate or DEFAULT_LEARNING_RATES[self.optimiser]
        if self.optimiser == "sgd":
            self.prior.add_energy_gradient_(position, position, factor=-rate / problem.records)
            position.add_(release.sum, alpha=-rate / release.expected_batch)
            return State(step)
        gradient = release.sum / release.expected_batch
        self.prior.add_energy_gradient_(position, gradient, factor=1 / problem.records)
        direction = self._direction(state, gradient, step)
        position.add_(direction, alpha=-rate)
        return State(step, state.first, state.second)

    def posterior(self, problem: Problem, state: State) -> Draws:
        facts = {"point_estimate": True, "optimiser": self.optimiser, "draws": 1}
        draw = problem.position.detach().clone()[None]
        return Draws(problem.module, problem.likelihood, draw, torch.ones(1, dtype=draw.dtype), facts)

    def _direction(self, state: State, gradient: Tensor, step: int) -> Tensor:
        assert state.first is not None
        if self.optimiser == "momentum":
            return state.first.mul_(self.momentum).add_(gradient)
        assert state.second is not None
        state.first.mul_(0.9).add_(gradient, alpha=0.1)
        state.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (state.second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        return state.first / (1 - 0.9**step) / scale
