"""`confide audit --module FILE:NAME`: the user's own network, loss or query against one-record moves."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from confide.cli.output import emit_json, output, progress_bar
from confide.cli.own_code import load
from confide.errors import CommandError
from confide.sources.queries import GradientQuery, StatisticQuery

EXAMPLES = 12  # Made-up records that the module is shown: more than one tile of any kernel.
SHOWN = 6  # Moves in the table: what fits on a screen beside the verdict.


def run_own(given: str, loss: str, features: str, classes: int, tokens: int, page: Path | None, as_json: bool) -> bool:
    """Audit it, show what was found, and say whether the claim survives."""
    from confide.auditing import audit_module, audit_query
    from confide.auditing.moves import SECONDS
    from confide.auditing.page import render_moves

    started = time.perf_counter()
    chosen = load("--module", given)
    if not isinstance(chosen, nn.Module | GradientQuery | StatisticQuery):
        chosen = chosen() if callable(chosen) else chosen
    if not isinstance(chosen, nn.Module | GradientQuery | StatisticQuery):
        raise CommandError(f"--module={given}: must be a torch module or a query, or a function that gives one")
    x, y = made_up(chosen, features, classes, tokens)
    options: dict[str, Any] = {"classes": classes or None, "name": given}
    if not as_json:
        sys.stderr.write(f"takes a few seconds to about {SECONDS / 60:g} min of processor time; small tables first\n")
    with progress_bar(f"auditing {given}") as progress:
        if isinstance(chosen, nn.Module):
            own_loss = load("--loss", loss) if loss else None
            found = audit_module(chosen, x, y, loss=own_loss, progress=progress, **options)
        else:
            found = audit_query(chosen, x, y, progress=progress, **options)
    if page is not None:
        with page.open("x", encoding="utf-8") as file:
            file.write(render_moves(found))
    if as_json:
        emit_json({**found.to_dict(), "seconds": time.perf_counter() - started})
    else:
        _show(found)
    return found.passed


def made_up(chosen: Any, features: str, classes: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of the stated shape: whole numbers below `tokens`, or normal ones; labels of all classes, or real."""
    generator = torch.Generator().manual_seed(0)
    shape = _shape(chosen, features)
    if tokens:
        x = torch.randint(0, tokens, (EXAMPLES, *shape), generator=generator)
        x.flatten()[0] = tokens - 1
    else:
        x = torch.randn(EXAMPLES, *shape, generator=generator)
    y = torch.arange(EXAMPLES) % classes if classes else torch.randn(EXAMPLES, generator=generator)
    return x, y


def _shape(chosen: Any, features: str) -> tuple[int, ...]:
    if features:
        sizes = features.split(",")
        if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
            raise CommandError(f"--features={features}: must be the shape of one record, such as 16 or 3,32,32")
        return tuple(int(size) for size in sizes)
    module = chosen.module if isinstance(chosen, GradientQuery) else chosen
    if isinstance(module, nn.Module):
        first = next((layer for layer in module.modules() if list(layer.parameters(recurse=False))), None)
        if isinstance(first, nn.Linear):
            return (first.in_features,)
    raise CommandError("--features: the shape of one record does not follow from this module; give it, such as 3,32,32")


def _show(found: Any) -> None:
    console = output()
    left = f", {found.left} of {found.tables} tables left out for lack of time" if found.left else ""
    console.print(f"[bold]{found.name}[/bold]: {found.verdict}; {found.tried} moves tried{left}")
    if found.slow:
        console.print(found.slow, markup=False)
    for check in found.checks:
        state = "passed" if check.passed else "[bold]FAILED[/bold]"
        console.print(f"{check.name}: {state}, {check.measured}; expected {check.expected}")
    for move in found.largest[:SHOWN]:
        console.print(f"  {move}")


def check_alone(context: dict[str, Any]) -> None:
    """Options that describe a module need one."""
    for option, value in context.items():
        if value:
            raise CommandError(f"{option}={value}: is for --module FILE:NAME")
