"""DP-SGD: the point estimate, with plain steps, momentum or Adam as post-processing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from confide.methods._optimiser import Descent, DescentState
from confide.methods.base import Problem
from confide.posteriors import Draws
from confide.queries import GradientQuery, Release

State = DescentState


@dataclass(frozen=True)
class SGD(Descent):
    """Minimise the mean loss plus the prior's share, from noisy clipped sums:

        g = R / b + grad r(theta) / n,        theta' = theta - rate * direction(g).

    R is a release, b the expected batch, n the number of records, r = -log prior. The direction is g itself, its
    momentum average, or Adam's; each reads g alone, so it is post-processing and costs nothing.

    Papers: Song, Chaudhuri and Sarwate, GlobalSIP 2013; Abadi et al., CCS 2016; Kingma and Ba, ICLR 2015 (Adam).

    A Gaussian prior is weight decay. Settings are those of every method that descends: see Descent.
    """

    name: ClassVar[str] = "sgd"

    def init(self, problem: Problem) -> State:
        return self.start(problem)

    def ask(self, problem: Problem, state: State) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: State, release: Release) -> State:
        return self.descend_on_sum(problem, state, release)

    def posterior(self, problem: Problem, state: State) -> Draws:
        facts = {"point_estimate": True, "optimiser": self.optimiser, "learning_rate": self.rate(problem), "draws": 1}
        draw = problem.position.detach().clone()[None]
        return Draws(problem.module, problem.likelihood, draw, torch.ones(1, dtype=draw.dtype), facts)
