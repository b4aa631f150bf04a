"""Bayesian differential privacy: what a run costs records drawn like these, told with what it assumes.

Three rules, from the easiest to believe in to the one that holds (Triastcyn and Faltings 2019, 2020):

    product    the paper's: moments averaged over records step by step and multiplied. False: the same record is in
               every step, so E[prod] >= prod E and the number is too small wherever distances persist
    hoelder    of the authors' later code: E[prod_t] <= prod_t (E[()^T])^(1/T). Valid for distances fixed in advance and
               a valid bound on the mean; with an honest bound it comes out near the DP number
    averaged   delta averaged over hold-out records, from whole distance sequences, with a bound that holds for every
               distribution: the one to use

None is a DP guarantee, so each comes back beside the DP number of the same run, and stays on the trusted side until it
is released on the user's word or paid for with noise.

    from confide.privacy import bayesian
    watch = bayesian.Watch()
    data = confide.PrivateData(x, y, schema=schema, watch=watch)
    source = bayesian.HoldOut(data, x_fresh, y_fresh)
    run = confide.fit(method, module, source, plan)
    bayesian.averaged(source.sequences(), delta=1e-5).release(acknowledge="hold-out records are public")
    bayesian.product(watch.distances(), delta=1e-5)                  # for comparison with the paper

What stays open, for every rule: the run is adaptive. Distances are those of the iterates that came out, while the
theorems want them fixed in advance or bounded over all iterates. A filter that drops a record once its own budget is
used up (Feldman and Zrnic 2021) would close that gap; a statement after the fact does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from confide.privacy._bayesian_average import averaged, chernoff_mean_bound, discrete_laplace
from confide.privacy._bayesian_moments import (
    MEAN_RULES,
    REAL_ORDERS,
    WHOLE_ORDERS,
    Distances,
    MeanRule,
    Steps,
    binary_mean_bound,
    exact_binary_mean_bound,
    log_mean_bounds,
    log_moment,
    log_sampled_moment,
    renyi_gaussians,
    smallest_honest_moment,
)
from confide.privacy._bayesian_result import Attack, BayesianEstimate, Confidential, Trusted
from confide.privacy._bayesian_sequences import (
    Sequences,
    constant_sequences,
    covering_counts,
    level_kinds,
    level_of,
    profiles,
    sequences_of,
)
from confide.privacy._bayesian_vi import FreeRun, free_variational_inference
from confide.privacy.bounds import DATA_DEPENDENT, Bound
from confide.privacy.interpretation import attacker, naive_accuracy
from confide.privacy.pld import PLD

if TYPE_CHECKING:
    from confide.mechanism.watching import HoldOut, Watch

__all__ = [
    "WHOLE_ORDERS",
    "Attack",
    "BayesianEstimate",
    "Confidential",
    "Distances",
    "FreeRun",
    "HoldOut",
    "Sequences",
    "Trusted",
    "Watch",
    "averaged",
    "binary_mean_bound",
    "chernoff_mean_bound",
    "constant_sequences",
    "covering_counts",
    "discrete_laplace",
    "exact_binary_mean_bound",
    "free_variational_inference",
    "group_privacy",
    "hoelder",
    "level_kinds",
    "level_of",
    "log_moment",
    "log_sampled_moment",
    "product",
    "profiles",
    "renyi_gaussians",
    "sequences_of",
    "smallest_honest_moment",
]


def __getattr__(name: str) -> Any:
    # Those who watch a run need torch, which nothing else in this folder does.
    if name in ("HoldOut", "Watch"):
        from confide.mechanism import watching

        return getattr(watching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
        raise ValueError(
            f"epsilon={epsilon}, delta={delta}, size={size}: need epsilon >= 0, delta in [0, 1], size >= 1"
        )
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
    steps = Steps(observed)
    _check(delta, mean, failure, orders, steps)
    union = 0.0 if mean == "exact" else failure * steps.total * len(orders)
    if union >= delta:
        raise ValueError(
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


def _check(delta: float, mean: MeanRule, failure: float, orders: Sequence[float], steps: Steps) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta}: must be in (0, 1)")
    if mean not in MEAN_RULES:
        raise ValueError(f"mean={mean!r}: must be one of {', '.join(MEAN_RULES)}")
    if not 0 < failure < 1:
        raise ValueError(f"failure={failure}: must be in (0, 1)")
    if not orders or min(orders) <= 0:
        raise ValueError(f"orders={tuple(orders)}: must be numbers > 0, and at least one")
    if mean == "exact" and not steps.exact:
        raise ValueError("mean='exact': needs weights for every value; a sample has none, use 'student-t'")


def _cost(rule: str, steps: Steps, order: float, mean: MeanRule, failure: float) -> float:
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
