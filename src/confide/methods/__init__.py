"""Methods, found by name: every module in this folder that defines a Method class is listed, with no other edit.

confide.methods.names()       the names for the command line
confide.methods.get("sgld")   the class of that name
confide.methods.SGLD          the same class as an attribute
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any, TypeGuard

from confide.errors import Refusal
from confide.methods.base import Method, Problem
from confide.wording import meant

__all__ = ["Method", "Problem", "all_methods", "for_task", "get", "names", "samplers"]


@cache
def all_methods() -> dict[str, type[Method]]:
    """Every method class by name, in alphabetical order."""
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name == "base" or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if _is_method(value) and value.__module__ == module.__name__:
                if value.name in found:
                    raise Refusal(f"name={value.name!r}: two methods carry this name; rename one")
                found[value.name] = value
    return dict(sorted(found.items()))


def _is_method(value: object) -> TypeGuard[type[Method]]:
    return isinstance(value, type) and issubclass(value, Method) and not inspect.isabstract(value)


def names() -> tuple[str, ...]:
    """The names of all methods."""
    return tuple(all_methods())


def samplers() -> tuple[str, ...]:
    """The names of the methods that keep draws along a chain."""
    return tuple(name for name, method in all_methods().items() if method().draws_of(1) is not None)


def for_task(task: str) -> tuple[str, ...]:
    """The names of the methods that can learn it."""
    return tuple(name for name, method in all_methods().items() if task in method.tasks)


def get(name: str) -> type[Method]:
    """The method class of that name, with hyphens or underscores alike."""
    by_spelling = {known.replace("_", "-"): method for known, method in all_methods().items()}
    try:
        return by_spelling[name.replace("_", "-")]
    except KeyError:
        raise Refusal(f"method={name!r}: unknown; known: {', '.join(names())}{meant(name, names())}") from None


def __getattr__(name: str) -> Any:
    for cls in all_methods().values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in all_methods().values())])
