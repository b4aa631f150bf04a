"""What every method is: a frozen set of public hyper-parameters and four functions.

    init       the state before any data
    ask        what the method wants to know of one record, given its state
    tell       the next state, given a release: post-processing, free of cost
    posterior  what was learnt

No function takes data. A method never learns which records exist, only the noisy sums that the boundary released.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from confide.mechanism.plan import Plan
from confide.models.likelihoods import Likelihood
from confide.posteriors.draws import Posterior
from confide.sources.queries import GradientQuery, Query, Release


@dataclass(frozen=True)
class Problem:
    """The public side of a fit: everything that a method may know.

    module      a private copy of the user's network; its trainable parameters are views of `position`
    position    the flat parameter vector; writing to it moves the network
    likelihood  how outputs explain targets
    plan        declared sizes, steps, clip and noise
    generator   the method's own randomness (Langevin noise, weight draws, masks): no privacy rests on it
    """

    module: nn.Module
    position: Tensor
    likelihood: Likelihood
    plan: Plan
    generator: torch.Generator

    @property
    def records(self) -> int:
        return self.plan.records

    @property
    def curvature(self) -> float:
        """Of the loss in an output; step sizes that follow from a public rule are divided by it."""
        return max(1.0, getattr(self.likelihood, "curvature", 1.0))

    @cached_property
    def gradient_query(self) -> GradientQuery:
        """The gradient of the negative log-likelihood at the current position."""
        return GradientQuery(self.module, self.likelihood.loss)


@runtime_checkable
class Method(Protocol):
    """The protocol; see CONTRIBUTING for a skeleton to copy.

    A method that trains another network than the user's own (a distribution in place of every weight, say) also has
    `prepare(module) -> module`, which is given a copy of the user's module before anything else happens.
    """

    name: ClassVar[str]

    def init(self, problem: Problem) -> Any:
        """The state before any data."""

    def ask(self, problem: Problem, state: Any) -> Query:
        """What is asked of one record at this step."""

    def tell(self, problem: Problem, state: Any, release: Release) -> Any:
        """The next state."""

    def posterior(self, problem: Problem, state: Any) -> Posterior:
        """The result after the last step."""
