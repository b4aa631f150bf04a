"""DP-SGHMC: Langevin dynamics with momentum and friction, the release's noise credited."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.methods._chain import Chain, ChainState, add_normal_, energy_gradient_
from confide.methods.base import Problem
from confide.posteriors.draws import Draws
from confide.sources.queries import Release

LARGEST_STEP = 0.1
"""Cap on n eta when the step size follows from the noise: momentum adds up about 1 / friction such steps."""
MEASURED_STEP = 1.0
"""The same times a curvature that is known: a quarter of the 2 (2 - friction) at which chains run away."""


@dataclass(frozen=True)
class SghmcState(ChainState):
    """velocity: the momentum, a function of past releases and of nothing else."""

    velocity: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SGHMC(Chain):
    """Stochastic gradient Hamiltonian Monte Carlo on U = sum_i l_i + r, from noisy clipped sums R with noise s:

        v'     = (1 - alpha) v - eta ( (n/b) R + grad r(theta) ) + N(0, 2 alpha eta - (eta (n/b) s)^2)
        theta' = theta + v'

    targets exp(-U) with v ~ N(0, eta) for small steps. Gradient and noise enter the same vector before anything reads
    it: integrators that split a step let a momentum without noise move theta, and the exact gradient could be solved
    for. Equal noise is reached at eta = 2 alpha (b / (n s))^2, the default step size. Where the release carries more
    noise than that, the chain runs hotter, and `posterior.facts` says by how much.

    Papers: Chen, Fox and Guestrin, ICML 2014; Li, Chen, Liu and Carin, AISTATS 2019 (their eta is n times this one).

    friction    alpha in (0, 1): share of the velocity lost per step
    Other settings are those of every sampler: see Chain.
    """

    friction: float = 0.1
    name: ClassVar[str] = "sghmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction < 1:
            raise Refusal(f"friction={self.friction}: must be in (0, 1)")

    def init(self, problem: Problem) -> SghmcState:
        return self._begun(problem, SghmcState(velocity=torch.zeros_like(problem.position)))

    def tell(self, problem: Problem, state: SghmcState, release: Release) -> SghmcState:
        assert state.velocity is not None
        if state.scouts is not None:
            return self.keep(problem, self.scouted(problem, state, release), 0.0)
        if state.axes is not None:
            return self._told_along(problem, state, state.axes, release)
        eta = self._step_size(problem, state.step + 1)
        gradient = energy_gradient_(self.prior, problem, release.sum, release.expected_batch)
        velocity = state.velocity * (1 - self.friction) - eta * gradient
        needed = 2 * self.friction * eta
        missing = needed - (eta * problem.records / release.expected_batch * release.noise_std) ** 2
        if missing > 1e-9 * needed:
            add_normal_(problem, velocity, math.sqrt(missing))
        problem.position.add_(velocity)
        return self.keep(problem, replace(state, velocity=velocity), eta)

    def _told_along(self, problem: Problem, state: SghmcState, axes: Tensor, release: Release) -> SghmcState:
        """The same step for a program, along axes of one record's information (`_whitened`)."""
        assert state.velocity is not None
        pace = self._pace(problem, state)
        eta = self.friction * pace.at(state.step, self.burn_in_steps(problem)) / problem.records
        eta *= (state.step + 1) ** -self.decay
        scale = problem.records / (release.expected_batch * pace.factor)
        slope, state = self.slope_along(problem, state, axes, release)
        assert state.velocity is not None
        velocity = state.velocity * (1 - self.friction) - eta * slope
        needed = 2 * self.friction * eta
        missing = needed - (eta * scale * release.noise_std) ** 2
        if missing > 1e-9 * needed:
            add_normal_(problem, velocity, math.sqrt(missing))
        moved = self.moved_along(problem, replace(state, velocity=velocity), velocity)
        return self.keep(problem, moved, eta)

    def posterior(self, problem: Problem, state: SghmcState) -> Draws:
        if state.axes is not None:
            return self.given_along(problem, state, {"friction": self.friction})
        eta = self._step_size(problem, 1)
        brought = (eta * problem.records / problem.plan.expected_batch * problem.plan.mechanism.noise_std) ** 2
        facts = {
            "step_size": eta,
            "friction": self.friction,
            "temperature": max(1.0, brought / (2 * self.friction * eta)),
        }
        return self.collected(problem, state, facts)

    def _step_size(self, problem: Problem, step: int) -> float:
        first = self.step_size
        if first is None:
            curvature = problem.curvature
            room = min(LARGEST_STEP, MEASURED_STEP / curvature) if problem.measured else LARGEST_STEP / curvature
            first = room / problem.records
            noise_std = problem.plan.mechanism.noise_std
            if noise_std > 0:
                ratio = problem.plan.expected_batch / (problem.records * noise_std)
                first = min(first, 2 * self.friction * ratio**2)
        return float(first * step**-self.decay)
