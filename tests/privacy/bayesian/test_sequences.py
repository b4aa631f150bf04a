"""Profiles of distance sequences: against the PLD accountant, always from above; and covering a run from some looks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from confide.errors import UnsupportedEvents
from confide.privacy.accountants.pld import PLD
from confide.privacy.bayesian import Sequences, constant_sequences, covering_counts, level_kinds, profiles, sequences_of
from confide.privacy.events import GaussianEvent

MNIST = GaussianEvent(1.3, "poisson", 256 / 60_000, 3516)


def oracle(sequences: Sequences, row: int, epsilons: np.ndarray) -> np.ndarray:
    """The same by the PLD accountant: one event for each kind of step, with its own noise multiplier."""
    events = [
        GaussianEvent(event.noise_multiplier / distance, event.sampling, event.rate, int(count))
        for (event, distance), count in zip(sequences.kinds, sequences.counts[row], strict=True)
        if count and distance
    ]
    return np.asarray(PLD().deltas(events, epsilons.tolist()))


def check(sequences: Sequences, epsilons: list[float], delta: float, loose: float = 0.01) -> None:
    """Close to the oracle where delta is near the one asked for, and never more than a rounding below it."""
    at = np.array(epsilons)
    found = profiles(sequences, at, delta)
    for row in range(len(found)):
        expected = oracle(sequences, row, at)
        # the oracle is itself an upper bound, to 1e-9 and some 1e-4 of its size
        assert np.all(found[row] >= expected * (1 - 2e-3) - 2e-9)
        assert found[row] == pytest.approx(expected, rel=loose, abs=max(1e-3 * delta, 2e-9))


def test_constant_distances() -> None:
    check(constant_sequences(np.array([0.3, 0.7, 1.0]), [MNIST]), [0.0, 0.3, 0.6, 0.86], 1e-5)


def test_mixed_distances() -> None:
    """Catches powers of the wrong column, lost phases, and a window that leaves out what is below or above."""
    distances = np.random.default_rng(0).random((4, 3516)) ** np.array([[0.5], [1.0], [2.0], [6.0]])
    check(sequences_of(distances, MNIST, levels=8), [0.0, 0.1, 0.3, 0.6], 1e-5)


@pytest.mark.parametrize(
    ("event", "epsilons", "delta"),
    [
        (GaussianEvent(1.0, "poisson", 1e-3, 100), [0.0, 0.01, 0.05], 1e-5),
        (GaussianEvent(0.8, "poisson", 0.02, 3), [0.0, 0.5, 1.5], 1e-4),
        (GaussianEvent(0.5, "poisson", 0.02, 500), [1.0, 5.0, 12.0], 1e-6),
        (GaussianEvent(2.0, "poisson", 0.05, 2000), [1.0, 3.0, 6.0], 1e-10),
        (GaussianEvent(0.1, "poisson", 1024 / 60_000, 100), [50.0, 200.0], 1e-5),
    ],
    ids=["tiny", "few steps", "large", "tilted", "huge"],
)
def test_other_regimes(event: GaussianEvent, epsilons: list[float], delta: float) -> None:
    check(constant_sequences(np.array([0.5, 1.0]), [event]), epsilons, delta, loose=0.03)


@pytest.mark.parametrize("delta", [1e-8, 1e-12])
def test_small_deltas_keep_their_digits(delta: float) -> None:
    """At 1e-12 an untilted transform would return its own rounding error, a hundred times as much."""
    event = GaussianEvent(2.0, "poisson", 0.05, 2000)
    at = PLD().epsilon([event], delta).epsilon
    found = profiles(constant_sequences(np.array([0.2, 1.0]), [event]), np.array([at]), delta)
    assert 0.998 * delta < found[1, 0] < 1.01 * delta
    assert found[0, 0] < 1e-3 * delta


def test_several_kinds_of_events() -> None:
    """Two blocks with different noise, one of them without sampling."""
    events = [GaussianEvent(1.3, "poisson", 0.01, 300), GaussianEvent(20.0, count=10)]
    check(constant_sequences(np.array([0.4, 1.0]), events), [0.1, 0.5, 1.0], 1e-4, loose=0.03)


def test_without_sampling_it_is_one_gaussian() -> None:
    """Exactly: mu^2 is the sum of squared distances over the squared noise."""
    event = GaussianEvent(20.0, count=1000)
    sequences = Sequences(level_kinds(event, 2), np.array([[500, 0, 500], [1000, 0, 0]]))
    expected = PLD().delta([GaussianEvent(20.0, count=500)], 2.0)
    assert profiles(sequences, np.array([2.0]), 1e-5)[:, 0] == pytest.approx([expected, 0.0], rel=1e-12)


def test_larger_distances_cost_more() -> None:
    """Monotone in every count moved upwards, which is why distances may be rounded up."""
    random = np.random.default_rng(1)
    low = random.random((6, 200))
    high = np.minimum(1.0, low + 0.1 * random.random((6, 200)))
    event = GaussianEvent(1.0, "poisson", 0.02, 200)
    at = np.linspace(0.0, 1.5, 7)
    below, above = (profiles(sequences_of(d, event, levels=16), at, 1e-5) for d in (low, high))
    assert np.all(below <= above * (1 + 1e-6))
    # and order does not matter
    shuffled = profiles(sequences_of(random.permuted(low, axis=1), event, levels=16), at, 1e-5)
    np.testing.assert_allclose(shuffled, below, rtol=1e-12)


def test_equal_rows_are_computed_once() -> None:
    sequences = constant_sequences(np.array([0.3, 1.0, 0.3, 0.3]), [MNIST]).grouped()
    assert len(sequences.counts) == 2
    assert sequences.repeats is not None
    assert sorted(sequences.repeats.tolist()) == [1, 3]
    assert sequences.records == 4
    assert sequences.events == (MNIST,)


def test_ten_thousand_records_are_feasible() -> None:
    """m = 10^4 records, each with its own mix of 64 levels over 3516 steps: a matter of seconds."""
    random = np.random.default_rng(2)
    shares = random.dirichlet(np.full(64, 0.3), 10_000)
    counts = random.multinomial(3516, shares)
    counts = np.concatenate([np.zeros((10_000, 1), int), counts], axis=1)
    found = profiles(Sequences(level_kinds(MNIST, 64), counts), np.linspace(0, 0.86, 129), 1e-5)
    assert found.shape == (10_000, 129)
    assert np.all(np.diff(found, axis=1) <= 1e-9)
    assert np.all((found >= 0) & (found <= 1))


class TestCovering:
    """From looks at a random tenth of the steps to counts that cover all of them."""

    steps, rate, missed = 800, 0.1, 0.05

    def seen(self, random: np.random.Generator, distances: np.ndarray, levels: int) -> np.ndarray:
        looked = random.random(distances.shape) < self.rate
        index = np.ceil(distances * levels).astype(int)
        return np.stack(
            [[np.sum(looked[i] & (index[i] == level)) for level in range(levels + 1)] for i in range(len(index))]
        )

    def uncovered(self, counts: np.ndarray, truth: np.ndarray) -> float:
        """Share of records with fewer steps above some level than there were."""
        above, true_above = (np.cumsum(c[:, ::-1], axis=1) for c in (counts, truth))
        return float(np.mean(np.any(above < true_above, axis=1)))

    def test_few_records_are_missed(self) -> None:
        random = np.random.default_rng(3)
        levels = 8
        distances = random.random((1500, self.steps)) ** 3
        truth = sequences_of(distances, GaussianEvent(1.0, "poisson", 0.1, self.steps), levels).counts
        seen = self.seen(random, distances, levels)
        counts = covering_counts(seen, self.steps, self.rate, self.missed)
        assert np.all(counts.sum(1) == self.steps)
        assert np.all(counts >= 0)
        assert self.uncovered(counts, truth) <= self.missed
        # scaling up what was seen, without room for chance, misses nearly everybody
        naive = np.round(seen / self.rate).astype(int)
        assert self.uncovered(naive, truth) > 0.5

    def test_never_seen_is_not_never(self) -> None:
        """No look above zero: up to log(failure) / log(1 - rate) steps at the bound stay possible."""
        seen = np.array([[80, 0, 0, 0]])
        counts = covering_counts(seen, self.steps, self.rate, 0.03)
        most = int(counts[0, -1])
        assert most == int(np.log(0.01) / np.log(1 - self.rate))
        assert binom.pmf(0, most, self.rate) >= 0.01 > binom.pmf(0, most + 1, self.rate)
        assert counts[0].tolist() == [self.steps - most, 0, 0, most]

    def test_looking_always_is_exact(self) -> None:
        seen = np.array([[3, 4, 5]])
        assert covering_counts(seen, 12, 1.0, 1e-3) is seen


@pytest.mark.parametrize(
    ("kinds", "counts", "message"),
    [
        (level_kinds(MNIST, 2), [[1, 2]], "rows of 3 counts"),
        (level_kinds(MNIST, 2), [[1, 1, -1]], "rows of 3 counts"),
        (level_kinds(MNIST, 1), [[1, 1], [1, 2]], "same number of steps"),
        (level_kinds(MNIST, 1), [[0, 0]], "at least one"),
        (((MNIST, 1.0),), [[1]], "count=3516"),
        (((GaussianEvent(1.0), 1.5),), [[1]], r"must lie in \[0, 1\]"),
    ],
)
def test_sequences_are_checked(
    kinds: tuple[tuple[GaussianEvent, float], ...], counts: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sequences(kinds, np.array(counts))


def test_shuffled_passes_are_refused() -> None:
    with pytest.raises(UnsupportedEvents, match="poisson or full"):
        constant_sequences(np.array([1.0]), [GaussianEvent(1.0, "shuffle", 0.1, 3)])
