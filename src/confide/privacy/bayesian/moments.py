"""Moments of privacy losses for given distances, and upper bounds on their mean over records.

One release adds a record of norm d (in units of the clipping bound C) to a sum with noise of z C, and the record
takes part with probability q. With L the privacy loss, its moment of order lambda (a whole number, lambda >= 1) is

    E e^(lambda L) = sum over k of Bin(k; lambda + 1, q) e^(k (k - 1) d^2 / (2 z^2)),

the cost c^L of Triastcyn and Faltings (2019); their c^R is not needed, because the reversed pair has the smaller
moment (Mironov, Talwar and Zhang 2019). Everything is kept in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from confide.errors import Refusal, UnsupportedEvents
from confide.privacy.accountants.profiles import Array
from confide.privacy.events import GaussianEvent

MeanRule: TypeAlias = Literal["student-t", "bernstein", "exact"]
MEAN_RULES: tuple[MeanRule, ...] = ("student-t", "bernstein", "exact")

# Every whole order to 128, then ever wider apart: low signal-to-noise ratios need orders in the thousands.
WHOLE_ORDERS: tuple[float, ...] = (
    *(float(order) for order in range(1, 129)),
    *sorted({float(round(128 * 2 ** (step / 8))) for step in range(1, 41)}),
)
# Without sampling the moment is known for every real order, and a fractional one is often the best.
REAL_ORDERS: tuple[float, ...] = tuple(sorted({*WHOLE_ORDERS, *(1 + step / 64 for step in range(1, 7 * 64))}))
# More distinct distances than this are rounded up to as many levels.
LEVELS = 1024
_CHUNK = 1 << 21  # doubles in one piece: 16 MB


@dataclass(frozen=True, eq=False)
class Distances:
    """How far records of one step move its sum, in units of the clipping bound.

    event    the step; its count says at how many steps these distances are met
    values   one distance per record: its clipped norm, or for a replaced record the norm of the difference
    weights  probabilities of the values when their distribution is known; None for a sample
    """

    event: GaussianEvent
    values: Array
    weights: Array | None = None

    def __post_init__(self) -> None:
        if self.event.sampling not in ("poisson", "full-batch"):
            raise UnsupportedEvents(
                f"sampling={self.event.sampling!r}: moments of given distances are known for poisson and full-batch"
            )
        values = np.asarray(self.values, dtype=np.float64)
        if values.ndim != 1 or not np.all(values >= 0) or not np.all(np.isfinite(values)):
            raise Refusal(f"values of shape {values.shape}: must be one finite number >= 0 for each record")
        object.__setattr__(self, "values", values)
        if self.weights is not None:
            weights = np.asarray(self.weights, dtype=np.float64)
            if weights.shape != values.shape or not np.all(weights >= 0) or abs(weights.sum() - 1) > 1e-9:
                raise Refusal(f"weights of shape {weights.shape}: must be one probability per value, summing to 1")
            object.__setattr__(self, "weights", weights)


def log_moment(order: float, distances: ArrayLike, noise_multiplier: float, rate: float = 1.0) -> Array:
    """log E e^(order * L) for each distance.

    Written as log(1 + sum over k >= 2 of Bin(k) (e^(k (k - 1) d^2 / (2 z^2)) - 1)), so that a small moment keeps all
    its digits and a large one does not overflow. Fractional orders only without sampling.
    """
    from scipy.special import gammaln, logsumexp

    squares = (np.asarray(distances, dtype=np.float64) / noise_multiplier) ** 2
    if rate == 1.0:
        return np.asarray(order * (order + 1) * squares / 2)
    if order != round(order) or order < 1:
        raise Refusal(f"order={order}: must be a whole number >= 1 where records are sampled (rate={rate})")
    k = np.arange(2, int(order) + 2, dtype=np.float64)
    n = order + 1
    log_binomial = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + k * math.log(rate)
    log_binomial += (n - k) * math.log1p(-rate)
    flat = squares.reshape(-1)
    result = np.empty_like(flat)
    stride = max(1, _CHUNK // len(k))
    for start in range(0, len(flat), stride):
        exponents = np.outer(flat[start : start + stride], k * (k - 1) / 2)
        with np.errstate(divide="ignore"):
            log_terms = log_binomial + exponents + np.log(-np.expm1(-exponents))
        result[start : start + stride] = np.logaddexp(0.0, logsumexp(log_terms, axis=1))
    return result.reshape(squares.shape)


def renyi_gaussians(
    order: float, mean: ArrayLike, variance: ArrayLike, other_mean: ArrayLike, other_variance: ArrayLike
) -> Array:
    """Renyi divergence of N(m1, v1) from N(m2, v2), diagonal, summed over the last axis.

        D_a = sum of a (m1 - m2)^2 / (2 v*) + log(v* / (v1^(1-a) v2^a)) / (2 (1 - a)),   v* = a v2 + (1 - a) v1

    (Gil, Alajaji and Linder 2013). It is finite only if v* > 0 in every coordinate, that is v2 / v1 > (a - 1) / a:
    at a = 33 a variance that shrinks by 3 % already has infinite divergence. At a = 1 this is the Kullback-Leibler
    divergence.
    """
    m1, v1, m2, v2 = np.broadcast_arrays(
        *(np.asarray(a, np.float64) for a in (mean, variance, other_mean, other_variance))
    )
    if not (order > 0 and np.all(v1 > 0) and np.all(v2 > 0)):
        raise Refusal(f"order={order}: the order and all variances must be > 0")
    squares = (m1 - m2) ** 2
    if order == 1:
        ratio = v1 / v2
        return np.asarray((0.5 * (ratio - 1 - np.log(ratio) + squares / v2)).sum(-1))
    mixed = order * v2 + (1 - order) * v1
    exists = mixed > 0
    safe = np.where(exists, mixed, 1.0)
    # log(v* / (v1^(1-a) v2^a)) from ratios to v2, so that nearly equal variances lose no digits
    change = (v1 - v2) / v2
    logs = np.log1p(np.where(exists, (1 - order) * change, 0.0)) - (1 - order) * np.log1p(change)
    terms = order * squares / (2 * safe) + logs / (2 * (1 - order))
    return np.asarray(np.where(exists.all(-1), terms.sum(-1), np.inf))


def log_sampled_moment(order: int, log_moments: Array, rate: float) -> Array:
    """log sum over k of Bin(k; order + 1, q) e^((k - 1) D_k): sampling, for any base mechanism.

    log_moments[..., k] is (k - 1) D_k for k = 0, ..., order + 1 (zero for k = 0 and 1); an infinite one makes the
    result infinite.
    """
    from scipy.special import gammaln, logsumexp

    k = np.arange(order + 2, dtype=np.float64)
    if log_moments.shape[-1] != len(k):
        raise Refusal(f"log_moments of shape {log_moments.shape}: need one for each k = 0, ..., {order + 1}")
    if rate == 1.0:
        return np.asarray(log_moments[..., -1])
    log_binomial = gammaln(order + 2) - gammaln(k + 1) - gammaln(order + 2 - k) + k * math.log(rate)
    log_binomial += (order + 1 - k) * math.log1p(-rate)
    return np.asarray(logsumexp(log_moments + log_binomial, axis=-1))


def binary_mean_bound(ones: int, zeros: int, failure: float) -> float:
    """Upper bound on the probability of a one, by the flat-prior posterior Beta(ones + 1, zeros + 1).

    Section IV-C of the paper. It is a credible bound: over repeated samples it fails somewhat more often than
    `failure` for some probabilities. The bound that never does (Clopper and Pearson 1934) has `zeros` in place
    of `zeros + 1`; see `exact_binary_mean_bound`.
    """
    return _beta_bound(ones, zeros, failure, 1)


def exact_binary_mean_bound(ones: int, zeros: int, failure: float) -> float:
    """Upper confidence bound on the probability of a one that holds with probability 1 - failure, whatever it is."""
    return 1.0 if zeros == 0 else _beta_bound(ones, zeros, failure, 0)


def _beta_bound(ones: int, zeros: int, failure: float, flat: int) -> float:
    from scipy.stats import beta

    if ones < 0 or zeros < 0 or not 0 <= failure <= 1:
        raise Refusal(f"ones={ones}, zeros={zeros}, failure={failure}: need counts >= 0 and failure in [0, 1]")
    return float(beta.isf(failure, ones + 1, zeros + flat))


def smallest_honest_moment(samples: int, failure: float, log_largest: float) -> float:
    """Logarithm of the least value that a valid upper bound on E e^X can take, for X <= log_largest.

    An atom of mass p = 1 - failure^(1 / samples) at the largest value is missed by all samples with probability
    `failure`. So whatever the samples were, a bound that holds with probability 1 - failure for every distribution
    is at least p e^(log_largest).
    """
    if samples < 1 or not 0 < failure < 1:
        raise Refusal(f"samples={samples}, failure={failure}: need at least one sample and failure in (0, 1)")
    return math.log(-math.expm1(math.log(failure) / samples)) + log_largest


class ObservedSteps:
    """Distances of many steps in one array, with a table of their moments for each order."""

    def __init__(self, observed: Sequence[Distances]) -> None:
        if not observed:
            raise Refusal("observed=[]: no step was watched")
        if any(len(step.values) == 0 for step in observed):
            raise Refusal("observed: a step without any record; count it at distance 1, the clipping bound")
        self.counts = np.array([step.event.count for step in observed], dtype=np.float64)
        self.sizes = np.array([len(step.values) for step in observed])
        self.starts = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        self.exact = all(step.weights is not None for step in observed)
        weights = [
            np.full(len(step.values), 1 / len(step.values)) if step.weights is None else step.weights
            for step in observed
        ]
        self.weights = np.concatenate(weights)
        self._tabulate(observed)

    @property
    def total(self) -> int:
        """The number of steps."""
        return int(self.counts.sum())

    @property
    def sampled(self) -> bool:
        return any(rate < 1 for _, rate, _ in self.kinds)

    def _tabulate(self, observed: Sequence[Distances]) -> None:
        """self.kinds: (z, q, its distinct distances); self.index: where each distance stands in the joint table."""
        keys = [(step.event.noise_multiplier, step.event.rate) for step in observed]
        number_of = {key: number for number, key in enumerate(sorted(set(keys)))}
        self.kinds: list[tuple[float, float, Array]] = []
        self.index = np.empty(int(self.sizes.sum()), dtype=np.int64)
        kind_of_value = np.repeat([number_of[key] for key in keys], self.sizes)
        values = np.concatenate([step.values for step in observed])
        before = 0
        for (noise, rate), number in number_of.items():
            chosen = kind_of_value == number
            table, index = _levels(values[chosen])
            self.kinds.append((noise, rate, table))
            self.index[chosen] = index + before
            before += len(table)
        self.kind_of_step = kind_of_value[self.starts]

    def log_moments(self, order: float) -> Array:
        """log E e^(order L) of every distance of every step."""
        tables = [log_moment(order, table, noise, rate) for noise, rate, table in self.kinds]
        return np.asarray(np.concatenate(tables)[self.index])

    def log_largest(self, order: float) -> Array:
        """The same at the clipping bound, for each step."""
        caps = [float(log_moment(order, max(1.0, table[-1]), noise, rate)) for noise, rate, table in self.kinds]
        return np.asarray(np.array(caps)[self.kind_of_step])


def _levels(values: Array) -> tuple[Array, NDArray[np.intp]]:
    """The distinct values, or when there are too many, levels that every value is rounded up to."""
    table, index = np.unique(values, return_inverse=True)
    if len(table) <= LEVELS:
        return table, index.astype(np.intp)
    table = np.linspace(0, values.max(), LEVELS)
    return table, np.minimum(np.searchsorted(table, values, side="left"), LEVELS - 1)


def log_mean_bounds(
    steps: ObservedSteps, log_values: Array, rule: MeanRule, failure: float, log_largest: Array
) -> Array:
    """For each step, the logarithm of an upper bound on the mean of e^log_values over records.

    student-t   mean + t S / sqrt(m - 1), the paper's estimator: its confidence rests on normal values, which these
                are not
    bernstein   mean + sqrt(2 V ln(2 / failure) / m) + 7 ln(2 / failure) largest / (3 (m - 1)) (Maurer and Pontil
                2009), valid for all values between 0 and the largest
    exact       the mean itself, for known distributions
    """
    top = np.maximum.reduceat(log_values, steps.starts)
    scaled = np.exp(log_values - np.repeat(top, steps.sizes))
    means = np.add.reduceat(steps.weights * scaled, steps.starts)
    if rule == "exact":
        return np.asarray(np.log(means) + top)
    _check_samples(steps, rule)
    centred = (scaled - np.repeat(means, steps.sizes)) ** 2
    variances = np.add.reduceat(steps.weights * centred, steps.starts)
    m = steps.sizes.astype(np.float64)
    if rule == "student-t":
        from scipy.stats import t

        sizes, places = np.unique(m, return_inverse=True)
        quantiles = t.isf(failure, sizes - 1)[places]
        return np.asarray(np.log(means + quantiles * np.sqrt(variances / (m - 1))) + top)
    doubt = math.log(2 / failure)
    spread = np.log(means + np.sqrt(2 * doubt * variances / (m - 1))) + top  # V = S^2 m / (m - 1)
    return np.asarray(np.logaddexp(spread, np.log(7 * doubt / (3 * (m - 1))) + log_largest))


def _check_samples(steps: ObservedSteps, rule: MeanRule) -> None:
    if steps.exact:
        raise Refusal(f"mean={rule!r}: the distribution is known; use mean='exact'")
    if steps.sizes.min() < 3:
        raise Refusal(f"observed: a step with {steps.sizes.min()} records; {rule} needs at least 3")
