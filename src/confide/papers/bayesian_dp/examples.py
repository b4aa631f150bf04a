"""Two examples small enough to be computed exactly, and one that shows what pairs of records leave out."""

from __future__ import annotations

import math

import numpy as np

from confide.papers.base import Context, PaperOutcome, PaperTable
from confide.papers.bayesian_dp.rules import DELTA, RULES, epsilon
from confide.privacy import bayesian
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import gaussian_delta
from confide.privacy.bayesian import Distances
from confide.privacy.events import GaussianEvent

OUTLIER = Distances(GaussianEvent(20.0, count=1000), np.array([0.0, 1.0]), np.array([0.99, 0.01]))
TWO_KINDS = Distances(GaussianEvent(1.3, "poisson", 256 / 60_000, 3516), np.array([0.3, 1.0]), np.array([0.95, 0.05]))
FRESH = 10_000


def true_failure(claimed: float) -> float:
    """P(loss > claimed) in the counter-example: an outlier's loss is N(mu^2 / 2, mu^2), the others' is 0."""
    from scipy.special import ndtr

    mu = math.sqrt(1000) / 20
    return float(0.01 * ndtr((mu**2 / 2 - claimed) / mu))


def exact_epsilon() -> float:
    """The smallest epsilon with P(loss > epsilon) <= delta there."""
    from scipy.special import ndtri

    mu = math.sqrt(1000) / 20
    return float(mu**2 / 2 - mu * ndtri(DELTA / 0.01))


def replaced_profile(epsilon: float, first: float, second: float, noise: float, rate: float) -> float:
    """delta(epsilon) when a record with answer `first` is replaced by one with `second`, on one axis, by quadrature.

    The release is (1 - q) N(0, z^2) + q N(first, z^2) against the same with `second`.
    """
    reach = 12 * noise
    w = np.linspace(min(0.0, first, second) - reach, max(0.0, first, second) + reach, 400_001)

    def density(centre: float) -> np.ndarray:
        return np.asarray(np.exp(-(((w - centre) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi)))

    apart = rate * density(first) - math.exp(epsilon) * rate * density(second)
    apart += (1 - math.exp(epsilon)) * (1 - rate) * density(0.0)
    return float(np.trapezoid(np.maximum(apart, 0.0), w))


def added_profile(epsilon: float, distance: float, noise: float, rate: float) -> float:
    """What the paper's formula assumes for the same pair: a record at that distance is added.

    H_a((1 - q) N(0) + q N(d) || N(0)) = q H_b(N(d) || N(0)) with b = 1 + (a - 1) / q.
    """
    higher = math.log1p(math.expm1(epsilon) / rate)
    return float(rate * gaussian_delta(distance / noise, np.array([higher]))[0])


def run(context: Context) -> PaperOutcome:
    """Both tables; nothing is drawn at random."""
    return PaperOutcome((_rules_table(), _pairs_table()))


def _rules_table() -> PaperTable:
    rows = []
    for name, case, paper in (
        ("counter-example: distance C for 1 % of records, else 0; noise 20, 1000 full batches", OUTLIER, "-"),
        ("worked example: 0.3 C for 95 %, C for 5 %; noise 1.3, 3516 batches of 256 in 60 000", TWO_KINDS, "-"),
    ):
        assert case.weights is not None
        repeats = np.repeat(case.values, np.round(FRESH * case.weights).astype(int))
        sample = bayesian.constant_sequences(repeats, [case.event])
        dp = PLD().epsilon([case.event], DELTA).epsilon
        rows.append(
            (
                name,
                paper,
                epsilon(bayesian.product([case], DELTA, mean="exact")),
                epsilon(bayesian.hoelder([case], DELTA, mean="exact")),
                epsilon(bayesian.averaged(sample, DELTA, failure=1e-6)),
                dp,
            )
        )
    claimed = epsilon(bayesian.product([OUTLIER], DELTA, mean="exact"))
    notes = (
        f"Counter-example: the loss exceeds the {claimed:.4f} that the product rule claims with probability "
        f"{true_failure(claimed):.3g}, {true_failure(claimed) / DELTA:.0f} times delta = {DELTA:g}; the exact epsilon "
        f"of the paper's definition is {exact_epsilon():.3f}. Here the distribution is known; sound is from {FRESH} "
        "fresh records, 1e-6 of delta for a misleading sample.",
    )
    return PaperTable("Two examples with known distances", ("example", *RULES), tuple(rows), notes)


def _pairs_table() -> PaperTable:
    """Answers at 10 and 11 noise deviations: the paper's MNIST noise is a tenth of the clipping bound."""
    rows = []
    for first, second, noise in ((0.9, 1.0, 0.1), (0.9, 1.0, 1.0), (-0.05, 0.05, 0.1)):
        true = replaced_profile(1.0, first, second, noise, 0.017)
        assumed = added_profile(1.0, abs(first - second), noise, 0.017)
        rows.append((f"{first:g} C and {second:g} C", noise, assumed, true))
    return PaperTable(
        "Pairs of records: delta at epsilon 1 of one step, rate 0.017",
        ("answers of the two records", "noise / C", "assumed from their distance", "true, one replaced by the other"),
        tuple(rows),
        (
            "The paper prices a step by distances between pairs of records, with the formula for adding a record to a "
            "sampled batch. Replacing a record by a near one is not that: where both answers stand out of the noise, "
            "the batch shows whether it holds one of them, and sampling hides nothing. Sampled batches need the norms "
            "of answers, which is what the other tables use.",
        ),
    )
