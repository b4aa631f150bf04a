"""A likelihood of classes in an order, such as marks or stages: cumulative logits.

    P(y <= k) = sigmoid(c_k),    c_0 = a_0 + output_0,    c_k = c_(k-1) + softplus(b_k + output_k)

With outputs of zero all classes are equally likely. A label outside the classes tells nothing: its record counts as
zero. (McCullagh, Regression models for ordinal data, JRSS B 1980, with thresholds that may depend on the input.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.errors import Refusal
from confide.models.predictive import ClassPredictive
from confide.models.tokens import logits_of


@dataclass(frozen=True)
class OrderedPredictive(ClassPredictive):
    """Probabilities of classes in an order, (draws, inputs, classes): misses by one class are smaller than by two."""

    @property
    def cumulative(self) -> Tensor:
        """P(y <= k), of shape (inputs, classes)."""
        return self.probabilities.cumsum(-1)


@dataclass(frozen=True)
class Ordinal:
    """Classes 0, ..., classes - 1 in an order, through cumulative logits."""

    classes: int
    name: ClassVar[str] = "ordinal"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise Refusal(f"classes={self.classes}: an order needs at least 2 classes")

    @property
    def outputs(self) -> int:
        return self.classes - 1

    @property
    def curvature(self) -> float:
        return 1.0

    def thresholds(self, outputs: Tensor) -> Tensor:
        """c_0 < c_1 < ... along the last axis."""
        even = [math.log(k / (self.classes - k)) for k in range(1, self.classes)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(even)]
        first = outputs[..., :1] + even[0]
        if not gaps:
            return first
        start = outputs.new_tensor([gap + math.log(-math.expm1(-gap)) for gap in gaps])  # softplus(start) = gap
        return torch.cat([first, first + F.softplus(outputs[..., 1:] + start).cumsum(-1)], -1)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        label = y.reshape(len(y))
        valid = (label >= 0) & (label < self.classes) & (label == label.floor())
        label = torch.where(valid, label, torch.zeros_like(label)).long()
        found = -self._logs(logits).gather(-1, label[:, None]).squeeze(-1)
        return torch.where(valid, found, torch.zeros_like(found))

    def _logs(self, outputs: Tensor) -> Tensor:
        """log P(y = k): log(sigmoid(u) - sigmoid(l)) = logsigmoid(u) + logsigmoid(-l) + log(1 - e^(l - u)), l < u."""
        cuts = self.thresholds(outputs)
        lowest, highest = F.logsigmoid(cuts[..., :1]), F.logsigmoid(-cuts[..., -1:])
        if self.classes == 2:
            return torch.cat([lowest, highest], -1)
        lower, upper = cuts[..., :-1], cuts[..., 1:]
        gap = (upper - lower).clamp(min=torch.finfo(cuts.dtype).eps)
        middle = F.logsigmoid(upper) + F.logsigmoid(-lower) + torch.log(-torch.expm1(-gap))
        return torch.cat([lowest, middle, highest], -1)

    def predictive(self, outputs: Tensor, weights: Tensor) -> OrderedPredictive:
        return OrderedPredictive(self._logs(outputs).softmax(-1), weights)
