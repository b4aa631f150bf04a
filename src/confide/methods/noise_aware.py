"""A posterior that knows its noise: linear, logistic and softmax regression from a few stages of releases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.methods._noise_aware import Belief, Model, ReleasedEvidence, believe, prior_belief, residual_clip, root_of
from confide.methods._noise_aware_query import Layout
from confide.methods.base import Method, Problem
from confide.models.likelihoods import Gaussian, Likelihood
from confide.models.priors import GaussianPrior
from confide.posteriors.draws import Draws
from confide.sources.queries import Release, StatisticQuery

Noise: TypeAlias = Literal["learnt", "fixed"]

STAGES = 5
"""How often the point is moved: each stage leaves a part of the distance to the truth that is about the relative noise
of the curvature, and five such parts are nothing wherever the curvature can be told from noise at all."""
RELEASES = 10
"""About all records, two for every stage: what is said of one stage is known from more than one draw of the noise."""
NOTHING_LEARNT, LEAST_LEARNT = 0.95, 0.1
"""Mean deviation over the prior's from which on a fit has learnt next to nothing; and the share of a direction's
variance that must be gone before its mean says anything about the prior."""
SURPRISE, LEAST_PULL = 1e-3, 0.1
"""Chance of a false alarm about the prior; and how far it must draw weights, in their deviations, to do any harm."""
TOLD_NOTHING = (
    "The releases told next to nothing at this budget: intervals of parameters are those of the prior, and right only "
    "if that is; give more records, a larger epsilon or fewer features."
)
PRIOR_TOO_NARROW = (
    "The prior does not fit what was learnt: the weights are larger than one in a thousand that it expects, and were "
    "drawn towards zero. Intervals of parameters are not to be relied on; give a wider prior."
)
CONSTANT = 3.0
"""How much wider the prior of a constant is where the target is a class: base rates of one in a hundred are usual, and
all records tell of it, so that little width comes of not expecting even odds."""
DRAWS, DRAWS_OF_NETWORKS = 1000, 100
"""Ends of 90 % intervals from 1000 draws are within 5 % of a deviation; networks hold many weights that are fixed."""


@dataclass(frozen=True)
class NoiseAwareState:
    """step: releases told so far; at, reach: where and with which residual clip the present stage asks.

    gathered, variance   the stage's releases, summed, and the variance of the noise in that sum; count: how many
    points ... reaches   of the stages that are complete
    mean ... scale       the belief after them
    """

    step: int
    at: Tensor = field(repr=False)
    reach: float
    gathered: Tensor = field(repr=False)
    mean: Tensor = field(repr=False)
    covariance: Tensor = field(repr=False)
    curvature: Tensor = field(repr=False)
    scale: float
    variance: float = 0.0
    count: int = 0
    points: tuple[Tensor, ...] = field(default=(), repr=False)
    sums: tuple[Tensor, ...] = field(default=(), repr=False)
    variances: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    reaches: tuple[float, ...] = ()

    @property
    def belief(self) -> Belief:
        return Belief(self.mean, self.covariance, self.curvature, torch.tensor(self.scale, dtype=torch.float64))


@dataclass(frozen=True)
class NoiseAware(Method):
    """A Gaussian posterior of a linear model's weights, whose width counts privacy noise, clipping and distance left.

    init       the prior
    ask        at the present mean: the score of the record (its residual, clipped, times its inputs), its share of the
               curvature, and for a real target its squared residual; one vector within the clip
    tell       steps are gathered in stages, at most five. After a stage the belief is computed anew from all releases
               so far, and its mean is where the next stage asks
    posterior  draws of the belief

    The releases are modelled as what they are: with theta the true weights and H the curvature, a stage at theta_t has

        G_t = f(H (theta - theta_t) + xi) + privacy noise,        xi ~ N(0, s^2 H) the records' own sampling noise,

    f the known effect of clipping a residual, and H itself known only up to the noise of its release. All of it stands
    in the width. Without noise this is the Laplace approximation of the non-private posterior. Of two classes the
    moments at the end are those of draws from the density in which scores bend. Sound because points and
    clips depend on earlier releases only; the rest is post-processing. Features are expected in [-1, 1], real targets
    scaled to about [-1, 1]: others are learnt too, with more noise. Best with few full batches
    (`sampling="full-batch"`, 10 steps); the noise of smaller ones is counted in.

    Of a network with hidden layers the last layer is learnt; the others stay where they start, as public features. Of
    two outputs for two classes their difference is learnt, since records tell no more of them.

    Papers: Bernstein and Sheldon, NeurIPS 2019 (noise-aware regression from noisy moments); Alrawajfeh, Jaelkoe and
    Honkela, AISTATS 2025 (noise-aware posteriors from the trace of releases).

    prior    N(0, scale^2) on the weights of the last layer, of two classes on those of the logit however many outputs
             it is written with; of classes three times as wide on the constant
    noise    "learnt": the noise scale of a real target, from the residuals; "fixed": it is the likelihood's
    """

    prior: GaussianPrior = field(default_factory=GaussianPrior)
    noise: Noise = "learnt"
    name: ClassVar[str] = "noise-aware"
    noise_in_width: ClassVar[str] = "counted"
    on_host: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("binary", "classification", "regression")

    def __post_init__(self) -> None:
        if not isinstance(self.prior, GaussianPrior):
            raise TypeError(f"prior={self.prior!r}: the belief is Gaussian, so it must be; use priors.GaussianPrior")
        if self.noise not in get_args(Noise):
            raise Refusal(f"noise={self.noise!r}: must be one of {', '.join(get_args(Noise))}")

    def init(self, problem: Problem) -> NoiseAwareState:
        layout, model = Layout.of(problem), self._model(problem)
        belief, blank = prior_belief(model), torch.zeros(layout.size, dtype=torch.float64)
        first = float(residual_clip(model, belief, first=True))
        return NoiseAwareState(
            0, belief.mean, first, blank, belief.mean, belief.covariance, belief.curvature, float(belief.scale)
        )

    def ask(self, problem: Problem, state: NoiseAwareState) -> StatisticQuery:
        layout, module, unit = Layout.of(problem), problem.module, _unit(problem)
        at, reach = state.at.reshape(layout.outputs, layout.inputs), state.reach
        function = Recordwise(lambda x, y: unit * layout.answer(module, x, y, at, reach), module)
        return StatisticQuery(function, layout.size)

    def tell(self, problem: Problem, state: NoiseAwareState, release: Release) -> NoiseAwareState:
        state = replace(
            state,
            step=state.step + 1,
            gathered=state.gathered + release.sum,
            variance=state.variance + release.noise_std**2,
            count=state.count + 1,
        )
        return self._next_stage(problem, state) if state.step in stage_ends(problem.plan.steps) else state

    def posterior(self, problem: Problem, state: NoiseAwareState) -> Draws:
        layout = Layout.of(problem)
        fixed = problem.position[: -layout.of_module]
        count = DRAWS_OF_NETWORKS if len(fixed) else DRAWS
        noise = torch.randn(count, layout.weights, generator=problem.generator, dtype=torch.float64)
        common = torch.randn(noise.shape, generator=problem.generator, dtype=torch.float64) if layout.pair else None
        common = None if common is None else common * self.prior.scale / 2  # two outputs whose difference is as it is
        learnt = layout.to_module(state.mean + noise @ root_of(state.covariance).mT, common)
        draws = torch.cat([fixed.expand(count, -1), learnt.to(problem.position.dtype)], 1)
        problem.position[-layout.of_module :] = layout.to_module(state.mean)[0].to(problem.position.dtype)
        likelihood = Gaussian(state.scale) if isinstance(problem.likelihood, Gaussian) else problem.likelihood
        weights = torch.full((count,), 1 / count, dtype=draws.dtype)
        return Draws(problem.module, likelihood, draws, weights, self._facts(problem, state, count))

    @property
    def releases(self) -> int:
        return RELEASES

    @property
    def learns_noise(self) -> bool:
        return self.noise == "learnt"

    def with_given_noise(self) -> NoiseAware:
        return replace(self, noise="fixed")

    def _facts(self, problem: Problem, state: NoiseAwareState, count: int) -> dict[str, object]:
        alone = self.without_privacy_noise(problem, state).diagonal()
        facts: dict[str, object] = {
            **_warning(state.belief, self._model(problem).precision),
            "draws": count,
            "stages": len(state.points),
            "share_of_noise_in_width": round(1 - float((alone / state.covariance.diagonal()).mean().sqrt()), 4),
            "hidden_layers": "as they started" if len(problem.position) > Layout.of(problem).of_module else "none",
        }
        if isinstance(problem.likelihood, Gaussian):
            facts |= {"noise_scale": state.scale, "residual_clip": state.reaches[-1]}
        return facts

    def without_privacy_noise(self, problem: Problem, state: NoiseAwareState) -> Tensor:
        """The covariance that the same records would leave without any noise: the Laplace approximation."""
        model = self._model(problem)
        dispersion = state.scale**2 if model.kind == "gaussian" else 1.0
        precision = state.curvature / dispersion + torch.diag(model.precision)
        covariance: Tensor = torch.linalg.inv(precision)
        return covariance

    def _next_stage(self, problem: Problem, state: NoiseAwareState) -> NoiseAwareState:
        """The belief given one stage more, and the point and clip of the next."""
        seen = replace(
            state,
            points=(*state.points, state.at),
            sums=(*state.sums, state.gathered),
            variances=(*state.variances, state.variance),
            counts=(*state.counts, state.count),
            reaches=(*state.reaches, state.reach),
            gathered=torch.zeros_like(state.gathered),
            variance=0.0,
            count=0,
        )
        model = self._model(problem)
        last = seen.step == problem.plan.steps
        found = believe(model, _evidence(problem, seen), state.belief, last)
        return replace(
            seen,
            at=found.mean,
            reach=float(residual_clip(model, found)),
            mean=found.mean,
            covariance=found.covariance,
            curvature=found.curvature,
            scale=float(found.scale),
        )

    def _model(self, problem: Problem) -> Model:
        return self.model_of(Layout.of(problem), problem.likelihood, problem.records)

    def model_of(self, layout: Layout, likelihood: Likelihood, records: int) -> Model:
        """What is public about a fit, for the belief."""
        moments = torch.full((layout.inputs,), 1 / 3, dtype=torch.float64)  # of features that fill [-1, 1] evenly
        moments[-1] = 1.0
        deviations = torch.full((layout.inputs,), self.prior.scale, dtype=torch.float64)
        deviations[-1] *= 1.0 if layout.kind == "gaussian" else CONSTANT
        return Model(
            kind=layout.kind,
            precision=deviations.repeat(layout.outputs) ** -2,
            moments=torch.diag(moments),
            outputs=layout.outputs,
            records=records,
            scale=likelihood.noise_scale if isinstance(likelihood, Gaussian) else 1.0,
            learn_scale=isinstance(likelihood, Gaussian) and self.noise == "learnt",
        )


def _warning(belief: Belief, precision: Tensor) -> dict[str, object]:
    """Said first, where intervals cannot be right or say nothing."""
    deviations = belief.covariance.diagonal().sqrt()
    if float((deviations * precision.sqrt()).mean()) > NOTHING_LEARNT:
        return {"warning": TOLD_NOTHING}
    pull = belief.covariance @ (precision * belief.mean) / deviations
    harmful = float(pull.square().mean().sqrt()) > LEAST_PULL
    return {"warning": PRIOR_TOO_NARROW} if harmful and prior_conflict(belief, precision) < SURPRISE else {}


def prior_conflict(belief: Belief, precision: Tensor) -> float:
    """The chance that the prior gives to weights as far away as those that were learnt.

    If truths are as the prior says, means of beliefs vary by what the belief is narrower than the prior: sums of their
    squares in these units, over directions in which something was learnt, have a chi-squared distribution.
    """
    root = precision.sqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * belief.covariance * root)
    learnt = 1 - values
    squares = (vectors.mT @ (root * belief.mean)).square() / learnt.clamp(min=1e-3)
    ours = learnt > LEAST_LEARNT
    if not bool(ours.any()):
        return 1.0
    return float(torch.special.gammaincc(ours.sum() / 2, squares[ours].sum() / 2))


def stage_ends(steps: int) -> tuple[int, ...]:
    """The steps after which a stage is complete."""
    stages = min(STAGES, steps)
    return tuple(round((stage + 1) * steps / stages) for stage in range(stages))


def _unit(problem: Problem) -> float:
    clip = problem.plan.mechanism.clip
    return clip if math.isfinite(clip) else 1.0


def _evidence(problem: Problem, state: NoiseAwareState) -> ReleasedEvidence:
    """The stages that are complete, as sums over all records."""
    records = problem.records
    rate = problem.plan.mechanism.expected_batch / records
    counts = torch.tensor(state.counts, dtype=torch.float64)
    whole = _unit(problem) * rate * counts
    return evidence_of(
        Layout.of(problem),
        records,
        torch.stack(state.points),
        torch.stack(state.sums) / whole[:, None],
        torch.tensor(state.variances, dtype=torch.float64) / whole**2,
        torch.tensor(state.reaches, dtype=torch.float64),
        (1 - rate) / (rate * counts),
    )


def evidence_of(
    layout: Layout, records: int, points: Tensor, sums: Tensor, noise: Tensor, reaches: Tensor, thinning: Tensor
) -> ReleasedEvidence:
    """From sums of answers over all records, whose numbers have noise of this variance, stage by stage."""
    score_unit, curvature_unit, spread_unit = layout.units(reaches)
    scores, curvature, spreads = layout.split(sums)
    batch = thinning * records * layout.curvature_bound**2 / layout.pairs  # all entries of a record share its norm
    return ReleasedEvidence(
        points=points,
        scores=scores * score_unit[..., None],
        score_noise=noise * score_unit**2,
        curvatures=layout.symmetric(curvature * curvature_unit),
        curvature_noise=noise * curvature_unit**2 + batch,
        thinning=thinning,
        reaches=reaches,
        spreads=spreads * spread_unit / records,
        spread_noise=(noise * spread_unit**2 + thinning * records / 4) / records**2,
    )
