"""DP-SGLD: stochastic gradient Langevin dynamics whose privacy noise is the Langevin noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from confide.errors import Refusal
from confide.methods._chain import Chain, ChainState, add_normal_
from confide.methods.base import Problem
from confide.posteriors.draws import Draws
from confide.sources.queries import Release

LARGEST_LEARNING_RATE = 1.0
"""Cap on n eta / 2 times the curvature of the loss, when the step size follows from the noise. n eta / 2 is the step on
the mean gradient; beyond the cap the chain leaves the neighbourhood in which a clipped gradient points downhill."""


@dataclass(frozen=True)
class SGLD(Chain):
    """Langevin dynamics on the negative log posterior U = sum_i l_i + r, from noisy clipped sums.

    A release R has mean sum over the batch of clip_C(grad l_i) and noise of standard deviation s. With n records, an
    expected batch b and step size eta,

        theta' = theta - (eta/2) ( (n/b) R + grad r(theta) ) + N(0, eta - ((eta/2)(n/b) s)^2).

    The release brings noise of standard deviation (eta/2)(n/b) s already; only what is missing to eta is topped up,
    so noise is never added twice. The stationary law is exp(-U) for small steps (temperature 1). Where the release
    carries more noise than eta, nothing is added and the chain runs hotter; `posterior.facts` states by how much.

    Equal noise is reached at eta = (2 b / (n s))^2, the default step size: all Langevin noise is privacy noise.

    convention="posterior" is the above. convention="paper" is the update printed by Zhang, Bu, Chen and Long (2021)
    and by Li, Chen, Liu and Carin (2019): drift eta instead of eta/2 at the same noise, which samples exp(-2U),
    temperature 1/2; it is here to reproduce their numbers.

    Papers: Welling and Teh, ICML 2011; Wang, Fienberg and Smola, ICML 2015; Li, Chen, Liu and Carin, AISTATS 2019;
    Zhang, Bu, Chen and Long, arXiv:2107.08461, 2021.

    Settings beside `convention` are those of every sampler: see Chain.
    """

    convention: Literal["posterior", "paper"] = "posterior"
    name: ClassVar[str] = "sgld"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convention not in ("posterior", "paper"):
            raise Refusal(f"convention={self.convention!r}: must be 'posterior' or 'paper'")

    def init(self, problem: Problem) -> ChainState:
        return self._begun(problem, ChainState()) if self.convention == "posterior" else ChainState()

    def tell(self, problem: Problem, state: ChainState, release: Release) -> ChainState:
        if state.scouts is not None:
            return self.keep(problem, self.scouted(problem, state, release), 0.0)
        if state.axes is not None:
            return self._told_along(problem, state, state.axes, release)
        eta = self._step_size(problem, state.step + 1)
        drift = self._drift(eta)
        scale = drift * problem.records / release.expected_batch
        position = problem.position
        problem.prior(self.prior).add_energy_gradient_(position, position, factor=-drift)
        position.add_(release.sum, alpha=-scale)
        missing = eta - (scale * release.noise_std) ** 2
        if missing > 1e-9 * eta:
            add_normal_(problem, position, math.sqrt(missing))
        return self.keep(problem, state, eta)

    def _told_along(self, problem: Problem, state: ChainState, axes: Tensor, release: Release) -> ChainState:
        """The same step for a program, along axes of one record's information (`_whitened`)."""
        pace = self._pace(problem, state)
        eta = 2 * pace.at(state.step, self.burn_in_steps(problem), state.haste) / problem.records
        eta *= (state.step + 1) ** -self.decay
        scale = problem.records / (release.expected_batch * pace.factor)
        slope, state = self.slope_along(problem, state, axes, release)
        step = slope.mul_(-eta / 2)
        missing = eta - (eta / 2 * scale * release.noise_std) ** 2
        if missing > 1e-9 * eta:
            add_normal_(problem, step, math.sqrt(missing))
        return self.keep(problem, self.moved_along(problem, state, step), eta)

    def posterior(self, problem: Problem, state: ChainState) -> Draws:
        if state.axes is not None:
            return self.given_along(problem, state, {"convention": self.convention})
        facts = {
            "step_size": self._step_size(problem, 1),
            "temperature": self.temperature(problem),
            "convention": self.convention,
        }
        return self.collected(problem, state, facts)

    def temperature(self, problem: Problem) -> float:
        """Largest temperature at which the chain ran: 1 is the posterior itself. Clipping and batches add to it."""
        eta = self._step_size(problem, 1)
        drift = self._drift(eta)
        noise = drift * problem.records / problem.plan.expected_batch * problem.plan.mechanism.noise_std
        return max(eta, noise**2) / (2 * drift)

    def _drift(self, eta: float) -> float:
        return eta / 2 if self.convention == "posterior" else eta

    def _step_size(self, problem: Problem, step: int) -> float:
        first = self.step_size
        if first is None:
            first = 2 * LARGEST_LEARNING_RATE / (problem.records * problem.curvature)
            noise_std = problem.plan.mechanism.noise_std
            if noise_std > 0:
                factor = 2.0 if self.convention == "posterior" else 1.0
                first = min(first, (factor * problem.plan.expected_batch / (problem.records * noise_std)) ** 2)
        return float(first * step**-self.decay)
