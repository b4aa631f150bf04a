"""DP-SGD: the point estimate, with plain steps, momentum or Adam as post-processing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods._optimiser import Descent, DescentState
from confide.methods.base import Problem
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Release


@dataclass(frozen=True)
class SgdState(DescentState):
    """average: running mean of the positions of the last steps, where they are averaged."""

    average: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SGD(Descent):
    """Minimise the mean loss plus the prior's share, from noisy clipped sums:

        g = R / b + grad r(theta) / n,        theta' = theta - rate * direction(g).

    R is a release, b the expected batch, n the number of records, r = -log prior. The direction is g itself, its
    momentum average, or Adam's; each reads g alone, so it is post-processing and costs nothing.

    Papers: Song, Chaudhuri and Sarwate, GlobalSIP 2013; Abadi et al., CCS 2016; Kingma and Ba, ICLR 2015 (Adam);
    Polyak and Juditsky, SIAM Journal on Control and Optimization 1992 (averaging).

    A Gaussian prior is weight decay.

    averaging   share of the steps, counted from the end, whose positions are averaged into the estimate: noise that
                the last step alone would keep is averaged out. 0 is the last position
    Other settings are those of every method that descends: see Descent.
    """

    averaging: float = 0.0
    name: ClassVar[str] = "sgd"
    noise_in_width: ClassVar[str] = "no width: a point"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.averaging <= 1:
            raise Refusal(f"averaging={self.averaging}: must be a share of the steps in [0, 1]")

    def init(self, problem: Problem) -> SgdState:
        start = self.start(problem)
        average = torch.zeros_like(problem.position) if self.averaging > 0 else None
        return SgdState(start.step, start.first, start.second, average)

    def ask(self, problem: Problem, state: SgdState) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: SgdState, release: Release) -> SgdState:
        moved = self.descend_on_sum(problem, state, release)
        counted = moved.step - self._left_out(problem)
        if state.average is not None and counted > 0:
            state.average.lerp_(problem.position, 1 / counted)
        return SgdState(moved.step, moved.first, moved.second, state.average)

    def _left_out(self, problem: Problem) -> int:
        """Steps before the first whose position counts; the last one always does."""
        steps = problem.plan.steps
        return min(int((1 - self.averaging) * steps), steps - 1)

    def posterior(self, problem: Problem, state: SgdState) -> Draws:
        facts = {
            "point_estimate": True,
            "optimiser": self.optimiser,
            "learning_rate": self.rate(problem),
            "averaging": self.averaging,
            "draws": 1,
        }
        estimate = problem.position if state.average is None else state.average
        draw = estimate.detach().clone()[None]
        return Draws(problem.module, problem.likelihood, draw, torch.ones(1, dtype=draw.dtype), facts)
