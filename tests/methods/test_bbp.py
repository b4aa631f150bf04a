"""Bayes by Backprop: the mean-field optimum where it is known, and the divergence outside the clip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.layers.bayesian import MeanFieldConv2d, MeanFieldLinear
from confide.layers.conversion import distributions, plain
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import per_record_gradients, reference_clipped_sum
from confide.methods.bbp import BBP
from confide.models import networks, priors
from confide.models.likelihoods import Categorical
from confide.sources.private_data import PrivateData
from tests.methods.variational_tools import PRIOR, linear_model, problem_of, silence

OPTIMUM = BBP(prior=priors.GaussianPrior(PRIOR), learning_rate=0.03, draws=2, initial_deviation=0.2)
STEPS = 900


def images(records: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(records, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (records,), generator=generator)


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(75, 3)
    return nn.Sequential(*layers).double()


class TestOptimum:
    def test_mean_and_deviations_are_those_of_the_mean_field_optimum(self) -> None:
        """A divergence left out, doubled or not divided by n moves the deviations; correlations would widen them."""
        model = linear_model()
        posterior = model.fit(OPTIMUM, STEPS).posterior
        assert ((posterior.mean() - model.mean) / model.mean_field_deviation).abs().max() < 0.35
        assert torch.allclose(posterior.spread, model.mean_field_deviation, rtol=0.1)  # type: ignore[attr-defined]
        exact = torch.linalg.inv(model.precision).diag().sqrt()
        assert (exact / posterior.spread).max() > 1.2, "the posterior itself is wider: features are correlated"  # type: ignore[attr-defined]

    def test_divergence_not_divided_by_n_is_caught(self) -> None:
        @dataclass(frozen=True)
        class Undivided(BBP):
            name: ClassVar[str] = "undivided"

            def divergence_weight(self, problem: Any, step: int) -> float:
                return float(problem.records)

        model = linear_model()
        broken = Undivided(**vars(OPTIMUM))
        posterior = model.fit(broken, STEPS).posterior
        assert (posterior.spread / model.mean_field_deviation).min() > 1.5  # type: ignore[attr-defined]
        assert ((posterior.mean() - model.mean) / model.mean_field_deviation).abs().max() > 1

    @pytest.mark.slow  # one step of each prior is checked exactly below
    @pytest.mark.parametrize("prior", [priors.LaplacePrior(0.5), priors.ScaleMixturePrior(0.5, 1.0, 0.3)])
    def test_other_priors_reach_their_own_optimum(self, prior: Any) -> None:
        """Fixed points: at the end the gradient of the exact objective is near zero."""
        model = linear_model()
        posterior = model.fit(replace(OPTIMUM, prior=prior), STEPS).posterior
        mean, spread = (value.clone().requires_grad_() for value in (posterior.mean(), posterior.spread))  # type: ignore[attr-defined]
        data = model.precision - torch.eye(3, dtype=torch.float64) / PRIOR**2
        noise = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected_energy = prior.energy(mean + spread * noise) / len(noise)
        # E (w - m)' data (w - m) / 2 for w ~ q, with m the least-squares solution.
        centre = torch.linalg.solve(data, model.precision @ model.mean)
        gap = mean - centre
        quadratic = (gap @ data @ gap + (data.diag() * spread.square()).sum()) / 2
        objective = quadratic + expected_energy - spread.log().sum()
        of_mean, of_spread = torch.autograd.grad(objective, (mean, spread))
        # In units of the optimum: a step of 0.35 deviations in the mean, of 10 % in the deviation.
        assert (of_mean * spread).abs().max() < 0.7
        assert (of_spread * spread).abs().max() < 0.25

    def test_with_noise_the_mean_wanders_as_the_noise_says(self) -> None:
        """A chain of steps on a quadratic: the spread of its last position around the optimum is known."""
        model = linear_model(records=30, features=25, correlated=False)
        rate, multiplier, clip = 0.05, 0.02, 100.0
        method = BBP(prior=priors.GaussianPrior(PRIOR), learning_rate=rate, initial_deviation=1e-4)
        curvature = model.precision[0, 0].item() / model.records
        step_noise = rate * multiplier * clip / model.records
        expected = step_noise / (1 - (1 - rate * curvature) ** 2) ** 0.5
        run = model.fit(method, 100, noise_multiplier=multiplier, clip=clip)
        ratio = ((run.posterior.mean() - model.mean) / expected).square().mean().sqrt().item()
        # 25 coordinates: the root mean square has a standard deviation of 0.14.
        assert 0.6 < ratio < 1.45


class TestDivergence:
    def steps_of(self, method: BBP) -> tuple[Tensor, Tensor]:
        """The move of one step without records, and the gradient of KL(q || prior) / n by autograd."""
        problem = problem_of(method, networks.mlp(4, 3, hidden=(5,), generator=torch.Generator().manual_seed(0)))
        state = method.init(problem)
        method.ask(problem, state)
        before = problem.position.clone()
        total = torch.zeros(())
        with torch.enable_grad():
            for one in distributions(problem.module):
                mean, rho = getattr(one.layer, one._mean), one.spread_parameter
                total = total + method.prior.divergence(mean, F.softplus(rho))  # type: ignore[attr-defined]
            parameters = list(problem.module.parameters())
            gradient = torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(total, parameters, materialize_grads=True)]
            )
        method.tell(problem, state, silence(problem))
        return problem.position - before, gradient / problem.records

    @pytest.mark.parametrize("prior", [priors.GaussianPrior(0.3), priors.LaplacePrior(0.3), priors.FlatPrior()])
    def test_a_step_without_records_descends_the_divergence_over_n(self, prior: Any) -> None:
        moved, gradient = self.steps_of(BBP(prior=prior, learning_rate=0.1))
        assert torch.allclose(moved, -0.1 * gradient, rtol=2e-3, atol=1e-7)

    def test_a_divergence_inside_the_clip_is_caught(self) -> None:
        """As part of every record's answer it would be clipped away, and the pull of the prior with it."""
        method = BBP(prior=priors.GaussianPrior(0.1), learning_rate=0.1, initial_deviation=0.05)
        module = networks.mlp(4, 3, hidden=(5,), generator=torch.Generator().manual_seed(0))
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
        y = torch.arange(10) % 3
        moved = {}
        for inside in (False, True):
            problem = problem_of(method, module, clip=1e-3, noise_multiplier=None, private=False)
            state = method.init(problem)
            query = method.ask(problem, state)
            gradients = per_record_gradients(query.module, query.loss, x, y)
            pull = torch.zeros_like(problem.position)
            method.add_prior_(problem, pull, 1 / problem.records)
            answers = gradients + pull if inside else gradients
            clipped = answers * (1e-3 / answers.norm(dim=1, keepdim=True)).clamp(max=1)
            before = problem.position.clone()
            if inside:
                method.descend(problem, state, clipped.sum(0) / problem.plan.expected_batch)
            else:
                method.tell(problem, state, silence(problem, clipped.sum(0)))
            moved[inside] = problem.position - before
        assert torch.allclose(moved[False], -0.1 * pull, atol=0.1 * 1.1e-3)
        assert moved[True].norm() < 0.1 * 1.1e-3 < 0.1 * moved[False].norm()

    def test_a_loss_that_holds_the_divergence_is_clipped_with_it(self) -> None:
        """Nothing is lost in silence: the divergence is then part of every record's loss."""
        method = BBP()
        problem = problem_of(method, nn.Linear(3, 2), classes=2)
        method.ask(problem, method.init(problem))

        def loss(output: Tensor, y: Tensor) -> Tensor:
            share = method.prior.divergence(problem.module.weight_mean, F.softplus(problem.module.weight_rho))  # type: ignore[attr-defined]
            return F.cross_entropy(output, y, reduction="none") + share

        x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
        found = torch.zeros_like(problem.position)
        clipped_sum(problem.module, loss, x, y, clip=1e6, out=found)
        parameters = list(problem.module.parameters())
        wanted = torch.autograd.grad(loss(problem.module(x), y).sum(), parameters)
        torch.testing.assert_close(found, torch.cat([value.flatten() for value in wanted]), rtol=1e-4, atol=1e-4)

    def test_parameters_without_a_distribution_follow_the_prior(self) -> None:
        method = BBP(prior=priors.GaussianPrior(0.5), learning_rate=0.1)
        problem = problem_of(method, small_cnn(), clip=1.0)
        state = method.init(problem)
        method.ask(problem, state)
        norm = problem.module[2]
        before = norm.weight.detach().clone()
        method.tell(problem, state, silence(problem))
        assert torch.allclose(norm.weight, before - 0.1 * before / 0.25 / problem.records)


class TestNetworks:
    @pytest.mark.parametrize("draws", [1, 3])
    def test_answers_equal_those_of_single_records(self, draws: int) -> None:
        method = BBP(draws=draws, initial_deviation=0.2)
        problem = problem_of(method, small_cnn(), clip=1.0)
        query = method.ask(problem, method.init(problem))
        x, y = images()
        fast, slow = (torch.zeros(query.size, dtype=torch.float64) for _ in range(2))
        norms = clipped_sum(query.module, query.loss, x, y, clip=0.5, out=fast)
        expected = reference_clipped_sum(query.module, query.loss, x, y, clip=0.5, out=slow)
        assert torch.allclose(norms, expected, rtol=1e-9)
        assert torch.allclose(fast, slow, rtol=1e-9, atol=1e-12)

    def test_draws_are_averaged_before_the_clip(self) -> None:
        method = BBP(draws=4, initial_deviation=0.2)
        problem = problem_of(method, networks.mlp(4, 3, generator=torch.Generator().manual_seed(0)).double())
        query = method.ask(problem, method.init(problem))
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y = torch.tensor([0, 1, 2, 0, 1])
        together = per_record_gradients(query.module, query.loss, x, y)
        apart = torch.zeros_like(together)
        noises = [(layer, layer.weight_noise, layer.bias_noise) for layer in query.module if hasattr(layer, "draws")]  # type: ignore[attr-defined]
        for draw in range(4):
            for layer, weight, bias in noises:
                layer.draws, layer.weight_noise, layer.bias_noise = 1, weight[draw : draw + 1], bias[draw : draw + 1]
            apart += per_record_gradients(query.module, query.loss, x, y) / 4
        assert torch.allclose(together, apart, rtol=1e-9, atol=1e-12)

    def test_conversion_keeps_the_network_and_comes_back(self) -> None:
        module = small_cnn()
        before = module(images()[0])
        problem = problem_of(BBP(initial_deviation=1e-9), module, clip=1.0)
        assert [type(layer) for layer in problem.module][::4] == [MeanFieldConv2d, MeanFieldLinear]  # type: ignore[attr-defined]
        network, mean, deviation = plain(problem.module)
        assert torch.allclose(network(images()[0]), before)
        assert mean.numel() == sum(p.numel() for p in module.parameters())
        assert (deviation == 0).sum() == 6, "the six numbers of GroupNorm have no distribution"

    def test_tied_and_frozen_layers_stay_points(self) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        module[1].weight = module[0].weight
        module[2].weight.requires_grad_(False)
        converted: Any = BBP().prepare(module)
        tied, _, partly, whole = converted
        assert type(tied) is nn.Linear
        assert [name for name, _ in partly.named_parameters()] == ["weight", "bias_mean", "bias_rho"]
        assert type(whole) is MeanFieldLinear

    def test_a_network_without_linear_layers_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no trainable layer that a distribution could be put on"):
            BBP().prepare(nn.Sequential(nn.GroupNorm(1, 4)))


class TestOptimisers:
    @pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
    def test_matches_torch(self, optimiser: Any) -> None:
        """The direction of each optimiser against torch's own, on the same sequence of gradients."""
        module = networks.mlp(4, 3, hidden=(5,), generator=torch.Generator().manual_seed(0))
        method = BBP(prior=priors.FlatPrior(), optimiser=optimiser, learning_rate=0.05, initial_deviation=0.5)
        problem = problem_of(method, module)
        target = problem.position.clone().requires_grad_()
        makers = {
            "sgd": lambda: torch.optim.SGD([target], lr=0.05),
            "momentum": lambda: torch.optim.SGD([target], lr=0.05, momentum=0.9),
            "adam": lambda: torch.optim.Adam([target], lr=0.05),
        }
        reference, state = makers[optimiser](), method.init(problem)
        for seed in range(5):
            total = torch.randn(len(target), generator=torch.Generator().manual_seed(seed))
            method.ask(problem, state)
            gradient = total / problem.plan.expected_batch
            method.add_prior_(problem, gradient, 1 / problem.records)
            target.grad = gradient
            reference.step()
            state = method.tell(problem, state, silence(problem, total))
        assert torch.allclose(problem.position, target.detach(), atol=1e-6)

    def test_the_default_rate_bounds_step_and_noise(self) -> None:
        module = networks.softmax(4, 3)
        quiet = BBP().rate(problem_of(BBP(), module, noise_multiplier=1e-6, clip=4.0))
        assert quiet == pytest.approx(1 / 4)
        noisy = problem_of(BBP(), module, noise_multiplier=50.0, clip=4.0)
        left = BBP().rate(noisy) * noisy.plan.mechanism.noise_std / noisy.plan.expected_batch * noisy.plan.steps**0.5
        assert left == pytest.approx(0.15)
        assert BBP(optimiser="momentum").rate(noisy) == pytest.approx(0.1 * BBP().rate(noisy))

    @pytest.mark.parametrize(
        "options", [{"draws": 0}, {"predictive_draws": 0}, {"initial_deviation": 0.0}, {"optimiser": "newton"}]
    )
    def test_bad_settings_name_the_argument(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            BBP(**options)


class TestPosterior:
    def run(self) -> confide.Run:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(60, 4, generator=generator)
        y = (x @ torch.randn(4, 3, generator=generator)).argmax(1)
        data = PrivateData(x, y, schema=Schema(classes=3, records=60), seed=1)
        plan = confide.plan(delta=1e-5, records=60, batch=20, steps=8, noise_multiplier=1.0)
        method = BBP(initial_deviation=0.3, predictive_draws=200)
        return confide.fit(method, networks.mlp(4, 3, generator=generator), data, plan, seed=1)

    def test_draws_have_the_stated_mean_and_deviation(self) -> None:
        posterior = self.run().posterior
        draws = posterior.sample(4000, torch.Generator().manual_seed(0))
        assert ((draws.mean(0) - posterior.mean()) / posterior.spread).abs().max() < 5 / 4000**0.5  # type: ignore[attr-defined]
        assert (draws.std(0) / posterior.spread - 1).abs().max() < 5 / 8000**0.5  # type: ignore[attr-defined]

    def test_predictions_repeat_and_do_not_depend_on_company(self) -> None:
        posterior = self.run().posterior
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(3))
        once = posterior.predict(x)
        assert torch.equal(once.probabilities, posterior.predict(x).probabilities)
        assert torch.allclose(once.probabilities[2:3], posterior.predict(x[2:3]).probabilities, atol=1e-6)
        assert once.epistemic.min() > 0

    def test_saving_keeps_everything(self, tmp_path: Path) -> None:
        posterior = self.run().posterior
        posterior.save(tmp_path / "p.safetensors")
        again = confide.load_posterior(tmp_path / "p.safetensors")
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
        assert torch.equal(posterior.predict(x).probabilities, again.predict(x).probabilities)
        assert (again.passes, again.facts) == (200, posterior.facts)  # type: ignore[attr-defined]
        assert torch.equal(again.covariance(), posterior.covariance())  # type: ignore[attr-defined]

    def test_a_network_of_ones_own_is_saved_by_its_vector(self, tmp_path: Path) -> None:
        x, y = images(30)
        data = PrivateData(x, y, schema=Schema(classes=3, records=30), seed=1)
        plan = confide.plan(delta=1e-5, records=30, batch=10, steps=3, noise_multiplier=1.0)
        run = confide.fit(BBP(), small_cnn(), data, plan, likelihood=Categorical(3), seed=1)
        run.posterior.save(tmp_path / "p.safetensors")
        again = confide.load_posterior(tmp_path / "p.safetensors", module=small_cnn())
        assert torch.equal(run.posterior.predict(x).probabilities, again.predict(x).probabilities)
