"""Convolutions by torch's own kernel and by ours: exact, and a record's norm the same whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide._native.loader import library
from confide.mechanism.clipping.rules import convolution, fused
from confide.mechanism.clipping.rules.convolution import PatchSum, channel_groups
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.workspace import Workspace
from tests.mechanism.clipping.test_exactness import TOLERANCE, compare
from tests.mechanism.clipping.zoo import ZOO

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
]
IMAGES = [name for name in ZOO if any(word in name for word in ("conv", "image", "residual", "group"))]
RECORDS = 6


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a layer is, and in double precision too."""
    monkeypatch.setattr(convolution, "FOR_A_BATCH", 0)
    monkeypatch.setattr(fused, "TYPES", (torch.float32, torch.float64))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("memory_budget", [1, 1 << 28])
@pytest.mark.parametrize("name", IMAGES)
def test_sums_equal_autograd(name: str, memory_budget: int) -> None:
    assert compare(name, memory_budget=memory_budget) < TOLERANCE


def sides(inputs: int, outputs: int, size: int, dtype: torch.dtype, **options: Any) -> PatchSum:
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(inputs, outputs, bias=False, dtype=dtype, **options)
    image = torch.randn(1, inputs, size, size + 1, dtype=dtype)
    gradient = torch.randn_like(layer(image)).expand(RECORDS, -1, -1, -1).contiguous()
    space = Workspace()
    space.begin(1 << 28)
    cut = Cut(layer, layer._reversed_padding_repeated_twice)
    images = image.expand(RECORDS, -1, -1, -1).contiguous()
    return PatchSum(channel_groups(gradient, layer.groups), images, cut, space)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("options", [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 1, "stride": 2},
    {"kernel_size": 2, "dilation": 2}, {"kernel_size": (3, 2), "padding": (0, 1), "groups": 2},
])  # fmt: skip
def test_norms_by_pixels_are_those_by_patches(options: dict[str, Any]) -> None:
    found = sides(4, 6, 7, torch.float64, **options)
    assert found.images is not None
    columns = found._columns(0, RECORDS).flatten(0, 1)
    torch.testing.assert_close(fused.gram_of_patches(found.images, found.cut), columns @ columns.mT)
    read = columns.unflatten(0, (RECORDS, -1)).flatten(1).square().sum(1)
    assert (read <= found.cut.times_read * found.images.flatten(1).square().sum(1) * (1 + 1e-12)).all()


ODD = [(3, 2, 11), (4, 3, 7), (7, 1, 9), (16, 3, 10), (33, 2, 6), (64, 64, 8)]


def norms(inputs: int, outputs: int, size: int) -> list[Tensor]:
    """Of equal records, stored and not."""
    found = []
    for room in (True, False):
        patches = sides(inputs, outputs, size, torch.float32, kernel_size=3)
        found.append(patches._formed_norms(None, room))
    return found


@pytest.mark.skipif(library() is None, reason="no native library")
@pytest.mark.parametrize("shape", ODD)
def test_equal_records_have_equal_norms_wherever_they_stand(shape: tuple[int, int, int]) -> None:
    stored, thrown_away = norms(*shape)
    assert torch.equal(stored, stored[:1].expand_as(stored))
    assert torch.equal(stored, thrown_away)


@pytest.mark.skipif(library() is None, reason="no native library")
def test_norms_of_scaled_gradients_do_not_depend_on_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.linspace(0.1, 2.0, 6 * 4 * 9).view(1, 6, 36)
    kept, thrown_away = (sides(4, 6, 7, torch.float32, kernel_size=3) for _ in range(2))
    found = kept._formed_norms(scales, True)
    assert kept.stored is not None
    wanted = (kept.stored.double() * scales.double().view(1, -1)).square().sum(1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=0.0)  # what is added for rounding
    assert (found.double() >= wanted).all(), "never down"
    monkeypatch.setattr(convolution, "CACHE_BYTES", 1)
    assert torch.equal(thrown_away._formed_norms(scales, False), found)


def test_no_shorter_format_whatever_was_set_outside() -> None:
    backend: Any = torch.backends.mkldnn
    before = backend.conv.fp32_precision
    backend.conv.fp32_precision = "bf16"
    try:
        with fused.exact_convolutions():
            assert backend.conv.fp32_precision == "ieee"
        assert backend.conv.fp32_precision == "bf16"
    finally:
        backend.conv.fp32_precision = before
