"""Diagnostics of clipping and noise, against direct computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from confide.evaluate.expectation import (
    clipping_divergence,
    fisher_trace,
    joint_clipping_divergence,
    noise_of_factor,
    one_step_divergence,
    theorem_4_1,
)
from confide.expectation.natural import COVARIANCES, Covariance, GaussianFamily


def natural() -> tuple[Tensor, Tensor]:
    root = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.tensor([2.0, -1.0, 3.0]).double(), root @ root.T + torch.eye(3).double()


@pytest.mark.parametrize("clip", [0.5, 3.0, 100.0])
def test_clipping_divergence_is_the_divergence(clip: float) -> None:
    """The formula as printed has d m where d / m belongs; it is off by far more than rounding."""
    eta, precision = natural()
    family = GaussianFamily(3)

    def packed(vector: Tensor, matrix: Tensor) -> Tensor:
        return family.pack(vector[None], matrix[None])

    m, k = max(1.0, float(precision.norm()) / clip), max(1.0, float(eta.norm()) / clip)
    exact = float(family.divergence(packed(eta, precision), packed(eta / k, precision / m)))
    assert clipping_divergence(eta, precision, clip) == pytest.approx(exact, abs=1e-10)
    if m > 1:
        distance = float(eta @ torch.linalg.solve(precision, eta))
        printed = 0.5 * (3 * m + (m / k - 1) ** 2 / m * distance - 3 + 3 * math.log(m))
        assert printed > 1.1 * exact


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_joint_clipping_divergence(covariance: Covariance, clip: float) -> None:
    eta, precision = natural()
    family = GaussianFamily(3, covariance)
    theta = family.pack(eta[None], family.restricted(precision[None]))
    scaled = theta * min(1.0, clip / float(theta.norm()))
    exact = float(family.divergence(theta, scaled))
    assert joint_clipping_divergence(family, theta, clip) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_fisher_trace_against_draws(covariance: Covariance) -> None:
    eta, precision = natural()
    family = GaussianFamily(3, covariance)
    theta = family.pack(eta[None], family.restricted(precision[None]))
    draws = family.sample(theta, 200_000, torch.Generator().manual_seed(0))
    outer = -0.5 * draws[:, :, None] * draws[:, None, :]
    statistics = family.pack(draws[:, None], family.restricted(outer[:, None]))
    assert fisher_trace(family, theta) == pytest.approx(float(statistics.var(0).sum()), rel=0.02)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_one_step_divergence_to_second_order(covariance: Covariance) -> None:
    eta, precision = natural()
    family = GaussianFamily(3, covariance)
    theta = family.pack(eta[None], family.restricted(precision[None]))
    generator = torch.Generator().manual_seed(1)
    found, expected = one_step_divergence(family, theta, 0.02, least=1e-3, draws=20_000, generator=generator)
    assert found == pytest.approx(expected, rel=0.06)


def test_theorem_is_a_heuristic() -> None:
    eta, precision = natural()
    lowest = float(torch.linalg.eigvalsh(precision)[0])
    assert theorem_4_1(eta, precision, 0.01, least=0.1, margin=1.0) is None
    value = theorem_4_1(eta, precision, 1e-9, least=lowest, margin=1e-9)
    assert value is not None
    assert value > -1


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"damping=2.0: must be below 2"):
        noise_of_factor(1.0, 1.0, 10.0, 2.0, 5)
    with pytest.raises(ValueError, match=r"clip=0: must be > 0"):
        clipping_divergence(*natural(), 0)
