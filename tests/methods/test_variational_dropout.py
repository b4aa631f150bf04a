"""Variational dropout: drawn activations, tied and learnt noise, and the noise that enters the carried weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.layers.bayesian import draw_
from confide.layers.conversion import distributions, local_noise
from confide.layers.dropout import SharedNoiseConv2d, SharedNoiseLinear
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import per_record_gradients, reference_clipped_sum
from confide.methods.variational_dropout import VariationalDropout
from confide.models import networks, priors
from confide.models.flat import copied
from confide.models.priors import LogUniformPrior
from confide.posteriors.variational import DiagonalGaussian
from confide.sources.private_data import PrivateData
from tests.conformance.conftest import classification, small_plan
from tests.methods.variational_tools import PRIOR, linear_model, problem_of, silence


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=generator(1), dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator(2))


def network() -> nn.Module:
    return networks.mlp(4, 3, hidden=(16,), generator=generator()).double()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers).double()


class TestActivations:
    @pytest.mark.parametrize("make", [network, convolutional])
    @pytest.mark.parametrize("deviation", ["tied", "learnt"])
    @pytest.mark.parametrize("draws", [1, 3])
    def test_answers_equal_those_of_single_records(self, make: Any, deviation: Any, draws: int) -> None:
        method = VariationalDropout(deviation=deviation, draws=draws)
        problem = problem_of(method, make(), noise_multiplier=30.0)
        query = method.ask(problem, method.init(problem))
        x, y = records(6)
        fast, slow = (torch.zeros(query.size, dtype=torch.float64) for _ in range(2))
        norms = clipped_sum(query.module, query.loss, x, y, clip=0.3, out=fast)
        expected = reference_clipped_sum(query.module, query.loss, x, y, clip=0.3, out=slow)
        assert torch.allclose(norms, expected, rtol=1e-7)
        assert torch.allclose(fast, slow, rtol=1e-7, atol=1e-10)

    def test_tied_variances_need_no_product_of_their_own(self) -> None:
        """The same outputs and slopes as by the product with all variances; learnt ones are never taken for tied."""
        tied, learnt = (VariationalDropout(deviation=kind).prepare(network()) for kind in ("tied", "learnt"))
        layers = [[one for one in each.modules() if isinstance(one, SharedNoiseLinear)] for each in (tied, learnt)]
        assert [[one.tied for one in each] for each in layers] == [[True, True], [False, False]]
        found = []
        for module in (tied, learnt):
            draw_(module, generator(3))
            x = records(6)[0].requires_grad_()
            out = module(x)
            found.append((out.detach(), torch.autograd.grad(out.square().sum(), x)[0]))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, rtol=1e-10)

    def test_an_answer_depends_on_its_record_alone(self) -> None:
        method = VariationalDropout()
        problem = problem_of(method, network(), noise_multiplier=30.0)
        query = method.ask(problem, method.init(problem))
        x, y = records(6)
        alone = per_record_gradients(query.module, query.loss, x[4:5], y[4:5])[0]
        together = per_record_gradients(query.module, query.loss, x, y)[4]
        assert torch.allclose(alone, together, rtol=1e-10, atol=1e-14)

    @pytest.mark.parametrize("kind", [SharedNoiseLinear, SharedNoiseConv2d])
    def test_activations_have_the_law_of_noisy_weights(self, kind: Any) -> None:
        """Mean a mu, variance a^2 zeta^2, over draws: a forgotten square or root would show."""
        if kind is SharedNoiseLinear:
            plain, x = nn.Linear(5, 3).double(), torch.randn(1, 5, generator=generator()).double()
        else:
            plain, x = nn.Conv2d(2, 3, 2).double(), torch.randn(1, 2, 2, 2, generator=generator()).double()  # type: ignore[assignment]
        layer = local_noise(copied(plain), 0.3)
        assert isinstance(layer, kind)
        with torch.no_grad():
            layer.weight_log_variance.add_(torch.randn(layer.weight_mean.shape, generator=generator(1)))
            draw_(layer, generator(2), draws=20_000)
            outputs = layer(x.repeat(20_000, *[1] * (x.dim() - 1))).flatten(1)
            expected = plain(x).flatten(1)[0]
            deviation = (layer.weight_log_variance.exp().flatten(1) @ x.flatten().square()).sqrt()
        assert ((outputs.mean(0) - expected) / deviation).abs().max() < 4.5 / 20_000**0.5
        assert (outputs.std(0) / deviation - 1).abs().max() < 4.5 / 40_000**0.5

    def test_norms_may_be_bounded_from_above(self) -> None:
        """Norms at least the exact ones, and equal to them as long as the variances of an output are."""
        found = {}
        for norms in ("exact", "bound"):
            method = VariationalDropout(deviation="learnt", norms=norms)  # type: ignore[arg-type]
            problem = problem_of(method, network(), noise_multiplier=30.0)
            state = method.init(problem)
            for seed, one in enumerate(distributions(problem.module)):
                one.raw.add_(torch.randn(one.raw.shape, generator=generator(seed)), alpha=0.3)
            query = method.ask(problem, state)
            x, y = records(6)
            out = torch.zeros(query.size, dtype=torch.float64)
            found[norms] = clipped_sum(query.module, query.loss, x, y, clip=0.3, out=out)
        assert (found["bound"] > found["exact"]).all()
        assert (found["bound"] < 2 * found["exact"]).all()


class TestNoise:
    def path(self, method: VariationalDropout, steps: int = 400) -> tuple[Tensor, float]:
        """Increments of the carried weights on data that answer nothing, and the tied deviation."""
        hostile = torch.full((40, 50), torch.nan)
        data = PrivateData(hostile, torch.zeros(40).long(), schema=Schema(classes=10, records=40), seed=3)
        plan = confide.plan(delta=1e-5, records=40, batch=10, steps=steps, noise_multiplier=2.0, clip=3.0)
        module = networks.softmax(50, 10)
        run = confide.fit(method, module, data, plan, seed=1)
        return run.posterior.mean(), run.posterior.facts["tied_deviation"]

    def test_tied_noise_is_what_a_step_puts_on_the_carried_weights(self) -> None:
        """zeta = rate s / b, and after T steps the carried weights have wandered by sqrt(T) of it, and not by less."""
        method = VariationalDropout(weight=0.0, learning_rate=0.05)
        wandered, tied = self.path(method)
        assert tied == pytest.approx(0.05 * 2 * 3 / 10)
        ratio = wandered.std().item() / (tied * 400**0.5)
        assert abs(ratio - 1) < 4.5 / (2 * 510) ** 0.5

    def test_a_carried_parameter_without_noise_is_caught(self) -> None:
        """The update as printed by Ermis and Cemgil (2017), line 8: noise on what is shown, none on what is carried."""

        @dataclass(frozen=True)
        class Printed(VariationalDropout):
            name: ClassVar[str] = "printed"

            def tell(self, problem: Any, state: Any, release: Any) -> Any:
                silent = replace(release, sum=torch.zeros_like(release.sum))  # what is left of it without the noise
                return super().tell(problem, state, silent)

        wandered, tied = self.path(Printed(weight=0.0, learning_rate=0.05))
        assert wandered.std().item() < 0.1 * tied

    def test_tied_noise_has_no_parameter_and_learnt_noise_has(self) -> None:
        sizes = {}
        for deviation in ("tied", "learnt"):
            method = VariationalDropout(deviation=deviation)
            problem = problem_of(method, network())
            method.init(problem)
            sizes[deviation] = problem.position.numel()
            for one in distributions(problem.module):
                assert torch.allclose(one.deviations(), torch.tensor(method.tied_deviation(problem)).double())
        weights = 4 * 16 + 16 * 3
        assert sizes["learnt"] - sizes["tied"] == weights

    def test_without_privacy_noise_there_is_a_start_all_the_same(self) -> None:
        method = VariationalDropout()
        problem = problem_of(method, network(), noise_multiplier=None, private=False)
        assert method.tied_deviation(problem) == 0.01
        adam = VariationalDropout(optimiser="adam", learning_rate=0.003)
        assert adam.tied_deviation(problem_of(adam, network())) == 0.003


class TestDivergence:
    @pytest.mark.parametrize("deviation", ["tied", "learnt"])
    def test_a_step_without_records_descends_it(self, deviation: Any) -> None:
        method = VariationalDropout(deviation=deviation, weight=0.5, warm_up=0.0, learning_rate=0.01)
        problem = problem_of(method, network(), noise_multiplier=2000.0)
        state = method.init(problem)
        method.ask(problem, state)
        before = problem.position.clone()
        with torch.enable_grad():
            total = sum(
                LogUniformPrior().divergence(getattr(one.layer, one._mean), (one.spread_parameter / 2).exp())
                for one in distributions(problem.module)
            )
            parameters = [p for p in problem.module.parameters() if p.requires_grad]
            found = torch.autograd.grad(total, parameters, materialize_grads=True)
        gradient = torch.cat([one.reshape(-1) for one in found])
        method.tell(problem, state, silence(problem))
        assert torch.allclose(problem.position - before, -0.01 * 0.5 * gradient / 40, rtol=1e-6, atol=1e-12)

    def test_a_pull_stops_at_zero(self) -> None:
        """The pull on a mean as small as its deviation is steep: a plain step would throw it far to the other side."""
        method = VariationalDropout(weight=1.0, warm_up=0.0, learning_rate=0.2)
        problem = problem_of(method, network(), noise_multiplier=0.1)
        state = method.init(problem)
        problem.position.copy_(torch.randn(len(problem.position), generator=generator()).double() * 0.01)
        for _ in range(20):
            before = problem.position.clone()
            method.ask(problem, state)
            state = method.tell(problem, state, silence(problem))
            assert (problem.position * before >= -1e-15).all()
            assert (problem.position.abs() <= before.abs() + 1e-15).all()
        assert (
            torch.cat([one.means.flatten() for one in distributions(problem.module)]).abs() < 1e-3
        ).double().mean() > 0.9

    def test_weight_rule_and_warm_up(self) -> None:
        problem = problem_of(VariationalDropout(), network(), steps=20)
        assert VariationalDropout().divergence_weight(problem, 20) == pytest.approx(40 / 112)
        assert VariationalDropout(weight=1.0).divergence_weight(problem, 5) == pytest.approx(0.5)
        assert VariationalDropout(weight=1.0, warm_up=0.0).divergence_weight(problem, 1) == 1.0
        gaussian = VariationalDropout(prior=priors.GaussianPrior())
        assert gaussian.divergence_weight(problem, 20) == 1.0, "only the log-uniform prior is tempered"

    def test_with_a_gaussian_prior_it_finds_the_mean_field_optimum(self) -> None:
        """Stochastic variational inference without dropout; the same optimum that Bayes by Backprop finds."""
        model = linear_model()
        method = VariationalDropout(
            prior=priors.GaussianPrior(PRIOR), deviation="learnt", warm_up=0.0, draws=2, learning_rate=0.05
        )
        posterior = model.fit(Started(**vars(method)), 700).posterior
        assert ((posterior.mean() - model.mean) / model.mean_field_deviation).abs().max() < 0.6
        assert torch.allclose(posterior.spread, model.mean_field_deviation, rtol=0.15)  # type: ignore[attr-defined]

    def test_priors_without_a_closed_form_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no closed form"):
            VariationalDropout(prior=priors.ScaleMixturePrior())

    @pytest.mark.parametrize(
        "options", [{"deviation": "free"}, {"weight": -1.0}, {"warm_up": 2.0}, {"draws": 0}, {"norms": "l1"}]
    )
    def test_bad_settings_name_the_argument(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            VariationalDropout(**options)


@dataclass(frozen=True)
class Started(VariationalDropout):
    """Starts near the optimum's size, which a run without privacy noise has no rule for."""

    name: ClassVar[str] = "started"

    def tied_deviation(self, problem: Any) -> float:
        return 0.2


class TestPosterior:
    def run(self, module: nn.Module, **options: Any) -> confide.Run:
        data = PrivateData(*records(), schema=Schema(classes=3, records=40), seed=1)
        plan = confide.plan(delta=1e-5, records=40, batch=10, steps=4, noise_multiplier=1.0)
        return confide.fit(VariationalDropout(**options), module, data, plan, seed=1)

    def test_sparsity_counts_weights_that_are_mostly_noise(self) -> None:
        posterior = self.run(network(), deviation="learnt").posterior
        inside = posterior.spread > 0  # type: ignore[attr-defined]
        ratio = 2 * (posterior.spread[inside] / posterior.mean()[inside].abs()).log()  # type: ignore[attr-defined]
        assert posterior.facts["sparsity"] == pytest.approx((ratio > 3).double().mean().item())
        assert inside.sum() == 112, "biases have no distribution"

    def test_pruned_weights_are_found(self) -> None:
        """A pull as strong as the data and many steps leave weights that are noise alone."""
        data = PrivateData(*records(), schema=Schema(classes=3, records=40), seed=1)
        plan = confide.plan(delta=1e-5, records=40, batch=20, steps=150, noise_multiplier=1.0)
        shares = []
        for weight in (0.0, 1.0):
            method = VariationalDropout(weight=weight, warm_up=0.0)
            shares.append(confide.fit(method, network(), data, plan, seed=1).posterior.facts["sparsity"])
        assert shares[1] > shares[0] + 0.1

    @pytest.mark.parametrize("make", [network, convolutional])
    def test_saving_keeps_everything(self, make: Any, tmp_path: Path) -> None:
        run = self.run(make())
        run.posterior.save(tmp_path / "p.safetensors")
        again = confide.load_posterior(tmp_path / "p.safetensors", make())
        x = records(5)[0]
        assert torch.equal(run.posterior.predict(x).probabilities, again.predict(x).probabilities)
        assert again.facts == run.posterior.facts


def test_the_released_posterior_carries_the_tied_deviation() -> None:
    """The module that leaves is not the one that was trained: what is not in the position is written into it again."""
    case = classification()
    run = confide.fit(VariationalDropout(), case.module, case.data(), small_plan(case), seed=5)
    assert isinstance(run.posterior, DiagonalGaussian)
    spread = run.posterior.spread[run.posterior.spread > 0]
    assert float(spread.max()) == pytest.approx(run.posterior.facts["tied_deviation"], rel=1e-5)
    assert float(spread.min()) == pytest.approx(run.posterior.facts["tied_deviation"], rel=1e-5)
