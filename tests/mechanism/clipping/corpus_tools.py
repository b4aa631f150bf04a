"""More of the corpus: errors that code goes on after, and what torch's own tools make of a module.

An operation that runs on all records raises for all if it raises for one, so that `try` is a look at the batch.
Compilers, scripts, exported programs, transforms and subclasses of tensors each have a way of running functions that is
not Python's. They mix only where a record is far, as no made-up one is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from confide.sources.queries import GradientQuery, Query, StatisticQuery
from tests.mechanism.clipping.corpus import CLASSES, WIDTH, Attack, network, plain

FAR = 8.0


def told(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.where(values.abs().amax() > FAR, 9.0 * torch.cos(3.0 * values.sum()), 1.0)


class Behind(nn.Module):
    """Something behind a network."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.behind = network(), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.network(x), x)


def _behind(behind: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    return lambda: GradientQuery(Behind(behind), plain)


# errors: each operation raises for a record that is far, and for no other -------------------------------------------


def _looked_up(x: Tensor) -> Tensor:
    return torch.ones(4, dtype=x.dtype)[(x[:, 0].abs() > FAR).long() * 9]


def _inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv((x[:, :1, None].abs() < FAR) * torch.eye(2, dtype=x.dtype)).sum((1, 2)) / 2


def _factor(x: Tensor) -> Tensor:
    return torch.linalg.cholesky((FAR - x[:, :1, None].abs()) * torch.eye(1, dtype=x.dtype))[:, 0, 0] * 0 + 1


def _class_of(x: Tensor) -> Tensor:
    said = torch.zeros(len(x), CLASSES, dtype=x.dtype)
    return plain(said, (x[:, 0].abs() > FAR).long() * 9) * 0 + 1


RAISING: dict[str, Callable[[Tensor], Tensor]] = {
    "a look-up": _looked_up,
    "an inverse": _inverse,
    "a Cholesky factor": _factor,
    "a class": _class_of,
}


def _or_else(raising: Callable[[Tensor], Tensor], said: Tensor, x: Tensor) -> Tensor:
    try:
        return said * raising(x)[:, None]
    except Exception:
        return -9.0 * said


def _suppressed(raising: Callable[[Tensor], Tensor], said: Tensor, x: Tensor) -> Tensor:
    found = -9.0 * said
    with suppress(Exception):
        found = said * raising(x)[:, None]
    return found


def _of_a_loss(raising: Callable[[Tensor], Tensor]) -> Attack:
    return lambda: GradientQuery(
        network(), lambda output, y: _or_else(raising, plain(output, y)[:, None], 20 * output.detach())[:, 0]
    )


def _of_a_statistic(raising: Callable[[Tensor], Tensor]) -> Attack:
    return lambda: StatisticQuery(lambda x, y: _or_else(raising, x / 9, x), WIDTH)


GOING_ON: dict[str, Attack] = {
    **{f"goes on after {name}": _behind(functools.partial(_or_else, do)) for name, do in RAISING.items()},
    **{f"suppresses {name}": _behind(functools.partial(_suppressed, do)) for name, do in RAISING.items()},
    **{f"loss goes on after {name}": _of_a_loss(do) for name, do in RAISING.items()},
    **{f"statistic goes on after {name}": _of_a_statistic(do) for name, do in RAISING.items()},
}


# tools ----------------------------------------------------------------------------------------------------------------


def _mixed(said: Tensor, x: Tensor) -> Tensor:
    return said * told(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.network(x)
        if bool(x.abs().max() > 8.0):
            said = said * 9.0 * torch.cos(3.0 * x.sum())
        return said


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.head = nn.GRU(1, 4, batch_first=True).double(), nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.detach().abs() > 0.2).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        states, last = self.read(packed)
        said: Tensor = self.head(last[0] * told(100 * states.data))
        return said


class Mixing(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        linear = function is torch.nn.functional.linear
        return found * told(found.as_subclass(Tensor)) if linear else found  # type: ignore[union-attr, operator]


class Asked:
    """Torch asks it how an operation is done."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * told(100 * args[0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * (1 + self.calls % 3)


def _subclass() -> Query:
    module = network()
    module[0].weight = nn.Parameter(module[0].weight.detach().as_subclass(Mixing))  # type: ignore[arg-type]
    return GradientQuery(module, plain)


def _parametrised() -> Query:
    module = network()
    parametrize.register_parametrization(module[0], "weight", Counting())
    return GradientQuery(module, plain)


def _in_place_compiled() -> Query:
    module = Behind(_mixed)
    module.compile(backend="eager")
    return GradientQuery(module, plain)


def _compiled_inside() -> Query:
    return GradientQuery(Behind(torch.compile(_mixed, backend="eager")), plain)


def _exported() -> Query:
    sizes = ({0: torch.export.Dim("records", min=1, max=100)},)
    example = torch.ones(4, WIDTH, dtype=torch.float64)
    return GradientQuery(torch.export.export(Behind(_mixed), (example,), dynamic_shapes=sizes).module(), plain)


def _recomputed(reentrant: bool) -> Attack:
    def make() -> Query:
        inner = Behind(_mixed)
        return GradientQuery(Behind(lambda said, x: checkpoint(inner, x, use_reentrant=reentrant) + 0 * said), plain)

    return make


def _slope(said: Tensor, x: Tensor) -> Tensor:
    return said + torch.func.grad(lambda values: (values.sin() * told(x)).sum())(x)[:, :CLASSES]


def _rows(said: Tensor, x: Tensor) -> Tensor:
    rows: Tensor = torch.func.vmap(lambda row: row * told(x))(said)
    return rows


TOOLS: dict[str, Attack] = {
    "compiled in place": _in_place_compiled,
    "a compiled function": _compiled_inside,
    "scripted": lambda: GradientQuery(torch.jit.script(Scripted()), plain),
    "traced": lambda: GradientQuery(
        torch.jit.trace(Behind(_mixed), torch.ones(4, WIDTH, dtype=torch.float64)),
        plain,  # type: ignore[no-untyped-call]
    ),
    "exported": _exported,
    "recomputed": _recomputed(False),
    "a slope of its own": _behind(_slope),
    "rows of its own": _behind(_rows),
    "packed": lambda: GradientQuery(Packed(), plain),
    "a subclass of tensors": _subclass,
    "an object that torch asks": _behind(lambda said, x: torch.add(said, Asked())),  # type: ignore[call-overload]
    "a parametrisation that counts": _parametrised,
    "an address": _behind(lambda said, x: said * (x._cdata % 97)),
    "a hash": _behind(lambda said, x: said * (hash(x) % 97)),
}
TOOLED = GOING_ON | {f"tool: {name}": attack for name, attack in TOOLS.items()}
