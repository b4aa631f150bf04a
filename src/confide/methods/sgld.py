"""DP-SGLD: stochastic gradient Langevin dynamics whose privacy noise is the Langevin noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from confide.methods.base import Problem
from confide.models.priors import Gaussian, Prior
from confide.posteriors import Draws
from confide.queries import GradientQuery, Release

LARGEST_LEARNING_RATE = 1.0
"""Cap on n eta / 2, the step on the mean gradient, when the step size follows from the noise: beyond it the chain
leaves the neighbourhood in which a clipped gradient points downhill."""


@dataclass(frozen=True)
class State:
    """step: releases told so far; draws: kept positions; weights: the step size at each."""

    step: int = 0
    draws: tuple[Tensor, ...] = field(default=(), repr=False)
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class SGLD:
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
    Zhang, Bu, Chen and Long, ECML 2021.

    prior       over all parameters, outside the clip
    step_size   eta at the first step; None: such that the release's noise is exactly what Langevin needs
    decay       eta_t = step_size * t^(-decay); 1/3 in Li et al., 0 for a fixed step
    burn_in     fraction of the steps that is thrown away
    thinning    keep every so-manieth position after burn-in; None: as many as give at most 100 draws
    """

    prior: Prior = field(default_factory=Gaussian)
    step_size: float | None = None
    decay: float = 0.0
    burn_in: float = 0.5
    thinning: int | None = None
    convention: Literal["posterior", "paper"] = "posterior"
    name: ClassVar[str] = "sgld"

    def __post_init__(self) -> None:
        if self.step_size is not None and not (math.isfinite(self.step_size) and self.step_size > 0):
            raise ValueError(f"step_size={self.step_size}: must be a finite number > 0, or None to follow the noise")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay}: must be in [0, 1)")
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"burn_in={self.burn_in}: must be a fraction in [0, 1)")
        if self.thinning is not None and self.thinning < 1:
            raise ValueError(f"thinning={self.thinning}: must be at least 1")
        if self.convention not in ("posterior", "paper"):
            raise ValueError(f"convention={self.convention!r}: must be 'posterior' or 'paper'")

    def init(self, problem: Problem) -> State:
        return State()

    def ask(self, problem: Problem, state: State) -> GradientQuery:
        return problem.gradient_query

    def tell(self, problem: Problem, state: State, release: Release) -> State:
        step = state.step + 1
        eta = self._step_size(problem, step)
        drift = self._drift(eta)
        scale = drift * problem.records / release.expected_batch
        position = problem.position
        self.prior.add_energy_gradient_(position, position, factor=-drift)
        position.add_(release.sum, alpha=-scale)
        missing = eta - (scale * release.noise_std) ** 2
        if missing > 1e-9 * eta:
            noise = torch.randn(position.shape, generator=problem.generator, dtype=position.dtype)
            position.add_(noise, alpha=math.sqrt(missing))
        if not self._keeps(problem, step):
            return replace(state, step=step)
        return State(step, (*state.draws, position.clone()), (*state.weights, eta))

    def posterior(self, problem: Problem, state: State) -> Draws:
        weights = torch.tensor(state.weights, dtype=problem.position.dtype)
        facts = {
            "step_size": self._step_size(problem, 1),
            "temperature": self.temperature(problem),
            "convention": self.convention,
            "draws": len(state.draws),
            "burn_in_steps": self._burn_in_steps(problem),
        }
        return Draws(problem.module, problem.likelihood, torch.stack(state.draws), weights / weights.sum(), facts)

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
            first = 2 * LARGEST_LEARNING_RATE / problem.records
            noise_std = problem.plan.mechanism.noise_std
            if noise_std > 0:
                factor = 2.0 if self.convention == "posterior" else 1.0
                first = min(first, (factor * problem.plan.expected_batch / (problem.records * noise_std)) ** 2)
        return float(first * step**-self.decay)

    def _burn_in_steps(self, problem: Problem) -> int:
        return min(int(self.burn_in * problem.plan.steps), problem.plan.steps - 1)

    def _keeps(self, problem: Problem, step: int) -> bool:
        burn_in = self._burn_in_steps(problem)
        thinning = self.thinning or math.ceil((problem.plan.steps - burn_in) / 100)
        # Counted from the end, so that the last position is always kept.
        return step > burn_in and (problem.plan.steps - step) % thinning == 0
