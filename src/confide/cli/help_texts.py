"""Help texts: plain paragraphs from docstrings, examples that can be copied, lists that line up at 80 columns."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

WIDTH = 77  # of a terminal with 80 columns, typer's padding leaves 78


def teach(
    app: Any,
    function: Callable[..., None],
    examples: Sequence[str],
    closing: str | Callable[[], str] = "",
    name: str | None = None,
) -> None:
    """Add a command, named like its function if not otherwise, whose help is the docstring, `closing` and examples.

    A `closing` that is a function is called only when the help is shown: what it lists may be slow to import.
    """
    shown = "\n".join(f"  {line}" for example in examples for line in example.split("\n"))
    title = "Example:" if len(examples) == 1 else "Examples:"
    epilog = f"{title}\n{shown}"
    kind = _closing_with(closing) if callable(closing) else TyperCommand
    if isinstance(closing, str) and closing:
        epilog = f"{closing}\n\n{epilog}"
    app.command(name, cls=kind, help=flowing(function.__doc__ or ""), epilog=epilog)(function)


def _closing_with(closing: Callable[[], str]) -> type[TyperCommand]:
    """A command whose last paragraph is made when it is read."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            examples = self.epilog
            self.epilog = f"{closing()}\n\n{examples}"
            try:
                super().format_help(ctx, formatter)
            finally:
                self.epilog = examples

    return Command


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
