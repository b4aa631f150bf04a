"""The methods with their settings, read off their files: a look at the help does not wait for torch.

`cli.settings` knows the same by importing them, and a test holds the two to each other. The settings of a method stand
at the head of its class, before its functions, so that much of a file is parsed and no more.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "confide.methods"
OBJECTS = ("prior", "method")
"""Settings that cannot be typed: a prior has an option of its own, --prior; a method within a method is for Python."""

_CLASS = re.compile(r"^class (\w+)\((\w+)\):\n.*?(?=^    def |^    @|^\S|\Z)", flags=re.S | re.M)
_IMPORT = r"^from {package}\.(\w+) import (?:\([^)]*|[^\n]*)\b{name}\b"


def names() -> tuple[str, ...]:
    """The names of all methods."""
    return tuple(name for name, _ in listed())


def listed() -> list[tuple[str, str]]:
    """Every method with the first line of its file and its settings, in alphabetical order."""
    found = []
    for path in (path for folder in _folders() for path in folder.glob("[!_]*.py")):
        about = _text(path).lstrip('"').split("\n")[0].rstrip('."')
        for cls in _classes(path):
            name = next((line.value for line in _fields(path, cls) if ast.unparse(line.target) == "name"), None)
            if isinstance(name, ast.Constant):
                settings = ", ".join(one for one in _settings(path, cls) if one not in OBJECTS)
                found.append((str(name.value), f"{about} ({settings or 'no settings'})"))
    return sorted(found)


def _folders() -> list[Path]:
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        return [Path(place) for place in loaded.__path__]
    spec = find_spec(PACKAGE)  # which does not run the package
    return [Path(place) for place in (spec.submodule_search_locations if spec is not None else None) or ()]


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _classes(path: Path) -> dict[str, tuple[str, str]]:
    """The classes of a file that are made from one other: its name, and the text of their heads."""
    return {found[1]: (found[2], found[0]) for found in _CLASS.finditer(_text(path))}


def _fields(path: Path, cls: str) -> list[ast.AnnAssign]:
    head = ast.parse(_classes(path)[cls][1]).body[0]
    return [line for line in getattr(head, "body", ()) if isinstance(line, ast.AnnAssign)]


def _settings(path: Path, cls: str) -> list[str]:
    """The fields of a class after those of the class it is made from, as dataclasses order them."""
    base = _classes(path)[cls][0]
    place = _place_of(path, base)
    above = _settings(place, base) if base in _classes(place) else []
    own = [
        ast.unparse(line.target)
        for line in _fields(path, cls)
        if not ast.unparse(line.annotation).startswith("ClassVar")
    ]
    return list(dict.fromkeys([*above, *own]))


def _place_of(path: Path, name: str) -> Path:
    """The file of this package from which a class is taken, or this one."""
    found = re.search(_IMPORT.format(package=re.escape(PACKAGE), name=name), _text(path), flags=re.M)
    places = () if found is None else (folder / f"{found[1]}.py" for folder in _folders())
    return next((place for place in places if place.is_file()), path)
