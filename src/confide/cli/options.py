"""The options that several commands share, and the checks of their values.

Checks name the option as it was typed. They run before any file is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from confide import rules
from confide.errors import CommandError, Refusal, Unfinished
from confide.privacy.events import ADJACENCIES, SAMPLINGS, Adjacency, Sampling
from confide.wording import meant

# Far beyond any use; numbers larger than these overflow in every accountant.
LARGEST_EPSILON = 1_000
MOST_STEPS = 10**8
SMALLEST_NOISE = 1e-3
MOST_UNITS = 100_000
MOST_CHAINS = 64

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
    """One of the choices, with hyphens or underscores alike."""
    by_spelling = {one.replace("_", "-"): one for one in choices}
    found = by_spelling.get(value.replace("_", "-"))
    if found is not None:
        return found
    raise CommandError(f"{option}={value}: must be one of {', '.join(choices)}{meant(value, choices)}")


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
            f"outright; {rules.usual_delta(records):g} is a usual choice"
        )
    return value


def task(name: str | None) -> Any:
    return None if name is None else choice("--task", name, ("classification", "regression"))


def seed(value: int | None) -> None:
    if value is not None:
        whole("--seed", value, least=0, most=2**31)


def layers(text: str | None) -> tuple[int, ...] | None:
    """The widths in "64,64"; () for a linear model, None for the public rule."""
    if text is None:
        return None
    if not text.strip():
        return ()
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--hidden={text}: must be whole numbers separated by commas, such as 64,64") from None
    if min(widths) < 1 or sum(widths) > MOST_UNITS:
        raise CommandError(f"--hidden={text}: every width must be at least 1, and all together at most {MOST_UNITS}")
    return widths


def clips(text: str | None) -> tuple[float, ...]:
    """The clips in "3,1.5"; () where none was given."""
    if text is None:
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--clip-schedule={text}: must be numbers separated by commas, such as 3,1.5,0.75") from None
    if not all(math.isfinite(clip) and clip > 0 for clip in found):
        raise CommandError(f"--clip-schedule={text}: every clip must be greater than 0")
    return found


def class_weights(texts: Sequence[str] | None) -> dict[str, float] | None:
    """The weights in "LABEL=W", by label; None where none was given."""
    found: dict[str, float] = {}
    for text in texts or ():
        label, separator, weight = text.rpartition("=")
        try:
            found[label] = float(weight)
        except ValueError:
            separator = ""
        if not separator or not label:
            raise CommandError(f"--class-weight={text}: must have the form LABEL=W, such as yes=5")
    return found or None


def plan_options(
    epsilon_goal: float,
    delta_goal: float,
    batch: int | None,
    epochs: float | None,
    steps: int | None,
    clip: float | None,
    sampling_name: str,
    adjacency_name: str,
    noise_scale: float | None,
    chains: int = 1,
) -> dict[str, Any]:
    """The part of a request that makes its plan: what can be said about it before the records are known."""
    check_pair(sampling_name, adjacency_name)
    if epochs is not None and steps is not None:
        raise CommandError(f"--epochs={epochs:g} and --steps={steps}: give one of the two")
    if epochs is not None:
        number("--epochs", epochs, above=0, most=1e7)
    if steps is not None:
        whole("--steps", steps, most=MOST_STEPS)
    if batch is not None:
        whole("--batch", batch)
    if clip is not None:
        number("--clip", clip, above=0, most=1e12)
    if noise_scale is not None:
        number("--noise-scale", noise_scale, above=0, most=1e6)
    return {
        "epsilon": epsilon(epsilon_goal),
        "delta": delta(delta_goal),
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "clip": clip,
        "sampling": sampling(sampling_name),
        "adjacency": adjacency(adjacency_name),
        "noise_scale": noise_scale,
        "chains": whole("--chains", chains, most=MOST_CHAINS),
    }


_OPTIONS = (
    "method|methods|hidden|batch|epochs|steps|clip_schedule|clip|chains|noise_scale|epsilon|delta|adjacency|sampling|facts|test|"
    "checkpoint|device|ledger|name|out|seed|task|likelihood|class_weight"
)
_ARGUMENT = re.compile(rf"^({_OPTIONS})(?:='([^']*)'|=)?(?=[:\w.,\[({{-])")


@contextmanager
def named() -> Iterator[None]:
    """Refusals that begin with the name of an argument, begin with that of its option."""
    try:
        yield
    except Unfinished as error:
        raise Unfinished(as_option(str(error)), error.kept) from error
    except Refusal as error:
        if as_option(str(error)) == str(error):
            raise
        raise CommandError(as_option(str(error))) from error


def as_option(sentence: str) -> str:
    """ "noise_scale=0: must be ..." as "--noise-scale=0: must be ...", and "method='x': ..." without its quotes."""
    found = _ARGUMENT.match(sentence)
    if found is None:
        return sentence
    name, quoted = found.groups()
    value = "" if quoted is None and "=" not in found.group() else f"={quoted or ''}"
    return f"--{name.replace('_', '-')}{value}{sentence[found.end() :]}"
