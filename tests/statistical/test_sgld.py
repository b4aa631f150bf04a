"""DP-SGLD against exact posteriors: on a conjugate model the chain must have the right mean and covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import confide
from confide.methods.sgld import SGLD
from tests.statistical.conjugate import NOISE, PRIOR, RECORDS, Conjugate, conjugate_model, deviations


@pytest.fixture(scope="module")
def conjugate() -> Conjugate:
    return conjugate_model()


CURVATURE_STEP = 0.5  # eta lambda: a long step mixes fast, and on a quadratic its bias is known exactly
ETA = CURVATURE_STEP / (RECORDS / NOISE**2 + 1 / PRIOR**2)
BIAS = 1 / (1 - CURVATURE_STEP / 4)  # discretisation of a quadratic: variance 1 / (lambda (1 - eta lambda / 4))


def sampler(**options: object) -> SGLD:
    return SGLD(prior=confide.priors.GaussianPrior(PRIOR), step_size=ETA, thinning=1, burn_in=0.05, **options)


@pytest.mark.parametrize(
    "noise_multiplier",
    [
        pytest.param(1e-6, marks=pytest.mark.slow),
        1e-3 * 0.6 * 2 / ETA**0.5,
        pytest.param(1e-3 * 2 / ETA**0.5, marks=pytest.mark.slow),
    ],
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

        def tell(self, problem: Any, state: Any, release: Any) -> Any:
            return super().tell(problem, state, replace(release, noise_std=0.0))

    method = Deaf(prior=confide.priors.GaussianPrior(PRIOR), step_size=ETA, thinning=1, burn_in=0.05)
    _, ratio = deviations(conjugate, conjugate.chain(method, 3000, 1e-3 * 2 / ETA**0.5))
    assert ratio == pytest.approx(2 * BIAS, rel=0.09)


def test_too_much_noise_is_stated_as_temperature(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(), 3000, 1e-3 * 2 / ETA**0.5 * 2**0.5)
    _, ratio = deviations(conjugate, run)
    assert run.posterior.facts["temperature"] == pytest.approx(2.0)
    assert ratio == pytest.approx(2 * BIAS, rel=0.09)


def test_the_default_step_size_credits_all_noise(conjugate: Conjugate) -> None:
    run = conjugate.chain(SGLD(prior=confide.priors.GaussianPrior(PRIOR)), 200, 1.0)
    assert run.posterior.facts["step_size"] == pytest.approx((2 / 1e3) ** 2)
    assert run.posterior.facts["temperature"] == pytest.approx(1.0)


def test_draws_are_weighted_by_their_steps(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(decay=1 / 3), 50, 1e-6)
    weights = run.posterior.weights  # type: ignore[attr-defined]
    steps = torch.arange(3, 51, dtype=torch.float64) ** (-1 / 3)
    assert torch.allclose(weights, steps / steps.sum())


@pytest.mark.slow
def test_mean_and_covariance_closely(conjugate: Conjugate) -> None:
    run = conjugate.chain(sampler(), 100_000, 1e-3 * 2 / ETA**0.5)
    off, ratio = deviations(conjugate, run)
    assert off < 0.06
    assert ratio == pytest.approx(BIAS, rel=0.025)
