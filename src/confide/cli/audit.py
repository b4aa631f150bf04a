"""`confide audit`: attack a method and see whether its claim survives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from confide import rules
from confide.cli import method_list, options
from confide.cli.help_texts import WIDTH, teach
from confide.cli.options import DATA, OUTPUT, PRIVACY, RUN, Json
from confide.cli.output import emit_json, output, progress_bar
from confide.errors import CommandError
from confide.wording import delta

FAILED = 4  # An exit code of its own: the audit itself went well, and found something.
ATTACKS = ("white-box", "black-box")
EXAMPLES = (
    "confide audit --method sgld --epsilon 1 --canaries 1000",
    "confide audit --method sgd --epsilon 4 --attack black-box --rate 1",
    "confide audit --method sgld --self-test --page audit.html",
    "confide audit --module net.py:Net --features 3,32,32 --classes 10",
)
CLOSING = (
    "Exit code 4: the audit failed. The lower bound is above the claim, a check found the mechanism to be other than "
    "stated, or the self-test missed a fault."
)

MethodName = Annotated[
    str,
    typer.Option("--method", metavar="NAME", help="The method to attack.", rich_help_panel=RUN),
]
Epsilon = Annotated[
    float,
    typer.Option(metavar="E", help="The claim to attack: the noise is set so that it holds.", rich_help_panel=PRIVACY),
]
Delta = Annotated[
    float,
    typer.Option(metavar="D", help="Delta of the claim.", rich_help_panel=PRIVACY),
]
Canaries = Annotated[
    int,
    typer.Option(metavar="M", help="Canary records, each in or out by the toss of a coin.", rich_help_panel=RUN),
]
Steps = Annotated[int, typer.Option(metavar="T", help="Steps of the run; an even number.", rich_help_panel=RUN)]
Rate = Annotated[
    float,
    typer.Option(metavar="Q", help="Share of the records in a batch; 1 for all of them.", rich_help_panel=RUN),
]
AttackName = Annotated[
    str,
    typer.Option(
        "--attack",
        metavar="A",
        help="white-box (sees every release) or black-box (sees the posterior only).",
        rich_help_panel=RUN,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of the method.", rich_help_panel=RUN, show_default=False
    ),
]
Own = Annotated[
    str,
    typer.Option(
        "--module",
        metavar="FILE:NAME",
        help="Audit your own network or query instead: hostile records, one more or less. The file is run.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
OwnLoss = Annotated[
    str,
    typer.Option(
        "--loss",
        metavar="FILE:NAME",
        help="Its loss, one number per record; by default what a fit would take.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Features = Annotated[
    str,
    typer.Option(
        metavar="SHAPE", help="Shape of one record, such as 3,32,32.", rich_help_panel=DATA, show_default=False
    ),
]
Classes = Annotated[
    int, typer.Option(metavar="K", help="Classes of the labels; 0 for a real target.", rich_help_panel=DATA)
]
Tokens = Annotated[
    int, typer.Option(metavar="V", help="Features are whole numbers below V; 0 for real.", rich_help_panel=DATA)
]
Page = Annotated[
    Path | None,
    typer.Option(
        "--page",
        metavar="FILE.html",
        help="Write the result as a page; with --self-test, the planted faults are on it. A new file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test",
        metavar="",
        help="Plant faults in turn and show what catches which, at claims of its own.",
        rich_help_panel=OUTPUT,
    ),
]


def audit(
    *,
    method: MethodName = "sgld",
    epsilon: Epsilon = 1.0,
    delta: Delta = rules.DELTA,
    canaries: Canaries = 1000,
    steps: Steps = 16,
    rate: Rate = 0.25,
    attack: AttackName = "white-box",
    setting: Settings = None,
    module: Own = "",
    loss: OwnLoss = "",
    features: Features = "",
    classes: Classes = 0,
    tokens: Tokens = 0,
    self_test: SelfTest = False,
    page: Page = None,
    as_json: Json = False,
) -> None:
    """Attack a method on made-up records and bound its epsilon from below.

    Canaries go through the same sampling, clipping and noise as any record. From what is released, the audit guesses
    which were in. If it guesses better than the claim allows, the claim is refuted; if not, nothing is proven. Beside
    the guesses, checks look at sensitivity, noise, sampling, the ledger and what could be hidden in low-order bits.
    With --module, records made to do harm are put into your own network or query, one more or less.
    """
    from confide.cli import audit_own
    from confide.cli.settings import make_method

    if page is not None:
        check_new_file("--page", page)
    options.whole("--classes", classes, least=0)
    options.whole("--tokens", tokens, least=0)
    if module:
        if not audit_own.run_own(module, loss, features, classes, tokens, page, as_json):
            raise typer.Exit(FAILED)
        return
    audit_own.check_alone({"--loss": loss, "--features": features, "--classes": classes, "--tokens": tokens})
    chosen = make_method(method, setting or (), None)
    options.epsilon(epsilon)
    options.delta(delta)
    options.whole("--canaries", canaries, least=10, most=10**6)
    options.whole("--steps", steps, least=2, most=10**5)
    if steps % 2:
        raise CommandError(f"--steps={steps}: must be an even number, since canaries change their sign at every step")
    options.number("--rate", rate, above=0.00999, most=1)
    options.choice("--attack", attack, ATTACKS)
    if self_test and page is None:
        _run_self_test(chosen, as_json)
        return
    from confide.auditing import audit as run_audit

    started = time.perf_counter()
    terms: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "canaries": canaries, "steps": steps, "rate": rate}
    with progress_bar(f"auditing {method}") as progress:
        found = run_audit(chosen, attack=options.choice("--attack", attack, ATTACKS), progress=progress, **terms)
    if page is not None:
        _write_page(page, found, _faults_in(chosen) if self_test else ())
    if as_json:
        emit_json({**found.to_dict(), "seconds": time.perf_counter() - started})
    else:
        _show(output(), found)
    if not found.passed:
        raise typer.Exit(FAILED)


def check_new_file(option: str, path: Path) -> None:
    """Refuse before the long work what could not be written after it."""
    if not path.name or os.path.lexists(path):
        raise CommandError(f"{option}={path}: must name a new file")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise CommandError(f"{option}={path}: {path.absolute().parent} is not a directory that can be written to")


def _write_page(path: Path, found: Any, faults: Sequence[Any]) -> None:
    from confide.auditing.page import render_audit

    with path.open("x", encoding="utf-8") as file:
        file.write(render_audit(found, faults))


def _faults_in(chosen: Any) -> Sequence[Any]:
    from confide.auditing import self_test

    with progress_bar(f"planting faults in {chosen.name}") as progress:
        return self_test(chosen, progress=progress)


def _show(console: Console, found: Any) -> None:
    verdict = "the claim survives" if found.passed else f"[bold]FAILED[/bold] by {', '.join(found.caught_by)}"
    console.print(
        f"[bold]epsilon is at least {found.epsilon_lower:.3f}[/bold], claimed {found.epsilon_claimed:g}: {verdict}"
    )
    console.print(
        f"{found.attack}, {found.correct} of {found.guesses} guesses right about {found.canaries} canaries; "
        f"confidence {found.confidence:.0%} at delta {delta(found.delta)}"
    )
    if not found.checks:
        return
    console.print()
    table = _plain("check", "", "measured", "expected", "level")
    for check in found.checks:
        verdict = "passed" if check.passed else "[bold]FAILED[/bold]"
        table.add_row(
            check.name, verdict, check.measured, check.expected, f"{check.level:g}" if check.level else "exact"
        )
    console.print(table)


def _run_self_test(chosen: Any, as_json: bool) -> None:
    rows = _faults_in(chosen)
    if as_json:
        emit_json({"method": chosen.name, "rows": [row.to_dict() for row in rows], "passed": _all_caught(rows)})
    else:
        _show_self_test(output(), chosen.name, rows)
    if not _all_caught(rows):
        raise typer.Exit(FAILED)


def _all_caught(rows: Sequence[Any]) -> bool:
    """Right code passes, and every fault is caught by something."""
    return all(bool(row.caught_by) == (row.fault is not None) for row in rows)


def _show_self_test(console: Console, method: str, rows: Sequence[Any]) -> None:
    console.print(f"[bold]faults planted in {method}[/bold]" + ("" if _all_caught(rows) else ": [bold]FAILED[/bold]"))
    table = _plain("fault", "claimed", "at least", "caught by")
    for row in rows:
        caught = ", ".join(row.caught_by) or "nothing"
        table.add_row(row.fault or "none", f"{row.epsilon_claimed:g}", f"{row.epsilon_lower:.3f}", caught)
    console.print(table)


def _plain(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title)
    return table


def closing() -> str:
    known = f"Methods: {', '.join(method_list.names())}."
    return "\n".join(fill(text, WIDTH) for text in (CLOSING, known))


def register(app: Any) -> None:
    teach(app, audit, EXAMPLES, closing=closing)
