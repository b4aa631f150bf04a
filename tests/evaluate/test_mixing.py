"""Chains that did not go round their posterior say so, first of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.evaluate.mixing import STUCK, mixing_facts
from confide.methods.sgld import SGLD
from confide.models import networks
from confide.models.likelihoods import Gaussian
from confide.posteriors.draws import Draws
from confide.sources.private_data import PrivateData


def chain(draws: Tensor, **facts: Any) -> Draws:
    weights = torch.full((len(draws),), 1 / len(draws))
    return Draws(networks.linear(draws.shape[1] - 1), Gaussian(), draws, weights, {"burn_in_steps": 10, **facts})


def noise(count: int = 100, size: int = 6) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


def test_independent_draws_mix_and_a_path_does_not() -> None:
    good, path = mixing_facts(chain(noise())), mixing_facts(chain(noise().cumsum(0)))
    assert good["split_r_hat"] < 1.05
    assert good["way"] < 0.6
    assert "warning" not in good
    assert path["split_r_hat"] > 1.2
    assert path["way"] > 1
    assert path["warning"].startswith("The chain did not mix")


def test_several_chains_are_split_each_by_itself() -> None:
    apart = torch.cat([noise(), noise() + 5])
    assert mixing_facts(chain(apart, chains=2))["warning"].startswith("The 2 chains did not mix: they disagree")
    assert mixing_facts(chain(torch.cat([noise(), noise().flip(0)]), chains=2))["split_r_hat"] < 1.05


def test_a_chain_that_never_moved() -> None:
    found = mixing_facts(chain(torch.zeros(20, 4)))
    assert found["split_r_hat"] == STUCK
    assert "warning" in found


def test_what_is_no_chain_has_no_such_facts() -> None:
    assert mixing_facts(Draws(networks.linear(5), Gaussian(), noise(), torch.full((100,), 0.01))) == {}
    assert "Too few draws" in mixing_facts(chain(noise(5)))["warning"]


def fitted(epsilon: float, step_size: float | None) -> confide.Run:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1000, 3, generator=generator) * 2 - 1
    y = x @ torch.tensor([0.4, -0.3, 0.2]) + 0.2 * torch.randn(1000, generator=generator)
    data = PrivateData(x, y, schema=Schema(records=1000), seed=2)
    plan = confide.plan(delta=1e-5, records=1000, steps=300, sampling="full-batch", epsilon=epsilon, clip=3.0)
    return confide.fit(SGLD(step_size=step_size), networks.linear(3), data, plan, likelihood=Gaussian(0.2), seed=3)


def test_a_small_budget_says_that_its_chain_did_not_mix() -> None:
    still = fitted(0.05, None)
    assert "warning" in still.posterior.facts
    for shown in (repr(still), repr(still.posterior)):
        assert shown.startswith("The chain did not mix")
        assert shown.count("\n") == 1
    posterior: Any = still.posterior
    for page in (still._repr_html_(), posterior._repr_html_()):
        assert page.index("not to be relied on") < page.index("sgld" if "<caption>Run" in page else "likelihood")
    mixed = fitted(1000.0, 1e-4)
    assert "warning" not in mixed.posterior.facts
    assert repr(mixed).startswith("Run(sgld")


def test_the_report_says_it_first() -> None:
    from confide.report.verdict import RunVerdict, lead

    run = fitted(0.05, None)
    assert lead(RunVerdict.of(run, {}, None)).startswith("The chain did not mix")


@pytest.mark.parametrize("name", confide.methods.samplers())
def test_every_sampler_has_the_facts(name: str) -> None:
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(1))
    data = PrivateData(x, x[:, 0], schema=Schema(records=60), seed=2)
    plan = confide.plan(delta=1e-5, records=60, batch=20, steps=40, noise_multiplier=1.0)
    facts = confide.fit(confide.methods.get(name)(), networks.linear(3), data, plan, seed=3).posterior.facts
    assert facts["split_r_hat"] >= 0.9
    assert facts["way"] >= 0
