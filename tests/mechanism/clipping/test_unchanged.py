"""What was proven is looked at again as soon as anything of it is another: by hand, by a hook, in a class of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from confide.mechanism.clipping import clipped_sum, engine
from confide.mechanism.clipping.proven import is_proven
from confide.mechanism.clipping.unchanged import Unchanged
from confide.models.likelihoods import Gaussian

pytestmark = pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
ROUNDING = 1 + 1e-5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()


def total(module: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    clipped_sum(module, Gaussian(1.0).loss, x, x[:, 0].clone(), clip=1.0, out=out)
    return out


def mixing(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x + x.abs().max(), layer.weight, layer.bias)


class Mixing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return mixing(self, x)


def _hook(module: Any) -> None:
    module[0].register_forward_hook(lambda layer, given, output: output * output.abs().max())


def _hook_before(module: Any) -> None:
    module[2].register_forward_pre_hook(lambda layer, given: (given[0] + given[0].abs().max(),))


def _hook_on_gradients(module: Any) -> None:
    module[2].register_full_backward_hook(lambda layer, given, got: given)


def _hook_on_a_weight(module: Any) -> None:
    module[0].weight.register_hook(lambda gradient: gradient)


def _forward(module: Any) -> None:
    module[0].forward = lambda x: mixing(module[0], x)


def _another_class(module: Any) -> None:
    module[0].__class__ = Mixing


def _another_layer(module: Any) -> None:
    module[0] = Mixing(3, 4).double()


def _a_layer_more(module: Any) -> None:
    module.append(Mixing(1, 1).double())


def _another_weight(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))


def _a_weight_of_another_shape(module: Any) -> None:
    module[2].weight.data = torch.ones(4, dtype=torch.float64)


def _in_single_precision(module: Any) -> None:
    module.float()


def _frozen(module: Any) -> None:
    module[0].weight.requires_grad_(False)


def _in_evaluation(module: Any) -> None:
    module.eval()


def _attribute(module: Any) -> None:
    module[1].normalized_shape = (2, 4)


def _compiled(module: Any) -> None:
    module[0]._compiled_call_impl = lambda x: mixing(module[0], x)


CHANGES: list[Callable[[Any], None]] = [
    _hook, _hook_before, _hook_on_gradients, _hook_on_a_weight, _forward, _another_class, _another_layer, _a_layer_more,
    _another_weight, _a_weight_of_another_shape, _in_single_precision, _frozen, _in_evaluation, _attribute, _compiled,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(change: Callable[[Any], None]) -> None:
    module, x = network(), torch.zeros(2, 3, dtype=torch.float64)
    now = Unchanged(module, x)
    assert now.holds(x)
    assert not now.holds(torch.zeros(2, 2, 3, dtype=torch.float64))
    change(module)
    assert not now.holds(x)


@pytest.mark.parametrize("change", [_hook, _hook_before, _forward, _another_class, _another_layer, _compiled])
def test_what_is_changed_between_two_passes_runs_isolated(change: Callable[[Any], None]) -> None:
    """And a keeper that believed the first look is moved by more."""
    module, x = network(), torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[-1] *= 100
    for _ in range(2):
        total(module, x)
    looked = engine.engine_of(module).looked
    assert looked is not None
    assert looked.holds(x)
    change(module)
    assert (total(module, x) - total(module, x[:-1])).norm() <= ROUNDING


def test_a_keeper_that_believes_the_first_look_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = network(), torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[-1] *= 100
    total(module, x)
    monkeypatch.setattr(Unchanged, "holds", lambda self, x: True)
    _hook_before(module)
    assert (total(module, x) - total(module, x[:-1])).norm() > ROUNDING


def test_a_hook_on_every_module_is_noticed() -> None:
    module, x = network(), torch.zeros(2, 3, dtype=torch.float64)
    now = Unchanged(module, x)
    handle = register_module_forward_hook(lambda layer, given, output: None)
    try:
        assert not now.holds(x)
    finally:
        handle.remove()
    assert now.holds(x)


@pytest.mark.parametrize("name", ["weight", "bias", "__getattribute__", "__call__", "_call_impl", "forward"])
def test_what_a_class_of_torch_is_given_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A property in the place of a weight sees the batch in the frames above it."""
    module, x = network(), torch.zeros(2, 3, dtype=torch.float64)
    now = Unchanged(module, x)
    assert is_proven(module, x)
    monkeypatch.setattr(nn.Linear, name, property(lambda self: self._parameters[name]), raising=False)
    assert not now.holds(x)
    monkeypatch.undo()
    assert now.holds(x)


def test_layers_with_attributes_that_change_from_within_are_never_kept() -> None:
    module, x = network(), torch.zeros(2, 3, dtype=torch.float64)
    vars(module[1])["notes"] = []
    assert not Unchanged(module, x).holds(x)


def test_a_module_is_not_kept_alive() -> None:
    module = network()
    total(module, torch.randn(4, 3, dtype=torch.float64))
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
