"""Exponential families in natural parameters: packing keeps norms, moments go there and back, projections are right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.expectation.natural import (
    COVARIANCES,
    Covariance,
    GammaFamily,
    GaussianFamily,
    LocalChart,
    pack_symmetric,
    unpack_symmetric,
)

every_covariance = pytest.mark.parametrize("covariance", COVARIANCES)


def member(family: GaussianFamily, seed: int = 0) -> Tensor:
    """A Gaussian that is neither standard nor isotropic."""
    generator = torch.Generator().manual_seed(seed)
    size = (family.copies, family.dimension, family.dimension)
    root = torch.randn(*size, generator=generator, dtype=torch.float64)
    dense = root @ root.mT + torch.eye(family.dimension, dtype=torch.float64)
    mean = torch.randn(family.copies, family.dimension, generator=generator, dtype=torch.float64)
    return family.from_moments(mean, family.restricted(dense))


def random_symmetric(seed: int, size: int = 4) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix + matrix.mT


class TestPacking:
    @given(st.integers(0, 10_000), st.integers(1, 6))
    @settings(max_examples=30, deadline=None)
    def test_norm_is_that_of_the_matrix(self, seed: int, size: int) -> None:
        """Off-diagonals without sqrt 2 make the clip of the vector up to sqrt 2 too generous."""
        matrix = random_symmetric(seed, size)
        assert pack_symmetric(matrix).norm() == pytest.approx(matrix.norm().item(), rel=1e-12)
        assert torch.allclose(unpack_symmetric(pack_symmetric(matrix), size), matrix)

    def test_without_root_two_the_norm_is_wrong(self) -> None:
        matrix = torch.ones(3, 3, dtype=torch.float64)
        rows, columns = torch.triu_indices(3, 3)
        assert matrix[rows, columns].norm() < 0.9 * pack_symmetric(matrix).norm()

    @every_covariance
    def test_norm_of_the_whole_member(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        theta = member(family)
        eta, precision = family.unpack(theta)
        assert theta.norm() == pytest.approx(math.hypot(eta.norm(), family.dense(precision).norm()))
        assert torch.allclose(family.pack(eta, precision), theta)
        assert theta.shape == (family.size,)


class TestGaussian:
    @every_covariance
    def test_moments_there_and_back(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        theta = member(family)
        assert torch.allclose(family.from_moments(*family.moments(theta)), theta)

    @every_covariance
    def test_batches_are_row_by_row(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        rows = torch.stack([member(family, seed) for seed in range(5)])
        mean, spread = family.moments(rows)
        assert torch.allclose(mean[3], family.moments(rows[3])[0])
        assert torch.allclose(spread[3], family.moments(rows[3])[1])

    @every_covariance
    def test_draws_have_the_moments(self, covariance: Covariance) -> None:
        family = GaussianFamily(2, covariance, 2)
        theta = member(family)
        draws = family.sample(theta, 40_000, torch.Generator().manual_seed(1))
        mean, spread = family.moments(theta)
        exact = torch.block_diag(*family.dense(spread))
        assert torch.allclose(draws.mean(0), mean.flatten(), atol=0.06)
        assert torch.allclose(draws.T.cov(), exact, atol=0.04 * float(exact.max()))

    @every_covariance
    def test_divergence_against_draws(self, covariance: Covariance) -> None:
        family = GaussianFamily(2, covariance, 2)
        p, q = member(family, 0), member(family, 1)
        draws = family.sample(p, 40_000, torch.Generator().manual_seed(1))

        def log_density(theta: Tensor) -> Tensor:
            mean, spread = family.moments(theta)
            law = torch.distributions.MultivariateNormal(mean.flatten(), torch.block_diag(*family.dense(spread)))
            return law.log_prob(draws)

        gap = log_density(p) - log_density(q)
        assert float(family.divergence(p, q)) == pytest.approx(
            float(gap.mean()), abs=4 * float(gap.std()) / math.sqrt(len(gap))
        )
        assert float(family.divergence(p, p)) == pytest.approx(0, abs=1e-12)

    @every_covariance
    def test_projection_raises_small_eigenvalues_and_nothing_else(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        theta = member(family)
        assert torch.allclose(family.project(theta, 1e-6), theta)
        broken = theta - 2 * theta.abs()
        eta, precision = family.unpack(family.project(broken, 0.3))
        assert float(torch.linalg.eigvalsh(family.dense(precision)).min()) >= 0.3 - 1e-12
        assert torch.equal(eta, family.unpack(broken)[0])

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match=r"dimension=0"):
            GaussianFamily(0)
        with pytest.raises(ValueError, match=r"covariance='round': must be one of full"):
            GaussianFamily(2, "round")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"least=0: must be > 0"):
            GaussianFamily(2).project(torch.zeros(5, dtype=torch.float64), 0)


class TestGamma:
    family = GammaFamily()

    def test_moments_against_quadrature(self) -> None:
        theta = self.family.pack(torch.tensor(3.5).double(), torch.tensor(2.0).double())
        grid = torch.linspace(1e-6, 40, 400_001, dtype=torch.float64)
        density = torch.exp(theta[0] * grid.log() - theta[1] * grid)
        density = density / torch.trapezoid(density, grid)
        first, second = self.family.moments(theta)
        assert float(first) == pytest.approx(float(torch.trapezoid(density * grid, grid)), rel=1e-6)
        assert float(second) == pytest.approx(float(torch.trapezoid(density * grid**2, grid)), rel=1e-6)
        assert torch.allclose(self.family.from_moments(first, second), theta)

    def test_divergence_against_torch(self) -> None:
        p, q = (torch.tensor(pair, dtype=torch.float64) for pair in ([3.5, 2.0], [1.5, 0.7]))
        exact = torch.distributions.kl_divergence(torch.distributions.Gamma(*p), torch.distributions.Gamma(*q))
        assert self.family.divergence(self.family.pack(*p), self.family.pack(*q)) == pytest.approx(float(exact))

    def test_projection(self) -> None:
        shape, rate = self.family.unpack(self.family.project(torch.tensor([-2.0, -1.0]), 0.01))
        assert float(shape) == pytest.approx(1.01)
        assert float(rate) == pytest.approx(0.01)


class TestLocalChart:
    @every_covariance
    def test_there_and_back(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        chart = LocalChart(family, member(family), 1e-6, unit=0.3)
        change = member(family, 4)
        assert torch.allclose(chart.decode(chart.encode(change)), change)

    @every_covariance
    def test_the_present_member_is_standard(self, covariance: Covariance) -> None:
        """In its own units q is N(0, I): eta is 0 and the precision 1."""
        family = GaussianFamily(3, covariance, 2)
        theta = member(family)
        eta, precision = family.unpack(LocalChart(family, theta, 1e-6, weight=1.0).encode(theta))
        assert torch.allclose(eta, torch.zeros_like(eta), atol=1e-12)
        assert torch.allclose(family.dense(precision), torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-12)

    @every_covariance
    def test_a_small_step_is_a_sum_of_natural_parameters(self, covariance: Covariance) -> None:
        family = GaussianFamily(3, covariance, 2)
        theta, change = member(family), 0.05 * member(family, 4)
        chart = LocalChart(family, theta, 1e-6)
        assert torch.allclose(chart.advance(chart.encode(change)), theta + change)

    def test_a_wild_step_stays_in_the_trust_region(self) -> None:
        family = GaussianFamily(3, "full", 1)
        theta = member(family)
        _, before = family.unpack(theta)
        _, after = family.unpack(LocalChart(family, theta, 1e-6).advance(-1e3 * torch.ones(family.size).double()))
        ratio = torch.linalg.eigvals(torch.linalg.solve(before, after)).real
        assert float(ratio.min()) == pytest.approx(0.25, rel=1e-6)
