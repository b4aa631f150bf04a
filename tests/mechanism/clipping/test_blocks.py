"""Sums in blocks: the same sum, and no product in which more records meet than rounding was promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.rules.convolution import PatchSum, WithBias, channel_groups
from confide.mechanism.clipping.rules.linear import OuterProduct
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.registry import Contribution, Dense
from confide.mechanism.clipping.workspace import Workspace

RECORDS, POSITIONS = 13, 12


def space() -> Workspace:
    found = Workspace()
    found.begin(1 << 24)
    return found


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def patches(groups: int) -> PatchSum:
    layer: Any = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
    margins = layer._reversed_padding_repeated_twice
    return PatchSum(
        channel_groups(normal(RECORDS, 6, 3, 4), groups), normal(RECORDS, 4, 3, 4), Cut(layer, margins), space()
    )


def stored() -> PatchSum:
    found = patches(2)
    found.formed = True
    found._formed_norms(None, True)
    return found


KINDS: dict[str, Callable[[], Contribution]] = {
    "convolution": lambda: patches(1),
    "groups": lambda: patches(2),
    "stored": stored,
    "with bias": lambda: WithBias(patches(1), Dense({"bias": normal(RECORDS, 6)})),
    "dense": lambda: Dense({"a": normal(RECORDS, 3, 2), "b": normal(RECORDS, 5)}),
    "outer product": lambda: OuterProduct(normal(RECORDS, 3), normal(RECORDS, 5), True, space()),
}


@pytest.mark.parametrize("size", [1, 4, 5, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_is_the_same(kind: str, size: int) -> None:
    torch.manual_seed(0)
    contribution = KINDS[kind]()
    factors = torch.rand(RECORDS, dtype=torch.float64)
    wanted = {name: value.clone() for name, value in contribution.weighted(factors).items()}
    found = contribution.in_blocks(factors, size)
    assert found is not None
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("kind", ["convolution", "groups"])
def test_no_more_records_meet_in_a_product(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    contribution, terms, product = KINDS[kind](), [], torch.bmm

    def seen(left: Tensor, right: Tensor, **more: Any) -> Tensor:
        terms.append(left.shape[2])
        return product(left, right, **more)

    monkeypatch.setattr(torch, "bmm", seen)
    monkeypatch.setattr(Tensor, "baddbmm_", None)  # a product onto a sum may add up in any order
    contribution.in_blocks(torch.rand(RECORDS, dtype=torch.float64), size)
    assert max(terms) == size * POSITIONS


@pytest.mark.parametrize("shape", [(2000, 4), (400, 16)])
def test_how_many_records_fit_does_not_change_a_norm(shape: tuple[int, int]) -> None:
    """A batch that just does not fit any more is not stored; parts that cancel fifty times had other norms then, and
    one record moved a sum of forty by 1.7 C."""
    positions, width = shape
    layer = nn.Linear(width, width, bias=False)
    sums = []
    for records in (40, 41):
        x, y = torch.zeros(2, records, positions, width)
        x[..., 0], y[..., 0], y[:, 1::2, 0] = 1.0, 1.0, -1.0
        y[:, 0, 0] += positions / 50
        out = torch.zeros(width * width)
        clipped_sum(layer, dotted, x, y, clip=1.0, out=out, memory_budget=4 * width * width * 40)
        sums.append(out)
    assert float((sums[1] - sums[0]).norm()) <= 1


def dotted(output: Tensor, y: Tensor) -> Tensor:
    return (output * y).flatten(1).sum(1)
