"""Sums of outer products in one native call: the right numbers, in the order that the certificate is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide._native import arithmetic
from confide._native.loader import library
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.rules import linear
from confide.mechanism.clipping.workspace import Workspace

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")

# records, outputs, inputs, block: whole tiles, edges on either side, several groups of panels, blocks that do not fit
SHAPES = [
    (1, 24, 1, 1),
    (7, 25, 3, 2),
    (64, 24, 32, 64),
    (65, 31, 33, 16),
    (130, 100, 47, 7),
    (300, 1500, 64, 128),
    (2048, 24, 1100, 200),
]


def space() -> Workspace:
    made = Workspace()
    made.begin(1 << 30)
    return made


def sides(records: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(records + outputs)
    shapes = ((records, outputs), (records, inputs), (records,), (outputs, inputs), (outputs,))
    left, right, factors, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return left, right, factors, weight, bias


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_the_products_and_bits_do_not_depend_on_threads(shape: tuple[int, ...], threads: int) -> None:
    left, right, factors, weight, bias = sides(*shape[:3])
    scaled = left.double() * factors.double()[:, None]
    wanted, wanted_bias = weight + scaled.t() @ right.double(), bias + scaled.sum(0)
    alone, alone_bias = weight.clone(), bias.clone()
    assert arithmetic.add_outer(left, right, factors, alone, alone_bias, shape[3], space())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert arithmetic.add_outer(left, right, factors, weight, bias, shape[3], space())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(weight, alone)
    assert torch.equal(bias, alone_bias)
    size = 1e-6 * shape[0]
    assert torch.allclose(weight.double(), wanted, atol=size, rtol=0)
    assert torch.allclose(bias.double(), wanted_bias, atol=size, rtol=0)


def test_rows_that_lie_apart_in_memory() -> None:
    left, right, factors, weight, _ = sides(40, 30, 20)
    wide = torch.zeros(40, 50)
    wide[:, 10:40] = left
    first, second = weight.clone(), weight.clone()
    assert arithmetic.add_outer(left, right, factors, first, None, 8, space())
    assert arithmetic.add_outer(wide[:, 10:40], right, factors, second, None, 8, space())
    assert torch.equal(first, second)


@pytest.mark.parametrize(("block", "wanted"), [(4, 2.0**24), (2, 2.0**24 + 2)], ids=["one after the other", "blocks"])
def test_records_are_added_up_in_blocks(block: int, wanted: float) -> None:
    """2^24 + 1 is no number of single precision: a one that comes alone is lost, two that meet first are not."""
    left = torch.tensor([2.0**24, 1.0, 1.0, 1.0])[:, None].expand(4, 30).contiguous()
    weight, bias = torch.zeros(30, 40), torch.zeros(30)
    assert arithmetic.add_outer(left, torch.ones(4, 40), torch.ones(4), weight, bias, block, space())
    assert (weight == wanted).all()
    assert (bias == wanted).all()


@pytest.mark.parametrize("block", [1, 2, 64])
def test_what_is_there_is_met_once_by_the_whole_sum(block: int) -> None:
    """Sixty-four ones onto noise of 2^24 and beyond: rounded against it one by one, or by blocks of one, they would be
    lost, and so would the noise of a record that is large on the way and cancels."""
    weight, bias = torch.full((30, 40), 2.0**24), torch.full((30,), 2.0**24)
    ones = torch.ones(64, 30)
    assert arithmetic.add_outer(ones, torch.ones(64, 40), torch.ones(64), weight, bias, block, space())
    assert (weight == 2.0**24 + 64).all()
    assert (bias == 2.0**24 + 64).all()
    noise = torch.full((30, 40), 0.125)
    large = torch.tensor([2.0**30, -(2.0**30)])[:, None].expand(2, 30).contiguous()
    assert arithmetic.add_outer(large, torch.ones(2, 40), torch.ones(2), noise, None, block, space())
    assert (noise == 0.125).all()


def test_other_types_and_small_layers_are_left_to_torch() -> None:
    left, right, factors, weight, bias = sides(9, 30, 5)
    refused = [
        (left.double(), right.double(), factors.double(), weight.double(), bias.double()),
        (left[:, :4], right, factors, weight[:4], bias[:4]),
        (left, right, factors, weight.double(), bias),
        (left, right.t().contiguous().t(), factors, weight, bias),
    ]
    for given in refused:
        before = given[3].clone()
        assert not arithmetic.add_outer(*given, 4, space())
        assert torch.equal(given[3], before)


def test_the_clipped_sum_takes_it_and_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def seen(*given: Any) -> bool:
        blocks.append(given[5])
        return arithmetic.add_outer(*given)

    monkeypatch.setattr(linear, "add_outer", seen)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 40))
    x, y = torch.randn(600, 50), torch.randint(40, (600,))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y, reduction="none")

    sums = []
    for _ in range(2):
        out = torch.zeros(sum(value.numel() for value in module.parameters()))
        clipped_sum(module, loss, x, y, clip=1.0, out=out)
        sums.append(out)
        monkeypatch.setattr(linear, "add_outer", lambda *_: False)
    assert all(50 < block < 600 for block in blocks[-2:])  # made-up records come first
    assert torch.allclose(*sums, atol=1e-4, rtol=0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [3, 5])
def test_positions_of_records_are_added_up_record_by_record(size: int, turned: bool) -> None:
    """Five records of four positions, onto what is there: the product, of so many records in a block."""
    generator = torch.Generator().manual_seed(size)
    shapes = ((5, 4, 30), (5, 4, 26), (5,), (30, 26), (30,))
    left, right, factors, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    layer = linear.OuterSum(left, right, True, space())
    scaled = (left.double() * factors.double()[:, None, None]).flatten(0, 1)
    wanted, wanted_bias = weight + scaled.t() @ right.double().flatten(0, 1), bias + scaled.sum(0)
    onto = weight.t().contiguous() if turned else weight.clone()
    assert layer.add_product(onto, bias, factors, size, turned)
    found = onto.t() if turned else onto
    assert torch.allclose(found.double(), wanted, atol=2e-5, rtol=0)
    assert torch.allclose(bias.double(), wanted_bias, atol=2e-5, rtol=0)


def test_blocks_of_positions_are_those_of_whole_records() -> None:
    """Records of 2^24 and of ones: in a block of their own the ones meet first, and noise meets what comes of it."""
    left = torch.ones(4, 2, 30)
    left[0] = torch.tensor([2.0**24, 0.0])[:, None]
    for size, wanted in ((4, 2.0**24), (1, 2.0**24 + 6)):
        weight, bias = torch.full((30, 40), -(2.0**24)), torch.zeros(30)
        layer = linear.OuterSum(left, torch.ones(4, 2, 40), True, space())
        assert layer.add_product(weight, bias, torch.ones(4), size)
        assert (weight == wanted - 2.0**24).all()


def test_what_is_formed_or_in_double_precision_takes_the_other_way() -> None:
    layer = linear.OuterSum(torch.ones(4, 2, 30), torch.ones(4, 2, 40), False, space())
    weight = torch.zeros(30, 40)
    layer.formed = True
    assert not layer.add_product(weight, None, torch.ones(4), 4)
    layer.formed = False
    wide = layer.widened()
    assert not wide.add_onto({"weight": weight}, torch.ones(4).double(), 4)
    assert (weight == 0).all()
