"""How much noise the votes need: fixed by public sizes and the budget, before a record is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from confide.errors import Refusal
from confide.mechanism.votes import MOVED_VOTE, ONE_VOTE, Released, Votes
from confide.privacy.accountants import sound_epsilon
from confide.privacy.accountants.profiles import gaussian_mu
from confide.privacy.events import ADJACENCIES, Adjacency

TEST_SHARE = 0.1
"""Of mu^2 that tests take: they ask for one number that hundreds of votes stand behind, answers for the right class."""
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
    adjacency: Adjacency = "add-remove",
) -> PatePlan:
    """Noise such that all queries together stay within epsilon, asked or not, answered or not.

    threshold   votes that a noisy largest count must reach for its query to be answered; None: no test, all answered
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise Refusal(f"epsilon={epsilon}: must be a finite number > 0")
    if queries < 1:
        raise Refusal(f"queries={queries}: must be at least 1")
    mu = gaussian_mu(epsilon, delta)
    answers = mu if threshold is None else mu * math.sqrt(1 - TEST_SHARE)
    noise = MOVED_VOTE * math.sqrt(queries) / answers * (1 + ROUNDING)
    tested = None if threshold is None else ONE_VOTE * math.sqrt(queries / TEST_SHARE) / mu * (1 + ROUNDING)
    made = PatePlan(Votes(teachers, queries, noise, threshold, tested, releases), delta, adjacency)
    while made.epsilon > epsilon:
        made = replace(made, mechanism=_noisier(made.mechanism))
    return made


def queries_for(epsilon: float, delta: float, teachers: int, separation: float) -> int:
    """How many queries leave `separation` deviations of noise on a count to teachers who all agree; at least one.

    Noise turns such an answer with a chance of at most (classes - 1) Phi(-separation / sqrt 2).
    """
    return max(1, math.floor((gaussian_mu(epsilon, delta) * teachers / (MOVED_VOTE * separation)) ** 2))


def _noisier(votes: Votes) -> Votes:
    tested = None if votes.test_noise is None else votes.test_noise * (1 + ROUNDING)
    return replace(votes, noise=votes.noise * (1 + ROUNDING), test_noise=tested)
