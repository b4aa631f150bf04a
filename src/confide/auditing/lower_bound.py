"""A lower bound on epsilon from one run, by guessing which canaries were in the data.

The game (Steinke, Nasr and Jagielski, NeurIPS 2023). Of m canary records each is included with probability 1/2,
independently. The mechanism runs once. Every canary gets a score from what was released; the r/2 with the highest
scores are guessed "in", the r/2 with the lowest "out", and no guess is made about the others. r is fixed beforehand.
With V the number of correct guesses, an (epsilon, delta)-private mechanism satisfies

    Pr[V >= v] <= f(v) + 2 m delta max_{1 <= i <= v} (f(v-i) - f(v)) / i,
    f(v) = Pr[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v],

whatever the scores are. So after v correct guesses every epsilon whose right-hand side is at most 1 - confidence is
refuted, and with it every smaller one: a mechanism that is private for some epsilon is so for all larger ones.

A lower bound above the claim refutes the claim. One below it proves nothing: the attack may be weak.

Groups. Several runs on disjoint groups of canaries, each with randomness of its own, are one run on all of them: a
record takes part in one group only, so the runs together are (epsilon, delta)-private if each is (parallel
composition). m, r and v then count over all groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal

Array = NDArray[np.float64]
LARGEST_EPSILON = 50.0  # Where the search begins from above: no number of guesses in reach shows more.
# Shares of the canaries about which a guess is made; the best of these few is chosen beforehand.
_SHARES = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)


def chance_of(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability of `correct` or more right guesses under (epsilon, delta): the bound above, at most 1."""
    check_counts(correct, guesses, canaries)
    check_delta(delta)
    if epsilon < 0:
        raise Refusal(f"epsilon={epsilon}: must be >= 0")
    if correct == 0:
        return 1.0
    from scipy.special import bdtrc, gammaln

    right = 1 / (1 + math.exp(-epsilon))
    k = np.arange(correct - 1, -1, -1)
    log_choose = gammaln(guesses + 1) - gammaln(k + 1) - gammaln(guesses - k + 1)
    # log(1 - right) = -epsilon + log(right), without cancellation where epsilon is large.
    point = np.exp(log_choose + guesses * math.log(right) - epsilon * (guesses - k))
    gains = np.cumsum(point) / np.arange(1, correct + 1)  # (f(v-i) - f(v)) / i for i = 1, ..., v
    return float(min(1.0, bdtrc(correct - 1, guesses, right) + 2 * canaries * delta * gains.max()))


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95, precision: float = 1e-9
) -> float:
    """The largest epsilon that is refuted with that confidence, up to `precision` from below; 0 if none is."""
    if not 0 < confidence < 1:
        raise Refusal(f"confidence={confidence}: must be in (0, 1)")
    risk = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return chance_of(correct, guesses, canaries, epsilon, delta) <= risk

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    if refuted(high):
        return high
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def correct_guesses(scores: Sequence[float] | Array, included: Sequence[bool] | NDArray[np.bool_], guesses: int) -> int:
    """How many of `guesses` are right: "in" for the highest half, "out" for the lowest half of them."""
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if values.shape != truth.shape or values.ndim != 1:
        raise Refusal(f"scores of shape {values.shape}, included of shape {truth.shape}: need one of each per canary")
    if guesses < 2 or guesses % 2 or guesses > len(values):
        raise Refusal(f"guesses={guesses}: must be an even number between 2 and the {len(values)} canaries")
    # A score that is not a number says nothing; it must not be taken for a high one, as sorting would.
    order = np.argsort(np.nan_to_num(values, nan=0.0), kind="stable")
    half = guesses // 2
    return int(truth[order[-half:]].sum() + (~truth[order[:half]]).sum())


def guesses_for(canaries: int, separation: float, delta: float, confidence: float = 0.95) -> int:
    """The number of guesses to fix beforehand, from public numbers only.

    Scores are taken to be N(0, 1) without and N(separation, 1) with the canary. Few guesses are surer, many weigh more;
    the number that promises the highest bound is chosen, one standard deviation of bad luck allowed for.
    """
    if canaries < 2:
        raise Refusal(f"canaries={canaries}: must be at least 2")
    best, chosen = -1.0, 2
    for share in _SHARES:
        guesses = max(2, 2 * round(share * canaries / 2))
        if guesses > canaries:
            continue
        right = expected_accuracy(guesses / canaries, separation)
        correct = math.floor(guesses * right - math.sqrt(guesses * right * (1 - right)))
        bound = epsilon_lower_bound(max(0, correct), guesses, canaries, delta, confidence, 0.01)
        if bound > best:
            best, chosen = bound, guesses
    return chosen


def expected_accuracy(share: float, separation: float) -> float:
    """The chance that a guess is right when a share of all canaries is guessed and scores are normal.

    The highest share/2 lie above the threshold t with (Pr[N > t] + Pr[N > t - separation]) / 2 = share / 2.
    """
    from scipy.special import ndtr

    low, high = separation / 2, separation / 2 + 40.0
    for _ in range(60):
        threshold = (low + high) / 2
        guessed = ndtr(-threshold) + ndtr(separation - threshold)
        low, high = (threshold, high) if guessed > share else (low, threshold)
    included, excluded = ndtr(separation - low), ndtr(-low)
    return float(included / (included + excluded))


def check_counts(correct: int, guesses: int, canaries: int) -> None:
    if not 1 <= guesses <= canaries:
        raise Refusal(f"guesses={guesses}: must be between 1 and the {canaries} canaries")
    if not 0 <= correct <= guesses:
        raise Refusal(f"correct={correct}: must be between 0 and the {guesses} guesses")


def check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise Refusal(f"delta={delta}: must be in [0, 1)")
