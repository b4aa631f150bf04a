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
import io
import logging
import random
import sys
import sysconfig
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.errors import Refusal

# Beyond this many places a search takes longer than anybody would wait for at every step.
MOST_PLACES = 2_000_000
_CONTAINERS = (dict, list, set, deque, bytearray)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_PACKAGES = frozenset({"torch", "numpy", "confide", "scipy", "sklearn"})
_OWN_STATE = _PACKAGES | sys.stdlib_module_names
_LIBRARY = sysconfig.get_path("stdlib")
# Longer constants of a function are texts, not names.
LONGEST_NAME = 60
_CACHE = type(functools.lru_cache(lambda: None))
_EMPTY: tuple[Iterable[Any], ...] = ((), [], {}, set(), range(0), "")
_ITERATORS: tuple[type, ...] = (types.GeneratorType, *(type(iter(one)) for one in _EMPTY))
_ITERTOOLS = "itertools"
# Where the types live that hold what user code puts into them.
_HOLDERS = frozenset({"builtins", "collections", "functools", "types", "_thread", "argparse"})


def _contents(container: Any) -> Any:
    """A plain copy, by the methods of the built-in type: a subclass may have a constructor or a copy of its own."""
    if isinstance(container, dict):
        return {key: value for key, value in dict.items(container)}  # noqa: C416 - dict() would ask the subclass
    if isinstance(container, set):
        return set.copy(container)
    return bytes(container) if isinstance(container, bytearray) else list(_items(container))


def _items(container: Any) -> Any:
    kind = list if isinstance(container, list) else deque
    return kind.__iter__(container)


def _same(container: Any, kept: Any) -> bool:
    if isinstance(container, dict):
        return (
            dict.__len__(container) == len(kept)
            and all(map(_is, dict.keys(container), kept))
            and all(map(_is, dict.values(container), kept.values()))
        )
    if isinstance(container, list | deque):
        now = list(_items(container))
        return len(now) == len(kept) and all(map(_is, now, kept))
    return set.__eq__(container, kept) if isinstance(container, set) else bytes(container) == kept


def _is(first: object, second: object) -> bool:
    return first is second


def _put_back(container: Any, kept: Any) -> None:
    if isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        for key, value in kept.items():
            OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, kept)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, kept)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, kept)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), kept)
    else:
        container[:] = kept


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
        self.kept.append((container, _contents(container)))
        kept = self.kept[-1][1]
        for value in kept.values() if isinstance(kept, dict) else kept:
            if isinstance(value, _CONTAINERS):
                self._keep(value, seen)
            elif type(value) not in _PLAIN and not isinstance(value, Tensor | nn.Module | type | types.FunctionType):
                inner = _read(value, "__dict__", None)
                if isinstance(inner, dict) and not _is_known(type(value)):
                    self._keep(inner, seen)

    def restore(self) -> bool:
        changed = [pair for pair in self.kept if not _same(*pair)]
        for container, kept in changed:
            _put_back(container, kept)
        return bool(changed)


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
            if ours and _is_iterator(value):
                self.iterators.append(type(value).__name__)
            ours = ours and not _is_foreign(value)
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
        if isinstance(value, _CONTAINERS):
            kept = _contents(value)
            self.undo.append(partial(_restore_container, value, kept))
            return list(kept.values()) if isinstance(kept, dict) else list(kept)
        if isinstance(value, tuple | frozenset):
            return list(value)
        if isinstance(value, types.ModuleType):
            return () if _is_known(value) else (vars(value),)
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
        if _is_iterator(value):
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
            return () if _is_known(value) else list(self._keep_class(value))
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
        if _is_known(value):  # it may hold a function of the user's; its globals are its own
            return
        names = _names(value.__code__)
        yield from self._keep_names(value.__globals__, names)
        spaces = [value.__globals__.get(name, sys.modules.get(name)) for name in names]
        waiting = [found for found in spaces if isinstance(found, types.ModuleType)]
        done: set[int] = set()
        while waiting:
            module = waiting.pop()
            if id(module) not in done and not _is_known(module):
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
        inner = _read(value, "__dict__", None)
        if isinstance(inner, dict) and not isinstance(value, nn.Module) and _of_a_package(type(value)):
            kept = _contents(inner)  # it may well remember something of its own: put back, but no reason to be slow
            self.undo.append(lambda: _quietly(_restore_container, inner, kept))
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


def _restore_container(container: Any, kept: Any) -> bool:
    if _same(container, kept):
        return False
    _put_back(container, kept)
    return True


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


def _read(value: Any, name: str, default: Any) -> Any:
    """An attribute of an object whose own way of giving it may raise anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        try:
            return object.__getattribute__(value, name)
        except AttributeError:
            return default


def _module_of(value: Any) -> str:
    """Where it was written; types made in C may have a descriptor there, or nothing."""
    name = _read(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _is_known(value: Any) -> bool:
    """Whether it comes from a package whose state is its own."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = _module_of(value)
    first = name.partition(".")[0]
    return first in _OWN_STATE and _is_the_real(first)


def _is_iterator(value: Any) -> bool:
    return isinstance(value, _ITERATORS) or type(value).__module__ == _ITERTOOLS


def _is_foreign(value: Any) -> bool:
    """Whether what it leads to is the business of an installed package or of the standard library."""
    if isinstance(value, types.FunctionType | type):
        return _is_known(value) or _is_installed(_module_of(value))
    kind = type(value)
    return not isinstance(value, nn.Module) and kind.__module__ not in _HOLDERS and _is_foreign(kind)


def _is_installed(name: str) -> bool:
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")


def _of_a_package(kind: type) -> bool:
    return _module_of(kind).partition(".")[0] in _PACKAGES


@functools.cache
def _is_the_real(name: str) -> bool:
    """Not a file of the user's that happens to be called like one of the standard library (code.py, test.py)."""
    if name in sys.builtin_module_names or name in _PACKAGES:
        return name != "__main__"
    origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    if origin in (None, "frozen", "built-in"):
        return name != "__main__"
    return origin.startswith(_LIBRARY) and "site-packages" not in origin[len(_LIBRARY) :]


def _names(code: types.CodeType) -> frozenset[str]:
    """Global names and attributes that a function, or one defined inside it, may use, also spelt out as text."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    spelt = [constant for constant in code.co_consts if isinstance(constant, str) and len(constant) <= LONGEST_NAME]
    return frozenset(code.co_names).union(spelt, *inner)
