"""The tape of one forward pass: what every layer was given, and where its output sits in the autograd graph.

Forward hooks write it. They are registered for the pass and removed after it, so the module is left as it was. Inside a
region (see `isolation`) they look underneath: the axis of the records is known there, not guessed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from confide.data.trees import map_tensors, tensors_in
from confide.layers.drawn import DrawnParameters
from confide.mechanism.clipping.anatomy import Anatomy, Slot, Target
from confide.mechanism.clipping.isolation import Region, outside, unguarded
from confide.mechanism.clipping.rules.drawn import ENDINGS, drawn_name, rule_of_drawn
from confide.mechanism.clipping.rules.registry import find_rule


@dataclass(slots=True)
class TapedCall:
    """One call of a layer as it happened.

    `rows`: tensors are (records, rows, ...), not (records, ...); then `axes` says where the records are in each output,
    None for a batch in which the rows of a record lie apart, draws running slower than records.
    """

    slot: Slot
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    edges: list[GradientEdge | None]
    sizes: list[int]
    version: int
    captured: Any
    rows: bool = False
    axes: list[int] | None = None
    nodes: list[Node] = field(default_factory=list)
    passed: dict[Node, list[Node]] = field(default_factory=dict)  # pieces that this call stands for, to their inputs


class Tape:
    """Entries in the order of the calls."""

    def __init__(self, anatomy: Anatomy, records: int, region: Region | None = None) -> None:
        self.anatomy, self.records, self.region = anatomy, records, region
        self.entries: list[TapedCall] = []
        self.handles: list[Any] = []
        self.beneath = False
        self.drawn: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear every layer of the anatomy; those that hide their linear maps get the forward that shows them."""
        try:
            for slot in self.anatomy.heard:
                self.handles.append(self._listen(slot))
            with self.explicit_forwards() if self.anatomy.explicit else nullcontext():
                yield
        finally:
            for handle in self.handles:
                handle.remove()

    @contextmanager
    def explicit_forwards(self) -> Iterator[None]:
        with ExitStack() as stack:
            for slot in self.anatomy.slots:
                if slot.explicit is not None:
                    forward = partial(slot.explicit.forward, _Maps(self), slot.layer)
                    whole = self.region is not None and slot.explicit.at_once(slot.layer)
                    stack.enter_context(
                        _swapped(slot.layer, partial(self._at_once, slot, forward) if whole else forward)
                    )
            yield

    def _at_once(self, slot: Slot, forward: Callable[..., Any], inputs: Any, *rest: Any, **more: Any) -> Any:
        """A forward of the engine's own that keeps records apart runs underneath a region, where it is faster."""
        region, weights = self.region, slot.layer._parameters.values()
        assert region is not None
        shared = all(value is None or region.axis(value) is None for value in weights)
        single = isinstance(inputs, Tensor) and inputs.dim() == 3 and len(inputs) == 1
        if rest or more or not single or not shared or region.axis(inputs) is None:
            return forward(inputs, *rest, **more)
        with unguarded():
            self.region, self.beneath = None, True
            given = region.stacked(inputs).squeeze(1)
            try:
                with outside():
                    output, states = forward(given)
            finally:
                self.region, self.beneath = region, False
            ends = map_tensors(lambda state: region.wrap(state.transpose(0, 1).unsqueeze(2)), states)
            return region.wrap(output.unsqueeze(1)), ends

    def _listen(self, slot: Slot) -> Any:
        assert slot.rule is not None
        capture = slot.rule.capture

        def heard(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            return self._write(slot, inputs, keywords, output, None if capture is None else capture(layer))

        # first in line, so that hooks of the user that change the output come after
        return slot.layer.register_forward_hook(heard, prepend=True, with_kwargs=True)

    def _write(self, slot: Slot, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any, captured: Any) -> Any:
        """Remember the call; what is returned, unless None, is the output as the module shall see it."""
        if self.region is not None:
            with unguarded():
                return self._write_isolated(self.region, slot, inputs, keywords, output, captured)
        outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
        if any(edge is not None for edge in edges):
            sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
            rows = self.anatomy.draws > 1
            entry = TapedCall(slot, inputs, keywords, edges, sizes, _version(inputs), captured, rows)
            if self.beneath:
                entry.nodes = [tensor.grad_fn for tensor in tensors_in(inputs) if tensor.grad_fn is not None]
            self.entries.append(entry)
        return None

    def _write_isolated(
        self,
        region: Region,
        slot: Slot,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
        captured: Any,
    ) -> Any:
        seen = None
        if any(region.axis(tensor) is None and tensor.requires_grad for tensor in tensors_in(output)):
            # one output for all records, such as an embedding of positions: to each its own
            output = seen = map_tensors(lambda tensor: _given_to_each(region, tensor), output)
        outputs = tensors_in(output)
        underneath = [region.underneath(tensor) for tensor in outputs]
        edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in underneath]
        if any(edge is not None for edge in edges):
            sizes = [tensor.numel() * tensor.element_size() for tensor in underneath]
            given = tensors_in((inputs, keywords))
            nodes = [node for tensor in given if (node := region.underneath(tensor).grad_fn) is not None]
            inputs, keywords, captured = map_tensors(region.stacked, (inputs, keywords, captured))
            axes = [region.axis(tensor) or 0 for tensor in outputs]
            entry = TapedCall(slot, inputs, keywords, edges, sizes, _version(inputs), captured, True, axes, nodes)
            self.entries.append(entry)
        return seen

    def arranged(self, entry: TapedCall, position: int, gradient: Tensor) -> Tensor:
        """The gradient of an output with the records first."""
        if entry.axes is not None:
            return gradient.movedim(entry.axes[position], 0)
        return self.records_first(gradient) if entry.rows else gradient

    def records_first(self, values: Tensor) -> Tensor:
        """(draws x records, ...) as (records, draws, ...)."""
        return values.reshape(self.anatomy.draws, self.records, *values.shape[1:]).transpose(0, 1)

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
        values = {local: _rows(self._value(layer, name), part) for local, (name, part) in places.items()}
        output = _linear(inputs, values["weight"], values.get("bias"))
        slot = self._part(layer, places)
        seen = self._write(slot, (inputs,), {}, output, None) if slot.targets else None  # otherwise all is frozen
        return output if seen is None else seen

    def _value(self, layer: nn.Module, name: str) -> Tensor:
        """A parameter of the layer, or of one inside it; drawn once in a pass."""
        *path, last = name.split(".")
        owner = layer.get_submodule(".".join(path))
        if not isinstance(owner, DrawnParameters) or last not in owner.drawn_names:
            found: Tensor = getattr(owner, last)  # or the copy that every record has of it
            return found
        if (id(owner), last) not in self.drawn:
            self.drawn[id(owner), last] = owner.drawn_value(last)
        return self.drawn[id(owner), last]

    def added(
        self,
        layer: nn.Module,
        inputs: Tensor,
        weight: str,
        bias: str | None,
        onto: Tensor,
        pieces: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """One entry for a linear map of many pieces."""
        places: dict[str, tuple[str, tuple[int, int] | None]] = {"weight": (weight, None)}
        if bias is not None:
            places["bias"] = (bias, None)
        slot = self._part(layer, places)
        if slot.targets:
            self._write(slot, (inputs,), {}, onto, None)
            self.entries[-1].passed = {
                made: [] if given is None else [given]
                for made, given in (map(self._node, piece) for piece in pieces)
                if made is not None
            }

    def _node(self, tensor: Tensor) -> Node | None:
        with unguarded():
            return (tensor if self.region is None else self.region.underneath(tensor)).grad_fn

    def _part(self, layer: nn.Module, places: dict[str, tuple[str, tuple[int, int] | None]]) -> Slot:
        """The slot of one linear map inside a layer."""
        key = (id(layer), *places.values())
        if key not in self.anatomy.parts:
            whole = next(slot for slot in self.anatomy.slots if slot.reference() is layer)
            targets = {
                local + ending: Target(whole.targets[name + ending].parameter, part)
                for local, (name, part) in places.items()
                for ending in ENDINGS
                if name + ending in whole.targets
            }
            rule = find_rule(_LINEAR, frozenset(map(drawn_name, targets)))
            if rule is not None and not targets.keys() <= places.keys():
                rule = rule_of_drawn(rule, partial(_slope, places))
            self.anatomy.parts[key] = Slot(weakref.ref(layer), rule, targets, whole.group)
        return self.anatomy.parts[key]


class _Maps:
    """What an explicit forward is given to make its linear maps with."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.added = tape, tape.added

    @property
    def at_once(self) -> bool:
        return self.tape.beneath

    def __call__(self, *given: Any) -> Tensor:
        return self.tape.linear(*given)


def _slope(places: dict[str, tuple[str, tuple[int, int] | None]], layer: nn.Module, local: str) -> Tensor:
    """Of what a linear map inside the layer has drawn."""
    (name, part) = places[local]
    *path, last = name.split(".")
    owner: Any = layer.get_submodule(".".join(path))
    return _rows(owner.drawn_slope(last), part)


def _given_to_each(region: Region, tensor: Tensor) -> Tensor:
    return tensor if region.axis(tensor) is not None else region.wrap(region.stacked(tensor))


def _rows(parameter: Tensor, part: tuple[int, int] | None) -> Tensor:
    found = parameter if part is None else parameter[part[0] : part[1]]
    return found.flatten(0, 1) if found.dim() == 3 else found  # of a stack of matrices


def _version(inputs: tuple[Any, ...]) -> int:
    return inputs[0]._version if inputs and isinstance(inputs[0], Tensor) else 0


def check_unchanged(entry: TapedCall) -> None:
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


_linear = F.linear  # as it was when confide was imported
_LINEAR = nn.Linear(1, 1, device=torch.device("meta"))
