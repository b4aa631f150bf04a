"""What cannot be clipped is refused, with the way out, on structural grounds alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import UnclippableError
from confide.mechanism.clipping import clipped_sum
from tests.mechanism.clipping.zoo import ZOO
from tests.mechanism.clipping.zoo_tools import CLASSES, Lambda, classes, floats, labels, plain


def run(module: nn.Module, loss: Callable[..., Tensor], x: Any, y: Any, clip: float = 0.1) -> Tensor:
    size = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    total = torch.zeros(size, dtype=next(module.parameters()).dtype)
    clipped_sum(module, loss, x, y, clip=clip, out=total)
    return total


@pytest.mark.parametrize(
    ("layer", "way_out"),
    [
        (nn.BatchNorm2d(3), "GroupNorm"),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), "GroupNorm"),
        (nn.SyncBatchNorm(3), "GroupNorm"),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), "track_running_stats=False"),
    ],
)
def test_layers_that_mix_records_are_refused(layer: nn.Module, way_out: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 3, 3), layer, nn.Flatten(), nn.Linear(75, CLASSES)).double()
    with pytest.raises(UnclippableError, match=way_out):
        run(module, classes, floats(3, 7, 7), labels())


def test_a_random_slope_is_refused_where_it_draws() -> None:
    """It draws for negative numbers alone: which numbers its neighbours get follows from a record."""
    module = nn.Sequential(nn.Linear(3, CLASSES), nn.RReLU()).double()
    with pytest.raises(UnclippableError, match="PReLU"):
        run(module, classes, floats(3), labels())


def with_slopes(output: Tensor, y: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return classes(output, y) + slope.square().sum(1)


def with_slopes_of_functions(output: Tensor, y: Tensor) -> Tensor:
    return classes(output, y) + torch.func.grad(lambda one: one.square().sum())(output).square().sum(1)


@pytest.mark.filterwarnings("ignore:.*one by one")
def test_a_loss_that_asks_autograd_itself_is_told_the_way_out_which_works() -> None:
    module, x, y = nn.Linear(3, CLASSES).double(), floats(3), labels()
    with pytest.raises(UnclippableError, match=r"torch\.func\.grad"):
        run(module, with_slopes, x, y)
    found = run(module, with_slopes_of_functions, x, y, clip=1e6)
    loss = (classes(module(x), y) + 4 * module(x).square().sum(1)).sum()
    wanted = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
    assert torch.allclose(found, wanted)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_lookups_that_depend_on_other_records_are_refused(options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Embedding(7, CLASSES, **options), nn.Flatten()).double()
    with pytest.raises(UnclippableError, match=next(iter(options))):
        run(module, classes, torch.zeros(5, 1, dtype=torch.long), torch.zeros(5, dtype=torch.long))


def centred(self: Any, x: Tensor) -> Tensor:
    return self.head(x - x.mean(0))


def compared(self: Any, x: Tensor) -> Tensor:
    hidden = self.head(x)
    return hidden - hidden.max(0).values


def sorted_records(self: Any, x: Tensor) -> Tensor:
    return self.head(x).sort(0).values


@pytest.mark.parametrize("forward", [centred, compared, sorted_records])
def test_modules_that_mix_records_are_refused(forward: Callable[..., Tensor]) -> None:
    """Before the first layer only the losses show it; after it also the gradients do."""
    torch.manual_seed(1)  # a largest value that is not the changed record's would hide it
    module, loss, x, y = plain(Lambda(forward, head=nn.Linear(5, CLASSES)), 5)
    with pytest.raises(UnclippableError, match="mixed"):
        run(module.double(), loss, x, y)


def test_losses_that_mix_records_are_refused() -> None:
    def relative_loss(output: Tensor, y: Tensor) -> Tensor:
        values = classes(output, y)
        return values / values.mean().detach()

    module, _, x, y = ZOO["mlp"].case()
    with pytest.raises(UnclippableError, match="mixed"):
        run(module, relative_loss, x, y)


def test_another_loss_is_examined_too() -> None:
    def relative_loss(output: Tensor, y: Tensor) -> Tensor:
        return classes(output, y) * output.mean()

    module, loss, x, y = ZOO["mlp"].case()
    run(module, loss, x, y)
    with pytest.raises(UnclippableError, match="mixed"):
        run(module, relative_loss, x, y)


def test_losses_without_one_value_per_record_are_refused() -> None:
    module, _, x, y = ZOO["mlp"].case()
    with pytest.raises(ValueError, match="one value per record"):
        run(module, lambda output, target: F.cross_entropy(output, target), x, y)


def noisy(self: Any, x: Tensor) -> Tensor:
    return self.head(x * self.scale * torch.from_numpy(self.random.standard_normal(5)))


@pytest.mark.parametrize("trained", [True, False])
def test_randomness_from_outside_of_torch_is_the_same_for_all_records(trained: bool) -> None:
    """Nothing is run twice, so noise that cannot be repeated is fine, also where a bare parameter meets it."""
    layers: dict[str, Any] = {
        "scale": nn.Parameter(torch.ones(5), requires_grad=trained),
        "head": nn.Linear(5, CLASSES),
    }
    module, loss, x, y = plain(Lambda(noisy, **layers), 5)
    module.random = np.random.default_rng(0)  # type: ignore[assignment]
    assert run(module.double(), loss, x, y).norm() > 0


def test_inputs_overwritten_after_the_call_are_noticed() -> None:
    """The first layer's input is gone when its gradient is due; silently using it would give a wrong sum."""

    def forward(self: Any, x: Tensor) -> Tensor:
        copied = x.clone()
        hidden = self.first(copied)
        copied.zero_()
        return self.second(hidden)

    module, loss, x, y = plain(Lambda(forward, first=nn.Linear(5, 5), second=nn.Linear(5, CLASSES)), 5)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        run(module.double(), loss, x, y)


@pytest.mark.parametrize("out", [torch.zeros(3), torch.zeros(0), torch.zeros(10, 10)])
def test_buffers_of_the_wrong_size_are_refused(out: Tensor) -> None:
    module, loss, x, y = ZOO["mlp"].case()
    with pytest.raises(ValueError, match="out="):
        clipped_sum(module, loss, x, y, clip=1.0, out=out)


def test_other_arguments_are_checked() -> None:
    module, loss, x, y = ZOO["mlp"].case()
    out = torch.zeros(sum(parameter.numel() for parameter in module.parameters()), dtype=torch.float64)
    with pytest.raises(ValueError, match="style="):
        clipped_sum(module, loss, x, y, clip=1.0, out=out, style="global")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_budget="):
        clipped_sum(module, loss, x, y, clip=1.0, out=out, memory_budget=0)
    with pytest.raises(ValueError, match="micro_batch="):
        clipped_sum(module, loss, x, y, clip=1.0, out=out, micro_batch=0)
    with pytest.raises(TypeError, match="float32 or float64"):
        clipped_sum(module, loss, x, y, clip=1.0, out=out.half())
