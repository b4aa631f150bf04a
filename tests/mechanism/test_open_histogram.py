"""A histogram of values that nobody listed: its price, its noise, and that a value of one record hardly ever shows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from confide.errors import Refusal
from confide.mechanism.noise import NoiseStream
from confide.mechanism.open_histogram import OpenHistogram
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Adjacency, GaussianEvent


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("epsilon", "delta", "open_ones"), [(0.1, 1e-6, 3), (1.0, 1e-5, 12), (3.0, 1e-9, 0)])
def test_the_two_events_stay_within_the_budget(
    epsilon: float, delta: float, open_ones: int, adjacency: Adjacency
) -> None:
    made = OpenHistogram.within(epsilon, delta, 12, open_ones, adjacency)
    spent = sound_epsilon(made.events(), delta, adjacency)
    assert 0.99 * epsilon <= spent <= epsilon
    # What the threshold leaves open is a part of delta: without it the same noise would cost less.
    alone = sound_epsilon([GaussianEvent(made.noise_multiplier)], delta, adjacency)
    assert alone < spent if open_ones else alone == spent


def test_the_noise_is_that_of_all_ones_of_a_record() -> None:
    made = OpenHistogram(2.0, 9, 3, 1e-3)
    listed, _ = made.release(np.full(40_000, 5.0), {}, NoiseStream(3))
    assert listed.std() == pytest.approx(2.0 * 3.0, rel=0.02)
    assert listed.mean() == pytest.approx(5.0, abs=0.15)


def test_a_value_of_one_record_shows_with_the_stated_chance() -> None:
    """A large slack, so that it can be counted: of records with three values of their own, at most that share shows."""
    made, noise, records = OpenHistogram(1.0, 3, 3, 0.3), NoiseStream(5), 3000
    values = {(record, place): 1 for record in range(records) for place in range(3)}
    _, shown = made.release(np.zeros(0), values, noise)
    share = len({record for record, _ in shown}) / records
    deviation = math.sqrt(0.3 * 0.7 / records)
    assert 0.2 < share <= 0.3 + 3 * deviation

    class Careless(OpenHistogram):  # a planted fault: each value has the whole slack to itself
        @property
        def threshold(self) -> float:
            return 1 + (super().threshold - 1) * 0.5244 / 1.2816

    _, shown = Careless(1.0, 3, 3, 0.3).release(np.zeros(0), values, noise)
    assert len({record for record, _ in shown}) / records > 0.3 + 3 * deviation


def test_common_values_show_and_nothing_is_listed_without_a_threshold() -> None:
    made = OpenHistogram(1.0, 2, 1, 1e-6)
    _, shown = made.release(np.zeros(0), {"common": 1000, "rare": 1}, NoiseStream(1))
    assert list(shown) == ["common"]
    assert OpenHistogram(1.0, 2, 0, 0.0).threshold == math.inf


@pytest.mark.parametrize(("ones", "open_ones", "slack"), [(0, 0, 0.0), (1, 2, 0.1), (2, 1, 0.0), (2, 1, 1.0)])
def test_what_could_not_be_private_is_refused(ones: int, open_ones: int, slack: float) -> None:
    with pytest.raises(Refusal, match=r"ones=|slack="):
        OpenHistogram(1.0, ones, open_ones, slack)
