"""Putting things back as they were: what was changed is set again, and whether it was is said."""

from __future__ import annotations

import logging
import operator
import types
import weakref
from array import array as array_type
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from confide.mechanism.clipping.containers import contents_of, restore_container
from confide.mechanism.clipping.settings import clear_levels

ABSENT = object()


def is_functorch_wrapped(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def view_put_back(value: Tensor, storage: torch.UntypedStorage, form: tuple[Any, ...], size: int) -> bool:
    """The memory that a tensor shows, and how: `.data`, `set_` and the like exchange it."""
    if storage.nbytes() != size:
        storage.resize_(size)
    elif value.untyped_storage().data_ptr() == storage.data_ptr() and form_of_view(value) == form:
        return False
    offset, shape, strides, dtype = form
    value.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
    return True


def hooks_put_back(value: Tensor, before: Any, after: Any) -> bool:
    """What is called with a gradient, `before` it is added up and `after`; the contents of both are put back apart."""
    changed = value._backward_hooks is not before
    if changed:
        if value._backward_hooks is not None:
            value._backward_hooks.clear()  # the node behind a tensor with a history holds them too
        value._backward_hooks = before
    if value._post_accumulate_grad_hooks is not after:
        value._post_accumulate_grad_hooks = after
        changed = True
    return changed


def meta_put_back(value: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """One without numbers has a form all the same."""
    if value.shape == shape and value.stride() == strides:
        return False
    value.data = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return True


def same_attributes(value: Any, inner: dict[str, Any]) -> bool:
    """Its attributes are in the dictionary where they were; what is in there is put back by itself."""
    if vars(value) is inner:
        return False
    value.__dict__ = inner
    return True


def form_of_view(value: Tensor) -> tuple[Any, ...]:
    return value.storage_offset(), value.shape, value.stride(), value.dtype


def parts_of_sparse(value: Tensor) -> list[Tensor]:
    """What a sparse tensor is made of."""
    if value.layout == torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value.ccol_indices(), value.row_indices(), value.values()] if "csc" in str(value.layout) else []


def behind(value: Any) -> Iterable[Any]:
    if isinstance(value, weakref.ref):
        return (value(),)
    return tuple(value.values()) if isinstance(value, types.MappingProxyType) else (value.obj,)


def set_anew(function: Callable[..., object], *arguments: Any) -> bool:
    function(*arguments)
    return True


def form_of_array(value: Any) -> tuple[Any, ...]:
    return value.shape, value.strides, value.dtype, value.flags.writeable


def array_put_back(array: Any, kept: Any, form: tuple[Any, ...]) -> bool:
    """Its numbers, and how it shows them, which can be changed in place."""
    same = form_of_array(array) == form
    if same and array.tobytes() == kept.tobytes():
        return False
    if not same:
        array.flags.writeable = True
        array.dtype = form[2]
        array.shape, array.strides = form[:2]
    np.copyto(array, kept)
    array.flags.writeable = form[3]
    return True


def sparse_put_back(value: Tensor, coalesced: bool) -> bool:
    changed = value.is_coalesced() != coalesced
    if changed:
        value._coalesced_(coalesced)
    return changed


def partial_put_back(value: partial[Any]) -> Callable[[], bool]:
    kept = value.func, value.args, value.keywords

    def put_back() -> bool:
        if all(map(operator.is_, (value.func, value.args, value.keywords), kept)):
            return False
        value.__setstate__((*kept, value.__dict__))  # type: ignore[attr-defined]
        return True

    return put_back


# Written by Python itself, when a warning is given or a module is loaded again.
_OF_PYTHON = frozenset({"__warningregistry__", "__builtins__", "__path__", "__file__", "__cached__", "__spec__"})


def put_back_names(owner: Any, kept: dict[str, Any]) -> bool:
    now = vars(owner)
    if len(now) == len(kept) and all(map(operator.is_, now.values(), kept.values())):
        return False
    new = [name for name, value in now.items() if name not in kept and not isinstance(value, types.ModuleType)]
    other = [name for name, value in kept.items() if now.get(name, ABSENT) is not value]
    new, other = ([name for name in names if name not in _OF_PYTHON] for names in (new, other))
    for name in new:
        delattr(owner, name)
    for name in other:
        setattr(owner, name, kept[name])
    only_counted = owner is RemovableHandle and other == ["next_id"]  # of all hooks there were: a pass sets some itself
    return bool(new or (other and not only_counted))


def quietly(function: Callable[..., object], *arguments: Any) -> bool:
    function(*arguments)
    return False


def set_attribute(owner: Any, name: str, kept: Any) -> bool:
    changed = getattr(owner, name) is not kept
    if changed:
        setattr(owner, name, kept)
    return changed


# What functions and classes have beside their names and values, and anybody can write to.
OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__code__", "__doc__", "__name__", "__qualname__", "__module__")
OF_CLASSES = ("__name__", "__qualname__", "__bases__")


def attributes_of(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def set_attributes(value: Any, kept: dict[str, Any]) -> bool:
    changed = [set_attribute(value, name, one) for name, one in kept.items() if getattr(value, name) != one]
    return any(changed)


def class_put_back(value: type, kept: dict[str, Any]) -> bool:
    now = vars(value)
    added = [name for name in now if name not in kept]
    changed = [name for name, before in kept.items() if now.get(name, ABSENT) is not before]
    for name in added:
        delattr(value, name)
    for name in changed:
        setattr(value, name, kept[name])
    return bool(added or changed)


def text_put_back(value: Any) -> list[Callable[[], bool]]:
    """How an array of numbers or a buffer of text is put back; a closed one needs nothing."""
    if isinstance(value, array_type):
        content = value[:]
        return [lambda: value != content and set_anew(value.__setitem__, slice(None), content)]
    return [] if value.closed else [partial(write_anew, value, value.getvalue(), value.tell())]


def write_anew(buffer: Any, text: Any, place: int) -> bool:
    if buffer.tell() == place and buffer.getvalue() == text:
        return False
    buffer.seek(0)
    buffer.truncate()
    buffer.write(text)
    buffer.seek(place)
    return True


def slots(kind: type) -> list[types.MemberDescriptorType]:
    """The slots of a class as Python made them: a property of the same name further down does not stand before them."""
    if "__slots__" not in vars(kind):
        return []
    return [member for member in vars(kind).values() if isinstance(member, types.MemberDescriptorType)]


def slot_of(value: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def set_slot(value: Any, slot: types.MemberDescriptorType, kept: Any) -> bool:
    if slot_of(value, slot) is kept:
        return False
    if kept is ABSENT:
        slot.__delete__(value)
    else:
        slot.__set__(value, kept)
    return True


# What a logger or a handler has for itself: which levels were asked for, its lock, its way out, all other loggers.
_OF_LOGGERS = frozenset({"_cache", "lock", "stream", "manager", "root"})


def logger_put_back(value: Any) -> tuple[Callable[[], bool], list[Any]]:
    """How a logger or a handler is put back, and what it leads to."""
    inner = vars(value)
    kept = {name: one for name, one in inner.items() if name not in _OF_LOGGERS}

    def put_back() -> bool:
        found = {name: one for name, one in inner.items() if name not in _OF_LOGGERS}
        added = [name for name in found if name not in kept]
        for name in added:
            del inner[name]
        if added or found != kept:
            inner.update(kept)
            clear_levels()
            return True
        return False

    return put_back, list(kept.values())


def all_loggers_put_back() -> list[Callable[[], bool]]:
    """Any of them can be had by its name, and written to."""
    known = logging.root.manager.loggerDict
    loggers = [logging.root, *(one for one in known.values() if isinstance(one, logging.Logger))]
    undo: list[Callable[[], bool]] = [partial(restore_container, known, contents_of(known))]
    for one in (*loggers, *{id(each): each for logger in loggers for each in logger.handlers}.values()):
        put_back, parts = logger_put_back(one)
        undo += [
            put_back,
            *(partial(restore_container, part, contents_of(part)) for part in parts if type(part) is list),
        ]
    return undo


def cell_put_back(cell: Any, kept: Any) -> bool:
    """What a variable of a closure holds."""
    changed = cell.cell_contents is not kept
    cell.cell_contents = kept
    return changed


def globals_put_back(space: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Some names of a file, those that were absent too."""
    changed = [name for name, value in kept.items() if space.get(name, ABSENT) is not value]
    for name in changed:
        if kept[name] is ABSENT:
            space.pop(name, None)
        else:
            space[name] = kept[name]
    return bool(changed)
