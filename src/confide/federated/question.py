"""The question of a run: method, network, likelihood and plan by their names and sizes. It travels once.

Both sides make the same problem of it. Nothing in it is code: a network is one of confide's own recipes, a method and a
likelihood are confide's own by name with settings, which their own checks judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch

from confide import methods
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.plan import Plan
from confide.methods.base import Method, Problem
from confide.models.likelihoods import Likelihood, is_own, likelihood_from_dict, likelihood_to_dict
from confide.models.networks import MLP, Recipe
from confide.models.priors import PRIORS
from confide.running.fit import make_problem
from confide.sources.queries import GradientQuery, Origin, Query

BY_GRADIENT = ("sgld", "psgld", "sghmc", "sgnht", "sgd")
"""Methods that ask for the gradient at a position: the position is all that a party has to be told at a step."""
BY_DRAW = ("bbp",)
"""Methods that ask for the gradient at weights drawn around a position; every party makes its own draw."""
BY_STATE = ("sep",)
"""Methods whose question a party works out itself, from the method's state."""
IN_ROUNDS = (*BY_DRAW, *BY_STATE)
"""Methods of which a party can make several steps by itself before it hears of the others."""
MOST_AT_ONCE = 1000  # steps of one message: their answers are kept until all are made
MOST_PARAMETERS = 1 << 26  # what a message can carry in single precision
MOST_BY_STATE = (
    1 << 22
)  # of a method whose question a party works out: a record's answer is many vectors of that length
MOST_LAYERS = 1000  # far more than anybody fits; building a hundred thousand would take minutes
MOST_BLOCKS = 100  # of a plan; nearly always one
MOST_STEPS = 10**8  # as on the command line
_NUMBERS = {"float32": torch.float32, "float64": torch.float64}
_PRIORS = {kind.__name__: kind for kind in PRIORS.values()}
_UNREADABLE = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError, ArithmeticError)


@dataclass(frozen=True)
class Inquiry:
    """What a run asks of every party."""

    method: Method
    recipe: Recipe
    numbers: str
    likelihood: Likelihood
    plan: Plan

    @classmethod
    def of(cls, origin: Origin | None) -> Inquiry:
        """From the server's side of a fit; what cannot be told by names is refused."""
        if origin is None:
            raise Refusal("query: was not asked by a method, and code is not sent to parties; use confide.fit")
        method, problem = origin.method, origin.problem
        spoken = (*BY_GRADIENT, *BY_DRAW, *BY_STATE)
        if method.name not in spoken or type(method) is not methods.get(method.name):
            raise Refusal(f"method={method.name!r}: parties know {', '.join(spoken)}; use one of them")
        if type(problem.module) is not MLP:
            raise Refusal(
                f"module={type(problem.module).__name__}: code is not sent to parties; use one of confide.networks"
            )
        if not is_own(problem.likelihood):
            raise Refusal(f"likelihood={problem.likelihood.name!r}: code is not sent to parties; use one of confide's")
        numbers = str(problem.position.dtype).removeprefix("torch.")
        found = cls(method, problem.module.recipe, numbers, problem.likelihood, problem.plan)
        made = found.problem(Schema()).module
        if [(name, value.shape) for name, value in made.named_parameters() if value.requires_grad] != [
            (name, value.shape) for name, value in problem.module.named_parameters() if value.requires_grad
        ]:
            raise Refusal(
                "module: is not what its recipe makes; parties build it anew, so leave its layers as they are"
            )
        return found

    def problem(self, schema: Schema) -> Problem:
        """The public side of the fit; positions to start from do not count, so nobody's stream moves."""
        with torch.random.fork_rng(devices=[]):
            module = MLP(self.recipe).to(_NUMBERS[self.numbers])
            return make_problem(self.method, module, schema, self.plan, self.likelihood, seed=0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": {"name": self.method.name, "settings": _settings(self.method)},
            "network": {"recipe": self.recipe.to_dict(), "numbers": self.numbers},
            "likelihood": likelihood_to_dict(self.likelihood),
            "plan": {
                "blocks": [[asdict(mechanism), steps] for mechanism, steps in self.plan.blocks],
                "delta": self.plan.delta,
                "adjacency": self.plan.adjacency,
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Inquiry:
        """What a server sent. All of it is checked before a record is thought of, so errors tell of none."""
        try:
            return cls._read(values)
        except Refusal as error:
            raise Refusal(f"question: {error}") from None
        except _UNREADABLE:
            raise Refusal(
                "question: a value is missing or has the wrong type; both sides need the same version"
            ) from None

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> Inquiry:
        network, plan = values["network"], values["plan"]
        name = str(values["method"]["name"])
        if name not in (*BY_GRADIENT, *BY_DRAW, *BY_STATE):
            raise Refusal(f"method={name[:40]!r}: is not answered here")
        recipe = Recipe.from_dict(network["recipe"])
        _check_size(recipe, MOST_BY_STATE if name in BY_STATE else MOST_PARAMETERS)
        if network["numbers"] not in _NUMBERS:
            raise Refusal(f"numbers: must be one of {', '.join(_NUMBERS)}")
        blocks = tuple((SampledGaussian(**one), _steps(steps)) for one, steps in plan["blocks"])
        if not 1 <= len(blocks) <= MOST_BLOCKS or sum(steps for _, steps in blocks) > MOST_STEPS:
            raise Refusal(f"blocks: at most {MOST_BLOCKS} of them, with {MOST_STEPS} steps in all")
        whole = Plan(blocks, float(plan["delta"]), plan["adjacency"])
        method = methods.get(name)(**_unsettled(values["method"]["settings"]))
        return cls(method, recipe, network["numbers"], likelihood_from_dict(values["likelihood"]), whole)


def query_of(question: Inquiry, problem: Problem, state: Any) -> Query:
    """What is asked of one record, with the problem at the position that was sent."""
    if question.method.name in BY_GRADIENT:
        return GradientQuery(problem.module, problem.likelihood.loss)
    if question.method.name in BY_DRAW:
        return question.method.ask(problem, question.method.init(problem))
    return question.method.ask(problem, state)


def _check_size(recipe: Recipe, most: int) -> None:
    widths = (recipe.features, *recipe.hidden, recipe.outputs)
    if not all(type(width) is int for width in widths) or len(widths) > MOST_LAYERS:
        raise Refusal(f"recipe: must name whole numbers of units in at most {MOST_LAYERS} layers")
    count = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths))
    if count > most:
        raise Refusal(f"recipe: {count} parameters; at most {most} are taken")


def _steps(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise Refusal("steps: must be a whole number, at least 1")
    return value


def _settings(thing: Any) -> dict[str, Any]:
    """The settings of a method, with its prior by name."""
    found: dict[str, Any] = {}
    for one in fields(thing):
        value = getattr(thing, one.name)
        if is_dataclass(value) and _PRIORS.get(type(value).__name__) is type(value):
            value = {"prior": type(value).__name__, **asdict(value)}  # type: ignore[arg-type]
        elif not (value is None or isinstance(value, bool | int | float | str)):
            raise Refusal(
                f"{one.name}={value!r}: cannot be sent to parties; use a number, a text or a prior of confide"
            )
        found[one.name] = value
    return found


def _unsettled(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, value in found.items():
        if isinstance(value, dict):
            inner = dict(value)
            found[name] = _PRIORS[inner.pop("prior")](**inner)
    return found
