"""Students: which public inputs are asked about, and a posterior from the answers. No private record is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.plan import plan
from confide.mechanism.votes import UNANSWERED, VotesAnswers
from confide.methods.base import Method
from confide.methods.sgd import SGD
from confide.models.networks import softmax
from confide.models.priors import GaussianPrior
from confide.pate.graphs import Neighbours, coordinates, representatives
from confide.pate.kernels import kernel_ridge
from confide.posteriors.base import Posterior
from confide.running.fit import fit
from confide.sources.private_data import PrivateData

FEWEST_INPUTS = 8
"""Fewer points have no graph to speak of."""


class Student(Protocol):
    """`choose` says which public inputs are asked about, before anything private is read; `learn` makes a posterior."""

    def choose(self, inputs: Tensor, queries: int, seed: int) -> Tensor: ...

    def learn(self, inputs: Tensor, asked: Tensor, answers: VotesAnswers, classes: int, seed: int) -> Posterior: ...


@dataclass(frozen=True)
class Supervised:
    """Learns from the inputs that were answered, by any method on any network.

    module       None: softmax regression on the inputs as they are
    method       None: SGD with momentum to the maximum a posteriori
    epochs, batch   of its training on public inputs
    dimensions   of the space in which inputs are spread out to ask about as different ones as there are queries
    kernel       None: by module and method; else the width of a Gaussian kernel in median distances of the inputs, and
                 the student is kernel ridge regression, which a wrong label harms less
    """

    module: nn.Module | None = None
    method: Method | None = None
    epochs: int = 60
    batch: int = 64
    dimensions: int = 100
    kernel: float | None = None

    def __post_init__(self) -> None:
        if self.kernel is not None and not self.kernel > 0:
            raise Refusal(f"kernel={self.kernel}: must be > 0, in median distances of the public inputs")

    def choose(self, inputs: Tensor, queries: int, seed: int) -> Tensor:
        return representatives(self._places(inputs, seed), queries, seed)[0]

    def learn(self, inputs: Tensor, asked: Tensor, answers: VotesAnswers, classes: int, seed: int) -> Posterior:
        known = answers.labels != UNANSWERED
        if not bool(known.any()):
            raise Refusal("threshold: no query reached it, so that there is nothing to learn from; use a lower one")
        return self._fitted(inputs, asked[known], answers.labels[known], classes, seed)

    def _places(self, inputs: Tensor, seed: int) -> Tensor:
        return coordinates(inputs, self.dimensions, torch.Generator().manual_seed(seed))

    def _fitted(self, inputs: Tensor, rows: Tensor, y: Tensor, classes: int, seed: int) -> Posterior:
        """By the ordinary loop, or in closed form: inputs are public, and labels a function of what was released."""
        x = inputs[rows]
        if self.kernel is not None:
            return kernel_ridge(inputs, x, y, classes, dimensions=self.dimensions, width=self.kernel, seed=seed)
        module = softmax(x[0].numel(), classes) if self.module is None else self.module
        given = x.flatten(1) if self.module is None else x
        schema = Schema(len(y), tuple(range(classes)))
        batch = min(self.batch, len(y))
        steps = max(1, round(self.epochs * len(y) / batch))
        made = plan(delta=0.5, records=len(y), batch=batch, steps=steps, private=False)
        method = self._default() if self.method is None else self.method
        return fit(method, module, PrivateData(given, y, schema=schema), made, seed=seed).posterior

    def _default(self) -> Method:
        return SGD(optimiser="momentum", learning_rate=1.0, prior=GaussianPrior(scale=10.0), averaging=0.2)


@dataclass(frozen=True)
class SemiSupervised(Supervised):
    """Answers spread along a graph of all public inputs, which are then learnt from together.

    neighbours   that each input is joined with
    directions   of the graph in which clusters are sought; one input of each is asked about
    """

    epochs: int = 15
    neighbours: int = 10
    directions: int = 30

    def choose(self, inputs: Tensor, queries: int, seed: int) -> Tensor:
        graph = Neighbours.of(self._places(inputs, seed), self.neighbours)
        return representatives(graph.embedding(self.directions, seed), queries, seed)[0]

    def learn(self, inputs: Tensor, asked: Tensor, answers: VotesAnswers, classes: int, seed: int) -> Posterior:
        labels = self.labels(inputs, asked, answers, classes, seed)
        return self._fitted(inputs, torch.arange(len(inputs)), labels, classes, seed)

    def labels(self, inputs: Tensor, asked: Tensor, answers: VotesAnswers, classes: int, seed: int) -> Tensor:
        """A class for every public input: every class has the same amount to spread."""
        if len(inputs) < FEWEST_INPUTS:
            raise Refusal(f"public_inputs: {len(inputs)} of them; a graph needs at least {FEWEST_INPUTS}")
        known = answers.labels != UNANSWERED
        if not bool(known.any()):
            raise Refusal("threshold: no query reached it, so that there is nothing to learn from; use a lower one")
        seeds = torch.zeros(len(inputs), classes, dtype=torch.float64)
        seeds[asked[known], answers.labels[known]] = 1.0
        scores = Neighbours.of(self._places(inputs, seed), self.neighbours).spread_out(seeds)
        return (scores / scores.sum(0).clamp(min=1e-12)).argmax(1)
