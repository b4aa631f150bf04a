"""DP variational inference with aligned gradients: one noisy gradient moves means and deviations alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from confide.devices import normals
from confide.errors import Refusal
from confide.methods._optimiser import Descent, DescentState, OptimiserName
from confide.methods._variational import check_positive
from confide.methods.base import Problem
from confide.models.priors import add_divergence_gradient_
from confide.posteriors.variational import DiagonalGaussian
from confide.sources.queries import GradientQuery, Release

LEAST, MOST = -20.0, 5.0
"""Of the logarithm of a deviation: beyond it numbers say nothing."""


@dataclass(frozen=True)
class DpviState(DescentState):
    """mean, log_deviation: of the Gaussian; noise: of the weight draw at which the next question is asked."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)
    log_deviation: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)
    noise: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)


@dataclass(frozen=True)
class DPVI(Descent):
    """Minimise the negative evidence lower bound per record over q(w) = N(m, s^2), s = exp(v), in every weight:

        F(m, v) = (1/n) sum_i E_q[ l_i(w) ] + (1/n) KL(q || prior).

    A step draws w = m + s * noise, shared by all records, and asks for the gradient of the loss at w and for nothing
    else. By the chain rule that is all there is to know,

        d l / d m = d l / d w,        d l / d v = s * noise * d l / d w,

    so the second is computed from the release of the first, with its noise: R / b in the place of both. A record is
    clipped by the length of its gradient alone, not by one that chance in the draw has made longer; noise is added to
    half as many numbers; and where noise is large it moves deviations no more than means ("aligned" gradients, DPVIm).
    The divergence joins in `tell`, never clipped or noised.

    Any network and any program will do, since the network itself stays as it is; every trainable number gets a
    distribution. Best with Adam, whose steps are of one length for means and logarithms of deviations.

    Papers: Jaelkoe, Dikmen and Honkela, UAI 2017; Jaelkoe, Prediger, Honkela and Kaski, TMLR 2024 (aligned gradients).

    prior              over every weight: Gaussian, Laplace, ScaleMixture, or any other; a program brings its own
    initial_deviation  s at the start
    predictive_draws   draws that a prediction averages over
    Optimiser settings are those of every method that descends: see Descent.
    """

    optimiser: OptimiserName = "adam"
    initial_deviation: float = 0.05
    predictive_draws: int = 100
    name: ClassVar[str] = "dpvi"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_deviation", self.initial_deviation)
        if self.predictive_draws < 1:
            raise Refusal(f"predictive_draws={self.predictive_draws}: must be at least 1")

    def init(self, problem: Problem) -> DpviState:
        mean = problem.position.clone()
        both = torch.zeros(2 * len(mean), dtype=mean.dtype, device=mean.device)
        first = both if self.optimiser != "sgd" else None
        second = both.clone() if self.optimiser == "adam" else None
        spread = torch.full_like(mean, self.initial_deviation).log()
        return DpviState(0, first, second, mean, spread, _noise(problem))

    def ask(self, problem: Problem, state: DpviState) -> GradientQuery:
        problem.position.copy_(torch.addcmul(state.mean, state.log_deviation.exp(), state.noise))
        problem.settle()
        return problem.gradient_query

    def tell(self, problem: Problem, state: DpviState, release: Release) -> DpviState:
        deviation, size = state.log_deviation.exp(), len(state.mean)
        slopes = torch.cat([release.sum, release.sum * state.noise]) / release.expected_batch
        of_mean, of_deviation = slopes[:size], slopes[size:]
        prior, share = problem.prior(self.prior), 1 / problem.records
        add_divergence_gradient_(prior, state.mean, deviation, state.noise[None], of_mean, of_deviation, share)
        of_deviation.mul_(deviation)  # d s / d v
        step = state.step + 1
        way = self._direction(state, slopes, step).mul(-self.rate_at(problem, step))
        return replace(
            state,
            step=step,
            mean=state.mean + way[:size],
            log_deviation=(state.log_deviation + way[size:]).clamp(LEAST, MOST),
            noise=_noise(problem),
        )

    def posterior(self, problem: Problem, state: DpviState) -> DiagonalGaussian:
        problem.position.copy_(state.mean)
        deviation = state.log_deviation.exp()
        facts = {
            "optimiser": self.optimiser,
            "learning_rate": self.rate(problem),
            "median_deviation": deviation.median().item(),
            "deviations_over_the_first": deviation.median().item() / self.initial_deviation,
        }
        return DiagonalGaussian(
            problem.module, problem.likelihood, state.mean.clone(), deviation, self.predictive_draws, facts
        )


def _noise(problem: Problem) -> Tensor:
    position = problem.position
    return normals(position.shape, problem.generator, position.dtype, position.device)
