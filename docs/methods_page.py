"""Write the page of all methods from their docstrings: `make docs`. A new file in methods/ is in it with no edit."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path

from confide import methods


def page() -> str:
    """Every method that is found: its name, its mathematics and papers, and its settings with their defaults."""
    parts = ["# Methods\n\nMade from the methods' own docstrings.\n"]
    for name, cls in methods.all_methods().items():
        settings = "\n".join(f"    {field.name} = {_default(field)}" for field in dataclasses.fields(cls))
        parts.append(f"## {name}\n\n{inspect.getdoc(inspect.getmodule(cls))}\n")
        parts.append("```\n" + inspect.cleandoc(cls.__doc__ or "") + "\n```\n")
        parts.append(f"Settings and their defaults:\n\n{settings}\n")
    return "\n".join(parts)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the file to write")
    path = parser.parse_args().path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")
