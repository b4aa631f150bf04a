"""Small public problems on which every method must behave; nothing here is listed by method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.expectation.mixture import MixtureOfGaussians
from confide.models import networks
from confide.sources.private_data import PrivateData


@dataclass(frozen=True)
class Case:
    """A data set with the network that fits it."""

    x: Tensor
    y: Tensor
    schema: Schema
    module: nn.Module

    def data(self, **options: Any) -> PrivateData:
        return PrivateData(self.x, self.y, schema=self.schema, **{"seed": 7, **options})


def classification(records: int = 60) -> Case:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, 4, generator=generator)
    y = (x @ torch.randn(4, 3, generator=generator)).argmax(1)
    module = networks.mlp(4, 3, hidden=(5,), generator=generator)
    return Case(x, y, Schema(classes=3, records=records), module)


def regression(records: int = 60) -> Case:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(records, 4, generator=generator) * 2 - 1
    y = 0.5 * torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(records, generator=generator)
    return Case(x, y, Schema(records=records), networks.mlp(4, 1, hidden=(5,), generator=generator))


def binary(records: int = 60) -> Case:
    one = classification(records)
    return Case(one.x, (one.y > 0).long(), Schema(classes=2, records=records), networks.logistic(4))


def mixture(records: int = 60) -> Case:
    """Two clusters without targets; the zeros stand where targets would."""
    generator = torch.Generator().manual_seed(1)
    side = torch.randint(0, 2, (records, 1), generator=generator) * 2 - 1
    x = side + 0.5 * torch.randn(records, 4, generator=generator)
    module = MixtureOfGaussians(2, 4, scale=0.5, generator=generator)
    return Case(x, torch.zeros(records), Schema(records=records), module)


CASES = {"classification": classification, "regression": regression, "binary": binary, "mixture": mixture}


def case_for(method: Any) -> Case:
    """The first task that the method says it is for; most are for all of them."""
    return next(CASES[task]() for task in method.tasks if task in CASES)


def small_plan(case: Case, **options: Any) -> confide.Plan:
    settings = {
        "records": case.schema.records,
        "batch": 20,
        "steps": 12,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    return confide.plan(**{**settings, **options})


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The case of the method under test; classification where a test is about no method in particular."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    return classification() if name is None else case_for(methods.get(name))
