"""Likelihoods: how a network's output explains a target.

Each gives one loss per record, and reads a predictive distribution off the outputs of many draws.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.models.predictive import ClassPredictive, Predictive, RealPredictive


class Likelihood(Protocol):
    """`outputs` is the width of the network's last layer that the likelihood expects."""

    name: ClassVar[str]

    @property
    def outputs(self) -> int: ...

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """-log p(y | output), one value per record."""

    def predictive(self, outputs: Tensor, weights: Tensor) -> Predictive:
        """From outputs of shape (draws, inputs, ...) and draw weights to a predictive distribution."""


@dataclass(frozen=True)
class Categorical:
    """Softmax over `classes` logits."""

    classes: int
    name: ClassVar[str] = "categorical"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"classes={self.classes}: classification needs at least 2 classes")

    @property
    def outputs(self) -> int:
        return self.classes

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="none")

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        return ClassPredictive(outputs.softmax(-1), weights)


@dataclass(frozen=True)
class Bernoulli:
    """One logit for the class 1 of two."""

    name: ClassVar[str] = "bernoulli"

    @property
    def outputs(self) -> int:
        return 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        logit = output.reshape(len(output))
        return F.binary_cross_entropy_with_logits(logit, y.to(logit.dtype), reduction="none")

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        one = outputs.reshape(outputs.shape[0], outputs.shape[1]).sigmoid()
        return ClassPredictive(torch.stack([1 - one, one], -1), weights)


@dataclass(frozen=True)
class Gaussian:
    """y ~ N(output, noise_scale^2) with a known noise scale."""

    noise_scale: float = 0.1
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_scale) and self.noise_scale > 0):
            raise ValueError(f"noise_scale={self.noise_scale}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return 1

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        # The constant is left out: it moves no gradient and no draw.
        return (output.reshape(y.shape) - y).square() / (2 * self.noise_scale**2)

    def predictive(self, outputs: Tensor, weights: Tensor) -> RealPredictive:
        means = outputs.reshape(outputs.shape[0], outputs.shape[1])
        return RealPredictive(means, torch.full_like(means, self.noise_scale**2), weights)


LIKELIHOODS: dict[str, type[Any]] = {cls.name: cls for cls in (Categorical, Bernoulli, Gaussian)}


def likelihood_to_dict(likelihood: Any) -> dict[str, Any]:
    return {"name": likelihood.name, **asdict(likelihood)}


def likelihood_from_dict(values: dict[str, Any]) -> Any:
    rest = dict(values)
    name = rest.pop("name", None)
    if name not in LIKELIHOODS:
        raise ValueError(f"likelihood={name!r}: unknown; known: {', '.join(LIKELIHOODS)}")
    return LIKELIHOODS[name](**rest)
