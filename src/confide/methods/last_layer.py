"""A Bayesian last layer by a noisy second-order step: the features are given, their curvature is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods._last_layer import (
    Curvature,
    across_outputs,
    expected_scores,
    feature_query,
    gained,
    head_of,
    moments_of,
    posterior_variances,
    prior_variances,
    score_query,
    score_unit,
)
from confide.methods.base import Method, Problem
from confide.models.networks import MLP, Recipe
from confide.models.priors import GaussianPrior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Release

FEATURES_SHARE = 1 / 12
"""Of the releases: what is not known of the moments only slows, while noise in the scores is for good."""
RELEASES = 12
"""By default, each about all records: one of the features' moments, eleven steps. More would each be noisier."""
DRAWS = 100  # of a Gaussian: ends of intervals within a sixth of a deviation


@dataclass(frozen=True)
class LastLayerState:
    """step: releases told so far; moments: of the features, averaged over the releases that asked for them.

    known       the curvature that was made of them; blank before they are complete
    mean        of the weights (outputs, inputs)
    variances   of the weights in the axes of the curvature, as the gains of further steps see them
    spread      of the posterior, in the same axes
    across      eigenvectors over the outputs
    """

    step: int
    moments: Tensor = field(repr=False)
    known: Curvature
    mean: Tensor = field(repr=False)
    variances: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    across: Tensor = field(repr=False)


@dataclass(frozen=True)
class LastLayer(Method):
    """The posterior of a linear layer on frozen features, in about a dozen releases.

    init       weights zero
    ask        first the features' second moments A, which no weight moves; then the gradient at the present mean
    tell       after the moments: the curvature H = S x A, with S what a clipped residual tells of the outputs, expected
               under the features' released mean and covariance. After a step with scores G (the gradient of the
               log-likelihood, with noise of variance R, less what clipped residuals would come to if theta were the
               truth), in the axes of H, where all of it is diagonal,

                   theta' = theta + K G,      K = P h / (P h h' + R),      P' = P (1 - K h),

               P the variance that is left, from the prior's on, and h' >= h what the curvature may be for all that its
               own noise tells: a Newton step where releases are sharp, a small gradient step where they are not.
    posterior  draws of a Gaussian about the mean, of variance 1 / (1 / P_0 + h^2 / (q + R / steps)): the prior's, what
               the records leave open (q, the variance of their scores), and the privacy noise. A prior that was not
               given is made narrower by the one factor under which the mean that was found is likeliest

    `confide.networks.last_layer(backbone, outputs)` makes such a network of any module that gives features; of a
    sequence the last linear layer is learnt, and the others stay where they start. The releases are gradients of
    ordinary networks, clipped as all others are, so that any frozen module and any kind of record will do. Best with
    full batches; the noise of smaller ones is counted.

    Papers: Mehta, Krichene, Thakurta, Kurakin and Cutkosky, TMLR 2023 (private least squares and second-order steps on
    features); Avella-Medina, Bradshaw and Loh, Annals of Statistics 2023 (noisy Newton steps); Boehning, Annals of the
    Institute of Statistical Mathematics 1992 (the curvature of a softmax).

    prior     N(0, scale^2) on the weights; None: outputs of a usual size, all axes of the features contributing alike
    """

    prior: GaussianPrior | None = None
    name: ClassVar[str] = "last-layer"
    noise_in_width: ClassVar[str] = "counted"
    on_host: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("binary", "classification", "regression")

    def __post_init__(self) -> None:
        if self.prior is not None and not isinstance(self.prior, GaussianPrior):
            raise TypeError(f"prior={self.prior!r}: must be priors.GaussianPrior, or None to find its scale")

    def init(self, problem: Problem) -> LastLayerState:
        head = head_of(problem)
        if problem.plan.steps < 2:
            raise Refusal("steps=1: a last layer needs one release of the features and one step; use 2 or more")
        blank = torch.zeros(head.outputs, head.inputs, dtype=torch.float64)
        moments = torch.zeros(head.inputs, head.inputs, dtype=torch.float64)
        known, across = Curvature.blank(head.inputs), torch.eye(head.outputs, dtype=torch.float64)
        return LastLayerState(0, moments, known, blank, blank, blank, across)

    def ask(self, problem: Problem, state: LastLayerState) -> GradientQuery:
        if state.step < _first_steps(problem):
            return feature_query(problem)
        return score_query(problem)

    def tell(self, problem: Problem, state: LastLayerState, release: Release) -> LastLayerState:
        if state.step < _first_steps(problem):
            return self._told_moments(problem, state, release)
        head, known = head_of(problem), state.known
        whole = problem.records / release.expected_batch / score_unit(problem)
        noise = release.noise_std * whole
        slope, square = across_outputs(problem, known, state.mean)
        sizes, across = torch.linalg.eigh(slope)
        sizes = sizes.clamp(min=0)
        gains, variances = gained(known, sizes, state.variances, noise)
        scores = head.matrix(release.sum).double() * -whole - expected_scores(problem, known, state.mean)
        scores = across.mT @ scores @ known.vectors
        mean = state.mean + across @ (gains * scores) @ known.vectors.mT
        problem.position[-head.weights :].copy_(head.flat(mean).to(problem.position.dtype))
        told = self._information(problem, known, sizes, (across.mT @ square @ across).diagonal().clamp(min=0), noise)
        spread = posterior_variances(self._prior(problem, known), told, across.mT @ mean @ known.vectors, self.prior)
        return replace(state, step=state.step + 1, mean=mean, variances=variances, spread=spread, across=across)

    def _told_moments(self, problem: Problem, state: LastLayerState, release: Release) -> LastLayerState:
        """The features' second moments; after the last release of them, what is left when noise is taken off."""
        head, count = head_of(problem), _first_steps(problem)
        found, noise = moments_of(head, problem, release)
        state = replace(state, step=state.step + 1, moments=state.moments + found / count)
        if state.step < count:
            return state
        known = Curvature.of(state.moments, noise**2 / count, problem.records, centred=head.biased)
        return replace(state, known=known, variances=self._prior(problem, known))

    def _prior(self, problem: Problem, known: Curvature) -> Tensor:
        return prior_variances(self.prior, known, head_of(problem).outputs, problem.records)

    def _information(self, problem: Problem, known: Curvature, sizes: Tensor, squares: Tensor, noise: float) -> Tensor:
        """What all releases together tell of the weights, as precisions in the axes of the curvature."""
        steps = problem.plan.steps - _first_steps(problem)
        rate = problem.plan.expected_batch / problem.records
        thinned = 1 + (1 - rate) / (rate * steps)  # what sampled batches add to the records' own
        own, variance = sizes[:, None] * known.values, squares[:, None] * known.values * thinned + noise**2 / steps
        return own.square() / variance.clamp(min=1e-300)

    def posterior(self, problem: Problem, state: LastLayerState) -> Draws:
        head, known = head_of(problem), state.known
        noise = torch.randn(DRAWS // 2, *state.mean.shape, generator=problem.generator, dtype=torch.float64)
        noise = torch.cat([noise, -noise])  # in pairs, so that their mean is the mean
        # Turned into the axes first: which sign an axis has is the linear algebra library's affair, not the draws'.
        turned = state.across.mT @ noise @ known.vectors
        draws = state.mean + state.across @ (turned * state.spread.sqrt()) @ known.vectors.mT
        flat = torch.stack([head.flat(draw) for draw in draws]).to(problem.position.dtype)
        flat = torch.cat([problem.position[: -head.weights].expand(DRAWS, -1), flat], 1)
        facts: dict[str, Any] = {
            "draws": DRAWS,
            "releases_of_features": _first_steps(problem),
            "steps": problem.plan.steps - _first_steps(problem),
            "features_told_apart": int((known.values >= known.ceilings).sum()),
        }
        weights = torch.full((DRAWS,), 1 / DRAWS, dtype=flat.dtype)
        return Draws(problem.module, problem.likelihood, flat, weights, facts)

    @property
    def releases(self) -> int:
        return RELEASES

    def network(self, schema: Schema, inputs: int, outputs: int) -> nn.Module:
        """Of columns: the columns themselves are the features."""
        return MLP(Recipe(inputs, outputs))


def _first_steps(problem: Problem) -> int:
    """Releases of the features' moments, before the steps."""
    steps = problem.plan.steps
    return min(max(1, math.floor(FEATURES_SHARE * steps)), steps - 1)
