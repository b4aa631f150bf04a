"""The options that several commands share, and the checks of their values.

Checks name the option as it was typed. They run before any file is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from confide.errors import CommandError
from confide.privacy.events import ADJACENCIES, SAMPLINGS, Adjacency, Sampling

# Far beyond any use; numbers larger than these overflow in every accountant.
LARGEST_EPSILON = 1_000
MOST_STEPS = 10**8
SMALLEST_NOISE = 1e-3

PRIVACY, RUN, DATA, OUTPUT = "Privacy", "Run", "Data", "Output"

Json = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="Print one JSON object on stdout and nothing else.", rich_help_panel=OUTPUT
    ),
]
EpsilonGoal = Annotated[
    float,
    typer.Option(
        metavar="E",
        help="Privacy budget; smaller is safer. The noise is set so that the whole run stays within it.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Delta = Annotated[
    float,
    typer.Option(
        metavar="D",
        help="Probability with which the budget may fail; must be below 1 / records.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
AdjacencyName = Annotated[
    str,
    typer.Option(
        "--adjacency",
        metavar="A",
        help="What one person changes: add-remove (their record is there or not) or replace-one.",
        rich_help_panel=PRIVACY,
    ),
]
SamplingName = Annotated[
    str,
    typer.Option(
        "--sampling",
        metavar="S",
        help="How a batch is drawn: poisson, fixed-size, shuffle or full-batch.",
        rich_help_panel=PRIVACY,
    ),
]


def number(
    option: str, value: float, *, above: float | None = None, below: float | None = None, most: float | None = None
) -> float:
    """A finite number within the stated limits; `above` and `below` are themselves excluded, `most` is not."""
    right = math.isfinite(value)
    right = right and (above is None or value > above) and (below is None or value < below)
    if right and (most is None or value <= most):
        return value
    limits = [
        "" if above is None else f"greater than {above:g}",
        "" if below is None else f"less than {below:g}",
        "" if most is None else f"at most {most:g}",
    ]
    raise CommandError(
        f"{option}={value:g}: must be a finite number, {' and '.join(limit for limit in limits if limit)}"
    )


def whole(option: str, value: int, least: int = 1, most: int = 10**15) -> int:
    if least <= value <= most:
        return value
    bound = f"at least {least}" if value < least else f"at most {most}"
    raise CommandError(f"{option}={value}: must be a whole number, {bound}")


def choice(option: str, value: str, choices: Sequence[str]) -> Any:
    if value in choices:
        return value
    raise CommandError(f"{option}={value}: must be one of {', '.join(choices)}")


def adjacency(value: str) -> Adjacency:
    chosen: Adjacency = choice("--adjacency", value, ADJACENCIES)
    return chosen


def sampling(value: str) -> Sampling:
    chosen: Sampling = choice("--sampling", value, SAMPLINGS)
    return chosen


def check_pair(sampling_name: str, adjacency_name: str) -> None:
    """Refuse samplers whose batches say how many records there are, where that number is what must stay private."""
    if sampling(sampling_name) in ("fixed-size", "shuffle") and adjacency(adjacency_name) == "add-remove":
        raise CommandError(
            f"--sampling={sampling_name} with --adjacency=add-remove: no sound bound is known, since one record more "
            "changes every batch; use --sampling poisson, or --adjacency replace-one"
        )


def epsilon(value: float) -> float:
    return number("--epsilon", value, above=0, most=LARGEST_EPSILON)


def delta(value: float, records: int | None = None) -> float:
    """A delta of 1 / records or more would permit publishing one record outright."""
    number("--delta", value, above=0, below=1)
    if records is not None and value >= 1 / records:
        raise CommandError(
            f"--delta={value:g}: must be below 1 / records = {1 / records:.3g}, or a record could be published "
            f"outright; {_below(1 / records):g} is a usual choice"
        )
    return value


def _below(limit: float) -> float:
    """A round number well below the limit."""
    return float(10.0 ** math.floor(math.log10(limit / 2)))
