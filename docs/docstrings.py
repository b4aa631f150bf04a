"""Docstrings as Markdown for the reference: parameters become tables, and what a decorator writes is seen too.

Two forms are known: "name : type" under a ruled heading, as scikit-learn has it, and the plain columns of most classes,

    records   nominal number of records
    classes   their labels, or how many there are

Everything else stays as it is written.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from typing import Any

import griffe

HEADING = re.compile(r"^(Parameters|Attributes|Examples|Returns)\n-+$", flags=re.M)
ROW = re.compile(r"^(?! )(?P<name>`?[A-Za-z_][\w.]*(?:, [A-Za-z_]\w*)*`?|\"[\w-]+\")  +(?P<about>\S.*)$")
NAMED = re.compile(r"^(?P<name>[A-Za-z_][\w, ]*?) : (?P<kind>.+)$")


def as_markdown(text: str) -> str:
    """The docstring with its lists of parameters as tables."""
    parts = HEADING.split(inspect.cleandoc(text))
    result = [_columns(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        result.append(f"**{title}**\n")
        result.append(_code(body) if title == "Examples" else _named(body))
    return "\n\n".join(result)


def _named(body: str) -> str:
    """ "name : type" and an indented description, or plain names."""
    rows: list[list[str]] = []
    for line in body.strip("\n").splitlines():
        found = NAMED.match(line)
        if found:
            rows.append([found["name"], found["kind"], ""])
        elif line.strip() and rows and line.startswith(" "):
            rows[-1][2] = f"{rows[-1][2]} {line.strip()}".strip()
        elif line.strip():
            rows.append([line.strip(), "", ""])
    return _table(("name", "type", "meaning"), rows) if rows else ""


def _columns(text: str) -> str:
    """Plain columns: a name, two blanks or more, what it means; lines that go on are indented."""
    lines, result, rows = text.splitlines(), [], []
    for line in [*lines, ""]:
        found = ROW.match(line)
        if found:
            rows.append([found["name"].strip("`"), found["about"]])
        elif rows and line.startswith("  ") and line.strip():
            rows[-1][1] += f" {line.strip()}"
        else:
            if rows:
                result += ["", _table(("name", "meaning"), rows), ""]
                rows = []
            result.append(line)
    return "\n".join(result)


def _code(body: str) -> str:
    return "```python\n" + inspect.cleandoc(body).strip("\n") + "\n```"


def _table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for name, *rest in rows:
        lines.append(" | ".join([f"`{name}`", *(cell.replace("|", "\\|").replace("<", "&lt;") for cell in rest)]))
    return "\n".join(f"| {line} |" for line in lines)


class Tables(griffe.Extension):
    """Gives every class and function the docstring that Python has, with tables."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        _told(cls)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        _told(func)


def _told(thing: griffe.Class | griffe.Function) -> None:
    if thing.docstring is None:
        return
    text = thing.docstring.value
    if thing.is_class:
        with contextlib.suppress(ImportError, AttributeError):  # a decorator may have written more than the file has
            text = getattr(importlib.import_module(thing.module.path), thing.name).__doc__ or text
    thing.docstring.value = as_markdown(text)
