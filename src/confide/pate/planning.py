"""How much noise the votes need: fixed by public sizes and the budget, before a record is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from confide.errors import Refusal
from confide.mechanism.vote_costs import CostEstimate, costs_by_gap, estimated_epsilon
from confide.mechanism.votes import MOVED_VOTE, ONE_VOTE, Released, Votes
from confide.privacy.accountants import sound_epsilon
from confide.privacy.accountants.profiles import gaussian_mu
from confide.privacy.events import ADJACENCIES, Adjacency

TEST_SHARE = 0.1
"""Of mu^2 that tests take: they ask for one number that hundreds of votes stand behind, answers for the right class."""
AGREEMENT = 0.6
"""Of the teachers: by how many the first class is taken to lead when an order is chosen. A guess that needs no data."""
ORDERS = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0)
"""Renyi orders that a plan chooses from: the best one is within a few per cent of the best of all."""
ROUNDING = 1e-9  # The closed form and the accountant may differ in their last places.


@dataclass(frozen=True)
class PatePlan:
    """The mechanism of votes, and what is claimed for it."""

    mechanism: Votes
    delta: float
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise Refusal(f"delta={self.delta}: must be in (0, 1); a common choice is below 1 / records")
        if self.adjacency not in ADJACENCIES:
            raise Refusal(f"adjacency={self.adjacency!r}: must be one of {', '.join(ADJACENCIES)}")

    @property
    def epsilon(self) -> float:
        """The sound one, whatever the votes will be."""
        return sound_epsilon(self.mechanism.events(), self.delta, self.adjacency)


def plan(
    *,
    epsilon: float,
    delta: float,
    teachers: int,
    queries: int,
    threshold: float | None = None,
    releases: Released = "labels",
    estimate: float | None = None,
    adjacency: Adjacency = "add-remove",
) -> PatePlan:
    """Noise such that all queries together stay within epsilon, asked or not, answered or not.

    threshold   votes that a noisy largest count must reach for its query to be answered; None: no test, all answered
    estimate    part of epsilon for releasing what the answers cost on these votes, under noise; None: it stays inside
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise Refusal(f"epsilon={epsilon}: must be a finite number > 0")
    if queries < 1:
        raise Refusal(f"queries={queries}: must be at least 1")
    if estimate is not None and not 0 < _doubled(estimate, adjacency) < epsilon:
        raise Refusal(f"estimate={estimate}: must be > 0 and leave some of epsilon={epsilon} to the votes")
    mu = gaussian_mu(epsilon - _doubled(estimate or 0.0, adjacency), delta)
    answers = mu if threshold is None else mu * math.sqrt(1 - TEST_SHARE)
    noise = MOVED_VOTE * math.sqrt(queries) / answers * (1 + ROUNDING)
    tested = None if threshold is None else ONE_VOTE * math.sqrt(queries / TEST_SHARE) / mu * (1 + ROUNDING)
    watched = None if estimate is None else CostEstimate(order_for(teachers, queries, noise, delta), estimate)
    made = PatePlan(Votes(teachers, queries, noise, threshold, tested, releases, watched), delta, adjacency)
    while made.epsilon > epsilon:
        made = replace(made, mechanism=_noisier(made.mechanism))
    return made


def _doubled(estimate: float, adjacency: Adjacency) -> float:
    """What a pure release counts for: accountants take replacing a record for removing one and adding one."""
    return estimate if adjacency == "add-remove" else 2 * estimate


def order_for(teachers: int, queries: int, noise: float, delta: float) -> float:
    """The order at which an estimate would be least if all queries had teachers who agree as usual; a public rule."""
    gap = round(AGREEMENT * teachers)

    def guess(order: float) -> float:
        return estimated_epsilon(queries * float(costs_by_gap(gap, 2, noise, order)[-1]), order, delta)

    return min(ORDERS, key=guess)


def queries_for(epsilon: float, delta: float, teachers: int, separation: float) -> int:
    """How many queries leave `separation` deviations of noise on a count to teachers who all agree; at least one.

    Noise turns such an answer with a chance of at most (classes - 1) Phi(-separation / sqrt 2).
    """
    return max(1, math.floor((gaussian_mu(epsilon, delta) * teachers / (MOVED_VOTE * separation)) ** 2))


def _noisier(votes: Votes) -> Votes:
    tested = None if votes.test_noise is None else votes.test_noise * (1 + ROUNDING)
    return replace(votes, noise=votes.noise * (1 + ROUNDING), test_noise=tested)
