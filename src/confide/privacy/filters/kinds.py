"""The three filters: an amount that adds up over the later plans, and a price of the amount.

The sum over a log is kept and taken further when the log has grown, so a question costs the same behind ten plans and
behind ten thousand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from confide._native.process import ForkAwareLock
from confide.privacy.accountants.bound import is_plain_gaussian, non_private, sensitivity, slack
from confide.privacy.accountants.pld import Parts, gaussian_only, profile, units
from confide.privacy.accountants.profiles import Array, gaussian_delta_below, gaussian_mu
from confide.privacy.accountants.rdp import DEFAULT_ORDERS, divergences
from confide.privacy.events import Adjacency, Event, GaussianEvent
from confide.privacy.filters.history import GAUSSIAN, RENYI, REPETITION, History, Log, Plan, Promise, Sum

# This part of a filter's delta pays for what may be given away altogether: half for the covers, half for slacks.
_LEAK = 0.1
# From this many questions on, a question about twice the amount answers for the next ones.
_IN_A_RUN = 3
# Amounts of plans that each filter keeps in memory.
_REMEMBERED = 4096
# A cover's mu is found to within this fraction, from above.
_COVER_TOLERANCE = 1e-4
# Sums of amounts are raised by this fraction before they are priced: more than the rounding of four million additions.
ROUNDING = 1e-9


# Sums that other rules have made are not taken over: raise this with every change that makes an amount larger.
RULES = 1
# A sum is worth writing down once it has taken this many different plans whose amounts are dear to work out.
_WORTH_NOTING = 16


@dataclass
class _Running:
    """The sum over the plans of a log up to a position: of amounts, and of what they may give away altogether."""

    position: int
    amount: float = 0.0
    slack: float = 0.0
    dear: set[Plan] = field(default_factory=set)  # what was added since it was written down


class Filter(ABC):
    """One filter at its own share of the ceiling's delta. The amounts are those of the plans behind the first one."""

    name = ""

    def __init__(self, first: Plan, ceiling: Promise, share: float) -> None:
        self.first, self.ceiling = first, ceiling
        self.promise = replace(ceiling, delta=share * ceiling.delta)
        self._amounts: dict[Plan, float] = {}
        self._sums: WeakKeyDictionary[Log, dict[bool, _Running]] = WeakKeyDictionary()
        self._lock = ForkAwareLock()
        self._fits, self._too_much, self._asked = -1.0, math.inf, 0

    @abstractmethod
    def amount_of(self, plan: Plan) -> float:
        """What one later plan uses; infinite where this filter does not apply to it."""

    @abstractmethod
    def price(self, amount: float) -> float:
        """Epsilon of the first plan with that amount behind it; grows with the amount."""

    def kept_for_slack(self) -> float:
        """How much the later plans may give away altogether."""
        return math.inf

    def within(self, history: History, begun: Log | None) -> bool:
        """Whether the price stays within the ceiling. Thousands of small amounts ask for a few prices only."""
        amount = self.amount(history, begun)
        known = self._answer(amount)
        if known is not None:
            return known
        self._asked += 1
        ahead = min(2 * amount, (amount + self._too_much) / 2)
        if self._asked > _IN_A_RUN and self._learn(ahead):
            return True
        return self._learn(amount)

    def recall(self, history: History, begun: Log | None) -> bool | None:
        """The answer of `within` if nothing new has to be worked out for it."""
        found = self._sum(history, begun)
        return self._answer(found) if isinstance(found, float) else None

    def cost(self, history: History, begun: Log | None) -> float:
        amount = self.amount(history, begun)
        return math.inf if math.isinf(amount) else self.price(amount)

    def _answer(self, amount: float) -> bool | None:
        if math.isinf(amount):
            return False
        return True if amount <= self._fits else False if amount >= self._too_much else None

    def _learn(self, amount: float) -> bool:
        fits = self.price(amount) <= self.promise.epsilon
        if fits:
            self._fits = max(self._fits, amount)
        else:
            self._too_much = min(self._too_much, amount)
        return fits

    # -- sums ------------------------------------------------------------------------------------------------

    def amount(self, history: History, begun: Log | None) -> float:
        """The amount of all plans behind the first, infinite where they may give away too much."""
        while True:
            found = self._sum(history, begun)
            if isinstance(found, float):
                return found
            while len(self._amounts) >= _REMEMBERED:
                self._amounts.pop(next(iter(self._amounts)), None)
            self._amounts[found] = math.inf if non_private(found) is not None else self.amount_of(found)

    def _sum(self, history: History, begun: Log | None) -> float | Plan:
        """The same; or a plan whose amount is not known yet."""
        amount, given_away = 0.0, 0.0
        with self._lock.held():
            for log in history.logs:
                running = self._taken_further(log, first=log is begun)
                if not isinstance(running, _Running):
                    return running
                amount, given_away = amount + running.amount, given_away + running.slack
        if begun is not None and history.more:
            one = self._amounts.get(history.more)
            if one is None:
                return history.more
            amount, given_away = amount + one, given_away + slack(history.more, self.promise.adjacency)
        return amount if given_away * (1 + ROUNDING) <= self.kept_for_slack() else math.inf

    def _taken_further(self, log: Log, first: bool) -> _Running | Plan:
        """The sum over a log, without its first plan if that one is the first of all."""
        sums = self._sums.setdefault(log, {})
        running = sums.get(first)
        if running is None:
            noted = log.noted.get(self._summed(first))
            running = _Running(int(first)) if noted is None else _Running(noted.position, noted.amount, noted.slack)
            sums[first] = running
        plans = log.plans
        while running.position < len(plans):
            plan = plans[running.position]
            amount = self._amounts.get(plan)
            if amount is None:
                return plan
            running.amount += amount
            running.slack += slack(plan, self.promise.adjacency)
            running.position += 1
            if len(running.dear) < _WORTH_NOTING and not all(is_plain_gaussian(event) for event in plan):
                running.dear.add(plan)
        return running

    def worth_noting(self, log: Log, first: bool) -> Sum | None:
        """The sum over a log if it has gone far beyond what is written down."""
        with self._lock.held():
            running = self._sums.get(log, {}).get(first)
            if running is None or len(running.dear) < _WORTH_NOTING:
                return None
            running.dear.clear()
            return self._summed(first, running.position, running.amount, running.slack)

    def _summed(self, first: bool, position: int = 0, amount: float = 0.0, given_away: float = 0.0) -> Sum:
        return Sum(RULES, self.ceiling, self.first, first, self.name, position, amount, given_away)


class RepetitionFilter(Filter):
    """Every plan is a multiple of one base, so that the history is a power of it, whatever the order."""

    name = REPETITION

    @cached_property
    def base(self) -> Plan:
        divisor = math.gcd(*(event.count for event in self.first))
        return tuple(replace(event, count=event.count // divisor) for event in self.first)

    def amount_of(self, plan: Plan) -> float:
        multiple = plan[0].count // self.base[0].count
        same = tuple(replace(event, count=event.count * multiple) for event in self.base) == plan if multiple else False
        return float(multiple) if same else math.inf

    def price(self, amount: float) -> float:
        powers = self.first[0].count // self.base[0].count + math.ceil(amount)
        events = [replace(event, count=event.count * powers) for event in self.base]
        return sound_epsilon(events, self.promise.delta, self.promise.adjacency)


class GaussianFilter(Filter):
    """Later plans as Gaussians beside the first plan; the amount is the sum of their mu^2."""

    name = GAUSSIAN

    @cached_property
    def leak(self) -> float:
        return _LEAK * self.promise.delta

    @cached_property
    def widest(self) -> float:
        """mu^2 beyond which nothing fits, even without the first plan."""
        return gaussian_mu(self.promise.epsilon, self.promise.delta - self.leak) ** 2 * (1 + ROUNDING)

    def kept_for_slack(self) -> float:
        return self.leak / 2

    def amount_of(self, plan: Plan) -> float:
        return gaussian_cover(units(plan, self.promise.adjacency), self.widest, self.leak / 2)

    def price(self, amount: float) -> float:
        adjacency = self.promise.adjacency
        mu = math.sqrt(amount * (1 + ROUNDING))
        behind = [GaussianEvent(sensitivity(adjacency) / mu)] if amount > 0 else []
        return sound_epsilon([*self.first, *behind], self.promise.delta - self.leak, adjacency)


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
        right = share + (1 - share) * gaussian_delta_below(math.sqrt(squared), epsilons)
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


class RenyiFilter(Filter):
    """Renyi divergences at one order: the order at which the first plan takes the least part of the budget."""

    name = RENYI

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

    def kept_for_slack(self) -> float:
        return _LEAK * self.promise.delta - slack(self.first, self.promise.adjacency)

    def amount_of(self, plan: Plan) -> float:
        return float(self._divergences(plan, (self._order[0],))[0])

    def price(self, amount: float) -> float:
        order, constant = self._order
        total = float(self._divergences(self.first, (order,))[0]) + amount
        rounded_up = total + constant + ROUNDING * (total + abs(constant))
        return math.inf if math.isnan(rounded_up) else max(0.0, rounded_up)


def sound_epsilon(events: Iterable[Event], delta: float, adjacency: Adjacency) -> float:
    from confide.privacy import accountants

    return float(accountants.sound_epsilon(tuple(events), delta, adjacency))
