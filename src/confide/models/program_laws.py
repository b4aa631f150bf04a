"""Laws of torch.distributions that a program's predictions may have, as numbers and back.

A posterior asks its module for one tensor of outputs per draw. So the law that `predict` gives is written as numbers,
which law it is first, and `law_of` makes a predictive distribution of the numbers of all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributions as laws

from confide.errors import Refusal
from confide.models.counts import CountPredictive
from confide.models.heavy_tails import LaplacePredictive, StudentTPredictive
from confide.models.predictive import ClassPredictive, LabelPredictive, Predictive, RealPredictive, VectorPredictive
from confide.models.survival import SurvivalPredictive


class KnownLaw(NamedTuple):
    """A law: how it is written as numbers, one tensor with the law's own axis last, and how they are read."""

    kind: type[laws.Distribution]
    numbers: Callable[[Any], Tensor]
    read: Callable[[Tensor, Tensor], Predictive]


def _stacked(*values: Tensor) -> Tensor:
    return torch.stack([value.reshape(()) for value in torch.broadcast_tensors(*values)])


def _two_classes(numbers: Tensor, weights: Tensor) -> Predictive:
    return ClassPredictive(torch.cat([1 - numbers, numbers], -1), weights)


def _student(numbers: Tensor, weights: Tensor) -> Predictive:
    places, scales, freedom = numbers.unbind(-1)
    many = torch.where(freedom > 2, freedom / (freedom - 2).clamp(min=torch.finfo(freedom.dtype).eps), torch.inf)
    return StudentTPredictive(places, scales.square() * many, weights, scales, freedom)


def _lasting(numbers: Tensor, weights: Tensor) -> Predictive:
    return SurvivalPredictive.of_laws(numbers[..., 0], numbers[..., 1], weights)


def _halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    one, two = numbers.chunk(2, -1)
    return one, two


LAWS: tuple[KnownLaw, ...] = (
    KnownLaw(laws.Bernoulli, lambda law: law.probs.reshape(1), _two_classes),
    KnownLaw(laws.Categorical, lambda law: law.probs.reshape(-1), ClassPredictive),
    KnownLaw(
        laws.Normal,
        lambda law: _stacked(law.loc, law.scale),
        lambda numbers, weights: RealPredictive(numbers[..., 0], numbers[..., 1].square(), weights),
    ),
    KnownLaw(
        laws.Laplace,
        lambda law: _stacked(law.loc, law.scale),
        lambda numbers, weights: LaplacePredictive(numbers[..., 0], 2 * numbers[..., 1].square(), weights),
    ),
    KnownLaw(laws.StudentT, lambda law: _stacked(law.loc, law.scale, law.df), _student),
    KnownLaw(
        laws.Poisson,
        lambda law: law.rate.reshape(1),
        lambda numbers, weights: CountPredictive(numbers[..., 0], numbers[..., 0], weights),
    ),
    KnownLaw(
        laws.NegativeBinomial,
        lambda law: _stacked(law.mean, law.variance),
        lambda numbers, weights: CountPredictive(numbers[..., 0], numbers[..., 1], weights),
    ),
    KnownLaw(
        laws.Exponential,
        lambda law: _stacked(1 / law.rate, torch.ones_like(law.rate)),
        _lasting,
    ),
    KnownLaw(
        laws.Weibull,
        lambda law: _stacked(law.scale, law.concentration),
        _lasting,
    ),
)
SEVERAL: tuple[KnownLaw, ...] = (
    KnownLaw(laws.Bernoulli, lambda law: law.probs.reshape(-1), LabelPredictive),
    KnownLaw(
        laws.Normal,
        lambda law: torch.cat([law.loc.reshape(-1), law.scale.expand(law.loc.shape).reshape(-1)]),
        lambda numbers, weights: VectorPredictive(_halves(numbers)[0], _halves(numbers)[1].square(), weights),
    ),
)
"""Several targets of a record, each with a law of its own: Independent(law, 1)."""


def numbers_of(law: Any) -> Tensor:
    """A law as numbers: which one it is, and its own."""
    for place, known in enumerate((*LAWS, *SEVERAL)):
        one = law
        if place >= len(LAWS):
            one = law.base_dist if isinstance(law, laws.Independent) else None
        if type(one) is known.kind and (place >= len(LAWS) or law.batch_shape.numel() == 1):
            numbers = known.numbers(one)
            return torch.cat([numbers.new_full((1,), place), numbers])
    names = ", ".join(known.kind.__name__ for known in LAWS)
    said = f"{type(law).__name__} of shape {tuple(law.batch_shape)}" if isinstance(law, laws.Distribution) else law
    raise Refusal(
        f"predict: gave {said}; give the law of one target, one of {names}, or Independent of several Normal or "
        "Bernoulli"
    )


def law_of(outputs: Tensor, weights: Tensor) -> Predictive:
    """The predictive distribution from the numbers of every draw and input: (draws, inputs, 1 + numbers)."""
    places = outputs[..., 0]
    if places.numel() == 0 or bool((places != places.flatten()[0]).any()):
        raise Refusal("predict: gave laws of different kinds for different inputs; give the same kind for all")
    law = (*LAWS, *SEVERAL)[int(places.flatten()[0])]
    return law.read(outputs[..., 1:], weights)
