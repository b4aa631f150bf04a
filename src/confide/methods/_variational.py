"""What the variational methods share: weight draws in `ask`, the divergence from the prior in `tell`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.devices import HOST
from confide.errors import Refusal
from confide.layers.bayesian import Source, draw_
from confide.layers.conversion import Distribution, distributions, plain
from confide.mechanism.noise import NoiseStream
from confide.methods._optimiser import Descent, DescentState
from confide.methods.base import Problem
from confide.models.flat import named_slices
from confide.models.priors import add_divergence_gradient_
from confide.posteriors.variational import DiagonalGaussian
from confide.sources.queries import GradientQuery, Release

LARGE = 1 << 17
"""With so many parameters the time of torch's generator is felt."""


@dataclass(frozen=True)
class MeanField(Descent):
    """Settings of every method that fits an independent Gaussian to each weight, beside those of `Descent`.

    draws             Monte-Carlo draws per step; a record's gradient is averaged over them before it is clipped
    predictive_draws  draws of the posterior that a prediction averages over
    """

    draws: int = 1
    predictive_draws: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("draws", self.draws), ("predictive_draws", self.predictive_draws)):
            if count < 1:
                raise Refusal(f"{name}={count}: must be at least 1")

    def init(self, problem: Problem) -> DescentState:
        return self.start(problem)

    def ask(self, problem: Problem, state: DescentState) -> GradientQuery:
        draw_(problem.module, weight_stream(problem), self.draws)
        return problem.gradient_query

    def tell(self, problem: Problem, state: DescentState, release: Release) -> DescentState:
        gradient = release.sum / release.expected_batch
        self.add_prior_(problem, gradient, self.divergence_weight(problem, state.step + 1) / problem.records)
        return self.descend(problem, state, gradient)

    def steps_apart(self, problem: Problem, state: DescentState) -> int:
        """Any number: a party takes the gradients of the others to be what they were."""
        return problem.plan.steps

    def divergence_weight(self, problem: Problem, step: int) -> float:
        """What the divergence is multiplied by at that step: 1 is the evidence lower bound."""
        return 1.0

    def add_prior_(self, problem: Problem, gradient: Tensor, factor: float) -> None:
        """gradient += factor * d KL(q || prior), and d(-log prior) for parameters without a distribution."""
        prior: Any = problem.prior(self.prior)
        rest = dict(named_slices(problem.module))
        for one in distributions(problem.module):
            spread = rest.pop(one.spread, None)
            mean, _ = rest.pop(one.mean)
            self._add_divergence_(prior, one, gradient[mean], None if spread is None else gradient[spread[0]], factor)
        if hasattr(prior, "add_energy_gradient_"):
            for part, _ in rest.values():
                prior.add_energy_gradient_(problem.position[part], gradient[part], factor)

    def _add_divergence_(
        self, prior: Any, one: Distribution, mean: Tensor, spread: Tensor | None, factor: float
    ) -> None:
        means, deviations = one.means, one.deviations()
        noise = one.noise if one.noise is not None else means.new_zeros(0, *means.shape)
        of_deviation = torch.zeros_like(means)
        add_divergence_gradient_(prior, means, deviations, noise, mean.view(means.shape), of_deviation, factor)
        if spread is not None:
            spread.view(means.shape).addcmul_(of_deviation, one.chain(deviations))

    def gaussian(self, problem: Problem, state: DescentState, facts: dict[str, Any]) -> DiagonalGaussian:
        """The posterior, over the weights of the user's own network."""
        network, mean, deviation = plain(problem.module)
        about = {
            **facts,
            "optimiser": self.optimiser,
            "learning_rate": self.rate(problem),
            "draws": self.draws,
            "divergence_weight": self.divergence_weight(problem, state.step),
            "median_deviation": deviation[deviation > 0].median().item(),
            "bayesian_share": (deviation > 0).double().mean().item(),
        }
        return DiagonalGaussian(network, problem.likelihood, mean, deviation, self.predictive_draws, about)


def weight_stream(problem: Problem) -> Source:
    """What weights are drawn from: for a large network a fast stream, its seed from the method's own generator."""
    if problem.position.numel() < LARGE or problem.position.device != HOST:
        return problem.generator
    return NoiseStream(int(torch.randint(2**62, (), generator=problem.generator)))


def check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise Refusal(f"{name}={value}: must be a finite number > 0")
