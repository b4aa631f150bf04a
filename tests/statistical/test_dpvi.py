"""Aligned gradients against the exact mean-field optimum: means and deviations, and what a wrong chain rule does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import confide
from confide.methods.dpvi import DPVI
from confide.models import priors
from confide.sources.queries import Release
from tests.methods.variational_tools import PRIOR, linear_model

METHOD = DPVI(prior=priors.GaussianPrior(PRIOR), optimiser="sgd", learning_rate=0.1, decay=0.4, initial_deviation=0.2)


def gaps(method: DPVI, steps: int) -> tuple[float, float]:
    """Largest error of a mean in deviations, and of a deviation relative to itself."""
    model = linear_model()
    posterior: Any = model.fit(method, steps).posterior
    wanted = model.mean_field_deviation
    return (
        float(((posterior.mean() - model.mean) / wanted).abs().max()),
        float((posterior.spread / wanted - 1).abs().max()),
    )


def test_means_and_deviations_are_those_of_the_mean_field_optimum() -> None:
    off, ratio = gaps(METHOD, 1500)
    assert off < 0.5
    assert ratio < 0.2


def test_a_gradient_that_is_not_multiplied_by_its_draw_is_caught() -> None:
    @dataclass(frozen=True)
    class Deaf(DPVI):
        """Takes the gradient of the mean for that of the deviation."""

        name: ClassVar[str] = "deaf"

        def tell(self, problem: Any, state: Any, release: Release) -> Any:
            told = super().tell(problem, replace(state, noise=torch.ones_like(state.noise)), release)
            return replace(told, noise=told.noise)

    assert gaps(Deaf(**vars(METHOD)), 1500)[1] > 0.5


def test_deviations_move_under_noise_that_hides_a_single_step() -> None:
    """At epsilon 1 the deviation of a logistic regression comes near that of the records, from far below and above."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(2000, 3, generator=generator, dtype=torch.float64) - 1
    y = (torch.rand(2000, generator=generator, dtype=torch.float64) < (x @ torch.ones(3).double()).sigmoid()).long()
    plan = confide.plan(records=2000, batch=400, steps=300, epsilon=1, delta=1e-5, clip=1.5)
    for first in (0.01, 1.0):
        data = confide.PrivateData(x, y, schema=confide.Schema(records=2000, classes=2), seed=1)
        method = DPVI(initial_deviation=first, learning_rate=0.03)
        run = confide.fit(method, confide.networks.logistic(3).double(), data, plan, seed=1)
        assert 0.04 < run.posterior.facts["median_deviation"] < 0.4  # about .09 without noise


@pytest.mark.slow
def test_the_optimum_closely() -> None:
    off, ratio = gaps(replace(METHOD, learning_rate=0.1, decay=0.5), 20_000)
    assert off < 0.15
    assert ratio < 0.06
