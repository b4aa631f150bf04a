"""Tabular: effects of all columns first, then a network for what they leave."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confide import rules
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.plan import Plan
from confide.methods._additive_problem import CUT, budget_of, clip_of, clip_share
from confide.methods._tabular_gain import Layers, MadeUpDescent, believed_share
from confide.methods.additive import RELEASES, Additive, AdditiveState
from confide.methods.base import Method, Opening, Problem
from confide.methods.sgd import SGD, SgdState
from confide.models.additive import AdditiveNetwork
from confide.models.likelihoods import Categorical, Gaussian, Likelihood
from confide.models.networks import recipe_of
from confide.models.tabular import TabularNetwork, TabularRecipe
from confide.posteriors.draws import Draws
from confide.sources.queries import GradientQuery, Query, Release

SHARE = 0.5
"""Part of epsilon that the effects may cost, about a quarter of mu^2: they need little, and more buys them little."""
BATCHES, EPOCHS = 16, 30.0
"""Of the network: some hundred steps, each about many records."""
STEPS_SHARE = 0.5
"""The same in steps, where all of them are alike: with 0.3 the effects of a linear truth were learnt too little of."""
AVERAGED = 0.3
"""Share of the network's steps, the last ones, whose positions are averaged."""
LARGEST_UNIT = 4.0
"""Deviations of what the effects leave that are the unit of the network's outputs, at most."""
WALK, MOST_WALK = 0.14, 0.45
"""How far noise alone carries a weight over all steps: numbers, at a budget n mu of 1 for a weight. It grows
with the root of that budget, since what is learnt then outweighs it, up to about a weight's own size."""
CLASS_WALK = 0.1
"""The same for classes: labels say less than numbers do, and probabilities suffer from noise in all outputs."""
GROUPS = 8
"""Stretches of those steps. That their means differ shows how much noise is left in the mean of all."""
DRAWS = 32
"""Of the posterior: an error of a fifth in its spread, and a file that stays small."""
KEPT_FACTS = ("columns", "waves", "quantile_scale", "columns_in_use", "leverage", "levels")
"""Of the effects, that stand among those of the whole. Their leverage is what is known of how far a record has moved
its own outputs: the network, whose steps are noisier, adds to it."""
MADE_UP = 256
"""Records, evenly spread, over which the usual length of a gradient is taken."""


@dataclass(frozen=True)
class TabularState:
    """Functions of releases alone.

    effects   the state of the additive method
    descent   that of the network's descent
    means     (GROUPS, weights): mean position of the network over each stretch
    """

    step: int
    effects: AdditiveState
    descent: SgdState
    means: Tensor = field(repr=False)


@dataclass(frozen=True)
class Tabular(Method):
    """An additive model and a network beside it: f(x) = effects(x) + network(x).

    First the effects of all columns are learnt from a few releases about all records (see `Additive`). They stay where
    they are, and a network learns from sampled batches what they leave: what columns say together. It sees numbers on
    the private quantile scale, starts at zero, descends by Adam, and its last positions are averaged. So a small gain
    of the network costs nothing that the effects have, and a larger budget buys more of both.

    The posterior is a list of draws: effects from their closed form, and the network's average, shifted by how much
    averages over stretches of the way differ, over the root of their number: the noise that is left in it. The network
    of a number is believed as far as it is more than the same steps make of noise (see `_tabular_gain`): where columns
    say nothing together, it is left out.

    Papers: Nori et al., ICML 2021 (private additive models); Kingma and Ba, ICLR 2015 (Adam); Polyak and Juditsky, SIAM
    Journal on Control and Optimization 1992 (averaging).

    smoothness   of the effects, see `Additive`
    hidden       units of the network, where it is made here

    The clip of the plan is a unit and no setting, as in `Additive`.
    """

    smoothness: float = 1.0
    hidden: int = rules.WIDE_LAYER[0]
    name: ClassVar[str] = "tabular"
    noise_in_width: ClassVar[str] = "counted"
    on_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._effects()
        if self.hidden < 1:
            raise Refusal(f"hidden={self.hidden}: must be at least 1")

    @property
    def opening(self) -> Opening:
        return Opening(RELEASES, SHARE, BATCHES, EPOCHS)

    @property
    def recalibrates(self) -> bool:
        return True

    def network(self, schema: Schema, inputs: int, outputs: int) -> nn.Module:
        effects = self._effects().network(schema, inputs, outputs)
        return TabularNetwork(TabularRecipe(effects.recipe, (self.hidden,)), _start())

    def prepare(self, module: nn.Module) -> nn.Module:
        if isinstance(module, TabularNetwork):
            return module
        recipe = recipe_of(module)
        hidden = (self.hidden,) if recipe is None or not recipe.hidden else recipe.hidden
        effects = self._effects().prepare(module)
        assert isinstance(effects, AdditiveNetwork)
        return TabularNetwork(TabularRecipe(effects.recipe, hidden), _start()).to(next(module.parameters()).dtype)

    # -- the four functions ---------------------------------------------------------------------------------------

    def init(self, problem: Problem) -> TabularState:
        size = _size(_network(problem).network)
        effects = self._effects().init(self._first(problem))
        moments = torch.zeros(2, size, dtype=problem.position.dtype)
        descent = SgdState(0, moments[0].clone(), moments[1].clone(), None)
        return TabularState(0, effects, descent, torch.zeros(GROUPS, size, dtype=torch.float64))

    def ask(self, problem: Problem, state: TabularState) -> Query:
        module, first = _network(problem), _stages(problem.plan)[0]
        learning = state.step >= first.steps
        if not learning:
            return self._effects().ask(self._first(problem), state.effects)
        self._show(problem, state)
        return GradientQuery(_with_fixed_effects(module), self._likelihood(problem, state).loss)

    def tell(self, problem: Problem, state: TabularState, release: Release) -> TabularState:
        first, _ = _stages(problem.plan)
        if state.step < first.steps:
            effects = self._effects().tell(self._first(problem), state.effects, release)
            state = replace(state, step=state.step + 1, effects=effects)
            if state.step == first.steps:
                self._effects().posterior(self._first(problem), effects)  # moves the weights to their mean
            return state
        second = self._second(problem)
        descent = _descent(_network(problem).recipe, second).tell(second, state.descent, release)
        counted, all_counted = descent.step - (second.plan.steps - _averaged(second)), _averaged(second)
        means = state.means
        if counted > 0:
            group = (counted - 1) * GROUPS // all_counted
            means = means.clone()
            means[group] += second.position.double() / _size_of(group, all_counted)
        return replace(state, step=state.step + 1, descent=descent, means=means)

    def posterior(self, problem: Problem, state: TabularState) -> Draws:
        module = _network(problem)
        found = self._effects().posterior(self._first(problem), state.effects)
        self._show(problem, state)
        effects = found.sample(DRAWS, torch.Generator().manual_seed(0))
        effects = effects - effects.mean(0) + found.centre
        network, spread = self._around(problem, state)
        share = self._believed(problem, state, network.mean(0))
        before, last = network[:, : -_last_size(module)], network[:, -_last_size(module) :]
        draws = torch.cat([effects, before, share * last], 1).to(problem.position.dtype)  # outputs are linear in it
        facts: dict[str, Any] = {
            **{name: found.facts[name] for name in KEPT_FACTS if name in found.facts},
            "hidden": list(module.recipe.hidden),
            "draws": DRAWS,
            "network_spread": spread,
            "network_believed": round(share, 4),
        }
        problem.position.copy_(draws.mean(0))
        return Draws(module, problem.likelihood, draws, torch.full((DRAWS,), 1 / DRAWS, dtype=draws.dtype), facts)

    # -- the two stages --------------------------------------------------------------------------------------------

    def _effects(self) -> Additive:
        return Additive(smoothness=self.smoothness)

    def _first(self, problem: Problem) -> Problem:
        """The problem as the additive method sees it."""
        module, plan = _network(problem).effects, _stages(problem.plan)[0]
        size = _size(module)
        return Problem(module, problem.position[:size], problem.likelihood, plan, problem.generator)

    def _second(self, problem: Problem) -> Problem:
        """The problem as the descent sees it."""
        module, plan = _network(problem), _stages(problem.plan)[1]
        assert plan is not None  # there are steps beyond the first stage
        size = _size(module.effects)
        return Problem(module.network, problem.position[size:], problem.likelihood, plan, problem.generator)

    def _show(self, problem: Problem, state: TabularState) -> None:
        """Put scales and unit into the network."""
        module = _network(problem)
        self._effects().show(self._first(problem), state.effects)
        amplitudes = module.effects.features.amplitudes[module.chosen]
        module.scales.copy_(torch.where(amplitudes > 0, 1 / amplitudes, torch.zeros_like(amplitudes)))
        module.unit.fill_(self._unit(problem, state))

    def _unit(self, problem: Problem, state: TabularState) -> float:
        """Of the network's outputs. Classes: such that the plan's clip is the one that is wanted.

        Numbers: so many deviations of what the effects leave as there is budget for a weight. Steps of a weight have a
        length of their own, so the unit says how far outputs move in all: far where noise is small, else not.
        """
        recipe = _network(problem).recipe
        if _stages(problem.plan)[1] is None:
            return 1.0
        second = self._second(problem)
        if isinstance(problem.likelihood, Gaussian):
            return state.effects.deviation * min(max(_budget_of_a_weight(recipe, second), 1.0), LARGEST_UNIT)
        largest = math.sqrt(2) if isinstance(problem.likelihood, Categorical) else 1.0
        return clip_of(second) / (clip_share(second) * largest * _usual_gradient(recipe))

    def _likelihood(self, problem: Problem, state: TabularState) -> Likelihood:
        """Whose gradient is asked: a number's residual is in such units that the clip cuts it at CUT deviations."""
        if not isinstance(problem.likelihood, Gaussian):
            return problem.likelihood
        second = self._second(problem)
        longest = clip_share(second) * CUT * state.effects.deviation * self._unit(problem, state)
        return Gaussian(math.sqrt(longest * _usual_gradient(_network(problem).recipe) / clip_of(second)))

    def _around(self, problem: Problem, state: TabularState) -> tuple[Tensor, float]:
        """(DRAWS, weights) of the network, and how far they are from their mean."""
        if _stages(problem.plan)[1] is None:
            return self._at_start(problem).expand(DRAWS, -1), 0.0
        used = state.means[: min(GROUPS, _averaged(self._second(problem)))]
        mean = used.mean(0)
        off = (used - mean) / math.sqrt(max(1, len(used) - 1))
        rows = (mean + off).repeat(math.ceil(DRAWS / len(used)), 1)[:DRAWS]
        return rows, float(off.square().mean().sqrt())

    def _believed(self, problem: Problem, state: TabularState, learnt: Tensor) -> float:
        """Share of the network's outputs that is no noise; of classes, and of more layers than one, all of them."""
        module, plan = _network(problem), _stages(problem.plan)[1]
        noisy = plan is not None and plan.mechanism.noise_multiplier > 0 and math.isfinite(plan.mechanism.clip)
        if not noisy or not isinstance(problem.likelihood, Gaussian) or len(module.recipe.hidden) != 1:
            return 1.0
        second, likelihood = self._second(problem), self._likelihood(problem, state)
        assert isinstance(likelihood, Gaussian)
        mechanism, effects = second.plan.mechanism, module.recipe.effects
        start = TabularNetwork(module.recipe, _start()).network
        descent = MadeUpDescent(
            start=_layers(module, torch.cat([p.detach().flatten() for p in start.parameters()])),
            centres=state.effects.centres[module.chosen.cpu()].float(),
            numbers=len(effects.numbers),
            used=(module.scales > 0).float().cpu(),
            unit=self._unit(problem, state),
            gain=likelihood.noise_scale**2,
            deviation=state.effects.deviation,
            records=second.records,
            sampling=mechanism.rate,
            steps=second.plan.steps,
            averaged=_averaged(second),
            rate=_descent(module.recipe, second).rate(second),
            clip=mechanism.clip,
            noise=mechanism.noise_std,
        )
        return believed_share(descent, _layers(module, learnt.float().cpu()))

    def _at_start(self, problem: Problem) -> Tensor:
        size = _size(_network(problem).effects)
        return problem.position[size:].double()[None]


def _budget_of_a_weight(recipe: TabularRecipe, second: Problem) -> float:
    """n mu over the weights of the network."""
    return budget_of(second) / rules.weight_count((recipe.network.features, *recipe.hidden, recipe.outputs))


def _descent(recipe: TabularRecipe, second: Problem) -> SGD:
    """Adam moves a weight by about rate * sqrt(steps) where noise dominates: that is what is fixed."""
    walk = CLASS_WALK
    if isinstance(second.likelihood, Gaussian):
        walk = min(WALK * math.sqrt(_budget_of_a_weight(recipe, second)), MOST_WALK)
    return SGD(optimiser="adam", learning_rate=max(walk, 1e-6) / math.sqrt(second.plan.steps))


def _start() -> torch.Generator:
    """The network's first weights are public and always the same."""
    return torch.Generator().manual_seed(0)


def _network(problem: Problem) -> TabularNetwork:
    assert isinstance(problem.module, TabularNetwork)  # `prepare` made it
    return problem.module


def _last_size(module: TabularNetwork) -> int:
    """Weights of the network's last layer and its constants."""
    return (module.recipe.hidden[-1] + 1) * module.recipe.outputs


def _layers(module: TabularNetwork, weights: Tensor) -> Layers:
    """Of a network with one hidden layer and one output, from all its weights."""
    shapes = [parameter.shape for parameter in module.network.parameters()]
    parts = weights.split([shape.numel() for shape in shapes])
    hidden, constants, last, constant = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return hidden, constants, last, constant


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


_FIXED: WeakKeyDictionary[TabularNetwork, TabularNetwork] = WeakKeyDictionary()


def _with_fixed_effects(module: TabularNetwork) -> TabularNetwork:
    """The same network, tensors included, in which the network's weights alone are asked for.

    One object for all steps: a new one would be examined at every step as if nobody had seen it.
    """
    weight, made = next(module.effects.parameters()).detach(), _FIXED.get(module)
    if made is not None and next(made.effects.parameters()).data_ptr() == weight.data_ptr():
        return made
    linear = copy.copy(module.effects[1])
    linear._parameters = {"weight": nn.Parameter(weight, requires_grad=False), "bias": None}
    effects = copy.copy(module.effects)
    effects._modules = {**module.effects._modules, "1": linear}
    made = copy.copy(module)
    made._modules = {**module._modules, "effects": effects}
    _FIXED[module] = made
    return made


def _stages(plan: Plan) -> tuple[Plan, Plan | None]:
    """The blocks of both stages; a plan of one block is divided."""
    if len(plan.blocks) > 1:
        return replace(plan, blocks=plan.blocks[:1]), replace(plan, blocks=plan.blocks[1:])
    ((mechanism, steps),) = plan.blocks
    first = max(1, round(STEPS_SHARE * steps))
    if first == steps:
        return plan, None
    return replace(plan, blocks=((mechanism, first),)), replace(plan, blocks=((mechanism, steps - first),))


def _averaged(second: Problem) -> int:
    """Steps whose positions count."""
    return max(1, round(AVERAGED * second.plan.steps))


def _size_of(group: int, counted: int) -> int:
    """Steps of one stretch."""
    return sum(1 for place in range(counted) if place * GROUPS // counted == group)


@lru_cache(maxsize=64)
def _usual_gradient(recipe: TabularRecipe) -> float:
    """Usual norm of an output's gradient in the network's weights: inputs evenly spread, a last layer of norm 1."""
    generator = _start()
    network, effects = TabularNetwork(recipe, generator).network, recipe.effects
    seen = torch.cos(torch.pi * torch.rand(MADE_UP, recipe.network.features, generator=generator))
    numbers = len(effects.numbers)
    if effects.categories:
        width = max(width for width in effects.blocks if width)
        seen[:, numbers:] = (seen[:, numbers:] > math.cos(math.pi / width)).float()
    last = seen
    with torch.no_grad():
        for layer in list(network)[:-1]:
            last = layer(last)
    return float((last.square().sum(1) + seen.square().sum(1) + 2).mean().sqrt())


__all__ = ["Tabular", "TabularState"]
