"""The statistics of the one-run audit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.auditing.lower_bound import (
    chance_of,
    correct_guesses,
    epsilon_lower_bound,
    expected_accuracy,
    guesses_for,
)
from confide.privacy.accountants.profiles import gaussian_epsilon

GOLDEN = {
    entry["id"]: entry
    for entry in json.loads((Path(__file__).parents[1] / "reference" / "golden.json").read_text())["entries"]
}


@pytest.mark.parametrize(
    ("name", "canaries", "guesses", "correct", "delta"),
    [
        ("audit.m100.r100.v95.d0", 100, 100, 95, 0.0),
        ("audit.m1000.r50.v50.d1e-5", 1000, 50, 50, 1e-5),
        ("audit.m1000.r100.v90.d1e-5", 1000, 100, 90, 1e-5),
    ],
)
def test_golden_value(name: str, canaries: int, guesses: int, correct: int, delta: float) -> None:
    found = epsilon_lower_bound(correct, guesses, canaries, delta)
    assert found == pytest.approx(GOLDEN[name]["value"], rel=GOLDEN[name]["rtol"])


def by_hand(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The formula, term by term."""
    right = 1 / (1 + math.exp(-epsilon))

    def f(v: int) -> float:
        return sum(math.comb(guesses, k) * right**k * (1 - right) ** (guesses - k) for k in range(v, guesses + 1))

    gain = max((f(correct - i) - f(correct)) / i for i in range(1, correct + 1))
    return min(1.0, f(correct) + 2 * canaries * delta * gain)


@settings(max_examples=60, deadline=None)
@given(
    guesses=st.integers(1, 40),
    share=st.floats(0.1, 1),
    epsilon=st.floats(0, 8),
    delta=st.floats(0, 1e-2),
    more=st.integers(0, 60),
)
def test_the_chance_is_the_formula(guesses: int, share: float, epsilon: float, delta: float, more: int) -> None:
    correct, canaries = max(1, round(share * guesses)), guesses + more
    expected = by_hand(correct, guesses, canaries, epsilon, delta)
    assert chance_of(correct, guesses, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_bound_is_the_largest_refuted_epsilon() -> None:
    found = epsilon_lower_bound(90, 100, 1000, 1e-5)
    assert chance_of(90, 100, 1000, found, 1e-5) <= 0.05
    assert chance_of(90, 100, 1000, found + 1e-6, 1e-5) > 0.05


def test_chance_level_refutes_nothing_and_more_evidence_refutes_more() -> None:
    assert epsilon_lower_bound(50, 100, 100, 0.0) == 0.0
    bounds = [epsilon_lower_bound(correct, 100, 1000, 1e-5) for correct in (60, 70, 80, 90, 100)]
    assert bounds == sorted(bounds)
    assert epsilon_lower_bound(90, 100, 1000, 1e-3) < epsilon_lower_bound(90, 100, 1000, 1e-5)
    assert epsilon_lower_bound(90, 100, 1000, 1e-5, confidence=0.99) < epsilon_lower_bound(90, 100, 1000, 1e-5)


def test_it_holds_with_its_confidence() -> None:
    """Randomised response is (epsilon, 0)-private exactly: the bound may exceed epsilon in 5 % of runs, not more."""
    epsilon, guesses, runs = 1.0, 200, 2000
    correct = np.random.default_rng(0).binomial(guesses, 1 / (1 + math.exp(-epsilon)), runs)
    bounds = {int(v): epsilon_lower_bound(int(v), guesses, guesses, 0.0) for v in set(correct)}
    missed = np.mean([bounds[int(v)] > epsilon for v in correct])
    assert missed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert missed > 0.01, "a bound that never misses is not tight"


@pytest.mark.parametrize(("mu", "floor"), [(0.5, 0.6), (1.0, 1.6)])
def test_it_has_power_on_a_gaussian(mu: float, floor: float) -> None:
    """Scores of a mu-GDP mechanism: above the floor, below the truth. A bound that is always 0 would pass elsewhere."""
    rng, canaries, delta = np.random.default_rng(1), 10_000, 1e-5
    included = rng.random(canaries) < 0.5
    guesses = guesses_for(canaries, mu, delta)
    correct = correct_guesses(rng.normal(size=canaries) + mu * included, included, guesses)
    assert floor < epsilon_lower_bound(correct, guesses, canaries, delta) < gaussian_epsilon(mu, delta)


def test_guesses() -> None:
    included = np.array([True, False, True, False, True])
    scores = np.array([3.0, -1.0, 0.5, 2.0, math.nan])
    assert correct_guesses(scores, included, 2) == 2
    assert correct_guesses(scores, included, 4) == 2  # 3.0 and -1.0 right, 2.0 and the missing score wrong
    for wrong in (0, 3, 6):
        with pytest.raises(ValueError, match="even number"):
            correct_guesses(scores, included, wrong)


def test_expected_accuracy_is_what_simulation_gives() -> None:
    rng, size, mu, share = np.random.default_rng(2), 400_000, 0.8, 0.1
    included = rng.random(size) < 0.5
    right = correct_guesses(rng.normal(size=size) + mu * included, included, round(share * size)) / round(share * size)
    assert expected_accuracy(share, mu) == pytest.approx(right, abs=0.006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 4, 10, 1e-5), "correct=5: must be between 0 and the 4 guesses"),
        ((5, 20, 10, 1e-5), "guesses=20: must be between 1 and the 10 canaries"),
        ((5, 5, 10, 1.0), r"delta=1.0: must be in \[0, 1\)"),
        ((5, 5, 10, 1e-5, 1.0), r"confidence=1.0: must be in \(0, 1\)"),
    ],
)
def test_refusals(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(*arguments)  # type: ignore[arg-type]
