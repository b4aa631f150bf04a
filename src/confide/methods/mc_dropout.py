"""DP MC dropout: a network whose dropout stays on, so that its masks are draws of a posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from confide.errors import Refusal
from confide.layers.bayesian import draw_
from confide.layers.conversion import with_shared_dropout
from confide.layers.dropout import SharedDropout
from confide.methods._optimiser import Descent, DescentState
from confide.methods.base import Problem
from confide.posteriors.variational import DropoutNetwork
from confide.sources.queries import GradientQuery, Release


@dataclass(frozen=True)
class MCDropout(Descent):
    """Minimise the mean loss under random masks plus the prior's share, from noisy clipped sums:

        g = R / b + grad r(w) / n,        w' = w - rate * direction(g).

    R is a release, b the expected batch, n the number of records, r = -log prior. A step draws N sets of masks, one
    for every dropout layer, shared by all records; a record's answer is the gradient of (1/N) sum_j l_i(w, mask_j) with
    respect to w, clipped. Masks act in the forward pass only: the carried weights are never overwritten by masked
    ones. They come from the method's own stream, before any record is read.

    With a Gaussian prior this is variational inference in which each weight is w or zero. The posterior is the
    weights with the masks still random: predictions average over passes with fresh masks.

    Any network with nn.Dropout layers serves. A fully connected network of confide's own without any gets one after
    every hidden activation (on its inputs, if it has no hidden layer).

    Papers: Gal and Ghahramani, ICML 2016; Zhang, Bu, Chen and Long, arXiv:2107.08461, 2021.

    prior              over all parameters, outside the clip
    dropout_rate       of the layers that are inserted; layers of the network keep their own
    draws              N, masks per step
    predictive_draws   passes that a prediction averages over
    Optimiser settings are those of every method that descends: see Descent.
    """

    dropout_rate: float = 0.1
    draws: int = 1
    predictive_draws: int = 100
    name: ClassVar[str] = "mc-dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.dropout_rate < 1:
            raise Refusal(f"dropout_rate={self.dropout_rate}: must be in (0, 1)")
        for name, count in (("draws", self.draws), ("predictive_draws", self.predictive_draws)):
            if count < 1:
                raise Refusal(f"{name}={count}: must be at least 1")

    def prepare(self, module: nn.Module) -> nn.Module:
        network, _ = with_shared_dropout(module, self.dropout_rate)
        return network

    def init(self, problem: Problem) -> DescentState:
        return self.start(problem)

    def ask(self, problem: Problem, state: DescentState) -> GradientQuery:
        draw_(problem.module, problem.generator, self.draws)
        return problem.gradient_query

    def tell(self, problem: Problem, state: DescentState, release: Release) -> DescentState:
        return self.descend_on_sum(problem, state, release)

    def posterior(self, problem: Problem, state: DescentState) -> DropoutNetwork:
        layers = [layer for layer in problem.module.modules() if isinstance(layer, SharedDropout)]
        facts = {
            "optimiser": self.optimiser,
            "learning_rate": self.rate(problem),
            "dropout_rates": [layer.rate for layer in layers],
            "draws": self.draws,
        }
        weights = problem.position.detach().clone()
        module, rate = problem.module, self.dropout_rate
        return DropoutNetwork(module, problem.likelihood, weights, self.predictive_draws, rate, facts)
