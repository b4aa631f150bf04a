"""Help texts: plain paragraphs from docstrings, examples that can be copied, lists that line up at 80 columns.

They are set without frames and colours: the reader of Markdown that those need would be half of the time to wait.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from typer.core import TyperCommand

WIDTH = 77  # of a terminal with 80 columns, the last two stay free


class PlainCommand(TyperCommand):
    """A command whose options stand under the headings that they name, and whose examples stay as they are."""

    closing: Callable[[], str] | None = None
    """Made when the help is read: what it lists may be slow to find out."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        under: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown is not None:
                argument = parameter.param_type_name == "argument"
                row = (parameter.metavar or shown[0], shown[1]) if argument else shown  # without the type of Python
                heading = getattr(parameter, "rich_help_panel", None) or ("Arguments" if argument else "Options")
                under.setdefault(heading, []).append(row)
        for heading, rows in sorted(under.items(), key=lambda item: item[0] == "Options"):  # --help comes last
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        parts = (self.closing() if self.closing is not None else "", self.epilog or "")
        formatter.write("".join(f"\n{part}\n" for part in parts if part))


def teach(
    app: Any,
    function: Callable[..., None],
    examples: Sequence[str],
    closing: str | Callable[[], str] = "",
    name: str | None = None,
) -> None:
    """Add a command, named like its function if not otherwise, whose help is the docstring, `closing` and examples."""
    shown = "\n".join(f"  {line}" for example in examples for line in example.split("\n"))
    title = "Example:" if len(examples) == 1 else "Examples:"
    made = (lambda: closing) if isinstance(closing, str) else closing
    kind = type("Command", (PlainCommand,), {"closing": staticmethod(made)})
    about = flowing(function.__doc__ or "")
    first = about.split("\n\n")[0]  # whole in a list of commands, not cut off
    app.command(name, cls=kind, help=about, short_help=first, epilog=f"{title}\n{shown}")(function)


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
    return "\n".join(lines)
