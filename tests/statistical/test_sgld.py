"""DP-SGLD against exact posteriors: on a conjugate model the chain must have the right mean and covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.boundary import PrivateData
from confide.data.schema import Schema
from confide.methods.sgld import SGLD
from confide.models.likelihoods import Gaussian

NOISE, PRIOR, RECORDS, FEATURES = 0.5, 1.0, 100, 8


@dataclass(frozen=True)
class Conjugate:
    """Linear regression with known noise and a Gaussian prior: the posterior is Gaussian and known."""

    x: Tensor
    y: Tensor

    @property
    def precision(self) -> Tensor:
        return self.x.T @ self.x / NOISE**2 + torch.eye(FEATURES, dtype=torch.float64) / PRIOR**2

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.x.T @ self.y / NOISE**2)

    def chain(self, method: SGLD, steps: int, noise_multiplier: float) -> confide.Run:
        module = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        data = PrivateData(self.x, self.y, schema=Schema(records=RECORDS), seed=11)
        plan = confide.plan(
            delta=1e-5,
            records=RECORDS,
            steps=steps,
            sampling="full-batch",
            noise_multiplier=noise_multiplier,
            clip=1e3,
        )
        return confide.fit(method, module, data, plan, likelihood=Gaussian(NOISE), seed=4)


@pytest.fixture(scope="module")
def conjugate() -> Conjugate:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    x = torch.linalg.qr(x).Q * RECORDS**0.5  # equal curvature in all directions: the chain mixes as fast as it can
    truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    return Conjugate(x, x @ truth + NOISE * torch.randn(RECORDS, generator=generator, dtype=torch.float64))


def deviations(conjugate: Conjugate, run: confide.Run) -> tuple[float, float]:
    """How far the mean is off, in posterior standard deviations, and the ratio of variances, over all directions."""
    root = torch.linalg.cholesky(conjugate.precision)
    posterior = run.posterior
    whitened = root.T @ (posterior.mean() - conjugate.mean)
    ratio = torch.trace(root.T @ posterior.covariance() @ root) / FEATURES
    return whitened.abs().max().item(), ratio.item()


CURVATURE_STEP = 0.5  # eta lambda: a long step mixes fast, and on a quadratic its bias is known exactly
ETA = CURVATURE_STEP / (RECORDS / NOISE**2 + 1 / PRIOR**2)
BIAS = 1 / (1 - CURVATURE_STEP / 4)  # discretisation of a quadratic: variance 1 / (lambda (1 - eta lambda / 4))


def sampler(**options: object) -> SGLD:
    return SGLD(prior=confide.priors.Gaussian(PRIOR), step_size=ETA, thinning=1, burn_in=0.05, **options)


@pytest.mark.parametrize(
    "noise_multiplier",
    [1e-6, 1e-3 * 0.6 * 2 / ETA**0.5, 1e-3 * 2 / ETA**0.5],
    ids=["all topped up", "partly credited", "all credited"],
)
def test_mean_and_covariance_are_the_posterior(conjugate: Conjugate, noise_multiplier: float) -> None:
    run = conjugate.chain(sampler(), 3000, noise_multiplier)
    off, ratio = deviations(conjugate, run)
    # About 3000 * 0.5 / 4 = 375 effective draws in each of 8 directions: 2.5 % on the variance, 0.05 on the mean.
    assert off < 0.2
    assert ratio == pytest.approx(BIAS, rel=0.09)
    assert run.posterior.facts["temperature"] == pytest.approx(1.0)


def test_drift_eta_instead_of_half_is_caught(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(convention="paper"), 3000, 1e-6)
    _, ratio = deviations(conjugate, run)
    assert ratio == pytest.approx(0.5 / (1 - CURVATURE_STEP / 2), rel=0.09)
    assert run.posterior.facts["temperature"] == pytest.approx(0.5)


def test_double_noise_is_caught(conjugate: Conjugate) -> None:
    """A sampler that ignores the release's noise and adds all of the Langevin noise on top samples too hot."""

    @dataclass(frozen=True)
    class Deaf(SGLD):
        name: ClassVar[str] = "deaf"

        def tell(self, problem: object, state: object, release: object) -> object:
            from dataclasses import replace

            return super().tell(problem, state, replace(release, noise_std=0.0))

    method = Deaf(prior=confide.priors.Gaussian(PRIOR), step_size=ETA, thinning=1, burn_in=0.05)
    _, ratio = deviations(conjugate, conjugate.chain(method, 3000, 1e-3 * 2 / ETA**0.5))
    assert ratio == pytest.approx(2 * BIAS, rel=0.09)


def test_too_much_noise_is_stated_as_temperature(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(), 3000, 1e-3 * 2 / ETA**0.5 * 2**0.5)
    _, ratio = deviations(conjugate, run)
    assert run.posterior.facts["temperature"] == pytest.approx(2.0)
    assert ratio == pytest.approx(2 * BIAS, rel=0.09)


def test_the_default_step_size_credits_all_noise(conjugate: Conjugate) -> None:
    run = conjugate.chain(SGLD(prior=confide.priors.Gaussian(PRIOR)), 200, 1.0)
    assert run.posterior.facts["step_size"] == pytest.approx((2 / 1e3) ** 2)
    assert run.posterior.facts["temperature"] == pytest.approx(1.0)


def test_draws_are_weighted_by_their_steps(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(decay=1 / 3), 50, 1e-6)
    weights = run.posterior.weights
    steps = torch.arange(3, 51, dtype=torch.float64) ** (-1 / 3)
    assert torch.allclose(weights, steps / steps.sum())


@pytest.mark.slow
def test_mean_and_covariance_closely(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(), 100_000, 1e-3 * 2 / ETA**0.5)
    off, ratio = deviations(conjugate, run)
    assert off < 0.06
    assert ratio == pytest.approx(BIAS, rel=0.025)
