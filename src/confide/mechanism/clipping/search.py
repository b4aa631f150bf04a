"""The search for everything that user code can reach: where it goes on, and where it waits or ends.

The user's own code is followed wherever it leads. So is that of installed packages whose functions or classes the
user's code and data hold (the library of a model), as far as it may run: a function that nobody asks for by name (how
a model is downloaded, how its tokens are printed) leads nowhere. Other packages, which those packages use for
themselves, keep their state as torch does. So the search is as long as what the forward of the module can reach, not
as what happens to be loaded. Where the user's code computes names it may reach anything in the files of the user's own,
and those are searched whole; what it finds by computed names in installed packages is their own state.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from confide.errors import Refusal
from confide.mechanism.clipping.may_run import ANY, ATTRIBUTES, AskedNames, makers, making
from confide.mechanism.clipping.origins import attribute_of, is_foreign, is_known, package_of
from confide.mechanism.clipping.putting_back import is_functorch_wrapped
from confide.mechanism.clipping.unsealable import (
    HERE,
    has_hidden_state,
    held_part,
    leads_out,
    loose_part,
    unsealable_in,
)

# Beyond this many places a search takes longer than anybody would wait for at every step.
MOST_PLACES = 2_000_000
# What confide asks of an object by name, from code of its own that nobody looks through: of a likelihood, a posterior.
ASKED_BY_CONFIDE = (frozenset({"loss", "predictive"}), frozenset({"predict"}))
# Where a method of a class, a property or a lazy one has its functions.
_BEHIND_MEMBERS = ("__func__", "fget", "fset", "fdel", "func", "wrapped")
_CODE = (types.FunctionType, types.ModuleType, type)
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range)


@dataclass(slots=True)
class ByName:
    """A value and the name by which code asks for it; `late`: it is nobody's business until somebody asks."""

    name: str
    value: Any
    late: bool = False


@dataclass(slots=True)
class Kind:
    """The class of an object, or of a class: no reason to believe that another object of it is made."""

    value: type


@dataclass(slots=True)
class HeldBehind:
    """What somebody gave to a function that was made for him: a decorator of a package holds the user's own code."""

    value: Any


@dataclass(slots=True)
class NamesOfFile:
    """The names of a file of the user's: all of them count where names are computed, attributes of a module anyhow."""

    value: dict[str, Any]
    of_a_module: bool = False


@dataclass(slots=True)
class _Reached:
    """A value on the way.

    ours   code that counts as the user's own
    data   what is held for it
    near   no code of an installed package lies on the way
    """

    value: Any
    ours: bool = True
    data: bool = True
    near: bool = True
    name: str | None = None
    kind: bool = False

    def adds_to(self, before: _Reached) -> bool:
        return self.ours > before.ours or self.data > before.data or self.near > before.near

    def with_all_of(self, before: _Reached) -> _Reached:
        ours, data, near = self.ours or before.ours, self.data or before.data, self.near or before.near
        return _Reached(self.value, ours, data, near, self.name, self.kind)


class Search:
    """What is reached from some roots, by steps that `keep` gives: from a value, and whether it was kept before."""

    def __init__(self, keep: Callable[[Any, bool], list[Any]]) -> None:
        self.keep = keep
        self.running = AskedNames()
        self.objects: list[tuple[str, Callable[[int], object]]] = []  # what it is, and at which level it is refused
        self.held: list[types.ModuleType] = []
        self.seen: dict[int, _Reached] = {}  # alive, so that no identity is used twice
        self.functions: dict[int, tuple[types.FunctionType, set[str | None]]] = {}
        self.spaces: list[NamesOfFile] = []
        self.opened = 0
        self.inherited: set[type] = set()
        self.packages: set[str] = set()
        self.unused: dict[str, list[_Reached]] = {}

    def go(self, roots: Iterable[Any]) -> None:
        own_of_python = _Reached(vars(builtins))
        self.seen[id(own_of_python.value)] = own_of_python
        waiting = [_Reached(root) for root in roots]
        while waiting:
            found = waiting.pop()
            if type(found.value) in PLAIN or (is_code(found.value) and self._waits(found, waiting)):
                continue
            if self.running.computed > self.opened:
                self.opened = self.running.computed
                waiting += [_Reached(space.value) for space in self.spaces if self._is_open(space)]
            waiting += self._led_on(found)
            if len(self.seen) > MOST_PLACES:
                raise Refusal(
                    f"module: it reaches more than {MOST_PLACES} objects, which cannot all be put back after every "
                    "record; keep large tables in tensors or arrays"
                )

    def _waits(self, found: _Reached, waiting: list[_Reached]) -> bool:
        """Whether nobody has asked for this function, class or module so far; else what it asks for goes on."""
        if self._is_elsewhere(found, waiting) or self._is_wrapper_unasked(found):
            return True
        waiting += self._heard(found)
        return False

    def _is_open(self, space: NamesOfFile) -> bool:
        return self.opened >= (ATTRIBUTES if space.of_a_module else ANY)

    def _is_wrapper_unasked(self, found: _Reached) -> bool:
        """A function of a package around one of the user's, in a class, that nobody has asked for."""
        if type(found.value) is not types.FunctionType or not is_known(found.value):
            return False
        if self.running.may_run(found.name, found.ours):
            return False
        self.running.wait(str(found.name), found, found.ours)
        return True

    def _is_elsewhere(self, found: _Reached, waiting: list[_Reached]) -> bool:
        """Code of a package that only other packages use, so far."""
        if not is_foreign(found.value) or is_known(found.value):
            return False
        package = package_of(found.value)
        if found.near and package not in self.packages:
            self.packages.add(package)
            waiting += self.unused.pop(package, ())
        if package in self.packages:
            return False
        self.unused.setdefault(package, []).append(found)
        return True

    def _led_on(self, found: _Reached) -> Iterator[_Reached]:
        """What the value leads to, unless that is known. Code of installed packages is theirs, data that they hold
        for user code is not."""
        value, before = found.value, self.seen.get(id(found.value))
        if before is not None:
            if not found.adds_to(before):
                return
            found = found.with_all_of(before)
        self.seen[id(value)] = found
        code = is_code(value)
        kind: Any = type(value)
        if found.data and not code and has_hidden_state(kind) and not is_functorch_wrapped(value):
            self.objects.append(
                (f"an object of type {kind.__name__}, which keeps what it is given", partial(leads_out, kind))
            )
        if found.data and found.near and found.name is None and not found.kind and loose_part(value):
            self.objects.append((loose_part(value), partial(loose_part, value)))
        if found.data and found.near and found.name is None and isinstance(value, types.ModuleType):
            self.held.append(value)
        theirs = code and is_foreign(value)  # an object of theirs holds whatever user code hangs on it
        ours, data = found.ours and not theirs, found.data and not theirs
        near = found.near and not theirs
        inside = found.name if isinstance(value, property | staticmethod | classmethod) else None
        for one in self.keep(value, before is not None):
            if isinstance(one, ByName):
                step = _Reached(one.value, ours, data, near, one.name)
                if one.late and not self.running.may_run(one.name, False):
                    self.running.wait(one.name, step)
                else:
                    yield step
            elif isinstance(one, NamesOfFile):
                self.spaces.append(one)
                if self._is_open(one):
                    yield _Reached(one.value)
            elif isinstance(one, HeldBehind):
                # what a package's function holds may run where that may
                held = found.name if theirs and type(one.value) is types.FunctionType else None
                yield _Reached(one.value, found.ours, data, near, held)
            else:
                kept_kind = isinstance(one, Kind)
                yield _Reached(one.value if kept_kind else one, ours, data, near, inside, kept_kind)

    def _heard(self, found: _Reached) -> list[_Reached]:
        """What the names that a function asks for, or a class that may be called, lead to."""
        value = found.value
        if type(value) is types.FunctionType:
            own = found.ours and not is_foreign(value)
            if own:
                self.functions.setdefault(id(value), (value, set()))[1].add(found.name)
            if is_known(value):
                return []
            if self.running.may_run(found.name, own):
                return self.running.hear(value.__code__, own)
            self.running.wait(str(found.name), found, own)
        elif isinstance(value, type) and not is_known(value):
            return [
                *self._inherited(value),
                *self._asked_by_confide(value),
                *(self._made(value, found) if not found.kind else ()),
            ]
        return []

    def _asked_by_confide(self, kind: type) -> list[_Reached]:
        if issubclass(kind, nn.Module):
            return []
        of_kind = frozenset[str]().union(*(vars(base) for base in kind.__mro__))
        names = frozenset[str]().union(*(names for names in ASKED_BY_CONFIDE if names <= of_kind))
        return self.running.asked(names)

    def _made(self, kind: type, found: _Reached) -> list[_Reached]:
        if found.name is None or self.running.may_run(making(found.name), False):
            return [_Reached(one, found.ours, found.data, found.near) for one in makers(kind)]
        self.running.wait(making(found.name), found)
        return []

    def _inherited(self, kind: type) -> list[_Reached]:
        """Functions of packages that call, by name, what the class has in their place."""
        found: list[_Reached] = []
        for base in kind.__mro__:
            if base not in self.inherited and is_known(base):
                self.inherited.add(base)
                if package_of(base) in sys.stdlib_module_names:  # other functions of the library call them
                    found += self.running.asked(vars(base))
                for name, one in vars(base).items():
                    for function in _functions_of(one):
                        found += self.running.beside(name, function.__code__)
        return found

    def keeps(self, text: str) -> None:
        """Found, and cannot be put back; it ends with a process."""
        self.objects.append((text, lambda level: False))

    def reason(self, level: int = HERE) -> str:
        """What is used by a function of the user's that may run and is refused at this level; else an empty text."""
        for text, is_refused in self.objects:
            if level == HERE or is_refused(level):
                return text
        for function in self.running_functions():
            parts = (held_part(module, function, level) for module in self.held)
            found = unsealable_in(function, level) or next(filter(None, parts), "")
            if found:
                return f"{found} (in {function.__qualname__})"
        return ""

    def running_functions(self) -> list[types.FunctionType]:
        """The user's own that may run."""
        known = self.functions.values()
        return [function for function, names in known if any(self.running.may_run(name, True) for name in names)]


def is_code(value: Any) -> bool:
    return isinstance(value, _CODE)


def _functions_of(member: Any) -> list[types.FunctionType]:
    """The functions behind a member of a class: itself, or what a method of the class or a property is made of."""
    behind = (member, *(attribute_of(member, name, None) for name in _BEHIND_MEMBERS))
    return [one for one in behind if isinstance(one, types.FunctionType)]
