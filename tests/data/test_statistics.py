"""Statistics under the budget: the norm bound holds for every record, and the noisy sums are read rightly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from confide.data import (
    Column,
    Encoder,
    Schema,
    bounds_from_moments,
    histogram_statistic,
    moment_statistic,
    narrowed,
    numeric_features,
    private_bounds,
    private_mean_and_scale,
)
from confide.errors import DataError

RECORDS = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.floats(-1e6, 1e6) | st.floats(-1, 1)
)


@given(RECORDS)
@settings(max_examples=100, deadline=None)
def test_no_record_exceeds_the_norm_bound(x: np.ndarray) -> None:
    """Without the clamp, or with sqrt(d) for the moments, records at the bounds would exceed it."""
    for statistic in (moment_statistic(x.shape[1]), histogram_statistic(x.shape[1], bins=5)):
        rows = statistic.function(x)
        assert rows.shape == (len(x), statistic.size)
        assert (np.linalg.norm(rows, axis=1) <= statistic.norm_bound * (1 + 1e-12)).all()


def test_the_norm_bounds_are_attained() -> None:
    ones = np.ones((1, 7))
    for statistic in (moment_statistic(7), histogram_statistic(7)):
        assert np.linalg.norm(statistic.function(ones)) == pytest.approx(statistic.norm_bound)


@given(RECORDS)
@settings(max_examples=50, deadline=None)
def test_tensors_and_arrays_agree(x: np.ndarray) -> None:
    for statistic in (moment_statistic(x.shape[1]), histogram_statistic(x.shape[1], bins=8)):
        answer = statistic.function(torch.from_numpy(x), torch.zeros(len(x)))
        np.testing.assert_array_equal(answer.numpy(), statistic.function(x))


def test_a_record_that_is_not_finite_answers_so() -> None:
    """The boundary counts such an answer as zero; a silent bin would be a made-up value."""
    x = np.array([[np.nan, 0.5]])
    for statistic in (moment_statistic(2), histogram_statistic(2)):
        assert not np.isfinite(statistic.function(x)).all()


def _encoded(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.c_[rng.normal(0.6, 0.05, n), rng.normal(-0.2, 0.3, n), rng.uniform(-1, 1, n)], -1, 1)


def test_without_noise_the_moments_are_exact() -> None:
    x = _encoded(500)
    moments = private_mean_and_scale(moment_statistic(3).function(x).sum(0), 0.0, 500)
    np.testing.assert_allclose(moments.mean, x.mean(0), atol=1e-12)
    np.testing.assert_allclose(moments.scale, x.std(0), atol=1e-9)


def test_with_noise_the_moments_are_unbiased_and_their_error_is_stated() -> None:
    x, noise = _encoded(2_000), 60.0
    total = moment_statistic(3).function(x).sum(0)
    rng = np.random.default_rng(1)
    runs = [private_mean_and_scale(total + rng.normal(0, noise, 6), noise, 2_000) for _ in range(2_000)]
    means = np.array([run.mean for run in runs])
    assert runs[0].mean_error == noise / 2_000
    # Five standard errors of the mean and of the standard deviation over 2000 runs.
    np.testing.assert_allclose(means.mean(0), x.mean(0), atol=5 * 0.03 / math.sqrt(2_000))
    np.testing.assert_allclose(means.std(0), 0.03, rtol=5 / math.sqrt(4_000))


def test_the_variance_is_corrected_for_the_noise_in_the_mean() -> None:
    """The square of a noisy mean is too large by tau^2 = 0.0064; five standard errors here are 0.0029."""
    x = np.random.default_rng(5).uniform(-1, 1, (1_000, 1))
    total = moment_statistic(1).function(x).sum(0)
    rng = np.random.default_rng(6)
    draws = total + rng.normal(0, 80.0, (20_000, 2))
    variances = [private_mean_and_scale(draw, 80.0, 1_000).scale[0] ** 2 for draw in draws]
    assert np.mean(variances) == pytest.approx(x.var(), abs=0.0029)


def test_a_scale_is_never_made_of_noise() -> None:
    moments = private_mean_and_scale(np.array([0.0, 1000.0, -50.0, 1000.0]), 40.0, 1_000)
    assert moments.scale[0] ** 2 >= 0.04
    assert moments.scale[1] ** 2 >= 0.04 * math.sqrt(5) * (1 - 1e-9)
    assert np.isfinite(private_mean_and_scale(np.array([1e9, -1e9]), 1e8, 10).scale).all()


def test_histograms_count_every_record_once_per_feature() -> None:
    x = _encoded(400)
    counts = histogram_statistic([0, 2], bins=16).function(x).sum(0).reshape(2, 16)
    for row, feature in zip(counts, (0, 2), strict=True):
        np.testing.assert_array_equal(row, np.histogram(x[:, feature], 16, (-1, 1))[0])


def test_private_bounds_cover_the_bulk_under_noise() -> None:
    x, bins = _encoded(5_000), 64
    total = histogram_statistic(3, bins).function(x).sum(0)
    rng = np.random.default_rng(3)
    inside, wide = [], 0
    for _ in range(300):
        low, high = private_bounds(total + rng.normal(0, 12, total.shape), 12.0, 5_000, bins)
        inside.append(((x >= low) & (x <= high)).mean(0))
        wide += int(high[0] - low[0] > 0.4)
    # On average each side gives up at most outside + 2 noise sqrt(bins) / n = 0.048 of the records.
    assert (np.mean(inside, axis=0) > 1 - 2 * 0.048).all()
    assert np.min(inside) > 0.85
    # The first feature has a standard deviation of 0.05. Noise in the empty bins pushes its bounds outward in about
    # one run of a hundred; without the allowance for noise it would be half of the runs.
    assert wide <= 12


def test_a_feature_that_drowns_keeps_its_coarse_bounds() -> None:
    low, high = private_bounds(np.ones(16), 1e6, 100, bins=8)
    assert low.tolist() == [-1, -1]
    assert high.tolist() == [1, 1]


def test_narrowed_bounds_are_marked_and_in_the_columns_units() -> None:
    schema = Schema(
        columns=[
            Column("job", categories=("a", "b"), missing="category"),
            Column("age", bounds=(0, 100), missing="category"),
            Column("pay", bounds=(0, 1000)),
        ]
    )
    assert numeric_features(schema) == (3, 5)
    finer = narrowed(schema, [-0.5, 0.3], [0.5, 0.3])
    assert finer.columns[1].bounds == (25, 75)
    assert finer.columns[1].source == "learnt privately"
    assert finer.columns[1].missing == "category"
    assert finer.columns[2] == schema.columns[2]  # an empty interval changes nothing
    plain = narrowed(Schema(bounds=(0, 16), shape=2), [-1, 0], [0, 1])
    assert plain.bounds == ((0, 8), (8, 16))
    assert plain.source_of("bounds") == "learnt privately"


def test_the_whole_way_from_coarse_bounds_to_a_finer_encoder() -> None:
    rng = np.random.default_rng(4)
    raw = np.c_[rng.normal(50_000, 3_000, 3_000), rng.normal(40, 10, 3_000)]
    coarse = Schema(records=3_000, bounds=[(0, 1_000_000), (0, 1_000)], shape=2)
    statistic = moment_statistic(numeric_features(coarse))
    rows = statistic.function(Encoder(coarse).features(raw).astype(np.float64))
    noise = 0.02 * statistic.norm_bound  # nearly silent: coarse bounds 100 times too wide need a strong release
    moments = private_mean_and_scale(rows.sum(0) + rng.normal(0, noise, 4), noise, 3_000)
    fine = Encoder(narrowed(coarse, *bounds_from_moments(moments)))
    spread = fine.features(raw).std(0)
    assert (spread > 10 * Encoder(coarse).features(raw).std(0)).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: moment_statistic(0),
        lambda: moment_statistic([1, 1]),
        lambda: moment_statistic([-1]),
        lambda: histogram_statistic(2, bins=1),
        lambda: private_mean_and_scale(np.zeros(3), 1.0, 10),
        lambda: private_mean_and_scale(np.zeros(2), -1.0, 10),
        lambda: private_mean_and_scale(np.zeros(2), 1.0, 0),
        lambda: private_bounds(np.zeros(10), 1.0, 10, bins=4),
        lambda: private_bounds(np.zeros(8), 1.0, 10, bins=4, outside=0.6),
        lambda: narrowed(Schema(bounds=(0, 1), shape=2), [0], [1]),
        lambda: narrowed(Schema(shape=1), [0], [1]),
        lambda: bounds_from_moments(private_mean_and_scale(np.zeros(2), 1.0, 10), deviations=0),
    ],
)
def test_impossible_arguments_are_refused(call) -> None:
    with pytest.raises(DataError):
        call()
