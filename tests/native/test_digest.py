"""Codes of what lies in memory: equal numbers have equal ones, and one bit makes another."""

from __future__ import annotations

import math

import pytest
import torch

from confide._native import digest as codes
from confide._native import loader
from confide._native.digest import digest, digest_of_numbers
from confide.mechanism.clipping.isolation import Region, unguarded

SIZES = [1, 3, 255, 256, 257, 1000]  # of words: parts of a block, whole ones, and what is left over
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@pytest.fixture(params=["native", "python"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(codes, "library", lambda: None)
    elif loader.library() is None:
        pytest.skip("no native library")


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_counts_and_so_does_the_length(size: int) -> None:
    words = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.int32)
    known = digest(words)
    assert known == digest(words.clone())
    changed = [words.clone() for _ in range(min(size, 300))]
    for place, one in enumerate(changed):
        one[place] ^= 1 << (place % 31)
    others = [digest(one) for one in (*changed, words[:-1], torch.cat([words, words.new_zeros(1)]), words.flip(0))]
    assert (known in others) == (size == 1), "a single number is the same from behind"
    assert len(set(others[: len(changed)])) == len(changed)


def test_neighbours_that_change_places_are_told_apart() -> None:
    """Which a plain sum, or products of neighbours without a key, would miss."""
    words = torch.arange(600, dtype=torch.int32)
    for one, other in ((0, 1), (4, 8), (0, 256), (255, 511)):
        turned = words.clone()
        turned[[one, other]] = words[[other, one]]
        assert digest(turned) != digest(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zeros_have_no_sign_and_what_is_no_number_is_one_thing(dtype: torch.dtype) -> None:
    one = torch.tensor([0.0, -0.0, math.nan, 1.0], dtype=dtype).repeat(150)
    other = torch.tensor([-0.0, 0.0, -math.nan, 1.0], dtype=dtype).repeat(150)
    assert digest_of_numbers(one) == digest_of_numbers(other)
    assert digest(one) != digest(other)
    other[-1] = 2.0
    assert digest_of_numbers(one) != digest_of_numbers(other)


@pytest.mark.parametrize("dtype", TYPES)
def test_how_it_lies_in_memory_does_not_count(dtype: torch.dtype) -> None:
    values = torch.randn(40, 30).to(dtype)
    assert digest(values.T.contiguous().T) == digest(values) == digest(values[None])
    assert digest_of_numbers(values[:, ::2]) == digest_of_numbers(values[:, ::2].clone())
    assert digest(values[:0]) == digest(values[:0])


def test_it_may_be_asked_inside_of_a_region() -> None:
    """Where the engine listens to what asks for addresses; a code that fails there would leave every network unseen."""
    with Region(2).entered(), unguarded():
        assert digest(torch.ones(3)) == digest(torch.ones(3))
