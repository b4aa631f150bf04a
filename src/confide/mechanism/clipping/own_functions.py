"""Functions with a backward of their own (`torch.autograd.Function`) inside a region: both ways see one record.

torch would run such a backward on what lies underneath a region, where all records are. So the forward runs in the
region with a context that holds what it keeps, and a node of confide's own stands on the tape in its place. When
autograd comes back to that node it enters a region again, gives every record its part of the gradient and of what was
kept, and runs the backward there, under the same guard. A vmap rule that the function may have never runs.

    inputs    one that all records share (a weight) is given to each; autograd adds up what comes back
    outputs   one that depends on no record is given to each, so that no sum over records reaches the backward
    gradients what a backward is given is its own: norms of layers are taken while autograd is on its way, and what they
              were taken of may not change after it. What it gives back has the shape of the input, record by record:
              torch would add up axes that are too many, and the first one is that of the records
    refused   what writes to its inputs, takes arguments by name, or is called inside of another transform
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction

from confide._native.process import ForkAwareLock
from confide.mechanism.clipping.isolation import INSIDE, NotIsolable, Region, current_region, outside, unguarded

_TORCHS: Any = vars(Function)["apply"]
_apply_of_torch: Any = _TORCHS.__func__


class FunctionContext:
    """What a forward is given to keep things in, and its backward to find them: the part of torch's that is used."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.without_gradient: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Nobody asks for derivatives in that direction."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.without_gradient = outputs

    def mark_dirty(self, *_: Tensor) -> None:
        raise NotIsolable("has a torch.autograd.Function that writes to its inputs")


@dataclass(frozen=True)
class KeptStack:
    """What a forward kept of the records: their stack, and how often it had been written to by then."""

    stack: Tensor
    version: int

    def within(self, region: Region) -> Tensor:
        if self.stack._version != self.version:
            raise NotIsolable("writes to what a torch.autograd.Function has kept for its backward")
        return region.wrap(self.stack.clone())


def _kept(value: Any, region: Region) -> Any:
    """Tensors of a pass as their stacks: those of another pass would be refused."""
    if isinstance(value, Tensor):
        if region.axis(value) is None:
            return value
        stack = region.stacked(value).detach()
        return KeptStack(stack, stack._version)
    return _mapped(value, lambda part: _kept(part, region))


def _seen(value: Any, region: Region) -> Any:
    if isinstance(value, KeptStack):
        return value.within(region)
    return _mapped(value, lambda part: _seen(part, region))


def _mapped(value: Any, change: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(change, value))
    return {name: change(part) for name, part in value.items()} if type(value) is dict else value


@dataclass(frozen=True)
class CalledBack:
    """A call whose backward is still to come.

    kept      what its context held
    outputs   every tensor among them as a stack, None for others
    asked     places of the inputs that need a gradient, and what shape one record has there
    """

    function: Any
    kept: dict[str, Any]
    records: int
    outputs: tuple[Tensor | None, ...]
    asked: dict[int, torch.Size]

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """The gradients of the inputs that need one, as stacks."""
        region = Region(self.records)
        with region.entered():
            context = FunctionContext(())
            with unguarded():
                vars(context).update(_seen(self.kept, region))
                given = [self._given(region, context, *pair) for pair in zip(self.outputs, gradients, strict=True)]
            found = self.function.backward(context, *given)
            each = found if isinstance(found, tuple) else (found,)
            with unguarded():
                shaped = [_shaped(each[place], shape) for place, shape in self.asked.items()]
                return [None if one is None else region.stacked(one) for one in shaped]

    def _given(self, region: Region, context: FunctionContext, output: Tensor | None, gradient: Tensor | None) -> Any:
        if gradient is None and (output is None or not context.materialize_grads):
            return None
        return region.wrap(torch.zeros_like(output) if gradient is None else gradient.clone())  # type: ignore[arg-type]


def _shaped(gradient: Tensor | None, shape: torch.Size) -> Tensor | None:
    """As autograd does it, inside of a region: axes are added up where the input has none."""
    return gradient if gradient is None or gradient.shape == shape else gradient.sum_to_size(shape)


class Bridge(Function):
    """The node on the tape, over stacks of all records."""

    @staticmethod
    def forward(context: Any, call: CalledBack, without: tuple[int, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        context.call = call
        context.set_materialize_grads(False)
        found = tuple(output.view_as(output) for output in call.outputs if output is not None)
        context.mark_non_differentiable(*(found[place] for place in without))
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> Any:
        coming = iter(gradients)
        each = tuple(None if output is None else next(coming) for output in context.call.outputs)
        return None, None, *context.call.backward(each)


def _apply(function: Any, *args: Any, **named: Any) -> Any:
    region = current_region()
    if region is None:
        return _apply_of_torch(function, *args, **named)
    if named:
        raise NotIsolable("gives arguments by name to a torch.autograd.Function")
    needs = tuple(isinstance(one, Tensor) and region.underneath(one).requires_grad for one in args)
    context = FunctionContext(needs)
    asks = torch.is_grad_enabled() and any(needs)
    with torch.no_grad():
        found = _ran(function, context, args)
    if not asks:
        return found
    outputs = found if isinstance(found, tuple) else (found,)
    wrapped = _on_tape(region, function, context, args, outputs)
    return wrapped if isinstance(found, tuple) else wrapped[0]


def _ran(function: Any, context: FunctionContext, args: tuple[Any, ...]) -> Any:
    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(context, *args)
    found = function.forward(*args)
    function.setup_context(context, args, found)
    return found


def _on_tape(
    region: Region, function: Any, context: FunctionContext, args: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The outputs, with a node of confide's own behind them."""
    asked = {place: args[place].shape for place, needed in enumerate(context.needs_input_grad) if needed}
    closed = {id(output) for output in context.without_gradient}
    tensors = [output for output in outputs if isinstance(output, Tensor)]
    without = tuple(
        place
        for place, output in enumerate(tensors)
        if id(output) in closed or not (output.is_floating_point() or output.is_complex())
    )
    with unguarded(), outside():
        kept = {name: _kept(value, region) for name, value in vars(context).items()}
        kept["without_gradient"] = ()
        inputs = [region.stacked(args[place]) for place in asked]
        below = {id(output): region.stacked(output).detach().clone() for output in tensors}
        stacks = tuple(below.get(id(output)) for output in outputs)
        call = CalledBack(function, kept, region.records, stacks, asked)
        bridged = iter(_apply_of_torch(Bridge, call, without, *inputs))
    with unguarded():
        return tuple(region.wrap(next(bridged)) if isinstance(output, Tensor) else output for output in outputs)


class _Regions:
    """How many there are, in all threads."""

    lock = ForkAwareLock()
    count = 0


@contextmanager
def _allowed() -> Iterator[None]:
    """torch's way to call such a function is another one while there is a region, and changed inside of it only."""
    with _Regions.lock.held():
        _Regions.count += 1
        Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        with _Regions.lock.held():
            _Regions.count -= 1
            if not _Regions.count:
                Function.apply = _TORCHS  # type: ignore[method-assign]


def allow_own_functions() -> None:
    """In every region from now on."""
    if _allowed not in INSIDE:
        INSIDE.append(_allowed)
