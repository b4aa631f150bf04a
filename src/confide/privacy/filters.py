"""Filters: a ceiling that holds although each plan is chosen after seeing what the earlier ones released.

A *plan* is a list of events that was fixed before any of it was released. Inside a plan, composition by privacy loss
distributions (PLD) is proven and tight. Between plans it is not: if the noise or the length of the second plan is
chosen by what the first one showed, "stop when the composed epsilon passes the ceiling" proves nothing (Rogers, Roth,
Ullman and Vadhan 2016; Regehr et al. 2026). The rules below do. The first plan is chosen before anything was seen,
so everything that depends on the ceiling (epsilon, delta) and on the first plan alone is fixed in advance.

    one plan      PLD at the ceiling itself. Nothing is lost.
    more plans    at least one of three filters must have room, each of which has a share of delta:
      repetition  every plan is a multiple of the same base (of the first plan): PLD of the sum
      gaussian    PLD of (first plan, one Gaussian of mu^2 = sum of mu_k^2), where the k-th later plan is covered by a
                  Gaussian of mu_k up to a little delta (Smith and Thakurta 2022; Koskela et al. 2023)
      renyi       sum of Renyi divergences at ONE order, which the ceiling and the first plan choose
                  (Feldman and Zrnic 2021; Lecuyer 2021)

The proofs, and what adaptivity costs compared with PLD, stand in docs/soundness.md, "Filters".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from confide.privacy.accountants.bound import is_plain_gaussian, non_private, sensitivity, slack
from confide.privacy.accountants.pld import Parts, gaussian_only, profile, units
from confide.privacy.accountants.profiles import Array, gaussian_delta, gaussian_mu
from confide.privacy.accountants.rdp import DEFAULT_ORDERS, divergences
from confide.privacy.events import Adjacency, Event, GaussianEvent, merged

Plan: TypeAlias = tuple[Event, ...]

FIXED, REPETITION, GAUSSIAN, RENYI = "fixed in advance", "repetition", "gaussian", "renyi"
# How delta is shared. A filter that gets a part w of delta loses about as much epsilon as log(1 / w) adds to
# log(1 / delta): some 3 % at one half. Renyi is the last resort. Un-sampled Gaussians repeat inside `gaussian`.
_SHARES = {REPETITION: 0.4, GAUSSIAN: 0.5, RENYI: 0.1}
_SHARES_OF_GAUSSIANS = {REPETITION: 0.0, GAUSSIAN: 0.9, RENYI: 0.1}
# This part of a filter's delta pays for what may be given away altogether: half for the covers, half for slacks.
_LEAK = 0.1
# From this many questions on, a question about twice the amount answers for the next ones.
_IN_A_RUN = 3
# A cover's mu is found to within this fraction, from above.
_COVER_TOLERANCE = 1e-4


def plan_of(events: Iterable[Event]) -> Plan:
    """The events as a plan: equal ones counted together, in one order for equal plans."""
    return tuple(sorted(merged(events), key=repr))


@dataclass(frozen=True)
class Promise:
    """The ceiling: all plans together stay (epsilon, delta)-private."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"


@dataclass
class History:
    """The plans that one neighbouring record can have touched: the first, and how often each later one came."""

    first: Plan = ()
    later: dict[Plan, int] = field(default_factory=dict)

    def add(self, plan: Plan, times: int = 1) -> None:
        """One more plan, `times` over; the order of later ones does not matter."""
        if plan and not self.first:
            self.first, times = plan, times - 1
        if plan and times:
            self.later[plan] = self.later.get(plan, 0) + times

    def events(self) -> Plan:
        """Everything, as if it had been one plan."""
        return merged([*self.first, *(replace(e, count=e.count * n) for plan, n in self.later.items() for e in plan)])


@dataclass(frozen=True)
class Verdict:
    """Whether the plans stay within the ceiling, and by which filter.

    by     the filter that has room; when refused, the one that came closest
    costs  the epsilon that each filter would have to be given; known when refused, and for a plan fixed in advance
    """

    within: bool
    by: str
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """The least ceiling that one of the filters would have accepted."""
        return min(self.costs.values(), default=math.inf)


class Filters:
    """Judges histories, and remembers per ceiling and first plan what it worked out. Sound whatever is forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[Plan, Promise], _Family] = {}

    def judge(self, history: History, promise: Promise) -> Verdict:
        """Whether these plans together keep the promise. Raises UnsupportedEvents where no bound is known at all."""
        first, later = history.first, history.later
        if not first:
            return Verdict(True, FIXED, {FIXED: 0.0})
        if not later:
            cost = _sound_epsilon(first, promise.delta, promise.adjacency)
            return Verdict(cost <= promise.epsilon, FIXED, {FIXED: cost})
        if any(non_private(plan) is not None for plan in (first, *later)):
            return Verdict(False, FIXED, {FIXED: math.inf})
        family = self._known.setdefault((first, promise), _Family(first, promise))
        for name, one in family.filters.items():
            if one.within(later):
                return Verdict(True, name)
        costs = {name: one.cost(later) for name, one in family.filters.items()}
        return Verdict(False, min(costs, key=lambda name: costs[name]), costs)


class _Family:
    """The filters that a ceiling and a first plan fix."""

    def __init__(self, first: Plan, promise: Promise) -> None:
        plain = all(is_plain_gaussian(event) for event in first)
        shares = _SHARES_OF_GAUSSIANS if plain else _SHARES
        kinds: dict[str, type[_Filter]] = {REPETITION: _Repetition, GAUSSIAN: _Gaussian, RENYI: _Renyi}
        self.filters = {
            name: kind(first, replace(promise, delta=shares[name] * promise.delta))
            for name, kind in kinds.items()
            if shares[name] > 0
        }


class _Filter:
    """One filter at its own share of delta: an amount that adds up over the later plans, and a price of the amount."""

    def __init__(self, first: Plan, promise: Promise) -> None:
        self.first, self.promise = first, promise
        self._fits, self._too_much, self._asked = -1.0, math.inf, 0

    def amount(self, later: Mapping[Plan, int]) -> float:
        """What the later plans use; infinite where this filter does not apply to them."""
        raise NotImplementedError

    def price(self, amount: float) -> float:
        """Epsilon of the first plan with that amount behind it; grows with the amount."""
        raise NotImplementedError

    def cost(self, later: Mapping[Plan, int]) -> float:
        amount = self.amount(later)
        return math.inf if math.isinf(amount) else self.price(amount)

    def within(self, later: Mapping[Plan, int]) -> bool:
        """Whether the price stays within the ceiling. Thousands of small amounts ask for a few prices only."""
        amount = self.amount(later)
        if amount <= self._fits or amount >= self._too_much:
            return amount <= self._fits
        self._asked += 1
        ahead = min(2 * amount, (amount + self._too_much) / 2)
        if self._asked > _IN_A_RUN and self._learn(ahead):
            return True
        return self._learn(amount)

    def _learn(self, amount: float) -> bool:
        fits = self.price(amount) <= self.promise.epsilon
        if fits:
            self._fits = max(self._fits, amount)
        else:
            self._too_much = min(self._too_much, amount)
        return fits


class _Repetition(_Filter):
    """Every plan is a multiple of one base, so that the history is a power of it, whatever the order."""

    @cached_property
    def base(self) -> Plan:
        divisor = math.gcd(*(event.count for event in self.first))
        return tuple(replace(event, count=event.count // divisor) for event in self.first)

    def amount(self, later: Mapping[Plan, int]) -> float:
        return sum(times * self._multiple(plan) for plan, times in later.items())

    def _multiple(self, plan: Plan) -> float:
        multiple = plan[0].count // self.base[0].count
        same = tuple(replace(event, count=event.count * multiple) for event in self.base) == plan if multiple else False
        return float(multiple) if same else math.inf

    def price(self, amount: float) -> float:
        powers = self.first[0].count // self.base[0].count + math.ceil(amount)
        events = [replace(event, count=event.count * powers) for event in self.base]
        return _sound_epsilon(events, self.promise.delta, self.promise.adjacency)


class _Gaussian(_Filter):
    """Later plans as Gaussians beside the first plan; the amount is the sum of their mu^2."""

    @cached_property
    def leak(self) -> float:
        return _LEAK * self.promise.delta

    @cached_property
    def widest(self) -> float:
        """mu^2 beyond which nothing fits, even without the first plan."""
        return gaussian_mu(self.promise.epsilon, self.promise.delta - self.leak) ** 2

    def amount(self, later: Mapping[Plan, int]) -> float:
        adjacency = self.promise.adjacency
        if sum(times * slack(plan, adjacency) for plan, times in later.items()) > self.leak / 2:
            return math.inf
        return sum(times * self._squared_mu(plan) for plan, times in later.items())

    def _squared_mu(self, plan: Plan) -> float:
        parts = units(plan, self.promise.adjacency)
        return gaussian_cover(parts, self.widest, self.leak / 2)

    def price(self, amount: float) -> float:
        adjacency = self.promise.adjacency
        behind = [GaussianEvent(sensitivity(adjacency) / math.sqrt(amount))] if amount > 0 else []
        return _sound_epsilon([*self.first, *behind], self.promise.delta - self.leak, adjacency)


@lru_cache(maxsize=1024)
def gaussian_cover(parts: Parts, widest: float, leak: float) -> float:
    """The least mu^2 <= widest, or infinity, such that a leaky Gaussian dominates the releases together.

    delta(epsilon) <= s + (1 - s) delta_mu(epsilon)   for all epsilon >= 0, both directions,   s = leak mu^2 / widest.

    Both sides fall in epsilon, so it is enough that the left at each point of a grid is at most the right at the next
    one, up to where the left is below s altogether.
    """
    mu = gaussian_only(parts)
    if mu is not None:
        return mu * mu

    def dominates(squared: float, epsilons: Array, deltas: Array) -> bool:
        share = leak * squared / widest
        right = share + (1 - share) * gaussian_delta(math.sqrt(squared), epsilons)
        return float(deltas[-1]) <= share and bool(np.all(deltas[:-1] <= right[1:]))

    # A small plan may leave open a small share only, and its profile is needed further out.
    for depth in (1e-2, 1e-6):
        epsilons, deltas = profile(parts, leak * depth)
        low, high = depth * widest, widest
        if not dominates(low, epsilons, deltas):
            break
    else:
        return low
    if not dominates(high, epsilons, deltas):
        return math.inf
    while high > (1 + _COVER_TOLERANCE) * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if dominates(middle, epsilons, deltas) else (middle, high)
    return high


class _Renyi(_Filter):
    """Renyi divergences at one order: the order at which the first plan takes the least part of the budget."""

    @cached_property
    def _order(self) -> tuple[float, float]:
        """The order, and the constant that turns a divergence D into epsilon = D + constant."""
        orders = np.array(DEFAULT_ORDERS)
        delta = (1 - _LEAK) * self.promise.delta
        constants = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        budgets = self.promise.epsilon - constants
        with np.errstate(divide="ignore"):
            parts = np.where(budgets > 0, self._divergences(self.first, DEFAULT_ORDERS) / budgets, math.inf)
        best = int(np.argmin(parts))
        return DEFAULT_ORDERS[best], float(constants[best])

    def _divergences(self, plan: Plan, orders: tuple[float, ...]) -> Array:
        found = divergences(plan, self.promise.adjacency, orders)
        return np.full(len(orders), math.inf) if found is None else found

    def amount(self, later: Mapping[Plan, int]) -> float:
        adjacency = self.promise.adjacency
        left_open = slack(self.first, adjacency) + sum(n * slack(plan, adjacency) for plan, n in later.items())
        if left_open > _LEAK * self.promise.delta:
            return math.inf
        order, _ = self._order
        return float(sum(times * self._divergences(plan, (order,))[0] for plan, times in later.items()))

    def price(self, amount: float) -> float:
        order, constant = self._order
        total = float(self._divergences(self.first, (order,))[0]) + amount
        return math.inf if math.isnan(total) else max(0.0, total + constant)


def _sound_epsilon(events: Iterable[Event], delta: float, adjacency: Adjacency) -> float:
    from confide.privacy import accountants

    return float(accountants.sound_epsilon(tuple(events), delta, adjacency))
