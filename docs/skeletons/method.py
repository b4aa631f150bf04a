"""DP averaging: noisy gradient steps, and the average of the second half of the path.

Copy this file to src/confide/methods/, under a name that begins with a letter. Nothing else needs an edit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.models.priors import GaussianPrior, Prior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Release


@dataclass(frozen=True)
class State:
    """step: releases told so far; average: mean position of the second half."""

    step: int = 0
    average: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Averaging(Method):
    """theta' = theta - rate ( R / b + grad r(theta) / n ), and the mean of theta over the second half of the steps.

    R is a release, b the expected batch, n the number of records, r = -log prior. The update reads releases and public
    numbers alone, so it is post-processing and costs nothing.

    Paper: Polyak and Juditsky, SIAM Journal on Control and Optimization, 1992.

    prior          over all parameters, outside the clip
    learning_rate  step on the mean gradient
    """

    prior: Prior = field(default_factory=GaussianPrior)
    learning_rate: float = 0.5
    name: ClassVar[str] = "averaging"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise Refusal(f"learning_rate={self.learning_rate}: must be a finite number > 0")

    def init(self, problem: Problem) -> State:
        return State()

    def ask(self, problem: Problem, state: State) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: State, release: Release) -> State:
        position, step = problem.position, state.step + 1
        self.prior.add_energy_gradient_(position, position, factor=-self.learning_rate / problem.records)
        position.add_(release.sum, alpha=-self.learning_rate / release.expected_batch)
        kept = step - problem.plan.steps // 2
        if kept < 1:
            return State(step)
        average = torch.zeros_like(position) if state.average is None else state.average
        return State(step, average + (position - average) / kept)

    def posterior(self, problem: Problem, state: State) -> Draws:
        assert state.average is not None  # a plan has at least one step, and the last one is always kept
        weights = torch.ones(1, dtype=state.average.dtype)
        facts = {"point_estimate": True, "draws": 1}
        return Draws(problem.module, problem.likelihood, state.average[None], weights, facts)
