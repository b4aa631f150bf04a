"""Features: softmax regression, or a network, on features of one length such as those of pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from confide.data.pictures import LENGTH
from confide.errors import Refusal
from confide.mechanism.clipping import Recordwise
from confide.mechanism.plan import Plan
from confide.methods import _sketch
from confide.methods.base import Method, Opening, Problem
from confide.methods.sgd import SGD, SgdState
from confide.models.likelihoods import Bernoulli, Categorical
from confide.models.networks import MLP, Shift, recipe_of
from confide.models.priors import FlatPrior
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Query, Release, StatisticQuery

SHARE = 0.2
"""Part of epsilon that the mean feature may cost, about 4 % of mu^2: at 60 000 records and epsilon 1 it is then off by
two hundredths of a feature's length."""
BATCHES, EPOCHS = 8, 15.0
"""120 steps. At the same mu an eighth of the records is as good as all of them, and costs an eighth of the time."""
CLIP = 0.5
"""Largest gradient of a record, where centred features have length 1 and a residual is at most the root of 2."""
RATE, MOMENTUM = 60.0, 0.9
"""The largest rate: features differ in scale by powers of ten, and the small ones are learnt in 120 steps by it."""
WALK = 1.3
"""How far noise alone may carry a weight in all steps, had it no curvature: a smaller budget takes shorter steps."""
AVERAGED, GROUPS = 0.2, 8
"""Share of the steps, the last ones, whose positions are averaged, and stretches of them: that the means of stretches
differ shows how much noise is left in the mean of all."""
SKETCHED = 0.1
"""Of the square of a record's norm in the first release, what tells along how many directions features differ."""
SHORTEST = 0.2
"""Length of a centred feature, as a part of L, that is still brought to 1."""


@dataclass(frozen=True)
class FeatureState:
    """Functions of releases alone.

    centre   mean feature as released, shrunk by its noise; None before that
    concentration   of features on few directions, see `_sketch`
    descent  of the weights
    means    (GROUPS, weights): mean position over each stretch
    """

    step: int
    centre: Tensor | None = field(repr=False)
    descent: SgdState
    means: Tensor = field(repr=False)
    concentration: float = _sketch.USUAL


@dataclass(frozen=True)
class FeatureRegression(Method):
    """Classes from features x of one length L, of which the mean is learnt first:

        logits = W s (x - c) + b,        c the released mean,   s = 1 / root(L^2 - |c|^2).

    What all records share tells nothing of a class, and would use up the clip: the first release is the mean feature
    of all records, shrunk by what noise leaves open, with a sketch of how features differ (`_sketch`). Then follow
    steps of momentum on sampled batches, and the last positions are averaged. The centre is folded into the weights in
    the end, so that a plain network comes out.

    The posterior is a list of draws around that average, which differ as the averages over stretches of the way do:
    they hold the privacy noise that is left, and not the width that a few records would leave without any.

    Papers: Tramer and Boneh, ICLR 2021 (private linear models of scattering features); Polyak and Juditsky, SIAM
    Journal on Control and Optimization 1992 (averaging).

    rate     the largest rate of a step; a small budget takes shorter ones
    The clip of the plan is a unit and no setting: gradients are scaled to it. Features of other lengths are learnt too,
    but of a table with few columns steps are too short and probabilities wrong: leave the method of tables to "auto".
    A network with hidden layers descends by Adam.
    """

    rate: float = RATE
    name: ClassVar[str] = "features"
    noise_in_width: ClassVar[str] = "counted, and nothing else"
    on_host: ClassVar[bool] = True
    tasks: ClassVar[tuple[str, ...]] = ("classification", "binary")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise Refusal(f"rate={self.rate}: must be a finite number > 0")

    @property
    def opening(self) -> Opening:
        return Opening(1, SHARE, BATCHES, EPOCHS)

    @property
    def recalibrates(self) -> bool:
        return True

    def prepare(self, module: nn.Module) -> nn.Module:
        if recipe_of(module) is None or type(module) is not MLP:
            raise Refusal(
                f"module={type(module).__name__}: this method folds a centre into the first layer of a network by "
                "recipe; use one of confide.networks, or another method"
            )
        return module

    # -- the four functions ---------------------------------------------------------------------------------------

    def init(self, problem: Problem) -> FeatureState:
        if not isinstance(problem.likelihood, Categorical | Bernoulli):
            raise Refusal(f"likelihood={problem.likelihood.name!r}: features explain classes; use categorical")
        second = self._second(problem)
        descent = SgdState(0) if second is None else self._descent(problem).init(second)
        return FeatureState(0, None, descent, torch.zeros(GROUPS, len(problem.position), dtype=torch.float64))

    def ask(self, problem: Problem, state: FeatureState) -> Query:
        clip = _clip(problem)
        if state.centre is None:
            told, size = partial(_first_told, _sketch.signs(_inputs(problem)), clip), _inputs(problem) + _sketch.SIZE
            return StatisticQuery(Recordwise(told, None), size)
        shift = Shift(state.centre.to(problem.position.dtype), self._scale(problem, state))
        return GradientQuery(nn.Sequential(shift, problem.module), problem.likelihood.loss)

    def tell(self, problem: Problem, state: FeatureState, release: Release) -> FeatureState:
        if state.centre is None:
            centre, concentration = _first_heard(release, _clip(problem), _inputs(problem))
            return replace(state, step=1, centre=centre, concentration=concentration)
        second = self._second(problem)
        assert second is not None  # there are steps beyond the first
        descent = self._descent(problem).tell(second, state.descent, release)
        counted, all_counted = descent.step - (second.plan.steps - _averaged(second.plan)), _averaged(second.plan)
        means = state.means
        if counted > 0:
            group = (counted - 1) * GROUPS // all_counted
            size = sum(1 for place in range(all_counted) if place * GROUPS // all_counted == group)
            means = means.clone()
            means[group] += problem.position.double() / size
        return replace(state, step=state.step + 1, descent=descent, means=means)

    def posterior(self, problem: Problem, state: FeatureState) -> Draws:
        second = self._second(problem)
        used = state.means[: min(GROUPS, _averaged(second.plan))] if second is not None else state.means[:1]
        mean = used.mean(0)
        off = (used - mean) / math.sqrt(max(1, len(used) - 1))
        draws = self._folded(problem, state, mean + off).to(problem.position.dtype)
        problem.position.copy_(draws.mean(0))
        facts: dict[str, Any] = {
            "draws": len(draws),
            "spread": float(off.square().mean().sqrt()),
            "centre_length": 0.0 if state.centre is None else float(state.centre.norm()) / LENGTH,
            "rate": None if second is None else self._rate(problem),
        }
        if facts["rate"] is not None:
            length = self._length_of_way(problem)
            facts["own_pull"] = CLIP * length / problem.records
            facts["pulled_back"] = length * state.concentration
        weights = torch.full((len(draws),), 1 / len(draws), dtype=draws.dtype)
        return Draws(problem.module, problem.likelihood, draws, weights, facts)

    # -- scales and steps ------------------------------------------------------------------------------------------

    def _scale(self, problem: Problem, state: FeatureState) -> float:
        """Of centred features: to length 1, and then such that the plan's clip is the one that is wanted."""
        assert state.centre is not None
        length = LENGTH * math.sqrt(max(1 - float((state.centre / LENGTH).square().sum()), SHORTEST**2))
        return _unit(problem) / length

    def _folded(self, problem: Problem, state: FeatureState, rows: Tensor) -> Tensor:
        """Rows of weights for features as they come: W s (x - c) + b = (W s) x + (b - W s c)."""
        if state.centre is None:
            return rows
        features = _inputs(problem)
        first = next(problem.module.parameters())
        units = first.shape[0]
        weight = rows[:, : units * features].reshape(-1, units, features) * self._scale(problem, state)
        bias = rows[:, units * features : units * (features + 1)] - weight @ state.centre
        return torch.cat([weight.flatten(1), bias, rows[:, units * (features + 1) :]], 1)

    def _second(self, problem: Problem) -> Problem | None:
        """The problem as the descent sees it: the plan after its first release."""
        (mechanism, count), *rest = problem.plan.blocks
        blocks = (((mechanism, count - 1),) if count > 1 else ()) + tuple(rest)
        return replace(problem, plan=replace(problem.plan, blocks=blocks)) if blocks else None

    def _descent(self, problem: Problem) -> SGD:
        if _is_linear(problem):
            rate = self._rate(problem)
            return SGD(prior=FlatPrior(), optimiser="momentum", learning_rate=rate, momentum=MOMENTUM)
        return SGD(prior=FlatPrior(), optimiser="adam")

    def _rate(self, problem: Problem) -> float | None:
        """Of momentum, in units of scaled features: gradients are longer by the unit, and weights shorter."""
        second = self._second(problem)
        if second is None or not _is_linear(problem):
            return None
        rate, plan = self.rate, second.plan
        noise = plan.mechanism.noise_multiplier * CLIP / plan.expected_batch
        if noise > 0:
            rate = min(rate, WALK * (1 - MOMENTUM) / (noise * math.sqrt(plan.steps)))
        return rate / _unit(problem) ** 2

    def _length_of_way(self, problem: Problem) -> float:
        """What a gradient would have moved its logits by on average over the positions that count, had it stayed the
        same, where features have length 1. Momentum comes after the gradient by some steps."""
        second, rate = self._second(problem), self._rate(problem)
        steps = 0.0 if second is None else second.plan.steps * (1 - AVERAGED / 2)
        return (rate or 0.0) * _unit(problem) ** 2 / (1 - MOMENTUM) * max(steps - MOMENTUM / (1 - MOMENTUM), 0.0)


def _clip(problem: Problem) -> float:
    clip = problem.plan.mechanism.clip
    return clip if math.isfinite(clip) else 1.0


def _unit(problem: Problem) -> float:
    """Length of a centred feature at which the plan's clip is CLIP for one of length 1."""
    return _clip(problem) / CLIP


def _inputs(problem: Problem) -> int:
    recipe = recipe_of(problem.module)
    assert recipe is not None  # `prepare` saw to it
    return recipe.features


def _is_linear(problem: Problem) -> bool:
    recipe = recipe_of(problem.module)
    return recipe is not None and not recipe.hidden


def _averaged(plan: Plan) -> int:
    """Steps whose positions count."""
    return max(1, round(AVERAGED * plan.steps))


def _first_told(signs: Tensor, clip: float, x: Tensor, y: Tensor) -> Tensor:
    """The feature itself and the products of its sketch, together as long as the clip."""
    features = x.flatten(1)
    rows = torch.empty(len(features), len(signs) + _sketch.SIZE, dtype=torch.float64)
    feature, sketch = rows.split([len(signs), _sketch.SIZE], 1)
    torch.div(features, LENGTH, out=feature)
    sketch[:] = clip * math.sqrt(SKETCHED) * _sketch.products(feature, signs)
    feature *= clip * math.sqrt(1 - SKETCHED)
    return rows


def _first_heard(release: Release, clip: float, inputs: int) -> tuple[Tensor, float]:
    """The mean feature, less the part of its length that noise alone would have, and how concentrated features are."""
    unit = release.expected_batch * clip
    mean, products = (release.sum.double() / unit).split([inputs, _sketch.SIZE])
    mean, noise = mean / math.sqrt(1 - SKETCHED), release.noise_std / unit / math.sqrt(1 - SKETCHED)
    length = float(mean.square().sum())
    share = max(0.0, 1 - len(mean) * noise**2 / length) if length > 0 else 0.0
    mean = mean * share
    mean = mean / max(1.0, float(mean.norm()))
    loud = release.noise_std / unit / math.sqrt(SKETCHED)
    return LENGTH * mean, _sketch.concentration(products / math.sqrt(SKETCHED), loud, mean)


__all__ = ["FeatureRegression", "FeatureState"]
