"""Divergences of a Gaussian from each prior: against autograd, quadrature and simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.models import priors
from confide.models.priors import LogUniformPrior, add_divergence_gradient_

CLOSED = [priors.GaussianPrior(0.3), priors.LaplacePrior(0.7), priors.FlatPrior(), LogUniformPrior()]
MIXTURE = priors.ScaleMixturePrior(0.3, 1.5, 0.05)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments(size: int = 9) -> tuple[Tensor, Tensor]:
    mean = torch.randn(size, generator=generator(), dtype=torch.float64)
    deviation = torch.rand(size, generator=generator(1), dtype=torch.float64) + 0.05
    return mean, deviation


def expectation(function: Any, mean: float, deviation: float) -> float:
    """E f(w) for w ~ N(mean, deviation^2), by a fine sum over 12 standard deviations on both sides."""
    points = np.linspace(-12, 12, 400_001)
    weights = np.exp(-(points**2) / 2) * (points[1] - points[0]) / math.sqrt(2 * math.pi)
    return float((function(mean + deviation * points) * weights).sum())


def entropy(deviation: float) -> float:
    return math.log(deviation) + 0.5 * math.log(2 * math.pi * math.e)


@pytest.mark.parametrize("prior", CLOSED, ids=lambda prior: type(prior).__name__)
def test_slopes_are_those_of_the_divergence(prior: Any) -> None:
    mean, deviation = (value.requires_grad_() for value in moments())
    divergence = prior.divergence(mean, deviation)
    expected = torch.autograd.grad(divergence, (mean, deviation), allow_unused=True, materialize_grads=True)
    for slope, wanted in zip(prior.divergence_slopes(mean.detach(), deviation.detach()), expected, strict=True):
        assert torch.allclose(slope, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mean", [-0.8, 0.0, 0.02, 1.3])
@pytest.mark.parametrize("deviation", [0.03, 0.6])
def test_closed_forms_against_quadrature(mean: float, deviation: float) -> None:
    where = torch.tensor([mean]).double(), torch.tensor([deviation]).double()
    scale = 0.4
    energies = {
        priors.GaussianPrior(scale): lambda w: w**2 / (2 * scale**2) + math.log(scale * math.sqrt(2 * math.pi)),
        priors.LaplacePrior(scale): lambda w: np.abs(w) / scale + math.log(2 * scale),
    }
    for prior, energy in energies.items():
        expected = expectation(energy, mean, deviation) - entropy(deviation)
        assert prior.divergence(*where).item() == pytest.approx(expected, rel=1e-6, abs=1e-7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("log_alpha", [-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0])
def test_log_uniform_against_numerical_integration(log_alpha: float) -> None:
    """KL = E log|z + 1/sqrt(alpha)| - E log|z|, zero for pure noise: a sign or a missing half shows at once."""
    from scipy.integrate import quad

    shift = math.exp(-log_alpha / 2)

    def integrand(z: float) -> float:
        return math.log(abs(z + shift)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    reach = 12.0
    breaks = [-shift] if -shift > -reach else None
    value, _ = quad(integrand, -reach, reach, points=breaks, limit=400)
    exact = value + (np.euler_gamma + math.log(2)) / 2
    mean, deviation = torch.tensor([0.7]).double(), torch.tensor([0.7 * math.exp(log_alpha / 2)]).double()
    assert LogUniformPrior().divergence(mean, deviation).item() == pytest.approx(exact, abs=0.011)


def test_log_uniform_pulls_nothing_at_zero() -> None:
    mean, deviation = torch.tensor([0.0, 1e-30, -1e-7]), torch.full((3,), 0.1)
    of_mean, of_deviation = LogUniformPrior().divergence_slopes(mean, deviation)
    assert torch.isfinite(of_mean).all()
    assert torch.isfinite(of_deviation).all()
    assert of_mean.abs().max() < 1e-3


def test_mixture_energy_is_the_negative_log_density() -> None:
    position = torch.linspace(-3, 3, 13, dtype=torch.float64)
    normal = torch.distributions.Normal
    wide, narrow = (
        normal(torch.zeros(()).double(), torch.tensor(scale).double()).log_prob(position).exp() for scale in (1.5, 0.05)
    )
    density = 0.3 * wide + 0.7 * narrow
    energies = torch.stack([MIXTURE.energy(one) for one in position])
    constant = energies + density.log()
    assert torch.allclose(constant, constant[0].expand(13))


def test_mixture_gradient_is_that_of_its_energy_even_far_out() -> None:
    position = torch.tensor([-40.0, -1.0, -0.1, 0.0, 0.02, 0.3, 40.0], dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(MIXTURE.energy(position), position)
    out = MIXTURE.add_energy_gradient_(position.detach(), torch.ones(7).double(), factor=-2.0)
    assert torch.allclose(out, 1 - 2 * expected)


def test_monte_carlo_divergence_has_the_right_mean() -> None:
    """A Gaussian seen only through its energy must give, on average, what its closed form gives."""

    class Hidden:
        energy = priors.GaussianPrior(0.4).energy
        add_energy_gradient_ = priors.GaussianPrior(0.4).add_energy_gradient_

    mean, deviation = moments(4)
    noise = torch.randn(40_000, 4, generator=generator(2), dtype=torch.float64)
    found = torch.zeros(4).double(), torch.zeros(4).double()
    add_divergence_gradient_(Hidden(), mean, deviation, noise, *found, factor=3.0)
    slopes = priors.GaussianPrior(0.4).divergence_slopes(mean, deviation)
    for value, slope in zip(found, slopes, strict=True):
        # Standard error at most 3 / 0.4^2 * max(deviation + |mean|) / 200, about 0.2.
        assert (value - 3 * slope).abs().max() < 0.8
        assert torch.allclose(value, 3 * slope, rtol=0.2, atol=0.4)


def test_monte_carlo_gradient_of_a_mixture_is_the_gradient_of_the_average_energy() -> None:
    mean, deviation = (value.requires_grad_() for value in moments(5))
    noise = torch.randn(3, 5, generator=generator(3), dtype=torch.float64)
    energy = torch.stack([MIXTURE.energy(mean + deviation * one) for one in noise]).mean() - deviation.log().sum()
    expected = torch.autograd.grad(energy, (mean, deviation))
    found = torch.zeros(5).double(), torch.zeros(5).double()
    add_divergence_gradient_(MIXTURE, mean.detach(), deviation.detach(), noise, *found)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.allclose(value, wanted)


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.0}, {"wide": 0.0}, {"narrow": float("nan")}])
def test_bad_mixtures_are_named(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        priors.ScaleMixturePrior(**options)
