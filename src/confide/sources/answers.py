"""How the answers of a batch are added up inside the boundary: every record's clipped, with room for rounding.

Only `private_data` calls this, with records that it has drawn and paid for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from confide.data import trees
from confide.data.trees import Tree
from confide.devices import generators, moved
from confide.errors import Refusal
from confide.mechanism.clipping import clipped_sum, clipped_sum_of_rows, isolated_rows
from confide.mechanism.clipping.randomness import one_answer
from confide.mechanism.clipping.rounding import LARGEST_BATCH, Tally, room_for_sums, working_type
from confide.mechanism.clipping.statistics import without_records
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.sources.queries import GradientQuery, Query, StatisticQuery

LARGEST_CLIP = 1e30
"""Stands for an infinite clip, which only a run marked as not private may have."""
USUAL_CLIPS = (1e-20, 1e20)
"""Below, squares and shares of C fall among numbers that single precision holds with few digits or as zero, so that a
record could move a sum by more than C, and noise could vanish; above, sums of many records overflow."""
SMALLEST_RATE = 2.0**-32
"""Of Poisson sampling by 53 bits: a record is then drawn with this probability to a part in 2^21."""
ANSWER_BYTES = 8 << 20
"""Statistics are computed for so many bytes of answers at a time."""
Drawn: TypeAlias = tuple[Tree, Tensor, Tensor | None]
"""The records of a batch: features, targets and, where there are any, weights."""


def check_kind(mechanism: object, kind: type = SampledGaussian) -> None:
    """What is charged must be what is done: a subclass may say one noise to the ledger and another to the sum."""
    if type(mechanism) is not kind:
        raise Refusal(f"mechanism={type(mechanism).__name__}: must be {kind.__name__} itself, not a class of its own")


def check_range(mechanism: SampledGaussian) -> None:
    """Refuse numbers at which the arithmetic itself gives way; a server that is not trusted may choose them."""
    if not mechanism.private:
        return
    low, high = USUAL_CLIPS
    if not (low <= mechanism.clip <= high and low <= mechanism.noise_std <= LARGEST_CLIP):
        raise Refusal(
            f"clip={mechanism.clip:g}, noise {mechanism.noise_std:g}: the rounding of sums is bounded for clips from "
            f"{low:g} to {high:g} and noise up to {LARGEST_CLIP:g}; scale what is asked"
        )
    if mechanism.sampling == "poisson" and mechanism.rate < SMALLEST_RATE:
        raise Refusal(
            f"rate={mechanism.rate:g}: batches are drawn by numbers of 53 bits, exactly enough for rates from "
            f"{SMALLEST_RATE:g}; use larger batches"
        )


def check_batch(mechanism: SampledGaussian) -> None:
    if mechanism.private and mechanism.expected_batch > LARGEST_BATCH:
        raise Refusal(
            f"expected_batch={mechanism.expected_batch}: the rounding of sums is bounded up to {LARGEST_BATCH} "
            "records; use smaller batches"
        )


@contextmanager
def drawn_in_secret(stream: NoiseStream) -> Iterator[None]:
    """What user code draws while it reads records (masks of dropout) nobody can foretell: a script often sets torch's
    generator, and masks that follow the place in a batch would then tell who stands before whom. Torch's generators are
    left as they were."""
    secret = int(stream.integers(2**62, 1)[0])
    before = [(generator, generator.get_state()) for generator in generators()]
    for generator, _ in before:
        generator.manual_seed(secret)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def summed_in_double(query: Query, batch: Drawn, mechanism: SampledGaussian) -> tuple[Tensor, Tensor]:
    """The clipped sum on the host, in double precision, and the norms."""
    hidden = torch.zeros(query.size, dtype=torch.float64, device=query.device)
    norms = add_answers(query, batch, mechanism, hidden)
    return hidden.cpu(), norms


def add_answers(
    query: Query,
    batch: Drawn,
    mechanism: SampledGaussian,
    total: Tensor,
    rehearsal: bool = False,
    room: float = 1.0,
) -> Tensor:
    """Add every record's clipped answer onto `total`, which is touched once; the norms before clipping stay inside."""
    x, y, weights = moved(batch, query.device)
    clip = min(mechanism.clip, LARGEST_CLIP)
    if mechanism.private:  # what a sum loses to rounding is inside the clip that was charged for
        asked = query.module.parameters() if isinstance(query, GradientQuery) else ()
        clip = room * room_for_sums(clip, working_type(value for value in asked if value.requires_grad))
    if isinstance(query, GradientQuery):
        options: dict[str, Any] = {"style": mechanism.clipping, "rehearsal": rehearsal}
        options |= {} if weights is None else {"weights": weights}
        given, targets = trees.in_type(x, query.inputs), trees.in_type(y, query.dtype)
        return clipped_sum(query.module, query.loss, given, targets, clip=clip, out=total, **options)
    with one_answer():
        return _add_rows(query, x, y, weights, clip, total, rehearsal)


def _add_rows(
    query: StatisticQuery, x: Tree, y: Tensor, weights: Tensor | None, clip: float, total: Tensor, rehearsal: bool
) -> Tensor:
    """The same for a statistic: some records at a time."""
    if not len(y):
        without_records(query.function)
        return total.new_zeros(0)
    rows = max(1, ANSWER_BYTES // (8 * query.size))
    with torch.no_grad():
        # No record sees another, so that pieces of a batch give what the batch gives.
        sums, norms = Tally([query.size], total.device), []
        for part in (slice(start, start + rows) for start in range(0, len(y), rows)):
            answer = isolated_rows(query.function, trees.rows_of(x, part), y[part], query.size, rehearsal)
            each: dict[str, Any] = {} if weights is None else {"weights": weights[part]}
            norms.append(clipped_sum_of_rows(answer, clip=clip, out=sums.open, **each))
            sums.added()
        total.add_(sums.total())
        return torch.cat(norms)
