"""Priors, likelihoods, networks and predictive distributions, against autograd and closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import confide
from confide.models import likelihoods, networks, priors
from confide.models.flat import flatten_, named_slices
from confide.models.predictive import ClassPredictive, RealPredictive, weighted_quantile
from confide.posteriors.draws import Draws, outputs_of_draws
from confide.posteriors.files import load_posterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestPriors:
    @pytest.mark.parametrize("prior", [priors.GaussianPrior(0.3), priors.LaplacePrior(0.7), priors.FlatPrior()])
    def test_gradient_is_that_of_the_energy(self, prior: Any) -> None:
        position = torch.randn(7, generator=generator(), dtype=torch.float64).requires_grad_()
        energy = prior.energy(position)
        expected = torch.autograd.grad(energy, position)[0] if energy.requires_grad else torch.zeros(7).double()
        out = torch.ones(7, dtype=torch.float64)
        prior.add_energy_gradient_(position.detach(), out, factor=-2.0)
        assert torch.allclose(out, 1 - 2 * expected)

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_bad_scale_is_named(self, scale: float) -> None:
        with pytest.raises(ValueError, match="scale="):
            priors.GaussianPrior(scale)
        with pytest.raises(ValueError, match="scale="):
            priors.LaplacePrior(scale)


class TestFlat:
    def test_the_vector_moves_the_network_and_back(self) -> None:
        module = networks.mlp(3, 2, hidden=(4,), generator=generator())
        x = torch.randn(5, 3, generator=generator(1))
        before = module(x)
        position = flatten_(module)
        assert torch.equal(module(x), before)
        position.mul_(0)
        assert torch.equal(module(x), torch.zeros(5, 2))

    def test_tied_parameters_appear_once_and_frozen_ones_not(self) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        module[1].weight = module[0].weight
        module[2].weight.requires_grad_(False)
        assert flatten_(module).numel() == 9 + 3 + 3 + 2
        assert list(named_slices(module)) == ["0.weight", "0.bias", "1.bias", "2.bias"]
        assert module[1].weight.data_ptr() == module[0].weight.data_ptr()

    def test_a_module_without_parameters_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no trainable parameters"):
            flatten_(nn.ReLU())


class TestLikelihoods:
    def test_losses_are_negative_log_probabilities(self) -> None:
        logits = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
        y = torch.tensor([0, 1, 2, 0, 1, 2])
        categorical = likelihoods.Categorical(3).loss(logits, y)
        assert torch.allclose(categorical, -torch.distributions.Categorical(logits=logits).log_prob(y))
        bernoulli = likelihoods.Bernoulli().loss(logits[:, :1], y.clamp(max=1))
        expected = -torch.distributions.Bernoulli(logits=logits[:, 0]).log_prob(y.clamp(max=1).double())
        assert torch.allclose(bernoulli, expected)
        gaussian = likelihoods.Gaussian(0.4).loss(logits[:, :1], y.double())
        density = torch.distributions.Normal(logits[:, 0], 0.4).log_prob(y.double())
        assert torch.allclose(gaussian[0] - gaussian[1], density[1] - density[0])

    def test_round_trip_and_unknown_names(self) -> None:
        for one in (likelihoods.Categorical(4), likelihoods.Bernoulli(), likelihoods.Gaussian(0.2)):
            assert likelihoods.likelihood_from_dict(likelihoods.likelihood_to_dict(one)) == one
        with pytest.raises(ValueError, match="unknown; known"):
            likelihoods.likelihood_from_dict({"name": "tweedie"})


class TestPredictive:
    def test_uncertainty_adds_up_and_vanishes_when_draws_agree(self) -> None:
        draws = torch.rand(9, 5, 3, generator=generator()).softmax(-1)
        weights = torch.rand(9, generator=generator(1))
        one = ClassPredictive(draws, weights / weights.sum())
        assert torch.allclose(one.total, one.epistemic + one.aleatoric, atol=1e-6)
        assert torch.allclose(one.probabilities.sum(-1), torch.ones(5))
        same = ClassPredictive(draws[:1].expand(4, -1, -1), torch.full((4,), 0.25))
        assert same.epistemic.max() < 1e-6

    def test_regression_variance_is_the_law_of_total_variance(self) -> None:
        means = torch.randn(3, 4, generator=generator(), dtype=torch.float64)
        variances = torch.rand(3, 4, generator=generator(1), dtype=torch.float64) + 0.1
        one = RealPredictive(means, variances, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
        second = (one.weights[:, None] * (means**2 + variances)).sum(0)
        assert torch.allclose(one.total, second - one.mean**2)

    def test_interval_holds_its_mass(self) -> None:
        means = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
        one = RealPredictive(means, torch.tensor([[1.0], [0.25]]).double(), torch.tensor([0.7, 0.3]).double())
        low, high = one.interval(0.8)[0]
        inside = one.cumulative(high[None]) - one.cumulative(low[None])
        assert inside.item() == pytest.approx(0.8, abs=1e-9)
        assert one.cumulative(low[None]).item() == pytest.approx(0.1, abs=1e-9)

    def test_log_density_against_torch(self) -> None:
        means, variances = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[1.0], [4.0]]).double()
        weights = torch.tensor([0.25, 0.75]).double()
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(weights),
            torch.distributions.Normal(means[:, 0], variances[:, 0].sqrt()),
        )
        y = torch.tensor([0.7]).double()
        assert torch.allclose(RealPredictive(means, variances, weights).log_density(y), mixture.log_prob(y))

    def test_rescaling_moves_everything(self) -> None:
        one = RealPredictive(torch.tensor([[1.0]]), torch.tensor([[4.0]]), torch.tensor([1.0])).rescaled(10.0, 5.0)
        assert (one.mean.item(), one.aleatoric.item()) == (15.0, 400.0)

    def test_weighted_quantile(self) -> None:
        values = torch.tensor([[3.0], [1.0], [2.0]])
        weights = torch.tensor([0.5, 0.25, 0.25])
        assert [weighted_quantile(values, weights, q).item() for q in (0.2, 0.5, 0.9)] == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
    def test_a_bad_level_is_named(self, level: float) -> None:
        with pytest.raises(ValueError, match="level="):
            ClassPredictive(torch.ones(1, 1, 1), torch.ones(1)).interval(level)


class TestNetworksAndDraws:
    def test_shapes_and_start(self) -> None:
        assert networks.softmax(5, 3)(torch.ones(2, 5)).abs().max() == 0
        assert networks.mlp(4, 3, hidden=(6, 5))(torch.ones(2, 2, 2)).shape == (2, 3)
        one, two = (networks.mlp(4, 3, generator=generator(s)) for s in (1, 1))
        assert torch.equal(one[0].weight, two[0].weight)

    def test_outputs_of_draws_are_those_of_each_network(self) -> None:
        module = networks.mlp(3, 2, hidden=(4,), generator=generator())
        draws = torch.randn(3, flatten_(module).numel(), generator=generator(1))
        x = torch.randn(5, 3, generator=generator(2))
        outputs = outputs_of_draws(module, draws, x)
        for draw, output in zip(draws, outputs, strict=True):
            torch.nn.utils.vector_to_parameters(draw, module.parameters())
            assert torch.allclose(module(x), output, atol=1e-6)

    def test_loading_a_foreign_network_needs_the_module(self, tmp_path: Path) -> None:
        module = nn.Linear(2, 2)
        posterior = Draws(module, likelihoods.Categorical(2), torch.ones(1, 6), torch.ones(1))
        posterior.save(tmp_path / "p.safetensors")
        with pytest.raises(ValueError, match="pass it as module="):
            load_posterior(tmp_path / "p.safetensors")
        assert torch.equal(load_posterior(tmp_path / "p.safetensors", nn.Linear(2, 2)).draws, torch.ones(1, 6))  # type: ignore[attr-defined]

    @pytest.mark.parametrize("content", [b"", b"garbage" * 50, b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
    def test_a_file_that_is_no_posterior_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "p.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"p\.safetensors"):
            load_posterior(tmp_path / "p.safetensors")


class NormalisedAndActivated(nn.BatchNorm2d):
    """As a library of vision networks has it: normalisation, then dropout, then what is not linear."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.act(self.drop(super().forward(x)))
        return found


class TestGroupNormed:
    def test_every_batch_normalisation_is_replaced_and_keeps_its_scale(self) -> None:
        shared = nn.BatchNorm2d(48, eps=0.1)
        nn.init.uniform_(shared.weight, generator=generator())
        module = nn.Sequential(
            nn.Conv2d(3, 48, 1), shared, nn.Sequential(shared, NormalisedAndActivated(48)), nn.BatchNorm3d(7)
        )
        found = networks.group_normed(module)
        first, inner, last = found[1], found[2], found[3]
        assert (first.num_groups, first.eps, last.num_groups) == (12, 0.1, 1)
        assert torch.equal(first.weight, shared.weight)
        assert inner[0] is first
        assert not any(isinstance(one, nn.BatchNorm2d | nn.BatchNorm3d) for one in found.modules())
        assert found[:3](torch.randn(2, 3, 4, 4, generator=generator())).min() == 0  # it still activates
        assert module[1] is shared

    def test_one_number_per_channel_is_not_normalised_away(self) -> None:
        found = networks.group_normed(nn.BatchNorm1d(32))
        x = torch.randn(4, 32, generator=generator())
        assert torch.allclose(found(x), torch.nn.functional.layer_norm(x, (32,)), atol=1e-5)

    def test_records_no_longer_touch_each_other(self) -> None:
        found = networks.group_normed(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)))
        x = torch.randn(5, 1, 6, 6, generator=generator())
        assert torch.allclose(found(x)[:1], found(x[:1]), atol=1e-6)

    def test_a_normalisation_that_does_something_else_is_refused(self) -> None:
        class Stranger(nn.BatchNorm2d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x).cumsum(0)

        with pytest.raises(ValueError, match="Stranger"):
            networks.group_normed(nn.Sequential(Stranger(4)))


class Rotated(nn.Module):
    """A state that turns at every step, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=generator()))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(self.turns)
        for step in x.unbind(1):
            state = state * torch.exp(1j * self.turns) + self.frozen * step[:, None]
        found: torch.Tensor = self.last(state.real)
        return found


def test_complex_parameters_are_made_of_real_ones_and_can_be_fitted(tmp_path: Path) -> None:
    given, x = Rotated(), torch.randn(40, 4, generator=generator())
    data = confide.PrivateData(x, (x[:, 0] > 0).long(), schema=confide.Schema(records=40, classes=2))
    plan = confide.plan(records=40, batch=10, steps=3, noise_multiplier=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="real_pairs"):
        confide.fit(confide.methods.SGLD(), given, data, plan)
    module = networks.real_pairs(given)
    assert torch.equal(module(x), given(x))
    assert sum(one.numel() for one in module.parameters() if one.requires_grad) == 2 * 3 + 8
    run = confide.fit(confide.methods.SGLD(), module, data, plan, seed=1)
    run.posterior.save(tmp_path / "a.safetensors")
    again = confide.load_posterior(tmp_path / "a.safetensors", networks.real_pairs(Rotated()))
    assert torch.equal(again.summary(x).centre, run.posterior.summary(x).centre)
