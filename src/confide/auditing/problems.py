"""Small public problems to audit a method on. All numbers are made up, so an audit costs nobody any privacy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods.base import Method
from confide.methods.laplace import LaplaceApproximation
from confide.methods.last_layer import LastLayer
from confide.models import networks

# Small, so that thousands of runs are quick; several of each, so that nothing is special.
FEATURES, CLASSES, ORDINARY_RECORDS = 16, 4, 32
# Eight layers, so that a clip per layer is far from a clip of the whole; 1192 weights, room for 1000 directions.
HIDDEN = (12,) * 7
# Where the last layer alone is learnt, it has the room: 1028 weights.
HIDDEN_BEFORE_A_LAST_LAYER = (256,)
# As many weights as a Laplace approximation is for: 256.
HIDDEN_OF_FEW_WEIGHTS = (12,)
COMPONENTS = 16
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


def problem_for(method: Method, seed: int = 0) -> AuditProblem:
    """Few ordinary records, for the first task that the method says it is for."""
    task = first_task(method, ("classification", "regression", "mixture"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(ORDINARY_RECORDS, FEATURES, generator=generator) * 2 - 1
    if task == "classification":
        special = {LastLayer: HIDDEN_BEFORE_A_LAST_LAYER, LaplaceApproximation: HIDDEN_OF_FEW_WEIGHTS}
        hidden = special.get(type(method), HIDDEN)
        module: nn.Module = networks.mlp(FEATURES, CLASSES, hidden=hidden, generator=generator)
        return AuditProblem(x, torch.randint(0, CLASSES, (len(x),), generator=generator), module, CLASSES)
    y = torch.rand(len(x), generator=generator) * 2 - 1
    if task == "regression":
        return AuditProblem(x, y, networks.mlp(FEATURES, 1, hidden=(128,), generator=generator), None)
    from confide.expectation.mixture import MixtureOfGaussians

    return AuditProblem(x, y, MixtureOfGaussians(COMPONENTS, FEATURES, generator=generator), None)


def mislabelled(method: Method, canaries: int, seed: int = 0) -> AuditProblem:
    """Records with random features and labels that follow from nothing, for a network that can learn them by heart."""
    task = first_task(method, ("classification", "regression"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(canaries, LEAKY_FEATURES, generator=generator)
    if task == "classification":
        y = torch.randint(0, CLASSES, (canaries,), generator=generator)
        return AuditProblem(x, y, networks.softmax(LEAKY_FEATURES, CLASSES), CLASSES)
    y = torch.randint(0, 2, (canaries,), generator=generator) * 2.0 - 1
    return AuditProblem(x, y, networks.linear(LEAKY_FEATURES), None)


def first_task(method: Method, known: tuple[str, ...]) -> str:
    for task in method.tasks:
        if task in known:
            return task
    raise Refusal(f"method={method.name!r}: is for {', '.join(method.tasks)}; this audit is for {', '.join(known)}")
