"""Small public problems to audit a method on. All numbers are made up, so an audit costs nobody any privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.models import networks

FEATURES, CLASSES, ORDINARY_RECORDS = 16, 4, 32
# Eight layers, so that a clip per layer is far from a clip of the whole; 1192 weights, room for 1000 directions.
HIDDEN = (12,) * 7
LEAKY_FEATURES = 1024


@dataclass(frozen=True)
class AuditProblem:
    """Records with the network to fit to them. `classes` is None for a real target."""

    x: Tensor
    y: Tensor
    module: nn.Module
    classes: int | None

    def schema(self, records: int) -> Schema:
        return Schema(classes=self.classes, records=records)


def problem_for(method: Any, seed: int = 0) -> AuditProblem:
    """Few ordinary records and a deep network, for the first task that the method says it is for."""
    tasks = getattr(method, "tasks", ("classification",))
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(ORDINARY_RECORDS, FEATURES, generator=generator) * 2 - 1
    if "classification" in tasks:
        module = networks.mlp(FEATURES, CLASSES, hidden=HIDDEN, generator=generator)
        return AuditProblem(x, torch.randint(0, CLASSES, (len(x),), generator=generator), module, CLASSES)
    if "regression" in tasks:
        module = networks.mlp(FEATURES, 1, hidden=HIDDEN, generator=generator)
        return AuditProblem(x, torch.rand(len(x), generator=generator) * 2 - 1, module, None)
    raise ValueError(f"method={method.name!r}: there is no problem to audit tasks {', '.join(tasks)} on")


def mislabelled(method: Any, canaries: int, seed: int = 0) -> AuditProblem:
    """Records with random features and labels that follow from nothing, for a network that can learn them by heart."""
    tasks = getattr(method, "tasks", ("classification",))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(canaries, LEAKY_FEATURES, generator=generator)
    if "classification" in tasks:
        y = torch.randint(0, CLASSES, (canaries,), generator=generator)
        return AuditProblem(x, y, networks.softmax(LEAKY_FEATURES, CLASSES), CLASSES)
    if "regression" in tasks:
        y = torch.randint(0, 2, (canaries,), generator=generator) * 2.0 - 1
        return AuditProblem(x, y, networks.linear(LEAKY_FEATURES), None)
    raise ValueError(f"method={method.name!r}: mislabelled records need labels; use attack='white-box'")
