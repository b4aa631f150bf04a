"""DP-SGNHT: a thermostat that learns, from public quantities, how much friction the noise needs."""

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
"""Cap on n h^2 when the step size follows from the noise, as for the other sampler with momentum."""

LARGEST_HEAT = 3.0
"""Cap on |v|^2 / d - 1 as the thermostat sees it. A start far from the mode is hot for a moment; without the cap the
thermostat would rise beyond what it can lose again in the whole run. In equilibrium the cap is never reached."""


@dataclass(frozen=True)
class SgnhtState(ChainState):
    """velocity and thermostat: functions of past releases and of nothing else."""

    velocity: Tensor | None = field(default=None, repr=False)
    thermostat: float = 0.0


@dataclass(frozen=True)
class SGNHT(Chain):
    """The stochastic gradient Nose-Hoover thermostat on U = sum_i l_i + r, from noisy clipped sums R with noise s:

        v'     = (1 - h xi) v - h ( (n/b) R + grad r(theta) ) + N(0, 2 A h - (h (n/b) s)^2)
        theta' = theta + h v'
        xi'    = xi + h ( (1 - h xi / 2) |v'|^2 / d - 1 )

    The thermostat xi rises until the velocities have unit temperature, whatever noise there is beyond 2 A h: that of
    batches, and that of a release which carries more than needed. So the temperature stays 1 where other samplers run
    hot, as long as the noise is the same in all directions. xi is a function of v', so it costs nothing. Steps of
    friction h xi leave velocities of variance 1 / (1 - h xi / 2) at unit temperature of theta, hence the factor;
    without it, theta would be that much too cold.

    Papers: Ding et al., NeurIPS 2014; Li, Chen, Liu and Carin, AISTATS 2019.

    diffusion   A > 0, the friction that the thermostat starts from
    step_size   h; None: 2 A (b / (n s))^2 within the range where the integrator is stable
    Other settings are those of every sampler: see Chain.
    """

    diffusion: float = 10.0
    name: ClassVar[str] = "sgnht"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.diffusion) and self.diffusion > 0):
            raise Refusal(f"diffusion={self.diffusion}: must be a finite number > 0")

    def init(self, problem: Problem) -> SgnhtState:
        return SgnhtState(velocity=torch.zeros_like(problem.position), thermostat=self.diffusion)

    def tell(self, problem: Problem, state: SgnhtState, release: Release) -> SgnhtState:
        assert state.velocity is not None
        h = self._step_size(problem, state.step + 1)
        gradient = energy_gradient_(self.prior, problem, release.sum, release.expected_batch)
        velocity = state.velocity * (1 - h * state.thermostat) - h * gradient
        needed = 2 * self.diffusion * h
        missing = needed - (h * problem.records / release.expected_batch * release.noise_std) ** 2
        if missing > 1e-9 * needed:
            add_normal_(problem, velocity, math.sqrt(missing))
        problem.position.add_(velocity, alpha=h)
        heat = min(velocity.square().mean().item() * (1 - h * state.thermostat / 2) - 1, LARGEST_HEAT)
        thermostat = state.thermostat + h * heat
        # Beyond 1/h the friction would reverse velocities; the bound is public, so clamping costs nothing.
        thermostat = min(max(thermostat, 0.0), 1 / h)
        return self.keep(problem, replace(state, velocity=velocity, thermostat=thermostat), h)

    def posterior(self, problem: Problem, state: SgnhtState) -> Draws:
        facts = {
            "step_size": self._step_size(problem, 1),
            "diffusion": self.diffusion,
            "temperature": 1.0,
            "thermostat": state.thermostat,
        }
        return self.collected(problem, state, facts)

    def _step_size(self, problem: Problem, step: int) -> float:
        first = self.step_size
        if first is None:
            first = min(math.sqrt(LARGEST_STEP / (problem.records * problem.curvature)), 0.5 / self.diffusion)
            noise_std = problem.plan.mechanism.noise_std
            if noise_std > 0:
                ratio = problem.plan.expected_batch / (problem.records * noise_std)
                first = min(first, 2 * self.diffusion * ratio**2)
        return float(first * step**-self.decay)
