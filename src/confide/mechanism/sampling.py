"""Batches: which records answer at a step. The draw is secret, so it comes from its own cryptographic stream."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream

Indices = NDArray[np.int64]


def poisson_batch(stream: NoiseStream, size: int, rate: float) -> Indices:
    """Each of `size` records with probability `rate`, independently.

    Gaps between chosen records are geometric, so the cost is that of the batch, not of the data set. With u uniform on
    53 bits, floor(log(1 - u) / log(1 - rate)) has the geometric law up to rounding of 2^-53.
    """
    if rate >= 1:
        return np.arange(size, dtype=np.int64)
    if size < 1:
        return np.empty(0, dtype=np.int64)
    log_miss = math.log1p(-rate)
    chosen: list[Indices] = []
    last = -1
    while last < size:
        expected = (size - last) * rate
        uniform = stream.uniform(int(expected + 4 * math.sqrt(expected)) + 8)
        gaps = np.minimum(np.floor(np.log1p(-uniform) / log_miss), size).astype(np.int64)
        positions = last + np.cumsum(gaps + 1)
        chosen.append(positions[positions < size])
        last = int(positions[-1])
    return np.concatenate(chosen)


class BatchSampler:
    """Draws the batches of one data set; remembers where a shuffled pass stands."""

    def __init__(self, size: int, stream: NoiseStream) -> None:
        self._size = size
        self._stream = stream
        self._passes: dict[SampledGaussian, Indices] = {}

    def check(self, mechanism: SampledGaussian) -> None:
        """Refuse batches that cannot be drawn; called before they are paid for.

        Fixed-size batches and passes reveal the number of records, so it must be the public one.
        """
        if mechanism.sampling in ("fixed-size", "shuffle") and mechanism.records != self._size:
            raise Refusal(
                f"records={mechanism.records}: {mechanism.sampling} sampling makes the number of records public, so "
                "it must be declared exactly; use poisson sampling to keep it private"
            )

    def draw(self, mechanism: SampledGaussian) -> Indices:
        """Row numbers of the next batch."""
        if mechanism.sampling == "poisson":
            return poisson_batch(self._stream, self._size, mechanism.rate)
        if mechanism.sampling == "full-batch":
            return np.arange(self._size, dtype=np.int64)
        self.check(mechanism)
        if mechanism.sampling == "fixed-size":
            return self._stream.choice_without_replacement(self._size, mechanism.batch)
        return self._next_of_pass(mechanism, mechanism.batch)

    def _next_of_pass(self, mechanism: SampledGaussian, batch: int) -> Indices:
        left = self._passes.get(mechanism)
        if left is None or not len(left):
            left = self._stream.permutation(self._size)
        self._passes[mechanism] = left[batch:]
        return left[:batch]
