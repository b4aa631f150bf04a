"""The sound estimator: delta averaged over records, bounded from a sample of fresh ones.

Bayesian differential privacy is stated here in a form that is closed under post-processing. For a record x drawn from
mu, P_x the law of everything released with x and Q without it,

    H(mu x P || mu x Q) = E_x delta_x(epsilon) <= delta,      and the same with P and Q exchanged,

with delta_x(epsilon) the profile of x (hockey-stick divergence) and E over mu. Of m hold-out records, drawn like the
others and used for nothing else, the values delta_x(epsilon) lie in [0, delta_max(epsilon)], the profile of a record at
the clipping bound. The empirical Bernstein bound (Maurer and Pontil 2009) then gives, with probability 1 - g,

    E delta_x <= mean + sqrt(2 V ln(2 / g) / m) + 7 delta_max ln(2 / g) / (3 (m - 1)),

and g itself is added to delta. Epsilon is chosen by looking at the same sample; that is harmless because it is the end
of all points of one fixed grid at which the bound suffices: were it too small, the bound would have failed at the one
grid point just below the true epsilon, which does not depend on the sample.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from confide.errors import Refusal
from confide.privacy.accountants.bound import DATA_DEPENDENT, Bound
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import Array
from confide.privacy.bayesian.result import Attack, BayesianEstimate, Charge, Confidential
from confide.privacy.bayesian.sequences import Sequences, profiles
from confide.privacy.events import PureEvent
from confide.privacy.interpretation import attacker, naive_accuracy

# Points of the grid of epsilons, between which profiles are joined linearly in e^epsilon (an upper bound, since they
# are convex in it), and points on each such line at which the bound is tried.
_CELLS, _FINE = 128, 64
# What a paid release looks at: so many epsilons, and values rounded up to so many units of delta_max.
_PAID_POINTS, _UNITS = 8, 1 << 20
ASSUMPTIONS = (
    "not a DP guarantee; holds on average over records drawn like the hold-out ones, and for nobody in particular; "
    "assumes that the hold-out records are independent draws used for nothing else, and that a record's distances "
    "along the run do not depend on whether it took part"
)


@dataclass(frozen=True, eq=False)
class Curve:
    """Profiles of all records on a fixed grid of epsilons, with the bound on their mean."""

    sequences: Sequences
    delta: float
    dp: Bound

    @cached_property
    def epsilons(self) -> Array:
        assert self.dp.epsilon is not None
        return np.linspace(0.0, self.dp.epsilon, _CELLS + 1)

    @cached_property
    def table(self) -> tuple[Array, Array]:
        """(rows, epsilons) of delta_x, and delta_max."""
        return self._profiles(self.epsilons, self.delta)

    def _profiles(self, epsilons: Array, delta: float) -> tuple[Array, Array]:
        events = self.sequences.events
        kinds = self.sequences.kinds + tuple((replace(event, count=1), 1.0) for event in events)
        rows = np.pad(self.sequences.counts, ((0, 1), (0, len(events))))
        rows[-1] = 0
        rows[-1, -len(events) :] = [event.count for event in events]
        values = profiles(Sequences(kinds, rows), epsilons, delta)
        return np.minimum(values[:-1], values[-1]), values[-1]

    def bound(self, values: Array, largest: Array, failure: float) -> Array:
        """Upper bound on the mean of delta_x at each column."""
        return self._bernstein(*self._moments(values, values), largest, failure)

    def _moments(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Means of a, and covariances of a and b, column by column."""
        share = self._shares[:, None]
        means, others = (share * a).sum(0), (share * b).sum(0)
        return means, (share * (a - means) * (b - others)).sum(0)

    @cached_property
    def _shares(self) -> Array:
        if self.sequences.weights is not None:
            return np.asarray(self.sequences.weights, dtype=np.float64)
        assert self.sequences.repeats is not None
        return np.asarray(self.sequences.repeats / self.sequences.records)

    def _bernstein(self, means: Array, variances: Array, largest: Array, failure: float) -> Array:
        missed = self.sequences.missed * largest
        if self.sequences.weights is not None:
            return np.minimum(means + missed, largest)
        m, doubt = self.sequences.records, math.log(2 / failure)
        if m < 2:
            return largest
        spread = np.sqrt(2 * doubt * np.maximum(variances, 0.0) / (m - 1))  # V = variance m / (m - 1)
        return np.minimum(means + spread + (7 * doubt / (3 * (m - 1))) * largest + missed, largest)

    def epsilon(self, failure: float) -> float:
        """The end of the points of the fine grid, from above, at which bound + failure <= delta."""
        assert self.dp.epsilon is not None
        values, largest = self.table
        means, variances = self._moments(values, values)
        covariances = self._moments(values[:, :-1], values[:, 1:])[1]
        fine = np.linspace(0.0, 1.0, _FINE, endpoint=False)
        ends = np.expm1(np.diff(self.epsilons))[:, None]
        t = np.expm1(fine * np.diff(self.epsilons)[:, None]) / ends  # linear in e^epsilon
        mean = (1 - t) * means[:-1, None] + t * means[1:, None]
        variance = (1 - t) ** 2 * variances[:-1, None] + t**2 * variances[1:, None]
        variance += 2 * t * (1 - t) * covariances[:, None]
        top = (1 - t) * largest[:-1, None] + t * largest[1:, None]
        enough = (self._bernstein(mean, variance, top, failure) + self._paid(failure) <= self.delta).ravel()
        grid = (self.epsilons[:-1, None] + fine * np.diff(self.epsilons)[:, None]).ravel()
        if not enough[-1]:
            return self.dp.epsilon
        lacking = np.flatnonzero(~enough)
        return float(grid[lacking[-1] + 1]) if len(lacking) else 0.0

    def _paid(self, failure: float) -> float:
        return failure if self.sequences.weights is None else 0.0

    def accuracy(self, failure: float) -> float:
        """Bound on the mean, over records, of the best attack's accuracy: (1 + E delta_x(0)) / 2."""
        values, largest = self._profiles(np.zeros(1), 1e-2)
        advantage = float(self.bound(values, largest, failure)[0]) + self._paid(failure)
        return (1 + min(advantage, float(largest[0]))) / 2


def averaged(sequences: Sequences, delta: float, *, failure: float = 1e-6) -> Confidential:
    """The smallest epsilon with E_x delta_x(epsilon) <= delta, for records drawn like the hold-out ones.

    sequences  what hold-out records met along the run; with `weights` the distribution is taken as known, and the
               result is the exact average rather than a bound from a sample
    failure    g: probability that the sample misleads, counted in delta
    """
    if not 0 < delta < 1:
        raise Refusal(f"delta={delta}: must be in (0, 1)")
    if not 0 < failure < delta:
        raise Refusal(f"failure={failure}: must be in (0, delta={delta}), since it is counted in delta")
    dp = PLD().epsilon(sequences.events, delta)
    assert dp.epsilon is not None
    curve = Curve(sequences.grouped(), delta, dp)
    epsilon = curve.epsilon(failure) if 0 < dp.epsilon < math.inf else dp.epsilon
    estimate = _estimate(curve, epsilon, _note(sequences, failure), curve.accuracy(failure))
    return Confidential(estimate, None if sequences.weights is not None else _Paying(curve))


def _note(sequences: Sequences, failure: float) -> str:
    if sequences.weights is not None:
        return f"{ASSUMPTIONS}; the distribution of distances is taken as known"
    looks = f", distances covered from random looks but for a share of {sequences.missed:g}" if sequences.missed else ""
    return f"{ASSUMPTIONS}; {sequences.records} records, {failure:g} of delta for a misleading sample{looks}"


def _estimate(
    curve: Curve, epsilon: float, note: str, accuracy: float | None, disclosure: str = ""
) -> BayesianEstimate:
    attack = dp_attack(curve.sequences, curve.dp, curve.delta)
    return BayesianEstimate(
        "averaged",
        Bound(epsilon, DATA_DEPENDENT, note),
        curve.dp,
        curve.delta,
        {"dp": attack, "bayesian": Attack(naive_accuracy(epsilon), accuracy)},
        disclosure or "trusted side only",
    )


def dp_attack(sequences: Sequences, dp: Bound, delta: float) -> Attack:
    assert dp.epsilon is not None
    best = attacker(sequences.events, dp.epsilon, delta=delta)
    return Attack(naive_accuracy(dp.epsilon), best.accuracy)


@dataclass(frozen=True, eq=False)
class _Paying:
    """Releases the averaged estimate under pure DP for the hold-out records.

    At a few epsilons fixed by the DP number alone, the values delta_x / delta_max are rounded up to whole units and
    summed over records; discrete Laplace noise covers that one record changes all the sums by at most their range.
    The mean follows by the Chernoff-Hoeffding bound for values in [0, 1]. The number of records is used as it is, so it
    is public, and the release is private when a record's values are replaced, not when it is added or removed.
    """

    curve: Curve

    def __call__(self, epsilon: float, failure: float, charge: Charge) -> BayesianEstimate:
        curve = self.curve
        if not 0 < failure < curve.delta:
            raise Refusal(f"failure={failure}: must be in (0, delta={curve.delta}), since it is counted in delta")
        charge(PureEvent(epsilon, "replace-one"))
        columns = np.linspace(0, _CELLS, _PAID_POINTS + 2).astype(int)[1:-1]
        values, largest = (array[..., columns] for array in curve.table)
        repeats = curve.sequences.repeats
        assert repeats is not None
        sums = repeats @ np.ceil(values / np.maximum(largest, 1e-300) * _UNITS).astype(np.int64)
        share = failure / (2 * _PAID_POINTS)
        scale = Fraction(_UNITS * _PAID_POINTS) / Fraction(epsilon)
        noise = np.array([float(discrete_laplace(scale)) for _ in columns]) + float(scale) * math.log(1 / share)
        means = np.clip((sums + noise) / (_UNITS * curve.sequences.records), 0.0, 1.0)
        bounds = np.array([chernoff_mean_bound(mean, curve.sequences.records, share) for mean in means])
        deltas = np.minimum(bounds + curve.sequences.missed, 1.0) * largest + failure
        lacking = np.flatnonzero(deltas > curve.delta)
        assert curve.dp.epsilon is not None
        after = lacking[-1] + 1 if len(lacking) else 0
        found = float(curve.epsilons[columns[after]]) if after < len(columns) else curve.dp.epsilon
        note = _note(curve.sequences, failure)
        return _estimate(
            curve, found, note, None, f"paid for with noise: pure epsilon {epsilon:g} for hold-out records"
        )


def discrete_laplace(scale: Fraction) -> int:
    """An integer with P(k) proportional to e^(-|k| / scale), exactly: whole numbers of the operating system's alone.

    (Canonne, Kamath and Steinke 2020, algorithm 2.) A logarithm of a floating-point number would leave out integers
    far from zero, and what one data set can show and another cannot is no part of a pure guarantee.
    """
    above, below = scale.numerator, scale.denominator
    while True:
        part = secrets.randbelow(above)
        if not _happens(part, above):
            continue
        wholes = 0
        while _happens(1, 1):
            wholes += 1
        size, negative = (part + above * wholes) // below, secrets.randbelow(2) == 1
        if size or not negative:
            return -size if negative else size


def _happens(above: int, below: int) -> bool:
    """True with probability e^(-above / below), for a quotient of at most 1."""
    tries = 1
    while secrets.randbelow(below * tries) < above:
        tries += 1
    return tries % 2 == 1


def chernoff_mean_bound(mean: float, records: int, failure: float) -> float:
    """The largest mu with records * kl(mean, mu) <= log(1 / failure): bounds the mean of values in [0, 1]."""
    goal = math.log(1 / failure) / records
    low, high = mean, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _kl(mean, middle) < goal else (low, middle)
    return high


def _kl(p: float, q: float) -> float:
    first = p * math.log(p / q) if p > 0 else 0.0
    second = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 and q < 1 else (0.0 if p == 1 else math.inf)
    return first + second
