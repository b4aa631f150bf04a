"""Private selection: trying candidates a random number of times and publishing the best costs about twice one try.

Choosing the best of several private runs is not free: the choice itself tells about the records (Liu and Talwar, STOC
2019). What is proven here is Theorem 2 of Papernot and Steinke (ICLR 2022), for K runs with K from a truncated negative
binomial distribution, drawn without looking at anything:

    Pr[K = k]  proportional to  (1-g)^k prod_{l<k} (l + a)/(l + 1),   k = 1, 2, ...,   a > -1, 0 < g < 1
    (a = 0: logarithmic, proportional to (1-g)^k / k; a = 1: geometric).

Each run picks a candidate at random, fits it, and scores it; fit AND score together have Renyi divergence D(.) at every
order, for every candidate. Only the run with the highest score is published. Its divergence at order x > 1 is at most

    D(x) + (1+a) [ (1 - 1/y) D(y) + log(1/g) / y ] + log E[K] / (x - 1)        for every y >= 1.

*Proof.* Ties are broken by coins, so let scores be continuous. Let one run have density Q on the data and Q' on its
neighbour, and let q, q' be the chances that a run scores at most like the outcome o. The published outcome has density
Q(o) f'(q), where f is the generating function of K and f'(q) = E[K] (g/p)^{1+a} with p = g + (1-g)(1-q). So the moment
of order x of the ratio is at most e^{(x-1) D(x)} sup f'(q) (f'(q)/f'(q'))^{x-1}. Here f'(q) <= E[K], and
f'(q)/f'(q') = (p'/p)^{1+a}. Now p is the chance that a run scores above o or a coin of bias g falls: post-processing
of one run, so p'^y p^{1-y} <= e^{(y-1) D(y)}. Hence log(p'/p) <= (1 - 1/y) D(y) + log(1/p) / y, and p >= g. QED.

What must hold for the number to be true:

- The number of runs, the other runs and the time they took stay secret. A ledger that holds every run shows them; its
  own sum stays valid even if everything is published, and is larger.
- The score is private: charged like any other answer, or computed on public data.
- All candidates are fixed beforehand. Divergences are taken at their largest over candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import SystemRandom
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal, UnsupportedEvents
from confide.privacy.accountants.bound import UPPER_BOUND, Bound, check_question, infinite, known, non_private, slack
from confide.privacy.accountants.rdp import DEFAULT_ORDERS, RDP, divergences
from confide.privacy.events import Adjacency, Event, merged
from confide.privacy.ledger import Ledger

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")
_NEGLIGIBLE = 2.0**-60  # below the spacing of doubles near 1, so that further terms change no sum


@dataclass(frozen=True)
class Repetitions:
    """The law of K, by its mean and the shape a: 0 logarithmic, 1 geometric. A smaller shape is cheaper and wilder."""

    mean: float
    shape: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean > 1):
            raise Refusal(f"mean={self.mean}: must be a finite number > 1")
        if not (math.isfinite(self.shape) and self.shape > -1):
            raise Refusal(f"shape={self.shape}: must be a finite number > -1")

    @cached_property
    def gamma(self) -> float:
        """g, found by bisection of its logarithm: the mean falls as g grows."""
        low, high = -200.0, -1e-12
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(math.exp(middle), self.shape) > self.mean else (low, middle)
        return math.exp(low)  # the smaller g, whose mean is at least the one asked for

    @cached_property
    def expected(self) -> float:
        """E[K] at that g, as it enters the bound."""
        return _mean(self.gamma, self.shape)

    def draw(self, uniform: float) -> int:
        """K by inversion of its distribution function at a uniform number in [0, 1)."""
        gamma = self.gamma
        chance = _first(gamma, self.shape)
        count, below = 1, chance
        while below <= uniform and chance > _NEGLIGIBLE:  # rounding may keep the sum below 1 for ever
            chance *= (1 - gamma) * (count + self.shape) / (count + 1)
            count += 1
            below += chance
        return count


def _mean(gamma: float, shape: float) -> float:
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def _first(gamma: float, shape: float) -> float:
    """Pr[K = 1]."""
    if shape == 0:
        return (1 - gamma) / -math.log(gamma)
    return (1 - gamma) * shape / math.expm1(-shape * math.log(gamma))


def selection_epsilon(
    costs: Sequence[Sequence[Event]], delta: float, repetitions: Repetitions, adjacency: Adjacency = "add-remove"
) -> Bound:
    """Epsilon of publishing the best of K runs. `costs`: for every candidate, the events of one run and its score."""
    check_question(delta, adjacency)
    if not costs:
        raise Refusal("costs=(): give the events of at least one candidate")
    listed = [known(events) for events in costs]
    for events in listed:
        reason = non_private(events)
        if reason is not None:
            return infinite(reason)
    divergence = selection_divergence([base_divergence(events, adjacency) for events in listed], repetitions)
    epsilon, order = RDP().convert(divergence, delta)
    return Bound(epsilon, UPPER_BOUND, f"best of {repetitions.mean:g} runs on average, order {order:g}")


def base_divergence(events: Sequence[Event], adjacency: Adjacency) -> NDArray[np.float64]:
    """Renyi divergence of one run at the usual orders."""
    divergence = divergences(events, adjacency, DEFAULT_ORDERS)
    if divergence is None:
        raise UnsupportedEvents(
            "adjacency='replace-one': no Renyi bound is known here for Poisson sampling, so neither is one for "
            "selection; use add-remove"
        )
    if slack(events, adjacency) > 0:
        raise UnsupportedEvents(
            "slack: no bound is known here for the best of several runs that are private only up to a slack in delta"
        )
    return divergence


def selection_divergence(candidates: Sequence[NDArray[np.float64]], repetitions: Repetitions) -> NDArray[np.float64]:
    """The bound above at the usual orders; y runs over the same orders and 1, where D(y) does not enter."""
    orders, base = np.array(DEFAULT_ORDERS), np.max(np.stack(candidates), axis=0)
    log_inverse = -math.log(repetitions.gamma)
    second = min(log_inverse, float(((1 - 1 / orders) * base + log_inverse / orders).min()))
    found: NDArray[np.float64] = base + (1 + repetitions.shape) * second + math.log(repetitions.expected) / (orders - 1)
    return found


@dataclass(frozen=True)
class Selected(Generic[Candidate, Result]):
    """The winner. How many runs there were is not in it, because that must stay secret."""

    candidate: Candidate
    result: Result
    score: float
    privacy: Bound


def select(
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], tuple[float, Result]],
    cost: Callable[[Candidate], Sequence[Event]],
    *,
    delta: float,
    repetitions: Repetitions,
    adjacency: Adjacency = "add-remove",
    ledger: Ledger | None = None,
    dataset: str = "",
) -> Selected[Candidate, Result]:
    """Try candidates picked at random, K times, and give back the one with the highest private score.

    run     fits a candidate and returns (score, result); both must be private at the cost stated
    cost    the events of one such run
    ledger  if given, every run is held against it: one that was charged more than its cost is refused
    """
    privacy = selection_epsilon([cost(candidate) for candidate in candidates], delta, repetitions, adjacency)
    random = SystemRandom()
    best: tuple[float, float, Candidate, Result] | None = None
    for _ in range(repetitions.draw(random.random())):
        candidate = random.choice(candidates)
        before = _counts(ledger, dataset)
        score, result = run(candidate)
        _check_charged(before, _counts(ledger, dataset), cost(candidate))
        rank = (score if math.isfinite(score) else -math.inf, random.random())
        if best is None or rank > best[:2]:
            best = (*rank, candidate, result)
    assert best is not None  # there is at least one run
    return Selected(best[2], best[3], best[0], privacy)


def _counts(ledger: Ledger | None, dataset: str) -> dict[Any, int]:
    return _by_unit(()) if ledger is None else _by_unit(ledger.events(dataset))


def _by_unit(events: Sequence[Event]) -> dict[Any, int]:
    return {replace(event, count=1): event.count for event in merged(events)}


def _check_charged(before: dict[Any, int], after: dict[Any, int], stated: Sequence[Event]) -> None:
    allowed = _by_unit(stated)
    for unit, count in after.items():
        spent = count - before.get(unit, 0)
        if spent > allowed.get(unit, 0):
            raise Refusal(f"cost: a run was charged {spent} times {unit}, but states {allowed.get(unit, 0)}")
