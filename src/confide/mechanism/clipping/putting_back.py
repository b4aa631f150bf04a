"""Putting things back as they were: what was changed is set again, and whether it was is said."""

from __future__ import annotations

import logging
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from confide.mechanism.clipping.containers import contents_of, restore_container

ABSENT = object()


class Settings:
    """Torch's and numpy's settings of the process; `restore` says whether one had changed."""

    def __init__(self) -> None:
        self.kept, self.filters = self._now(), list(warnings.filters)

    @staticmethod
    def _now() -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            tuple(np.geterr().items()),
        )

    def restore(self) -> bool:
        now = self._now()
        if warnings.filters != self.filters:  # a part of torch that is loaded late has some too: no reason to be slow
            _filters()[:] = self.filters
        if now == self.kept:
            return False
        for setting, (value, before) in zip(_SET, zip(now, self.kept, strict=True), strict=True):
            if value != before:
                setting(before)
        return True


_SET: tuple[Callable[[Any], object], ...] = (
    torch.set_default_dtype,
    torch.set_grad_enabled,
    lambda on: torch.set_autocast_enabled("cpu", on),
    torch.set_num_threads,
    torch.use_deterministic_algorithms,
    torch.autograd.set_detect_anomaly,
    lambda errors: np.seterr(**dict(errors)),
)


def _filters() -> list[Any]:
    found: Any = warnings.filters
    return found  # type: ignore[no-any-return]


def is_functorch_wrapped(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def view_put_back(value: Tensor, storage: torch.UntypedStorage, form: tuple[Any, ...], size: int) -> bool:
    """The memory that a tensor shows, and how: `.data`, `set_` and the like exchange it."""
    if storage.nbytes() != size:
        storage.resize_(size)
    elif value.untyped_storage().data_ptr() == storage.data_ptr() and form_of_view(value) == form:
        return False
    offset, shape, strides = form
    value.data = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, offset, shape, strides)
    return True


def form_of_view(value: Tensor) -> tuple[Any, ...]:
    return value.storage_offset(), value.shape, value.stride()


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


def array_put_back(array: Any, kept: Any) -> bool:
    if array.tobytes() == kept.tobytes():
        return False
    np.copyto(array, kept)
    return True


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
    return bool(new or other)


def quietly(function: Callable[..., object], *arguments: Any) -> bool:
    function(*arguments)
    return False


def set_attribute(owner: Any, name: str, kept: Any) -> bool:
    changed = getattr(owner, name) is not kept
    if changed:
        setattr(owner, name, kept)
    return changed


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
        return bool(added) or (found != kept and set_anew(inner.update, kept))

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
