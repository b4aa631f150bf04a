"""MC dropout: one mask per step for all records, in the forward pass only, and still on in predictions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.layers.bayesian import draw_, use_mean_
from confide.layers.conversion import with_shared_dropout
from confide.layers.dropout import SharedDropout
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import per_record_gradients, reference_clipped_sum
from confide.methods.mc_dropout import MCDropout
from confide.models import networks, priors
from confide.posteriors.draws import outputs_of_draws
from confide.sources.private_data import PrivateData
from tests.methods.variational_tools import problem_of, silence


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(count: int = 40, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=generator(seed), dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator(seed))


def network() -> nn.Module:
    return networks.mlp(4, 3, hidden=(16, 8), generator=generator()).double()


def own_network() -> nn.Module:
    """Convolution with both kinds of dropout: whole channels and single units."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *convolution, nn.Dropout(0.3), nn.Linear(4, 3)).double()


def layers(module: nn.Module) -> list[SharedDropout]:
    return [layer for layer in module.modules() if isinstance(layer, SharedDropout)]


def masks(module: nn.Module, size: int = 8) -> Tensor:
    return torch.cat([layer.mask(torch.Size([size])).flatten() for layer in layers(module)])


class TestMasks:
    def test_fresh_at_every_step_and_fixed_within_one(self) -> None:
        method = MCDropout(dropout_rate=0.5)
        problem = problem_of(method, network())
        state = method.init(problem)
        query = method.ask(problem, state)
        x, y = records(6)
        first, again = (torch.zeros(query.size, dtype=torch.float64) for _ in range(2))
        clipped_sum(query.module, query.loss, x, y, clip=1.0, out=first)
        clipped_sum(query.module, query.loss, x, y, clip=1.0, out=again)
        assert torch.equal(first, again), "the same query has the same answer"
        before = masks(problem.module)
        method.ask(problem, state)
        assert not torch.equal(before, masks(problem.module))

    def test_a_record_gets_the_same_answer_in_any_company(self) -> None:
        """With one mask per row of a batch, taking a record out would hand its neighbours other masks."""
        method = MCDropout(dropout_rate=0.5)
        problem = problem_of(method, network())
        query = method.ask(problem, method.init(problem))
        x, y = records(6)
        alone = per_record_gradients(query.module, query.loss, x[4:5], y[4:5])[0]
        together = per_record_gradients(query.module, query.loss, x, y)[4]
        assert torch.allclose(alone, together, rtol=1e-10, atol=1e-14)

        rowwise = nn.Sequential(*network(), nn.Dropout(0.5)).train()
        torch.manual_seed(0)
        alone = per_record_gradients(rowwise, query.loss, x[4:5], y[4:5])[0]
        torch.manual_seed(0)
        together = per_record_gradients(rowwise, query.loss, x, y)[4]
        assert not torch.allclose(alone, together), "torch's own dropout is caught"

    def test_masks_do_not_depend_on_records(self) -> None:
        """Two runs on data that have nothing in common draw the same masks at every step."""
        seen: dict[int, list[Tensor]] = {}

        @dataclass(frozen=True)
        class Watching(MCDropout):
            name: ClassVar[str] = "watching"

            def tell(self, problem: Any, state: Any, release: Any) -> Any:
                seen[which].append(masks(problem.module))
                return super().tell(problem, state, release)

        plan = confide.plan(delta=1e-5, records=40, batch=10, steps=5, noise_multiplier=1.0)
        for which in (0, 1):
            seen[which] = []
            data = PrivateData(*records(40 - 10 * which, seed=which), schema=Schema(classes=3, records=40), seed=which)
            confide.fit(Watching(), network(), data, plan, seed=9)
        assert all(torch.equal(*pair) for pair in zip(seen[0], seen[1], strict=True))

    @pytest.mark.parametrize("make", [network, own_network])
    @pytest.mark.parametrize("draws", [1, 3])
    def test_norm_and_sum_use_the_same_mask(self, make: Any, draws: int) -> None:
        """Norms of one mask with the gradients of another would leave records unclipped."""
        method = MCDropout(dropout_rate=0.5, draws=draws)
        problem = problem_of(method, make())
        query = method.ask(problem, method.init(problem))
        x, y = records(7)
        fast, slow = (torch.zeros(query.size, dtype=torch.float64) for _ in range(2))
        norms = clipped_sum(query.module, query.loss, x, y, clip=0.1, out=fast)
        expected = reference_clipped_sum(query.module, query.loss, x, y, clip=0.1, out=slow)
        assert torch.allclose(norms, expected, rtol=1e-9)
        assert torch.allclose(fast, slow, rtol=1e-9, atol=1e-12)

    def test_several_draws_are_averaged_before_the_clip(self) -> None:
        method = MCDropout(dropout_rate=0.5, draws=4)
        problem = problem_of(method, network())
        query = method.ask(problem, method.init(problem))
        x, y = records(5)
        together = per_record_gradients(query.module, query.loss, x, y)
        hidden = layers(query.module)
        drawn = [layer.mask(torch.Size([size]), torch.float64) for layer, size in zip(hidden, (16, 8), strict=True)]
        apart = torch.zeros_like(together)
        for draw in range(4):
            fixed = with_fixed_masks(query.module, [mask[draw] for mask in drawn])
            apart += per_record_gradients(fixed, query.loss, x, y) / 4
        assert torch.allclose(together, apart, rtol=1e-9, atol=1e-12)

    def test_rate_scale_and_channels(self) -> None:
        layer = SharedDropout(0.3).sample_(generator())
        mask = layer.mask(torch.Size([20_000]))
        assert mask.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        assert abs((mask == 0).float().mean().item() - 0.3) < 4 * (0.21 / 20_000) ** 0.5
        whole = SharedDropout(0.5, channels=True).sample_(generator())(torch.ones(2, 50, 3, 3))
        assert torch.equal(whole, whole[:1, :, :1, :1].expand_as(whole))
        use_mean_(layer)
        assert torch.equal(layer(torch.ones(2, 5)), torch.ones(2, 5))


def with_fixed_masks(module: nn.Module, chosen: list[Tensor]) -> nn.Module:
    """The same parameters, with multiplications in place of the dropout layers."""

    class Times(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.mask = mask

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    left = iter(chosen)
    parts = []
    for child in module:  # type: ignore[attr-defined]
        if isinstance(child, nn.Sequential):
            parts += [child[0], Times(next(left))]
        else:
            parts.append(child)
    return nn.Sequential(*parts)


class TestWeights:
    def moved(self, method: MCDropout, steps: int = 6) -> Tensor:
        """How far the weights are after steps that bring neither data nor noise nor prior."""
        problem = problem_of(method, network())
        start = problem.position.clone()
        state = method.init(problem)
        for _ in range(steps):
            method.ask(problem, state)
            state = method.tell(problem, state, silence(problem))
        return (problem.position - start).abs()

    def test_masks_never_touch_the_carried_weights(self) -> None:
        assert self.moved(MCDropout(prior=priors.FlatPrior(), dropout_rate=0.5)).max() == 0

    def test_overwriting_weights_by_masked_ones_is_caught(self) -> None:
        """The update as printed by Zhang et al. (2021), Algorithm 4, carries the masked weights on."""

        @dataclass(frozen=True)
        class Overwriting(MCDropout):
            name: ClassVar[str] = "overwriting"

            def tell(self, problem: Any, state: Any, release: Any) -> Any:
                module, hidden = problem.module, layers(problem.module)
                for layer, follower in zip(hidden, (module[2], module[4]), strict=True):
                    follower.weight.data.mul_(layer.mask(torch.Size([follower.in_features]), torch.float64))
                return super().tell(problem, state, release)

        assert (self.moved(Overwriting(prior=priors.FlatPrior(), dropout_rate=0.5)) > 0).sum() > 100

    @pytest.mark.parametrize("optimiser", ["sgd", "momentum"])
    def test_the_prior_joins_over_n(self, optimiser: Any) -> None:
        method = MCDropout(prior=priors.GaussianPrior(0.5), learning_rate=0.2, optimiser=optimiser)
        problem = problem_of(method, network())
        before = problem.position.clone()
        method.tell(problem, method.init(problem), silence(problem))
        assert torch.allclose(problem.position, before * (1 - 0.2 / 0.25 / 40))


class TestNetworks:
    def test_confides_own_networks_get_dropout_after_hidden_activations(self) -> None:
        converted, inserted = with_shared_dropout(network(), 0.25)
        kinds = [[type(part).__name__ for part in child] for child in converted if isinstance(child, nn.Sequential)]  # type: ignore[attr-defined]
        assert (inserted, kinds) == (True, [["ReLU", "SharedDropout"]] * 2)
        assert [layer.rate for layer in layers(converted)] == [0.25, 0.25]
        linear, _ = with_shared_dropout(networks.softmax(4, 3), 0.25)
        assert isinstance(linear[0][0], SharedDropout), "without hidden layers the inputs are dropped"

    def test_layers_of_ones_own_keep_their_rates(self) -> None:
        converted, inserted = with_shared_dropout(own_network(), 0.9)
        assert not inserted
        assert [(layer.rate, layer.channels) for layer in layers(converted)] == [(0.4, True), (0.3, False)]

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="no dropout layer"):
            MCDropout().prepare(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match=r"p=1\.0"):
            MCDropout().prepare(nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0)))
        for options in ({"dropout_rate": 1.0}, {"dropout_rate": 0.0}, {"draws": 0}, {"predictive_draws": 0}):
            with pytest.raises(ValueError, match=f"{next(iter(options))}="):
                MCDropout(**options)


class TestPosterior:
    def run(self, module: nn.Module, **options: Any) -> confide.Run:
        data = PrivateData(*records(), schema=Schema(classes=3, records=40), seed=1)
        plan = confide.plan(delta=1e-5, records=40, batch=10, steps=4, noise_multiplier=1.0)
        return confide.fit(MCDropout(**{"dropout_rate": 0.4, **options}), module, data, plan, seed=1)

    def test_dropout_stays_on_and_predictions_repeat(self) -> None:
        posterior = self.run(network(), predictive_draws=50).posterior
        x = records(9, seed=4)[0]
        once = posterior.predict(x)
        assert once.draws.shape[0] == 50
        assert once.epistemic.min() > 0
        assert torch.equal(once.probabilities, posterior.predict(x).probabilities)
        assert torch.allclose(once.probabilities[3:4], posterior.predict(x[3:4]).probabilities)

    def test_predictions_leave_torchs_stream_alone(self) -> None:
        posterior = self.run(own_network()).posterior
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        posterior.predict(records(2)[0])
        assert torch.equal(torch.rand(3), expected)

    def test_draws_are_weights_with_masks_multiplied_in(self) -> None:
        """A draw put into the network without dropout must answer as the network with that mask."""
        posterior = self.run(network()).posterior
        draws = posterior.sample(3, generator(7))
        x = records(5)[0]
        found = outputs_of_draws(network(), draws, x)
        masked = posterior.module
        torch.nn.utils.vector_to_parameters(posterior.weights, masked.parameters())  # type: ignore[attr-defined]
        stream = generator(7)
        for output in found:
            draw_(masked, stream)
            assert torch.allclose(masked(x), output, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("make", [network, own_network])
    def test_saving_keeps_everything(self, make: Any, tmp_path: Path) -> None:
        run = self.run(make(), predictive_draws=30)
        run.posterior.save(tmp_path / "p.safetensors")
        module = own_network() if make is own_network else None
        again = confide.load_posterior(tmp_path / "p.safetensors", module)
        x = records(5)[0]
        if make is network:
            x = x.float()  # a recipe rebuilds a network of single precision
        first, second = run.posterior.predict(x).probabilities, again.predict(x).probabilities
        assert torch.allclose(first, second.to(first.dtype), atol=1e-5)
        assert again.facts == run.posterior.facts
        assert len(again.predict(x).draws) == 30
