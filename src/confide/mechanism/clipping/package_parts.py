"""What user code may write to inside of torch, numpy and the standard library, by the names that stand in the code.

Their state is their own, and is not searched. But a list, a dictionary, an object or a function of theirs that user
code names can be written to like one of its own (torch.nn.Linear.__constants__, keyword.kwlist), and is put back like
one. So is what a function of theirs that it names may register something with (hooks on all modules, distributions).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from confide.mechanism.clipping.containers import CONTAINERS, contents_of, restore_container
from confide.mechanism.clipping.origins import MADE_IN_C, attribute_of, is_known, names_outside, names_used
from confide.mechanism.clipping.putting_back import OF_FUNCTIONS, attributes_of, put_back_names, quietly, set_attributes
from confide.mechanism.clipping.unsealable import is_loose

DEPTH, MOST = 1, 2_000  # functions that a function calls, and entries of what it may write to: beyond, they are tables
_OF_EVERYBODY: tuple[type, ...] = (Tensor, nn.Parameter, nn.Module)  # classes that code meets without naming them


def parts_put_back(owners: Iterable[Any], names: Collection[str]) -> list[Callable[[], bool]]:
    """How to put back what stands in these modules, classes and functions under such names, and what stands in that."""
    undo: list[Callable[[], bool]] = [partial(put_back_names, kind, dict(vars(kind))) for kind in _OF_EVERYBODY]
    counted = RemovableHandle.next_id  # of all hooks there were; our own count too
    undo.append(lambda: quietly(setattr, RemovableHandle, "next_id", counted))
    waiting, seen, registers = [*owners, *_OF_EVERYBODY], set[int](), dict[int, Any]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen or (isinstance(owner, types.ModuleType) and is_loose(owner)):
            continue
        seen.add(id(owner))
        if isinstance(owner, types.FunctionType):
            undo += _function_put_back(owner)
            registers |= {id(one): one for one in _registers_of(owner, DEPTH)}
            continue
        space = attribute_of(owner, "__dict__", {})
        for name in [name for name in space if name in names]:
            value = space[name]
            if isinstance(value, CONTAINERS):
                undo.append(partial(restore_container, value, contents_of(value)))
            elif isinstance(value, type):
                undo.append(partial(put_back_names, value, dict(vars(value))))
                waiting += value.__mro__
            elif isinstance(value, staticmethod | classmethod):
                waiting.append(value.__func__)
            elif isinstance(value, types.FunctionType):
                waiting.append(value)
            elif not isinstance(value, types.ModuleType | Tensor):
                inner = attribute_of(value, "__dict__", None)
                if isinstance(inner, dict):
                    undo.append(partial(restore_container, inner, contents_of(inner)))
                    waiting.append(value)
    return [*undo, *map(_register_put_back, registers.values())]


def _function_put_back(function: types.FunctionType) -> list[Callable[[], bool]]:
    inner = vars(function)
    return [
        partial(set_attributes, function, attributes_of(function, OF_FUNCTIONS)),
        partial(restore_container, inner, contents_of(inner)),
    ]


def _register_put_back(register: Any) -> Callable[[], bool]:
    """A package may well remember something of its own: put back, but no reason to be slow."""
    if isinstance(register, type):
        return partial(quietly, put_back_names, register, dict(vars(register)))
    return partial(quietly, restore_container, register, contents_of(register))


def _registers_of(function: types.FunctionType, depth: int) -> Iterator[Any]:
    """What a function of a package, or one that it calls, may write to: lists, dictionaries, classes that it names."""
    space = function.__globals__
    found = [space.get(name) for name in names_outside(function.__code__)]
    for module in [one for one in found if isinstance(one, types.ModuleType) and one is not sys and is_known(one)]:
        found += [vars(module).get(name) for name in names_used(function.__code__)]
    for value in found:
        if isinstance(value, type):
            if not value.__flags__ & MADE_IN_C and is_known(value):
                yield value
        elif isinstance(value, CONTAINERS):
            if len(value) < MOST and value is not sys.modules:
                yield value
        elif type(value) is types.FunctionType and depth and is_known(value):
            yield from _registers_of(value, depth - 1)


def hooks_on_all_modules() -> list[Any]:
    """What is called with every module, whoever asked for it."""
    home = vars(nn.modules.module)
    return [home[name] for name in home if name.startswith("_global_") and home[name] and isinstance(home[name], dict)]
