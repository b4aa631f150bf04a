"""State that user code may write to, put back after every pass: nothing computed from a record outlives it.

`Reachable` is the thorough seal, for records that run one by one (`attributes` has the quick one of a region): besides
attributes what the functions of the module and the loss can reach by name (closures, globals, class attributes, caches,
modules that a function imports), the contents of tensors, arrays and text buffers, and random states. It stops at the
standard library, torch and numpy: their own state is theirs, but an object of their types that user code holds is put
back, and so is what is written to their names, or to what is theirs and named (`package_parts`), and settings of the
process (`settings`). What cannot be put back (`unsealable`), or looked through, runs in a process for each record where
there can be one (`apart`), and is refused elsewhere.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import random
import sys
import types
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping import apart
from confide.mechanism.clipping.containers import CONTAINERS, contents_of, restore_container
from confide.mechanism.clipping.may_run import makes_sets
from confide.mechanism.clipping.origins import (
    MADE_IN_C,
    attribute_of,
    is_foreign,
    is_installed,
    is_known,
    is_of_a_package,
    names_outside,
    names_used,
    package_of,
)
from confide.mechanism.clipping.package_parts import hooks_on_all_modules, parts_put_back
from confide.mechanism.clipping.putting_back import (
    ABSENT,
    OF_CLASSES,
    OF_FUNCTIONS,
    all_loggers_put_back,
    array_put_back,
    attributes_of,
    behind,
    cell_put_back,
    class_put_back,
    form_of_array,
    form_of_view,
    globals_put_back,
    hooks_put_back,
    is_functorch_wrapped,
    logger_put_back,
    meta_put_back,
    partial_put_back,
    parts_of_sparse,
    put_back_names,
    quietly,
    same_attributes,
    set_anew,
    set_attribute,
    set_attributes,
    set_slot,
    slot_of,
    slots,
    sparse_put_back,
    text_put_back,
    view_put_back,
)
from confide.mechanism.clipping.randomness import move_on, of_everybody, way_back
from confide.mechanism.clipping.search import ByName, HeldBehind, Kind, NamesOfFile, Search, is_code
from confide.mechanism.clipping.settings import Settings
from confide.mechanism.clipping.unsealable import APART, CUT_OFF, NAMED_FIELD, held_in_c
from confide.mechanism.clipping.unwritten import makes_tensors

_CACHE = type(functools.lru_cache(lambda: None))
# What changes a tensor with a history so that nobody can put it back, or leads to where it came from.
HISTORY = frozenset({"detach_", "retain_grad", "grad_fn", "_grad_fn", "get_gradient_edge", "register_multi_grad_hook"})
_APART = (logging.Logger, logging.Handler, torch.jit.ScriptModule)  # with attributes that are dealt with elsewhere
# Packages whose state is put back where code can write to it. Code that uses others runs in processes of its own.
_SIMPLE = frozenset({"", "torch", "numpy", "confide"}) | sys.stdlib_module_names
BARE = frozenset({dict, list, set, deque, bytearray, tuple, frozenset, types.MethodType, types.BuiltinFunctionType})
_FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)


class Reachable:
    """Everything found from `roots`, as it was; `restore` puts it back and says whether a reference had changed.

    Without `contents` tensors and arrays are left alone; so are the tensors `left_alone`, by identity.
    """

    def __init__(self, *roots: Any, contents: bool = True, left_alone: frozenset[int] = frozenset()) -> None:
        self.contents, self.left_alone = contents, left_alone
        self.undo: list[Callable[[], bool]] = [Settings().restore]
        self.chance: list[Any] = []  # generators
        self.storages: set[int] = set()
        self.owners: dict[int, Any] = {}
        self.histories = self.views = self.elsewhere = False
        self.search = Search(self._kept)
        self.search.go((*roots, *hooks_on_all_modules()))
        named = frozenset[str]().union(*(names_used(one.__code__) for one in self.search.running_functions()))
        self.undo += parts_put_back(list(self.owners.values()), named)
        if self.search.running.names & {"getLogger", "getChild"}:
            self.undo += all_loggers_put_back()
        if "random" in self.search.running.names:
            for generator in of_everybody():
                self._keep_random(generator)

    def _kept(self, value: Any, again: bool) -> list[Any]:
        """What the value leads to; `again`: it is kept already."""
        places, draws = len(self.undo), len(self.chance)
        try:
            found = [*self._keep(value), *self._keep_beside(value)]
        except Exception:
            self.search.objects.append(
                (f"an object of type {type(value).__name__}, which cannot be looked at", lambda level: False)
            )
            found = []
        if again:
            del self.undo[places:], self.chance[draws:]
        return found

    @property
    def unsealable(self) -> str:
        """What code that may run with these roots reaches and may not; empty if there is nothing."""
        return self.window if self.lasting and self.may_be_apart else self.lasting

    @functools.cached_property
    def lasting(self) -> str:
        """What nobody can put back in this process."""
        names = self.search.running.names
        if self.histories and names & HISTORY:
            return f"{min(names & HISTORY)}, and holds a tensor with a history of its own"
        if self.views and "release" in names:
            return "memoryview.release"
        return self.window or self.search.reason()

    @functools.cached_property
    def window(self) -> str:
        """What shows other records, or leads out of a process of its own."""
        if "use_deterministic_algorithms" in self.search.running.names and self.makes_tensors:
            return "torch.use_deterministic_algorithms, and makes tensors that nobody has written to"
        return self.search.reason(CUT_OFF if apart.is_cut_off() else APART)

    @functools.cached_property
    def may_be_apart(self) -> bool:
        """Whether a record can run in a process of its own."""
        return not self.elsewhere and apart.is_possible()

    @functools.cached_property
    def why_apart(self) -> str:
        """Why records that run one by one do so in processes of their own: what this seal cannot vouch for."""
        why = f"reaches {self.lasting}, which nobody can put back" if self.lasting else self._unsure()
        return why if self.may_be_apart else ""

    def _unsure(self) -> str:
        if self.search.running.computed:
            return "puts names together (getattr, vars, globals)"
        if self.shows_objects:
            return "shows objects as text, in which they may have an address"
        if self.makes_sets:
            return "makes sets, whose order may follow addresses"
        packages = {*self.search.packages, *map(package_of, self.owners.values())} - _SIMPLE
        return f"uses {min(packages)}, which may keep something for itself" if packages else ""

    @property
    def shows_objects(self) -> bool:
        """Whether its code may make texts of objects, which have an address if nobody takes it away."""
        return "__repr__" in self.search.running.names

    @functools.cached_property
    def makes_sets(self) -> bool:
        """Their order follows addresses where objects have no other hash."""
        return any(makes_sets(function.__code__) for function in self.search.running_functions())

    @property
    def makes_tensors(self) -> bool:
        """Whether its own code may make tensors of memory that nobody has written to."""
        return any(makes_tensors(function.__code__) for function in self.search.running_functions())

    def check(self) -> None:
        if self.unsealable:
            raise Refusal(
                f"module: it, its loss or its statistic reaches {self.unsealable}: that cannot be put back after a "
                f"record, so that the next one could find a trace of it; use tensors, lists and numbers{self._named}"
            )

    @property
    def _named(self) -> str:
        """What makes code of more than what it seems to run."""
        if not self.search.running.computed:
            return ""
        return ", or write out the names that it puts together (getattr, vars, globals), which could be any"

    def restore(self) -> bool:
        changed, failures = False, 0
        for put_back in self.undo:  # all of them, also after one that says so or fails
            try:
                changed = put_back() or changed
            except Exception:
                failures += 1
        if failures:
            raise Refusal(
                "module: it changed an object that cannot be put back as it was; keep state in plain attributes"
            ) from None
        return changed

    def move_on(self) -> None:
        """Generators that were found go on by one number, whatever the records drew: the next pass gets other ones."""
        move_on(self.chance)

    def _keep(self, value: Any) -> Iterable[Any]:
        """Remember how to put the value back; what it leads to is returned."""
        if isinstance(value, Tensor):
            return self._keep_tensor(value)
        if isinstance(value, np.ndarray):
            return self._keep_array(value)
        if isinstance(value, CONTAINERS):
            kept = contents_of(value)
            self.undo.append(partial(restore_container, value, kept))
            if isinstance(value, defaultdict):
                self.undo.append(partial(set_attribute, value, "default_factory", value.default_factory))
                return [*kept.values(), value.default_factory]
            return list(kept.values()) if isinstance(kept, dict) else list(kept)
        if isinstance(value, tuple | frozenset):
            return list(value)
        if isinstance(value, types.ModuleType):
            return () if is_known(value) else self._keep_module(value)
        if isinstance(value, torch.Generator):
            self._keep_random(value)
            return ()
        return self._keep_object(value)

    def _keep_beside(self, value: Any) -> Iterable[Any]:
        """Attributes of an object that is more than a number, a text or a container: subclasses have some."""
        if type(value) in BARE or is_code(value) or isinstance(value, _APART):
            return []
        of, inner = type(value), attribute_of(value, "__dict__", None)
        if not of.__flags__ & MADE_IN_C:
            self.undo.append(lambda: type(value) is not of and set_anew(setattr, value, "__class__", of))
        beside: list[Any] = []
        if isinstance(inner, dict):
            self.undo.append(partial(same_attributes, value, inner))
            if isinstance(value, nn.Module) or not is_of_a_package(of):
                beside.append(inner)
        for slot in (slot for kind in of.__mro__ for slot in slots(kind)):
            found = slot_of(value, slot)
            self.undo.append(partial(set_slot, value, slot, found))
            if found is not ABSENT:
                beside.append(Kind(found) if isinstance(value, Field) and isinstance(found, type) else found)
        return beside

    def _keep_tensor(self, value: Tensor) -> Iterable[Any]:
        if is_functorch_wrapped(value):
            return [value.__dict__]
        self.histories |= not value.is_leaf
        self.elsewhere |= value.device.type not in ("cpu", "meta")
        if value.device.type == "meta":
            self.undo.append(partial(meta_put_back, value, tuple(value.shape), value.stride()))
            return [value.__dict__]
        spread = sys.modules.get("torch.distributed.tensor")
        if spread is not None and type(value) is spread.DTensor:  # its numbers are in another tensor, of this rank
            self._keep_gradient(value)
            self.elsewhere = True  # other processes have a part in what is done with it
            return [value.__dict__, value._local_tensor]  # type: ignore[attr-defined]
        if value.layout != torch.strided:
            return [value.__dict__, *self._keep_parts(value)]
        if id(value) not in self.left_alone:
            self._keep_gradient(value)
            if self.contents:
                self._keep_storage(value)
        hooks: Any = (value._backward_hooks, value._post_accumulate_grad_hooks)
        self.undo.append(partial(hooks_put_back, value, *hooks))
        beside = (value.__dict__, value._base, *hooks, value.grad if value.is_leaf else None)
        return [part for part in beside if part is not None]

    def _keep_parts(self, value: Tensor) -> list[Tensor]:
        """What a tensor is made of that has no memory of its own."""
        if value.layout == torch.sparse_coo:
            self.undo.append(partial(sparse_put_back, value, value.is_coalesced()))
        parts = parts_of_sparse(value)
        if not parts:
            self.search.keeps(f"a tensor of layout {value.layout}")
        return parts if self.contents and id(value) not in self.left_alone else []

    def _keep_gradient(self, value: Tensor) -> None:
        """What hangs on a tensor beside its numbers."""
        leaf, before, needed = value.is_leaf, value.grad if value.is_leaf else None, value.requires_grad

        def put_back() -> bool:
            if leaf and value.grad is not before:
                value.grad = before
            changed = leaf and value.requires_grad != needed
            if changed:
                value.requires_grad_(needed)
            return changed

        self.undo.append(put_back)

    def _keep_storage(self, value: Tensor) -> None:
        """All of the memory that a tensor shows a part of, once."""
        storage = value.untyped_storage()
        if not value.is_inference():
            self.undo.append(partial(view_put_back, value, storage, form_of_view(value), storage.nbytes()))
        if storage.data_ptr() in self.storages:
            return
        self.storages.add(storage.data_ptr())
        whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
        kept = whole.clone()

        def put_back() -> bool:
            if whole.numel() == kept.numel() and torch.equal(whole, kept):
                return False
            whole.copy_(kept)
            return True

        self.undo.append(put_back)

    def _keep_array(self, value: Any) -> Iterable[Any]:
        if value.flags.writeable and (self.contents or value.dtype == object):
            self.undo.append(partial(array_put_back, value, value.copy(), form_of_array(value)))
        inner = attribute_of(value, "__dict__", None)
        beside = (inner if isinstance(inner, dict) else None, value.base)
        kind = [value.dtype] if value.dtype.metadata or value.dtype.names else []
        parts = [*(one for one in beside if one is not None), *kind]
        return [*parts, *value.flat] if value.dtype == object else parts

    def _keep_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            self._keep_random(value)
            return ()
        if isinstance(value, io.StringIO | io.BytesIO | array):
            self.undo += text_put_back(value)
            return ()
        if isinstance(value, weakref.ref | types.MappingProxyType | memoryview):
            self.views |= isinstance(value, memoryview)
            return behind(value)
        if isinstance(value, functools.cached_property):
            return (value.func,)
        if isinstance(value, np.ufunc):  # that of numpy.frompyfunc has a function behind it
            return gc.get_referents(value)
        if isinstance(value, types.BuiltinFunctionType):
            return () if isinstance(value.__self__, types.ModuleType) else (value.__self__,)
        if isinstance(value, torch.jit.ScriptModule):
            return self._keep_script(value)
        if isinstance(value, _CACHE):
            if not is_foreign(value.__wrapped__):
                value.cache_clear()  # else the first record finds what no other one does
            size = value.cache_info()
            self.undo.append(lambda: value.cache_info() != size and quietly(value.cache_clear))
            return value.__wrapped__, value.__dict__
        if isinstance(value, types.FunctionType):
            return list(self._keep_function(value))
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            self.undo.append(partial_put_back(value))
            return value.func, value.args, value.keywords, value.__dict__
        if isinstance(value, property):
            self.undo.append(partial(set_attribute, value, "__doc__", value.__doc__))
            return [part for part in (value.fget, value.fset, value.fdel) if part is not None]
        if isinstance(value, staticmethod | classmethod):
            return value.__func__, value.__dict__
        if isinstance(value, type):
            if not is_known(value):
                return list(self._keep_class(value))
            self._keep_written(value)
            return ()
        if isinstance(value, NAMED_FIELD):
            self.undo.append(partial(set_attribute, value, "__doc__", value.__doc__))
        return [*self._keep_instance(value), *held_in_c(value)]

    def _keep_random(self, value: Any) -> None:
        self.undo.append(partial(quietly, way_back(value)))
        self.chance.append(value)

    def _keep_script(self, value: Any) -> Iterable[Any]:
        """Compiled code: its numbers are tensors that are put back, its attributes are out of reach."""
        if "prim::SetAttr" in str(value.inlined_graph):
            self.search.objects.append(
                (f"{value.original_name}, a scripted module that sets its attributes", lambda level: False)
            )
        return [*value.parameters(), *value.buffers()]

    def _keep_function(self, value: types.FunctionType) -> Iterator[Any]:
        self.undo.append(partial(set_attributes, value, attributes_of(value, OF_FUNCTIONS)))
        said = value.__annotations__
        self.undo.append(partial(restore_container, said, contents_of(said)))
        yield from map(HeldBehind, value.__defaults__ or ())
        yield HeldBehind(value.__kwdefaults__ or ())
        yield HeldBehind(value.__dict__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            for kept in self._keep_cell(cell):
                # super() asks for its class
                yield Kind(kept) if name == "__class__" and isinstance(kept, type) else HeldBehind(kept)
        if is_known(value):  # it may hold a function of the user's; its globals are its own
            self.owners[id(value)] = value
            return
        names, outside = names_used(value.__code__), names_outside(value.__code__)
        if not is_foreign(value):
            yield NamesOfFile(value.__globals__)
        yield from self._keep_names(value.__globals__, outside)
        spaces = [value.__globals__.get(name, sys.modules.get(name)) for name in outside]
        waiting = [found for found in spaces if isinstance(found, types.ModuleType)]
        done: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) in done:
                continue
            done.add(id(module))
            inner = {name: found for name in names if (found := vars(module).get(name)) is not None}
            waiting += [found for found in inner.values() if isinstance(found, types.ModuleType)]
            if is_known(module):
                self._keep_written(module)
                # its classes may be written to, and a function in its place may be the user's
                parts = [(name, one) for name, one in inner.items() if isinstance(one, type | types.FunctionType)]
                yield from (ByName(name, one) for name, one in parts)
            else:
                if not is_installed(module):
                    yield NamesOfFile(vars(module), of_a_module=True)
                yield from self._keep_names(vars(module), names)

    def _keep_module(self, value: types.ModuleType) -> Iterator[Any]:
        """One that is held as a value. Its names are asked for as any others are."""
        self._keep_written(value)
        if not is_installed(value):
            yield NamesOfFile(vars(value), of_a_module=True)
        yield from (ByName(name, one, late=True) for name, one in list(vars(value).items()) if name[:2] != "__")

    def _keep_written(self, owner: Any) -> None:
        """Names of a package or one of its classes, which have no business to change but when a part is loaded late."""
        if id(owner) not in self.owners:
            self.owners[id(owner)] = owner
            self.undo.append(partial(put_back_names, owner, dict(vars(owner))))

    def _keep_cell(self, cell: Any) -> Iterator[Any]:
        try:
            kept = cell.cell_contents
        except ValueError:
            return
        self.undo.append(partial(cell_put_back, cell, kept))
        yield kept

    def _keep_names(self, space: dict[str, Any], names: frozenset[str]) -> Iterator[Any]:
        kept = {name: space.get(name, ABSENT) for name in names}
        self.undo.append(partial(globals_put_back, space, kept))
        yield from (
            ByName(name, value, late=is_code(value) and is_foreign(value))
            for name, value in kept.items()
            if value is not ABSENT and not isinstance(value, types.ModuleType)
        )

    def _keep_class(self, value: type) -> Iterator[Any]:
        kept = dict(vars(value))
        self.undo.append(partial(set_attributes, value, attributes_of(value, OF_CLASSES)))
        self.undo.append(partial(class_put_back, value, kept))
        late = is_foreign(value)
        said = kept.get("__annotations__")  # what types attributes have: no reason to believe that one is made
        if isinstance(said, dict):
            self.undo.append(partial(restore_container, said, contents_of(said)))
            yield from (one for one in said.values() if not isinstance(one, type))
        named = {name: one for name, one in kept.items() if one is not said}
        yield from (ByName(name, one, late=late and isinstance(one, _FUNCTIONS)) for name, one in named.items())
        yield from (Kind(base) for base in value.__bases__)
        yield Kind(type(value))

    def _keep_instance(self, value: Any) -> Iterator[Any]:
        if isinstance(value, logging.Logger | logging.Handler):
            undo, parts = logger_put_back(value)
            self.undo.append(undo)
            whole = isinstance(value, logging.Logger) or not is_foreign(type(value))  # a way out is its own business
            yield from (part for part in parts if whole or isinstance(part, list))
            return
        yield Kind(type(value))
        inner = attribute_of(value, "__dict__", None)
        if isinstance(inner, dict) and not isinstance(value, nn.Module) and is_of_a_package(type(value)):
            kept = contents_of(inner)  # it may well remember something of its own: put back, but no reason to be slow
            self.undo.append(lambda: quietly(restore_container, inner, kept))
            yield from kept.values()
