"""Statistics of columns under the budget: learn means, scales and bounds instead of assuming them public.

Each question comes in two halves that meet at the boundary. The first builds a per-record statistic: a pure
function from encoded records (B, d), with values in [-1, 1], to vectors (B, k) whose norm never exceeds
`norm_bound`, which is the clip C to ask with. The boundary sums it, adds Gaussian noise and hands out the
noisy sum. The second half turns that sum into numbers; it is post-processing and costs nothing.

    statistic = moment_statistic(features)
    query = StatisticQuery(statistic.function, statistic.size)
    release = data.answer(query, mechanism)          # a mechanism whose clip is statistic.norm_bound
    moments = private_mean_and_scale(release.sum, release.noise_std, release.expected_batch)

Sums are divided by the public expected batch, never by the realised one. If the nominal number of records is
wrong by a fraction r, every mean is wrong by about r of itself, which no amount of data mends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from confide.data.columns import SMALLEST_HALF_WIDTH, Column, Source
from confide.data.preprocessing import middle_and_half
from confide.data.schema import Schema
from confide.data.table import Array
from confide.errors import DataError


@dataclass(frozen=True)
class RecordStatistic:
    """A per-record vector function: `function(x, y=None)` maps (B, ...) to (B, size).

    The norm of every row is at most `norm_bound`. Takes numpy arrays or torch tensors and answers in kind.
    """

    function: Callable[..., Any]
    size: int
    norm_bound: float


@dataclass(frozen=True)
class ColumnMoments:
    """Private mean and standard deviation per feature, on the encoded scale, with the noise in them.

    `mean_error` is the standard deviation of the noise in `mean`, public since the noise level is.
    """

    mean: Array
    scale: Array
    mean_error: float


def moment_statistic(features: int | Sequence[int]) -> RecordStatistic:
    """First and second moments: (z_1, ..., z_d, z_1^2, ..., z_d^2), for |z_i| <= 1.

    Its norm is sqrt(sum z^2 + sum z^4) <= sqrt(2 d). Squares are not centred: a centred square needs the
    exact number of records to undo, and that number is private.
    """
    chosen = _chosen(features)

    def function(x: Any, y: Any = None) -> Any:
        library = _library(x)
        z = _selected(x, chosen)
        return library.concatenate([z, z * z], 1)

    return RecordStatistic(function, 2 * len(chosen), math.sqrt(2 * len(chosen)))


def private_mean_and_scale(noisy_sum: Any, noise_std: float, expected_batch: float) -> ColumnMoments:
    """Mean and standard deviation from the noisy sum of `moment_statistic`.

    With n = expected_batch and tau = noise_std / n, the release is m1 + tau N(0, 1) and m2 + tau N(0, 1). The
    square of the noisy m1 is too large by tau^2 on average, so the variance is estimated by

        v = m2 - (m1^2 - tau^2),     with noise of standard deviation about tau sqrt(1 + 4 m1^2).

    A variance below that noise cannot be told from zero; it is raised to it, so that no scale is made of
    noise.
    """
    total = _vector(noisy_sum)
    if total.size % 2:
        raise DataError(f"noisy_sum: has {total.size} entries; moment_statistic gives two for each feature")
    batch, noise = _public_scale(expected_batch, noise_std)
    tau = noise / batch
    first, second = np.split(total / batch, 2)
    first = np.clip(first, -1.0, 1.0)
    second = np.clip(second, 0.0, 1.0)
    floor = np.maximum(tau * np.sqrt(1 + 4 * first**2), 1e-6)
    variance = np.maximum(second - first**2 + tau**2, floor)
    return ColumnMoments(first, np.minimum(np.sqrt(variance), 1.0), tau)


def histogram_statistic(features: int | Sequence[int], bins: int = 64) -> RecordStatistic:
    """A histogram of each feature over [-1, 1] in equal bins: one 1 per feature, so the norm is sqrt(d)."""
    chosen = _chosen(features)
    if not isinstance(bins, int) or bins < 2:
        raise DataError(f"bins={bins!r}: must be a whole number, at least 2")

    def function(x: Any, y: Any = None) -> Any:
        library = _library(x)
        z = _selected(x, chosen)
        place = library.clip(library.floor((z + 1) * (bins / 2)), 0, bins - 1)
        hit = place[:, :, None] == library.arange(bins)
        # A non-finite value answers non-finite, which the boundary counts as zero, and not as an empty bin.
        return (hit * (1 + 0 * z)[:, :, None]).reshape(len(z), len(chosen) * bins)

    return RecordStatistic(function, len(chosen) * bins, math.sqrt(len(chosen)))


def private_bounds(
    noisy_sum: Any, noise_std: float, expected_batch: float, bins: int = 64, outside: float = 0.01
) -> tuple[Array, Array]:
    """Low and high per feature on the encoded scale, from the noisy sum of `histogram_statistic`.

    The bounds are edges of bins: about a share `outside` of the records lies below the low one, and as much above the
    high one. The running sum over j bins carries noise of standard deviation sqrt(j) noise_std; an edge counts as
    reached when the sum exceeds outside * expected_batch by twice that, so that noise in empty bins seldom pushes the
    bounds outward. A feature that drowns in noise keeps its coarse bounds, -1 and 1.
    """
    total = _vector(noisy_sum)
    if not 0 < outside < 0.5:
        raise DataError(f"outside={outside}: must be between 0 and 0.5")
    if bins < 2 or total.size % bins:
        raise DataError(f"noisy_sum: has {total.size} entries; histogram_statistic gives {bins} for each feature")
    batch, noise = _public_scale(expected_batch, noise_std)
    counts = total.reshape(-1, bins)
    reached = outside * batch + 2 * noise * np.sqrt(np.arange(1, bins + 1))
    below = np.cumsum(counts, axis=1) > reached
    above = np.cumsum(counts[:, ::-1], axis=1) > reached
    edges = np.linspace(-1.0, 1.0, bins + 1)
    low, high = edges[below.argmax(axis=1)], edges[bins - above.argmax(axis=1)]
    found = below.any(axis=1) & above.any(axis=1) & (low < high)
    return np.where(found, low, -1.0), np.where(found, high, 1.0)


def numeric_features(schema: Schema) -> tuple[int, ...]:
    """The positions, among the encoded inputs, of the numeric features: the ones worth asking about."""
    if not schema.columns:
        return tuple(range(schema.features or 0))
    places, start = [], 0
    for column in schema.columns:
        if column.kind == "numeric":
            places.append(start)
        start += column.width
    return tuple(places)


def bounds_from_moments(moments: ColumnMoments, deviations: float = 3.0) -> tuple[Array, Array]:
    """mean - k scale and mean + k scale, within [-1, 1]."""
    if not deviations > 0:
        raise DataError(f"deviations={deviations}: must be > 0")
    low = np.clip(moments.mean - deviations * moments.scale, -1.0, 1.0)
    high = np.clip(moments.mean + deviations * moments.scale, -1.0, 1.0)
    return low, high


def narrowed(schema: Schema, low: Any, high: Any) -> Schema:
    """The schema with the bounds of its numeric features narrowed to [low, high] on the old encoded scale.

    The new bounds are marked "learnt privately". A feature whose interval is empty keeps its coarse bounds.
    """
    lows, highs = _vector(low), _vector(high)
    count = len(numeric_features(schema))
    if lows.shape != highs.shape or lows.size != count:
        raise DataError(f"low and high: {lows.size} and {highs.size} values for {count} numeric features")
    intervals = iter(zip(lows.tolist(), highs.tolist(), strict=True))
    if not schema.columns:
        pairs = [_inner(schema, place, None, *next(intervals)) or schema.bounds_of(place) for place in range(count)]
        sources: dict[str, Source] = {**dict(schema.sources), "bounds": "learnt privately"}
        facts: dict[str, Any] = {"bounds": pairs, "sources": sources}
        return replace(schema, **facts)
    columns = []
    for place, column in enumerate(schema.columns):
        inner = _inner(schema, place, column, *next(intervals)) if column.kind == "numeric" else None
        columns.append(column if inner is None else replace(column, bounds=inner, source="learnt privately"))
    return replace(schema, columns=tuple(columns))


def _inner(schema: Schema, place: int, column: Column | None, low: float, high: float) -> tuple[float, float] | None:
    bounds = schema.bounds_of(place, column)
    if bounds is None:
        raise DataError("bounds: none declared; coarse bounds are needed before narrower ones can be learnt")
    middle, half = middle_and_half(*bounds)
    narrow = middle + half * max(low, -1.0), middle + half * min(high, 1.0)
    return narrow if high - low > 1e-6 and narrow[1] / 2 - narrow[0] / 2 > SMALLEST_HALF_WIDTH else None


def _chosen(features: int | Sequence[int]) -> list[int]:
    chosen = list(range(features)) if isinstance(features, int) else [int(feature) for feature in features]
    if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
        raise DataError(f"features={features!r}: must be a number of features, or different positions of inputs")
    return chosen


def _library(x: Any) -> ModuleType | Any:
    """numpy for arrays and torch for tensors; the few functions used here have the same names."""
    if isinstance(x, np.ndarray):
        return np
    import torch

    return torch


def _selected(x: Any, chosen: list[int]) -> Any:
    """The asked features, clamped: the norm bound must hold whatever the records are."""
    return x.reshape(len(x), -1)[:, chosen].clip(-1, 1)


def _vector(values: Any) -> Array:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _public_scale(expected_batch: float, noise_std: float) -> tuple[float, float]:
    if not (math.isfinite(expected_batch) and expected_batch > 0):
        raise DataError(f"expected_batch={expected_batch}: must be a finite number > 0")
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise DataError(f"noise_std={noise_std}: must be a finite number >= 0")
    return float(expected_batch), float(noise_std)
