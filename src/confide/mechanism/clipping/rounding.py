"""Rounding, bounded: every constant of the certified sums, and the rule by which a batch is added up.

With left sides a and right sides b as they stand in memory, a record's gradient g_i is a sum of parts a_it b_it^T. Let

    w_i = sum_t |a_it| |b_it|        its SPREAD, at least |g_i|; f_i its clip factor,  v_i = f_i w_i / C.

A sum of K terms in floating point with unit u, in whatever order, is off by at most gamma_K times the sum of the terms'
sizes, gamma_K = K u / (1 - K u) (Higham 2002, section 4.2). By Minkowski's inequality over entries, layers and records

    | computed sum - sum_i f_i g_i |  <=  gamma_K  C  sum_i v_i,          K = terms in one entry, a few for the scaling.

Without one record everything may round differently, so the error counts twice. What a batch may lose is a fixed share
of C, by which the boundary makes C smaller beforehand (`room_for_sums`):

    2 gamma_K sum_i v_i  <=  SHARE,     so one record moves the computed sum by at most C (1 - SHARE) + SHARE C = C.

sum_i v_i is known for the batch at hand, at the price of its norms. A batch that does not fit in one product is added
up in blocks, whose sums are added (K = terms of a block + blocks), or in double precision, or its records are formed in
full. A record whose parts cancel (v_i > CANCELLING) is formed in full, in double precision, and clipped as a row. What
is formed, and pieces of a batch, are added up in a `Tally`, out of a part of SHARE that is kept for it (IN_DOUBLE).
docs/soundness.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.devices import HOST

# A relative error of one operation: half of what torch calls eps.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# What rounding may take of C. In single precision 1/64 lets 350 records of one position go in one product, and blocks
# of 200 do for 600; 1/4096 would need double precision beyond 45. In double precision 2^-16 does for LARGEST_BATCH.
SHARE = {torch.float32: 2.0**-6, torch.float64: 2.0**-16}
# The part of it that is kept for sums of formed records and of pieces, which are made in double precision: with B
# records of size C and K terms in one entry they are off by 2 B K 2^-53 C. K is at most 1024 (`Tally`), so that 2^-17
# is enough for B = 2^25, twice the largest batch that is taken; single precision leaves more than it needs.
IN_DOUBLE = {torch.float32: 1 / 16, torch.float64: 1 / 2}
LARGEST_BATCH = 1 << 24
# Formed records that meet in one product, and sums that are added one after the other.
ROWS = 256
FAN = 64
# Parts that come to so many times C once they are scaled cancel. Ordinary records of transformers and convolutions
# stay below 20, so that few are formed in full; all others together are what `way_of` looks at.
CANCELLING = 64.0
# Roundings of one term beside its addition: a factor that is computed (3), the scaling, the product, the last addition.
FEW = 8
# Blocks of fewer terms cost more, in additions of their sums, than double precision does.
SMALLEST_BLOCK = 32


@dataclass(frozen=True)
class Way:
    """How a piece of a batch is added up: in so many blocks of records; `wide` where only double precision will do."""

    blocks: int = 1
    wide: bool = False


class Tally:
    """A sum of many vectors in double precision: FAN are added up, then FAN of these sums, and so on.

    So P vectors meet in an entry as FAN log(P) / log(FAN) terms and not as P: 320 for the largest batch one by one.
    """

    def __init__(self, shape: Iterable[int], device: torch.device = HOST) -> None:
        self.sums, self.counts = [torch.zeros(tuple(shape), dtype=torch.float64, device=device)], [0]

    @property
    def open(self) -> Tensor:
        """What the next vector is added to; then `added` is called."""
        return self.sums[0]

    def added(self) -> None:
        for level in range(len(self.sums)):
            self.counts[level] += 1
            if self.counts[level] < FAN:
                return
            if level + 1 == len(self.sums):
                self.sums.append(torch.zeros_like(self.sums[level]))
                self.counts.append(0)
            self.sums[level + 1].add_(self.sums[level])
            self.sums[level].zero_()
            self.counts[level] = 0

    def total(self) -> Tensor:
        first, *rest = self.sums
        return sum(rest, start=first)


def working_type(parameters: Iterable[Tensor]) -> torch.dtype:
    """Double precision if all parameters have it, single otherwise: the type whose share of C is kept."""
    return torch.float64 if all(value.dtype == torch.float64 for value in parameters) else torch.float32


def error(terms: float, spread: float, dtype: torch.dtype) -> float:
    """Twice what a sum of so many terms in one entry may be off by, in units of C, for a sum `spread` of v_i."""
    units = (terms + FEW) * UNIT[dtype]
    return 2 * spread * units / (1 - units) if units < 0.5 else math.inf


def way_of(records: int, chain: Callable[[int], int], spread: float, allowed: float, dtype: torch.dtype) -> Way:
    """The cheapest way whose error is at most `allowed`; `chain` says how many terms of so many records meet.

    It is `wide` where none is: then the next type has to do, or records that are formed.
    """
    blocks = 1
    while blocks <= records:
        terms = chain(-(-records // blocks))
        if error(terms + blocks - 1, spread, dtype) <= allowed:
            return Way(blocks)
        if terms < SMALLEST_BLOCK:
            break
        blocks += max(1, blocks // 4)
    return Way(max(1, math.isqrt(records)), True)


def room_for_sums(clip: float, dtype: torch.dtype) -> float:
    """What records are clipped to, so that adding, removing or changing one moves the sum as it is computed by no more
    than `clip` (twice that for a change)."""
    return clip * (1 - SHARE[dtype])


def lost_in_squares(terms: int, dtype: torch.dtype) -> float:
    """What a squared norm may lack, as a share of the square of the spread, when it comes from products whose sums have
    so many terms: the norm of a sum that is off by gamma w, or Gram matrices that are off by gamma in every entry."""
    return 2 * (terms + FEW) * UNIT[dtype]
