"""Convolutions by torch's own kernel: exact, and a record's gradient the same whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    monkeypatch.setattr(convolution, "FOR_A_RECORD", 0)
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


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("shape", ODD)
def test_equal_records_have_equal_norms_wherever_they_stand(shape: tuple[int, int, int]) -> None:
    stored, thrown_away = norms(*shape)
    assert torch.equal(stored, stored[:1].expand_as(stored))
    assert torch.equal(stored, thrown_away)


def test_every_record_is_read_from_the_beginning_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of 3 x 11 x 12 numbers begin at other places: read where they lie, a kernel may add up otherwise."""
    seen: list[int] = []

    def read(left: Tensor, images: Tensor, cut: Cut) -> Tensor:
        seen.extend(side.data_ptr() % fused.LINE for side in (left, images))
        return torch.zeros(())

    monkeypatch.setattr(fused, "weight_gradient", read)
    patches = sides(3, 2, 11, torch.float32, kernel_size=3)
    assert patches.images is not None
    planes = patches._planes(patches.images, 0, RECORDS)
    list(fused.of_each_record(planes, patches.images, patches.cut))
    assert seen == [0] * 2 * RECORDS
    monkeypatch.setattr(fused, "_aligned", lambda values: True)
    list(fused.of_each_record(planes, patches.images, patches.cut))
    assert set(seen) != {0}


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


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}])
def test_all_records_in_one_call_have_the_bits_of_each_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = sides(16, 16, 16, torch.float32, kernel_size=3, **options)
    assert patches.images is not None
    planes = patches._planes(patches.images, 0, RECORDS).contiguous()
    found = fused.of_all_records(planes, patches.images, patches.cut)
    if found is not None:  # a processor on which it is otherwise takes them one by one
        alone = torch.stack([one.flatten() for one in fused.of_each_record(planes, patches.images, patches.cut)])
        assert torch.equal(found, alone)
    fused._same_together.cache_clear()
    whole = fused._together
    monkeypatch.setattr(fused, "_together", lambda *given: whole(*given) * (1 + 2**-23))
    assert fused.of_all_records(planes, patches.images, patches.cut) is None, "one bit more, and it is not taken"
    fused._same_together.cache_clear()
