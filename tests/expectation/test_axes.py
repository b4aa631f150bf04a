"""Which axes a machine's library gives, and with which signs, decides nothing: a seeded run is the same everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from confide.expectation import metric
from confide.expectation.moments import WeightLayout
from confide.expectation.natural import pack_symmetric, signed_axes
from confide.expectation.sites import NetworkSites, network_prior
from confide.expectation.standardise import standardiser
from confide.methods._trace import Line, Trace, drawn_curvatures, fitted_line
from confide.models.likelihoods import Gaussian

EIGH = torch.linalg.eigh


def other_signs(matrix: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Another library's eigenvectors."""
    values, vectors = EIGH(matrix, **options)
    return values, vectors * torch.where(torch.arange(vectors.shape[-1]) % 2 == 0, -1.0, 1.0).to(vectors)


def found() -> list[Tensor]:
    """The metric of a network, how reference inputs are spread, and curvatures that are drawn."""
    layout = WeightLayout((3, 4, 1))
    sites = NetworkSites(layout, network_prior(layout, 1.0), Gaussian(0.5))
    root = metric.gauss_newton(sites, sites.prior, 1000, 6).root
    assert root is not None
    covariance = torch.tensor([[0.3, 0.1, 0.0], [0.1, 0.2, 0.05], [0.0, 0.05, 0.4]], dtype=torch.float64)
    total = torch.cat([torch.ones(1, dtype=torch.float64), pack_symmetric(covariance)])
    _, spread = standardiser(total, torch.zeros(3, dtype=torch.float64), 0.01)
    return [root, spread, drawn_curvatures(line_of(9), 5, torch.Generator().manual_seed(0))]


def line_of(points: int, rounding: float = 0.0) -> Line:
    """Gradients of a bowl in ten dimensions at so many points, with some noise; numbers off by as much as rounding."""
    generator = torch.Generator().manual_seed(1)
    places = torch.randn(points, 10, generator=generator, dtype=torch.float64)
    gradients = 5 * places + torch.randn(points, 10, generator=generator, dtype=torch.float64)
    off = 1 + rounding * torch.randn(points, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise, stages = torch.ones(points, dtype=torch.float64), torch.zeros(points, dtype=torch.long)
    return fitted_line(Trace(places * off, gradients, noise, stages))


def test_signs_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = found()
    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    for one, other in zip(here, found(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_signs_as_they_come_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric, "signed_axes", lambda matrix: torch.linalg.eigh(matrix))
    here = found()
    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    assert not torch.allclose(here[0], found()[0])


def test_axes_are_axes() -> None:
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values, vectors = signed_axes(matrix @ matrix.mT)
    assert torch.allclose((vectors * values) @ vectors.mT, matrix @ matrix.mT)


def test_directions_that_no_point_explored_are_flat_and_not_rounding() -> None:
    """Four points in ten dimensions: nothing is known of seven, where nothing was divided by nothing."""
    line, other = line_of(4), line_of(4, 1e-14)
    assert float((line.curvature - other.curvature).norm()) < 1e-10 * float(line.curvature.norm())
    seen = torch.linalg.matrix_rank(line.scatter, atol=1e-8)
    assert seen == 3
    unseen = torch.linalg.eigh(line.scatter)[1][:, :7]
    draws = [drawn_curvatures(one, 20, torch.Generator().manual_seed(0)) for one in (line, other)]
    assert math.isclose(float((draws[0] - draws[1]).norm()), 0.0, abs_tol=1e-9 * float(draws[0].norm()) + 1e-12)
    assert float((unseen.mT @ draws[0] @ unseen).norm()) < 1e-6
