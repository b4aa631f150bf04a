"""The hyper-prior of a network's weights: what it reads, that it cannot run away, and that it costs nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.errors import Refusal
from confide.expectation import precision
from confide.expectation.approximation import sites_for
from confide.expectation.precision import WIDEST, learnt_precision, with_precision
from confide.expectation.sites import NetworkSites
from confide.methods.sep import SEP
from confide.models.likelihoods import Gaussian
from confide.models.networks import mlp
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData


def network_sites(scale: float = 1.0) -> NetworkSites:
    found = sites_for(mlp(5, 1, hidden=(40,)), Gaussian(0.3), 100, scale=scale)
    assert isinstance(found, NetworkSites)
    return found


def law(sites: NetworkSites, spread: float, known: float) -> Tensor:
    """q whose means were drawn `spread` prior deviations wide, and which is `known` times as precise as the prior."""
    prior = sites.prior[sites.weights : 2 * sites.weights]
    generator = torch.Generator().manual_seed(0)
    mean = spread * torch.randn(sites.weights, generator=generator, dtype=torch.float64) / prior.sqrt()
    return torch.cat([known * prior * mean, known * prior, sites.prior[2 * sites.weights :]])


def settled(spread: float, known: float) -> float:
    """Where lambda comes to rest if q is held."""
    found, theta = 1.0, law(network_sites(), spread, known)
    for _ in range(40):
        found = learnt_precision(network_sites(1 / math.sqrt(found)), theta, found)
    return found


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_known_weights_tell_their_precision(spread: float) -> None:
    assert settled(spread, 1e6) == pytest.approx(1 / spread**2, rel=0.15)


def test_weights_that_are_not_known_leave_the_precision_where_it_is() -> None:
    """q is the prior: E[m^2 + v] is what lambda says, whatever lambda is, but for the pull of the hyper-prior to 1."""
    for present in (0.2, 1.0, 5.0):
        sites = network_sites(1 / math.sqrt(present))
        found = learnt_precision(sites, law(sites, 0.0, 1.0), present)
        assert abs(math.log(found / present)) <= 0.03 * abs(math.log(present)) + 0.12
        assert abs(math.log(found)) <= abs(math.log(present)) + 1e-9


@pytest.mark.parametrize("spread", [1e-30, 1e3, 1e200, math.inf, math.nan])
def test_no_means_drive_it_beyond_its_bounds(spread: float) -> None:
    assert 1 / WIDEST <= settled(spread, 1e6) <= WIDEST


def test_nothing_but_the_prior_changes() -> None:
    sites = network_sites()
    theta = law(sites, 1.0, 30.0)
    for factor in (0.2, 4.0):
        wider = network_sites(1 / math.sqrt(factor))
        moved = with_precision(sites, theta, factor, 1.0)
        assert torch.allclose(moved - wider.prior, theta - sites.prior, atol=1e-9)


def test_a_precision_below_the_floor_rises_about_its_mean() -> None:
    sites = network_sites()
    theta = law(sites, 1.0, 20.0)
    moved = with_precision(sites, theta, 4.0, 20.0)
    mean, variance = sites.moments(moved)
    assert torch.allclose(1 / variance, 80 * sites.prior[sites.weights : 2 * sites.weights])
    assert torch.allclose(mean, sites.moments(theta)[0] * 20 / 23)


def made(count: int, seed: int, size: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 3, generator=generator, dtype=torch.float64) - 1
    y = (size * torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)).clamp(
        -1, 1
    )
    return x, y


def fitted(method: SEP, count: int, seed: int, **privacy: Any) -> confide.Run:
    x, y = made(count, 0, 0.5)
    plan = confide.plan(delta=1e-5, records=count, batch=count // 5, steps=50, **privacy)
    data = PrivateData(x, y, schema=Schema(records=count), seed=seed)
    return confide.fit(method, mlp(3, 1, hidden=(8,)), data, plan, likelihood=Gaussian(0.3), seed=seed)


@pytest.mark.parametrize("records", [60, 1000])
def test_private_runs_stay_within_bounds(records: int) -> None:
    for seed in range(4):
        run = fitted(SEP(precision="learnt"), records, seed, epsilon=0.5)
        assert run.posterior.mean().isfinite().all()
        assert 1 / WIDEST <= run.posterior.facts["prior_precision"] <= WIDEST  # type: ignore[attr-defined]


def test_without_its_bounds_noise_would_carry_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bounds are for: without them a law whose means are noise has no precision at all."""
    monkeypatch.setattr(precision, "WIDEST", 1e30)
    assert settled(1e3, 1e6) < 1e-4 / WIDEST


def test_it_costs_nothing_and_asks_for_nothing_more() -> None:
    plan = confide.plan(delta=1e-5, records=100, batch=20, steps=10, epsilon=1.0)
    sizes = set()
    for choice in ("given", "learnt"):
        method = SEP(precision=choice)  # type: ignore[arg-type]
        problem = make_problem(method, mlp(3, 1, hidden=(8,)), Schema(records=100), plan, Gaussian(0.3), seed=0)
        sizes.add(method.ask(problem, method.init(problem)).size)
    assert len(sizes) == 1


def test_a_network_learns_with_it() -> None:
    run = fitted(SEP(precision="learnt"), 1000, 0, private=False, clip=math.inf)
    x, y = made(500, 1, 0.5)
    assert float((run.posterior.predict(x).mean - y).square().mean().sqrt()) < 0.2  # type: ignore[union-attr]


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(Refusal, match="precision='often': must be one of given, learnt"):
        SEP(precision="often")  # type: ignore[arg-type]
