"""Side doors of backward passes, subclasses, compilers, losses and statistics."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.mechanism.clipping import side_doors
from tests.mechanism.clipping.mixers import CLASSES, WIDTH, Case, Net, plain
from tests.mechanism.clipping.side_doors import DOORS, KEPT, SPACE, case, door, in_a_namespace, rows

# backwards, subclasses, compilers --------------------------------------------------------------------------------


@door(before=False)
def hook_on_a_node(self: Any, x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda inputs, outputs: tuple(g if g is None else g * 1e3 for g in inputs))
    return x


@door(before=False)
def hook_on_several(self: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook([x], lambda found: KEPT.extend(found))
    return x * (1 + len(KEPT))


class Remembering(Tensor):
    total = 0.0

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, kinds, args, kwargs or {})
        if function is torch.mul:
            cls.total += 1.0
            return found * cls.total
        return found


@door()
def subclass_with_memory(self: Any, x: Tensor) -> Tensor:
    return torch.mul(x, torch.ones(1, dtype=x.dtype).as_subclass(Remembering)).as_subclass(Tensor)


class Counting(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        SPACE.total += 1.0
        return weight * SPACE.total


@case
def parametrised_with_memory() -> Case:
    net = Net(lambda self, x: x)
    parametrize.register_parametrization(net.head, "weight", Counting())
    return net, plain


@case
def compiled() -> Case:
    return Net(torch.compile(lambda self, x: x - x.mean(0), backend="eager"), True), plain


@torch.library.custom_op("confide_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.library.register_vmap("confide_tests::centred")
def _centred_vmap(info: Any, axes: Any, x: Tensor) -> tuple[Tensor, int]:
    return x - x.mean(axes[0], keepdim=True), axes[0]


@door()
def operator_with_a_rule_of_its_own(self: Any, x: Tensor) -> Tensor:
    return x + centred(x.detach())


@door()
def work_in_a_thread(self: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x.detach() - x.detach().mean(0)))
    thread.start()
    thread.join()
    return x + found[0]


@door()
def jacobian_inside(self: Any, x: Tensor) -> Tensor:
    return x + torch.func.jacrev(lambda values: values.sum(0))(x).sum((0, 2))[:WIDTH].mean()


# losses ----------------------------------------------------------------------------------------------------------


class Centres(nn.Module):
    """The loss of face recognition that pulls outputs to the running mean of their class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(CLASSES, CLASSES, dtype=torch.float64))
        self.last: Any = None

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        self.centres[y] = 0.5 * self.centres[y] + 0.5 * output.detach()
        self.last = output.detach()
        return plain(output, y) + (output - self.centres[y]).square().sum(1)


class Last:
    """Keeps its last outputs, from some time on."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.calls = itertools.count()

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        if next(self.calls) > 12:
            self.kept.append(output.detach())
        return plain(output, y) * (1 + len(self.kept))


def weighted(counts: dict[int, int], output: Tensor, y: Tensor) -> Tensor:
    for label in y.tolist():
        counts[label] = counts.get(label, 0) + 1
    return plain(output, y) * counts[int(y[0])]


for make in (Centres, Last, lambda: functools.partial(weighted, {})):
    name = f"loss {getattr(make, '__name__', 'partial').replace('<lambda>', 'partial')}"
    DOORS[name] = lambda make=make: (Net(lambda self, x: x), make())
    DOORS[f"{name}, on a chain"] = lambda make=make: (nn.Sequential(nn.Linear(WIDTH, CLASSES)), make())


# statistics ------------------------------------------------------------------------------------------------------


def kept_rows(x: Tensor, y: Tensor) -> Tensor:
    KEPT.append(x)
    return x - KEPT[0]


def rows_in_a_namespace(x: Tensor, y: Tensor) -> Tensor:
    SPACE.kept = x if SPACE.kept is None else SPACE.kept
    return x - SPACE.kept


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kept rows": kept_rows,
    "rows in a namespace": rows_in_a_namespace,
    "resized": lambda x, y: x - x.clone().resize_(3, WIDTH).mean(0),
    "counted classes": lambda x, y: x * torch.bincount(y, minlength=CLASSES).sum(),
    "largest": lambda x, y: x / x.abs().max().item(),
    "number of rows": lambda x, y: x * rows(x),
    "running total": lambda x, y: x - in_a_namespace(x),
    "counter": lambda x, y: x * side_doors.in_an_iterator(x),
    "never written": lambda x, y: x - torch.empty(5 * len(x), WIDTH, dtype=x.dtype).sum(0),
}
