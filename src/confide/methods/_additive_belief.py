"""What an additive fit believes of its weights, from what steps have told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.methods._additive import BelievedWeights, Schedule, leverage_of, measured, shrunk, target_share
from confide.methods._additive_levels import LEAST_WEIGHT, constants_of, free_part, own_residuals, shares_of
from confide.methods._additive_middles import LEAST_COLUMNS
from confide.methods._additive_problem import (
    bend_at,
    bend_of,
    budget_of,
    clip_share,
    constant_of,
    curvature_weights,
    flatness,
    network_of,
    passed,
    to_explain,
)
from confide.methods._additive_state import AdditiveState, origin_of, reached_by, spread_of
from confide.methods._additive_steps import Axes, along_the_way
from confide.methods._additive_together import weighed_together
from confide.methods.base import Problem
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian

ROUNDS = 3
"""In which weights and the curvature where they lead are found from each other."""
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


def histogram_share(problem: Problem, schedule: Schedule) -> float:
    """Of the square of a record's norm in the histogram: what belongs to the target."""
    (_, count), *_ = schedule.phases
    return target_share(network_of(problem).recipe, budget_of(problem) * math.sqrt(count / problem.plan.steps))


@dataclass(frozen=True)
class Beliefs:
    """Of one fit after so many releases: functions of the state alone."""

    problem: Problem
    state: AdditiveState
    schedule: Schedule

    def spread(self) -> float:
        """Of a number, from the histogram and from the first look, which is the finer of the two: where bounds are
        wide, the former is mostly noise."""
        problem, state = self.problem, self.state
        return max(min(to_explain(problem, state.answers), BEFORE * state.looked), state.tails)

    def curvatures(self, noise: float, flat: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Of the likelihood, as far as it is `flat`, and of the prior, and what steps are divided by, all (outputs,
        features)."""
        problem, state = self.problem, self.state
        curvature = problem.records * curvature_weights(problem.likelihood, state.answers)[:, None] * state.variances
        curvature = curvature * passed(problem)
        spread = to_explain(problem, state.answers)
        square = state.deviation**2 if isinstance(problem.likelihood, Gaussian) else 1.0
        error = noise / math.sqrt(self.schedule.learning) / curvature
        pinned = (PINNED * error / self.usual()).square()
        prior = square / spread**2 + pinned.clamp(max=1e6) * curvature
        prior[:, 0] = 0.0  # where the constant belongs nobody knows beforehand
        return curvature * flat, prior, curvature * flat + prior + noise / spread

    def usual(self) -> float:
        """Size of a column's weights that is expected beforehand."""
        problem, state = self.problem, self.state
        every = math.sqrt(EXPLAINED / max(float(state.variances[1:].sum()), 1e-12))
        return min(USUAL_EFFECT, every) * to_explain(problem, state.answers)

    def weights(self) -> BelievedWeights:
        problem, state = self.problem, self.state
        curvature, _, _ = self.curvatures(0.0)
        constant, origin = constant_of(problem, state.answers), origin_of(state)
        shares = self.shares()
        reached, steps = reached_by(state), spread_of(state)
        if shares is None:
            curvature = curvature * flatness(problem.likelihood, state.variances, reached)
            found = self._weighed(curvature)
            before = (state.start_doubt / constant) ** 2
            gain = before / (before + found.variance[:, 0])
            found.mean[:, 0] *= gain
            found.variance[:, 0] *= gain
            return found._replace(mean=found.mean + origin)
        even = curvature / curvature_weights(problem.likelihood, state.answers)[:, None]
        there = bend_of(problem.likelihood, constant * reached[:, 0], steps)
        spread = steps
        for _ in range(ROUNDS):
            here = bend_at(problem, shares, spread)
            ratio = (there / here)[:, None]
            mean, doubt, scales, leverage, _ = self._weighed(even * here[:, None], ratio)
            spread = (state.variances * (mean.square() + doubt))[:, 1:].sum(1)
        doubt = doubt / free_part(len(doubt))  # for predictions draw every output by itself
        # Shares are to come out as measured on average over what columns are believed to add, and its doubt.
        own = self._own_level(there)
        level, error = constants_of(shares, spread, steps, constant * reached[:, 0], own)
        mean[:, 0], doubt[:, 0] = level / constant - origin[:, 0], error / constant**2
        return BelievedWeights(mean + origin, doubt, scales, leverage)

    def along_the_line(self, belief: BelievedWeights) -> BelievedWeights:
        """What is believed in the end, once it is known how the target follows what was learnt."""
        problem, state = self.problem, self.state
        level, slope = state.line
        if not isinstance(problem.likelihood, Gaussian):
            return belief
        mean, variance = slope * belief.mean, slope**2 * belief.variance
        constant = level * self.spread() / constant_of(problem, state.answers)
        mean[:, 0], variance[:, 0] = belief.mean[:, 0] + constant, belief.variance[:, 0]
        return belief._replace(mean=mean, variance=variance)

    def _own_level(self, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Constants by a Newton step from where the steps that count were taken, and their variances by noise."""
        problem, state = self.problem, self.state
        constant, clip = constant_of(problem, state.answers), clip_share(problem)
        level, sums = constant * reached_by(state)[:, 0], state.sums[:, :, 0]
        residual, noise = own_residuals(sums, level, constant, problem.records, spread_of(state), clip)
        return level - residual / bend, (noise / bend).square()

    def _weighed(self, curvature: Tensor, reached: Tensor | float = 1.0) -> BelievedWeights:
        """What steps say of all weights under a curvature, with what is expected of columns beforehand; the constant's
        as it was measured."""
        problem, state = self.problem, self.state
        if state.together is not None:
            known = state.deviation**2 * passed(problem), self.usual()
            return weighed_together(state, network_of(problem).recipe, curvature[0], *known)
        axes, alike = Axes.of(state.variances, state.waves_alike), self._alike(curvature)
        curvature = curvature[:, :1] / state.variances[0] * axes.variances
        found, noise = measured(torch.cat([state.sums[:1], axes.along(state.sums[1:])]), curvature, alike, reached)
        square = state.deviation**2 if isinstance(problem.likelihood, Gaussian) else 1.0
        sampling = square * passed(problem) * free_part(len(found)) / curvature.clamp(min=1e-12)
        groups, usual, variance = network_of(problem).recipe.groups(), self.usual(), sampling + noise
        # Records say more of columns that move together than of each by itself: the former decides how much of them
        # is believed, the latter how wide a band is. Noise is alike for all.
        mean, _, scales = shrunk(found, sampling / alike + noise, groups, usual)
        _, doubt, _ = shrunk(found, variance, groups, usual)
        leverage = leverage_of(mean, found, curvature, axes.variances, alike)
        mean, doubt = axes.back(mean), axes.variances_back(doubt)
        unused = state.variances == 0
        mean[:, unused], doubt[:, unused] = 0.0, 0.0
        return BelievedWeights(mean, doubt, scales, leverage)

    def _alike(self, curvature: Tensor) -> float:
        """How many columns move together, about, where it was not asked which.

        What holds weights near their start is undone by what steps measure. Along what columns have in common there is
        less to undo, by as many times as there are such columns, and nothing is learnt of that after the last step. So
        of many columns it is taken for the middle between none and all of them, on a logarithmic scale, unless the
        whole way shows that the curvature is the assumed one.
        """
        problem, state = self.problem, self.state
        columns = len(network_of(problem).recipe.blocks)
        if columns < LEAST_COLUMNS or float(state.sums[0].max()) <= LEAST_WEIGHT:
            return state.alike
        if along_the_way(state.first, state.sums, curvature) < AS_ASSUMED:
            return state.alike
        return max(state.alike, math.sqrt(columns))

    def shares(self) -> tuple[Tensor, Tensor] | None:
        """Shares of the classes by all steps that count, and their deviations."""
        problem, state = self.problem, self.state
        if not isinstance(problem.likelihood, Categorical | Bernoulli):
            return None
        constant, counted = constant_of(problem, state.answers), (state.answers, self._count_noise())
        start, steps = state.start * constant, spread_of(state)
        return shares_of(state.sums[:, :, 0], start, constant, problem.records, steps, counted, clip_share(problem))

    def _count_noise(self) -> float:
        """In the shares of the histogram."""
        problem = self.problem
        (phase, count), *_ = self.schedule.phases
        if phase != "scale":
            return math.inf
        noise = problem.plan.mechanism.noise_multiplier / problem.plan.expected_batch
        return noise / math.sqrt(count * histogram_share(problem, self.schedule))
