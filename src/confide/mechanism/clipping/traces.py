"""What a pass may leave behind that a record has broken off: seen beforehand, and put back before anything else runs.

Code that writes to nothing in a whole pass may write in one that ends with an error: in an `except`, on the way out of
a `with`, in a finaliser, or before a step that would have taken it back. Whether there was an error is a fact about all
records of the batch, so every record after it would find a trace of the one that raised. Code of a simple kind cannot
leave any: it works with torch's functions and with numbers, and gives their results names of its own. For all other
code a pass on all records keeps what it can reach, as records do that run one by one (`sealed`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.mechanism.clipping.collection import collect_young, no_collection
from confide.mechanism.clipping.origins import attribute_of, package_of
from confide.mechanism.clipping.putting_back import is_functorch_wrapped
from confide.mechanism.clipping.sealed import Reachable

# Steps that write to something which others can see, or run where an error has been raised.
_WRITING_WORDS = (
    "STORE_GLOBAL DELETE_GLOBAL STORE_NAME DELETE_NAME STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR STORE_SLICE "
    "IMPORT_NAME IMPORT_STAR LOAD_BUILD_CLASS PUSH_EXC_INFO BEFORE_WITH BEFORE_ASYNC_WITH SEND GET_AWAITABLE"
)
_WRITING = frozenset(_WRITING_WORDS.split())
_GIVING = frozenset({"YIELD_VALUE", "RETURN_GENERATOR"})  # state of their own, but where they are used up on the spot
_OF_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_CHANGING_WORDS = (
    "append extend insert remove pop clear sort reverse update setdefault popitem add discard difference_update "
    "intersection_update symmetric_difference_update appendleft extendleft popleft rotate move_to_end data grad set "
    "retain_grad backward register_hook register_post_accumulate_grad_hook numpy storage untyped_storage share_memory"
)
_CHANGING = frozenset(_CHANGING_WORDS.split())
_LOOKING = frozenset({"items", "keys", "values", "get", "index", "count", "join", "startswith", "endswith"})
_OF_TORCH = frozenset[str]().union(
    *(dir(one) for one in (Tensor, torch, F, nn, math, torch.linalg, torch.special, torch.fft)),
    ("functional", "linalg", "special", "fft", "ndim", "T", "mT", "real", "imag"),
)
_SIMPLE_WORDS = (
    "abs all any bool complex dict divmod enumerate float int isinstance len list max min pow range reversed round "
    "slice str sum super tuple zip"
)
_SIMPLE: frozenset[Any] = frozenset(getattr(builtins, word) for word in _SIMPLE_WORDS.split())
_BY_NAME = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_OF_OTHERS = (sys.stdlib_module_names | {"numpy", "confide", "scipy", "sklearn"}) - {
    "math"
}  # may write to what is theirs


class BeforePass:
    """What a pass may reach, as it was before."""

    def __init__(self, module: nn.Module, loss: Any, proven: tuple[bool, bool]) -> None:
        roots = (*(() if proven[0] else (module,)), *(() if proven[1] else (loss,)))
        with no_collection():
            self.seal = Reachable(*roots)

    def put_back(self) -> None:
        """After the error is gone, and with it whatever its frames held: their finalisers may write too."""
        collect_young()
        self.seal.restore()


def may_leave_traces(found: Reachable) -> bool:
    """Whether code that may run could leave something behind in a pass that does not come to its end."""
    search = found.search
    values = [one.value for one in search.seen.values()]
    if search.running.computed or not all(map(_is_simple_value, values)):
        return True
    names = _OF_TORCH.union(_LOOKING, *map(_names_of, values)) - _CHANGING
    return not all(_is_simple(function, names) for function in search.running_functions())


def _names_of(value: Any) -> set[str]:
    """Names of attributes that a value has by itself."""
    if isinstance(value, types.FunctionType):
        return {value.__name__}
    if isinstance(value, nn.Module):
        return {*vars(value), *value._modules, *value._parameters, *value._buffers}
    inner = attribute_of(value, "__dict__", None)
    return set(inner) if isinstance(inner, dict) and not isinstance(value, types.ModuleType) else set()


def _is_simple_value(value: Any) -> bool:
    """Not something that can be called and is neither torch's nor looked through (a method of a list, a partial)."""
    if isinstance(value, types.FunctionType | types.MethodType | types.ModuleType | type | nn.Module | Tensor):
        return True
    if isinstance(value, types.BuiltinFunctionType):
        return value in _SIMPLE or _is_of_torch(value)
    return not callable(value) or is_functorch_wrapped(value) or type(type(value).__call__) is types.FunctionType


def _is_of_torch(function: Any) -> bool:
    owner = function.__self__
    home = owner.__name__ if isinstance(owner, types.ModuleType | type) else str(function.__module__)
    return home == "math" or home.startswith(("torch", "_VariableFunctions"))


def _is_simple(function: types.FunctionType, names: frozenset[str]) -> bool:
    return _is_simple_code(function.__code__, names, function.__globals__)


def _is_simple_code(code: types.CodeType, names: frozenset[str], space: dict[str, Any]) -> bool:
    if not _steps_are_simple(code):
        return False
    for opname, name in _loaded(code):
        if opname in _BY_NAME:
            if not _may_be_named(space.get(name, getattr(builtins, name, None))):
                return False
        elif name not in names or (name.endswith("_") and name != "__init__"):
            return False
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return all(_is_simple_code(one, names, space) for one in inner)


@functools.cache
def _steps_are_simple(code: types.CodeType) -> bool:
    for step in dis.get_instructions(code):
        if step.opname in _WRITING or (step.opname in _GIVING and code.co_name != "<genexpr>"):
            return False
        if step.opname in _OF_CELLS and step.argval in code.co_freevars:
            return False
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return False
    texts = [one for constant in code.co_consts for one in (constant if isinstance(constant, tuple) else (constant,))]
    return not {"out", "inplace"}.intersection(one for one in texts if isinstance(one, str))


@functools.cache
def _loaded(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    asked = (*_BY_NAME, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    return tuple((step.opname, str(step.argval)) for step in dis.get_instructions(code) if step.opname in asked)


def _may_be_named(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return package_of(value) in ("torch", "math")
    if isinstance(value, types.FunctionType):
        return package_of(value) not in _OF_OTHERS
    if isinstance(value, type):
        return value in _SIMPLE or issubclass(value, Exception) or package_of(value) not in _OF_OTHERS
    return _is_simple_value(value)
