"""DP-EM: the means of a mixture of Gaussians from noisy expected statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.expectation.mixture import MixtureOfGaussians, log_joint
from confide.expectation.natural import GaussianFamily
from confide.mechanism.clipping import Recordwise
from confide.methods.base import Method, Problem
from confide.posteriors.natural import NaturalGaussian
from confide.sources.queries import Release, StatisticQuery

Start: TypeAlias = Literal["together", "given"]
LEAST_COUNT = 0.5
"""A component keeps at least this part of the records that its weight promises: below it noise decides, not records."""
LIKELY = 0.9999
"""Means stay where the prior has so much of its mass; one that noise carries out of there does not come back."""
TOGETHER = 0.03
"""How far from the prior's centre, in parts of their distance, components begin that begin together."""
WARM_PART = 0.5
"""Part of the steps in which responsibilities are softened. (Ueda and Nakano, Neural Networks 1998.)"""


@dataclass(frozen=True)
class EmState:
    """step: releases told so far; counts, sums: expected records of each component and their sum, per record."""

    step: int
    means: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)
    sums: Tensor = field(repr=False)


@dataclass(frozen=True)
class EM(Method):
    """Expectation maximisation for the means of a mixture with known covariances S_j and weights.

    init       the components near the prior's centre; each holds the share of records that its weight promises
    ask        r_j, the responsibilities of the record, and r_j S_j^(-1/2) (x - mean_j), about the present means
    tell       with a release R of a batch expected to hold b records, running averages per record

                   s' = (1 - a) s + a R / b

               of counts and sums, and the means that maximise the posterior given them:
               (P + n count_j S_j^-1) mean_j = P centre + n S_j^-1 sum_j, P the prior's precision, n records.
               Counts and means are kept between public bounds, so that no noise makes a run diverge
    posterior  N(mean_j, (P + n count_j S_j^-1)^-1): the curvature of the expected log posterior

    The statistics are clipped together, in units of sqrt(features + 1), about the norm of a record that belongs to one
    component. a falls linearly to 0 and adds up to `horizon`; a = 1 with full batches is EM itself.

    A start drawn from the prior ends in a local optimum in a quarter of the runs, whatever the budget. So a private run
    begins where it knows least: all components together, with responsibilities so soft that none is preferred; in the
    first half of the steps they harden, and components part where the records do. This reads nothing and costs
    nothing but those steps.

    horizon   sum of all a
    start     "together", or "given": from the module's means, which is what a run without noise always does

    Papers: Dempster, Laird and Rubin, JRSS B 1977; Cappe and Moulines, JRSS B 2009 (running averages); Park, Foulds,
    Chaudhuri and Welling, AISTATS 2017 (DP-EM).
    """

    horizon: float = 12.0
    start: Start = "together"
    name: ClassVar[str] = "em"
    on_host: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("mixture",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.horizon) and self.horizon > 0):
            raise Refusal(f"horizon={self.horizon}: must be a finite number > 0")
        if self.start not in get_args(Start):
            raise Refusal(f"start={self.start!r}: must be one of {', '.join(get_args(Start))}")

    def init(self, problem: Problem) -> EmState:
        module = _mixture(problem)
        means, counts = module.means.detach().to(torch.float64).clone(), module.weights.to(torch.float64)
        if self.start == "together" and problem.plan.mechanism.private:
            means = torch.lerp(module.centre.to(torch.float64).expand_as(means), means, TOGETHER)
        return EmState(0, means, counts, counts[:, None] * means)

    def ask(self, problem: Problem, state: EmState) -> StatisticQuery:
        module = _mixture(problem)
        roots = torch.linalg.cholesky(module.covariances.to(torch.float64))
        weights, unit = module.weights.to(torch.float64), _unit(problem)
        coolness = _coolness(problem, state.step)

        def statistics(x: Tensor, y: Tensor) -> Tensor:
            x = x.to(torch.float64).flatten(1)
            shares = (coolness * log_joint(x, state.means, module.covariances, weights)).softmax(-1)
            gap = (x[:, None, :] - state.means)[..., None]
            white = torch.linalg.solve_triangular(roots, gap, upper=False)[..., 0]
            return torch.cat([shares, (shares[..., None] * white).flatten(1)], 1) / unit

        return StatisticQuery(Recordwise(statistics), state.counts.numel() + state.sums.numel())

    def tell(self, problem: Problem, state: EmState, release: Release) -> EmState:
        module, step = _mixture(problem), state.step + 1
        answer = release.sum * (_unit(problem) / release.expected_batch)
        seen, white = answer[: state.counts.numel()], answer[state.counts.numel() :].reshape(state.means.shape)
        roots = torch.linalg.cholesky(module.covariances.to(torch.float64))
        moved = (roots @ white[..., None])[..., 0] + seen[:, None] * state.means
        a = min(1.0, 2 * self.horizon / problem.plan.steps * (1 - (step - 0.5) / problem.plan.steps))
        counts, sums = torch.lerp(state.counts, seen, a), torch.lerp(state.sums, moved, a)
        counts, sums = _raised(problem, counts, sums, state.means)
        precision, eta = _natural(problem, counts, sums)
        means = _within(problem, torch.linalg.solve(precision, eta[..., None])[..., 0])
        return EmState(step, means, counts, _sums_of(problem, means, counts))

    def posterior(self, problem: Problem, state: EmState) -> NaturalGaussian:
        module = _mixture(problem)
        components, features = state.means.shape
        precision, _ = _natural(problem, state.counts, state.sums)
        eta = (precision @ state.means[..., None])[..., 0]
        natural = GaussianFamily(features, "full", components).pack(eta, precision)
        variant = "DP-EM" if problem.plan.mechanism.private else "EM, not private"
        facts = {"variant": variant, "covariance": "full", "horizon": self.horizon}
        noise = torch.ones((), dtype=torch.float64)
        found = NaturalGaussian(module, problem.likelihood, natural, noise, None, facts)
        problem.position.copy_(found.mean())
        return found


def _mixture(problem: Problem) -> MixtureOfGaussians:
    if not isinstance(problem.module, MixtureOfGaussians):
        raise Refusal("module: expectation maximisation is for mixtures; use models.mixture.MixtureOfGaussians")
    return problem.module


def _unit(problem: Problem) -> float:
    clip = problem.plan.mechanism.clip
    return math.sqrt(_mixture(problem).recipe.features + 1) / (clip if math.isfinite(clip) else 1.0)


def _coolness(problem: Problem, step: int) -> float:
    """The power to which likelihoods are raised: from where all components would fall together, up to 1.

    That is where the scale of a component, 1 / coolness wider, is that of the whole mixture under the prior.
    """
    if not problem.plan.mechanism.private:
        return 1.0
    module = _mixture(problem)
    own = float(module.covariances.diagonal(dim1=-2, dim2=-1).mean())
    least = own / (own + module.spread**2)
    return float(least ** max(0.0, 1 - step / (WARM_PART * problem.plan.steps)))


def _raised(problem: Problem, counts: Tensor, sums: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Counts that noise made too small, or greater than 1, set right by records that stand at the present mean."""
    least = LEAST_COUNT * _mixture(problem).weights.to(torch.float64)
    raised = counts.clamp(least, torch.ones_like(least))
    return raised, sums + (raised - counts)[:, None] * means


def _within(problem: Problem, means: Tensor) -> Tensor:
    """The nearest means in the ball that holds `LIKELY` of the prior."""
    from scipy.stats import chi2

    module = _mixture(problem)
    centre, radius = module.centre.to(torch.float64), module.spread * math.sqrt(chi2.ppf(LIKELY, means.shape[1]))
    gap = means - centre
    kept: Tensor = centre + gap * (radius / gap.norm(dim=1, keepdim=True).clamp(min=radius))
    return kept


def _sums_of(problem: Problem, means: Tensor, counts: Tensor) -> Tensor:
    """The sums under which these means are the answer."""
    precision, pull = _natural(problem, counts, torch.zeros_like(means))
    gap = (precision @ means[..., None])[..., 0] - pull
    covariances = _mixture(problem).covariances.to(torch.float64)
    return (covariances @ gap[..., None])[..., 0] / problem.records


def _natural(problem: Problem, counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and eta of the means, given the running averages."""
    module = _mixture(problem)
    inverse = torch.linalg.inv(module.covariances.to(torch.float64)) * problem.records
    prior = torch.eye(sums.shape[1], dtype=torch.float64) / module.spread**2
    precision = prior + counts[:, None, None] * inverse
    eta = prior @ module.centre.to(torch.float64) + (inverse @ sums[..., None])[..., 0]
    return precision, eta
