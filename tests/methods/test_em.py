"""DP-EM: expectation maximisation itself where there is no noise, and a mixture that is found where there is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.expectation.mixture import MixtureOfGaussians
from confide.methods import em
from confide.methods.em import EM, Start
from confide.models import networks
from confide.sources.private_data import PrivateData

CENTRES = torch.tensor([[2.0, 0.0], [-2.0, 1.0], [0.0, -2.0]], dtype=torch.float64)


def clusters(count: int = 600) -> tuple[Tensor, MixtureOfGaussians]:
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(0, 3, (count,), generator=generator)
    x = CENTRES[which] + 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    module = MixtureOfGaussians(3, 2, scale=0.5, spread=2.0)
    module.means.data.copy_(CENTRES + 0.4)
    return x, module


def fitted(x: Tensor, module: MixtureOfGaussians, plan: confide.Plan, horizon: float = 8.0) -> confide.Run:
    data = PrivateData(x, torch.zeros(len(x)), schema=Schema(records=len(x)), seed=1)
    return confide.fit(EM(horizon), module, data, plan, seed=1)


def expectation_maximisation(x: Tensor, module: MixtureOfGaussians, rounds: int) -> Tensor:
    """The textbook algorithm for the posterior mode, one record's share after the other."""
    means = module.means.detach().clone()
    for _ in range(rounds):
        distance = (x[:, None] - means).square().sum(-1) / 0.25
        shares = (-distance / 2).softmax(1)
        means = shares.T @ x / 0.25 / (1 / 4 + shares.sum(0)[:, None] / 0.25)
    return means


def test_without_noise_it_is_expectation_maximisation() -> None:
    """A horizon far beyond the steps keeps a = 1: every full batch replaces the statistics."""
    x, module = clusters()
    plan = confide.plan(delta=1e-5, records=len(x), steps=5, sampling="full-batch", private=False, clip=math.inf)
    found = fitted(x, module, plan, horizon=1000.0).posterior
    assert torch.allclose(found.mean().reshape(3, 2), expectation_maximisation(x, module, 5), atol=1e-8)
    assert found.facts["variant"] == "EM, not private"


def test_under_privacy_the_clusters_are_found() -> None:
    x, module = clusters()
    plan = confide.plan(delta=1e-5, records=len(x), batch=200, steps=60, epsilon=5.0, clip=2.0)
    run = fitted(x, module, plan)
    assert torch.allclose(run.posterior.mean().reshape(3, 2), CENTRES, atol=0.25)
    assert run.posterior.facts["variant"] == "DP-EM"
    assert run.privacy.epsilon() <= 5.0
    assert (run.posterior.predict(CENTRES).labels == torch.arange(3)).all()


def random_start(seed: int, records: int = 300) -> tuple[Tensor, MixtureOfGaussians]:
    """Four clusters in four dimensions and a start that knows nothing of them."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    which = torch.randint(0, 4, (records,), generator=generator)
    x = means[which] + 0.5 * torch.randn(records, 4, generator=generator, dtype=torch.float64)
    return x, MixtureOfGaussians(4, 4, scale=0.5, spread=1.0, generator=generator)


def private_run(seed: int, records: int = 300, noise: float = 6.0, **settings: Any) -> tuple[Tensor, Tensor]:
    """Means that were found, and those of the records by EM from the truth, in the same order."""
    x, module = random_start(seed, records)
    data = PrivateData(x, torch.zeros(len(x)), schema=Schema(records=len(x)), seed=seed)
    plan = confide.plan(delta=1e-5, records=records, batch=records // 10, steps=100, noise_multiplier=noise, clip=2.0)
    found = confide.fit(EM(**settings), module, data, plan, seed=seed).posterior.mean().reshape(4, 4)
    return found, x


def furthest(seed: int, **settings: Any) -> float:
    return float(private_run(seed, **settings)[0].norm(dim=1).max())


def missed(found: Tensor, x: Tensor) -> float:
    """How much worse a record is explained than by the best of EM without privacy from several starts."""

    def fit_of(means: Tensor) -> float:
        return float((-(x[:, None] - means).square().sum(-1) / 0.5).logsumexp(1).mean())

    best = -math.inf
    for start in range(8):
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(start))[:4]
        means = x[chosen]
        for _ in range(60):
            shares = (-(x[:, None] - means).square().sum(-1) / 0.5).softmax(1)
            means = shares.T @ x / 0.25 / (1 + shares.sum(0)[:, None] / 0.25)
        best = max(best, fit_of(means))
    return best - fit_of(found)


def test_no_noise_makes_it_diverge() -> None:
    """Of 12 runs at epsilon 1 with 300 records, 7 to 9 ended above 1e3."""
    assert max(furthest(seed) for seed in range(3)) < 5.0


def test_even_a_hundredfold_noise_stays_where_the_prior_is() -> None:
    """By construction, and not by luck: the ball that holds 0.9999 of the prior has radius 4.85."""
    assert furthest(0, noise=600.0) < 5.0


@pytest.mark.slow
@pytest.mark.parametrize(("records", "most_bad"), [(300, 15), (1000, 10)])
def test_a_hundred_runs(records: int, most_bad: int) -> None:
    """Noise of epsilon 1 with 200 steps. None diverges; a start drawn from the prior left 22 to 26 in a bad optimum."""
    runs = [private_run(seed, records, noise=5.4 / math.sqrt(2)) for seed in range(100)]
    assert all(float(found.norm(dim=1).max()) < 5.0 for found, _ in runs)
    bad = sum(missed(found, x) > 0.5 for found, x in runs)
    assert bad <= most_bad


def test_components_that_begin_together_part() -> None:
    """Planted: a start far from the records, which "given" keeps to and "together" does not."""
    x, module = clusters()
    module.means.data.copy_(torch.tensor([[5.0, 5.0], [5.5, 5.0], [0.0, 0.0]]))
    plan = confide.plan(delta=1e-5, records=len(x), batch=200, steps=60, epsilon=5.0, clip=2.0)

    def far(start: Start) -> float:
        data = PrivateData(x, torch.zeros(len(x)), schema=Schema(records=len(x)), seed=1)
        found = confide.fit(EM(start=start), module, data, plan, seed=1).posterior.mean().reshape(3, 2)
        return float(torch.cdist(CENTRES, found).amin(1).max())

    assert far("together") < 0.5
    assert far("given") > 1.0


def test_without_bounds_it_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: counts that noise makes small or negative divide the sums as they are."""
    monkeypatch.setattr(em, "_raised", lambda problem, counts, sums, means: (counts.clamp(min=2.5e-4), sums))
    monkeypatch.setattr(em, "_within", lambda problem, means: means)
    monkeypatch.setattr(em, "_sums_of", lambda problem, means, counts: means * counts[:, None])
    assert max(furthest(seed) for seed in range(3)) > 1e3


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"horizon=0: must be a finite number > 0"):
        EM(horizon=0)
    with pytest.raises(ValueError, match=r"start='anywhere': must be one of together, given"):
        EM(start="anywhere")  # type: ignore[arg-type]
    x, _ = clusters(20)
    data = PrivateData(x, torch.zeros(20), schema=Schema(records=20), seed=1)
    plan = confide.plan(delta=1e-5, records=20, batch=10, steps=2, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"module: expectation maximisation is for mixtures"):
        confide.fit(EM(), networks.linear(2), data, plan)
