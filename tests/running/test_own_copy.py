"""Networks that somebody has wired by hand: what is fitted and predicted is what was written, or one sentence."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import confide
from confide.errors import Refusal
from confide.layers.bayesian import draw_, use_mean_
from confide.layers.conversion import local_noise, mean_field, plain, with_shared_dropout
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.reference import per_record_gradients, reference_clipped_sum
from confide.methods import BBP, SGLD, MCDropout
from confide.methods.base import Method
from confide.models.flat import copied, flatten_
from confide.models.likelihoods import Categorical
from confide.running import fit, own_copy
from confide.running.fit import Run

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning"),
]
METHODS: dict[str, Method] = {
    "sgld": SGLD(),
    "bbp": BBP(predictive_draws=3),
    "mc-dropout": MCDropout(predictive_draws=3),
}
RECORDS, WIDTH = 24, 5


def inputs() -> Tensor:
    return torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(1))


def fitted(module: nn.Module, method: Method, likelihood: Any = None) -> Run:
    x = inputs()
    schema = confide.Schema(records=RECORDS, classes=2)
    data = confide.PrivateData(x, (x[:, 0] > 0).long(), schema=schema, seed=1)
    plan = confide.plan(records=RECORDS, batch=12, steps=2, clip=1.0, epsilon=50.0, delta=1e-3)
    return confide.fit(method, module, data, plan, likelihood=likelihood, seed=1)


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 2))


# networks that are right --------------------------------------------------------------------------------------------


def doubled(layer: nn.Module, given: Any, found: Tensor) -> Tensor:
    return 2 * found


def a_hook_on_a_layer() -> nn.Module:
    module = sequence()
    module[0].register_forward_hook(doubled)
    return module


def a_hook_on_dropout() -> nn.Module:
    module = sequence()
    module[2].register_forward_hook(doubled)
    return module


def hooks_on_sequences() -> nn.Module:
    module = sequence()
    outer = nn.Sequential(module[:2], *module[2:])
    outer[0].register_forward_hook(doubled)
    outer.register_forward_pre_hook(lambda layer, given: (given[0] + 1,))
    return outer


def a_forward_of_a_layers_own() -> nn.Module:
    module = sequence()
    module[3].forward = types.MethodType(lambda own, x: 3 * F.linear(x, own.weight, own.bias), module[3])
    return module


def a_forward_of_an_activations_own() -> nn.Module:
    module = sequence()
    module[1].forward = types.MethodType(lambda own, x: torch.relu(x), module[1])
    return module


def pruned_weights() -> nn.Module:
    module = sequence()
    prune.l1_unstructured(module[0], "weight", 0.4)
    return module


def an_old_weight_norm() -> nn.Module:
    module = sequence()
    weight_norm(module[0])
    return module


def an_old_spectral_norm() -> nn.Module:
    module = sequence().eval()  # in evaluation it does not go on with its power iteration
    spectral_norm(module[0])
    return module


class Held(nn.Module):
    """Layers that are called by other names than those under which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(WIDTH, 6), nn.Linear(6, 2), nn.Dropout(0.1)
        self.first.gain = 3.0  # type: ignore[assignment]
        self.order: list[Any] = [self.first, torch.tanh, self.drop, {"last": self.last}["last"]]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.order:
            x = step(x)
        return x * self.first.gain


def a_layer_in_three_places() -> nn.Module:
    torch.manual_seed(0)
    layer, drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
    return nn.Sequential(layer, drop, nn.Tanh(), layer, drop, nn.Tanh(), layer, nn.Linear(WIDTH, 2))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made
    for made in (
        a_hook_on_a_layer,
        a_hook_on_dropout,
        hooks_on_sequences,
        a_forward_of_a_layers_own,
        a_forward_of_an_activations_own,
        pruned_weights,
        an_old_weight_norm,
        an_old_spectral_norm,
        Held,
        a_layer_in_three_places,
    )
}


def predicted_by_hand(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """The mean over the draws, each of them put into the network as it was given."""
    draws, weights = run.posterior.weighted_draws()  # type: ignore[attr-defined]
    own = copied(module).eval()
    position, found = flatten_(own), torch.zeros(len(x), 2)
    for draw, weight in zip(draws, weights, strict=True):
        position.copy_(draw)
        found += weight * own(x).softmax(1).detach()
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_predictions_are_those_of_the_network_as_it_was_written(name: str) -> None:
    module, x = RIGHT[name](), inputs()[:4]
    run = fitted(module, METHODS["sgld"])
    assert torch.allclose(run.posterior.predict(x).probabilities, predicted_by_hand(run, module, x), atol=1e-5)


def masked(module: nn.Module, deviation: float) -> nn.Module:
    return with_shared_dropout(module, 0.1)[0]


@pytest.mark.parametrize("convert", [mean_field, local_noise, masked])
@pytest.mark.parametrize("name", RIGHT)
def test_a_converted_network_computes_what_the_given_one_does(name: str, convert: Callable[..., nn.Module]) -> None:
    module, x = RIGHT[name]().eval(), inputs()
    wanted = module(x)
    converted = convert(copied(module), 1e-3)
    for _ in range(2):  # layers that hooks change are changed anew
        use_mean_(converted)
        assert torch.allclose(converted.eval()(x), wanted, atol=1e-5)
    if convert is not masked:
        back, mean, _ = plain(converted)
        assert torch.allclose(back.eval()(x), wanted, atol=1e-5)
        assert len(mean) == sum(value.numel() for value in module.parameters())
        assert [type(layer) for layer in back.modules()] == [type(layer) for layer in module.modules()]


@pytest.mark.parametrize("convert", [mean_field, local_noise, masked])
@pytest.mark.parametrize("name", RIGHT)
def test_clipped_sums_of_a_converted_network_are_exact(name: str, convert: Callable[..., nn.Module]) -> None:
    module = convert(copied(RIGHT[name]().double().eval()), 0.3)
    draw_(module, torch.Generator().manual_seed(2))
    x, y = inputs().double(), torch.arange(RECORDS) % 2
    norms = per_record_gradients(module, cross_entropy, x, y).norm(dim=1)
    found, wanted = torch.zeros(2, sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    options = {"clip": float(norms.median())}
    reference_clipped_sum(module, cross_entropy, x, y, out=wanted, **options)
    clipped_sum(module, cross_entropy, x, y, out=found, **options)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-9


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


@pytest.mark.parametrize("method", ["bbp", "mc-dropout"])
@pytest.mark.parametrize("name", ["Held", "a_layer_in_three_places", "a_hook_on_a_layer", "an_old_weight_norm"])
def test_what_was_fitted_is_loaded_into_a_network_that_is_built_anew(name: str, method: str, tmp_path: Path) -> None:
    module, x = RIGHT[name](), inputs()[:4]
    run = fitted(module, METHODS[method])
    run.posterior.save(tmp_path / "one.safetensors")
    again: Any = confide.load_posterior(tmp_path / "one.safetensors", RIGHT[name]())
    assert torch.allclose(again.predict(x).probabilities, run.posterior.predict(x).probabilities, atol=1e-6)


# networks that are refused ------------------------------------------------------------------------------------------


def held_by_a_function() -> nn.Module:
    first, last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last
            self.run = lambda x: last(torch.tanh(first(x)))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.run(x)
            return found

    return Calling()


def scaled_by_a_hook() -> nn.Module:
    """One parameter of the three is reached through the module that was given: nothing else would have told."""
    module = sequence()
    module.scale = nn.Parameter(torch.ones(6))
    module[0].register_forward_hook(lambda layer, given, found: found * module.scale)
    return module


def made_while_it_runs() -> nn.Module:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 2)
            self.first: nn.Parameter | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.first is None:
                self.first = nn.Parameter(torch.randn(x.shape[1], 6))
            found: Tensor = self.last(x @ self.first)
            return found

    return Late()


def computed_once() -> nn.Module:
    class Stale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root, self.last = nn.Parameter(torch.randn(WIDTH, 6)), nn.Linear(6, 2)
            self.weight = self.root.exp()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(x @ self.weight)
            return found

    return Stale()


REFUSED = {
    "holds a layer": (held_by_a_function, scaled_by_a_hook),
    "is made while it runs": (made_while_it_runs,),
    "computed from other tensors once": (computed_once,),
}
REFUSALS = [pytest.param(made, words, id=made.__name__) for words, many in REFUSED.items() for made in many]


@pytest.mark.parametrize("method", ["sgld", "bbp"])
@pytest.mark.parametrize(("made", "words"), REFUSALS)
def test_a_copy_that_is_none_is_refused_in_a_sentence(made: Callable[[], nn.Module], words: str, method: str) -> None:
    with pytest.raises(Refusal, match=words):
        fitted(made(), METHODS[method])


class Sparse(Categorical):
    """A likelihood that knows the network, or a copy of its weights."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(2)
        object.__setattr__(self, "weight", weight)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        penalty: Tensor = self.weight.abs().sum()  # type: ignore[attr-defined]
        return super().loss(output, y) + penalty


def test_what_is_asked_of_the_form_of_another_layer_alone_is_no_reading() -> None:
    """Of a reference layer that is part of the network that was given: a size, a type, zeros of its shape."""
    module = sequence()
    module[0].register_forward_hook(
        lambda layer, given, found: (
            found.to(module[0].weight) + torch.zeros_like(module[0].bias) + module[0].weight.dim()
        )
    )
    fitted(module, METHODS["sgld"])


def test_a_likelihood_that_holds_the_network_is_refused() -> None:
    module = sequence()
    with pytest.raises(Refusal, match="likelihood holds a layer"):
        fitted(module, METHODS["sgld"], Sparse(module[0].weight))
    fitted(module, METHODS["sgld"], Sparse(module[0].weight.detach().clone()))


def test_a_forward_that_goes_by_names_is_told_that_a_method_changes_them() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            named = dict(self.named_parameters())
            found: Tensor = self.last(F.linear(x, named["first.weight"], named["first.bias"]))
            return found

    fitted(ByName(), METHODS["sgld"])
    with pytest.raises(Refusal, match=r"runs as it was given: under bbp .* such as first\.weight_mean"):
        fitted(ByName(), METHODS["bbp"])


def test_without_the_look_a_parameter_that_never_moves_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: that nothing else tells of it."""
    monkeypatch.setattr(fit, "check_copy", lambda module, data, likelihood: True)
    fitted(scaled_by_a_hook(), METHODS["sgld"])
    monkeypatch.setattr(fit, "check_copy", own_copy.check_copy)
    with pytest.raises(Refusal, match="holds a layer"):
        fitted(scaled_by_a_hook(), METHODS["sgld"])
