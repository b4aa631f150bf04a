"""Where a value comes from: user code, an installed package, or a package whose state is its own."""

from __future__ import annotations

import contextlib
import csv
import dis
import functools
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_PACKAGES = frozenset({"torch", "numpy", "confide", "scipy", "sklearn"})
_OWN_STATE = _PACKAGES | sys.stdlib_module_names
_LIBRARY = sysconfig.get_path("stdlib")
_OF_PACKAGES = ("site-packages", "dist-packages")  # folders; the second one is Debian's
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_OF_NAMES = frozenset(
    dis.opmap[name]
    for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "IMPORT_NAME")
)
# Longer constants of a function are texts, not names.
LONGEST_NAME = 60
MADE_IN_C = 1 << 8  # the flag of types that nothing can be written to
_BORNE_OUT: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
# Where the types live that hold what user code puts into them.
_HOLDERS = frozenset({"builtins", "collections", "functools", "types", "_thread", "argparse"})


def attribute_of(value: Any, name: str, default: Any) -> Any:
    """An attribute of an object whose own way of giving it may raise anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        try:
            return object.__getattribute__(value, name)
        except AttributeError:
            return default


def _module_of(value: Any) -> str:
    """Where it was written, empty where that is not borne out: a name is a text that anybody can set.

    A function was written where its global names are, also one that wraps another and has its name. A class stands in
    its module, or all its functions were written in packages. Types made in C may have a descriptor for a name.
    """
    if type(value) is types.FunctionType:
        name = value.__globals__.get("__name__")
        home = sys.modules.get(name) if isinstance(name, str) else None
        return str(name) if getattr(home, "__dict__", None) is value.__globals__ else ""
    name = attribute_of(value, "__module__", None)
    if not isinstance(name, str):
        return ""
    return name if not isinstance(value, type) or _is_borne_out(value, name) else ""


def _is_borne_out(kind: type, name: str) -> bool:
    if kind not in _BORNE_OUT:
        _BORNE_OUT[kind] = bool(kind.__flags__ & MADE_IN_C) or _stands_in(kind, name) or _is_made_of_packages(kind)
    return _BORNE_OUT[kind]


def _stands_in(kind: type, name: str) -> bool:
    place: Any = sys.modules.get(name)
    for part in kind.__qualname__.split("."):
        inner = attribute_of(place, "__dict__", {})
        place = inner.get(part) if hasattr(inner, "get") else None
    return place is kind


def _is_made_of_packages(kind: type) -> bool:
    """A class made inside of a function: its own functions tell."""
    own = [one for one in vars(kind).values() if type(one) is types.FunctionType]
    return bool(own) and all(is_known(one) or _lies_installed(_module_of(one)) for one in own)


def package_of(value: Any) -> str:
    """The first name of the module where a function or a class was written, or of a module."""
    return (value.__name__ if isinstance(value, types.ModuleType) else _module_of(value)).partition(".")[0]


def is_known(value: Any) -> bool:
    """Whether it comes from a package whose state is its own."""
    if isinstance(value, types.ModuleType):
        return _is_known_name(value.__name__) and sys.modules.get(value.__name__) is value
    return _is_known_name(_module_of(value))


@functools.cache
def _is_known_name(name: str) -> bool:
    first = name.partition(".")[0]
    return first in _OWN_STATE and _is_the_real(first)


def is_foreign(value: Any) -> bool:
    """Whether what it leads to is the business of an installed package or of the standard library."""
    if isinstance(value, types.FunctionType | type):
        return is_known(value) or _lies_installed(_module_of(value))
    if isinstance(value, types.ModuleType):
        return is_installed(value)
    kind = type(value)
    return not isinstance(value, nn.Module) and kind.__module__ not in _HOLDERS and is_foreign(kind)


def _lies_installed(name: str) -> bool:
    return _is_among_packages(getattr(sys.modules.get(name), "__file__", None))


def _is_among_packages(path: str | None) -> bool:
    if not path:
        return False
    return any(folder in path for folder in _OF_PACKAGES) or any(
        path[len(root) + 1 :] in _recorded(root) for root in sys.path if root and path.startswith(root + os.sep)
    )


@functools.cache
def _recorded(root: str) -> frozenset[str]:
    """Files that an installer put into a folder of its own (pip install --target): its records list them."""
    found = set[str]()
    for record in Path(root).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), record.open(newline="") as lines:
            found.update(os.path.normpath(line[0]) for line in csv.reader(lines) if line)
    return frozenset(found)


def is_installed(module: types.ModuleType) -> bool:
    return is_known(module) or _is_among_packages(getattr(module, "__file__", None))


def is_of_a_package(kind: type) -> bool:
    return _module_of(kind).partition(".")[0] in _PACKAGES


@functools.cache
def _is_the_real(name: str) -> bool:
    """Not a file of the user's that happens to be called like one of the standard library (code.py, test.py)."""
    if name in sys.builtin_module_names or name in _PACKAGES:
        return name != "__main__"
    origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    if origin in (None, "frozen", "built-in"):
        return name != "__main__"
    return origin.startswith(_LIBRARY) and not _is_among_packages(origin[len(_LIBRARY) :])


@functools.cache
def names_used(code: types.CodeType) -> frozenset[str]:
    """Global names and attributes that a function, or one defined inside it, may use, also spelt out as text."""
    inner = [names_used(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    spelt = [constant for constant in code.co_consts if isinstance(constant, str) and len(constant) <= LONGEST_NAME]
    return frozenset(code.co_names).union(spelt, *inner)


@functools.cache
def names_outside(code: types.CodeType) -> frozenset[str]:
    """Global names that a function, or one inside it, may use, and modules that it imports: attributes left aside."""
    found, carried = set[str](), 0
    for place in range(0, len(code.co_code), 2):
        step, number = code.co_code[place], code.co_code[place + 1] | carried
        carried = number << 8 if step == dis.EXTENDED_ARG else 0
        if step in _OF_NAMES:
            found.add(code.co_names[number >> 1 if step == _LOAD_GLOBAL else number])
    inner = [names_outside(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (names_used(code) if "globals" in found else frozenset(found)).union(*inner)
