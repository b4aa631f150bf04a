"""Which code may run when a module runs: what is held as a value, what is asked for by name, and what Python calls.

A class has functions that its forward never calls: how it is loaded, how its optimiser is made. `AskedNames` knows the
names that code which may run asks for; a function that is found under another name waits there until it is asked for.
Names are those that stand in the code, also spelt out as texts. Code that computes names (`computed_by`) may ask for
anything that the user wrote.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from confide.mechanism.clipping.origins import names_used

# How an object is made, shown or copied: called by those who make, show or copy one.
_MADE = ("__init__", "__new__")
_SHOWN = ("__repr__", "__str__")
_COPIED = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__")
_ASKED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("type", "__class__", "__mro__", "__bases__", "__base__", "mro"), _MADE),
    **dict.fromkeys(("str", "repr", "format", "print", "ascii"), _SHOWN),
    **dict.fromkeys(("copy", "deepcopy", "dump", "dumps", "save"), _COPIED),
}
_SHOWING = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"})
# With these a name can be computed, whatever they are given.
_WORDS = "vars dir __dict__ __globals__ __getattribute__ attrgetter methodcaller getmembers getattr_static"
_COMPUTING = frozenset(_WORDS.split())
# With these if the name is no constant, which is their second argument.
_BY_NAME = frozenset({"getattr", "setattr", "delattr", "hasattr"})
NAME_PLACE = 2  # arguments on the stack when the name is on it
_OF_THE_NAME = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# What computed names may be: those of attributes, which begin with a letter that stands there; or all.
ATTRIBUTES, ANY = 1, 2
_LOADS = frozenset({"LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CONST", "LOAD_ATTR"})
_CALLS = frozenset({"PRECALL", "CALL", "CALL_KW"})
_OF_SETS = frozenset(
    {"set", "frozenset", "union", "intersection", "difference", "symmetric_difference", "symmetric_difference_update"}
    | {"intersection_update", "difference_update"}
)


class AskedNames:
    """The names that code which may run asks for, and what waits to be asked for."""

    def __init__(self) -> None:
        self.names: set[str] = {"forward", "__call__"}
        self.computed = 0
        self._waiting: dict[str, list[Any]] = {}
        self._own: list[Any] = []
        self._heard: set[types.CodeType] = set()

    def may_run(self, name: str | None, own: bool) -> bool:
        if name is None or name in self.names or is_special(name):
            return True
        return own and (self.computed == ANY or (self.computed == ATTRIBUTES and name[:1].isalpha()))

    def wait(self, name: str, found: Any, own: bool = False) -> None:
        """`found` is given back when somebody asks for the name; code then asks for its own names."""
        self._waiting.setdefault(name, []).append(found)
        if own:
            self._own.append(found)

    def hear(self, code: types.CodeType, own: bool) -> list[Any]:
        """This code may run: what has waited for the names that it uses."""
        if code in self._heard:
            return []
        self._heard.add(code)
        asked = asked_by(code) if own else names_used(code).difference(_MADE, _SHOWN, _COPIED)
        found = self._ask([*asked, *map(making, asked - named_for_super(code))])
        if own and computed_by(code) > self.computed:
            self.computed = computed_by(code)
            found += self._own
        return found

    def beside(self, name: str, code: types.CodeType) -> list[Any]:
        """A function of a package that user code inherits: it asks for the names of what may stand in its class."""
        if self.may_run(name, False):
            return self._ask(names_used(code).difference(_MADE, _SHOWN, _COPIED))
        self.wait(name, code)
        return []

    def asked(self, names: Iterable[str]) -> list[Any]:
        """What waited for these names, which somebody asks for whose code is not looked at."""
        return self._ask({*names}.difference(_MADE, _SHOWN, _COPIED))

    def _ask(self, names: Iterable[str]) -> list[Any]:
        found: list[Any] = []
        fresh = [name for name in names if name not in self.names]
        while fresh:
            name = fresh.pop()
            if name in self.names:
                continue
            self.names.add(name)
            for one in self._waiting.pop(name, ()):
                if isinstance(one, types.CodeType):
                    fresh += names_used(one).difference(_MADE, _SHOWN, _COPIED)
                else:
                    found.append(one)
        return found


def is_special(name: str) -> bool:
    """Called by Python itself: operators, attributes, properties of the data model; not how an object is made."""
    return name.startswith("__") and name.endswith("__") and name not in (*_MADE, *_SHOWN, *_COPIED)


def making(name: str) -> str:
    """Under this name waits what is called when a class of the name is."""
    return f"{name}()"


def makers(kind: type) -> list[Any]:
    """What is called when an object of the class is made."""
    return [vars(base)[name] for base in kind.__mro__ for name in _MADE if name in vars(base)]


@functools.cache
def asked_by(code: types.CodeType) -> frozenset[str]:
    """The names a function of the user's asks for, and what it does without a name: showing an object."""
    steps = steps_of(code)
    shown = any(step.opname in _SHOWING or (step.opname == "BINARY_OP" and "%" in step.argrepr) for step in steps)
    remade = any(
        step.argval in _MADE and not (step.opname == "LOAD_SUPER_ATTR" or before.opname in _CALLS)
        for before, step in pairwise(steps)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    )
    names = names_used(code) if remade else names_used(code).difference(_MADE)
    looked_at = frozenset() if calls_a_class(steps) else frozenset(("type", "__class__"))
    meant = [_ASKED_BY.get(name, ()) for name in names - looked_at]
    return names.union(_SHOWN if shown else (), *meant)


def calls_a_class(steps: list[dis.Instruction]) -> bool:
    """Whether type(x) or x.__class__ may be called: not where it is compared, or asked for its name."""
    steps = [step for step in steps if step.opname not in ("CACHE", "PRECALL")]
    for place, step in enumerate(steps):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "__class__":
            rest = steps[place + 1 :]
        elif step.opname == "LOAD_GLOBAL" and step.argval == "type":
            called = next((at for at in range(place, len(steps)) if steps[at].opname == "CALL"), len(steps))
            rest = steps[called + 1 :]
        else:
            continue
        named = rest and rest[0].opname == "LOAD_ATTR" and rest[0].argval in ("__name__", "__qualname__")
        then = next((one.opname for one in rest if one.opname not in _LOADS), "")
        if not named and then not in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
            return True
    return False


@functools.cache
def makes_sets(code: types.CodeType) -> bool:
    """Whether it may make a set of objects that it was not given as one, also by what views of keys have between them,
    or add to one."""
    steps, names = steps_of(code), names_used(code)
    opened = any(step.opname in ("BUILD_SET", "SET_ADD", "SET_UPDATE") for step in steps)
    of_views = bool(names & {"keys", "items"}) and any(
        step.opname == "BINARY_OP" and step.argrepr[:1] in ("&", "|", "^", "-") for step in steps
    )
    return opened or of_views or bool(names & _OF_SETS)


def looks_into_a_copy(function: types.FunctionType) -> bool:
    """Whether it may see the memory of `deepcopy`: given by whoever asks for a copy, or told how to make one."""
    return function.__name__ == "__deepcopy__" or _gives_memory_to_a_copy(function.__code__)


@functools.cache
def _gives_memory_to_a_copy(code: types.CodeType) -> bool:
    steps = [step for step in _own_steps(code) if step.opname not in ("CACHE", "PRECALL")]
    for place, step in enumerate(steps):
        loaded = step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
        if loaded and step.argval == "deepcopy" and arguments_given(steps[place + 1 :]) != 1:
            return True
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(_gives_memory_to_a_copy(one) for one in inner)


def arguments_given(steps: list[dis.Instruction]) -> int:
    """How many arguments what was just loaded is called with; -1 where it is not called, or not at once."""
    depth = 0
    for step in steps:
        if step.opname in ("CALL", "CALL_KW") and depth == step.arg:
            return depth
        if step.opname == "KW_NAMES" or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return -1
        depth += dis.stack_effect(step.opcode, step.arg, jump=False) if step.opname != "PUSH_NULL" else 0
        if depth < 0:
            return -1
    return -1


@functools.cache
def imported_by(code: types.CodeType) -> frozenset[str]:
    """Modules that a function, or one inside it, imports when it runs."""
    return frozenset(str(step.argval) for step in steps_of(code) if step.opname == "IMPORT_NAME" and step.argval)


@functools.cache
def named_for_super(code: types.CodeType) -> frozenset[str]:
    """Classes that are named for nothing but super(Class, self): none of them is made there."""
    steps = [step for step in steps_of(code) if step.opname != "PUSH_NULL"]
    loaded = [(before, step) for before, step in pairwise(steps) if step.opname == "LOAD_GLOBAL"]
    inside = {step.argval for before, step in loaded if before.opname == "LOAD_GLOBAL" and before.argval == "super"}
    return frozenset(inside - {step.argval for before, step in loaded if before.argval != "super"})


@functools.cache
def computed_by(code: types.CodeType) -> int:
    """Which names a function may ask for that do not stand in its code: none, ATTRIBUTES of objects, or ANY."""
    if names_used(code) & _COMPUTING:
        return ANY
    steps, found = _own_steps(code), 0
    for place, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in _BY_NAME:
            found = max(found, _name_given(steps[place + 1 :]))
        elif step.argval in _BY_NAME and step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_DEREF"):
            return ANY
    return max([found, *(computed_by(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))])


def _name_given(steps: list[dis.Instruction]) -> int:
    """What follows getattr: an object, a text that stands there or begins with one, perhaps a default, and the call."""
    depth, text, kind = 0, "", ANY
    for step in steps:
        if step.opname in ("CACHE", "PUSH_NULL"):
            continue
        if step.opname in _CALLS and depth == step.arg:
            return kind
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return ANY
        after = depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname == "LOAD_CONST" and isinstance(step.argval, str) and after == NAME_PLACE:
            text, kind = step.argval.partition("%")[0], 0
        elif depth >= NAME_PLACE and (after <= NAME_PLACE or (depth == NAME_PLACE and step.opname in _OF_THE_NAME)):
            joined = step.opname == "BUILD_STRING" or (step.opname == "BINARY_OP" and step.argrepr in ("+", "%"))
            kind = ATTRIBUTES if kind < ANY and joined and text[:1].isalpha() else ANY
        depth = after
        if depth < 0:
            return ANY
    return ANY


def _own_steps(code: types.CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    """Of a function and of those inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*_own_steps(code), *(step for one in inner for step in steps_of(one))]
