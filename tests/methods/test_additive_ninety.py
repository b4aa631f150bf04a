"""How wide intervals of a number are, from signs of its residuals, where their scale is known and where it is not."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from confide.methods import _additive_ninety
from confide.methods._additive import EDGES
from confide.methods._additive_ninety import ENDS, Ninety, beyond, first_ninety, ninety_of, rungs_of

RECORDS, MOST = 1000, 0.6


def residuals(kind: str, count: int, random: torch.Generator) -> Tensor:
    normal = torch.randn(4, count, generator=random, dtype=torch.float64)
    student = normal[0] / (normal[1:].square().mean(0)).sqrt()
    even = 2 * torch.rand(count, generator=random, dtype=torch.float64) - 1
    heap = torch.where(even > 0, normal[0], normal[0] / 8)
    return 0.1 * {"normal": normal[0], "student": student, "even": even, "heap": heap}[kind]


def told(off: Tensor, rungs: Tensor, noise: float, random: torch.Generator) -> Tensor:
    signs = (2 * (off.abs()[:, None] > ENDS * rungs).double() - 1).mean(0)
    return signs + noise * torch.randn(len(rungs), generator=random, dtype=torch.float64)


def found(kind: str, noise: float, seed: int, before: tuple[float, float] = (0.11, 0.3)) -> Ninety:
    random, rungs = torch.Generator().manual_seed(seed), rungs_of(*before)
    signs = told(residuals(kind, RECORDS, random), rungs, noise, random)
    return ninety_of(signs, noise, RECORDS, rungs, before, 0.0, MOST)


def held(kind: str, scale: float) -> float:
    off = residuals(kind, 100_000, torch.Generator().manual_seed(-1))
    return float((off.abs() <= ENDS * scale).double().mean())


def test_the_shares_beyond_are_those_of_the_laws() -> None:
    for place in (0.5, 1.0, 1.7):
        shares = beyond(torch.tensor(place).double())
        for share, kind in zip(shares, ("normal", "student", "even", "heap"), strict=True):
            off = residuals(kind, 400_000, torch.Generator().manual_seed(3)).abs()
            nine = float(off.quantile(0.9))
            assert float((off > place * nine).double().mean()) == pytest.approx(float(share), abs=0.004)


@pytest.mark.parametrize("kind", ["normal", "student", "even"])
def test_nine_tenths_lie_within_whatever_the_law(kind: str) -> None:
    before = {"normal": 0.12, "student": 0.16, "even": 0.06}[kind], 0.2
    shares = [held(kind, found(kind, 0.02, seed, before).stated) for seed in range(20)]
    assert sum(shares) / len(shares) == pytest.approx(0.9, abs=0.02)
    assert 0.86 < min(shares) <= max(shares) < 0.95


def test_where_little_is_known_few_intervals_hold_less_than_four_fifths() -> None:
    """What is stated is wider than what is likely, which would fall short more often than not."""
    stated, likely = [], []
    for seed in range(60):
        random = torch.Generator().manual_seed(1000 + seed)
        before = 0.1 * float(torch.exp(0.5 * torch.randn((), generator=random)))
        one = found("normal", 0.3, seed, (before, 0.5))
        stated.append(held("normal", one.stated))
        likely.append(held("normal", one.likely))
    assert sum(share < 0.8 for share in stated) <= 2
    assert sum(share < 0.8 for share in likely) > sum(share < 0.8 for share in stated)
    assert sum(stated) / len(stated) < 0.985


def test_a_first_look_that_was_mistaken_is_found_out() -> None:
    """A heap within a wide range looks like a narrow law to bins: five times too narrow, and seemingly sure."""
    shares = [held("normal", found("normal", 0.1, seed, (0.02, 0.15)).stated) for seed in range(10)]
    assert min(shares) > 0.6
    without = [held("normal", 0.02 * math.exp(0.5)) for _ in range(1)]
    assert max(without) < 0.5


def test_the_first_look_knows_how_little_it_knows() -> None:
    random, edges = torch.Generator().manual_seed(0), torch.tensor(EDGES, dtype=torch.float64)
    for kind, noise in itertools.product(("normal", "student", "heap"), (1.0, 20.0, 60.0)):
        off = []
        for _ in range(10):
            one = residuals(kind, RECORDS, random).abs()
            counts = torch.bincount(torch.bucketize(one, edges), minlength=len(EDGES) + 1).double()
            counts = counts + noise * torch.randn(len(counts), generator=random, dtype=torch.float64)
            scale, doubt = first_ninety(counts, noise, RECORDS, 0.2)
            off.append(math.log(scale * ENDS / float(one.quantile(0.9))) / math.hypot(doubt, 0.05))
        assert sum(abs(one) > 2.5 for one in off) <= 2


def test_no_interval_is_wider_than_the_declared_range() -> None:
    rungs = rungs_of(0.5, 1.0)
    nothing = ninety_of(torch.full((4,), 1.0).double(), 0.5, RECORDS, rungs, (0.5, 1.0), 0.0, MOST)
    assert nothing.stated == nothing.likely == MOST


def test_the_doubt_of_weights_is_not_counted_twice() -> None:
    """Residuals hold what is wrong with the weights, and stated intervals have it beside the scale."""
    random, rungs, own = torch.Generator().manual_seed(0), rungs_of(0.1, 0.3), 0.06**2
    off = residuals("normal", 20_000, random)
    signs = (2 * (off.abs()[:, None] > ENDS * (rungs.square() + own).sqrt()).double() - 1).mean(0)
    one = ninety_of(signs, 0.001, 20_000, rungs, (0.1, 0.3), own, MOST)
    assert one.likely == pytest.approx((0.1**2 - own) ** 0.5, rel=0.04)


def test_without_noise_scales_are_numbers() -> None:
    signs = torch.full((_additive_ninety.RUNGS,), -1.0).double()
    one = ninety_of(signs, 0.0, RECORDS, rungs_of(0.1, 0.0), (0.1, 0.0), 0.0, MOST)
    assert 0 < one.likely <= one.stated <= MOST
