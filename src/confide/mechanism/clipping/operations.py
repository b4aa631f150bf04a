"""By what a statistic is known: code, and the shapes and types that it holds, whatever their numbers are.

A method makes another function of the same code at every step. What was seen of one holds for the next if both run the
same operations: so what it can reach by its closure is read, functions by their code and networks by their layers.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

from torch import Tensor, nn

DEEP, WIDE = 6, 32
"""Functions that hold functions, and attributes of an object: beyond, only the kind of a thing is read."""


def operations_of(value: Any, depth: int = 0) -> Any:
    """The same for two functions that run the same operations on records of one form, as far as can be read."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        layers = tuple(type(layer) for layer in value.modules())
        return layers, tuple((tuple(one.shape), one.dtype) for one in value.parameters())
    if depth >= DEEP:
        return type(value)
    if isinstance(value, types.MethodType):
        return operations_of(value.__func__, depth), operations_of(value.__self__, depth + 1)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return value.__code__, _all_of(held, depth)
    if isinstance(value, partial):
        return operations_of(value.func, depth), _all_of((*value.args, *value.keywords.values()), depth)
    if isinstance(value, tuple | list):
        return type(value), _all_of(value, depth)
    if isinstance(value, dict):
        return type(value), _all_of(value.values(), depth)
    return type(value), _all_of(getattr(value, "__dict__", {}).values(), depth)


def _all_of(values: Any, depth: int) -> tuple[Any, ...]:
    return tuple(operations_of(value, depth + 1) for value in list(values)[:WIDE])
