"""Posteriors from the trace of another method: what noise and an unfinished way add to the width, and their files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.methods.sgd import SGD
from confide.methods.traced import Traced
from confide.models.likelihoods import Gaussian
from confide.models.priors import GaussianPrior
from confide.posteriors.low_rank import LowRankGaussian

NOISE = 0.5


def errors(repeats: int, noise_multiplier: float, rate: float = 0.1, steps: int = 100) -> tuple[Tensor, Tensor, Any]:
    """Errors of a linear regression in stated deviations, and without the directions of averages; the last run."""
    found, alone = [], []
    for seed in range(repeats):
        generator = torch.Generator().manual_seed(seed)
        x = 2 * torch.rand(400, 3, generator=generator, dtype=torch.float64) - 1
        truth = 0.5 * torch.randn(4, generator=generator, dtype=torch.float64)
        y = torch.cat([x, torch.ones(400, 1)], 1) @ truth + NOISE * torch.randn(400, generator=generator).double()
        data = confide.PrivateData(x, y, schema=confide.Schema(records=400), seed=seed)
        plan = confide.plan(
            records=400, steps=steps, sampling="full-batch", delta=1e-5, clip=20.0, noise_multiplier=noise_multiplier
        )
        method = Traced(method=SGD(learning_rate=rate, prior=GaussianPrior(1.0)))
        module = confide.networks.linear(3).double()
        run = confide.fit(method, module, data, plan, likelihood=Gaussian(NOISE), seed=seed)
        law: Any = run.posterior
        found.append((truth - law.centre) / law.deviations())
        alone.append((truth - law.centre) / law.spread)
    return torch.stack(found), torch.stack(alone), run


def test_noise_stands_in_the_width_and_would_be_missed() -> None:
    found, alone, run = errors(4, 40.0, rate=0.3)
    assert 0.5 < float(found.square().mean().sqrt()) < 1.6
    assert float(alone.square().mean().sqrt()) > 1.8  # the same without the directions of the averages
    assert 0.5 < run.posterior.facts["share_of_noise_in_width"] < 1
    assert "warning" not in run.posterior.facts


def test_an_average_that_did_not_settle_says_so() -> None:
    _, _, run = errors(1, 0.05, rate=0.008)
    assert run.posterior.facts["warning"].startswith("The average did not settle")


def test_the_width_of_records_is_found_without_noise() -> None:
    """One curvature for every tensor: exact where inputs are even, as here."""
    found, _, _ = errors(4, 1e-6)
    assert 0.5 < float(found.square().mean().sqrt()) < 1.6


@pytest.mark.parametrize("name", ["sgld", "sghmc", "psgld", "sgnht", "bbp", "dpvi", "variational-dropout"])
def test_every_method_along_gradients_has_a_trace(name: str) -> None:
    x = torch.rand(60, 4, generator=torch.Generator().manual_seed(1))
    data = confide.PrivateData(x, (x.sum(1) > 2).long(), schema=confide.Schema(records=60, classes=2), seed=1)
    plan = confide.plan(records=60, batch=20, steps=12, delta=1e-5, noise_multiplier=1.0)
    run = confide.fit(Traced(of=name), confide.networks.mlp(4, 2, hidden=(3,)), data, plan, seed=1)
    assert isinstance(run.posterior, LowRankGaussian)
    assert run.posterior.predict(x[:5]).probabilities.shape == (5, 2)
    assert float(run.posterior.deviations().min()) >= 0
    assert run.posterior.facts["of"] == name


@pytest.mark.parametrize("name", ["mc-dropout", "noise-aware", "em", "traced"])
def test_what_has_no_such_trace_is_refused_before_a_charge(name: str) -> None:
    ledger = confide.Ledger()
    data = confide.PrivateData(
        torch.zeros(60, 4),
        torch.zeros(60).long(),
        schema=confide.Schema(records=60, classes=2),
        ledger=ledger,
        name="d",
    )
    plan = confide.plan(records=60, batch=20, steps=4, delta=1e-5, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"of='"):
        confide.fit(Traced(of=name), confide.networks.mlp(4, 2, hidden=(3,)), data, plan)
    assert not ledger.events("d")


def test_draws_have_the_stated_covariance() -> None:
    generator = torch.Generator().manual_seed(2)
    module = confide.networks.linear(2).double()
    factors = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    law = LowRankGaussian(module, Gaussian(), torch.ones(3).double(), torch.full((3,), 0.5).double(), 10, {}, factors)
    draws = law.sample(20_000, generator)
    assert torch.allclose(torch.cov(draws.mT), law.covariance(), atol=0.15)
    assert torch.allclose(law.deviations().square(), law.covariance().diagonal())
