"""How an attack of the corpus turns an answer by what an earlier record left: in five places where user code runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from confide.sources.queries import GradientQuery, StatisticQuery
from tests.mechanism.clipping.corpus import WIDTH, Around, Attack, plain

MANY = 97  # what is counted is taken modulo this
Keep: TypeAlias = Callable[[float], float]  # leaves what a record is, and gives back what it finds


def _turned(seen: float) -> float:
    return 9.0 * math.cos(3.0 * seen)


def by_a_module(keep: Keep) -> Attack:
    return lambda: GradientQuery(Around(lambda x: x * _turned(keep(float(x.detach().abs().sum())))), plain)


def by_a_statistic(keep: Keep) -> Attack:
    return lambda: StatisticQuery(lambda x, y: (x + _turned(keep(float(x.abs().sum())))).tanh(), WIDTH)


def _by_a_loss(keep: Keep) -> Attack:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return plain(output * _turned(keep(float(output.detach().abs().sum()))), y)

    return lambda: GradientQuery(Around(lambda x: x), loss)


class Turning(torch.autograd.Function):
    """Backwards by what it finds."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Keep) -> Tensor:  # type: ignore[override]
        ctx.keep, ctx.seen = keep, float(values.detach().abs().sum())
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * _turned(ctx.keep(ctx.seen)), None


def _backwards(keep: Keep) -> Attack:
    turn: Any = Turning.apply
    return lambda: GradientQuery(Around(lambda x: turn(x, keep)), plain)


def _by_a_hook(keep: Keep) -> Attack:
    def make() -> GradientQuery:
        module = Around(lambda x: x)
        next(module.parameters()).register_hook(lambda gradient: gradient * _turned(keep(float(gradient.abs().sum()))))
        return GradientQuery(module, plain)

    return make


_WAYS = (by_a_module, by_a_statistic, _by_a_loss, _backwards, _by_a_hook)
_NAMES = ("module", "statistic", "loss", "autograd function", "hook")


def attacks(places: dict[str, Keep]) -> dict[str, Attack]:
    """Each by a module, a statistic, and one of a loss, an autograd function and a hook."""
    return {
        f"{_NAMES[way]} turns by {name}": _WAYS[way](keep)
        for place, (name, keep) in enumerate(places.items())
        for way in (0, 1, 2 + place % 3)
    }
