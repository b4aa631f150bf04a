"""Every sampler on a skewed posterior: logistic regression against a long NUTS run.

The network holds many copies of the two coefficients, each fitted to the same records. Their losses add up, so the
posterior is a product of equal ones, and a single chain moves that many independent chains at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.methods.psgld import PSGLD
from confide.methods.sghmc import SGHMC
from confide.methods.sgld import SGLD
from confide.methods.sgnht import SGNHT
from confide.models.predictive import ClassPredictive
from confide.sources.private_data import PrivateData

COPIES, STEPS, CLIP = 200, 1500, 1e3
REFERENCE = Path(__file__).parent.parent / "reference" / "nuts_logistic.npz"


@cache
def reference() -> dict[str, np.ndarray]:
    with np.load(REFERENCE) as stored:
        return {name: stored[name] for name in stored.files}


@dataclass(frozen=True)
class Copies:
    """Bernoulli losses of all copies, added up."""

    name: ClassVar[str] = "copies"
    outputs: int = COPIES
    curvature: float = 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        labels = y[:, None].expand_as(output).to(output.dtype)
        return F.binary_cross_entropy_with_logits(output, labels, reduction="none").sum(1)

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        """Of the first copy; no test predicts."""
        return confide.likelihoods.Bernoulli().predictive(outputs[..., :1], weights)


def draws(method: Any, noise_multiplier: float) -> np.ndarray:
    """(draws of all copies, 2) from one run."""
    x, y = torch.from_numpy(reference()["x"]), torch.from_numpy(reference()["y"])
    data = PrivateData(x, y, schema=Schema(len(x), (0, 1)), seed=3)
    plan = confide.plan(
        delta=1e-5, records=len(x), steps=STEPS, sampling="full-batch", noise_multiplier=noise_multiplier, clip=CLIP
    )
    module = nn.Linear(2, COPIES, bias=False, dtype=torch.float64)
    run = confide.fit(method, module, data, plan, likelihood=Copies(), seed=5)
    return run.posterior.draws.reshape(-1, 2).numpy()  # type: ignore[attr-defined]


def distance(found: np.ndarray) -> tuple[float, float]:
    """The largest gap between quantiles, in posterior deviations, and the largest gap between skewnesses."""
    exact = reference()
    gaps = (np.quantile(found, exact["levels"], axis=0) - exact["quantiles"]) / exact["deviation"]
    centred = (found - found.mean(0)) / found.std(0)
    return float(np.abs(gaps).max()), float(np.abs((centred**3).mean(0) - exact["skewness"]).max())


SETTINGS: dict[str, Any] = {"prior": confide.priors.GaussianPrior(2.0), "burn_in": 0.3, "thinning": 10}
ETA, FRICTION = 0.1, 0.2
H = ETA**0.5 / 2
# Each sampler with the standard deviation of noise in the summed gradient that it asks for per step.
SAMPLERS: dict[str, tuple[Any, float]] = {
    "sgld": (SGLD(step_size=ETA, **SETTINGS), 2 / ETA**0.5),
    "psgld": (PSGLD(step_size=ETA, memory=0.999, floor=1.0, **SETTINGS), 2 / ETA**0.5),
    "sghmc": (SGHMC(step_size=ETA / 4, friction=FRICTION, **SETTINGS), (2 * FRICTION / (ETA / 4)) ** 0.5),
    "sgnht": (SGNHT(step_size=H, diffusion=FRICTION / H, **SETTINGS), (2 * FRICTION) ** 0.5 / H),
}
QUANTILES, SKEWNESS = 0.12, 0.2


def test_the_reference_is_skewed_and_converged() -> None:
    assert np.abs(reference()["skewness"]).max() > 2 * SKEWNESS, "a Gaussian would not pass below"
    assert np.abs(reference()["r_hat"] - 1).max() < 1e-3
    assert reference()["effective_draws"].min() > 50_000


# The quick run takes the simplest sampler; all of them are among the slow tests.
@pytest.mark.parametrize(
    "name", [name if name == "sgld" else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS]
)
def test_quantiles_and_skewness_are_those_of_nuts(name: str) -> None:
    """Half of the noise comes with the release, half is topped up."""
    method, needed = SAMPLERS[name]
    quantiles, skewness = distance(draws(method, 0.5**0.5 * needed / CLIP))
    assert quantiles < QUANTILES
    assert skewness < SKEWNESS


@pytest.mark.parametrize("name", ["sgld", *(pytest.param(name, marks=pytest.mark.slow) for name in ("psgld", "sghmc"))])
def test_noise_that_is_not_credited_is_caught(name: str) -> None:
    """A sampler that tops up all of its noise, whatever the release brings, samples too hot."""
    method, needed = SAMPLERS[name]

    class Deaf(type(method)):  # type: ignore[misc]
        def tell(self, problem: Any, state: Any, release: Any) -> Any:
            return super().tell(problem, state, replace(release, noise_std=0.0))

    assert distance(draws(Deaf(**vars(method)), 0.5**0.5 * needed / CLIP))[0] > QUANTILES


@pytest.mark.slow
def test_a_thermostat_that_does_not_act_is_caught() -> None:
    """SGNHT absorbs noise that is not credited; with its friction held fixed it would not."""
    method, needed = SAMPLERS["sgnht"]

    class Stuck(SGNHT):
        def tell(self, problem: Any, state: Any, release: Any) -> Any:
            return replace(super().tell(problem, state, release), thermostat=self.diffusion)

    hot = 2**0.5 * needed / CLIP
    assert distance(draws(Stuck(**vars(method)), hot))[0] > QUANTILES
    assert distance(draws(method, hot))[0] < QUANTILES


@pytest.mark.slow
def test_a_thermostat_that_wants_unit_velocities_is_caught() -> None:
    """Steps of friction f leave velocities of variance 1 / (1 - f/2) at the right temperature of theta."""
    method, needed = SAMPLERS["sgnht"]

    class Cold(SGNHT):
        def tell(self, problem: Any, state: Any, release: Any) -> Any:
            found = super().tell(problem, state, release)
            thermostat = state.thermostat + H * min(found.velocity.square().mean().item() - 1, 3.0)
            return replace(found, thermostat=min(max(thermostat, 0.0), 1 / H))

    assert distance(draws(Cold(**vars(method)), 0.5**0.5 * needed / CLIP))[0] > QUANTILES


def test_twice_the_drift_is_caught() -> None:
    method, needed = SAMPLERS["sgld"]
    assert distance(draws(replace(method, convention="paper"), 1e-3 * needed / CLIP))[0] > QUANTILES


def test_a_gaussian_approximation_is_caught() -> None:
    """Right mean and deviation, no skewness: what a variational or Laplace approximation gives."""
    exact = reference()
    normal = np.random.default_rng(0).standard_normal((100_000, 2)) * exact["deviation"] + exact["mean"]
    assert distance(normal)[1] > SKEWNESS
