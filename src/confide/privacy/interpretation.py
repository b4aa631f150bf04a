"""What a privacy guarantee means to an attacker who must tell whether one record was used.

The attacker knows everything but that one record, sees every release, and tests "used" against "not used". The
privacy profile delta(epsilon) bounds every such test (Wasserman and Zhou 2010; Dong, Roth and Su 2022):

    advantage      TPR - FPR <= delta(0), the total variation distance
    accuracy       <= (1 + delta(0)) / 2 when both cases are equally likely beforehand
    TPR at FPR a   <= 1 - f(a),  f(a) = sup over epsilon of max(0, 1 - delta - e^epsilon a, e^-epsilon (1 - delta - a))

These use the whole profile. A single pair (epsilon, delta) only gives the naive accuracy
(e^epsilon + delta) / (1 + e^epsilon), which is true but overstates what an attacker can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from confide.errors import Refusal
from confide.privacy.accountants.bound import known, non_private, slack
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import Array
from confide.privacy.events import Adjacency, Event

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)  # convention: Carlini et al., S&P 2022, report the small ones
_TAIL = 1e-7
"""The profile is looked at up to the epsilon where it has fallen to this."""


@dataclass(frozen=True)
class Attacker:
    """The best any membership attack can do, as upper bounds.

    advantage       true minus false positive rate
    accuracy        share of right guesses at even odds
    naive_accuracy  the same from (epsilon, delta) alone
    tpr_at_fpr      true positive rate by false positive rate
    """

    advantage: float
    accuracy: float
    naive_accuracy: float
    tpr_at_fpr: dict[float, float] = field(hash=False)


def attacker(
    events: Iterable[Event],
    epsilon: float,
    adjacency: Adjacency = "add-remove",
    *,
    delta: float = 0.0,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
) -> Attacker:
    """What these events allow; `epsilon` (at `delta`) is used for the naive accuracy only."""
    rates = tuple(false_positive_rates)
    for rate in rates:
        if not 0 <= rate <= 1:
            raise Refusal(f"false_positive_rates={rates}: each must be in [0, 1]")
    advantage, powers = _test_power(known(events), adjacency, rates)
    return Attacker(
        advantage, (1 + advantage) / 2, naive_accuracy(epsilon, delta), dict(zip(rates, powers, strict=True))
    )


def naive_accuracy(epsilon: float, delta: float = 0.0) -> float:
    """(e^epsilon + delta) / (1 + e^epsilon): right guesses at even odds that (epsilon, delta) alone allows."""
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise Refusal(f"epsilon={epsilon}, delta={delta}: need epsilon >= 0 and delta in [0, 1]")
    shrink = math.exp(-epsilon)
    return min(1.0, (1 + delta * shrink) / (1 + shrink))


def true_positive_rate(epsilons: Array, deltas: Array, false_positive_rate: float) -> float:
    """1 - f(a) over the given points of the profile; more points can only make it smaller."""
    room = 1 - deltas
    # Both lines of the trade-off; e^epsilon is cut where it has long made its line negative.
    first = room - np.exp(np.minimum(epsilons, 700.0)) * false_positive_rate
    second = np.exp(-epsilons) * (room - false_positive_rate)
    return float(1 - max(0.0, float(first.max()), float(second.max())))


@lru_cache(maxsize=256)
def _test_power(
    events: tuple[Event, ...], adjacency: Adjacency, rates: tuple[float, ...]
) -> tuple[float, tuple[float, ...]]:
    tail = _TAIL + slack(events, adjacency) if non_private(events) is None else 1.0
    if tail >= 1:
        return 1.0, tuple(1.0 for _ in rates)
    accountant = PLD()
    top = accountant.epsilon(events, tail, adjacency).epsilon or 0.0
    # Points lie closer near zero, where the profile bends; a second pass closes in on the best one for each rate.
    grid = top * np.linspace(0, 1, 65) ** 2
    deltas = accountant.deltas(events, grid.tolist(), adjacency)
    powers = []
    for rate in rates:
        best = _best_point(grid, deltas, rate)
        near = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 17)
        finer = accountant.deltas(events, near.tolist(), adjacency)
        powers.append(true_positive_rate(np.concatenate((grid, near)), np.concatenate((deltas, finer)), rate))
    return float(deltas[0]), tuple(powers)


def _best_point(epsilons: Array, deltas: Array, rate: float) -> int:
    powers = [true_positive_rate(epsilons[i : i + 1], deltas[i : i + 1], rate) for i in range(len(epsilons))]
    return int(np.argmin(powers))
