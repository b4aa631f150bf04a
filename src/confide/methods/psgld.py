"""DP-pSGLD: Langevin dynamics with a diagonal preconditioner built from noisy gradients only."""

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

LARGEST_LEARNING_RATE = 0.01
"""n eta / 2 when no step size is given: preconditioned gradients have entries of about one, as in Adam."""


@dataclass(frozen=True)
class PsgldState(ChainState):
    """second: running mean of squared noisy gradients; hottest: largest temperature of any coordinate so far."""

    second: Tensor | None = field(default=None, repr=False)
    hottest: float = 1.0


@dataclass(frozen=True)
class PSGLD(Chain):
    """Preconditioned Langevin dynamics on U = sum_i l_i + r, from noisy clipped sums R with noise s:

        G      = 1 / (floor + sqrt(V)),             V' = beta V + (1 - beta) (R/b)^2
        theta' = theta - (eta/2) G ( (n/b) R + grad r(theta) ) + N(0, eta G - ((eta/2) G (n/b) s)^2)

    The preconditioner is made of releases, so it is post-processing; it is the one of the step before, so that its
    noise is independent of the step's. The release's noise is credited coordinate by coordinate. The drift term of a
    changing G is left out, as usual; it vanishes as beta goes to one.

    Paper: Li, Chen, Carlson and Carin, AAAI 2016.

    memory      beta, how slowly the preconditioner changes
    floor       smallest scale that a coordinate is divided by, against the mean gradient
    Other settings are those of every sampler: see Chain.
    """

    memory: float = 0.99
    floor: float = 1e-3
    name: ClassVar[str] = "psgld"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.memory < 1:
            raise Refusal(f"memory={self.memory}: must be in [0, 1)")
        if not (math.isfinite(self.floor) and self.floor > 0):
            raise Refusal(f"floor={self.floor}: must be a finite number > 0")

    def init(self, problem: Problem) -> PsgldState:
        # Before the first release the noise alone gives the scale of a mean gradient.
        mechanism = problem.plan.mechanism
        start = max(mechanism.noise_std / mechanism.expected_batch, self.floor)
        return PsgldState(second=torch.full_like(problem.position, start**2))

    def tell(self, problem: Problem, state: PsgldState, release: Release) -> PsgldState:
        assert state.second is not None
        eta = self._step_size(problem, state.step + 1)
        scale = torch.sqrt(state.second).add_(self.floor).reciprocal_()
        gradient = energy_gradient_(self.prior, problem, release.sum, release.expected_batch)
        brought = (eta / 2 * problem.records / release.expected_batch * release.noise_std * scale).square_()
        needed = eta * scale
        problem.position.addcmul_(scale, gradient, value=-eta / 2)
        add_normal_(problem, problem.position, (needed - brought).clamp_(min=0).sqrt_())
        hottest = max(state.hottest, (brought / needed).max().item())
        mean = release.sum / release.expected_batch
        second = state.second.mul(self.memory).addcmul_(mean, mean, value=1 - self.memory)
        return self.keep(problem, replace(state, second=second, hottest=hottest), eta)

    def posterior(self, problem: Problem, state: PsgldState) -> Draws:
        facts = {"step_size": self._step_size(problem, 1), "temperature": state.hottest}
        return self.collected(problem, state, facts)

    def _step_size(self, problem: Problem, step: int) -> float:
        first = 2 * LARGEST_LEARNING_RATE / problem.records if self.step_size is None else self.step_size
        return float(first * step**-self.decay)
