"""The rules by moments: the product of the paper, and Hoelder's inequality in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from confide.errors import Refusal
from confide.privacy.accountants.bound import DATA_DEPENDENT, Bound
from confide.privacy.accountants.pld import PLD
from confide.privacy.bayesian.moments import (
    MEAN_RULES,
    REAL_ORDERS,
    WHOLE_ORDERS,
    Distances,
    MeanRule,
    ObservedSteps,
    log_mean_bounds,
)
from confide.privacy.bayesian.result import Attack, BayesianEstimate, Confidential
from confide.privacy.interpretation import attacker, naive_accuracy

_HOLDS = "not a DP guarantee; meant for records drawn like these"
_ADAPTIVE = "that distances along the run do not depend on whether a record took part"
_MEANS = {
    "student-t": "that moments of losses are normally distributed over records (Student-t bound on their mean)",
    "bernstein": "that the records watched are fresh independent draws (empirical Bernstein bound on their mean)",
    "exact": "that the distribution of distances is known",
}


def product(
    observed: Sequence[Distances],
    delta: float,
    *,
    mean: MeanRule = "student-t",
    failure: float = 1e-15,
    orders: Sequence[float] | None = None,
) -> Confidential:
    """The rule of the paper: epsilon = min over lambda of (sum_t log E_x e^(lambda D_t) + log(1 / beta)) / lambda.

    observed  distances of every step
    mean      how E_x is bounded from a sample
    failure   probability that one such bound fails; delta = beta + failure * steps * orders
    orders    the lambdas tried; whole numbers where records are sampled
    """
    note = (
        f"{_HOLDS}; assumes that a record's losses at different steps are unrelated, which is false where the same "
        f"records have large distances again and again (the number is then too small), {_ADAPTIVE}, "
        f"and {_MEANS.get(mean)}"
    )
    return _by_moments("product", observed, delta, mean, failure, orders or WHOLE_ORDERS, note)


def hoelder(
    observed: Sequence[Distances],
    delta: float,
    *,
    mean: MeanRule = "student-t",
    failure: float = 1e-15,
    orders: Sequence[float] | None = None,
) -> Confidential:
    """Hoelder's inequality in place of the product: c_t = log E_x e^(T lambda D_t) / T for T steps.

    Arguments as for `product`.
    """
    note = f"{_HOLDS}; assumes {_ADAPTIVE}, and {_MEANS.get(mean)}"
    usual = REAL_ORDERS if all(step.event.rate == 1 for step in observed) else WHOLE_ORDERS
    return _by_moments("hoelder", observed, delta, mean, failure, orders or usual, note)


def group_privacy(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """(epsilon, delta) for a group of records: (k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)).

    The paper's (k epsilon, k delta) is wrong: each loss in the chain must be drawn under its own data set.
    """
    if size < 1 or not (epsilon >= 0 and 0 <= delta <= 1):
        raise Refusal(f"epsilon={epsilon}, delta={delta}, size={size}: need epsilon >= 0, delta in [0, 1], size >= 1")
    growth = float(size) if epsilon == 0 else math.exp(_log_expm1(size * epsilon) - _log_expm1(epsilon))
    return size * epsilon, min(1.0, delta * growth)


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _by_moments(
    rule: str,
    observed: Sequence[Distances],
    delta: float,
    mean: MeanRule,
    failure: float,
    orders: Sequence[float],
    note: str,
) -> Confidential:
    steps = ObservedSteps(observed)
    _check(delta, mean, failure, orders, steps)
    union = 0.0 if mean == "exact" else failure * steps.total * len(orders)
    if union >= delta:
        raise Refusal(
            f"failure={failure}: {steps.total} steps and {len(orders)} orders make it {union:.3g}, more than "
            f"delta={delta}; choose a smaller one or fewer orders"
        )
    epsilon, order = _best_order(lambda order: _cost(rule, steps, order, mean, failure), delta - union, orders)
    events = tuple(step.event for step in observed)
    dp = PLD().epsilon(events, delta)
    assert dp.epsilon is not None
    attack = {
        "dp": Attack(naive_accuracy(dp.epsilon), attacker(events, dp.epsilon, delta=delta).accuracy),
        "bayesian": Attack(naive_accuracy(epsilon), None),
    }
    bound = Bound(epsilon, DATA_DEPENDENT, f"{note}; order {order:g}")
    return Confidential(BayesianEstimate(rule, bound, dp, delta, attack))


def _check(delta: float, mean: MeanRule, failure: float, orders: Sequence[float], steps: ObservedSteps) -> None:
    if not 0 < delta < 1:
        raise Refusal(f"delta={delta}: must be in (0, 1)")
    if mean not in MEAN_RULES:
        raise Refusal(f"mean={mean!r}: must be one of {', '.join(MEAN_RULES)}")
    if not 0 < failure < 1:
        raise Refusal(f"failure={failure}: must be in (0, 1)")
    if not orders or min(orders) <= 0:
        raise Refusal(f"orders={tuple(orders)}: must be numbers > 0, and at least one")
    if mean == "exact" and not steps.exact:
        raise Refusal("mean='exact': needs weights for every value; a sample has none, use 'student-t'")


def _cost(rule: str, steps: ObservedSteps, order: float, mean: MeanRule, failure: float) -> float:
    """The sum over steps of c_t(order)."""
    power = float(steps.total) if rule == "hoelder" else 1.0
    values, largest = steps.log_moments(order), steps.log_largest(order)
    bounds = log_mean_bounds(steps, power * values, mean, failure, power * largest)
    return float(steps.counts @ bounds) / power


def _best_order(cost: Callable[[float], float], beta: float, orders: Sequence[float]) -> tuple[float, float]:
    """The smallest (cost + log(1 / beta)) / order.

    The cost is convex in the order for known distributions and nearly so for samples, which makes this fall and then
    rise. A few orders are tried from below until it has risen well above the least, then those around the best.
    """
    listed = sorted(orders)
    known: dict[int, float] = {}

    def epsilon(place: int) -> float:
        if place not in known:
            known[place] = max(0.0, (cost(listed[place]) - math.log(beta)) / listed[place])
        return known[place]

    stride = max(1, len(listed) // 24)
    for place in (*range(0, len(listed), stride), len(listed) - 1):
        if epsilon(place) > 2 * min(known.values()):
            break
    best = min(known, key=epsilon)
    while True:
        near = [place for place in (best - stride, best + stride) if 0 <= place < len(listed)]
        better = min((best, *near), key=epsilon)
        if better == best and stride == 1:
            return known[best], listed[best]
        stride = stride if better != best else max(1, stride // 2)
        best = better
