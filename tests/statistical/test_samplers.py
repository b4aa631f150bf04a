"""SGHMC, SGNHT and pSGLD on a conjugate model: the chains must have the posterior's mean and covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

import confide
from confide.methods.psgld import PSGLD
from confide.methods.sghmc import SGHMC
from confide.methods.sgnht import SGNHT
from tests.statistical.conjugate import NOISE, PRIOR, RECORDS, Conjugate, conjugate_model, deviations

CURVATURE = RECORDS / NOISE**2 + 1 / PRIOR**2
SETTINGS: dict[str, Any] = {"prior": confide.priors.GaussianPrior(PRIOR), "thinning": 1, "burn_in": 0.1}


@pytest.fixture(scope="module")
def conjugate() -> Conjugate:
    return conjugate_model()


def hmc_variance(eta: float, friction: float, noise: float) -> float:
    """Stationary variance of theta in units of the posterior's, for noise of variance `noise` in the velocity."""
    pull = eta * CURVATURE
    step = np.array([[1 - pull, 1 - friction], [-pull, 1 - friction]])
    return float(solve_discrete_lyapunov(step, noise * np.ones((2, 2)))[0, 0] * CURVATURE)


FRICTION, ETA = 0.4, 0.1 / CURVATURE
NEEDED = 2 * FRICTION * ETA
CREDITED = NEEDED**0.5 / ETA / 1e3  # the noise multiplier at which the release brings all of the noise, at clip 1000


@pytest.mark.parametrize(
    "noise_multiplier",
    [pytest.param(1e-6, marks=pytest.mark.slow), 0.7 * CREDITED, pytest.param(CREDITED, marks=pytest.mark.slow)],
    ids=["topped up", "partly", "credited"],
)
def test_sghmc_has_the_posterior(conjugate: Conjugate, noise_multiplier: float) -> None:
    run = conjugate.chain(SGHMC(step_size=ETA, friction=FRICTION, **SETTINGS), 3000, noise_multiplier)
    off, ratio = deviations(conjugate, run)
    assert off < 0.2
    assert ratio == pytest.approx(hmc_variance(ETA, FRICTION, NEEDED), rel=0.1)
    assert hmc_variance(ETA, FRICTION, NEEDED) == pytest.approx(1, rel=0.07)


@pytest.mark.slow
def test_sghmc_states_its_temperature(conjugate: Conjugate) -> None:
    run = conjugate.chain(SGHMC(step_size=ETA, friction=FRICTION, **SETTINGS), 3000, CREDITED * 2**0.5)
    assert run.posterior.facts["temperature"] == pytest.approx(2)
    assert deviations(conjugate, run)[1] == pytest.approx(hmc_variance(ETA, FRICTION, 2 * NEEDED), rel=0.1)


def test_a_sampler_that_ignores_the_releases_noise_is_caught(conjugate: Conjugate) -> None:
    @dataclass(frozen=True)
    class Deaf(SGHMC):
        name: ClassVar[str] = "deaf"

        def tell(self, problem: Any, state: Any, release: Any) -> Any:
            from dataclasses import replace

            return super().tell(problem, state, replace(release, noise_std=0.0))

    run = conjugate.chain(Deaf(step_size=ETA, friction=FRICTION, **SETTINGS), 3000, CREDITED)
    assert deviations(conjugate, run)[1] > 1.6


@pytest.mark.parametrize(
    "excess", [0.5, pytest.param(3.0, marks=pytest.mark.slow)], ids=["topped up", "more noise than needed"]
)
def test_sgnht_holds_the_temperature_whatever_the_noise(conjugate: Conjugate, excess: float) -> None:
    h, diffusion = 0.02, 10.0
    credited = (2 * diffusion * h) ** 0.5 / h / 1e3
    method = SGNHT(step_size=h * (20 / CURVATURE) ** 0.5, diffusion=diffusion, **SETTINGS)
    run = conjugate.chain(method, 4000, credited * excess**0.5)
    off, ratio = deviations(conjugate, run)
    assert off < 0.3
    assert ratio == pytest.approx(1, rel=0.15)


def test_psgld_has_the_posterior(conjugate: Conjugate) -> None:
    # Entries of G are near 1 / sqrt(V) with V about the squared mean gradient; the step is set for G lambda eta ~ 0.3.
    run = conjugate.chain(PSGLD(step_size=0.3 / CURVATURE, memory=0.999, floor=1.0, **SETTINGS), 3000, 1e-6)
    off, ratio = deviations(conjugate, run)
    assert off < 0.2
    assert ratio == pytest.approx(1 / (1 - 0.3 / 4), rel=0.12)
