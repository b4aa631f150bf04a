"""DP Bayes by Backprop: variational inference with an independent Gaussian for every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from confide.errors import Refusal
from confide.layers.conversion import mean_field
from confide.methods._optimiser import DescentState
from confide.methods._variational import MeanField, check_positive
from confide.methods.base import Problem
from confide.posteriors.variational import DiagonalGaussian


@dataclass(frozen=True)
class BBP(MeanField):
    """Minimise the negative evidence lower bound per record over q(w) = N(mu, softplus(rho)^2):

        F(mu, rho) = (1/n) sum_i E_q[ l_i(w) ] + (1/n) KL(q || prior).

    Each step draws N weight vectors w_j = mu + softplus(rho) * noise_j, shared by all records. A record's answer is
    the gradient of (1/N) sum_j l_i(w_j) with respect to (mu, rho) together, clipped as one vector. With the noisy sum R
    of a release and the expected batch b,

        g = R / b + grad KL(q || prior) / n,        (mu, rho)' = (mu, rho) - rate * direction(g).

    The divergence is not data: it is added in `tell`, never clipped or noised, and its share of a record is 1/n. It is
    in closed form for Gaussian, Laplace and flat priors, and the average over the same N draws for any other. Every
    layer gets a distribution: linear, convolutional, recurrent, attention, experts, tables, bare parameters; those of
    normalisations by choice. What layers share stays a point under the prior, and the fact "bayesian_share" says which
    part of the weights does not. Of N draws all but Linear, Conv2d and Embedding layers have the first alone.

    With a Gaussian prior this is DP variational inference (Jaelkoe, Dikmen and Honkela, UAI 2017), for generalised
    linear models (a network without hidden layers) as for networks.

    Papers: Blundell, Cornebise, Kavukcuoglu and Wierstra, ICML 2015; Zhang, Bu, Chen and Long, arXiv:2107.08461, 2021.

    prior              over every weight: Gaussian, Laplace, ScaleMixture, or any other
    draws              N
    initial_deviation  softplus(rho) at the start
    normalisations     whether scales and shifts of normalisations have a distribution too
    norms              "bound" clips by an upper bound of a record's norm: sound, cheaper for several draws
    predictive_draws   draws that a prediction averages over
    Optimiser settings are those of every method that descends: see Descent.
    """

    initial_deviation: float = 0.01
    norms: Literal["exact", "bound"] = "exact"
    normalisations: bool = False
    name: ClassVar[str] = "bbp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_deviation", self.initial_deviation)
        if self.norms not in ("exact", "bound"):
            raise Refusal(f"norms={self.norms!r}: must be 'exact' or 'bound'")

    def prepare(self, module: nn.Module) -> nn.Module:
        return mean_field(module, self.initial_deviation, self.norms, self.normalisations)

    def posterior(self, problem: Problem, state: DescentState) -> DiagonalGaussian:
        return self.gaussian(problem, state, {})
