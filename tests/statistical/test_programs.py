"""Programs without privacy against exact posteriors: quantiles agree within what the chains themselves are unsure of.

A chain's share of draws below an exact quantile is the quantile's level, up to the error of so many effective draws.
Without noise the sampler must find the posterior of the records, Jacobians, mixtures and groups included. The exact
side is importance sampling over densities that are written out by hand (`oracle`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfNormal, Normal, StudentT

import confide
from benchmarks._programs import PROGRAMS, example
from confide.evaluate.chains import effective_sample_size
from confide.methods import SGHMC
from confide.models.programs import Program
from confide.posteriors.draws import Draws
from confide.sources.private_data import PrivateData
from tests.statistical.oracle import MODELS, exact

STEP = {"logistic": 1e-3, "poisson": 1e-4, "robust": 2e-4, "ordinal": 1e-3, "mixture": 3e-4, "groups": 5e-4}
"""About a fiftieth of the posterior's least variance, so that what a step of finite size adds cannot be seen."""
LEVELS = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
LARGEST_GAP = 4.0
"""In standard errors: of some forty comparisons none should be above 3.5, and autocorrelations are estimates."""


def chain_of(name: str, steps: int, program: Program | None = None) -> dict[str, Tensor]:
    """Draws by name from one chain without privacy: all records at every step, no noise but the sampler's own."""
    x, y = example(name)
    module = (program or PROGRAMS[name]()).double()
    plan = confide.plan(records=len(y), steps=steps, sampling="full-batch", delta=1e-5, private=False, clip=1e6)
    data = PrivateData(x, y, schema=confide.Schema(records=len(y)), seed=3)
    method = SGHMC(step_size=STEP[name], friction=0.1, burn_in=0.1, thinning=10)
    posterior = confide.fit(method, module, data, plan, seed=5).posterior
    assert isinstance(posterior, Draws)
    return {key: value.reshape(len(value), -1) for key, value in posterior.named_draws().items()}


def largest_gap(name: str, found: dict[str, Tensor]) -> float:
    """Between levels and shares of the chain below the exact quantiles, in standard errors of both."""
    known, gaps = exact(name), []
    for parameter, draws in found.items():
        ours = effective_sample_size(draws[None])
        sizes = 1 / (1 / ours + 1 / known.effective)
        for level, values in zip(LEVELS, known.quantiles(parameter, LEVELS), strict=True):
            gaps.append(((draws < values).double().mean(0) - level).abs() / (level * (1 - level) / sizes).sqrt())
    return float(torch.cat(gaps).max())


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_is_worth_thousands_of_draws(name: str) -> None:
    assert exact(name).effective > 5000


def test_the_oracle_knows_a_posterior_in_closed_form() -> None:
    """Of effects given mean and spread: shrunken means of the groups, averaged over both."""
    x, y = example("groups")
    known = exact("groups")
    mean, spread = known.draws["mean"][:, 0], known.draws["spread"][:, 0]
    counts = x["group"].bincount().double()
    sums = torch.zeros_like(counts).index_add(0, x["group"], y)
    precision = counts / 0.25 + 1 / spread.square()[:, None]
    given = (sums / 0.25 + (mean / spread.square())[:, None]) / precision
    wanted, found = known.weights @ given, known.weights @ known.draws["effect"]
    assert torch.allclose(found, wanted, atol=0.01)


def test_quantiles_of_a_constrained_parameter_are_exact() -> None:
    assert largest_gap("robust", chain_of("robust", 400)) < LARGEST_GAP


def test_a_prior_that_is_too_narrow_is_caught() -> None:
    narrow = confide.models.program(
        lambda p, x, y: StudentT(4.0, p["slope"] @ x + p["shift"], p["scale"]).log_prob(y),
        {"slope": Normal(0.0, 0.05).expand([2]), "shift": Normal(0.0, 0.05), "scale": HalfNormal(1.0)},
    )
    assert largest_gap("robust", chain_of("robust", 200, narrow)) > LARGEST_GAP


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_quantiles_are_exact(name: str) -> None:
    assert largest_gap(name, chain_of(name, 8000)) < LARGEST_GAP


def nuts_of(name: str, draws: int) -> dict[str, Tensor]:
    """Draws by name from Pyro's no-U-turn sampler, of the densities that are written out by hand."""
    mcmc: Any = pytest.importorskip("pyro.infer.mcmc")
    x, y = example(name)
    density, parts, start = MODELS[name]
    kernel = mcmc.NUTS(potential_fn=lambda at: -density(at["u"][None], x, y)[0])
    begin = {"u": torch.tensor(start, dtype=torch.float64)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        chain = mcmc.MCMC(kernel, draws, warmup_steps=200, initial_params=begin, disable_progbar=True)
        chain.run()
    u = chain.get_samples()["u"]
    return {key: shown(u[:, where]) for key, (where, shown) in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_no_u_turn_sampler_says_the_same_as_the_oracle(name: str) -> None:
    """So that chains which agree with the oracle agree with NUTS."""
    assert largest_gap(name, nuts_of(name, 500)) < LARGEST_GAP
