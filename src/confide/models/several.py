"""Likelihoods of several targets at once: labels of which any may hold, and several numbers.

Targets have one column each. What holds for one target tells nothing of another once the network's outputs are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.errors import Refusal
from confide.models.predictive import LabelPredictive, VectorPredictive
from confide.models.tokens import logits_of


@dataclass(frozen=True)
class MultiLabel:
    """`labels` logits, one for each label; targets are (records, labels) of zeros and ones.

    A record with a target that is neither counts as zero.
    """

    labels: int
    name: ClassVar[str] = "multi-label"

    def __post_init__(self) -> None:
        if self.labels < 1:
            raise Refusal(f"labels={self.labels}: must be at least 1")

    @property
    def outputs(self) -> int:
        return self.labels

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        y = y.reshape(len(y), self.labels).to(logits.dtype)
        valid = ((y == 0) | (y == 1)).all(-1)
        found = F.binary_cross_entropy_with_logits(logits.reshape(y.shape), y.clamp(0, 1), reduction="none").sum(-1)
        return torch.where(valid, found, torch.zeros_like(found))

    def predictive(self, outputs: Tensor, weights: Tensor) -> LabelPredictive:
        return LabelPredictive(outputs.sigmoid(), weights)


@dataclass(frozen=True)
class MultiGaussian:
    """y ~ N(output, noise_scale^2 I) for several numbers at once; targets are (records, targets)."""

    targets: int
    noise_scale: float = 0.1
    name: ClassVar[str] = "multi-gaussian"

    def __post_init__(self) -> None:
        if self.targets < 1:
            raise Refusal(f"targets={self.targets}: must be at least 1")
        if not (math.isfinite(self.noise_scale) and self.noise_scale > 0):
            raise Refusal(f"noise_scale={self.noise_scale}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return self.targets

    @property
    def curvature(self) -> float:
        return 1 / self.noise_scale**2

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        distance = logits.reshape(len(logits), self.targets) - y.reshape(len(y), self.targets)
        constant = self.targets * math.log(self.noise_scale * math.sqrt(2 * math.pi))
        return distance.square().sum(-1) / (2 * self.noise_scale**2) + constant

    def predictive(self, outputs: Tensor, weights: Tensor) -> VectorPredictive:
        return VectorPredictive(outputs, torch.full_like(outputs, self.noise_scale**2), weights)
