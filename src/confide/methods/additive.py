"""Additive: one smooth effect for every column, learnt from a few releases about all records."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods._additive import (
    Phase,
    Scale,
    Schedule,
    histogram,
    histogram_size,
    network_for,
    residuals,
    scale_of,
    told,
)
from confide.methods._additive_belief import Beliefs, histogram_share
from confide.methods._additive_last_look import last_look, line_of, parts_of
from confide.methods._additive_middles import asked as middles_asked
from confide.methods._additive_middles import loose_curvature, means, middles_of
from confide.methods._additive_ninety import first_ninety, ninety_of, rungs_of, surely_spread
from confide.methods._additive_problem import (
    CUT,
    FLATTEST,
    LARGEST,
    amplitudes_of,
    budget_of,
    check_likelihood,
    classes_of,
    clip_of,
    clip_share,
    constant_of,
    flatness,
    network_of,
    own_noise,
    start_doubt,
    start_of,
    to_explain,
    tremor,
    uncounted,
    within,
)
from confide.methods._additive_state import AdditiveState, held_at, origin_of
from confide.methods._additive_steps import (
    MOMENTUM,
    StepMetric,
    largest_rate,
    sharpness,
    steepness,
)
from confide.methods._additive_target import legible, room_of
from confide.methods._additive_together import asked, products, together_of
from confide.methods.base import Method, Problem
from confide.models.additive import MANY_NUMBERS, NUMBER, WAVES, AdditiveNetwork, additive, blocks_of
from confide.models.likelihoods import Categorical, Gaussian, Likelihood
from confide.posteriors.additive import WIDER, AdditiveGaussian
from confide.sources.queries import GradientQuery, Query, Release

RELEASES = 17
"""About all records: one histogram and sixteen steps, or thirteen and three."""
FEW_WAVES = 3
"""Of each number, where there are more than MANY_NUMBERS: no budget pays for more of them."""
TREMOR = 0.2
"""How far noise may carry outputs while steps are taken, in logits or deviations: further off a sigmoid is flat and
residuals are cut, and what a step says of a weight would depend on the way to it."""


@dataclass(frozen=True)
class Additive(Method):
    """A Bayesian additive model: f(x) = constant + an effect of every column, each with its credible band.

    The first releases are one histogram of all columns and of the target, a few per cent of mu^2, with two means of
    every number, which say where it lies where bins drown in noise. It gives every number a quantile scale u, so that
    heavy tails and wide bounds do no harm, and says how often every category occurs. On that scale an effect is a sum
    of cosines with amplitudes k^-smoothness (a Sobolev prior), or one level per category. All features are centred and
    have known variances and correlations, so that every step is divided by its curvature:

        g = clipped, noisy gradient of all records,    v' = v / 2 + g / D,    theta' = theta - rate v'.

    The rate follows from the number of columns, within which the curvature stays whatever the correlations, and then
    from the curvature that releases show along the way. Every step measures the weights: theta - g / H is where they
    belong, with the noise of that step alone, wherever steps have led. The posterior follows in closed form from the
    mean of these, weights of one column sharing a prior scale that is fitted; a column that says nothing beyond its
    noise is shrunk away. Of a number one release more says which columns move together (`_additive_together`), and the
    last look at residuals asks signs, which tell how wide intervals must be (`_additive_ninety`), and whether what was
    learnt explains the target (`_additive_last_look`). Of sixteen columns or more one release says where the middles of
    all features are (`_additive_middles`). Where a budget is small, weights are held near their start, for steps that
    follow noise measure worse, and more of a record's norm belongs to the constant, so that odds over all records come
    out first.

    Papers: Nori et al., ICML 2021 (private additive models); Wood, Generalized Additive Models, 2017 (smooth effects);
    Dong, Roth and Su, JRSS B 2022 (full-batch Gaussian releases compose exactly).

    smoothness   the order of the prior: amplitudes of waves fall with this power
    waves        cosines of every number, where the network is made here; small budgets use fewer
    noise        "learnt": that of a number target is, from residuals; "fixed": it is the likelihood's

    The clip of the plan is a unit and no setting: features are multiplied so that it cuts as much as n mu asks for.
    """

    smoothness: float = 1.0
    waves: int = WAVES
    noise: Literal["learnt", "fixed"] = "learnt"
    name: ClassVar[str] = "additive"
    noise_in_width: ClassVar[str] = "counted"
    on_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.smoothness) and self.smoothness > 0.5):
            raise Refusal(f"smoothness={self.smoothness}: must be a finite number > 0.5, or effects have no variance")
        if self.waves < 1:
            raise Refusal(f"waves={self.waves}: must be at least 1")
        if self.noise not in ("learnt", "fixed"):
            raise Refusal(f"noise={self.noise!r}: must be learnt or fixed")

    @property
    def releases(self) -> int:
        return RELEASES

    def network(self, schema: Schema, inputs: int, outputs: int) -> AdditiveNetwork:
        blocks = blocks_of(schema, inputs)
        few = len([width for width in blocks if width == NUMBER]) > MANY_NUMBERS
        return additive(blocks, outputs, min(self.waves, FEW_WAVES) if few else self.waves)

    @property
    def recalibrates(self) -> bool:
        return True

    @property
    def learns_noise(self) -> bool:
        return self.noise == "learnt"

    def with_given_noise(self) -> Additive:
        return replace(self, noise="fixed")

    def prepare(self, module: nn.Module) -> nn.Module:
        made = network_for(module, self.waves)
        if made is None:
            raise Refusal(
                f"module={type(module).__name__}: an additive model is made of columns; use "
                "confide.models.additive.additive(blocks), or one of confide.networks for numbers alone"
            )
        return made

    # -- the four functions ---------------------------------------------------------------------------------------

    def init(self, problem: Problem) -> AdditiveState:
        check_likelihood(problem.likelihood)
        recipe = network_of(problem).recipe
        scale = scale_of(recipe, classes_of(problem.likelihood), None, 0.0, problem.records)
        return self._scaled(problem, scale, math.inf)

    def ask(self, problem: Problem, state: AdditiveState) -> Query:
        network, clip = network_of(problem), clip_of(problem)
        phase, _, _ = self._schedule(problem).at(state.step)
        if phase == "scale":
            return histogram(
                network.recipe, classes_of(problem.likelihood), clip, histogram_share(problem, self._schedule(problem))
            )
        self.show(problem, state)
        if phase == "together":
            return products(network, state.variances * state.unit**2, clip)
        if phase == "means":
            return means(network, clip)
        if phase == "look":
            last = self._at_the_end(problem, state.step)
            return self._last_look(problem, state) if last else residuals(network, clip)
        return GradientQuery(network, self._likelihood(problem, state).loss)

    def tell(self, problem: Problem, state: AdditiveState, release: Release) -> AdditiveState:
        phase, place, count = self._schedule(problem).at(state.step)
        if phase == "learn":
            return self._learn(problem, state, release)
        gathered = release.sum.double() if state.gathered is None else state.gathered + release.sum.double()
        state = replace(state, step=state.step + 1, gathered=gathered)
        if place + 1 < count:
            return state
        unit = problem.records / (release.expected_batch * count) / clip_of(problem)
        return self._counted(problem, replace(state, gathered=None), phase, gathered * unit, release, unit, count)

    def posterior(self, problem: Problem, state: AdditiveState) -> AdditiveGaussian:
        network = network_of(problem)
        self.show(problem, state)
        beliefs = self._beliefs(problem, state)
        mean, variance, scales, leverage, wider = beliefs.along_the_line(beliefs.weights())
        used = int((state.variances[1 : 1 + network.recipe.waves] > 0).sum()) if network.recipe.numbers else 0
        facts: dict[str, Any] = {
            "columns": len(network.recipe.blocks),
            "waves": used,
            "smoothness": self.smoothness,
            "quantile_scale": self._schedule(problem).phases[0][0] == "scale",
            "columns_in_use": int((scales > beliefs.usual() / 10).sum()),
        }
        likelihood = problem.likelihood
        if isinstance(likelihood, Gaussian) and self._looks(problem):
            stated = state.deviation if math.isnan(state.stated) else state.stated
            likelihood = Gaussian(stated)
            facts |= {"noise_scale": stated, "noise_scale_from": "residuals, within the releases of the run"}
        if wider > 1:
            facts[WIDER] = round(wider, 4)
        shares = beliefs.shares()
        if shares is not None:
            facts |= {"leverage": round(leverage, 5), "levels": [round(v, 4) for v in shares[0].log().tolist()]}
        dtype = problem.position.dtype
        centre, spread = (mean / state.unit).flatten().to(dtype), (variance.sqrt() / state.unit).flatten().to(dtype)
        problem.position.copy_(centre)
        return AdditiveGaussian(network, likelihood, centre, spread, facts)

    # -- scale and looks -------------------------------------------------------------------------------------------

    def _schedule(self, problem: Problem) -> Schedule:
        steps, number = problem.plan.steps, isinstance(problem.likelihood, Gaussian)
        recipe, budget = network_of(problem).recipe, budget_of(problem) * math.sqrt(1 / problem.plan.steps)
        looks = (2 if self.noise == "learnt" else 1) if number else 0
        wanted: list[Phase] = ["means"] if middles_asked(recipe, budget) else []
        return Schedule.of(steps, looks, [*wanted, "together"] if number and asked(recipe, budget) else wanted)

    def _beliefs(self, problem: Problem, state: AdditiveState) -> Beliefs:
        return Beliefs(problem, state, self._schedule(problem))

    def _looks(self, problem: Problem) -> bool:
        return self._schedule(problem).phases[-1][0] == "look"

    def _at_the_end(self, problem: Problem, step: int) -> bool:
        """Whether what is asked then is asked of what the posterior will be."""
        return self._looks(problem) and step >= problem.plan.steps - self._schedule(problem).phases[-1][1]

    def _target(self, problem: Problem, state: AdditiveState) -> tuple[float, float]:
        """The constant of a number as the network has it, and the number's deviation, about."""
        constant = float(problem.position[0]) * state.unit * constant_of(problem, state.answers)
        return constant, self._beliefs(problem, state).spread()

    def _counted(
        self,
        problem: Problem,
        state: AdditiveState,
        phase: str,
        counts: Tensor,
        release: Release,
        unit: float,
        count: int,
    ) -> AdditiveState:
        """What the counts of one phase say; `unit` turned them into records."""
        recipe = network_of(problem).recipe
        noise = release.noise_std * math.sqrt(count) * unit
        if phase == "scale":
            share = histogram_share(problem, self._schedule(problem))
            scale = scale_of(recipe, classes_of(problem.likelihood), counts, noise, problem.records, share)
            doubt = noise / math.sqrt(share) / problem.records
            return replace(self._scaled(problem, scale, doubt), step=state.step)
        if phase == "together":
            columns = together_of(recipe, counts / problem.records, noise / problem.records, state.waves_alike)
            return replace(state, together=columns)
        if phase == "means":
            return self._centred(problem, state, counts / problem.records, noise / problem.records)
        if self._at_the_end(problem, state.step - 1):
            return self._looked(problem, state, counts / problem.records, noise / problem.records)
        # What is left to explain is no more than there was, where that could be told.
        told_of = legible(noise / math.sqrt(histogram_share(problem, self._schedule(problem))), problem.records)
        most = min(LARGEST, to_explain(problem, state.answers) * (1 if told_of else 2))
        seen, doubt = first_ninety(counts, noise, problem.records, state.deviation)
        found = min(most, seen)
        tails = min(LARGEST, surely_spread(counts, noise, problem.records))
        state = replace(state, deviation=max(found, tails), looked=found, tails=tails, doubt=doubt)
        return self._ready(problem, state)

    def _last_look(self, problem: Problem, state: AdditiveState) -> Query:
        doubt = self._beliefs(problem, state).weights().variance[0] / state.unit**2
        rungs = rungs_of(state.looked, state.doubt)
        return last_look(network_of(problem), *self._target(problem, state), clip_of(problem), rungs, doubt)

    def _looked(self, problem: Problem, state: AdditiveState, told: Tensor, noise: float) -> AdditiveState:
        """What the last look says, in units of the clip."""
        signs, sign_noise, means, mean_noise = parts_of(told, noise)
        line = line_of(means, mean_noise)
        own = float(self._beliefs(problem, state).weights().variance[0] @ state.variances)
        most = math.sqrt(max(LARGEST**2 - own, 1e-6))
        before = (state.looked, state.doubt)
        found = ninety_of(signs, sign_noise, problem.records, rungs_of(*before), before, own, most)
        deviation = math.hypot(found.likely, math.sqrt(own)) * line.left
        return replace(state, deviation=deviation, stated=found.stated * line.left, line=(line.level, line.slope))

    def _centred(self, problem: Problem, state: AdditiveState, told: Tensor, noise: float) -> AdditiveState:
        """The state at the start of learning, once it is known where the middles of all features are."""
        amplitudes = amplitudes_of(problem, self.smoothness, state.answers) * (state.variances > 0)
        squares = amplitudes.square()
        found = middles_of(network_of(problem).recipe, told, noise, state, amplitudes)
        variances = torch.minimum(state.variances / squares.clamp(min=1e-300), found.variances)
        variances[0] = 1.0
        scale = Scale(state.heights, found.centres, variances, state.answers, state.waves_alike)
        made = self._scaled(problem, scale, 0.0)
        return replace(made, step=state.step, start_doubt=state.start_doubt, loose=found.doubts * squares)

    def _scaled(self, problem: Problem, scale: Scale, doubt: float) -> AdditiveState:
        """The state at the start of learning, with features of a known scale and shares with that much noise."""
        recipe = network_of(problem).recipe
        start, deviation = start_of(problem, scale.answers)
        start = start / constant_of(problem, scale.answers)
        variances = scale.variances * amplitudes_of(problem, self.smoothness, scale.answers).square()
        usual = math.sqrt(float(variances.sum()))
        unit = 1 / usual
        if not isinstance(problem.likelihood, Gaussian):
            largest = math.sqrt(2) if isinstance(problem.likelihood, Categorical) else 1.0
            unit *= clip_of(problem) / (clip_share(problem) * largest)
        shape = (recipe.outputs, recipe.features)
        weights = torch.zeros(shape, dtype=torch.float64)
        weights[:, 0] = start
        problem.position.copy_((weights / unit).flatten())
        return AdditiveState(
            0, scale.heights, scale.centres, variances, scale.answers, unit, start,
            start_doubt(problem, scale.answers, doubt), deviation,
            velocity=torch.zeros(shape, dtype=torch.float64),
            anchor=torch.zeros(shape, dtype=torch.float64),
            sums=torch.zeros(3, *shape, dtype=torch.float64),
            waves_alike=scale.waves_alike,
        )  # fmt: skip

    def show(self, problem: Problem, state: AdditiveState) -> None:
        """Put the scale into the network."""
        features = network_of(problem).features
        features.heights.copy_(state.heights)
        features.centres.copy_(state.centres)
        amplitudes = amplitudes_of(problem, self.smoothness, state.answers)
        features.amplitudes.copy_(amplitudes * (state.variances > 0) * state.unit)

    # -- learning --------------------------------------------------------------------------------------------------

    def _likelihood(self, problem: Problem, state: AdditiveState) -> Likelihood:
        """Whose gradient is asked: a number's residual is in such units that the clip cuts it at CUT deviations."""
        if isinstance(problem.likelihood, Gaussian):
            return Gaussian(math.sqrt(self._gain(problem, state)))
        return problem.likelihood

    def _gain(self, problem: Problem, state: AdditiveState) -> float:
        """Residuals are divided by this before they are asked."""
        if not isinstance(problem.likelihood, Gaussian):
            return 1.0
        share = clip_share(problem) * CUT
        return share * room_of(state.answers, share) * state.deviation / clip_of(problem)

    def _learn(self, problem: Problem, state: AdditiveState, release: Release) -> AdditiveState:
        gain = self._gain(problem, state) / state.unit * problem.records / release.expected_batch
        position = problem.position.double().view(state.velocity.shape) * state.unit
        gradient, share = within(problem.likelihood, release.sum.double().view(position.shape) * gain)
        noise = release.noise_std * gain * share
        flat = max(flatness(problem.likelihood, state.variances, position), FLATTEST)
        curvature, prior, divisor = self._beliefs(problem, state).curvatures(noise, flat)
        metric = StepMetric.of(curvature, divisor, state.waves_alike, state.together)
        assumed = metric.square(position - state.before[0]) if state.before else 0.0
        sharpest, alike = sharpness(state.before, state.sharpest, state.alike, position, gradient, assumed, noise)
        steepest = max(state.steepest, steepness(state.before, gradient, metric, assumed, noise))
        unit = state.deviation**2 if isinstance(problem.likelihood, Gaussian) else 1.0
        shaken = tremor(state.variances, noise, curvature + prior, divisor) / (1 - MOMENTUM) / unit
        learning = self._schedule(problem).learning
        loose = 0.0 if state.loose is None else loose_curvature(curvature, state.variances, state.loose, divisor)
        most = largest_rate(network_of(problem).recipe, sharpest, steepest, curvature / divisor, learning, loose)
        rate = min(most, TREMOR**2 / max(shaken, 1e-30))
        done = self._schedule(problem).learnt(state.step) + 1
        away = position - origin_of(state)
        counts = state.together is not None or done > uncounted(problem, state.answers, learning)
        sums = state.sums + told(away, gradient, noise) if counts else state.sums
        push = metric.divided(gradient + prior * (away - state.anchor))
        velocity = MOMENTUM * state.velocity + push
        problem.position.copy_(((position - rate * velocity) / state.unit).flatten())
        state = replace(
            state, step=state.step + 1, velocity=velocity, sums=sums, sharpest=sharpest, alike=alike, steepest=steepest,
            before=(position, gradient, own_noise(noise, rate, metric)),
            first=state.first or (away, gradient, torch.tensor(noise**2, dtype=torch.float64)),
        )  # fmt: skip
        return self._ready(problem, self._rested(problem, state, done))

    def _rested(self, problem: Problem, state: AdditiveState, done: int) -> AdditiveState:
        """Where it is known which columns move together, weights go to where they are believed now and then, and are
        held there: what is wrong with that knowledge counts times the way that is left."""
        schedule = self._schedule(problem)
        if state.together is None or done not in schedule.rests:
            return state
        problem.position.copy_(((mean := self._beliefs(problem, state).weights().mean) / state.unit).flatten())
        return held_at(state, mean, done > max(schedule.rests[0], uncounted(problem, state.answers, schedule.learning)))

    def _ready(self, problem: Problem, state: AdditiveState) -> AdditiveState:
        """Before the last look at residuals the network stands where the posterior will have it."""
        steps, schedule = problem.plan.steps, self._schedule(problem)
        if self._looks(problem) and state.step == steps - schedule.phases[-1][1]:
            problem.position.copy_((self._beliefs(problem, state).weights().mean / state.unit).flatten())
        return state


__all__ = ["Additive", "AdditiveState", "histogram_size"]
