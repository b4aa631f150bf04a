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
    BelievedWeights,
    Phase,
    Scale,
    Schedule,
    histogram,
    histogram_size,
    leverage_of,
    measured,
    network_for,
    residual_scale,
    residuals,
    scale_of,
    shrunk,
    target_share,
    told,
)
from confide.methods._additive_last_look import TargetLine, last_look, line_of, parts_of
from confide.methods._additive_levels import (
    LEAST_WEIGHT,
    constants_of,
    free_part,
    own_residuals,
    shares_of,
)
from confide.methods._additive_middles import asked as middles_asked
from confide.methods._additive_middles import loose_curvature, means, middles_of
from confide.methods._additive_problem import (
    CUT,
    FLATTEST,
    LARGEST,
    amplitudes_of,
    bend_at,
    bend_of,
    budget_of,
    check_likelihood,
    classes_of,
    clip_of,
    clip_share,
    constant_of,
    curvature_weights,
    flatness,
    network_of,
    own_noise,
    passed,
    start_doubt,
    start_of,
    to_explain,
    tremor,
    uncounted,
    within,
)
from confide.methods._additive_state import AdditiveState, held_at, origin_of, reached_by, spread_of
from confide.methods._additive_steps import (
    MOMENTUM,
    Axes,
    StepMetric,
    along_the_way,
    largest_rate,
    sharpness,
    steepness,
)
from confide.methods._additive_target import legible
from confide.methods._additive_together import asked, products, together_of, weighed_together
from confide.methods.base import Method, Problem
from confide.models.additive import MANY_NUMBERS, NUMBER, WAVES, AdditiveNetwork, additive, blocks_of
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from confide.posteriors.additive import AdditiveGaussian
from confide.sources.queries import GradientQuery, Query, Release

RELEASES = 17
"""About all records: one histogram and sixteen steps, or thirteen and three."""
FEW_WAVES = 3
"""Of each number, where there are more than MANY_NUMBERS: no budget pays for more of them."""
ROUNDS = 3
"""In which weights and the curvature where they lead are found from each other."""
TREMOR = 0.2
"""How far noise may carry outputs while steps are taken, in logits or deviations: further off a sigmoid is flat and
residuals are cut, and what a step says of a weight would depend on the way to it."""
PINNED = 3.0
"""Weights are held back by the square of this times their final noise over what is expected of them: a step measures as
much where little moves, and noise that is walked along is taken for curvature that is not there."""
AS_ASSUMED = 1.25
"""Curvature along the whole way, in units of the assumed one, up to which columns do not move together."""
BEFORE = 1.5
"""Deviations of what is left at the first look that the target itself has, about."""
USUAL_EFFECT, EXPLAINED = 0.5, 0.2
"""Size of a column's weights that is expected beforehand, in logits or in deviations of the target; and the square of
what all columns together are expected to explain, in the same units: of many columns each says less."""


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
    last look at residuals also asks whether what was learnt explains the target (`_additive_last_look`). Of sixteen
    columns or more one release says where the middles of all features are (`_additive_middles`). Where a
    budget is small, weights are held near their start, for steps that follow noise measure worse, and more of a
    record's norm belongs to the constant, so that odds over all records come out first.

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
            return histogram(network.recipe, classes_of(problem.likelihood), clip, self._target_share(problem))
        self.show(problem, state)
        if phase == "together":
            return products(network, state.variances * state.unit**2, clip)
        if phase == "means":
            return means(network, clip)
        if phase == "look":
            last = self._at_the_end(problem, state.step)
            return last_look(network, *self._target(problem, state), clip) if last else residuals(network, clip)
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
        mean, variance, scales, leverage = self._along_the_line(problem, state, self._belief(problem, state))
        used = int((state.variances[1 : 1 + network.recipe.waves] > 0).sum()) if network.recipe.numbers else 0
        facts: dict[str, Any] = {
            "columns": len(network.recipe.blocks),
            "waves": used,
            "smoothness": self.smoothness,
            "quantile_scale": self._schedule(problem).phases[0][0] == "scale",
            "columns_in_use": int((scales > self._usual(problem, state) / 10).sum()),
        }
        likelihood = problem.likelihood
        if isinstance(likelihood, Gaussian) and self._looks(problem):
            likelihood = Gaussian(state.deviation)
            facts |= {"noise_scale": state.deviation, "noise_scale_from": "residuals, within the releases of the run"}
        shares = self._shares(problem, state)
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

    def _looks(self, problem: Problem) -> bool:
        return self._schedule(problem).phases[-1][0] == "look"

    def _at_the_end(self, problem: Problem, step: int) -> bool:
        """Whether what is asked then is asked of what the posterior will be."""
        return self._looks(problem) and step >= problem.plan.steps - self._schedule(problem).phases[-1][1]

    def _target(self, problem: Problem, state: AdditiveState) -> tuple[float, float]:
        """The constant of a number as the network has it, and the number's deviation, about."""
        constant = float(problem.position[0]) * state.unit * constant_of(problem, state.answers)
        return constant, self._spread(problem, state)

    def _spread(self, problem: Problem, state: AdditiveState) -> float:
        """Of a number, from the histogram and from the first look, which is the finer of the two: where bounds are
        wide, the former is mostly noise."""
        return min(to_explain(problem, state.answers), BEFORE * state.looked)

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
            share = self._target_share(problem)
            scale = scale_of(recipe, classes_of(problem.likelihood), counts, noise, problem.records, share)
            doubt = noise / math.sqrt(share) / problem.records
            return replace(self._scaled(problem, scale, doubt), step=state.step)
        if phase == "together":
            columns = together_of(recipe, counts / problem.records, noise / problem.records, state.waves_alike)
            return replace(state, together=columns)
        if phase == "means":
            return self._centred(problem, state, counts / problem.records, noise / problem.records)
        line = TargetLine()
        if self._at_the_end(problem, state.step - 1):
            counts, noise, told, error = parts_of(counts, noise)
            line = line_of(told / problem.records, error / problem.records)
        # What is left to explain is no more than there was, where that could be told.
        told_of = legible(noise / math.sqrt(self._target_share(problem)), problem.records)
        most = min(LARGEST, to_explain(problem, state.answers) * (1 if told_of else 2))
        found = min(most, residual_scale(counts, noise, problem.records, state.deviation))
        looked = found if state.looked == math.inf else state.looked
        told_line = (line.level, line.slope)
        return self._ready(problem, replace(state, deviation=found * line.left, line=told_line, looked=looked))

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

    def _target_share(self, problem: Problem) -> float:
        (_, count), *_ = self._schedule(problem).phases
        return target_share(network_of(problem).recipe, budget_of(problem) * math.sqrt(count / problem.plan.steps))

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
        return clip_share(problem) * CUT * state.deviation / clip_of(problem)

    def _learn(self, problem: Problem, state: AdditiveState, release: Release) -> AdditiveState:
        gain = self._gain(problem, state) / state.unit * problem.records / release.expected_batch
        position = problem.position.double().view(state.velocity.shape) * state.unit
        gradient, share = within(problem.likelihood, release.sum.double().view(position.shape) * gain)
        noise = release.noise_std * gain * share
        flat = max(flatness(problem.likelihood, state.variances, position), FLATTEST)
        curvature, prior, divisor = self._curvatures(problem, state, noise, flat)
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
        problem.position.copy_(((mean := self._belief(problem, state).mean) / state.unit).flatten())
        return held_at(state, mean, done > max(schedule.rests[0], uncounted(problem, state.answers, schedule.learning)))

    def _ready(self, problem: Problem, state: AdditiveState) -> AdditiveState:
        """Before the last look at residuals the network stands where the posterior will have it."""
        steps, schedule = problem.plan.steps, self._schedule(problem)
        if self._looks(problem) and state.step == steps - schedule.phases[-1][1]:
            problem.position.copy_((self._belief(problem, state).mean / state.unit).flatten())
        return state

    def _curvatures(
        self, problem: Problem, state: AdditiveState, noise: float, flat: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the likelihood, as far as it is `flat`, and of the prior, and what steps are divided by, all (outputs,
        features)."""
        curvature = problem.records * curvature_weights(problem.likelihood, state.answers)[:, None] * state.variances
        curvature = curvature * passed(problem)
        spread = to_explain(problem, state.answers)
        square = state.deviation**2 if isinstance(problem.likelihood, Gaussian) else 1.0
        error = noise / math.sqrt(self._schedule(problem).learning) / curvature
        pinned = (PINNED * error / self._usual(problem, state)).square()
        prior = square / spread**2 + pinned.clamp(max=1e6) * curvature
        prior[:, 0] = 0.0  # where the constant belongs nobody knows beforehand
        return curvature * flat, prior, curvature * flat + prior + noise / spread

    def _usual(self, problem: Problem, state: AdditiveState) -> float:
        """Size of a column's weights that is expected beforehand."""
        every = math.sqrt(EXPLAINED / max(float(state.variances[1:].sum()), 1e-12))
        return min(USUAL_EFFECT, every) * to_explain(problem, state.answers)

    # -- posterior -------------------------------------------------------------------------------------------------

    def _belief(self, problem: Problem, state: AdditiveState) -> BelievedWeights:
        curvature, _, _ = self._curvatures(problem, state, 0.0)
        constant, origin = constant_of(problem, state.answers), origin_of(state)
        shares = self._shares(problem, state)
        reached, steps = reached_by(state), spread_of(state)
        if shares is None:
            curvature = curvature * flatness(problem.likelihood, state.variances, reached)
            mean, doubt, scales, leverage = self._weighed(problem, state, curvature)
            before = (state.start_doubt / constant) ** 2
            gain = before / (before + doubt[:, 0])
            mean[:, 0], doubt[:, 0] = gain * mean[:, 0], gain * doubt[:, 0]
            return BelievedWeights(mean + origin, doubt, scales, leverage)
        even = curvature / curvature_weights(problem.likelihood, state.answers)[:, None]
        there = bend_of(problem.likelihood, constant * reached[:, 0], steps)
        spread = steps
        for _ in range(ROUNDS):
            here = bend_at(problem, shares, spread)
            ratio = (there / here)[:, None]
            mean, doubt, scales, leverage = self._weighed(problem, state, even * here[:, None], ratio)
            spread = (state.variances * (mean.square() + doubt))[:, 1:].sum(1)
        doubt = doubt / free_part(len(doubt))  # for predictions draw every output by itself
        # Shares are to come out as measured on average over what columns are believed to add, and its doubt.
        own = self._own_level(problem, state, there)
        level, error = constants_of(shares, spread, steps, constant * reached[:, 0], own)
        mean[:, 0], doubt[:, 0] = level / constant - origin[:, 0], error / constant**2
        return BelievedWeights(mean + origin, doubt, scales, leverage)

    def _along_the_line(self, problem: Problem, state: AdditiveState, belief: BelievedWeights) -> BelievedWeights:
        """What is believed in the end, once it is known how the target follows what was learnt."""
        level, slope = state.line
        if not isinstance(problem.likelihood, Gaussian):
            return belief
        mean, variance = slope * belief.mean, slope**2 * belief.variance
        constant = level * self._spread(problem, state) / constant_of(problem, state.answers)
        mean[:, 0], variance[:, 0] = belief.mean[:, 0] + constant, belief.variance[:, 0]
        return belief._replace(mean=mean, variance=variance)

    def _own_level(self, problem: Problem, state: AdditiveState, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Constants by a Newton step from where the steps that count were taken, and their variances by noise."""
        constant, clip = constant_of(problem, state.answers), clip_share(problem)
        level, sums = constant * reached_by(state)[:, 0], state.sums[:, :, 0]
        residual, noise = own_residuals(sums, level, constant, problem.records, spread_of(state), clip)
        return level - residual / bend, (noise / bend).square()

    def _weighed(
        self, problem: Problem, state: AdditiveState, curvature: Tensor, reached: Tensor | float = 1.0
    ) -> BelievedWeights:
        """What steps say of all weights under a curvature, with what is expected of columns beforehand; the constant's
        as it was measured."""
        if state.together is not None:
            known = state.deviation**2 * passed(problem), self._usual(problem, state)
            return weighed_together(state, network_of(problem).recipe, curvature[0], *known)
        axes, alike = Axes.of(state.variances, state.waves_alike), self._alike(problem, state, curvature)
        curvature = curvature[:, :1] / state.variances[0] * axes.variances
        found, noise = measured(torch.cat([state.sums[:1], axes.along(state.sums[1:])]), curvature, alike, reached)
        square = state.deviation**2 if isinstance(problem.likelihood, Gaussian) else 1.0
        sampling = square * passed(problem) * free_part(len(found)) / curvature.clamp(min=1e-12)
        groups, usual, variance = network_of(problem).recipe.groups(), self._usual(problem, state), sampling + noise
        # Records say more of columns that move together than of each by itself: the former decides how much of them
        # is believed, the latter how wide a band is. Noise is alike for all.
        mean, _, scales = shrunk(found, sampling / alike + noise, groups, usual)
        _, doubt, _ = shrunk(found, variance, groups, usual)
        leverage = leverage_of(mean, found, curvature, axes.variances, alike)
        mean, doubt = axes.back(mean), axes.variances_back(doubt)
        unused = state.variances == 0
        mean[:, unused], doubt[:, unused] = 0.0, 0.0
        return BelievedWeights(mean, doubt, scales, leverage)

    def _alike(self, problem: Problem, state: AdditiveState, curvature: Tensor) -> float:
        """How many columns move together, about, where it was not asked which.

        What holds weights near their start is undone by what steps measure. Along what columns have in common there is
        less to undo, by as many times as there are such columns, and nothing is learnt of that after the last step. So
        of many columns it is taken for the middle between none and all of them, on a logarithmic scale, unless the
        whole way shows that the curvature is the assumed one.
        """
        if state.loose is None or float(state.sums[0].max()) <= LEAST_WEIGHT:
            return state.alike
        if along_the_way(state.first, state.sums, curvature) < AS_ASSUMED:
            return state.alike
        return max(state.alike, math.sqrt(len(network_of(problem).recipe.blocks)))

    def _shares(self, problem: Problem, state: AdditiveState) -> tuple[Tensor, Tensor] | None:
        """Shares of the classes by all steps that count, and their deviations."""
        if not isinstance(problem.likelihood, Categorical | Bernoulli):
            return None
        constant, counted = constant_of(problem, state.answers), (state.answers, self._count_noise(problem))
        start, steps = state.start * constant, spread_of(state)
        return shares_of(state.sums[:, :, 0], start, constant, problem.records, steps, counted, clip_share(problem))

    def _count_noise(self, problem: Problem) -> float:
        """In the shares of the histogram."""
        (phase, count), *_ = self._schedule(problem).phases
        if phase != "scale":
            return math.inf
        noise = problem.plan.mechanism.noise_multiplier / problem.plan.expected_batch
        return noise / math.sqrt(count * self._target_share(problem))


__all__ = ["Additive", "AdditiveState", "histogram_size"]
