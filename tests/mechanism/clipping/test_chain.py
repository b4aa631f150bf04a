"""The short way of fully connected networks: the same sums as the general way, and only where it is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide._native import arithmetic, loader
from confide.layers.bayesian import MeanFieldLinear, draw_
from confide.mechanism.clipping import chain as chains
from confide.mechanism.clipping import clipped_sum, losses, structure
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.factors import STYLES, Style
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian

RECORDS, FEATURES = 12, 5
Loss = Callable[[Any, Any], Tensor]


def logits(output: Tensor, y: Tensor) -> Tensor:
    return F.softplus(output[:, 0]) - y * output[:, 0]


def classes(count: int) -> Tensor:
    return torch.randint(0, count, (RECORDS,))


def softmax_network(*layers: nn.Module) -> tuple[nn.Module, Loss, Tensor]:
    return nn.Sequential(*layers), Categorical(3).loss, classes(3)


CASES: dict[str, Callable[[], tuple[nn.Module, Loss, Tensor]]] = {
    "logistic": lambda: (nn.Linear(FEATURES, 1), Bernoulli().loss, classes(2)),
    "logistic, a loss of one's own": lambda: (nn.Linear(FEATURES, 1), logits, classes(2)),
    "regression": lambda: (nn.Linear(FEATURES, 1, bias=False), Gaussian(0.3).loss, torch.randn(RECORDS).double()),
    "softmax": lambda: (networks.softmax(FEATURES, 3), Categorical(3).loss, classes(3)),
    "relu": lambda: (networks.mlp(FEATURES, 3, (7, 4)), Categorical(3).loss, classes(3)),
    "relu used twice": lambda: softmax_network(
        nn.Linear(FEATURES, 7), relu := nn.ReLU(inplace=True), nn.Linear(7, 6), relu, nn.Linear(6, 3)
    ),
    "tanh": lambda: softmax_network(nn.Flatten(), nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)),
    "gelu": lambda: softmax_network(nn.Linear(FEATURES, 7), nn.GELU("tanh"), nn.Linear(7, 3)),
    "sigmoid at the end": lambda: softmax_network(nn.Linear(FEATURES, 3), nn.Sigmoid(), nn.Identity()),
}


def make(name: str) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    torch.manual_seed(3)
    module, loss, y = CASES[name]()
    for parameter in module.parameters():
        parameter.data.normal_()
    return module.double(), loss, torch.randn(RECORDS, FEATURES).double(), y


def summed(
    module: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: float = 1.0, style: Style = "flat"
) -> tuple[Tensor, Tensor]:
    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    out = torch.ones(size, dtype=x.dtype)
    norms = clipped_sum(module, loss, x, y, clip=clip, out=out, style=style)
    return norms, out


def used(module: nn.Module) -> bool:
    plan = engine_of(module).anatomy
    assert plan is not None
    return all(examined.chain is not None for examined in plan.examined.values())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CASES)
def test_the_short_way_gives_what_the_general_way_gives(
    name: str, style: Style, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(chains, "clip_kernel", lambda dtype: None)
    module, loss, x, y = make(name)
    clip = summed(module, loss, x, y)[0].median().item()
    short = summed(module, loss, x, y, clip, style)
    assert used(module)
    monkeypatch.setattr(structure, "chain_of", lambda *_: None)
    module, loss, x, y = make(name)
    general = summed(module, loss, x, y, clip, style)
    assert not used(module)
    torch.testing.assert_close(short, general, rtol=1e-12, atol=1e-13)


def wrong_bernoulli(likelihood: Bernoulli, output: Tensor, y: Tensor) -> Tensor:
    return 2 * torch.sigmoid(output) - y.reshape(-1, 1)


def test_a_wrong_closed_form_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examination on made-up records compares with autograd."""
    monkeypatch.setitem(losses.CLOSED_FORMS, Bernoulli.loss, wrong_bernoulli)
    module, loss, x, y = make("logistic")
    found = summed(module, loss, x, y)
    assert not used(module)
    monkeypatch.undo()
    module, loss, x, y = make("logistic")
    torch.testing.assert_close(found, summed(module, loss, x, y), rtol=1e-12, atol=1e-13)


def test_hooks_and_replaced_forwards_end_the_short_way() -> None:
    """Each would be passed over in silence."""

    def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return 2 * output

    module, loss, x, y = make("relu")
    before = summed(module, loss, x, y, clip=1e9)
    assert isinstance(module, nn.Sequential)
    handle = module[-1].register_forward_hook(doubled)
    hooked = summed(module, loss, x, y, clip=1e9)
    handle.remove()
    assert not torch.allclose(before[0], hooked[0])
    torch.testing.assert_close(summed(module, loss, x, y, clip=1e9), before)


@pytest.mark.parametrize("change", ["tied", "frozen", "subclass"])
def test_what_is_no_plain_chain_goes_the_general_way(change: str) -> None:
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))
    if change == "tied":
        network[2].weight = network[0].weight
    elif change == "frozen":
        network[0].weight.requires_grad_(False)
    else:
        network[1] = type("Louder", (nn.ReLU,), {"forward": lambda self, z: 2 * z.relu()})()
    data = torch.randn(RECORDS, FEATURES)
    summed(network, Categorical(FEATURES).loss, data, classes(FEATURES))
    assert not used(network)


@pytest.mark.parametrize("native", [True, False])
def test_records_that_are_not_finite_count_as_zero(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(chains, "clip_kernel", lambda dtype: None)
    module, loss, x, y = make("relu")
    expected = summed(module, loss, x[2:], y[2:])
    x[0, 0], x[1] = math.nan, math.inf
    norms, total = summed(module, loss, x, y)
    assert used(module)
    assert norms[:2].tolist() == [0, 0]
    torch.testing.assert_close((norms[2:], total), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e6, 1e15])
def test_rounding_never_lets_a_norm_exceed_the_bound(scale: float) -> None:
    module = nn.Linear(301, 1)
    for seed in range(20):
        torch.manual_seed(seed)
        x, y = scale * torch.randn(1, 301), torch.zeros(1)
        out = torch.zeros(302)
        clipped_sum(module, lambda output, y: output[:, 0], x, y, clip=0.7, out=out)
        assert out.double().norm().item() <= 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 1, 2, 3), (2, 7, 9, 40), (5, 13, 64, 17), (4, 64, 24, 33), (2, 40, 1, 1)])
def test_native_gram_norms_are_those_of_the_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every pair of positions once for both orders, in and beside the tiles and panels, on one thread and on two."""
    records, positions, outputs, inputs = shape
    torch.manual_seed(0)
    left = torch.randn(records, positions, outputs, dtype=dtype)
    right = torch.randn(records, positions, inputs, dtype=dtype)
    wanted = torch.bmm(left.double().transpose(1, 2), right.double()).square().sum((1, 2))
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found = arithmetic.gram_norms(left, right, 0.0, 0.0)
        torch.set_num_threads(threads)
        if found is None:  # no compiler here: torch does the work
            assert loader.library() is None
            return
        norms, spreads = (values.double() for values in found)
        rtol = 1e-13 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(norms, wanted, rtol=rtol, atol=0)
        sizes = left.double().flatten(1).norm(dim=1) * right.double().flatten(1).norm(dim=1)
        torch.testing.assert_close(spreads, sizes, rtol=rtol, atol=0)
    assert arithmetic.gram_norms(left.transpose(0, 1), right.transpose(0, 1), 0.0, 0.0) is None or 1 in shape[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_native_sums_of_squares(dtype: torch.dtype) -> None:
    """Rows of any length, also where they are part of wider ones; what is not finite stays so."""
    torch.manual_seed(0)
    for entries in (1, 31, 32, 300, 5001):
        values = torch.randn(6, entries + 3, dtype=dtype)[:, 2:-1]
        found = arithmetic.row_squares(values)
        if found is None:
            assert loader.library() is None
            return
        wanted = values.double().square().sum(1)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    poisoned = torch.ones(3, 70, dtype=dtype)
    poisoned[1, 69], poisoned[2, 3] = torch.inf, torch.nan
    found = arithmetic.row_squares(poisoned)
    assert found is not None
    assert torch.isfinite(found).tolist() == [True, False, False]


def test_native_mean_field_weights_are_torchs() -> None:
    """Softplus and sigmoid to a few units in the last place over the whole range, and every draw in its place."""
    rho = torch.linspace(-95, 95, 300_001)
    mean, noise = torch.zeros_like(rho), torch.ones(2, *rho.shape)
    noise[1] = -3
    found = arithmetic.mean_field(mean, rho, noise)
    if found is None:  # no compiler here: torch does the work
        assert loader.library() is None
        return
    deviation, slope = F.softplus(rho.double(), threshold=1000), torch.sigmoid(rho.double())
    kept = rho > -86  # beyond, both are smaller than 1e-37
    for values, wanted in zip(found, (deviation, slope), strict=True):
        torch.testing.assert_close(values[0].double()[kept], wanted[kept], rtol=6e-7, atol=0)
        torch.testing.assert_close(values[1], -3 * values[0], rtol=3e-7, atol=1e-37)


def test_draws_of_float32_layers_match_their_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels and without the same clipped sums, up to rounding."""

    def found() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(MeanFieldLinear(FEATURES, 7, initial_rho=-1.0), nn.ReLU(), MeanFieldLinear(7, 3))
        draw_(module, torch.Generator().manual_seed(1), 2)
        return summed(module, Categorical(3).loss, torch.randn(RECORDS, FEATURES), classes(3), clip=0.5)

    fast = found()
    monkeypatch.setattr("confide.layers.bayesian.mean_field", lambda *_: None)
    torch.testing.assert_close(fast, found(), rtol=1e-4, atol=1e-5)
