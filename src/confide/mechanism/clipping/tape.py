"""The tape of one forward pass: what every layer was given, and where its output sits in the autograd graph.

Forward hooks write it. They are registered for the pass and removed after it, so the module is left as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from confide.mechanism.clipping.anatomy import Anatomy, Slot, Target, spread_over
from confide.mechanism.clipping.layout import tensors_in
from confide.mechanism.clipping.rules.randomness import KeptRandomness
from confide.mechanism.clipping.rules.registry import find_rule


@dataclass(slots=True)
class Entry:
    """One call of a layer as it happened."""

    slot: Slot
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    shapes: list[torch.Size]
    edges: list[GradientEdge | None]
    version: int
    captured: Any
    draws: tuple[int, int] = (0, 0)


class Tape:
    """Entries in the order of the calls; `active` is false while layers are run again for the fallback."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.entries: list[Entry] = []
        self.active = False
        self.random: KeptRandomness | None = None
        self.handles: list[Any] = []
        self.records = 0

    def drawn(self, entry: Entry) -> list[Tensor]:
        """The random draws made during a call that may be run again."""
        return [] if self.random is None else self.random.values[slice(*entry.draws)]

    def start(self, records: int) -> None:
        """Listen to the layers of the anatomy while so many records, each under all draws, run through the module."""
        self.records = records
        self.handles = [self._listen(slot) for slot in self.anatomy.heard]
        self.active = True

    def stop(self) -> None:
        self.active = False
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def explicit_forwards(self) -> Iterator[None]:
        """Give the layers that hide their linear maps the forward that shows them."""
        with ExitStack() as stack:
            for slot in self.anatomy.slots:
                if slot.explicit is not None:
                    stack.enter_context(_swapped(slot.layer, partial(slot.explicit.forward, self.linear, slot.layer)))
            yield

    def _listen(self, slot: Slot) -> Any:
        if slot.rule is None:
            return _Replayable(self, slot)
        capture = slot.rule.capture

        def heard(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            if not self.active:
                return None
            given, made = (inputs, output) if slot.spread is None else self._spread(slot.spread, inputs, output)
            self._write(slot, given, keywords, made, None if capture is None else capture(layer))
            return None if slot.spread is None else made

        # first in line, so that hooks of the user that change the output come after
        return slot.layer.register_forward_hook(heard, prepend=True, with_kwargs=True)

    def _spread(self, axes: int, inputs: tuple[Any, ...], output: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """A call that serves all records, as if each of them had made it."""
        given = tuple(spread_over(self.records, value, min(axes, 0)) for value in inputs)
        return given, spread_over(self.records, output, axes)

    def copies(self, leaves: bool) -> dict[str, Tensor]:
        """Parameters of which every record has a copy, recorded like outputs of layers."""
        given = {}
        for slot in self.anatomy.copied:
            ((name, target),) = slot.targets.items()
            value = self.anatomy.parameters[target.parameter]
            axes = slot.spread if slot.spread is not None else 0
            copy = spread_over(self.records, value.detach() if leaves else value, axes)
            given[name] = copy.requires_grad_() if leaves else copy
            self._write(slot, (), {}, given[name], None)
        return given

    def _write(
        self, slot: Slot, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any, captured: Any
    ) -> Entry | None:
        if isinstance(output, Tensor):  # the ordinary case, without detours
            if not output.requires_grad:
                return None
            edges: list[GradientEdge | None] = [get_gradient_edge(output)]
            shapes = [output.shape]
        else:
            outputs = tensors_in(output)
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
            if not any(edges):
                return None
            shapes = [tensor.shape for tensor in outputs]
        entry = Entry(slot, inputs, keywords, shapes, edges, _version(inputs), captured)
        self.entries.append(entry)
        return entry

    def linear(
        self,
        layer: nn.Module,
        inputs: Tensor,
        weight: str,
        bias: str | None,
        rows: tuple[int, int] | None = None,
        bias_rows: tuple[int, int] | None = None,
    ) -> Tensor:
        """A linear map of an explicit forward, recorded like a layer of its own."""
        places = {"weight": (weight, rows)}
        if bias is not None:
            places["bias"] = (bias, bias_rows or rows)
        values = {local: _rows(layer.get_parameter(name), part) for local, (name, part) in places.items()}
        output = F.linear(inputs, values["weight"], values.get("bias"))
        if self.active:
            slot = self._part(layer, places)
            if slot.targets:  # otherwise all of it is frozen
                self._write(slot, (inputs,), {}, output, None)
        return output

    def _part(self, layer: nn.Module, places: dict[str, tuple[str, tuple[int, int] | None]]) -> Slot:
        """The slot of one linear map inside a layer."""
        key = (id(layer), *places.values())
        if key not in self.anatomy.parts:
            whole = next(slot for slot in self.anatomy.slots if slot.reference() is layer)
            targets = {
                local: Target(whole.targets[name].parameter, part)
                for local, (name, part) in places.items()
                if name in whole.targets
            }
            rule = find_rule(_LINEAR, frozenset(targets))
            self.anatomy.parts[key] = Slot(weakref.ref(layer), rule, targets, whole.group)
        return self.anatomy.parts[key]


def _rows(parameter: Tensor, part: tuple[int, int] | None) -> Tensor:
    return parameter if part is None else parameter[part[0] : part[1]]


class _Replayable:
    """Hooks of a layer that may be run again: they also note which random draws belong to the call."""

    def __init__(self, tape: Tape, slot: Slot) -> None:
        self.tape, self.slot = tape, slot
        self.starts: list[int] = []
        layer = slot.layer
        self.handles = [
            layer.register_forward_pre_hook(self.before),
            layer.register_forward_hook(self.after, prepend=True, with_kwargs=True),
        ]

    def before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        random = self.tape.random
        self.starts.append(0 if random is None else len(random.values))

    def after(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        start = self.starts.pop()
        if not self.tape.active:
            return
        entry = self.tape._write(self.slot, inputs, keywords, output, None)
        random = self.tape.random
        if entry is not None and random is not None:
            entry.draws = (start, len(random.values))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _version(inputs: tuple[Any, ...]) -> int:
    return inputs[0]._version if inputs and isinstance(inputs[0], Tensor) else 0


def check_unchanged(entry: Entry) -> None:
    """A layer's input that was overwritten after the call is lost, as it would be for ordinary autograd."""
    if _version(entry.inputs) != entry.version:
        name = type(entry.slot.layer).__name__
        raise RuntimeError(f"{name}: its input was changed in place after the call; use the out-of-place operation")


@contextmanager
def _swapped(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


_LINEAR = nn.Linear(1, 1, device=torch.device("meta"))
