"""Targets that are not normal: zeros for most, counts, two values; and how far out residuals are cut for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import confide
from confide.data.schema import Schema
from confide.methods import _additive_target as module
from confide.methods import additive as steps
from confide.methods._additive import EDGES
from confide.methods._additive_ninety import surely_spread
from confide.methods._additive_target import TARGET_BINS, law_of_target, room_of
from confide.methods.additive import Additive
from confide.models.additive import additive
from confide.sources.private_data import PrivateData

RECORDS, NOISE = 4000, 40.0
MIDDLES = (torch.arange(TARGET_BINS, dtype=torch.float64) + 0.5) / TARGET_BINS * 2 - 1


def counts_of(target: Tensor, seed: int = 0) -> Tensor:
    found = torch.histc(target.double(), TARGET_BINS, -1, 1)
    return found + NOISE * torch.randn(len(found), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(shares: Tensor) -> tuple[float, float]:
    mean = shares @ MIDDLES
    return float(mean), float((shares @ (MIDDLES - mean).square()).sqrt())


def mostly_zero(records: int = RECORDS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three quarters are zero, at the lower end; the others depend on one column of four."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(records, 4, generator=random) * 2 - 1
    size = (0.6 * x[:, 0] + 0.3 * torch.randn(records, generator=random)).exp() * 0.15
    return x, torch.where(torch.rand(records, generator=random) < 0.75, torch.zeros(()), size).clamp(max=2) - 1


def test_a_number_that_is_mostly_zero_is_no_narrow_one() -> None:
    target = mostly_zero()[1]
    for seed in range(5):
        mean, spread = moments(law_of_target(counts_of(target, seed), NOISE, RECORDS))
        assert abs(mean - float(target.mean())) < 0.45 * float(target.std())  # a bin is as wide
        assert abs(math.log(spread / float(target.std()))) < 0.6


def test_two_values_are_not_the_likelier_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.where(torch.arange(RECORDS) % 5 < 3, -1.0, 1.0)
    spread = moments(law_of_target(counts_of(target), NOISE, RECORDS))[1]
    assert abs(math.log(spread / float(target.std()))) < 0.3
    monkeypatch.setattr(module, "NEEDED", math.inf)
    spread = moments(law_of_target(counts_of(target), NOISE, RECORDS))[1]
    assert abs(math.log(spread / float(target.std()))) > 1, "no normal law has both"


def test_a_number_within_one_bin_is_no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else there could be is noise: it would be taken for fifty times as wide as it is."""
    target = torch.full((RECORDS,), float(MIDDLES[40]))
    for seed in range(5):
        law = law_of_target(counts_of(target, seed), NOISE, RECORDS)
        assert moments(law)[1] < 0.03
        assert room_of(law, 0.65) == 1.0
    monkeypatch.setattr(module, "NEEDED", -math.inf)
    assert moments(law_of_target(counts_of(target), NOISE, RECORDS))[1] > 0.06


def test_a_normal_number_stays_one() -> None:
    random = torch.Generator().manual_seed(1)
    for place, scale in ((0.1, 0.3), (-0.6, 0.05)):
        target = (place + scale * torch.randn(RECORDS, generator=random)).clamp(-1, 1)
        for seed in range(5):
            law = law_of_target(counts_of(target, seed), NOISE, RECORDS)
            mean, spread = moments(law)
            assert abs(mean - place) < 0.35 * scale
            assert abs(math.log(spread / scale)) < 0.4
            assert room_of(law, 0.65) == 1.0


def test_residuals_are_cut_where_that_leaves_the_mean() -> None:
    target = mostly_zero(100_000)[1]
    shares = torch.histc(target.double(), TARGET_BINS, -1, 1) / len(target)
    mean, spread = moments(shares)
    room = room_of(shares, 0.65)
    assert room > 1.5

    def led(cut: float) -> float:
        place = torch.tensor(mean, dtype=torch.float64)
        for _ in range(200):
            place = place + shares @ (MIDDLES - place).clamp(-cut * spread, cut * spread)
        return abs(float(place) - mean) / spread

    assert led(0.65) > 0.25, "without room steps follow the zeros"
    assert led(room * 0.65) < 0.13


def test_tails_are_counted_where_they_are_more_than_noise() -> None:
    random = torch.Generator().manual_seed(2)
    edges = torch.tensor(EDGES, dtype=torch.float64)

    def told(residual: Tensor, noise: float, seed: int) -> float:
        counts = torch.bincount(torch.bucketize(residual.abs().double(), edges), minlength=len(edges) + 1).double()
        draws = torch.randn(len(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return surely_spread(counts + noise * draws, noise, len(residual))

    normal = 0.1 * torch.randn(RECORDS, generator=random)
    assert all(told(normal, NOISE, seed) < 0.1 for seed in range(100)), "never more than there is"
    heaped = mostly_zero()[1] + 1
    assert 0.6 * float(heaped.std()) < told(heaped, 1.0, 0) <= float(heaped.square().mean().sqrt())


def test_what_is_mostly_zero_is_explained_no_worse_than_by_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were cut for a narrow number ended half a deviation below the mean."""
    x, y = mostly_zero(2 * RECORDS, seed=3)
    plan = confide.plan(epsilon=1.0, delta=1e-5, records=RECORDS, steps=17, sampling="full-batch", clip=2.0)

    def bias_and_error() -> tuple[float, float]:
        data = PrivateData(x[:RECORDS], y[:RECORDS], schema=Schema(classes=None, records=RECORDS), seed=1)
        posterior: Any = confide.fit(Additive(), additive([0] * 4, 1), data, plan, seed=0).posterior
        off = posterior.output_moments(x[RECORDS:])[0][:, 0] - y[RECORDS:]
        return abs(float(off.mean() / y.std())), float(off.square().mean().sqrt() / y[RECORDS:].std())

    bias, error = bias_and_error()
    assert bias < 0.2
    assert error < 1.02
    monkeypatch.setattr(steps, "room_of", lambda shares, cut: 1.0)
    assert bias_and_error()[0] > bias
