"""Formed gradients count as they were formed, however many records there are beside them and whatever these hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.layers.bayesian import MeanFieldConv2d
from confide.mechanism.clipping import calls, certified, clipped_sum
from confide.mechanism.clipping.rules import convolution, linear
from confide.mechanism.clipping.rules.bayesian import Combined
from confide.mechanism.clipping.rules.convolution import PatchSum, WithBias, channel_groups
from confide.mechanism.clipping.rules.drawn import DrawnGradients
from confide.mechanism.clipping.rules.linear import OuterSum
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.registry import Contribution, Dense
from confide.mechanism.clipping.rules.sloped import SlopedPatches
from confide.mechanism.clipping.rules.transposed import TransposedLayer
from confide.mechanism.clipping.workspace import Workspace

RECORDS = 5


def space(room: bool) -> Workspace:
    """Where the gradients of all records have room, or that of one and no more."""
    found = Workspace()
    found.begin(1 << 28)
    if not room:
        found.used = found.budget - 1
    return found


def cancelling(*shape: int) -> Tensor:
    """Parts that cancel but for their last digits, along the last axis; a record whose products are no numbers."""
    values = torch.randn(*shape)
    values[..., 1::2] = -values[..., ::2][..., : values[..., 1::2].shape[-1]] * (1 + 2**-18)
    values[-1] *= 1e25
    return values


def outer(found: Workspace) -> OuterSum:
    right = torch.ones(RECORDS, 40, 3)
    right[-1] = 1e20
    return OuterSum(cancelling(RECORDS, 4, 40).mT.contiguous(), right, True, found)


def patches(found: Workspace, channels: int = 4, size: int = 8, groups: int = 1) -> PatchSum:
    layer: Any = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
    images = torch.ones(RECORDS, channels, size, size)
    images[-1] = 1e20
    left = channel_groups(cancelling(RECORDS, channels, size, size), groups)
    return PatchSum(left, images, Cut(layer, layer._reversed_padding_repeated_twice), found)


def sloped(found: Workspace, channels: int, size: int) -> SlopedPatches:
    return SlopedPatches(patches(found, channels, size), torch.rand(channels, channels, 3, 3), True, {})


def combined(found: Workspace) -> Combined:
    bases = [outer(found), outer(found)]
    terms = {"weight_mean": [(0, None), (1, None)], "weight_rho": [(0, torch.rand(4, 3)), (1, torch.rand(4, 3))]}
    if found.used:  # gradients that are kept from one pass to the next have all the budget
        found.budget = 1
    return Combined(bases, terms, {"bias_mean": torch.randn(RECORDS, 4)}, found)


def drawn(found: Workspace) -> DrawnGradients:
    wanted = frozenset({"weight_mean", "weight_rho"})
    if found.used:
        found.budget = 1
    return DrawnGradients(outer(found), wanted, {"weight_rho": torch.rand(4, 3)}, found)


KINDS: dict[str, Callable[[Workspace], Contribution]] = {
    "outer": outer,
    "transposed": lambda found: TransposedLayer(outer(found)),
    "patches": patches,
    "groups": lambda found: patches(found, groups=2),
    "one channel": lambda found: patches(found, 1),
    "bias": lambda found: WithBias(patches(found), Dense({"bias": torch.ones(RECORDS, 4)})),
    "by kernel, in order": lambda found: patches(found, 16, 32),
    "each by kernel": lambda found: patches(found, 32, 32),
    "sloped": lambda found: sloped(found, 4, 8),
    "sloped, by kernel": lambda found: sloped(found, 16, 32),
    "combined": combined,
    "drawn": drawn,
}


def made(kind: str, room: bool) -> tuple[Contribution, Tensor, Tensor]:
    torch.manual_seed(0)
    found = KINDS[kind](space(room))
    return found, found.squared_norms(), found.spread()


def bits(found: dict[str, Tensor]) -> list[Tensor]:
    return [value.contiguous() for _, value in sorted(found.items())]


@pytest.mark.parametrize("kind", KINDS)
def test_room_changes_nothing(kind: str) -> None:
    """Norms, spreads and rows have the same bits, and sums differ by the order of records alone."""
    (one, norms, spreads), (other, again, wide) = made(kind, True), made(kind, False)
    assert torch.equal(norms[:-1], again[:-1])
    assert torch.equal(spreads[:-1], wide[:-1])
    assert not bool(torch.isfinite(norms[-1]))
    rows, others = (bits(found.widened().dense(0, RECORDS)) for found in (one, other))
    assert all(torch.equal(row, theirs) for row, theirs in zip(rows, others, strict=True))
    assert all(bool(torch.isfinite(row).all()) for row in rows), "a record beyond single precision has a row"
    few = slice(0, RECORDS - 1)
    factors = norms[few].rsqrt()
    for wider in (False, True):
        sums, theirs, formed = (
            found
            for found in (
                bits(_chosen(one, few, wider).weighted(factors.double() if wider else factors)),
                bits(_chosen(other, few, wider).weighted(factors.double() if wider else factors)),
                [torch.einsum("n,n...->...", factors.double(), row[few]) for row in rows],
            )
        )
        for mine, yours, whole in zip(sums, theirs, formed, strict=True):
            assert float((mine.double() - yours.double()).norm()) < 1e-5
            assert float((mine.double().flatten() - whole.flatten()).norm()) < 1e-5


def _chosen(found: Contribution, few: slice, wider: bool) -> Contribution:
    some = found.chosen(few)
    return some.widened() if wider else some


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_that_is_no_number_changes_nothing(kind: str) -> None:
    """Sides are kept for its sake: the others count as they were formed all the same."""
    with_it, *_ = made(kind, True)
    torch.manual_seed(0)
    whole = KINDS[kind](space(True))
    without = whole.chosen(slice(0, RECORDS - 1))
    without.squared_norms()
    rows = bits(with_it.widened().dense(0, RECORDS - 1))
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(rows, bits(without.widened().dense(0, RECORDS - 1)), strict=True)
    )


def dotted(output: Tensor, y: Tensor) -> Tensor:
    return (output * y).flatten(1).sum(1)


def forty(records: int, positions: int, width: int) -> Tensor:
    """The sum of records whose parts cancel five hundred times, with room for the gradients of forty."""
    layer = nn.Linear(width, width, bias=False)
    x, y = torch.zeros(2, records, positions, width)
    x[..., 0], y[..., 0], y[:, 1::2, 0] = 1.0, 1.0, -1.0
    y[:, 0, 0] += positions / 500
    out = torch.zeros(width * width)
    clipped_sum(layer, dotted, x, y, clip=1.0, out=out, memory_budget=4 * width * width * 40)
    return out


@pytest.mark.parametrize("shape", [(2000, 4), (400, 16)])
def test_how_many_records_fit_moves_no_sum(shape: tuple[int, int]) -> None:
    assert float((forty(41, *shape) - forty(40, *shape)).norm()) <= 1


def test_of_the_sides_they_were_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what is not stored is added up from its sides, and has their spread."""
    before = linear.OuterSum._formed_norms

    def forgotten(self: OuterSum, size: int) -> Tensor:
        norms = before(self, size)
        if self.stored is None:
            self.formed, self.spreads = False, None
        return norms

    monkeypatch.setattr(linear.OuterSum, "_formed_norms", forgotten)
    assert float((forty(41, 2000, 4) - forty(40, 2000, 4)).norm()) > 30


class Mapped(nn.Module):
    """One weight over many positions, whose gradients are formed, and one over few, whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = nn.Conv1d(1, 1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        many, few = x[:, :64], x[:, 64:]
        return torch.cat([self.many(many[:, None])[:, 0], self.few(few[..., None])[..., 0]], 1)


def mapped(beyond: bool) -> Tensor:
    """The sum, in units of C, of forty records that cancel in both weights, and of one whose norm is no number."""
    clip, x, y = 1e-3, torch.ones(40, 68), torch.zeros(40, 68)
    generator = torch.Generator().manual_seed(0)
    parts = 1e8 * torch.randn(32, generator=generator)
    y[:, :64] = torch.cat([parts, -parts])[torch.randperm(64, generator=generator)]
    y[:, 64:67] = torch.tensor([1e12, -1e12, 1e-3])
    if beyond:
        x, y = torch.cat([x, torch.full((1, 68), 1e25)]), torch.cat([y, torch.full((1, 68), 1e20)])
    out = torch.zeros(2)
    clipped_sum(Mapped(), dotted, x, y, clip=clip, out=out)
    return out / clip


def test_one_whose_norm_is_no_number_moves_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float((mapped(True) - mapped(False)).norm()) <= 1
    before = PatchSum.widened

    def of_sides(self: PatchSum) -> PatchSum:
        found = before(self)
        if found.images is not None:
            found.formed, found.by_kernel, found.left = False, False, found.left.double()
        return found

    monkeypatch.setattr(convolution.PatchSum, "widened", of_sides)
    assert float((mapped(True) - mapped(False)).norm()) > 1, "the planted fault: formed anew where sides are there"


@pytest.mark.parametrize("shape", [(256, 3), (16, 32)])
def test_norms_of_sloped_convolutions_by_kernel(shape: tuple[int, int]) -> None:
    """Slopes stand in the order of what they scale: the slopes of other entries made a norm a third too small."""
    channels, size = shape
    layer = MeanFieldConv2d(channels, channels, 3, padding=1)
    with torch.no_grad():
        layer.weight_rho.fill_(-20.0)
        layer.weight_rho[:, : channels // 9] = 3.0
    layer.sample_(torch.Generator().manual_seed(0))
    x, y = torch.zeros(1, channels, size, size), torch.ones(1, channels, size, size)
    x[:, : channels // 9] = 1.0
    out = torch.zeros(sum(value.numel() for value in layer.parameters()))
    clipped_sum(layer, dotted, x, y, clip=1.0, out=out)
    assert 0.9 < float(out.norm()) <= 1


class Many(nn.Module):
    """Rules of several kinds: a table with padding, convolutions, layers with positions and without, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.cut, self.turned = nn.Conv1d(4, 4, 3, stride=3), nn.ConvTranspose1d(4, 4, 2)
        self.norm, self.mixed, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.turned(self.cut(self.table(x.long()).mT)).mT
        return self.last(self.mixed(self.norm(found)).mean(1))


def scaled(output: Tensor, y: Tensor) -> Tensor:
    return (output * y).sum(1)


def sum_of_many(kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of eleven records two have infinite gradients, one has none that is a number, one none whose norm is one."""
    torch.manual_seed(0)
    module, x, y = Many(), torch.randint(0, 6, (11, 8)), torch.randn(11, 2)
    y[1, 0], y[4], y[6], y[9] = torch.inf, -torch.inf, torch.nan, 1e30
    x, y = (x, y) if kept is None else (x[kept], y[kept])
    out = torch.zeros(sum(value.numel() for value in module.parameters()))
    return out, clipped_sum(module, scaled, x, y, clip=1e-3, out=out)


def test_what_is_no_number_is_left_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as where all rows are formed, and as without those records."""
    found, norms = sum_of_many()
    without, _ = sum_of_many(torch.tensor([0, 2, 3, 5, 7, 8, 9, 10]))
    torch.testing.assert_close(found, without, rtol=0, atol=1e-9)
    assert norms[[1, 4, 6]].tolist() == [0, 0, 0]
    assert float(norms[9]) > 1e29
    monkeypatch.setattr(certified, "lost_records", lambda _: None)
    formed, theirs = sum_of_many()
    torch.testing.assert_close(formed, found, rtol=0, atol=1e-9)
    torch.testing.assert_close(theirs, norms)


def test_a_network_that_runs_away_forms_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.Cluster, "add_rows", None)
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    out = torch.zeros(20)
    clipped_sum(module, scaled, torch.randn(5, 3), torch.full((5, 2), torch.nan), clip=1.0, out=out)
    assert not bool(out.any())


def of_spreads(clusters: Any) -> Tensor | None:
    """The planted fault: no number in single precision, and so in some ways of adding up alone."""
    lost = torch.stack([torch.isfinite(cluster.widened().spread()) for cluster in clusters]).all(0).logical_not()
    return lost if bool(lost.any()) else None


def test_what_is_left_out_does_not_follow_from_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose norm single precision does not hold gives its whole clip, whether there is room for it or not."""
    whole = float(mapped(True)[0] - mapped(False)[0])
    assert abs(whole) > 0.7
    monkeypatch.setattr(certified, "lost_records", of_spreads)
    assert abs(float(mapped(True)[0] - mapped(False)[0])) < 0.1


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("channels", [4, 16, 32])
def test_convolutions_of_all_sizes_have_the_order_of_the_weight(channels: int, room: bool) -> None:
    """Products of patches have another order than torch's kernel, which serves the larger ones."""
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    x, left = torch.randn(2, 3, channels, 32, 32)
    cut = Cut(layer, layer._reversed_padding_repeated_twice)
    found = PatchSum(channel_groups(left, 1), x, cut, space(room))
    found.squared_norms()
    (wanted,) = torch.autograd.grad((layer(x) * left).sum(), layer.weight)
    torch.testing.assert_close(found.weighted(torch.ones(3))["weight"], wanted, rtol=1e-4, atol=1e-2)
    assert found.formed == (found.stored is not None or not room)
