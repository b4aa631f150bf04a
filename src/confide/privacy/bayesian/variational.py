"""Variational inference with "free" privacy (section V-C of Triastcyn and Faltings 2019): an experiment, no guarantee.

Only draws w_t ~ q(w; theta_(t-1)) are published, the parameters theta stay hidden, and no noise is added. The paper
accounts each step by the Renyi divergence between q(w; theta) and q(w; theta'), where theta and theta' come from the
same previous theta by one update with and without a record. That is not the divergence of what is published: theta is
never made private, so with a record left out *all* updates differ, and the two laws of w_t are apart by the whole drift
that has built up since the start. `free_variational_inference` computes both, the one-step number of the paper and, on
request, the one with the drift, so that the difference can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal
from confide.privacy.accountants.bound import DATA_DEPENDENT, Bound, infinite
from confide.privacy.accountants.profiles import Array
from confide.privacy.bayesian.moments import log_sampled_moment, renyi_gaussians
from confide.privacy.bayesian.result import Attack, BayesianEstimate, Confidential, Trusted
from confide.privacy.interpretation import naive_accuracy

Rows = NDArray[np.int64]
# (mean, standard deviation), the rows of the batch, the published draw -> (mean, standard deviation)
Update: TypeAlias = Callable[[Array, Array, Rows, Array], tuple[Array, Array]]
Rule: TypeAlias = Literal["product", "hoelder"]

# Whole orders, as the paper has them; closer together where they are small.
DEFAULT_ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NOTE = (
    "no DP guarantee and no Bayesian one: an experiment. Parameters are hidden but never made private; what is "
    "published depends on the drift that a record has caused over all steps; this number looks at one step at a time"
)


@dataclass(frozen=True, eq=False, repr=False)
class FreeRun(Trusted):
    """draws: what would be published, one per step; mean, deviation: the hidden parameters at the end.

    estimate        the paper's number; its DP number is infinite
    drift_epsilon   the same rule on the divergences that include the drift; None if it was not asked for
    """

    draws: Array
    mean: Array
    deviation: Array
    estimate: Confidential
    drift_epsilon: float | None


def free_variational_inference(
    update: Update,
    mean: Array,
    deviation: Array,
    records: int,
    *,
    rate: float,
    steps: int,
    delta: float,
    pairs: int = 32,
    rule: Rule = "product",
    failure: float = 1e-15,
    orders: Sequence[int] = DEFAULT_ORDERS,
    with_drift: bool = False,
    seed: int | None = None,
) -> FreeRun:
    """Run variational inference on the trusted side and account its draws by the paper's rule.

    update     the next (mean, deviation) of q from the present one, the rows of a batch and the published draw; it must
               not depend on anything else
    pairs      records per step whose absence is tried
    with_drift also follow `pairs` records through the whole run, each left out from the start
    """
    if rule not in ("product", "hoelder"):
        raise Refusal(f"rule={rule!r}: must be product or hoelder")
    if not (0 < rate <= 1 and 0 < delta < 1 and steps >= 1 and 3 <= pairs <= records):
        raise Refusal(
            f"rate={rate}, delta={delta}, steps={steps}, pairs={pairs}: need rate in (0, 1], delta in (0, 1), "
            f"at least one step and between 3 and records={records} pairs"
        )
    random = np.random.default_rng(seed)
    followed = random.choice(records, pairs, replace=False)
    hidden = (np.asarray(mean, np.float64), np.asarray(deviation, np.float64))
    without = [hidden] * pairs
    one_step, drifted, draws = [], [], []
    for _ in range(steps):
        draw = hidden[0] + hidden[1] * random.standard_normal(hidden[0].shape)
        batch = np.flatnonzero(random.random(records) < rate)
        after = update(*hidden, batch, draw)
        tried = random.choice(records, pairs, replace=False)
        others = [update(*hidden, _without(batch, record), draw) for record in tried]
        # conditional on being in the batch: sampling enters through the binomial sum
        included = [update(*hidden, np.union1d(batch, [record]), draw) for record in tried]
        one_step.append(_log_moments(included, others, rate, orders))
        if with_drift:
            without = [update(*q, _without(batch, r), draw) for q, r in zip(without, followed, strict=True)]
            drifted.append(_log_moments([after] * pairs, without, 1.0, orders))
        draws.append(draw)
        hidden = after
    epsilon = _epsilon(np.array(one_step), rule, delta, failure, orders)
    drift = _epsilon(np.array(drifted), rule, delta, failure, orders) if with_drift else None
    return FreeRun(np.array(draws), *hidden, _estimate(epsilon, delta), drift)


def _without(batch: Rows, record: int) -> Rows:
    kept: Rows = batch[batch != record]
    return kept


def _log_moments(
    left: list[tuple[Array, Array]], right: list[tuple[Array, Array]], rate: float, orders: Sequence[int]
) -> Array:
    """(pairs, orders): the larger of the two directions of lambda D_(lambda+1), infinite where it does not exist."""
    highest = max(orders)
    means = [np.array([pair[0] for pair in side]) for side in (left, right)]
    variances = [np.array([pair[1] for pair in side]) ** 2 for side in (left, right)]
    result = np.zeros((len(left), len(orders)))
    for first, second in ((0, 1), (1, 0)):
        base = np.zeros((len(left), highest + 2))
        for k in range(2, highest + 2):
            divergence = renyi_gaussians(k, means[first], variances[first], means[second], variances[second])
            base[:, k] = (k - 1) * divergence
        sampled = [log_sampled_moment(order, base[:, : order + 2], rate) for order in orders]
        result = np.maximum(result, np.stack(sampled, axis=1))
    return result


def _epsilon(log_moments: Array, rule: Rule, delta: float, failure: float, orders: Sequence[int]) -> float:
    """(steps, pairs, orders) to epsilon, with the Student-t bound on the mean over pairs."""
    from scipy.stats import t

    steps, pairs, _ = log_moments.shape
    power = float(steps) if rule == "hoelder" else 1.0
    beta = delta - failure * steps * len(orders)
    if beta <= 0:
        raise Refusal(f"failure={failure}: times {steps} steps and {len(orders)} orders exceeds delta={delta}")
    finite = np.isfinite(log_moments).all(axis=(0, 1))
    if not finite.any():
        return math.inf
    scaled = power * log_moments[..., finite]
    top = scaled.max(axis=1)
    values = np.exp(scaled - top[:, None])
    bounds = values.mean(1) + t.isf(failure, pairs - 1) / math.sqrt(pairs - 1) * values.std(1)
    costs = (np.log(bounds) + top).sum(0) / power
    return max(0.0, float(np.min((costs - math.log(beta)) / np.array(orders)[finite])))


def _estimate(epsilon: float, delta: float) -> Confidential:
    dp = infinite("draws of a hidden posterior that was never made private")
    attack = {"dp": Attack(1.0, 1.0), "bayesian": Attack(naive_accuracy(epsilon), None)}
    return Confidential(
        BayesianEstimate("free variational inference", Bound(epsilon, DATA_DEPENDENT, NOTE), dp, delta, attack)
    )
