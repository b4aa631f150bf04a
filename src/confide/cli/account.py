"""`confide account`: what a run would cost, before or without doing it."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from confide import rules
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import PRIVACY, AdjacencyName, Delta, Json, SamplingName
from confide.cli.output import emit_json, output
from confide.cli.privacy_table import show_privacy
from confide.errors import CommandError
from confide.privacy.events import GaussianEvent

EXAMPLE = "confide account --rate 0.0042667 --noise-multiplier 1.3 --steps 3516 \\\n  --delta 1e-5"

Rate = Annotated[
    float | None,
    typer.Option(
        metavar="Q",
        help="Share of the records in a batch: batch / records. Left out for full-batch.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
NoiseMultiplier = Annotated[
    float,
    typer.Option(
        metavar="Z",
        help="Noise standard deviation over the clipping norm of one record.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Steps = Annotated[
    int,
    typer.Option(metavar="T", help="Number of noisy sums released.", rich_help_panel=PRIVACY, show_default=False),
]
Records = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Public number of records; fixed-size sampling needs it.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]


def account(
    *,
    rate: Rate = None,
    noise_multiplier: NoiseMultiplier,
    steps: Steps,
    delta: Delta,
    sampling: SamplingName = rules.SAMPLING,
    adjacency: AdjacencyName = rules.ADJACENCY,
    records: Records = None,
    as_json: Json = False,
) -> None:
    """Price a run: epsilon by every accountant, and what an attacker can do.

    The first number is the sound one. Every other number is shown with its kind, because some are only approximations.
    A combination for which no sound bound is known is refused.
    """
    from confide.privacy.statement import Privacy

    event = event_of(noise_multiplier, steps, rate, sampling, records)
    options.delta(delta, records)
    options.check_pair(sampling, adjacency)
    check_protection(event)
    privacy = Privacy((event,), delta, options.adjacency(adjacency))
    values = privacy.to_dict()
    if as_json:
        emit_json(values)
        return
    show_privacy(output(), values, f"{event.count} {unit_of(event)}, noise multiplier {event.noise_multiplier:g}")


def event_of(
    noise_multiplier: float, steps: int, rate: float | None, sampling: str, records: int | None
) -> GaussianEvent:
    """The event that the options describe. A shuffled run is charged by whole passes."""
    options.number("--noise-multiplier", noise_multiplier, above=0, most=1e9)
    if noise_multiplier < options.SMALLEST_NOISE:
        raise CommandError(f"--noise-multiplier={noise_multiplier:g}: must be at least {options.SMALLEST_NOISE:g}")
    options.whole("--steps", steps, most=options.MOST_STEPS)
    if records is not None:
        options.whole("--records", records, least=2)
    kind = options.sampling(sampling)
    if kind == "full-batch":
        if rate not in (None, 1.0):
            raise CommandError(f"--rate={rate:g}: full-batch uses every record at every step; leave --rate out")
        return GaussianEvent(noise_multiplier, kind, 1.0, steps)
    if rate is None:
        raise CommandError(
            f"--rate: missing; {kind} sampling needs the share of the records in a batch, batch / records"
        )
    options.number("--rate", rate, above=0, most=1)
    if kind == "fixed-size":
        return GaussianEvent(noise_multiplier, kind, whole_rate(rate, records), steps, records)
    if kind == "shuffle":
        return GaussianEvent(noise_multiplier, kind, rate, passes_of(steps, rate, records), records)
    return GaussianEvent(noise_multiplier, kind, rate, steps)


def check_protection(event: GaussianEvent) -> None:
    """Refuse what no accountant can put into a number: a privacy loss in the millions.

    One release loses about 1 / (2 z^2) with probability q where the noise z is small, and q^2 (e^(1 / z^2) - 1) where
    it is large; the smaller of the two, times the number of releases, is the size of epsilon.
    """
    z, q = event.noise_multiplier, event.rate
    loss = q / (2 * z * z)
    if z > 0.1:
        loss = min(loss, q * q * math.expm1(1 / (z * z)))
    if loss * event.count > 1e6:
        raise CommandError(
            f"--noise-multiplier={z:g}: gives no protection over {event.count} {unit_of(event)}, epsilon would be in "
            "the millions; use more noise or fewer steps"
        )


def whole_rate(rate: float, records: int | None) -> float:
    """The rate of a whole number of records nearest to the one typed, which is often rounded."""
    if records is None:
        raise CommandError("--records: missing; fixed-size sampling needs the public number of records")
    batch = rate * records
    if round(batch) < 1 or abs(batch - round(batch)) > 1e-4 * max(1.0, batch):
        raise CommandError(
            f"--rate={rate:g}: rate * records = {batch:g} must be a whole number of records; give batch / records"
        )
    return round(batch) / records


def passes_of(steps: int, rate: float, records: int | None) -> int:
    """How many passes `steps` batches begin. Rounded so that a rate typed with few digits never counts too few."""
    batches = math.ceil(1 / rate - 1e-6) if records is None else math.ceil(records / max(1, round(rate * records)))
    return math.ceil(steps / max(1, batches))


def unit_of(event: GaussianEvent) -> str:
    noun = "pass" if event.sampling == "shuffle" else "step"
    plural = {"pass": "passes", "step": "steps"}[noun]
    return noun if event.count == 1 else plural


def register(app: Any) -> None:
    teach(app, account, [EXAMPLE])
