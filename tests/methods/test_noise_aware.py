"""Noise-aware posteriors: the formulas, the bound of an answer, the limit without noise, and coverage with faults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from benchmarks.coverage import Cell, covered
from confide.data.schema import Schema
from confide.methods import _noise_aware, noise_aware
from confide.methods._noise_aware_inputs import (
    clipped_mean,
    clipped_square,
    denoised,
    tilted_curvature,
    tilted_scores,
)
from confide.methods._noise_aware_query import Layout
from confide.methods.noise_aware import NoiseAware
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian
from confide.sources.private_data import PrivateData


def rows(count: int, features: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, features, generator=generator, dtype=torch.float64) * 2 - 1


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


def fitted(x: Tensor, y: Tensor, module: nn.Module, likelihood: Any, classes: int | None = None, **plan: Any) -> Any:
    data = PrivateData(x, y, schema=Schema(records=len(x), classes=classes), seed=3)
    settings: dict[str, Any] = {"delta": 1e-5, "records": len(x), "steps": 5, "sampling": "full-batch", **plan}
    return confide.fit(NoiseAware(), module, data, confide.plan(**settings), likelihood=likelihood, seed=1).posterior


# -- formulas ------------------------------------------------------------------------------------------------


def test_curvature_and_scores_of_gaussian_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.tensor([[0.5, 0.3], [0.0, 0.4]], dtype=torch.float64)
    x = torch.randn(200_000, 2, generator=generator, dtype=torch.float64) @ mix + torch.tensor([0.3, -0.4])
    z, point = with_ones(x), torch.tensor([1.2, -1.5, 0.4], dtype=torch.float64)
    p = (z @ point).sigmoid()
    curvature, scores = z.mT @ (z * (p * (1 - p))[:, None]), z.mT @ p
    assert torch.allclose(tilted_curvature(z.mT @ z, point), curvature, atol=0.01 * len(z), rtol=0.05)
    assert torch.allclose(tilted_scores(z.mT @ z, point), scores, atol=0.01 * len(z), rtol=0.02)


def test_clipped_residuals() -> None:
    noise = torch.randn(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    inside, mean = clipped_mean(0.7 * one, 1.3 * one, one)
    drawn = 0.7 + 1.3 * noise
    assert float(inside) == pytest.approx(float((drawn.abs() < 1).double().mean()), abs=0.004)
    assert float(mean) == pytest.approx(float(drawn.clamp(-1, 1).mean()), abs=0.004)
    assert float(clipped_square(0.8 * one)) == pytest.approx(
        float((0.8 * noise).square().clamp(max=1).mean()), abs=0.003
    )


def test_noise_of_a_symmetric_matrix() -> None:
    """cov(E a, E b) = (v/2) (<a, b> I + b a^T), which the belief's covariance rests on."""
    generator = torch.Generator().manual_seed(2)
    layout = Layout("gaussian", 1, 3)
    matrices = layout.symmetric(torch.randn(200_000, layout.pairs, generator=generator, dtype=torch.float64))
    a, b = torch.tensor([1.0, -0.5, 2.0]).double(), torch.tensor([0.3, 1.0, -1.0]).double()
    found = (matrices @ a).mT @ (matrices @ b) / len(matrices)
    assert torch.allclose(found, ((a @ b) * torch.eye(3) + torch.outer(b, a)) / 2, atol=0.03)


@pytest.mark.parametrize("narrow", [True, False])
def test_a_noisy_curvature_is_brought_closer_to_the_truth(narrow: bool) -> None:
    """Also where inputs hardly vary, so that all that is seen of most directions is noise."""
    z = with_ones(0.4 + 0.3 * rows(5000, 5) if narrow else rows(5000, 5))
    truth, layout = z.mT @ z, Layout("gaussian", 1, 6)
    noise = 200 * torch.randn(50, layout.pairs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before, after = [], []
    for error in layout.symmetric(noise):
        before.append(float(error.norm()))
        after.append(float((denoised(truth + error, 200.0**2, True) - truth).norm()))
    assert sum(after) < 0.85 * sum(before)
    assert torch.allclose(denoised(truth, 1e-9, True), truth, rtol=1e-6)


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "likelihood"),
    [
        (networks.linear(4), Gaussian(0.2)),
        (networks.logistic(4), Bernoulli()),
        (networks.softmax(4, 3), Categorical(3)),
    ],
)
@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 30.0, 1e8])
def test_an_answer_has_norm_one_at_most(module: nn.Module, likelihood: Any, size: float) -> None:
    """So that the clip of the plan clips nothing, and what the formulas expect is what is released."""
    layout = Layout(likelihood.name, likelihood.outputs, 5)
    x = rows(200, 4) * size
    y = torch.arange(200) % 2 if likelihood.name != "gaussian" else 5 * rows(200, 1)[:, 0]
    at = rows(layout.outputs, 5, seed=1) * 3
    norms = layout.answer(module, x, y, at, math.sqrt(2) if likelihood.name == "categorical" else 1.0).norm(dim=1)
    assert norms.max() <= 1 + 1e-9
    assert norms.max() > 0.15 or size > 1, "an answer that is far below its bound wastes budget"


# -- without noise it is the posterior itself ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "logistic", "softmax"])
def test_without_noise_it_is_the_laplace_approximation(kind: str) -> None:
    x, generator = rows(4000, 3), torch.Generator().manual_seed(4)
    z, truth = with_ones(x), torch.tensor([0.5, -0.4, 0.2, 0.1], dtype=torch.float64)
    settings: dict[str, Any] = {"private": False, "clip": math.inf}
    if kind == "linear":
        y = z @ truth + 0.2 * torch.randn(len(x), generator=generator, dtype=torch.float64)
        posterior = fitted(x, y, networks.linear(3).double(), Gaussian(0.5), **settings)
        assert posterior.noise_scale == pytest.approx(0.2, rel=0.04)
        precision = z.mT @ z / 0.04 + torch.eye(4)
        mean = torch.linalg.solve(precision, z.mT @ y / 0.04)
    else:
        y = (torch.rand(len(x), generator=generator) < (z @ truth).sigmoid()).long()
        module = networks.logistic(3) if kind == "logistic" else networks.softmax(3, 2)
        likelihood = Bernoulli() if kind == "logistic" else Categorical(2)
        posterior = fitted(x, y, module.double(), likelihood, classes=2, **settings)
        # The difference of two logits with prior N(0, 1) each has prior N(0, 2).
        prior = 1.0 if kind == "logistic" else 0.5
        mean, precision = torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
        for _ in range(12):
            p = (z @ mean).sigmoid()
            precision = z.mT @ (z * (p * (1 - p))[:, None]) + prior * torch.eye(4)
            mean = mean + torch.linalg.solve(precision, z.mT @ (y - p) - prior * mean)
    draws = posterior.draws
    if kind == "softmax":
        weights, bias = draws[:, :6].reshape(-1, 2, 3), draws[:, 6:]
        draws = torch.cat([weights[:, 1] - weights[:, 0], bias[:, 1:] - bias[:, :1]], 1)
    deviation = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 0.2 * deviation).all()
    assert torch.allclose(draws.std(0), deviation, rtol=0.12)


# -- coverage ------------------------------------------------------------------------------------------------

QUICK = Cell("linear", "uniform", 2000, 3, 0.3)


def squared_errors(cell: Cell, **options: Any) -> float:
    """Mean square of (truth - mean) / deviation over parameters and repeats: 1 where intervals are honest."""
    return sum(covered(cell, repeat, **options).squared_error for repeat in range(10)) / 10


@pytest.mark.parametrize("cell", [QUICK, replace(QUICK, task="logistic"), replace(QUICK, inputs="narrow")])
def test_errors_are_as_large_as_stated(cell: Cell) -> None:
    assert 0.4 < squared_errors(cell) < 1.9  # 40 numbers, 5 deviations of their mean square


@pytest.mark.parametrize(
    ("part", "epsilon", "plan"),
    [
        pytest.param("score_noise", 0.1, {}, marks=pytest.mark.slow),
        ("curvature_noise", 1.0, {"steps": 1}),
        ("thinning", 30.0, {"sampling": "poisson", "batch": 20, "steps": 20}),
    ],
)
def test_a_belief_that_forgets_a_noise_is_caught(
    part: str, epsilon: float, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a setting where it matters: one stage alone, small batches."""
    cell, real = replace(QUICK, epsilon=epsilon), noise_aware._evidence
    honest = squared_errors(cell, **plan)
    assert honest < 1.9

    def forgotten(*arguments: Any) -> Any:
        found = real(*arguments)
        return replace(found, **{part: 1e-3 * getattr(found, part)})

    monkeypatch.setattr(noise_aware, "_evidence", forgotten)
    assert squared_errors(cell, **plan) > 1.5 * honest


def test_the_width_shrinks_with_the_budget_to_that_of_the_records() -> None:
    widths = [covered(replace(QUICK, epsilon=epsilon), 0).width for epsilon in (0.1, 1.0, 30.0)]
    assert widths[0] > 2 * widths[1]
    assert widths[2] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["uniform", "narrow", "correlated"])
@pytest.mark.parametrize("task", ["linear", "logistic"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_coverage(task: str, inputs: str, epsilon: float) -> None:
    cell = Cell(task, inputs, 5000, 5, epsilon)
    hits = torch.stack([covered(cell, repeat).inside for repeat in range(50)]).double()
    assert 0.86 <= hits.mean() <= 0.97


# -- networks and refusals -----------------------------------------------------------------------------------


def test_hidden_layers_stay_where_they_start() -> None:
    module = networks.mlp(3, 1, hidden=(6,), generator=torch.Generator().manual_seed(0))
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    posterior = fitted(rows(500, 3).float(), rows(500, 1)[:, 0].float(), module, Gaussian(), noise_multiplier=1.0)
    assert torch.equal(posterior.draws[:, :24], before[:24].expand(len(posterior.draws), -1))
    assert (posterior.draws[:, 24:].std(0) > 0).all()
    assert posterior.facts["hidden_layers"] == "as they started"


def test_facts_say_how_much_of_the_width_is_noise() -> None:
    x = rows(2000, 3)
    shares = []
    for noise in (0.5, 50.0):
        facts = fitted(x, x[:, 0], networks.linear(3), Gaussian(), noise_multiplier=noise).facts
        shares.append(facts["share_of_noise_in_width"])
    assert 0 <= shares[0] < 0.3 < 0.7 < shares[1] <= 1


@pytest.mark.parametrize(
    ("module", "likelihood", "message"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), Gaussian(), "end in a trained linear layer with a bias"),
        (nn.Linear(3, 1, bias=False), Gaussian(), "end in a trained linear layer with a bias"),
        (networks.linear(200), Gaussian(), "has 201 weights"),
        (networks.logistic(3), confide.likelihoods.Probit(), "likelihood='probit'"),
    ],
)
def test_what_it_is_not_for_is_refused_before_the_charge(module: nn.Module, likelihood: Any, message: str) -> None:
    ledger = confide.Ledger()
    data = PrivateData(rows(50, 3), rows(50, 1)[:, 0], schema=Schema(records=50), ledger=ledger, name="d")
    plan = confide.plan(delta=1e-5, records=50, steps=2, sampling="full-batch", noise_multiplier=1.0)
    with pytest.raises(confide.errors.Refusal, match=message):
        confide.fit(NoiseAware(), module, data, plan, likelihood=likelihood)
    assert not ledger.events("d")


def test_a_belief_stays_sound_where_noise_drowns_everything() -> None:
    """Curvature that is all noise: the prior comes back, neither narrower nor shifted."""
    x = rows(100, 3)
    posterior = fitted(x, x[:, 0], networks.linear(3), Gaussian(), noise_multiplier=1e4)
    assert torch.allclose(posterior.draws.std(0), torch.ones(4), atol=0.15)
    assert posterior.draws.mean(0).abs().max() < 0.5
    assert _noise_aware.ROUNDS >= 10
