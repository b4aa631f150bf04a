"""The command line: `confide account | plan | facts | fit | predict | evaluate | compare | export | audit | ...`.

Every command prints one JSON object with `--json`, exits 0 on success, 2 on bad arguments or bad input and 3 when a
privacy budget would be exceeded, with one clear sentence on stderr. A command's file is read when it is called: the
list of commands and the version come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from confide.cli import output

COMPLETION = "_CONFIDE_COMPLETE"
"""Set by the completion script that `confide --install-completion` writes."""
COMMANDS = {
    "account": "Price a run: epsilon by every accountant, and what an attacker can do.",
    "plan": "Find the noise that keeps a run within a budget. No data is read.",
    "facts": "Draft the file of public facts of a table. Only the names of its columns are read.",
    "fit": "Learn a Bayesian model from private records within a privacy budget.",
    "predict": "Predict new records with a fitted model. It costs no budget.",
    "evaluate": "Measure a fitted model on records that it has not learnt from, or that you pay for.",
    "compare": "Compare methods on one data set: utility, calibration, time, memory and storage at the same epsilon.",
    "tune": "Choose the best of several settings privately, within one budget.",
    "export": "Write a fitted model for deployment. It costs no budget.",
    "audit": "Attack a method on made-up records and bound its epsilon from below.",
    "ledger": "Show what was spent, set a ceiling on it, check it.",
    "pate": "Learn a classifier from votes of teachers on public records (PATE).",
    "sample": "Draw from a tempered posterior of a linear model: a draw is private by itself.",
    "mixture": "Learn where the components of a mixture of Gaussians stand: no target, numbers only.",
    "baseline": "Measure expectation propagation or its filter without privacy, to see what a budget costs.",
    "party": "Learn from records of several owners who do not pool them.",
    "papers": "Run the experiments of published papers under a sound epsilon.",
}
"""By name, each with the first sentence of its own help, which a test holds it to."""


class Commands(TyperGroup):
    """The commands; each is a file of its own name beside this one."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.commands = {name: TyperCommand(name, help=about, short_help=about) for name, about in COMMANDS.items()}
        self._listing = False

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS and "--help" in args:
            _show_help(ctx, args)  # before anything else is read: what checks values would be half of the time to wait
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._listing or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def command(name: str) -> Any:
    """The command of that name, read from its file."""
    alone = typer.Typer(callback=lambda: None, rich_markup_mode=None)
    import_module(f"confide.cli.{name}").register(alone)
    group: Any = typer.main.get_command(alone)
    return group.commands[name]


def _show_help(ctx: Any, words: Sequence[str]) -> None:
    """The help of the command that the first words name, be it one of a group."""
    found = ctx.command
    for word in words:
        if word not in getattr(found, "commands", {}):
            break
        found = found.get_command(ctx, word)
        ctx = type(ctx)(found, parent=ctx, info_name=word)
    sys.stdout.write(f"{found.get_help(ctx)}\n")


app = typer.Typer(
    name="confide",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Learn Bayesian models from private records, with a privacy statement that can be checked.",
    epilog="Add --debug to any command, or set CONFIDE_DEBUG=1, to see the traceback of an error.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import confide

        sys.stdout.write(f"confide {confide.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Learn Bayesian models from private records, with a privacy statement that can be checked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    root: Any = typer.main.get_command(app)
    if COMPLETION in os.environ:
        # The shell asks what could stand next; typer answers on stdout and ends the process.
        root.main(args=words, prog_name="confide")
    return output.run(root, words or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
