"""Which rows join which batch, seen through the boundary itself: row i answers with the i-th unit vector, no noise.

Counts are exact binomials under Poisson sampling: of every row over the run, of every batch, of every two rows
together, of every two batches in common, and at every lag over disjoint pairs of batches. Beside them, how unevenly
rows and batches are filled, which sees passes that are too even.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from confide.auditing import significance
from confide.auditing.noise_checks import MakeData
from confide.auditing.results import Check, tested
from confide.data.schema import Schema
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.queries import StatisticQuery

Counts: TypeAlias = np.ndarray[Any, Any]
ROWS, BATCHES = 200, 400  # So many draws that a rate which is off by a fifth shows.


def check_sampling(mechanism: SampledGaussian, make_data: MakeData, seed: int = 0) -> Check:
    joined = inclusion(mechanism, make_data, seed)
    rate = mechanism.rate
    frequency = f"rows join with frequency {joined.mean():.4f}"
    if not np.isin(joined, (0.0, 1.0)).all():
        return Check("sampling", False, f"a row counts {joined.max():g} times in one batch", "once at most")
    if rate == 1:
        return Check("sampling", bool(joined.all()), frequency, "every row at every step")
    chances = sampling_chances(joined, rate)
    chance = significance.family(*(np.full(1, each) for each in chances.values()))
    found = tested("sampling", chance, f"{frequency}, independently", f"{rate:.4f}, independently")
    if found.passed:
        return found
    wrong = [name for name, each in chances.items() if each * len(chances) <= found.level]
    return replace(found, measured=f"{frequency}; not by chance: {', '.join(wrong)}")


def sampling_chances(joined: Counts, rate: float) -> dict[str, float]:
    """One family per question."""
    batches, rows = joined.shape
    per_row, per_batch = joined.sum(0), joined.sum(1)
    of_rows, of_batches = joined.T @ joined, joined @ joined.T
    binomial, family = significance.binomial, significance.family
    return {
        "how often": family(binomial(joined.sum(), joined.size, rate)),
        "how often a row joins": family(binomial(per_row, batches, rate)),
        "how large a batch is": family(binomial(per_batch, rows, rate)),
        "spread over rows": family(_spread(per_row, batches, rate)),
        "spread over steps": family(_spread(per_batch, rows, rate)),
        "two rows together": family(binomial(of_rows[np.triu_indices(rows, 1)], batches, rate**2)),
        "two steps alike": family(binomial(of_batches[np.triu_indices(batches, 1)], rows, rate**2)),
        "steps at a distance": family(*_lags(of_batches, rows, rate)),
    }


def _spread(counts: Counts, trials: int, rate: float) -> Any:
    """Squares of standardised counts: their sum has the mean of a chi-square and nearly its variance."""
    variance = trials * rate * (1 - rate)
    squares = ((counts - trials * rate) ** 2).sum() / variance
    return significance.spread(squares, len(counts), 2 + (1 - 6 * rate * (1 - rate)) / variance)


def _lags(in_common: Counts, rows: int, rate: float) -> list[Any]:
    """Rows in common of batches `lag` apart; every batch is in one pair only, so that the count is binomial."""
    batches, found = len(in_common), []
    for lag in range(1, batches // 2 + 1):
        first = np.arange(batches - lag)
        first = first[(first // lag) % 2 == 0]
        found.append(significance.binomial(in_common[first, first + lag].sum(), rows * len(first), rate**2))
    return found


def inclusion(mechanism: SampledGaussian, make_data: MakeData, seed: int) -> Counts:
    """(steps, rows): how often the row was in the batch."""
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None]
    data = make_data(rows, torch.zeros(ROWS), schema=Schema(records=ROWS), seed=seed)
    asked = replace(mechanism, noise_multiplier=0.0, private=False, clip=1.0, records=ROWS)
    query = StatisticQuery(lambda x, y: torch.eye(ROWS, dtype=torch.float64)[x[:, 0].long()], ROWS)
    data.charge([(asked, BATCHES)])
    answers = [data.answer(query, asked).sum.clone() for _ in range(BATCHES)]
    return np.asarray(torch.stack(answers).numpy().round(6))
