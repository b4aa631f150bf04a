"""Gradients of a convolution's weight in one native call: the right numbers, the same whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide._native import patches
from confide._native.loader import library
from confide.mechanism.clipping.rules.convolution import PatchSum, channel_groups
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.workspace import Workspace

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")

# layer, size of its images: whole tiles, edges on either side, runs of every length, steps, holes, groups, one axis
CASES: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv2d(1, 16, 8, stride=2, padding=3), (28, 28)),
    (nn.Conv2d(16, 32, 4, stride=2), (13, 13)),
    (nn.Conv2d(3, 65, 3, padding=1), (7, 9)),
    (nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), (11, 13)),
    (nn.Conv2d(6, 9, 2, groups=3, padding=1), (6, 5)),
    (nn.Conv2d(40, 7, 1, stride=2), (5, 5)),
    (nn.Conv2d(8, 8, 3, groups=8), (3, 3)),
    (nn.Conv1d(5, 11, 4, stride=3, padding=2, dilation=2), (31,)),
]
RECORDS = 7


def given(layer: Any, size: tuple[int, ...], last: bool, records: int = RECORDS) -> tuple[Tensor, Tensor]:
    """Images and gradients at the output, in either order of memory."""
    generator = torch.Generator().manual_seed(len(size) + layer.in_channels)
    images = torch.randn(records, layer.in_channels, *size, generator=generator)
    with torch.no_grad():
        shape = layer(images).shape
    left = torch.randn(shape, generator=generator)
    if last:
        images, left = (one.movedim(1, -1).contiguous().movedim(-1, 1) for one in (images, left))
    return images, left


def contribution(layer: Any, images: Tensor, left: Tensor) -> PatchSum:
    space = Workspace()
    space.begin(1 << 28)
    cut = Cut(layer, layer._reversed_padding_repeated_twice)
    return PatchSum(channel_groups(left, layer.groups), images, cut, space)


def written(layer: Any, images: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    found = contribution(layer, images, left)
    assert found.native
    into = torch.full((len(images), layer.weight.numel()), torch.nan)
    return into, found._written(0, len(images), into)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_autograd(case: tuple[Any, tuple[int, ...]], last: bool) -> None:
    layer, size = case
    images, left = given(layer, size, last)
    found, norms = written(layer, images, left)
    weight = layer.weight.detach().double().requires_grad_()
    options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
    map_of: Any = nn.functional.conv1d if len(size) == 1 else nn.functional.conv2d
    for record in range(RECORDS):
        output = map_of(images[record : record + 1].double(), weight, **options)
        (wanted,) = torch.autograd.grad(output, weight, left[record : record + 1].double())
        torch.testing.assert_close(found[record].view_as(wanted).double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norms[record].double(), wanted.square().sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_the_others_nor_on_threads(
    case: tuple[Any, tuple[int, ...]], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, size = case
    images, left = given(layer, size, last)
    found, norms = written(layer, images, left)
    turned = torch.arange(RECORDS).roll(3)[:5]
    some, some_norms = written(layer, images[turned], left[turned])
    assert torch.equal(some, found[turned])
    assert torch.equal(some_norms, norms[turned])
    thrown_away = contribution(layer, images, left)._written(0, RECORDS, None)
    assert torch.equal(thrown_away, norms)
    monkeypatch.setattr(patches, "THREAD_PRODUCTS", 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared, shared_norms = written(layer, images, left)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(shared, found)
    assert torch.equal(shared_norms, norms)


def test_positions_are_added_up_one_after_the_other() -> None:
    """The order whose error is bounded: 2^24 and then ones, each of which is lost; in another order they are not."""
    layer = nn.Conv1d(1, 8, 1, bias=False)
    images = torch.ones(1, 1, 33)
    images[..., 0] = 2.0**24
    found, _ = written(layer, images, torch.ones(1, 8, 33))
    assert (found == 2.0**24).all()
    turned, _ = written(layer, images.flip(-1), torch.ones(1, 8, 33))
    assert (turned == 2.0**24 + 32).all()


def test_what_is_no_number_stays_with_its_record() -> None:
    layer = nn.Conv2d(2, 5, 3, padding=1)
    images, left = given(layer, (6, 6), False)
    whole, norms = written(layer, images, left)
    images[2, 0, 3, 3], left[4, 1, 0, 0] = torch.nan, torch.inf
    found, found_norms = written(layer, images, left)
    others = torch.tensor([0, 1, 3, 5, 6])
    assert torch.equal(found[others], whole[others])
    assert torch.equal(found_norms[others], norms[others])
    assert not found_norms[[2, 4]].isfinite().any()


def test_other_types_go_by_patches() -> None:
    layer = nn.Conv2d(2, 3, 3, dtype=torch.float64)
    images, left = (one.double() for one in given(nn.Conv2d(2, 3, 3), (6, 6), False))
    assert not contribution(layer, images, left).native
