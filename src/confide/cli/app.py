"""The command line: `confide account | plan | fit | predict | evaluate | compare | export | audit | ledger | papers`.

Every command prints one JSON object with `--json`, exits 0 on success, 2 on bad arguments or bad input and 3 when a
privacy budget would be exceeded, with one clear sentence on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from confide.cli import account, audit, compare, evaluate, export, fit, ledger, output, papers, plan, predict

app = typer.Typer(
    name="confide",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Learn Bayesian models from private records, with a privacy statement that can be checked.",
    epilog="Add --debug to any command, or set CONFIDE_DEBUG=1, to see the traceback of an error.",
)
for command in (account, plan, fit, predict, evaluate, compare, export, audit, ledger, papers):
    command.register(app)


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
    return output.run(typer.main.get_command(app), words or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
