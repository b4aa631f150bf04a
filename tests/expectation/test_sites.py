"""Factors of single records: moment matching against quadrature, for every link, network and noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.expectation.evidence import evidence_for, standard_normals
from confide.expectation.glm import LinearSites, with_ones
from confide.expectation.moments import WeightLayout
from confide.expectation.natural import Covariance, GaussianFamily
from confide.expectation.sites import NetworkSites, network_prior, noise_rate
from confide.methods._baselines import assumed_density_filtering, expectation_propagation
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, Probit
from confide.models.networks import linear, logistic, mlp

GRID = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
DENSITY = torch.exp(-0.5 * GRID**2) / (2 * math.pi) ** 0.5
LINKS = [Gaussian(0.7), Bernoulli(), Probit()]


def integral(likelihood: Any, mean: float, variance: float, y: float, power: int = 0) -> float:
    """E[f^power p(y | f)] for f ~ N(mean, variance)."""
    f = mean + math.sqrt(variance) * GRID
    target = torch.full_like(f, y) if isinstance(likelihood, Gaussian) else torch.full(f.shape, int(y))
    weight = (-likelihood.loss(f[:, None], target)).exp()
    return float(torch.trapezoid(f**power * weight * DENSITY, GRID))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("likelihood", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("y", [0.0, 1.0])
def test_factor_matches_the_tilted_moments(likelihood: Any, y: float) -> None:
    """A linear model with one weight and no bias: cavity * factor has the moments of cavity * p(y | w)."""
    family = GaussianFamily(2, "full")
    cavity = family.from_moments(numbers(0.4, 0.0)[None], torch.diag(numbers(1.5, 1e-9))[None])
    sites = LinearSites(family, family.pack(torch.zeros(1, 2).double(), torch.eye(2).double()[None]), likelihood)
    target = torch.tensor([y]) if isinstance(likelihood, Gaussian) else torch.tensor([int(y)])
    factor = sites.factors(cavity, torch.ones(1, 1), target)[0]
    mean, spread = family.moments(cavity + factor)
    zeroth, first, second = (integral(likelihood, 0.4, 1.5, y, power) for power in range(3))
    assert float(mean[0, 0]) == pytest.approx(first / zeroth, abs=1e-5)
    assert float(spread[0, 0, 0]) == pytest.approx(second / zeroth - (first / zeroth) ** 2, abs=1e-5)


def test_softmax_evidence_against_sampling() -> None:
    mean, variance = torch.tensor([[0.5, -1.0, 0.2]]).double(), torch.tensor([[0.3, 1.0, 0.5]]).double()
    noise = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = (mean + variance.sqrt() * noise).softmax(-1).mean(0)
    for label in range(3):
        found = evidence_for(Categorical(3), numbers(1)).log_normaliser(mean, variance, torch.tensor([label]))
        assert float(found.exp()) == pytest.approx(float(exact[label]), rel=0.02)
    assert torch.allclose(standard_normals(64, 3).mean(0), torch.zeros(3).double(), atol=1e-12)


@pytest.mark.parametrize("likelihood", [*LINKS, Categorical(3)], ids=lambda link: link.name)
def test_curvature_is_the_fisher_information(likelihood: Any) -> None:
    """E over y of the squared score, which is E of the Hessian."""
    outputs = torch.randn(4, likelihood.outputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    root = evidence_for(likelihood, numbers(0.49)[0]).curvature_root(outputs)
    if isinstance(likelihood, Gaussian):
        assert torch.allclose(root @ root.mT, torch.full((4, 1, 1), 1 / 0.49).double())
        return
    for row, output in enumerate(outputs):
        total = torch.zeros(likelihood.outputs, likelihood.outputs, dtype=torch.float64)
        for label in range(max(2, likelihood.outputs)):
            at = output[None].clone().requires_grad_()
            loss = likelihood.loss(at, torch.tensor([label])).sum()
            score = torch.autograd.grad(loss, at)[0][0]
            total += float((-loss).exp().detach()) * score[:, None] * score
        assert torch.allclose(root[row] @ root[row].mT, total, atol=1e-10)


def test_unknown_likelihoods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moment matching knows Gaussian"):
        evidence_for(object(), numbers(1))


@pytest.mark.parametrize("covariance", ["diagonal", "scalar"])
def test_network_and_linear_sites_agree_where_they_overlap(covariance: Covariance) -> None:
    """A network without hidden layers is the linear model with independent weights."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1)
    linear_sites = LinearSites.of(3, Gaussian(0.5), covariance=covariance)
    layout = WeightLayout((3, 1))
    network_sites = NetworkSites(layout, network_prior(layout, 1.0), Gaussian(0.5))
    found = linear_sites.family.moments(linear_sites.prior + linear_sites.factors(linear_sites.prior, x, y))
    other = network_sites.prior + network_sites.factors(network_sites.prior, x, y)
    mean, variance = other[:, :4] / other[:, 4:], 1 / other[:, 4:]
    assert torch.allclose(found[0][:, 0], mean)
    kept = variance if covariance == "diagonal" else variance.mean(1, keepdim=True)
    assert torch.allclose(found[1].reshape(kept.shape), kept)


def test_noise_rate_matches_the_mean_precision() -> None:
    """E[g] under the tilted law of g ~ Gamma(shape, rate), with N(y; m, v + 1/g) as PBP approximates it at v = 0."""
    shape, rate, gap = 50.0, 20.0, 1.3
    grid = torch.linspace(1e-6, 12, 400_001, dtype=torch.float64)
    log_tilted = (shape - 1 + 0.5) * grid.log() - (rate + gap**2 / 2) * grid
    tilted = torch.exp(log_tilted - log_tilted.max())
    exact = float(torch.trapezoid(grid * tilted, grid) / torch.trapezoid(tilted, grid))
    added = noise_rate(numbers(rate)[0], shape, numbers(0)[:, None], numbers(1e-12)[:, None], numbers(gap))
    assert (shape + 0.5) / (rate + float(added)) == pytest.approx(exact, rel=0.003)


def linear_gaussian(records: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Records of a linear model with noise 0.5, and the exact posterior's mean and covariance for a N(0, I) prior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, 2, generator=generator, dtype=torch.float64)
    y = x @ numbers(1.0, -0.5) + 0.3 + 0.5 * torch.randn(records, generator=generator, dtype=torch.float64)
    inputs = with_ones(x)
    precision = torch.eye(3, dtype=torch.float64) + inputs.T @ inputs / 0.25
    return x, y, torch.linalg.solve(precision, inputs.T @ y / 0.25), torch.linalg.inv(precision)


def test_ep_on_linear_gaussian_data_is_exact() -> None:
    x, y, mean, covariance = linear_gaussian()
    found = expectation_propagation(
        linear(2), x, y, likelihood=Gaussian(0.5), covariance="full", learn_noise=False, passes=3
    )
    assert torch.allclose(found.mean(), mean, atol=1e-9)
    assert torch.allclose(found.covariance(), covariance, atol=1e-9)
    assert found.facts["variant"] == "EP, not private"


def test_adf_on_linear_gaussian_data_is_exact_and_two_passes_are_too_sure() -> None:
    x, y, mean, covariance = linear_gaussian()
    settings: dict[str, Any] = {"likelihood": Gaussian(0.5), "covariance": "full", "learn_noise": False}
    once = assumed_density_filtering(linear(2), x, y, **settings)
    assert torch.allclose(once.mean(), mean, atol=1e-8)
    assert torch.allclose(once.covariance(), covariance, atol=1e-8)
    twice = assumed_density_filtering(linear(2), x, y, passes=2, **settings)
    assert torch.trace(twice.covariance()) < 0.6 * torch.trace(covariance)
    assert once.facts["private"] is False


def test_ep_of_a_probit_model_against_a_grid() -> None:
    """EP of a probit regression is known to be very close: means and deviations to a few per cent of a deviation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, generator=generator, dtype=torch.float64)
    y = (1.5 * x[:, 0] - 0.5 + torch.randn(30, generator=generator, dtype=torch.float64) > 0).long()
    found = expectation_propagation(logistic(1), x, y, likelihood=Probit(), covariance="full", passes=30)
    axis = torch.linspace(-5, 5, 401, dtype=torch.float64)
    weight, bias = torch.meshgrid(axis, axis, indexing="ij")
    sign = 2 * y.double() - 1
    score = torch.special.log_ndtr(sign * (weight[..., None] * x[:, 0] + bias[..., None])).sum(-1)
    mass = (score - 0.5 * (weight**2 + bias**2)).flatten().softmax(0)
    draws = torch.stack([weight.flatten(), bias.flatten()], 1)
    mean = mass @ draws
    covariance = (draws - mean).T @ ((draws - mean) * mass[:, None])
    deviation = covariance.diagonal().sqrt()
    assert ((found.mean() - mean).abs() < 0.05 * deviation).all()
    assert torch.allclose(found.covariance(), covariance, atol=0.08 * float(deviation.max()) ** 2)


def test_ep_of_a_network_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 1, generator=generator, dtype=torch.float64) * 2 - 1
    y = (3 * x[:, 0]).sin() + 0.1 * torch.randn(300, generator=generator, dtype=torch.float64)
    module = mlp(1, 1, hidden=(20,))
    found = expectation_propagation(
        module, x, y, likelihood=Gaussian(0.3), passes=200, damping=0.1, generator=generator
    )
    assert float((found.predict(x).mean - (3 * x[:, 0]).sin()).square().mean().sqrt()) < 0.12
