"""Likelihoods of sequences: a label for every token, or the next token at every position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from confide.data.labels import NO_LABEL
from confide.errors import Refusal
from confide.models.predictive import ClassPredictive


def logits_of(output: Any) -> Tensor:
    """The outputs of a network, also of one that returns them beside other things."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise Refusal(f"module: returned {type(output).__name__} without logits; return a tensor or .logits")
    return found


@dataclass(frozen=True)
class Tokens:
    """Softmax over `classes` logits at every position of a sequence; tokens are independent given the network.

    Targets are (records, positions), with -100 for a token without a label, such as padding. The loss of a record is
    the sum over its tokens, so that it is -log p of all its labels together; `length`, a public number, divides it and
    makes it a mean. It never is the record's own number of tokens, under which long records would count for less.

    classes   labels, or the size of the vocabulary
    shifted   the targets are the tokens themselves, and each position explains the one after it: language models
    length    declared number of tokens; 1 is the plain sum
    """

    classes: int
    shifted: bool = False
    length: float = 1.0
    name: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise Refusal(f"classes={self.classes}: a label needs at least 2 classes")
        if not 0 < self.length < float("inf"):
            raise Refusal(f"length={self.length}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        if y.ndim != 2 or logits.ndim != 3 or logits.shape[:2] != y.shape or y.is_floating_point():
            raise Refusal(
                f"y of shape {tuple(y.shape)}, outputs of shape {tuple(logits.shape)}: need a whole number per token "
                "and a logit per token and class; declare classes= in the schema"
            )
        if self.shifted:
            logits, y = logits[:, :-1], y[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=NO_LABEL)
        return losses.sum(1) / self.length

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        """Probabilities at every position: (inputs, positions, classes)."""
        return ClassPredictive(outputs.softmax(-1), weights)
