"""Where a program's short chain begins: among draws of its prior, where records say.

A chain moves by slopes, which point to the peak from nearby alone: from a start that is far away in units of what one
record tells, or on the other side of a ridge, it never arrives. So the first releases ask another question. Of M
vectors, the start and draws of the prior, every record says by how much each explains it worse than the best of them,
as far as that matters (`layers.programs.ScoutedProgram`): a vector that no record makes longer than sqrt(M) / 2. Their
mean over records is the loss of each as one model of all records, in which no record counts for more than another.

Vectors are then drawn anew about the best quarter, as kernels that keep its mean and covariance, and asked about again
(the cross-entropy method: Rubinstein, 1999; kernels: West, 1993). Where they differ by no more than noise, more is
asked of the same. The chain begins in the midst of the last best ones.

Vectors and losses are public or released, so all but the question is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from confide.devices import HOST
from confide.methods._heard import Heard
from confide.methods._told import prior_draws
from confide.methods._whitened import Scaled
from confide.methods.base import Problem
from confide.sources.queries import GradientQuery, Release

COUNT, BEST = 32, 8
"""Vectors that are asked about at once, all of which run for every record, and those of them that others come from."""
GENERATIONS = 5
"""How often they are drawn."""
SHARE = 0.2
"""Of burn-in: the rest is the way from there to the peak."""
BEYOND_NOISE = 2.0
"""Times the variance of noise: losses that scatter by less say nothing."""
OWN = 0.5
"""Of the variance of vectors that are drawn anew is about the one that each comes from."""
LONGEST = math.sqrt(COUNT) / 2
"""A record's answer."""


@dataclass(frozen=True)
class Scouts:
    """Vectors, the sum of what was released of their losses, the variance of its noise, and generations before them."""

    vectors: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    noise: float = 0.0
    asked: int = 0
    heard: tuple[Heard, ...] = ()

    def query(self, problem: Problem) -> GradientQuery:
        asked = problem.scouted(len(self.vectors))
        asked.vectors.copy_(self.vectors)
        return GradientQuery(asked, Scaled(problem.likelihood.loss, _factor(problem)))

    def told(self, problem: Problem, release: Release) -> Scouts:
        each = release.expected_batch * _factor(problem)
        losses = self.losses + release.sum.to(HOST, torch.float64) / each
        return replace(self, losses=losses, noise=self.noise + (release.noise_std / each) ** 2, asked=self.asked + 1)

    def best(self) -> Tensor | None:
        """None where nothing tells them from the others."""
        if float(self.losses.var()) <= BEYOND_NOISE * self.noise or not self.asked:
            return None
        return self.vectors[self.losses.argsort()[:BEST]]

    def drawn_anew(self, problem: Problem) -> Scouts:
        best = self.best()
        if best is None:
            return self
        generator, count, mean = problem.generator, len(self.vectors), best.mean(0)
        roots = (best - mean) / math.sqrt(BEST)  # of their covariance
        chosen = best[torch.randint(BEST, (count,), generator=generator)]
        noise = torch.randn(count, BEST, generator=generator, dtype=torch.float64) @ roots
        vectors = mean + math.sqrt(1 - OWN) * (chosen - mean) + math.sqrt(OWN) * noise
        vectors[0] = best[0]
        return Scouts(vectors, torch.zeros_like(self.losses), heard=self.all_heard())

    def all_heard(self) -> tuple[Heard, ...]:
        """With this generation."""
        return (*self.heard, Heard(self.vectors, self.losses / self.asked, self.noise / self.asked**2, self.asked))

    def midst(self) -> Tensor:
        """Where the chain begins: at the first of all, its own start, as long as nothing was found."""
        best = self.best()
        return self.vectors[0] if best is None else best.mean(0)


def sent_out(problem: Problem) -> Scouts:
    """The start, and draws of the prior."""
    vectors = prior_draws(problem, COUNT).to(HOST, torch.float64)
    start = problem.position.to(HOST, torch.float64)
    vectors = torch.where(torch.isfinite(vectors).all(1, keepdim=True), vectors, start)
    vectors[0] = start
    return Scouts(vectors, torch.zeros(COUNT, dtype=torch.float64))


def each_generation(burn_in: int) -> int:
    """Questions about the vectors of one generation; none where burn-in is short."""
    return int(SHARE * burn_in) // GENERATIONS


def _factor(problem: Problem) -> float:
    """Of the loss: the longest answer is as long as the clip."""
    return problem.plan.mechanism.clip / LONGEST
