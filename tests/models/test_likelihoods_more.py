"""Gaussian noise that is learnt: one scale for all inputs, or one per input from a second output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.layers.bayesian import MeanFieldLinear
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import reference_clipped_sum
from confide.methods.bbp import BBP
from confide.methods.sgd import SGD
from confide.models import likelihoods, networks
from confide.models.likelihoods import HeteroscedasticGaussian, LearntNoise
from confide.sources.private_data import PrivateData

LIKELIHOOD = HeteroscedasticGaussian()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(count: int = 400, noise: Any = 0.3) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, generator=generator(), dtype=torch.float64) * 2 - 1
    scale = noise(x[:, 0]) if callable(noise) else noise
    return x, 0.7 * x[:, 0] + scale * torch.randn(count, generator=generator(1), dtype=torch.float64)


def fitted(module: nn.Module, data: tuple[Tensor, Tensor], steps: int, method: Any) -> confide.Run:
    source = PrivateData(*data, schema=Schema(records=len(data[0])), seed=1)
    plan = confide.plan(
        delta=1e-5, records=len(data[0]), sampling="full-batch", steps=steps, noise_multiplier=1e-6, clip=1e3
    )
    return confide.fit(method, module, source, plan, likelihood=LIKELIHOOD, seed=1)


class TestLoss:
    def test_is_the_negative_log_density(self) -> None:
        output = torch.randn(6, 2, generator=generator(), dtype=torch.float64)
        y = torch.randn(6, generator=generator(1), dtype=torch.float64)
        scale = 0.01 + torch.nn.functional.softplus(output[:, 1])
        expected = -torch.distributions.Normal(output[:, 0], scale).log_prob(y)
        constant = LIKELIHOOD.loss(output, y) - expected
        assert torch.allclose(constant, torch.full((6,), -0.5 * torch.log(torch.tensor(2 * torch.pi))).double())  # type: ignore[call-overload]

    def test_stays_bounded_where_the_fit_is_perfect(self) -> None:
        output = torch.tensor([[1.0, -200.0]])
        assert LIKELIHOOD.loss(output, torch.tensor([1.0])).item() == pytest.approx(torch.log(torch.tensor(0.01)))

    def test_predictive_reads_both_outputs(self) -> None:
        outputs = torch.randn(4, 5, 2, generator=generator())
        predictive = LIKELIHOOD.predictive(outputs, torch.full((4,), 0.25))
        scale = 0.01 + torch.nn.functional.softplus(outputs[..., 1])
        assert torch.allclose(predictive.aleatoric, scale.square().mean(0))
        assert torch.allclose(predictive.mean, outputs[..., 0].mean(0))

    def test_round_trip(self) -> None:
        one = HeteroscedasticGaussian(0.2)
        assert likelihoods.likelihood_from_dict(likelihoods.likelihood_to_dict(one)) == one
        assert one.outputs == 2

    @pytest.mark.parametrize("smallest", [0.0, -1.0, float("inf")])
    def test_a_bad_floor_is_named(self, smallest: float) -> None:
        with pytest.raises(ValueError, match="smallest="):
            HeteroscedasticGaussian(smallest)


class TestLearntNoise:
    def test_starts_at_the_given_scale_for_all_inputs(self) -> None:
        module = LearntNoise(networks.linear(3), scale=0.4)
        outputs = module(torch.randn(5, 3, generator=generator()))
        assert torch.allclose(LIKELIHOOD.scale(outputs[:, 1]), torch.full((5,), 0.4))
        with pytest.raises(ValueError, match="scale="):
            LearntNoise(networks.linear(3), scale=0.001)

    def test_its_gradient_is_clipped_with_the_networks(self) -> None:
        """A noise parameter that the clipping engine overlooked would be a leak or never learnt."""
        module = LearntNoise(networks.mlp(1, 1, hidden=(4,), generator=generator()).double())
        x, y = records(9)
        fast, slow = (torch.zeros(14, dtype=torch.float64) for _ in range(2))
        clipped_sum(module, LIKELIHOOD.loss, x, y, clip=2.0, out=fast)
        reference_clipped_sum(module, LIKELIHOOD.loss, x, y, clip=2.0, out=slow)
        assert torch.allclose(fast, slow, rtol=1e-9, atol=1e-12)
        assert fast[-1].abs() > 0

    def test_finds_the_noise_of_the_data(self) -> None:
        x, y = records(noise=0.3)
        module = LearntNoise(networks.linear(1).double(), scale=1.0)
        run = fitted(module, (x, y), 300, SGD(optimiser="adam", learning_rate=0.05))
        predictive = run.posterior.predict(x[:50])
        residual = (y - torch.linalg.lstsq(torch.cat([x, torch.ones_like(x)], 1), y).solution @ _with_ones(x).T).std()
        assert predictive.aleatoric.sqrt().mean().item() == pytest.approx(residual.item(), rel=0.03)
        assert predictive.aleatoric.std() < 1e-9

    def test_it_stays_a_point_under_distributions_on_weights(self, tmp_path: Path) -> None:
        module = LearntNoise(networks.mlp(1, 1, hidden=(4,), generator=generator()).double())
        converted = BBP().prepare(LearntNoise(networks.linear(1)))
        assert isinstance(converted.network[0], MeanFieldLinear)
        assert not isinstance(converted.raw, MeanFieldLinear)
        run = fitted(module, records(), 5, BBP())
        assert run.posterior.spread[-1] == 0  # type: ignore[attr-defined]
        run.posterior.save(tmp_path / "p.safetensors")
        fresh = LearntNoise(networks.mlp(1, 1, hidden=(4,)).double())
        again = confide.load_posterior(tmp_path / "p.safetensors", fresh)
        x = records(5)[0]
        assert torch.equal(run.posterior.predict(x).aleatoric, again.predict(x).aleatoric)


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x)], 1)


def test_a_second_head_learns_where_the_target_is_noisy() -> None:
    x, y = records(600, noise=lambda at: torch.where(at < 0, 0.1, 0.6).double())
    module = networks.mlp(1, 2, hidden=(16,), generator=generator(3)).double()
    run = fitted(module, (x, y), 400, SGD(optimiser="adam", learning_rate=0.03))
    where = torch.tensor([[-0.6], [0.6]], dtype=torch.float64)
    quiet, loud = run.posterior.predict(where).aleatoric.sqrt().tolist()
    assert quiet == pytest.approx(0.1, rel=0.35)
    assert loud == pytest.approx(0.6, rel=0.25)
