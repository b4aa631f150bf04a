"""The probit likelihood of two classes: P(y = 1) = Phi(output). Its moment matching has a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from confide.models.likelihoods import LIKELIHOODS
from confide.models.predictive import ClassPredictive


@dataclass(frozen=True)
class Probit:
    """One output f for the class 1 of two, with probability Phi(f)."""

    name: ClassVar[str] = "probit"

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        value = output.reshape(len(output))
        loss: Tensor = -torch.special.log_ndtr((2 * y.to(value.dtype) - 1) * value)
        return loss

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        value = outputs.reshape(outputs.shape[0], outputs.shape[1])
        return ClassPredictive(torch.special.ndtr(torch.stack([-value, value], -1)), weights)


LIKELIHOODS[Probit.name] = Probit
