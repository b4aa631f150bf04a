"""What scouts were told, as a belief of its own: for programs whose chain did not arrive at one peak.

Of every vector v that was asked about, a release tells the mean over records of a_v: by how much v explains a record
worse than the best one does (`_scouts`). If the truth is u the program says what these means are, at made-up inputs,

    m_v(u) = mean over x of  sum over y of  p(y | u, x) a_v(x, y),

and how records, batches, inputs and noise scatter about them. So what was released has a Gaussian likelihood in u, with
no line, peak or slope in it. Draws of its posterior come from the prior by population Monte Carlo (Cappe et al., 2004),
with a likelihood that is let in bit by bit as long as few vectors would carry all of the weight.

Nothing is asked for this, and vectors and releases are public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confide.layers.programs import NEVER, WORST
from confide.methods._told import prior_draws
from confide.methods.base import Problem
from confide.models.program_sharpness import Outcomes, outcomes_of
from confide.models.programs import Program, ProgramLikelihood

POPULATION, ROUNDS = 1000, 12
"""Vectors of a generation, a hundred of which may be left as independent draws, and generations at most: each lets in
more of the likelihood, and where that many do not reach all of it, nothing is believed."""
LEAST_WORTH = 0.1
"""Of the population: so many independent draws are left when more of the likelihood is let in, and at the end."""
MISFIT = 4.0
"""Deviations of a chi square beyond which not even the best vectors explain what was released."""
DRAWS = 500
"""Draws of the posterior, some of them several times: where a hundred vectors are worth as much, more say no more."""
LOOKED_AT = 16
"""Vectors at which it is seen which values y can take."""
AT_ONCE = 50
"""Vectors whose laws of y are in memory together."""


@dataclass(frozen=True)
class Heard:
    """One generation: the vectors, the means that were released of their losses, the noise in each, and how often."""

    vectors: Tensor = field(repr=False)
    losses: Tensor = field(repr=False)
    noise: float
    asked: int


def heard_draws(problem: Problem, heard: tuple[Heard, ...]) -> Tensor | None:
    """Of the unbounded vector; None where the law of y is not known, or no vector explains what was released."""
    program, likelihood = problem.module, problem.likelihood
    assert isinstance(program, Program)
    if not heard or not isinstance(likelihood, ProgramLikelihood) or likelihood.form is None:
        return None
    try:
        outcomes = outcomes_of(program, heard[0].vectors[:LOOKED_AT], likelihood.form)
        return None if outcomes is None else _drawn(problem, heard, outcomes)
    except Exception:  # whatever the program does not like at a vector of its prior
        return None


def most_in_their_midst(draws: Tensor) -> Tensor:
    """The draw that is nearest to their mean in their own axes: a mean of two peaks would be at neither."""
    away = draws - draws.mean(0)
    least = 1e-12 * torch.eye(draws.shape[1], dtype=draws.dtype)
    root = torch.linalg.cholesky(away.mT @ away / len(draws) + least)
    near = torch.linalg.solve_triangular(root, away.mT, upper=False).square().sum(0)
    return draws[near.argmin()]


def _drawn(problem: Problem, heard: tuple[Heard, ...], outcomes: Outcomes) -> Tensor | None:
    program, generator = problem.module, problem.generator
    assert isinstance(program, Program)
    answers = torch.cat([_answers(outcomes, one.vectors) for one in heard])
    released = torch.cat([one.losses for one in heard])
    log_prior = torch.vmap(program.log_prior)
    points = prior_draws(problem, POPULATION).double()
    points = points[torch.isfinite(points).all(1)]
    drawn_from = log_prior(points)
    weights = torch.full((len(points),), 1 / len(points), dtype=torch.float64)
    for _ in range(ROUNDS):
        laws = _laws(outcomes, points)
        means = laws.flatten(1) @ answers.flatten(1).mT / answers.shape[1]
        spread = torch.linalg.cholesky(_covariance(problem, heard, answers, laws, weights))
        off = torch.linalg.solve_triangular(spread, (means - released).mT, upper=False).square().sum(0)
        before = log_prior(points) - drawn_from
        share = _let_in(before, off)
        weights = torch.softmax(torch.nan_to_num(before - share * off / 2, nan=-math.inf), 0)
        if share == 1:
            explained = float(off.min()) <= len(released) + MISFIT * math.sqrt(2 * len(released))
            chosen = torch.multinomial(weights, DRAWS, replacement=True, generator=generator)
            return points[chosen] if explained and _worth(weights) >= LEAST_WORTH * len(points) else None
        points, drawn_from = _moved(points, weights, generator)
    return None


def _answers(outcomes: Outcomes, vectors: Tensor) -> Tensor:
    """(vectors, inputs, values): what a record of this kind answers (`layers.programs.ScoutedProgram`)."""
    said = torch.stack([outcomes.logs(vector) for vector in vectors])
    known = torch.nan_to_num(said, nan=NEVER, posinf=NEVER, neginf=NEVER).clamp(min=NEVER)
    worse = ((known.amax(0) - known) / WORST).clamp(max=1)
    return worse - worse.mean(0)


def _laws(outcomes: Outcomes, points: Tensor) -> Tensor:
    """(points, inputs, values): chances of y, which add up to one over the values that are looked at."""
    parts = [torch.vmap(outcomes.logs)(part) for part in points.split(AT_ONCE)]
    return torch.softmax(torch.nan_to_num(torch.cat(parts) + outcomes.widths.log(), nan=NEVER), 2)


def _covariance(problem: Problem, heard: tuple[Heard, ...], answers: Tensor, laws: Tensor, weights: Tensor) -> Tensor:
    """Of what is released about the means that the program says, where records come from vectors of these weights.

    Records are the same in all generations, and so is what a few made-up inputs miss; batches and noise are not.
    """
    law = torch.tensordot(weights, laws, 1)
    at_inputs = torch.einsum("xy,vxy->xv", law, answers)
    inputs, mean = len(at_inputs), at_inputs.mean(0)
    seconds = torch.einsum("xy,vxy,wxy->vw", law, answers, answers) / inputs
    off = at_inputs - mean
    found = (seconds - mean[:, None] * mean) / problem.records + off.mT @ off / inputs**2
    batches = max(0.0, problem.records / problem.plan.expected_batch - 1) / problem.records
    start = 0
    for one in heard:
        own = slice(start, start + len(one.losses))
        found[own, own] += seconds[own, own] * batches / one.asked
        found[own, own].diagonal().add_(one.noise)
        start = own.stop
    return found


def _let_in(before: Tensor, off: Tensor) -> float:
    """The largest share of the likelihood with which enough draws keep a weight."""

    def enough(share: float) -> bool:
        weights = torch.softmax(torch.nan_to_num(before - share * off / 2, nan=-math.inf), 0)
        return _worth(weights) >= LEAST_WORTH * len(off)

    if enough(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _worth(weights: Tensor) -> float:
    return float(1 / weights.square().sum())


def _moved(points: Tensor, weights: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A population about the present one, by kernels half as wide as it is, and the logarithm of its density."""
    mean = weights @ points
    away = points - mean
    covariance = (away * weights[:, None]).mT @ away / 4
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(mean), dtype=torch.float64))
    midst = points[torch.multinomial(weights, POPULATION, replacement=True, generator=generator)]
    noise = torch.randn(midst.shape, generator=generator, dtype=torch.float64)
    found = midst + noise @ root.mT
    along = torch.linalg.solve_triangular(root, torch.cat([found, midst]).mT, upper=False).mT
    distances = torch.cdist(along[: len(found)], along[len(found) :]).square()
    return found, torch.logsumexp(-distances / 2, 1)
