"""State that user code may write to, put back after every pass: nothing computed from a record outlives it.

`Attributes` is the quick seal of a pass inside a region: dictionaries, lists and sets in the attributes of a module.
There the values of records are stacks that cannot be written into an ordinary tensor, so references are all there is.

`Reachable` is the thorough one, for records that run one by one: besides attributes what the functions of the module
and the loss can reach by name (closures, globals, class attributes, caches, modules that a function imports), the
contents of tensors, arrays and text buffers, and random states. It stops at the standard library, torch and numpy:
their own state is theirs, but an object of their types that user code holds is put back. What cannot be put back, an
iterator, is refused.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.mechanism.clipping.containers import CONTAINERS, contents_of, restore_container
from confide.mechanism.clipping.origins import (
    attribute_of,
    is_foreign,
    is_iterator,
    is_known,
    is_of_a_package,
    names_used,
)

# Beyond this many places a search takes longer than anybody would wait for at every step.
MOST_PLACES = 2_000_000
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_CACHE = type(functools.lru_cache(lambda: None))


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside: what finalisers and callbacks of the collector write is not what a pass wrote."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_young() -> None:
    """Collect what was made while the collector rests. Its callbacks are not told: what they write is not a pass's."""
    told = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        gc.collect(1)
    finally:
        gc.callbacks[:] = told


class Attributes:
    """The containers of a module's attributes, as they were; `restore` says whether anything had changed."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for layer in module.modules():
            self._keep(layer.__dict__, seen)

    def _keep(self, container: Any, seen: set[int]) -> None:
        if id(container) in seen:
            return
        seen.add(id(container))
        self.kept.append((container, contents_of(container)))
        kept = self.kept[-1][1]
        for value in kept.values() if isinstance(kept, dict) else kept:
            if isinstance(value, CONTAINERS):
                self._keep(value, seen)
            elif type(value) not in _PLAIN and not isinstance(value, Tensor | nn.Module | type | types.FunctionType):
                inner = attribute_of(value, "__dict__", None)
                if isinstance(inner, dict) and not is_known(type(value)):
                    self._keep(inner, seen)

    def restore(self) -> bool:
        changed = [restore_container(*pair) for pair in self.kept]  # all of them, also after one that had changed
        return any(changed)


class Reachable:
    """Everything found from `roots`, as it was; `restore` puts it back and says whether a reference had changed.

    Without `contents` tensors and arrays are left alone; so are tensors `apart`, by identity.
    """

    def __init__(self, *roots: Any, contents: bool = True, apart: frozenset[int] = frozenset()) -> None:
        self.contents, self.apart = contents, apart
        self.iterators: list[str] = []
        self.undo: list[Callable[[], bool]] = []
        self.onwards: list[Callable[[], object]] = []
        seen: dict[int, Any] = {}
        waiting: list[tuple[Any, bool]] = [(root, True) for root in roots]
        while waiting:
            value, ours = waiting.pop()
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen[id(value)] = value
            if ours and is_iterator(value):
                self.iterators.append(type(value).__name__)
            ours = ours and not is_foreign(value)
            waiting.extend((found, ours) for found in self._keep(value))
            if len(seen) > MOST_PLACES:
                raise Refusal(
                    f"module: it reaches more than {MOST_PLACES} objects, which cannot all be put back after every "
                    "record; keep large tables in tensors or arrays"
                )
        self.seen = seen  # alive, so that no identity is used twice

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
        for draw in self.onwards:
            draw()

    def _keep(self, value: Any) -> Iterable[Any]:
        """Remember how to put the value back; what it leads to is returned."""
        if isinstance(value, Tensor):
            return self._keep_tensor(value)
        if isinstance(value, np.ndarray):
            self._keep_array(value)
            return list(value.flat) if value.dtype == object else ()
        if isinstance(value, CONTAINERS):
            kept = contents_of(value)
            self.undo.append(partial(restore_container, value, kept))
            return list(kept.values()) if isinstance(kept, dict) else list(kept)
        if isinstance(value, tuple | frozenset):
            return list(value)
        if isinstance(value, types.ModuleType):
            return () if is_known(value) else (vars(value),)
        if isinstance(value, torch.Generator):
            state = value.get_state()
            self.undo.append(lambda: _quietly(value.set_state, state))
            self.onwards.append(lambda: torch.rand((), generator=value))
            return ()
        return self._keep_object(value)

    def _keep_tensor(self, value: Tensor) -> Iterable[Any]:
        ordinary = value.layout == torch.strided and value.device.type != "meta" and not is_functorch_wrapped(value)
        if self.contents and ordinary and id(value) not in self.apart:
            data, before = value.detach(), value.grad if value.is_leaf else None
            kept = data.clone()

            def put_back() -> bool:
                if not torch.equal(data, kept):
                    data.copy_(kept)
                if value.is_leaf:
                    value.grad = before
                return False

            self.undo.append(put_back)
        inner = value.__dict__
        return (inner,) if inner else ()

    def _keep_array(self, value: Any) -> None:
        if value.flags.writeable and (self.contents or value.dtype == object):
            kept = value.copy()
            self.undo.append(lambda: _quietly(np.copyto, value, kept))

    def _keep_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            self._keep_random(value)
            return ()
        if isinstance(value, io.StringIO | io.BytesIO | array):
            self._keep_text(value)
            return ()
        if is_iterator(value):
            return ()
        if isinstance(value, _CACHE):
            size = value.cache_info()
            self.undo.append(lambda: value.cache_info() != size and _quietly(value.cache_clear))
            return (value.__wrapped__,)
        if isinstance(value, types.FunctionType):
            return list(self._keep_function(value))
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, property | staticmethod | classmethod):
            parts = (value.fget, value.fset) if isinstance(value, property) else (value.__func__,)
            return [part for part in parts if part is not None]
        if isinstance(value, type):
            return () if is_known(value) else list(self._keep_class(value))
        return list(self._keep_instance(value))

    def _keep_random(self, value: Any) -> None:
        if isinstance(value, np.random.Generator):
            bits, state = value.bit_generator, value.bit_generator.state
            self.undo.append(lambda: _quietly(setattr, bits, "state", state))
        elif isinstance(value, np.random.RandomState):
            known = value.get_state()
            self.undo.append(lambda: _quietly(value.set_state, known))
        else:
            found = value.getstate()
            self.undo.append(lambda: _quietly(value.setstate, found))
        self.onwards.append(value.random)

    def _keep_text(self, value: Any) -> None:
        if isinstance(value, array):
            content = value[:]
            self.undo.append(lambda: _quietly(value.__setitem__, slice(None), content))
        elif not value.closed:
            text, place = value.getvalue(), value.tell()
            self.undo.append(lambda: _quietly(_write_anew, value, text, place))

    def _keep_function(self, value: types.FunctionType) -> Iterator[Any]:
        defaults = value.__defaults__
        self.undo.append(partial(_set_defaults, value, defaults))
        yield from defaults or ()
        yield value.__kwdefaults__ or ()
        yield value.__dict__
        for cell in value.__closure__ or ():
            yield from self._keep_cell(cell)
        if is_known(value):  # it may hold a function of the user's; its globals are its own
            return
        names = names_used(value.__code__)
        yield from self._keep_names(value.__globals__, names)
        spaces = [value.__globals__.get(name, sys.modules.get(name)) for name in names]
        waiting = [found for found in spaces if isinstance(found, types.ModuleType)]
        done: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) not in done and not is_known(module):
                done.add(id(module))
                yield from self._keep_names(vars(module), names)
                inner = (vars(module).get(name) for name in names)
                waiting += [found for found in inner if isinstance(found, types.ModuleType)]

    def _keep_cell(self, cell: Any) -> Iterator[Any]:
        try:
            kept = cell.cell_contents
        except ValueError:
            return

        def put_back() -> bool:
            changed = cell.cell_contents is not kept
            cell.cell_contents = kept
            return changed

        self.undo.append(put_back)
        yield kept

    def _keep_names(self, space: dict[str, Any], names: frozenset[str]) -> Iterator[Any]:
        kept = {name: space.get(name, _ABSENT) for name in names}

        def put_back() -> bool:
            changed = [name for name, value in kept.items() if space.get(name, _ABSENT) is not value]
            for name in changed:
                if kept[name] is _ABSENT:
                    space.pop(name, None)
                else:
                    space[name] = kept[name]
            return bool(changed)

        self.undo.append(put_back)
        yield from (
            value for value in kept.values() if value is not _ABSENT and not isinstance(value, types.ModuleType)
        )

    def _keep_class(self, value: type) -> Iterator[Any]:
        kept = dict(vars(value))

        def put_back() -> bool:
            now = vars(value)
            added = [name for name in now if name not in kept]
            changed = [name for name, before in kept.items() if now.get(name, _ABSENT) is not before]
            for name in added:
                delattr(value, name)
            for name in changed:
                setattr(value, name, kept[name])
            return bool(added or changed)

        self.undo.append(put_back)
        yield from kept.values()
        yield from value.__bases__
        yield type(value)

    def _keep_instance(self, value: Any) -> Iterator[Any]:
        if isinstance(value, logging.Logger | logging.Handler):  # they remember who asked, not what
            return
        yield type(value)
        inner = attribute_of(value, "__dict__", None)
        if isinstance(inner, dict) and not isinstance(value, nn.Module) and is_of_a_package(type(value)):
            kept = contents_of(inner)  # it may well remember something of its own: put back, but no reason to be slow
            self.undo.append(lambda: _quietly(restore_container, inner, kept))
            yield from kept.values()
        elif isinstance(inner, dict):
            yield inner
        for kind in type(value).__mro__:
            for slot in _slots(kind):
                found = _slot_of(value, slot)
                self.undo.append(partial(_set_slot, value, slot, found))
                if found is not _ABSENT:
                    yield found


_ABSENT = object()


def is_functorch_wrapped(value: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def _quietly(function: Callable[..., object], *arguments: Any) -> bool:
    function(*arguments)
    return False


def _set_defaults(function: types.FunctionType, kept: Any) -> bool:
    changed = function.__defaults__ is not kept
    if changed:
        function.__defaults__ = kept
    return changed


def _write_anew(buffer: Any, text: Any, place: int) -> None:
    buffer.seek(0)
    buffer.truncate()
    buffer.write(text)
    buffer.seek(place)


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    """The slots of a class as Python made them: a property of the same name further down does not stand before them."""
    if "__slots__" not in vars(kind):
        return []
    return [member for member in vars(kind).values() if isinstance(member, types.MemberDescriptorType)]


def _slot_of(value: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _ABSENT


def _set_slot(value: Any, slot: types.MemberDescriptorType, kept: Any) -> bool:
    if _slot_of(value, slot) is kept:
        return False
    if kept is _ABSENT:
        slot.__delete__(value)
    else:
        slot.__set__(value, kept)
    return True
