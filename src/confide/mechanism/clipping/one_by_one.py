"""The way that is always right: a batch of one record after the other, ordinary autograd, everything put back between.

For code that cannot run on all records at once (see `isolation`): branches on a record's values, .item(), numpy,
gradient hooks, autograd functions of one's own, scripted modules. A record for which it raises counts as zero. What it
prints, logs or warns of private records is dropped (`muted`); on made-up records it is heard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from confide.data.trees import called, map_tensors
from confide.errors import Refusal
from confide.mechanism.clipping import randomness
from confide.mechanism.clipping.collection import collect_young, no_collection
from confide.mechanism.clipping.intact import uncompiled
from confide.mechanism.clipping.isolation import clear, profiled, shows_memory
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.running import Inputs, Loss, folded, records_of
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.unwritten import filled
from confide.mechanism.clipping.watched import watched


def gradients(
    module: nn.Module, parameters: list[nn.Parameter], loss: Loss, x: Inputs, y: Any, draws: int, strict: bool
) -> list[Tensor]:
    """(records, *shape) for every parameter; `strict`: an error is raised, for records that are made up."""

    def of_record(one_x: Any, one_y: Any) -> list[Tensor | None]:
        with torch.enable_grad():
            value = _loss(module, loss, one_x, one_y, draws)
            if not value.requires_grad:
                return [None] * len(parameters)
            return list(torch.autograd.grad(value, parameters, allow_unused=True))

    found = [value.new_zeros(records_of(x), *value.shape) for value in parameters]

    def store(record: int, values: list[Tensor | None]) -> None:
        for place, value in zip(found, values, strict=True):
            if value is not None:
                place[record] = value.detach().to_dense() if value.layout != torch.strided else value.detach()

    for_each((module, loss), of_record, store, x, y, strict)
    return found


def for_each(
    owners: tuple[Any, ...],
    function: Callable[[Any, Any], Any],
    store: Callable[[int, Any], None],
    x: Any,
    y: Any,
    strict: bool = False,
) -> None:
    """store(record, function(x, y)) for every record as a batch of one; what `owners` reach is put back each time."""

    def of_record(record: int) -> Any:
        one_x, one_y = map_tensors(lambda tensor: tensor[record : record + 1].clone(), (x, y))
        return function(one_x, one_y)

    in_turn(owners, records_of(x), of_record, store, strict)


def in_turn(
    owners: tuple[Any, ...],
    count: int,
    function: Callable[[int], Any],
    store: Callable[[int, Any], None],
    strict: bool = False,
) -> None:
    """store(place, function(place)) for every place; one that raises is left out, and none finds what another left."""
    with nullcontext() if strict else muted():
        _in_turn(owners, count, function, store, strict)


def _in_turn(
    owners: tuple[Any, ...], count: int, function: Callable[[int], Any], store: Callable[[int, Any], None], strict: bool
) -> None:
    starts = randomness.seeds(count)
    seal = Reachable(*owners)
    if not strict and count == 1 and seal.unsealable:
        return  # one that raised among all of them: it counts as zero
    seal.check()
    fill = filled if seal.makes_tensors else nullcontext
    with no_collection(), randomness.restored(), uncompiled(), _Written():
        for place in range(count):
            randomness.start_from(starts[place])
            try:
                with fill(), watched():
                    found = copy_context().run(function, place)
                store(place, found)
            except BaseException as error:
                if strict or type(error) is KeyboardInterrupt:
                    raise
            finally:
                # cycles end with their record: the next one finds nobody who refers to what they share, and what
                # their finalisers write is put back
                collect_young()
                seal.restore()
    seal.move_on()


class _Written(TorchFunctionMode):
    """No record finds what another left in memory: new tensors are zero, and none grows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.profiled = profiled()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.resize_, Tensor.resize_as_, torch.resize_as_):
            raise Refusal("module: resizes a tensor in place, which shows memory that others wrote; use torch.zeros")
        if function is Tensor.data_ptr or profiled() is not self.profiled:
            raise Refusal("module: asks where tensors lie, or for a profile, which depends on others; use their values")
        if shows_memory(function, getattr(function, "__name__", ""), args, kwargs or {}):
            raise Refusal(f"module: calls {function.__name__} so that it shows memory that others wrote; slice instead")
        result = function(*args, **kwargs or {})
        clear(function, args, result)
        return result


def _loss(module: nn.Module, loss: Loss, x: Inputs, y: Any, draws: int) -> Tensor:
    inputs, targets = folded(x, draws), folded(y, draws)
    losses = loss(called(module, inputs), targets)
    if not isinstance(losses, Tensor) or losses.numel() != draws:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise Refusal(f"loss: returned {got} for one record; one value per record is needed (reduction='none')")
    return losses.reshape(-1).mean()
