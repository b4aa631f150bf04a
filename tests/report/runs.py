"""Small finished runs: a few steps on a handful of records, priced in closed form so that they are quick."""

from __future__ import annotations

from typing import Any

import torch

import confide
from confide.data.schema import Column
from confide.models.predictive import ClassPredictive, RealPredictive
from confide.report import SEPARATE, Evaluation
from confide.running.fit import Run

RECORDS = 40
HOSTILE = "<script>alert('x')</script>\"&"


def classes_schema(**facts: Any) -> confide.Schema:
    return confide.Schema(records=RECORDS, classes=("no", HOSTILE), target=HOSTILE, bounds=(-1, 1), **facts)


def reals_schema() -> confide.Schema:
    columns = (Column("age", bounds=(0, 100)), Column(HOSTILE, categories=("north", HOSTILE)))
    return confide.Schema(
        records=RECORDS,
        target="price",
        target_bounds=(0, 10),
        columns=columns,
        sources={"records": "assumed public"},
    )


def make_run(schema: confide.Schema, *, seed: int | None = None, module: Any = None, **plan: Any) -> Run:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(RECORDS, 3, generator=generator)
    y = (x[:, 0] > 0.5).long() if schema.class_count else x[:, 0]
    data = confide.PrivateData(x, y, schema=schema, seed=seed)
    if plan.get("private", True):
        plan = {"noise_multiplier": 8.0, "sampling": "full-batch", **plan}
    else:
        plan = {"sampling": "full-batch", **plan}
    network = module or confide.networks.MLP(confide.networks.Recipe(3, schema.class_count or 1, (4,)))
    calibrated = confide.plan(delta=1e-5, records=RECORDS, steps=4, **plan)
    return confide.fit(confide.methods.SGLD(), network, data, calibrated, seed=1)


def class_evaluation(source: str = SEPARATE, inputs: int = 80) -> Evaluation:
    generator = torch.Generator().manual_seed(5)
    draws = (2 * torch.randn(6, inputs, 2, generator=generator)).softmax(-1)
    y = torch.randint(0, 2, (inputs,), generator=generator)
    return Evaluation(ClassPredictive(draws, torch.full((6,), 1 / 6)), y, source)


def real_evaluation(source: str = SEPARATE, inputs: int = 90) -> Evaluation:
    generator = torch.Generator().manual_seed(6)
    means = torch.randn(6, inputs, generator=generator)
    predictive = RealPredictive(means, torch.full((6, inputs), 0.5), torch.full((6,), 1 / 6))
    return Evaluation(predictive, torch.randn(inputs, generator=generator), source)
