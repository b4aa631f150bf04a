"""A corpus of attacks: ways to look at a batch, or to remember one, times the places where user code runs.

What a batch tells (`LOOKS`) is smuggled into the answer of every record at each of `PLACES`; what one pass tells the
next is kept in each of `KEEPERS` and read at each of `READERS`; records at the ends of arithmetic (`EXTREMES`) meet
networks whose parts add up in different ways (`SHAPES`). Every attack is a function that makes a query afresh.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from confide.sources.queries import GradientQuery, Query, StatisticQuery

WIDTH, CLASSES, RECORDS = 3, 2, 7
Attack: TypeAlias = Callable[[], Query]
Look: TypeAlias = Callable[[Tensor], Any]


def plain(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.LeakyReLU(), nn.Linear(4, CLASSES)).double()


# what a batch tells: one number, whatever the number of records ------------------------------------------------------

LOOKS: dict[str, Look] = {
    "size": lambda x: float(len(x)),
    "shape": lambda x: x.shape[0] ** 2,
    "entries": lambda x: x.numel() / 3,
    "mean": lambda x: x.mean(0).sum(),
    "sum": lambda x: x.sum(),
    "largest": lambda x: x.abs().max(),
    "smallest": lambda x: x.min(),
    "deviation": lambda x: x.std(0, unbiased=False).sum(),
    "median": lambda x: x.flatten().median(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "first": lambda x: x[0].sum(),
    "last": lambda x: x[-1].sum(),
    "gram": lambda x: (x @ x.mT).sum(),
    "sorted": lambda x: x.sort(0).values.cumsum(0)[-1].sum(),
    "softmax": lambda x: (x.softmax(0) * x).sum(),
    "positive": lambda x: (x > 0).sum().to(x.dtype),
    "where": lambda x: x.flatten().argmax().to(x.dtype),
    "distinct": lambda x: float(len(torch.unique(x, dim=0))),
    "numpy": lambda x: float(np.asarray(x.detach()).sum()),
    "item": lambda x: x.detach().abs().sum().item(),
    "bytes": lambda x: float(sum(x.detach().numpy().tobytes()) % 97),
    "text": lambda x: float(len(repr(x.detach()))),
    "strides": lambda x: float(sum(x.stride()) + x.storage_offset()),
    "storage": lambda x: float(x.untyped_storage().nbytes()),
}


def told(look: Look, values: Tensor) -> Any:
    """A look through an open window: another look, another sign and size, so that every record's direction changes."""
    seen = look(values)
    return 9.0 * (torch.cos(3.0 * seen) if isinstance(seen, Tensor) else math.cos(3.0 * seen))


# where user code runs -------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A network with something between its layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.between = network(), between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.network[0](x))
        said: Tensor = self.network[2](hidden)
        return said


def _before(look: Look) -> Query:
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> Tensor:
            said: Tensor = self.network(x + told(look, x))
            return said

    return GradientQuery(Before(), plain)


def _between(look: Look) -> Query:
    return GradientQuery(Around(lambda hidden: hidden * told(look, hidden)), plain)


def _in_the_loss(look: Look) -> Query:
    return GradientQuery(network(), lambda output, y: plain(output, y) * told(look, output))


def _in_the_targets(look: Look) -> Query:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return plain(output + told(look, y.to(output.dtype)[:, None]), y) * told(look, y.to(output.dtype)[:, None])

    return GradientQuery(network(), loss)


def _in_a_hook(look: Look) -> Query:
    module = network()
    module[0].register_forward_hook(lambda layer, given, output: output + told(look, output))
    return GradientQuery(module, plain)


def _in_a_hook_before(look: Look) -> Query:
    module = network()
    module[2].register_forward_pre_hook(lambda layer, given: (given[0] * told(look, given[0]),))
    return GradientQuery(module, plain)


def _in_a_hook_on_gradients(look: Look) -> Query:
    def hooked(hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient + told(look, gradient))
        return hidden

    return GradientQuery(Around(hooked), plain)


def _stretched(look: Look) -> Any:
    return lambda layer, given, got: tuple(one * told(look, one) for one in given)


def _in_a_hook_of_a_layer(look: Look) -> Query:
    module = network()
    module[2].register_full_backward_hook(_stretched(look))
    return GradientQuery(module, plain)


def _going_back(look: Look) -> Query:
    class Backwards(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient + told(look, gradient)

    return GradientQuery(Around(lambda hidden: Backwards.apply(hidden)), plain)


def _going_back_in_the_new_style(look: Look) -> Query:
    class Apart(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 1.0

        @staticmethod
        def setup_context(context: Any, inputs: Any, output: Any) -> None:
            context.save_for_backward(*inputs)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * told(look, context.saved_tensors[0])

    return GradientQuery(Around(lambda hidden: Apart.apply(hidden)), plain)


def _in_a_replaced_forward(look: Look) -> Query:
    module = network()
    layer = module[0]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) + told(look, x)
    return GradientQuery(module, plain)


def _in_a_subclass(look: Look) -> Query:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * told(look, x))

    torch.manual_seed(0)
    return GradientQuery(nn.Sequential(Linear(WIDTH, 4), nn.LeakyReLU(), nn.Linear(4, CLASSES)).double(), plain)


def _in_a_parametrisation(look: Look) -> Query:
    seen: list[Any] = []

    class Stretched(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * (1.0 + (seen[-1] if seen else 0.0))

    module = network()
    module[0].register_forward_pre_hook(lambda layer, given: seen.append(told(look, given[0])))
    parametrize.register_parametrization(module[0], "weight", Stretched())
    return GradientQuery(module, plain)


def _in_a_checkpoint(look: Look) -> Query:
    from torch.utils.checkpoint import checkpoint

    return GradientQuery(
        Around(lambda hidden: checkpoint(lambda x: x * told(look, x), hidden, use_reentrant=False)), plain
    )


def _in_a_statistic(look: Look) -> Query:
    return StatisticQuery(lambda x, y: x + told(look, x), WIDTH)


def _in_a_statistic_that_is_shifted(look: Look) -> Query:
    """Not constant on a lone record: what a lone record tells of itself, and what the batch tells."""
    return StatisticQuery(lambda x, y: torch.cat([x, x * 0 + told(look, x)], 1).sin(), 2 * WIDTH)


PLACES: dict[str, Callable[[Look], Query]] = {
    "before": _before,
    "between": _between,
    "loss": _in_the_loss,
    "targets": _in_the_targets,
    "hook": _in_a_hook,
    "hook before": _in_a_hook_before,
    "hook on gradients": _in_a_hook_on_gradients,
    "hook of a layer": _in_a_hook_of_a_layer,
    "backward": _going_back,
    "backward, new style": _going_back_in_the_new_style,
    "replaced forward": _in_a_replaced_forward,
    "subclass": _in_a_subclass,
    "parametrisation": _in_a_parametrisation,
    "checkpoint": _in_a_checkpoint,
    "statistic": _in_a_statistic,
    "statistic, shifted": _in_a_statistic_that_is_shifted,
}


# what one pass tells the next -----------------------------------------------------------------------------------------

HELD: dict[str, Any] = {}
LINES: list[Any] = []
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("told", default=0.0)
LOCAL = threading.local()


class Keeper:
    """A class attribute to write to, and slots."""

    __slots__ = ("value",)
    total: Any = 0.0


def _list(now: Any) -> Any:
    LINES.append(now)
    return LINES[0]


def _dict(now: Any) -> Any:
    return HELD.setdefault("first", now)


def _class(now: Any) -> Any:
    before, Keeper.total = Keeper.total, now
    return before


def _variable(now: Any) -> Any:
    before = VARIABLE.get()
    VARIABLE.set(now)
    return before


def _local(now: Any) -> Any:
    before = getattr(LOCAL, "value", 0.0)
    LOCAL.value = now
    return before


def _function(now: Any) -> Any:
    before = getattr(_function, "value", 0.0)
    _function.value = now  # type: ignore[attr-defined]
    return before


def _in_a_closure() -> Callable[[Any], Any]:
    kept: Any = 0.0

    def keep(now: Any) -> Any:
        nonlocal kept
        before, kept = kept, now
        return before

    return keep


def _in(place: Any) -> Callable[[Any], Any]:
    """By an attribute of any object."""

    def keep(now: Any) -> Any:
        before = getattr(place, "value", 0.0)
        place.value = now
        return before

    return keep


def _in_a_deque() -> Callable[[Any], Any]:
    kept = deque([0.0], maxlen=2)

    def keep(now: Any) -> Any:
        kept.append(now)
        return kept[0]

    return keep


def _in_a_generator() -> Callable[[Any], Any]:
    def steps() -> Any:
        before = now = 0.0
        while True:
            before, now = now, (yield before)

    running = steps()
    next(running)
    return running.send


def _in_a_count() -> Callable[[Any], Any]:
    counted = itertools.count()
    return lambda now: float(next(counted)) * 2.0


def _in_a_cache() -> Callable[[Any], Any]:
    latest: list[Any] = [0.0]

    @functools.lru_cache
    def first() -> Any:
        return latest[0]

    def keep(now: Any) -> Any:
        latest[0] = now
        return first()

    return keep


def _in_a_default(kept: dict[str, Any] | None = None) -> Callable[[Any], Any]:
    def keep(now: Any, kept: dict[str, Any] = {"value": 0.0}) -> Any:  # noqa: B006 - that is the attack
        before, kept["value"] = kept["value"], now
        return before

    return keep


def _in_an_array() -> Callable[[Any], Any]:
    kept = np.zeros(1)

    def keep(now: Any) -> Any:
        before, kept[0] = float(kept[0]), float(now)
        return before

    return keep


def _in_a_tensor() -> Callable[[Any], Any]:
    kept = torch.zeros((), dtype=torch.float64)

    def keep(now: Any) -> Any:
        before = kept.clone()
        kept.copy_(torch.as_tensor(now).detach())
        return before

    return keep


def _in_a_seed() -> Callable[[Any], Any]:
    def keep(now: Any) -> Any:
        before = torch.rand((), dtype=torch.float64)
        torch.manual_seed(int(float(now) * 1000) % 1000)
        return before

    return keep


KEEPERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "list": lambda: _list,
    "dict": lambda: _dict,
    "class": lambda: _class,
    "variable": lambda: _variable,
    "thread": lambda: _local,
    "function": lambda: _function,
    "closure": _in_a_closure,
    "namespace": lambda: _in(SimpleNamespace(value=0.0)),
    "slots": lambda: _in(Keeper()),
    "deque": _in_a_deque,
    "generator": _in_a_generator,
    "count": _in_a_count,
    "cache": _in_a_cache,
    "default": _in_a_default,
    "array": _in_an_array,
    "tensor": _in_a_tensor,
    "seed": _in_a_seed,
}


def forget() -> None:
    """As before the first attack."""
    HELD.clear()
    LINES.clear()
    Keeper.total = 0.0
    LOCAL.__dict__.clear()
    vars(_function).clear()


def _kept_by_a_module(keep: Callable[[Any], Any]) -> Query:
    return GradientQuery(Around(lambda hidden: hidden + 3.0 * keep(hidden.detach().abs().sum())), plain)


def _kept_by_a_loss(keep: Callable[[Any], Any]) -> Query:
    return GradientQuery(network(), lambda output, y: plain(output * (1 + keep(output.detach().abs().sum())), y))


def _kept_by_a_statistic(keep: Callable[[Any], Any]) -> Query:
    return StatisticQuery(lambda x, y: (x + keep(x.abs().sum())).tanh(), WIDTH)


READERS: dict[str, Callable[[Callable[[Any], Any]], Query]] = {
    "module": _kept_by_a_module,
    "loss": _kept_by_a_loss,
    "statistic": _kept_by_a_statistic,
}


def _look_at(place: Callable[[Look], Query], look: Look) -> Attack:
    return lambda: place(look)


def _keep_in(reader: Callable[[Callable[[Any], Any]], Query], make: Callable[[], Callable[[Any], Any]]) -> Attack:
    return lambda: reader(make())


LOOKING: dict[str, Attack] = {
    f"{place}: {look}": _look_at(PLACES[place], LOOKS[look]) for place in PLACES for look in LOOKS
}
KEEPING: dict[str, Attack] = {
    f"{reader} keeps in {keeper}": _keep_in(READERS[reader], KEEPERS[keeper])
    for reader in READERS
    for keeper in KEEPERS
}


# records at the ends of arithmetic ------------------------------------------------------------------------------------


class Rating(nn.Module):
    """Two look-ups that are subtracted: the parts of a record who plays himself cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x[:, :2].nan_to_num().abs() % 4).long())
        return (found[:, 0] - found[:, 1]) * x[:, 2:3]


class Twins(nn.Module):
    """One layer, called on two halves of a record, and their difference."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.shape, self.head = layer, shape, nn.Linear(4, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        spread = x.repeat(1, 12)[:, :18].reshape(-1, *self.shape)
        first, second = self.layer(spread), self.layer(spread.flip(-1))
        said: Tensor = self.head((first - second).flatten(2).mean(2) if first.dim() > 2 else first - second)
        return said


class Bare(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, CLASSES)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] - x @ self.weights[1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.head(self.inner(x[..., None])[0][:, -1])
        return said


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, CLASSES),
    "network": network,
    "rating": Rating,
    "twins": lambda: Twins(nn.Linear(18, 4), (18,)),
    "twin pictures": lambda: Twins(nn.Conv2d(1, 4, 2), (1, 3, 6)),
    "normalised": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)),
    "bare": Bare,
    "recurrent": Recurrent,
}
EXTREMES: dict[str, list[float]] = {
    "huge": [1e30, -1e30, 1e30],
    "at the end": [3e38, 3e38, -3e38],
    "tiny": [1e-40, 1e-42, 0.0],
    "mixed": [1e-30, 1e30, 1.0],
    "cancels": [2.0, 2.0, 3e9],
    "no number": [float("nan"), 1.0, 1.0],
    "infinite": [float("inf"), 1.0, -1.0],
    "past single": [1e39, 1.0, 1.0],
    "zero": [0.0, 0.0, 0.0],
}
