"""Laplace approximations from designed questions: the exact posterior without noise, and the width that noise adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import HalfNormal, Normal

import confide
from confide.methods.laplace import LaplaceApproximation
from confide.models.likelihoods import Gaussian
from confide.models.priors import GaussianPrior
from tests.statistical.conjugate import NOISE, PRIOR, Conjugate, conjugate_model, deviations


def fitted(conjugate: Conjugate, noise_multiplier: float) -> confide.Run:
    return conjugate.chain(LaplaceApproximation(prior=GaussianPrior(PRIOR)), 200, noise_multiplier)


def test_without_noise_it_is_the_exact_posterior() -> None:
    """On a linear model a line is exact: what is left are draws, 1000 of them, of which 200 differ in curvature."""
    conjugate = conjugate_model()
    off, ratio = deviations(conjugate, fitted(conjugate, 1e-9))
    assert off < 0.15
    assert ratio == pytest.approx(1.0, rel=0.1)


def test_a_belief_without_the_records_own_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """H^-1 left out of the width: without privacy noise nothing would be left of it."""
    solve = torch.linalg.solve

    def broken(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return solve(a - b + 1e-6 * b if a.dim() == 3 else a, b, **options)

    monkeypatch.setattr(torch.linalg, "solve", broken)
    conjugate = conjugate_model()
    assert deviations(conjugate, fitted(conjugate, 1e-9))[1] < 0.2


def noisy_regression(seed: int, noise_multiplier: float) -> tuple[Tensor, Tensor, confide.Run]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(400, 2, generator=generator, dtype=torch.float64) - 1
    truth = 0.5 * torch.randn(3, generator=generator, dtype=torch.float64)
    z = torch.cat([x, torch.ones(400, 1, dtype=torch.float64)], 1)
    y = z @ truth + NOISE * torch.randn(400, generator=generator, dtype=torch.float64)
    data = confide.PrivateData(x, y, schema=confide.Schema(records=400), seed=seed)
    plan = confide.plan(
        records=400, steps=60, sampling="full-batch", delta=1e-5, clip=4.0, noise_multiplier=noise_multiplier
    )
    module = nn.Linear(2, 1).double()
    nn.init.zeros_(module.weight)
    run = confide.fit(
        LaplaceApproximation(prior=GaussianPrior(0.5)), module, data, plan, likelihood=Gaussian(NOISE), seed=seed
    )
    own = torch.linalg.inv(z.mT @ z / NOISE**2 + 4 * torch.eye(3)).diagonal().sqrt()
    return truth, own, run


def standard_errors(noise_multiplier: float, repeats: int) -> tuple[float, float]:
    """Root mean square of errors in stated deviations, and median width over that without noise."""
    found, widths = [], []
    for seed in range(repeats):
        truth, own, run = noisy_regression(seed, noise_multiplier)
        draws = run.posterior.draws  # type: ignore[attr-defined]
        found.append((truth - draws.mean(0)) / draws.std(0))
        widths.append(draws.std(0) / own)
    return float(torch.stack(found).square().mean().sqrt()), float(torch.stack(widths).median())


def test_noise_is_in_the_width() -> None:
    """Four runs, 12 numbers: noise of three times the records' own."""
    error, width = standard_errors(10.0, 4)
    assert 0.3 < error < 1.6
    assert width > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("noise_multiplier", [1.0, 10.0, 40.0, 200.0])
def test_stated_deviations_are_those_of_errors(noise_multiplier: float) -> None:
    error, _ = standard_errors(noise_multiplier, 40)
    assert 0.5 < error < 1.15


def test_a_clip_that_bends_the_answer_is_doubled() -> None:
    """At a clip far below a record's gradient the mean of skewed records would be off by many deviations."""
    generator = torch.Generator().manual_seed(1)
    y = -torch.rand(1000, generator=generator, dtype=torch.float64).log()  # mean 1, median .69
    program = confide.models.program(
        lambda p, x, y: Normal(p["mean"], p["scale"]).log_prob(y), {"mean": Normal(0.0, 2.0), "scale": HalfNormal(2.0)}
    )
    data = confide.PrivateData(torch.zeros(1000, 1), y, schema=confide.Schema(records=1000), seed=1)
    plan = confide.plan(records=1000, steps=80, sampling="full-batch", delta=1e-5, clip=0.2, noise_multiplier=1.0)
    run = confide.fit(LaplaceApproximation(), program.double(), data, plan, seed=1)
    found = run.posterior.named_draws()["mean"]  # type: ignore[attr-defined]
    assert run.posterior.facts["clip_of_the_loss"] >= 1.6
    assert abs(float(found.mean()) - 1) < 0.15  # at clip .2 it would be near the median


def test_what_no_release_tells_keeps_its_prior() -> None:
    _, _, run = noisy_regression(3, 1e6)
    spread = run.posterior.draws.std(0)  # type: ignore[attr-defined]
    assert torch.allclose(spread, torch.full_like(spread, 0.5), rtol=0.2)


def test_large_networks_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"at most 256.*use method sgld"):
        confide.fit(
            LaplaceApproximation(),
            confide.networks.mlp(20, 2, hidden=(20,)),
            confide.PrivateData(torch.zeros(9, 20), torch.zeros(9).long(), schema=confide.Schema(classes=2, records=9)),
            confide.plan(records=9, steps=4, sampling="full-batch", delta=1e-5, noise_multiplier=1.0),
        )
