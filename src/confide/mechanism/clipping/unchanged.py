"""A module as it was when it was looked at, kept so that the next look costs microseconds.

Small networks are asked a thousand times in a second, and going through all that `proven` and `signature_of` read takes
as long as their arithmetic. Both read a layer's type, its attributes, its parameters, buffers, children and hooks, and
the functions of torch that its type relies on; nothing else. So those are compared with what was there, object by
object, before every pass: where all are the same, so is the answer. Where one is not, everything is looked at again.
A layer with an attribute that could change from within (a list, an object of somebody's) is never kept.
"""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from confide.mechanism.clipping.intact import EVERY_MODULE, Place, is_intact
from confide.mechanism.clipping.proven import PLACES

_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What torch keeps in every module beside these: how hooks and files are handled, which no proof reads.
_BESIDE = frozenset(vars(nn.Module())) - {*_HELD, *_HOOKS, "training"}
_FIXED = frozenset((int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size))


class Unchanged:
    """What a module consisted of, for inputs with so many axes; `holds` says whether it still does."""

    def __init__(self, module: nn.Module, x: Any) -> None:
        layers = list(module.modules())
        self.axes = x.dim() if type(x) is Tensor else 0
        self.complete = all(_is_fixed(name, value) for layer in layers for name, value in vars(layer).items())
        self.layers = [_KeptLayer(layer) for layer in layers] if self.complete else []
        found: list[Place] = [*EVERY_MODULE]
        for kind in {type(layer) for layer in layers}:
            found += PLACES.get(kind, ())
        self.places = tuple({(id(place[0]), place[1]): place for place in found}.values())

    def holds(self, x: Any) -> bool:
        if not self.complete or type(x) is not Tensor or x.dim() != self.axes:
            return False
        if _has_any_global_hook() or not is_intact(self.places):
            return False
        for layer in self.layers:  # noqa: SIM110 - a plain loop is quicker
            if not layer.holds():
                return False
        return True


def _is_fixed(name: str, value: Any) -> bool:
    """Whether an attribute is the same as long as it is the same object, or is looked into."""
    if type(value) is tuple:
        return all(type(part) in _FIXED for part in value)
    return (
        type(value) in _FIXED
        or name in _HELD
        or name in _HOOKS
        or name in _BESIDE
        or value is F.relu
        or value is F.gelu
    )


class _KeptLayer:
    """One layer, which is not kept alive by this: an engine must not outlive its module."""

    __slots__ = ("attributes", "empty", "held", "kind", "layer", "names", "tensors", "values")

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.kind = weakref.ref(layer), type(layer)
        self.attributes = layer.__dict__
        self.names, self.values = tuple(self.attributes), tuple(self.attributes.values())
        inner = [self.attributes[name] for name in (*_HELD, *_HOOKS)]
        self.empty = [one for one in inner if not one]
        self.held = [(one, tuple(one), tuple(one.values())) for one in inner if one]
        tensors = [*layer._parameters.values(), *layer._buffers.values()]
        self.tensors = [(one, type(one), one.shape, one.dtype, one.requires_grad) for one in tensors if one is not None]

    def holds(self) -> bool:
        layer, attributes = self.layer(), self.attributes
        if type(layer) is not self.kind or layer.__dict__ is not attributes:
            return False
        if tuple(attributes) != self.names or not all(map(is_, attributes.values(), self.values)):
            return False
        for inner, names, values in self.held:
            if tuple(inner) != names or not all(map(is_, inner.values(), values)):
                return False
        for inner in self.empty:
            if inner:
                return False
        for one, kind, shape, dtype, learns in self.tensors:
            if type(one) is not kind or one._backward_hooks or one.requires_grad is not learns:
                return False
            if one.dtype is not dtype or one.shape != shape:
                return False
        return True
