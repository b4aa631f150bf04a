"""Whether torch is as it was when confide was imported, where proven layers and likelihoods rely on it.

A proven layer is believed by its type. That type runs functions of torch by their names, and a name can be given to
another function: attention is often exchanged for a faster one, a convolution for one that wraps around its borders, an
operator for an own kernel. Modes that torch calls around every operation, and hooks on what is saved for the backward
pass, see whole batches too. So all of this is compared, before every step, with what was there at the start.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.library
from torch import Tensor, nn
from torch._functorch import vmap as _torch_vmap
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from confide.errors import Refusal
from confide.mechanism.clipping.origins import names_used

_vmap: Any = _torch_vmap
Place: TypeAlias = tuple[Any, str, Any]
_ABSENT = object()
_OF_EVERY_MODULE = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
_CALLED = types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | type
# Kernels for machines or passes that no clipped sum runs on, and stand-ins that compute shapes.
_ELSEWHERE = ("Meta", "CUDA", "MPS", "XPU", "XLA", "HPU", "PrivateUse1", "Python", "BackendSelect", "Negative")


def relied_on(functions: Iterable[Any]) -> tuple[Place, ...]:
    """Where the functions, and those of torch that they call, find what they use, and what they find there."""
    found: dict[tuple[int, str], Place] = {}
    waiting, seen = [one for one in functions if isinstance(one, types.FunctionType)], set()
    while waiting:
        function = waiting.pop()
        if id(function) not in seen:
            seen.add(id(function))
            for place in _places(function):
                found[id(place[0]), place[1]] = place
                if isinstance(place[2], types.FunctionType) and (place[2].__module__ or "").startswith("torch.nn"):
                    waiting.append(place[2])
    return tuple(found.values())


def _places(function: types.FunctionType) -> Iterator[Place]:
    """The globals of a function, the parts of torch's modules, and methods of tensors that its code names."""
    names = names_used(function.__code__)
    spaces, done = [function.__globals__], set()
    while spaces:
        space = spaces.pop()
        if id(space) in done:
            continue
        done.add(id(space))
        for name in names:
            value = space.get(name, _ABSENT)
            if isinstance(value, types.ModuleType):
                if value.__name__ in ("torch", "torch.nn", "torch.nn.functional"):
                    yield space, name, value
                    spaces.append(vars(value))
            elif isinstance(value, _CALLED):
                yield space, name, value
    for name in names:
        if hasattr(Tensor, name):
            yield Tensor.__dict__, name, Tensor.__dict__.get(name, _ABSENT)


def _of_itself(method: Any) -> set[str]:
    """The attributes that a method asks of the object it belongs to."""
    code = getattr(getattr(method, "fget", method), "__code__", None)
    if code is None or not code.co_argcount:
        return set()
    itself = code.co_varnames[0]
    return {
        str(step.argval)
        for before, step in pairwise(dis.get_instructions(code))
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before.argrepr.rpartition(" ")[2] == itself
    }


def methods_of(kind: type) -> dict[str, Any]:
    """The functions of a class, up to what every module has."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(nn.Module) if nn.Module in kind.__mro__ else -1]):
        found |= {name: value for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    return found


def places_of(kind: type, first: str) -> tuple[Place, ...]:
    """What the function `first` of a class relies on: functions of the class that it may call, and what they use."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module) if nn.Module in kind.__mro__ else -1]
    own = {name: (vars(base), name, value) for base in reversed(bases) for name, value in vars(base).items()}
    names, called = {first, "__iter__", "__getattr__", "__getattribute__"}, dict[str, Place]()
    while True:
        more = [name for name in names if name in own and name not in called]
        if not more:
            break
        for name in more:
            called[name] = own[name]
            if isinstance(own[name][2], types.FunctionType):
                names |= names_used(own[name][2].__code__)
    functions = [place for place in called.values() if isinstance(place[2], types.FunctionType | property)]
    # a class can be given what it did not have: a property in the place of a weight, a way of its own to be called
    asked = {"__getattribute__", *_OF_EVERY_MODULE}.union(*(_of_itself(value) for _, _, value in functions))
    missing = [(vars(base), name) for base in bases for name in asked if name not in vars(base)]
    if nn.Module in kind.__mro__:
        missing += [(vars(nn.Module), name) for name in asked if name not in vars(nn.Module)]
    absent = [(space, name, _ABSENT) for space, name in missing]
    return (*functions, *absent, *relied_on(value for _, _, value in functions))


def is_intact(places: tuple[Place, ...]) -> bool:
    for space, name, value in places:  # noqa: SIM110 - a plain loop is quicker; it runs for every layer at every step
        if space.get(name, _ABSENT) is not value:
            return False
    return True


EVERY_MODULE = tuple((vars(nn.Module), name, vars(nn.Module)[name]) for name in _OF_EVERY_MODULE)
_known_kernels: tuple[int, str] = (-1, "")


def _foreign_kernel() -> str:
    """An operator of torch's own that was given another implementation; looked through when their number changes."""
    global _known_kernels
    kernels: Any = vars(torch.library)["_impls"]
    if len(kernels) != _known_kernels[0]:
        named = (key for key in kernels if key.startswith("aten/") and not key.endswith(_ELSEWHERE))
        _known_kernels = len(kernels), next((key for key in named if key not in _AT_START), "")
    return _known_kernels[1]


_vmap.lazy_load_decompositions()  # rules of torch's own, which it would register at the first vmap
_AT_START = frozenset(vars(torch.library)["_impls"])


def check_surroundings() -> None:
    """Refuse to read records where somebody looks on at every operation."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        modes: list[Any] = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        for mode in modes:
            if type(mode) is not DeviceContext:
                raise Refusal(
                    f"mode={type(mode).__name__}: is called with every operation and would see whole batches; leave it "
                    "before records are read"
                )
    kernel = _foreign_kernel()
    if kernel:
        raise Refusal(f"kernel={kernel}: an operator of torch's own was replaced, and nothing is proven of it; undo it")
    for space, name, value in EVERY_MODULE:
        if space.get(name) is not value:
            raise Refusal(f"torch.nn.Module.{name}: was replaced, and every layer runs through it; undo it")


def uncompiled() -> Any:
    """Compiled functions run as they are written: a compiler would translate the guards with them, and keep what it
    learnt of a record's numbers for the next one. Where nobody has loaded it there is nothing to switch off."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
