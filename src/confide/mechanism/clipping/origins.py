"""Where a value comes from: user code, an installed package, or a package whose state is its own."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from typing import Any

from torch import nn

_PACKAGES = frozenset({"torch", "numpy", "confide", "scipy", "sklearn"})
_OWN_STATE = _PACKAGES | sys.stdlib_module_names
_LIBRARY = sysconfig.get_path("stdlib")
# Longer constants of a function are texts, not names.
LONGEST_NAME = 60
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
    """Where it was written; types made in C may have a descriptor there, or nothing."""
    name = attribute_of(value, "__module__", None)
    return name if isinstance(name, str) else ""


def is_known(value: Any) -> bool:
    """Whether it comes from a package whose state is its own."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = _module_of(value)
    first = name.partition(".")[0]
    return first in _OWN_STATE and _is_the_real(first)


def is_foreign(value: Any) -> bool:
    """Whether what it leads to is the business of an installed package or of the standard library."""
    if isinstance(value, types.FunctionType | type):
        return is_known(value) or _is_installed(_module_of(value))
    kind = type(value)
    return not isinstance(value, nn.Module) and kind.__module__ not in _HOLDERS and is_foreign(kind)


def _is_installed(name: str) -> bool:
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")


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
    return origin.startswith(_LIBRARY) and "site-packages" not in origin[len(_LIBRARY) :]


@functools.cache
def names_used(code: types.CodeType) -> frozenset[str]:
    """Global names and attributes that a function, or one defined inside it, may use, also spelt out as text."""
    inner = [names_used(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    spelt = [constant for constant in code.co_consts if isinstance(constant, str) and len(constant) <= LONGEST_NAME]
    return frozenset(code.co_names).union(spelt, *inner)
