"""DP variational dropout: a dropout rate for every weight, its noise tied to the privacy noise or learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.layers.conversion import SMALLEST_DEVIATION, distributions, local_noise
from confide.layers.dropout import SharedNoiseLinear
from confide.methods._optimiser import DescentState
from confide.methods._variational import MeanField
from confide.methods.base import Problem
from confide.models.flat import named_slices
from confide.models.priors import Divergence, LogUniformPrior
from confide.posteriors.variational import DiagonalGaussian

SPARSE = 3.0
"""Weights with log alpha above this are noise (a dropout rate above 0.95) and count as dropped."""
UNTIED_DEVIATION = 0.01
"""Where there is no privacy noise to be tied to."""


@dataclass(frozen=True)
class VariationalDropout(MeanField):
    """Minimise the tempered negative evidence lower bound per record over q(w) = N(mu, zeta^2):

        F = (1/n) sum_i E_q[ l_i(w) ] + (weight/n) KL(q || prior),      alpha = zeta^2 / mu^2 for every weight.

    alpha is the variance of multiplicative Gaussian dropout, mu (1 + sqrt(alpha) noise); written additively, as here,
    its gradients stay small for large alpha. Activations are drawn instead of weights (local reparameterisation): for a
    layer with inputs a, out = a mu + sqrt(a^2 zeta^2) * noise, the noise of a step being shared by all records.
    A record's answer is the gradient of its loss, clipped. With the noisy sum R and the expected batch b,

        phi' = phi - rate * ( R / b + weight * grad KL(q || prior) / n ),

    so the privacy noise enters the parameter that is carried on, and nothing without noise is carried or released. The
    prior is log-uniform, its divergence the approximation of Molchanov et al.; it is added in `tell`.

    deviation="tied"    zeta is the standard deviation that the release's noise gives a weight in one step, rate * s / b
                        with s the noise of R: a public number, so it costs nothing. phi is mu. This is the intent of
                        Ermis and Cemgil (2017); their printed algorithm leaves the carried parameter without noise.
    deviation="learnt"  phi is (mu, log zeta^2), both clipped together, starting from the tied value.

    prior=Gaussian() with deviation="learnt" is stochastic variational inference without dropout.

    Papers: Kingma, Salimans and Welling, NeurIPS 2015; Molchanov, Ashukha and Vetrov, ICML 2017; Ermis and Cemgil,
    arXiv, 2017.

    prior              LogUniformPrior, or any prior with a closed-form divergence; biases are points without a prior
                       under LogUniformPrior
    weight             of the divergence; 1 is the evidence lower bound. None: n / number of weights, at most 1, for
                       the log-uniform prior, whose pull on few records and many weights would drown the data; else 1
    warm_up            fraction of the steps in which the weight grows to its value
    draws              noise vectors per step, averaged before clipping
    norms              "bound" clips by an upper bound of a record's norm: sound, cheaper where deviations are learnt
    predictive_draws   draws that a prediction averages over
    Optimiser settings are those of every method that descends: see Descent.

    `posterior.facts` state the share of weights with log alpha > 3, which are as good as dropped.
    """

    prior: Any = field(default_factory=LogUniformPrior)
    deviation: Literal["tied", "learnt"] = "tied"
    weight: float | None = None
    warm_up: float = 0.5
    norms: Literal["exact", "bound"] = "exact"
    name: ClassVar[str] = "variational-dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deviation not in ("tied", "learnt"):
            raise Refusal(f"deviation={self.deviation!r}: must be 'tied' or 'learnt'")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight >= 0):
            raise Refusal(f"weight={self.weight}: must be a finite number >= 0, or None for the rule")
        if not 0 <= self.warm_up <= 1:
            raise Refusal(f"warm_up={self.warm_up}: must be a fraction in [0, 1]")
        if self.norms not in ("exact", "bound"):
            raise Refusal(f"norms={self.norms!r}: must be 'exact' or 'bound'")
        if not isinstance(self.prior, Divergence):
            raise Refusal(
                f"prior={self.prior}: its divergence has no closed form; use LogUniformPrior, GaussianPrior or "
                "LaplacePrior"
            )

    def prepare(self, module: nn.Module) -> nn.Module:
        network = local_noise(module, UNTIED_DEVIATION, self.norms)
        for one in distributions(network):
            one.spread_parameter.requires_grad_(self.deviation == "learnt")
            if isinstance(one.layer, SharedNoiseLinear):
                one.layer.tied = self.deviation == "tied"
        return network

    def init(self, problem: Problem) -> DescentState:
        self._tie(problem)
        return self.start(problem)

    def _tie(self, problem: Problem) -> None:
        log_variance = 2 * math.log(self.tied_deviation(problem))
        for one in distributions(problem.module):
            one.raw.fill_(log_variance)

    def tied_deviation(self, problem: Problem) -> float:
        """The standard deviation that the privacy noise gives a weight in one step."""
        noise = problem.plan.mechanism.noise_std
        if noise == 0:
            return UNTIED_DEVIATION
        if self.optimiser == "adam":
            return self.rate(problem)  # the length of Adam's step where noise dominates
        return self.rate(problem) * noise / problem.plan.expected_batch

    def add_prior_(self, problem: Problem, gradient: Tensor, factor: float) -> None:
        """The log-uniform prior pulls a mean to zero, the harder the nearer it is: no step may carry it across."""
        if factor == 0:
            return
        pull = torch.zeros_like(gradient)
        super().add_prior_(problem, pull, factor)
        rate = self.rate(problem) / (1 - self.momentum) if self.optimiser == "momentum" else self.rate(problem)
        slices = named_slices(problem.module)
        for one in distributions(problem.module):
            part, _ = slices[one.mean]
            most = problem.position[part].abs() / rate
            pull[part] = torch.clamp(pull[part], -most, most)
        gradient.add_(pull)

    def divergence_weight(self, problem: Problem, step: int) -> float:
        warm_up = self.warm_up * problem.plan.steps
        share = 1.0 if step >= warm_up else step / warm_up
        return share * self._full_weight(problem)

    def _full_weight(self, problem: Problem) -> float:
        if self.weight is not None:
            return self.weight
        if not isinstance(self.prior, LogUniformPrior):
            return 1.0
        weights = sum(one.means.numel() for one in distributions(problem.module))
        return min(1.0, problem.records / weights)

    def posterior(self, problem: Problem, state: DescentState) -> DiagonalGaussian:
        if self.deviation == "tied":  # not part of the position, and this module is not the one that was trained
            self._tie(problem)
        found = [log_alpha(one.means, one.deviations()).flatten() for one in distributions(problem.module)]
        dropped = (torch.cat(found) > SPARSE).double().mean().item()
        facts = {
            "deviation": self.deviation,
            "tied_deviation": self.tied_deviation(problem),
            "sparsity": dropped,
            "median_log_alpha": torch.cat(found).median().item(),
        }
        return self.gaussian(problem, state, facts)


def log_alpha(means: Tensor, deviations: Tensor) -> Tensor:
    """log(deviation^2 / mean^2), the logarithm of the dropout variance."""
    return 2 * (deviations.log() - means.abs().clamp(min=SMALLEST_DEVIATION).log())
