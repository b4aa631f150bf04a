"""Sums that are certified, for every kind of layer: records that cancel, in every format, alone and among others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import MeanFieldConv2d, MeanFieldLinear
from confide.mechanism.clipping import STYLES, Style, certified, clipped_sum, clipped_sum_of_rows
from confide.mechanism.clipping.calls import Cluster
from confide.mechanism.clipping.rounding import Tally, Way, room_for_sums, working_type
from confide.mechanism.clipping.rules import linear

CLIP = 1.0
BOTH = (torch.float32, torch.float64)


class Halves(nn.Module):
    """One layer on both halves of a record, whose outputs are subtracted or multiplied."""

    def __init__(self, layer: nn.Module, product: bool = False) -> None:
        super().__init__()
        self.layer, self.product = layer, product

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.layer(half).flatten(1) for half in x.unbind(1))
        return (first * second if self.product else first - second).sum(1)


class Tied(nn.Module):
    """A table that is looked up and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.table(x.long()).mean(1))
        return scores[:, 3] - scores[:, 5]


class TiedTokens(Tied):
    """The same at every position."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.table(x.long()))
        return (scores[..., 3] - scores[..., 5]).mean(1)


class Signs(nn.Module):
    """Rows of one table with alternating signs."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode="sum") if bag else nn.Embedding(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.table(x.long()[:, start::2]).flatten(1).sum(1) for start in (0, 1))
        return first - second


class BilinearRating(nn.Module):
    """A skew product of two tables: nothing for a record that plays against itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.long().unbind(1)
        return (self.left(first) * self.right(second)).sum(1) - (self.left(second) * self.right(first)).sum(1)


class Towers(nn.Module):
    """Products of two towers, or a bilinear layer, and the same with the halves exchanged."""

    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.both = nn.Bilinear(6, 6, 4) if bilinear else None

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unbind(1)
        if self.both is not None:
            return (self.both(first, second) - self.both(second, first)).sum(1) + self.left(first - second).sum(1)
        return (self.left(first) * self.right(second) - self.left(second) * self.right(first)).sum(1)


class OnItself(nn.Module):
    """A layer whose output is its next input, with signs that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.layer(half) for half in x.unbind(1))
        return (self.layer(first) - self.layer(second) + first - second).sum(1)


class Shortened(nn.Module):
    """Half the bits inside: by autocast, or in the layer's own parameters."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, cast: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layer, self.dtype, self.cast = layer if cast else layer.to(dtype), dtype, cast

    def forward(self, x: Tensor) -> Tensor:
        if not self.cast:
            return self.layer(self.first(x).to(self.dtype)).float()  # type: ignore[no-any-return]
        with torch.autocast("cpu", self.dtype):
            return self.layer(x).float()  # type: ignore[no-any-return]


class TwoTypes(nn.Module):
    """A layer in single and one in double precision."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.types = nn.Linear(6, 6).to(first), nn.Linear(6, 4).to(second), (first, second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.types[0])))
        return self.second(hidden.to(self.types[1])).float()  # type: ignore[no-any-return]


class Functional(nn.Module):
    """A child's weight without its call: the fallback serves it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.child.weight, self.child.bias)


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.layer, nn.MultiheadAttention)
        found: Tensor = self.layer(x, x, x, need_weights=False)[0] if attends else self.layer(x)[0]
        return found


def drawn(layer: Any, draws: int = 1) -> nn.Module:
    found: nn.Module = layer.sample_(torch.Generator().manual_seed(1), draws)
    return found


# name: module, shape of a record, types; records of one axis are indices
Kind = tuple[Callable[[], nn.Module], tuple[int, ...], tuple[torch.dtype, ...]]
KINDS: dict[str, Kind] = {
    "tied": (Tied, (8,), BOTH),
    "tied_tokens": (TiedTokens, (8,), BOTH),
    "bag": (lambda: Signs(bag=True), (8,), BOTH),
    "few_hits": (lambda: Signs(bag=False), (8,), BOTH),
    "many_hits": (lambda: Signs(bag=False), (200,), BOTH),
    "bilinear_rating": (BilinearRating, (2,), BOTH),
    "towers": (lambda: Towers(False), (2, 6), BOTH),
    "bilinear": (lambda: Towers(True), (2, 6), BOTH),
    "on_itself": (OnItself, (2, 6), BOTH),
    "product": (lambda: Halves(nn.Linear(6, 4), True), (2, 6), BOTH),
    "positions": (lambda: Halves(nn.Linear(6, 4)), (2, 5, 6), BOTH),
    "many_positions": (lambda: Halves(nn.Linear(6, 4)), (2, 100, 6), BOTH),
    "wide": (lambda: Halves(nn.Linear(64, 64)), (2, 3, 64), BOTH),
    "functional": (lambda: Halves(Functional()), (2, 6), BOTH),
    "cast_bfloat16": (lambda: Halves(Shortened(nn.Linear(6, 4), torch.bfloat16, True)), (2, 6), BOTH[:1]),
    "cast_float16": (lambda: Halves(Shortened(nn.Linear(6, 4), torch.float16, True)), (2, 6), BOTH[:1]),
    "cast_convolution": (lambda: Halves(Shortened(nn.Conv1d(1, 4, 3), torch.bfloat16, True)), (2, 1, 8), BOTH[:1]),
    "bfloat16": (lambda: Halves(Shortened(nn.Linear(6, 4), torch.bfloat16, False)), (2, 6), BOTH[:1]),
    "float16": (lambda: Halves(Shortened(nn.Linear(6, 4), torch.float16, False)), (2, 6), BOTH[:1]),
    "single_double": (lambda: Halves(TwoTypes(*BOTH)), (2, 6), BOTH[:1]),
    "double_single": (lambda: Halves(TwoTypes(*BOTH[::-1])), (2, 6), BOTH[:1]),
    "gru": (lambda: Halves(Sequence(nn.GRU(6, 4, batch_first=True))), (2, 3, 6), BOTH),
    "lstm": (lambda: Halves(Sequence(nn.LSTM(6, 4, batch_first=True))), (2, 3, 6), BOTH),
    "attention": (lambda: Halves(Sequence(nn.MultiheadAttention(6, 2, batch_first=True))), (2, 5, 6), BOTH),
    "convolution": (lambda: Halves(nn.Conv2d(1, 4, 3)), (2, 1, 8, 8), BOTH),
    "groups": (lambda: Halves(nn.Conv1d(4, 4, 3, groups=2)), (2, 4, 9), BOTH),
    "transposed": (lambda: Halves(nn.ConvTranspose2d(1, 3, 3)), (2, 1, 5, 5), BOTH),
    "wide_convolution": (lambda: Halves(nn.Conv2d(3, 32, 5)), (2, 3, 7, 7), BOTH),
    "layer_norm": (lambda: Halves(nn.LayerNorm(6)), (2, 5, 6), BOTH),
    "group_norm": (lambda: Halves(nn.GroupNorm(2, 4)), (2, 4, 5), BOTH),
    "mean_field": (lambda: Halves(drawn(MeanFieldLinear(6, 4))), (2, 6), BOTH),
    "mean_field_positions": (lambda: Halves(drawn(MeanFieldLinear(6, 4))), (2, 5, 6), BOTH),
    "mean_field_convolution": (lambda: Halves(drawn(MeanFieldConv2d(1, 4, 3))), (2, 1, 6, 6), BOTH[:1]),
}


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output.to(y.dtype) - y).square()


def summed(module: nn.Module, x: Tensor, y: Tensor, style: Style = "flat") -> Tensor:
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=x.dtype)
    clip = room_for_sums(CLIP, working_type(module.parameters()))
    clipped_sum(module, squared_error, x, y, clip=clip, out=out, style=style)
    return out.double()


def batch_for(name: str, records: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape, _ = KINDS[name]
    torch.manual_seed(0)
    module = make()
    module = module.double() if dtype == torch.float64 else module
    if len(shape) == 1:
        return module, torch.randint(0, 20, (records, *shape)).to(dtype), torch.randn(records, dtype=dtype)
    return module, torch.randn(records, *shape, dtype=dtype), torch.randn(records, dtype=dtype)


def moves(name: str, dtype: torch.dtype, records: int, style: Style, size: float, target: float) -> float:
    """How far a record of equal parts in the middle of others moves their sum."""
    module, x, y = batch_for(name, records, dtype)
    attacker = torch.full((1, *x.shape[1:]), 7.0 if x.dim() == 2 else size, dtype=dtype)
    middle = records // 2
    together = torch.cat([x[:middle], attacker, x[middle:]])
    targets = torch.cat([y[:middle], torch.tensor([target], dtype=dtype), y[middle:]])
    moved = float((summed(module, together, targets, style) - summed(module, x, y, style)).norm())
    return moved if math.isfinite(moved) else math.inf


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")  # torch's GroupNorm wants gradients without gaps
@pytest.mark.parametrize("name", KINDS)
def test_a_record_that_cancels_moves_the_sum_by_at_most_the_clip(name: str) -> None:
    for dtype in KINDS[name][2]:
        largest = [3e38] if dtype == torch.float32 else [3e38, 1e300]
        for target in (3e9, -3e9, *largest):
            for size, records in ((1.0, 12), (1e10, 12), (1e19, 1)):
                assert moves(name, dtype, records, "flat", size, target) <= CLIP, (dtype, size, records, target)


@pytest.mark.parametrize("style", STYLES[1:])
@pytest.mark.parametrize("name", ["tied", "many_hits", "towers", "attention", "transposed", "single_double"])
def test_in_every_style(name: str, style: Style) -> None:
    assert all(moves(name, torch.float32, 12, style, size, 3e9) <= CLIP for size in (1.0, 1e10))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_in_every_style_alone_and_among_many(name: str, style: Style) -> None:
    for dtype in KINDS[name][2]:
        for records in (0, 1, 300):
            for size in (1e-20, 1.0, 1e10, 1e19):
                assert all(moves(name, dtype, records, style, size, y) <= CLIP for y in (3e9, -3e9, 3e38))


@pytest.mark.parametrize("name", ["few_hits", "positions", "product", "convolution", "functional"])
@pytest.mark.parametrize("dtype", BOTH)
def test_among_thousands(name: str, dtype: torch.dtype) -> None:
    assert moves(name, dtype, 4096, "flat", 1.0, 3e9) <= CLIP


@pytest.mark.parametrize("name", ["positions", "tied", "tied_tokens", "convolution"])
def test_records_that_are_formed_have_the_same_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last way out, where double precision is not enough for the parts of a layer."""
    module, x, y = batch_for(name, 30, torch.float32)
    wanted = summed(module, x, y)
    formed: list[int] = []
    honest = Cluster.add_formed

    def watching(self: Cluster, factors: Tensor, views: list[Tensor]) -> None:
        formed.append(len(factors))
        honest(self, factors, views)

    monkeypatch.setattr(certified, "error", lambda *_: math.inf)
    monkeypatch.setattr(certified, "way_of", lambda *_: Way(1, True))
    monkeypatch.setattr(Cluster, "add_formed", watching)
    few = 4 * torch.finfo(torch.float32).eps * float(wanted.abs().max())  # roundings of the largest entry
    torch.testing.assert_close(summed(module, x, y), wanted, rtol=1e-5, atol=few)
    assert set(formed) == {30}


def test_layers_of_two_types_leave_the_room_of_the_shorter() -> None:
    assert working_type(TwoTypes(*BOTH[::-1]).parameters()) == torch.float32
    assert working_type(nn.Linear(2, 2).double().parameters()) == torch.float64


def test_parts_whose_squares_vanish_have_a_spread() -> None:
    """Squares of 1e-23 are 0 in single precision; beside 1e18 the product is not."""
    left, right = torch.full((2, 3, 4), 1e-23), torch.full((2, 3, 5), 1e18)
    true = float(left[0].double().norm() * right[0].double().norm())
    assert (linear.squared_sizes(left, right).sqrt() >= true).all()
    for sides in ((left, right), (left.transpose(0, 1).contiguous().transpose(0, 1), right)):  # native, and torch
        norms, spreads = linear.ghost_norms(*sides)
        assert (spreads >= true).all()
        assert (norms.sqrt() >= (left[0].double().t() @ right[0].double()).norm()).all()


# sums of very many, and of the largest numbers --------------------------------------------------------------------


def test_a_tally_is_better_than_its_order() -> None:
    tally, plain = Tally([1]), torch.zeros(1, dtype=torch.float64)
    for _ in range(70_000):
        tally.open.add_(0.1)
        tally.added()
        plain.add_(0.1)
    exact = math.fsum([0.1] * 70_000)
    bound = 3 * 65 * 2.0**-53 * exact
    assert abs(tally.total().item() - exact) <= bound
    assert abs(plain.item() - exact) > bound  # the fault that it is there for


@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.parametrize("size", [1e-308, 1e-160, 1.0, 1e160, 1.7e308])
def test_rows_whose_norm_is_no_number(size: float, style: Style) -> None:
    """A hundred entries near the largest number have a norm beyond it."""
    out = torch.zeros(100, dtype=torch.float64)
    clipped_sum_of_rows(torch.full((1, 100), size, dtype=torch.float64), clip=CLIP, out=out, style=style)
    assert out.norm() <= CLIP
    wanted = min(CLIP, 10 * size) if style == "flat" else CLIP * 10 * size / (10 * size + 0.01)
    assert out.norm().item() == pytest.approx(wanted if size < 1e300 else CLIP, rel=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_gradients_whose_norm_is_no_number(style: Style) -> None:
    module = nn.Linear(100, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    out = torch.zeros(100, dtype=torch.float64)
    x = torch.full((1, 100), 1.7e308, dtype=torch.float64)
    clipped_sum(module, lambda output, _: output.squeeze(1), x, None, clip=CLIP, out=out, style=style)
    assert 0.999 * CLIP <= out.norm() <= CLIP
