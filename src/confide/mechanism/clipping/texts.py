"""Texts of objects without addresses, while records run in processes of their own, or a statistic on all of them.

Where an object lies depends on everything that the process has done so far, also on how many records there are. Python
writes it into the text of any object that has none of its own (`<object at 0x7f...>`), and so do functions, generators,
locks and others. Code that shows objects as texts (an f-string) can hardly be told from code that looks at addresses,
so these texts name the type and nothing else.

How an object is shown is a function in C that its type holds. Those known to write no address stay; all others, and
those of installed packages that ask for `id`, are exchanged, in all types there are, and put back afterwards.
"""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import functools
import itertools
import operator
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from confide._native.process import ForkAwareLock
from confide.mechanism.clipping.origins import is_foreign, names_used

_SHOW = 66  # Py_tp_repr of CPython's <typeslots.h>
_MOST_WORDS = 50  # of memory at the beginning of a type: the function is among the first twenty
_OF_A_WRAPPER = types.WrapperDescriptorType.__basicsize__ // 8  # words of what code finds by `object.__repr__`
# Types whose texts are made of their values, or of the texts of what they hold.
_PLAIN: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, type, super,
    BaseException, type(None), type(Ellipsis), type(NotImplemented), type({}.keys()), types.MappingProxyType,
    types.GenericAlias, types.UnionType, types.SimpleNamespace, types.ModuleType, types.MethodType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    staticmethod, classmethod, collections.deque, collections.defaultdict, collections.OrderedDict, array.array,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal,
    decimal.Context, functools.partial, itertools.count, itertools.repeat, operator.itemgetter, operator.attrgetter,
    operator.methodcaller, re.Pattern, re.Match, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.finfo, torch.iinfo, torch.return_types.max, type(sys.float_info), np.ndarray, np.dtype,
    *(kind for kind in np.sctypeDict.values()), type(np.dtype(float)), np.ufunc,
)  # fmt: skip


def _shown(value: object) -> str:
    try:
        return f"<{type(value).__module__}.{type(value).__qualname__} object>"
    except BaseException:  # nobody could hear of it
        return "<object>"


_Show = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
_show = _Show(_shown)


def _function_of(kind: type) -> int:
    ask = ctypes.pythonapi.PyType_GetSlot
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    return ask(kind, _SHOW) or 0


_word = ctypes.c_void_p.from_address  # of memory, by its address
_INSIDE = ForkAwareLock()


class _OfPython:
    """Shown by a function in Python."""

    def __repr__(self) -> str:
        return ""


@functools.cache
def _place() -> int:
    """Where in a type the function lies, in bytes; 0 if this interpreter's types are made otherwise."""
    wanted = _function_of(object)
    found = [8 * at for at in range(_MOST_WORDS) if _word(id(object) + 8 * at).value == wanted]
    return found[0] if len(found) == 1 and sys.implementation.name == "cpython" else 0


def _all_types() -> list[type]:
    found: dict[int, type] = {}
    waiting: list[type] = [object]
    while waiting:
        kind = waiting.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            waiting += type.__subclasses__(kind)
    return list(found.values())


_ASKING: WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, bool]] = WeakKeyDictionary()


def _asks_for_addresses(kind: type) -> bool:
    function = getattr(kind, "__repr__", None)
    if not isinstance(function, types.FunctionType):
        return False
    code, asks = _ASKING.get(function, (None, False))
    if code is not function.__code__:  # types are many, their functions few
        asks = "id" in names_used(function.__code__) and is_foreign(function)
        _ASKING[function] = function.__code__, asks
    return asks


@contextmanager
def without_addresses() -> Iterator[None]:
    """No text of an object has an address, in this process and in those that are forked from it inside.

    One thread at a time is inside: two would put back each other's.
    """
    with _INSIDE.held():
        yield from _exchanged()


def _exchanged() -> Iterator[None]:
    place, of_object, python = _place(), _function_of(object), _function_of(_OfPython)
    kinds = _all_types() if place else []  # held, so that none goes before it is put back
    plain = {0, None} | {_function_of(kind) for kind in _PLAIN} - {of_object}
    instead = ctypes.cast(_show, ctypes.c_void_p).value
    exchanged: list[tuple[Any, int | None]] = []
    try:
        for kind in kinds:
            word = _word(id(kind) + place)
            before = word.value
            if before in plain or (before == python and not _asks_for_addresses(kind)):
                continue
            exchanged.append((word, before))
            word.value = instead
            if before != of_object or kind is object:
                for inner in _words_of_a_wrapper(kind, before):
                    exchanged.append((inner, before))
                    inner.value = instead
        yield
    finally:
        for word, before in exchanged:
            word.value = before


def _words_of_a_wrapper(kind: type, function: int | None) -> list[Any]:
    """Where code that asks a type for its `__repr__` finds the function."""
    own = vars(kind).get("__repr__")
    if not isinstance(own, types.WrapperDescriptorType):
        return []
    words = [_word(id(own) + 8 * at) for at in range(_OF_A_WRAPPER)]
    return [word for word in words if word.value == function]
