"""Noise-aware posteriors: the formulas, the bound of an answer, the limit without noise, and coverage with faults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from benchmarks._coverage import answers, beliefs
from benchmarks.coverage import NOISE, PRIOR, STEPS, Cell, covered, covered_at_once, drawn, noise_multiplier
from confide.data.schema import Schema
from confide.methods import _noise_aware, noise_aware
from confide.methods._noise_aware_bends import BentScores, moments_of_draws
from confide.methods._noise_aware_inputs import (
    cleaned,
    clipped_mean,
    clipped_square,
    mean_curvature,
    tilted_curvature,
    tilted_scores,
)
from confide.methods._noise_aware_query import Layout
from confide.methods.noise_aware import NoiseAware
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian
from confide.models.priors import GaussianPrior
from confide.posteriors.draws import Draws
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
    z, points = with_ones(x), torch.tensor([[1.2, -1.5, 0.4], [3.0, -4.0, 1.0]], dtype=torch.float64)
    p = (z @ points.mT).sigmoid()
    curvatures = torch.stack([z.mT @ (z * weight[:, None]) for weight in (p * (1 - p)).mT])
    moments, size = z.mT @ z, 0.002 * len(z)  # four deviations of a mean over so many records
    assert torch.allclose(tilted_curvature(moments, points), curvatures, atol=size, rtol=0.01)
    assert torch.allclose(tilted_scores(moments, points), p.mT @ z, atol=size, rtol=0.01)
    assert torch.allclose(mean_curvature(moments, points), tilted_curvature(moments, points).mean(0))


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


@pytest.mark.parametrize("inputs", ["even", "narrow", "alike"])
@pytest.mark.parametrize("size", [50.0, 200.0])
def test_a_noisy_curvature_is_brought_closer_to_the_truth_and_its_error_is_known(inputs: str, size: float) -> None:
    """Also where inputs hardly vary, so that all that is seen of most directions is noise."""
    x = rows(5000, 5)
    x = {"even": x, "narrow": 0.4 + 0.3 * x, "alike": 0.3 * x + 0.7 * rows(5000, 1, seed=1)}[inputs]
    z = with_ones(x)
    truth, layout, own = z.mT @ z, Layout("gaussian", 1, 6), 1750.0**2
    generator = torch.Generator().manual_seed(3)
    noise = layout.symmetric(size * torch.randn(300, layout.pairs, generator=generator, dtype=torch.float64))
    found, doubt = cleaned(truth + noise, torch.full((300,), size**2, dtype=torch.float64), own, True)
    way = torch.randn(6, generator=generator, dtype=torch.float64)
    way[-1] = -x.mean(0) @ way[:-1]  # outputs are right on average, which is what a fit knows first
    error = ((found - truth) @ way).square().mean()
    stated = doubt.of_products(torch.outer(way, way)).diagonal(dim1=-2, dim2=-1).mean()
    assert error < 0.8 * (noise @ way).square().mean()
    assert 0.6 < stated / error < 2.2
    exact, sure = cleaned(truth[None], torch.full((1,), 1e-9, dtype=torch.float64), own, True)
    assert torch.allclose(exact[0], truth, rtol=1e-6)
    assert sure.of_products(torch.outer(way, way)).abs().max() < 1e-6


def test_noise_of_a_symmetric_matrix() -> None:
    """cov(E a, E b), which the belief's covariance rests on, for noise that is alike in all directions."""
    generator = torch.Generator().manual_seed(2)
    layout, own = Layout("categorical", 1, 3), 1e12
    noise = torch.randn(200_000, layout.pairs, generator=generator, dtype=torch.float64)
    a, b = torch.tensor([1.0, -0.5, 2.0]).double(), torch.tensor([0.3, 1.0, -1.0]).double()
    truth = torch.diag(torch.tensor([100.0, 5000.0, 90_000.0]).double())  # each stands out for itself
    _, doubt = cleaned(truth[None], torch.ones(1, dtype=torch.float64), own, False)
    matrices = layout.symmetric(noise)
    found = (matrices @ a).mT @ (matrices @ b) / len(matrices)
    assert torch.allclose(found, ((a @ b) * torch.eye(3) + torch.outer(b, a)) / 2, atol=0.03)
    assert torch.allclose(doubt.of_products(torch.outer(a, b))[0], found, atol=0.03, rtol=0.05)


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


@pytest.mark.parametrize("task", ["linear", "logistic"])
def test_many_fits_at_once_are_fits_through_the_boundary(task: str) -> None:
    """What `benchmarks.coverage` sums up by matrices is what records answer, and without noise beliefs are the same."""
    cell = Cell(task, "narrow", 400, 3, 1.0)
    found, linear = [drawn(cell, repeat) for repeat in range(2)], task == "linear"
    z, y = torch.stack([one.z for one in found]), torch.stack([one.y for one in found])
    likelihood = Gaussian(NOISE) if linear else Bernoulli()
    layout, at = Layout(likelihood.name, 1, 4), rows(2, 4, seed=2)
    module = networks.linear(3) if linear else networks.logistic(3)
    sums = answers(layout, z, y, at, torch.tensor([0.7, 0.7] if linear else [1.0, 1.0]).double())
    for fit in range(2):
        one = layout.answer(module, z[fit, :, :-1], y[fit], at[fit][None], 0.7 if linear else 1.0).sum(0)
        assert torch.allclose(one, sums[fit])
    method = NoiseAware(prior=GaussianPrior(PRIOR[task]))
    belief, _ = beliefs(method, likelihood, z, y, STEPS, 1e-6, 0)
    for fit in range(2):
        data = PrivateData(z[fit, :, :-1], y[fit] if linear else y[fit].long(), schema=Schema(records=400), seed=1)
        plan = confide.plan(delta=1e-5, records=400, steps=STEPS, sampling="full-batch", noise_multiplier=1e-6)
        posterior: Any = confide.fit(method, module, data, plan, likelihood=likelihood, seed=1).posterior
        deviation = belief.covariance[fit].diagonal().sqrt()
        assert ((posterior.draws.mean(0) - belief.mean[fit]).abs() < 0.2 * deviation).all()  # of 1000 draws
        assert torch.allclose(posterior.draws.std(0).double(), deviation, rtol=0.15)


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
        # The prior is that of the logit, however it is written, and three times as wide on the constant.
        prior = torch.tensor([1.0, 1.0, 1.0, 1 / 9], dtype=torch.float64)
        mean, precision = torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
        for _ in range(12):
            p = (z @ mean).sigmoid()
            precision = z.mT @ (z * (p * (1 - p))[:, None]) + torch.diag(prior)
            mean = mean + torch.linalg.solve(precision, z.mT @ (y - p) - prior * mean)
    draws = posterior.draws
    if kind == "softmax":
        weights, bias = draws[:, :6].reshape(-1, 2, 3), draws[:, 6:]
        draws = torch.cat([weights[:, 1] - weights[:, 0], bias[:, 1:] - bias[:, :1]], 1)
        # What both have in common is not learnt: it keeps the prior, under which their difference is N(0, 1).
        assert torch.allclose(weights.sum(1).std(0), torch.ones(3).double(), rtol=0.12)
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
    hits = torch.stack([outcome.inside for outcome in covered_at_once(cell, range(50))]).double()
    assert 0.86 <= hits.mean() <= 0.97


def test_logistic_regression_with_many_features_learns_from_its_budget() -> None:
    """Outputs that the prior lets reach far must not drown the releases: the width would stay the prior's, 12 here."""
    outcomes = covered_at_once(Cell("logistic", "uniform", 5000, 20, 3.0), range(4))
    assert all(outcome.width < 1.5 for outcome in outcomes)
    assert 0.6 < sum(outcome.squared_error for outcome in outcomes) / 4 < 1.6


def test_weights_of_many_features_are_not_drawn_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beliefs are as long as truths on average, though a line through the scores of a sigmoid makes them short."""
    cell = Cell("logistic", "uniform", 1000, 20, 1.0)

    def length_over_truth() -> float:
        found = [drawn(cell, repeat) for repeat in range(4)]
        z, y = torch.stack([one.z for one in found]), torch.stack([one.y for one in found])
        belief, _ = beliefs(NoiseAware(), Bernoulli(), z, y, 10, noise_multiplier(1.0), 0)
        squares = belief.mean.square().sum(1) + belief.covariance.diagonal(dim1=1, dim2=2).sum(1)
        return float(squares.sum() / torch.stack([one.truth for one in found]).square().sum())

    assert 0.9 < length_over_truth() < 1.15
    monkeypatch.setattr(_noise_aware, "BENT_ROUNDS", 0)
    assert length_over_truth() < 0.84


def test_two_outputs_for_two_classes_are_learnt_as_well_as_one() -> None:
    """A door that knows two classes makes a softmax of two outputs: as two, the broken variant, they had nearly twice
    the width, for an answer was shared by twice as many numbers. The prior is that of the logit either way."""
    x = rows(2000, 3)
    y = (torch.rand(2000, generator=torch.Generator().manual_seed(5)) < x[:, 0].sigmoid()).long()
    data = [PrivateData(x, y, schema=Schema(records=2000, classes=2), seed=3) for _ in range(2)]
    plan = confide.plan(delta=1e-5, records=2000, steps=5, sampling="full-batch", noise_multiplier=20.0)
    logit = confide.fit(NoiseAware(), networks.logistic(3), data[0], plan, likelihood=Bernoulli(), seed=0).posterior
    pair = confide.fit(NoiseAware(), networks.softmax(3, 2), data[1], plan, likelihood=Categorical(2), seed=0).posterior
    assert isinstance(logit, Draws)
    assert isinstance(pair, Draws)
    weights = pair.draws[:, :6].reshape(-1, 2, 3)
    assert torch.allclose(weights[:, 1] - weights[:, 0], logit.draws[:, :3], atol=1e-5)


def test_a_rare_class_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant of -3.9 is usual. The planted fault: a prior under which it is four deviations away."""
    cell = Cell("logistic", "uniform", 5000, 5, 0.1, "unlikely")

    def inside() -> float:
        return float(torch.stack([one.inside for one in covered_at_once(cell, range(30))]).double().mean())

    assert inside() > 0.88
    monkeypatch.setattr(noise_aware, "CONSTANT", 1.0)
    assert inside() < 0.8


def test_moments_of_draws_are_those_of_the_density() -> None:
    """A Gaussian one that lies elsewhere and has another shape than where chains start."""
    middle, precision = torch.tensor([1.0, -0.5]).double(), torch.tensor([[2.0, 0.8], [0.8, 1.0]]).double()

    def density(points: Tensor) -> tuple[Tensor, Tensor]:
        pull = (middle - points) @ precision
        return ((points - middle) * pull).sum(-1) / 2, pull

    mean, covariance = moments_of_draws(density, torch.zeros(2).double(), torch.eye(2).double())
    assert torch.allclose(mean, middle, atol=0.1)
    assert torch.allclose(covariance, torch.linalg.inv(precision), rtol=0.15, atol=0.1)


def test_the_gradient_of_bent_scores() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.cat([torch.randn(50, 2, generator=generator) + 0.5, torch.ones(50, 1)], 1).double()
    square = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    prior = torch.tensor([0.7, 0.7, 0.1], dtype=torch.float64)
    bent = BentScores(x.mT @ x, square[0], 0.1 * (square + square.mT), square[1], square @ square.mT, prior)
    points = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    density, gradient = bent.at(points)
    (wanted,) = torch.autograd.grad(density.sum(), points)
    assert torch.allclose(gradient, wanted, rtol=1e-8)


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


def test_intervals_that_cannot_be_right_or_say_nothing_are_said_to_be_so_first() -> None:
    """Noise alone; weights far beyond the prior, which it draws to zero; and neither, where nothing is said."""
    x = rows(2000, 3)
    y = (torch.rand(2000, generator=torch.Generator().manual_seed(5)) < (12 * x[:, 0] - 9 * x[:, 1]).sigmoid()).long()
    noise = fitted(x, y, networks.logistic(3), Bernoulli(), classes=2, noise_multiplier=1e4)
    assert repr(noise).startswith("The releases told next to nothing")
    far = fitted(x, y, networks.logistic(3), Bernoulli(), classes=2, noise_multiplier=1.0)
    assert repr(far).startswith("The prior does not fit what was learnt")
    fair = (torch.rand(2000, generator=torch.Generator().manual_seed(5)) < x[:, 0].sigmoid()).long()
    assert "warning" not in fitted(x, fair, networks.logistic(3), Bernoulli(), classes=2, noise_multiplier=1.0).facts


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
