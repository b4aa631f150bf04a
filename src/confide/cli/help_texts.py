"""Help texts: plain paragraphs from docstrings, examples that can be copied, lists that line up at 80 columns."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape

WIDTH = 77  # of a terminal with 80 columns, typer's padding leaves 78


def teach(
    app: Any, function: Callable[..., None], examples: Sequence[str], closing: str = "", name: str | None = None
) -> None:
    """Add a command, named like its function if not otherwise, whose help is the docstring, `closing` and examples."""
    shown = "\n".join(f"  {line}" for example in examples for line in example.split("\n"))
    title = "Example:" if len(examples) == 1 else "Examples:"
    epilog = f"{closing}\n\n{title}\n{shown}" if closing else f"{title}\n{shown}"
    app.command(name, help=flowing(function.__doc__ or ""), epilog=epilog)(function)


def flowing(text: str) -> str:
    """Paragraphs without the line breaks of the source, so that the terminal breaks the lines."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they mean in two columns."""
    widest = max((len(name) for name, _ in rows), default=0)
    lines = [
        textwrap.fill(about, WIDTH, initial_indent=f"  {name:<{widest}}  ", subsequent_indent=" " * (widest + 4))
        for name, about in rows
    ]
    return escape("\n".join(lines))
