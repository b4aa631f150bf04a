"""Teachers: what learns from one part of the records and votes. Anything with `votes(x, y, inputs, classes)` is one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.data.trees import called
from confide.errors import Refusal


@dataclass(frozen=True)
class LinearTeacher:
    """Ridge regression on class indicators, in closed form; for features that are good already.

    ridge   times the mean squared length of its records
    """

    ridge: float = 0.03

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise Refusal(f"ridge={self.ridge}: must be > 0")

    def votes(self, x: Tensor, y: Tensor, inputs: Tensor, classes: int) -> Tensor:
        """alpha = (K + ridge I)^-1 (Y - mean), scores = inputs x' alpha + mean: as many equations as it has records."""
        rows, asked = x.flatten(1).float(), inputs.flatten(1).float()
        wanted = F.one_hot(y.long(), classes).float()
        mean, centre = wanted.mean(0), rows.mean(0)
        rows, asked = rows - centre, asked - centre
        products = rows @ rows.T
        ridge = self.ridge * products.diagonal().mean().clamp(min=1e-12)
        alpha = torch.linalg.solve(products + ridge * torch.eye(len(rows)), wanted - mean)
        scores: Tensor = asked @ (rows.T @ alpha) + mean
        return scores.argmax(1)


@dataclass(frozen=True)
class NetworkTeacher:
    """A copy of a network, started anew by its own `reset_parameters`, and trained by Adam on the teacher's records."""

    module: nn.Module
    epochs: int = 20
    batch: int = 32
    rate: float = 1e-2

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1 or not self.rate > 0:
            raise Refusal(
                f"epochs={self.epochs}, batch={self.batch}, rate={self.rate}: the first two must be at least 1, and "
                "the rate > 0"
            )

    def votes(self, x: Any, y: Tensor, inputs: Any, classes: int) -> Tensor:
        module = copy.deepcopy(self.module).train()
        for layer in module.modules():
            start_anew = getattr(layer, "reset_parameters", None)  # a layer of anybody's may have it
            if callable(start_anew):
                start_anew()
        descent = torch.optim.Adam(module.parameters(), self.rate)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(y)).split(self.batch):
                descent.zero_grad()
                F.cross_entropy(called(module, x[rows]), y[rows].long()).backward()
                descent.step()
        with torch.no_grad():
            scores: Tensor = called(module.eval(), inputs)
        if scores.shape[1] != classes:
            raise Refusal(f"module: {scores.shape[1]} outputs for {classes} classes; they must agree")
        return scores.argmax(1)
