"""Bayesian layers: draws, leaves, upper bounds of norms, and plain use without the engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import (
    BayesianLayer,
    MeanFieldConv2d,
    MeanFieldLinear,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
    draw_,
    fold_draws,
    observed,
    unfold_draws,
    use_mean_,
)
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.reference import per_record_gradients
from confide.mechanism.clipping.rules import convolution
from confide.mechanism.noise import NoiseStream
from tests.mechanism.clipping.zoo import ZOO
from tests.mechanism.clipping.zoo_tools import CLASSES, classes, floats, labels


def network(rho: float = -1.0, norms: str = "exact") -> nn.Sequential:
    torch.manual_seed(0)
    options = {"initial_rho": rho, "norms": norms}
    return nn.Sequential(
        MeanFieldLinear(5, 7, **options),
        nn.Tanh(),
        MeanFieldLinear(7, CLASSES, **options),  # type: ignore[arg-type]
    ).double()


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_draws_are_mean_plus_softplus_rho_times_noise() -> None:
    layer = MeanFieldLinear(5, 3, initial_rho=-2.0).double().sample_(torch.Generator().manual_seed(1), draws=2)
    weight, bias = layer.drawn()
    assert layer.weight_noise is not None
    assert layer.bias_noise is not None
    torch.testing.assert_close(weight, layer.weight_mean + F.softplus(layer.weight_rho) * layer.weight_noise)
    torch.testing.assert_close(bias, layer.bias_mean + F.softplus(layer.bias_rho) * layer.bias_noise)
    x = floats(5)
    outputs = unfold_draws(layer(fold_draws(x, 2)), 2)
    for draw in range(2):
        torch.testing.assert_close(outputs[draw], F.linear(x, weight[draw], bias[draw]))  # type: ignore[index]


def test_leaves_have_the_same_values() -> None:
    """With rhos on both sides of 20, where softplus is computed in another way."""
    layer = MeanFieldLinear(4, 3).double().sample_()
    for rho in (-9.0, 3.0, 30.0):
        nn.init.constant_(layer.weight_rho, rho)
        plain, _ = layer.drawn()
        with observed():
            leaf, _ = layer.drawn()
        assert leaf.is_leaf
        assert leaf.requires_grad
        torch.testing.assert_close(leaf, plain, rtol=1e-14, atol=0)


def test_local_reparameterisation_has_the_right_mean_and_variance() -> None:
    torch.manual_seed(0)
    layer = VariationalDropoutLinear(4, 3, initial_log_variance=-1.0).double()
    x = torch.randn(1, 4, dtype=torch.float64)
    outputs = layer(x.expand(40_000, 4)).detach()
    mean = F.linear(x, layer.weight_mean, layer.bias)[0]
    variance = F.linear(x.square(), layer.weight_log_variance.exp())[0]
    torch.testing.assert_close(outputs.mean(0), mean, rtol=0, atol=0.03)
    torch.testing.assert_close(outputs.var(0), variance, rtol=0.04, atol=0)


@pytest.mark.parametrize("draws", [1, 4])
def test_several_draws_are_averaged_before_clipping(draws: int) -> None:
    """The gradient of one record is the mean over draws, each draw run on its own."""
    module, x, y = network(), floats(5), labels()
    draw_(module, torch.Generator().manual_seed(3), draws)
    layers = [layer for layer in module.modules() if isinstance(layer, MeanFieldLinear)]
    noises = [(layer.weight_noise, layer.bias_noise) for layer in layers]
    total = 0.0
    for draw in range(draws):
        for layer, (weight, bias) in zip(layers, noises, strict=True):
            layer.weight_noise, layer.bias_noise, layer.draws = weight[draw : draw + 1], bias[draw : draw + 1], 1  # type: ignore[index]
        total = total + per_record_gradients(module, classes, x, y) / draws  # type: ignore[assignment]
    for layer, (weight, bias) in zip(layers, noises, strict=True):
        layer.weight_noise, layer.bias_noise, layer.draws = weight, bias, draws
    assert isinstance(total, Tensor)
    found = torch.zeros(size_of(module), dtype=torch.float64)
    clip = total.norm(dim=1).median().item()
    norms = clipped_sum(module, classes, x, y, clip=clip, out=found)
    torch.testing.assert_close(norms, total.norm(dim=1), rtol=1e-12, atol=0)
    factors = (clip / total.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(found, (total * factors).sum(0), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("rho", "excess"), [(-5.0, 0.01), (-3.0, 0.1), (-1.0, 1.5)])
def test_the_bound_is_an_upper_bound_and_tight_for_small_spread(rho: float, excess: float) -> None:
    x, y = floats(5), labels()
    found = {}
    for norms in ("exact", "bound"):
        module = network(rho, norms)
        draw_(module, torch.Generator().manual_seed(3), 4)
        total = torch.zeros(size_of(module), dtype=torch.float64)
        found[norms] = clipped_sum(module, classes, x, y, clip=1e-3, out=total)
        assert total.norm() <= 1e-3 * len(x)
    assert (found["bound"] >= found["exact"]).all()
    assert (found["bound"] <= found["exact"] * (1 + excess)).all()


@pytest.mark.parametrize(("spread", "excess"), [(0.0, 1e-12), (0.1, 0.1), (1.0, 1.5)])
def test_the_bound_for_learnt_variances_is_an_upper_bound_and_exact_for_equal_ones(
    spread: float, excess: float
) -> None:
    """The largest variance of each output stands for all: a mean in its place, or another axis, would fall below."""
    x, y = floats(5), labels()
    found = {}
    for norms in ("exact", "bound"):
        torch.manual_seed(0)
        options = {"initial_log_variance": 0.0, "norms": norms}
        module = nn.Sequential(
            VariationalDropoutLinear(5, 7, **options),  # type: ignore[arg-type]
            nn.Tanh(),
            VariationalDropoutLinear(7, CLASSES, **options),  # type: ignore[arg-type]
        ).double()
        for layer in (module[0], module[2]):
            assert isinstance(layer, VariationalDropoutLinear)
            layer.weight_log_variance.data.add_(torch.randn(layer.weight_log_variance.shape), alpha=spread)
        draw_(module, torch.Generator().manual_seed(3))
        total = torch.zeros(size_of(module), dtype=torch.float64)
        found[norms] = clipped_sum(module, classes, x, y, clip=1e-3, out=total)
        assert total.norm() <= 1e-3 * len(x)
    assert (found["bound"] >= found["exact"] * (1 - 1e-12)).all()
    assert (found["bound"] <= found["exact"] * (1 + excess)).all()
    assert spread == 0 or (found["bound"] > found["exact"]).all()


def test_different_numbers_of_draws_are_refused() -> None:
    module, x, y = network(), floats(5), labels()
    draw_(module, None, 2)
    first = module[0]
    assert isinstance(first, MeanFieldLinear)
    first.sample_(draws=3)
    with pytest.raises(ValueError, match="draws="):
        clipped_sum(module, classes, x, y, clip=1.0, out=torch.zeros(size_of(module), dtype=torch.float64))


def test_rows_that_do_not_fit_the_draws_are_refused() -> None:
    layer = MeanFieldLinear(5, 3).double().sample_(draws=3)
    with pytest.raises(ValueError, match="fold_draws"):
        layer(floats(5))


def test_a_layer_must_be_sampled_first() -> None:
    with pytest.raises(RuntimeError, match="sample_"):
        MeanFieldLinear(5, 3)(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="draws=0"):
        MeanFieldLinear(5, 3).sample_(draws=0)
    with pytest.raises(ValueError, match="norms="):
        MeanFieldLinear(5, 3, norms="guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layer",
    [
        MeanFieldLinear(4, 3),
        MeanFieldConv2d(2, 3, 3, padding=1),
        VariationalDropoutLinear(4, 3),
        VariationalDropoutConv2d(2, 3, 3, padding=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_at_their_mean_are_ordinary_layers(layer: BayesianLayer) -> None:
    use_mean_(layer)
    flat = layer.weight_mean.dim() == 2  # type: ignore[union-attr, operator]
    x = torch.randn(6, 4) if flat else torch.randn(6, 2, 5, 5)
    bias = layer.bias_mean if hasattr(layer, "bias_mean") else layer.bias
    wanted = F.linear(x, layer.weight_mean, bias) if flat else F.conv2d(x, layer.weight_mean, bias, padding=1)  # type: ignore[arg-type]
    torch.testing.assert_close(layer(x), wanted)
    copy.deepcopy(layer)


@pytest.mark.parametrize("kind", [MeanFieldLinear, VariationalDropoutLinear])
def test_noise_streams_serve_as_generators(kind: type[MeanFieldLinear] | type[VariationalDropoutLinear]) -> None:
    x = torch.randn(6, 4)
    torch.manual_seed(0)
    layer = kind(4, 3)
    same = [layer.sample_(NoiseStream(7))(x) for _ in range(2)]
    other = layer.sample_(NoiseStream(8))(x)
    torch.testing.assert_close(same[0], same[1])
    assert not torch.equal(same[0], other)
    copy.deepcopy(layer.eval())


def test_ordinary_training_works_without_the_engine() -> None:
    """loss.backward() reaches means and rhos; the engine's leaves must not be in the way."""
    module, loss, x, y = ZOO["mean_field_1_draws"].case()
    loss(module(x), y).mean().backward()
    first = module[0]
    assert first.weight_mean.grad.norm() > 0
    assert first.weight_rho.grad.norm() > 0


def test_frozen_means_or_rhos() -> None:
    for frozen in ("weight_mean", "weight_rho", "bias_mean", "bias_rho"):
        module, x, y = network(), floats(5), labels()
        draw_(module, torch.Generator().manual_seed(3), 2)
        first = module[0]
        first.get_parameter(frozen).requires_grad_(False)
        gradients = per_record_gradients(module, classes, x, y)
        found = torch.zeros(gradients.shape[1], dtype=torch.float64)
        norms = clipped_sum(module, classes, x, y, clip=1e6, out=found)
        torch.testing.assert_close(found, gradients.sum(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(norms, gradients.norm(dim=1), rtol=1e-12, atol=0)


def test_log_alpha_marks_weights_that_are_mostly_noise() -> None:
    layer = VariationalDropoutLinear(2, 1, initial_log_variance=0.0)
    nn.init.constant_(layer.weight_mean, 0.1)
    torch.testing.assert_close(layer.log_alpha(), torch.full((1, 2), 2.0 * torch.log(torch.tensor(10.0)).item()))


@pytest.mark.parametrize(
    "name", ["mean_field_words_1_draws", "mean_field_words_4_draws", "mean_field_long_words_4_draws"]
)
def test_tables_with_distributions_go_by_their_rule(name: str) -> None:
    """Not by a copy of the table for every record."""
    module, loss, x, y = ZOO[name].case()
    clipped_sum(module, loss, x, y, clip=1.0, out=torch.zeros(size_of(module), dtype=torch.float64))
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    assert not anatomy.copied


@pytest.mark.parametrize("cache", [1 << 21, 64], ids=["stored", "a channel at a time"])
@pytest.mark.parametrize("frozen", ["", "mean", "rho"])
def test_one_draw_of_a_convolution_has_one_product_for_means_and_rhos(
    frozen: str, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slopes in another order than the patches', or left out of the norm, would be seen."""
    monkeypatch.setattr(convolution, "CACHE_BYTES", cache)
    torch.manual_seed(0)
    layer = MeanFieldConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2, initial_rho=0.5)
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(72, CLASSES)).double()
    for name, value in layer.named_parameters():
        value.requires_grad_(not frozen or frozen not in name)
    draw_(module, torch.Generator().manual_seed(1))
    x, y = torch.randn(7, 4, 6, 6, dtype=torch.float64), torch.arange(7) % CLASSES
    rows = per_record_gradients(module, classes, x, y)
    clip = float(rows.norm(dim=1).median())
    wanted = (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    total = torch.zeros_like(wanted)
    norms = clipped_sum(module, classes, x, y, clip=clip, out=total)
    torch.testing.assert_close(norms, rows.norm(dim=1), rtol=1e-9, atol=0)
    torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-12)
