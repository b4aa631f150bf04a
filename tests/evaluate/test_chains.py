"""R-hat and effective sample size, against known chains and an independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats  # type: ignore[attr-defined]

import confide
from confide.evaluate.chains import autocorrelation, effective_sample_size, split_r_hat
from tests.conformance.conftest import classification, small_plan


def autoregressive(chains: int, count: int, memory: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(chains, count, 3, generator=generator, dtype=torch.float64)
    values = noise.clone()
    for step in range(1, count):
        values[:, step] = memory * values[:, step - 1] + (1 - memory**2) ** 0.5 * noise[:, step]
    return values


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_effective_size_of_an_autoregression(memory: float) -> None:
    draws = autoregressive(4, 4000, memory)
    expected = 16_000 * (1 - memory) / (1 + memory)
    assert effective_sample_size(draws).numpy() == pytest.approx(np.full(3, expected), rel=0.15)
    assert split_r_hat(draws).max() < 1.01


def test_agreement_with_arviz() -> None:
    draws = autoregressive(4, 500, 0.5)
    ours = effective_sample_size(draws)
    theirs = [array_stats.ess(draws[..., k].numpy(), method="mean") for k in range(3)]
    assert ours.numpy() == pytest.approx(np.array(theirs, dtype=float), rel=0.05)
    theirs = [array_stats.rhat(draws[..., k].numpy(), method="split") for k in range(3)]
    assert split_r_hat(draws).numpy() == pytest.approx(np.array(theirs, dtype=float), rel=1e-3)


def test_chains_that_disagree_are_seen() -> None:
    draws = autoregressive(4, 500, 0.0)
    draws[0] += 1.0
    assert split_r_hat(draws).min() > 1.05


def test_every_chain_is_charged_and_the_plan_covers_them() -> None:
    case = classification()
    ledger = confide.Ledger()
    plan = confide.plan(epsilon=2.0, delta=1e-5, records=60, batch=20, steps=12, chains=3)
    run = confide.fit_chains(
        confide.methods.SGLD(thinning=1), case.module, case.data(ledger=ledger, name="d"), plan, chains=3, seed=1
    )
    assert sum(event.count for event in ledger.events("d")) == 36
    assert 1.99 < run.privacy.epsilon() <= 2.0
    assert run.posterior.facts["chains"] == 3
    assert len(run.posterior.draws) == 18  # type: ignore[attr-defined]
    assert run.posterior.facts["largest_r_hat"] > 0


def test_a_point_estimate_has_no_chains() -> None:
    case, ledger = classification(), confide.Ledger()
    with pytest.raises(ValueError, match=r"use one of .*sgld"):
        confide.fit_chains(confide.methods.SGD(), case.module, case.data(ledger=ledger), small_plan(case), chains=2)
    assert not ledger.entries()


@pytest.mark.parametrize(
    ("settings", "steps", "kept"), [({"thinning": 2}, 12, 3), ({"burn_in": 0.9}, 30, 3), ({"thinning": 9}, 5, 1)]
)
def test_too_few_draws_are_refused_before_anything_is_charged(
    settings: dict[str, float], steps: int, kept: int
) -> None:
    """Found out only when the draws are pooled, all chains would have been charged and lost."""
    case, ledger = classification(), confide.Ledger()
    method = confide.methods.SGLD(**settings)  # type: ignore[arg-type]
    plan = small_plan(case, steps=steps)
    with pytest.raises(ValueError, match=f"steps={steps}: this sampler would keep {kept} draws"):
        confide.fit_chains(method, case.module, case.data(ledger=ledger), plan, chains=2)
    assert not ledger.entries()
    assert len(confide.fit(method, case.module, case.data(), plan, seed=1).posterior.draws) == kept  # type: ignore[attr-defined]


def test_a_budget_for_some_of_the_chains_refuses_all() -> None:
    """Charged one by one, three chains would have been run and lost when the fourth was refused."""
    case, ledger = classification(), confide.Ledger()
    plan = confide.plan(epsilon=2.0, delta=1e-5, records=60, batch=20, steps=12, chains=3)
    ledger.limit(2.0, 1e-5)
    data, method = case.data(ledger=ledger, seed=None), confide.methods.SGLD(thinning=1)
    with pytest.raises(confide.BudgetExceeded):
        confide.fit_chains(method, case.module, data, plan, chains=4)
    assert not ledger.entries()
    confide.fit_chains(method, case.module, data, plan, chains=3)
    assert sum(entry.event.count for entry in ledger.entries() if entry.event is not None) == 36


def test_autocorrelation_of_a_first_order_chain() -> None:
    """x' = 0.8 x + noise has correlations 0.8, 0.64, ...; a biased lag or a forgotten mean would show."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 20_000, generator=generator, dtype=torch.float64)
    path = torch.zeros_like(noise)
    for step in range(1, noise.shape[1]):
        path[:, step] = 0.8 * path[:, step - 1] + noise[:, step]
    found = autocorrelation(path[..., None] + 100)[:4, 0]
    torch.testing.assert_close(found, torch.tensor([1.0, 0.8, 0.64, 0.512], dtype=torch.float64), rtol=0, atol=0.03)
    assert autocorrelation(torch.ones(1, 5, 1)).tolist() == [[1.0]] * 5
