"""Default settings learn: every method for regression finds a linear truth, whatever the curvature of its loss."""

from __future__ import annotations

import pytest
import torch

import confide
from confide import methods
from confide.data.schema import Schema
from confide.sources.private_data import PrivateData

RECORDS = 1000
FOR_REGRESSION = [
    name for name, cls in methods.all_methods().items() if "regression" in getattr(cls, "tasks", ("regression",))
]


@pytest.mark.parametrize("noise_scale", [0.2, pytest.param(0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FOR_REGRESSION)
def test_default_steps_learn_a_regression(name: str, noise_scale: float) -> None:
    """A step that ignores the curvature of the loss, 1 / noise_scale^2, gives errors of many times the signal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(RECORDS, 5, generator=generator) * 2 - 1
    truth = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.25])
    y = x @ truth + noise_scale * torch.randn(RECORDS, generator=generator)
    data = PrivateData(x, y, schema=Schema(records=RECORDS), seed=2)
    plan = confide.plan(delta=1e-5, records=RECORDS, batch=128, steps=150, clip=0.4 / noise_scale, noise_multiplier=2.0)
    likelihood = confide.likelihoods.Gaussian(noise_scale)
    run = confide.fit(methods.get(name)(), confide.networks.linear(5), data, plan, likelihood=likelihood, seed=1)
    error = run.posterior.predict(x).mean - x @ truth
    assert error.std() < 0.35 * (x @ truth).std()
