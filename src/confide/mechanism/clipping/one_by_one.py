"""The way that is always right: a batch of one record after the other, ordinary autograd, none finding another's trace.

For code that cannot run on all records at once (see `isolation`): branches on a record's values, .item(), numpy,
gradient hooks, autograd functions of one's own, scripted modules. Simple code runs in this process, with everything put
back between two records (`sealed`); code of which nobody can say what it leaves where runs in a process for each record
(`apart`). A record for which it raises counts as zero. What it prints, logs or warns of private records is dropped
(`muted`); on made-up records it is heard.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from confide.data.trees import called, map_tensors, tensors_in
from confide.errors import Refusal
from confide.mechanism.clipping import randomness
from confide.mechanism.clipping.apart import in_children, rehearsed
from confide.mechanism.clipping.collection import collect_young, no_collection
from confide.mechanism.clipping.intact import uncompiled
from confide.mechanism.clipping.isolation import clear, profiled, shows_memory
from confide.mechanism.clipping.may_run import imported_by
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.places import tell_of_uneven
from confide.mechanism.clipping.running import Inputs, Loss, folded, records_of
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.unwritten import filled
from confide.mechanism.clipping.watched import watched


class SilentApart(Refusal):
    """It answers for made-up records, and for none of them in a process of its own."""


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
    for_each((module, loss), of_record, found, x, y, strict)
    return found


def for_each(
    owners: tuple[Any, ...],
    function: Callable[[Any, Any], Sequence[Tensor | None]],
    found: list[Tensor],
    x: Any,
    y: Any,
    strict: bool = False,
) -> None:
    """Fill the rows of `found`, which are zero, by function(x, y) of every record as a batch of one."""

    def given(record: int) -> Any:
        return map_tensors(lambda tensor: tensor[record : record + 1].clone(), (x, y))

    def store(record: int, values: Sequence[Tensor | None]) -> None:
        for place, value in zip(found, values, strict=True):
            if value is not None:
                place[record] = value.detach().to_dense() if value.layout != torch.strided else value.detach()

    like = [torch.empty(place.shape[1:], dtype=place.dtype, device="meta") for place in found]
    private = [*tensors_in((x, y)), *found]
    in_turn(owners, records_of(x), Asked(given, lambda one: function(*one), like, private), store, strict)


@dataclass(frozen=True)
class Asked:
    """What is asked of every record.

    given      what a place of the order has: records and labels of its own
    function   of that: tensors, or None for zeros
    like       of their shapes and types, whatever they hold
    private    tensors with the records of others
    """

    given: Callable[[int], Any]
    function: Callable[[Any], Sequence[Tensor | None]]
    like: Sequence[Tensor]
    private: Sequence[Tensor] = ()


Store: TypeAlias = Callable[[int, Sequence[Tensor | None]], None]


def in_turn(owners: tuple[Any, ...], count: int, asked: Asked, store: Store, strict: bool = False) -> None:
    """store(place, the answer) for every place; one that raises is left out, and none finds what another left."""
    with nullcontext() if strict else muted():
        _in_turn(owners, count, asked, store, strict)


def why_apart(*owners: Any) -> str:
    """Why records that run one by one run in processes of their own; empty where they do not."""
    return Reachable(*owners).why_apart


def _in_turn(owners: tuple[Any, ...], count: int, asked: Asked, store: Store, strict: bool) -> None:
    starts = randomness.seeds(count)
    seal = Reachable(*owners)
    if not strict and count == 1 and seal.unsealable:
        return  # one that raised among all of them: it counts as zero
    seal.check()
    if seal.makes_sets:  # in what order is not proven
        tell_of_uneven()
    fill = filled if seal.makes_tensors else nullcontext

    def answer(place: int, given: Any) -> Sequence[Tensor | None]:
        randomness.start_from(starts[place])
        with _Written(), fill(), watched():
            return copy_context().run(asked.function, given)

    with no_collection(), uncompiled():
        if strict and seal.lasting:
            rehearsed(lambda: _here(seal, count, asked.given, answer, _nowhere, strict))
        elif strict or not seal.why_apart:
            with randomness.restored():
                _here(seal, count, asked.given, answer, store, strict)
        if seal.why_apart:
            if strict:
                _load(seal)
            tried = in_children(
                1 if strict and not seal.lasting else count, asked.given, answer, asked.like, store, asked.private
            )
            if strict and not tried:
                raise SilentApart(
                    f"module: its records have to run in processes of their own, because it {seal.why_apart}, and "
                    "gives no answer for made-up ones there: no clock, file or thread can be had; use tensors and lists"
                )
    seal.move_on()


def _nowhere(place: int, values: Sequence[Tensor | None]) -> None:
    """What made-up records give in a rehearsal."""


def _load(seal: Reachable) -> None:
    """What functions import when they run is loaded before: in a process of its own no file can be opened."""
    for name in frozenset[str]().union(*(imported_by(one.__code__) for one in seal.search.running_functions())):
        if name not in sys.modules:
            with suppress(Exception):  # it may not be there at all: whoever asks for it says what then
                importlib.import_module(name)


def _here(
    seal: Reachable,
    count: int,
    given: Callable[[int], Any],
    answer: Callable[[int, Any], Any],
    store: Store,
    strict: bool,
) -> None:
    """In this process, everything put back after each."""
    for place in range(count):
        try:
            store(place, answer(place, given(place)))
        except BaseException as error:
            if strict or type(error) is KeyboardInterrupt:
                raise
        finally:
            # cycles end with their record: the next one finds nobody who refers to what they share, and what
            # their finalisers write is put back
            collect_young()
            if not seal.lasting:  # what cannot be put back runs elsewhere
                seal.restore()


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
