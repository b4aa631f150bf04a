"""What all methods that descend share: steps that fall as eta_0 / t^gamma."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import confide
from confide.data.schema import Schema
from confide.methods.bbp import BBP
from confide.methods.mc_dropout import MCDropout
from confide.methods.sgd import SGD
from confide.methods.variational_dropout import VariationalDropout
from confide.models import networks
from confide.models.likelihoods import Gaussian
from confide.models.priors import FlatPrior
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData

RECORDS = 8
X = torch.linspace(-1, 1, RECORDS)[:, None]
Y = 0.5 * X[:, 0] + 0.2


def fitted(method: Any, steps: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    plan = confide.plan(delta=1e-5, records=RECORDS, steps=steps, sampling="full-batch", private=False, clip=math.inf)
    module = networks.linear(1)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    data = PrivateData(X, Y, schema=Schema(records=RECORDS), seed=1)
    run = confide.fit(method, module, data, plan, likelihood=Gaussian(1.0), seed=1)
    return torch.cat([value.reshape(-1) for value in start]), run.posterior.mean()


def by_hand(start: torch.Tensor, steps: int, rate: float, decay: float) -> torch.Tensor:
    """w' = w - eta_0 / t^gamma * mean gradient of (y - w x - b)^2 / 2."""
    place = start.double().clone()
    x, y = X[:, 0].double(), Y.double()
    for step in range(1, steps + 1):
        gap = place[0] * x + place[1] - y
        gradient = torch.stack([(gap * x).mean(), gap.mean()])
        place = place - rate / step**decay * gradient
    return place


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_plain_steps_fall_as_promised(decay: float) -> None:
    start, found = fitted(SGD(learning_rate=0.3, decay=decay, prior=FlatPrior()))
    assert torch.allclose(found.double(), by_hand(start, 4, 0.3, decay), atol=1e-6)
    other = by_hand(start, 4, 0.3, decay + 0.25)
    assert not torch.allclose(found.double(), other, atol=1e-3), "a schedule that is off by a quarter is seen"


@pytest.mark.parametrize("method", [SGD, BBP, MCDropout, VariationalDropout])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_every_method_that_descends_has_it(method: Any, optimiser: Any) -> None:
    plan = confide.plan(delta=1e-5, records=1000, batch=100, steps=50, noise_multiplier=2.0, clip=1.0)
    problem = make_problem(SGD(), networks.mlp(3, 2, hidden=(4,)), Schema(1000, (0, 1)), plan)
    falling, level = method(optimiser=optimiser, decay=0.5), method(optimiser=optimiser)
    assert falling.rate_at(problem, 1) == falling.rate(problem)
    assert falling.rate_at(problem, 16) == pytest.approx(falling.rate(problem) / 4)
    assert level.rate_at(problem, 16) == level.rate(problem)


def test_by_rule_the_noise_of_all_steps_stays_the_same() -> None:
    """The first rate grows, so that the squares of all rates add up to what level steps have."""
    plan = confide.plan(delta=1e-5, records=1000, batch=100, steps=50, noise_multiplier=20.0, clip=1.0)
    problem = make_problem(SGD(), networks.logistic(3), Schema(1000, (0, 1)), plan)

    def squares(method: SGD) -> float:
        return sum(method.rate_at(problem, step) ** 2 for step in range(1, 51))

    assert squares(SGD(decay=0.5)) == pytest.approx(squares(SGD()))
    assert SGD(decay=0.5).rate(problem) > SGD().rate(problem)


@pytest.mark.parametrize("decay", [-0.1, 1.5, math.nan])
def test_bad_decays(decay: float) -> None:
    with pytest.raises(ValueError, match="decay="):
        SGD(decay=decay)
