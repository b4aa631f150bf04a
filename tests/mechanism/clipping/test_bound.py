"""No record moves the sum by more than the bound, whatever the record: rounding, overflow, infinities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor, nn

from confide.mechanism.clipping import STYLES, clipped_sum, clipped_sum_of_rows
from confide.mechanism.clipping.factors import Style, clip_factors
from tests.mechanism.clipping.zoo import ZOO

extreme = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1e-45, -1e-38, 1e-23, 1.0, 1e15, -1e19, 1.9e19, 1e30, 3e38, math.inf, math.nan]),
)
bounds = st.floats(1e-10, 1e10)


def matrices(*shape: int) -> st.SearchStrategy[NDArray[object]]:
    return hnp.arrays("float32", shape, elements=extreme)


def half_squares(output: Tensor, y: Tensor) -> Tensor:
    """The gradient of the loss at the output is y itself, so that a test chooses both factors of the gradient."""
    return (output * y).flatten(1).sum(1)


def contribution(module: nn.Module, x: Tensor, y: Tensor, clip: float, style: Style) -> float:
    size = sum(parameter.numel() for parameter in module.parameters())
    total = torch.zeros(size)
    clipped_sum(module, half_squares, x, y, clip=clip, out=total, style=style)
    assert torch.isfinite(total).all()
    return total.double().norm().item()


@settings(max_examples=150, deadline=None)
@given(x=matrices(1, 5), y=matrices(1, 3), clip=bounds, style=st.sampled_from(STYLES), bias=st.booleans())
@example(x=torch.full((1, 5), 1e-23).numpy(), y=torch.full((1, 3), 1e19).numpy(), clip=1e-6, style="flat", bias=False)
def test_linear_layer_at_the_extremes_of_float32(
    x: NDArray[object], y: NDArray[object], clip: float, style: Style, bias: bool
) -> None:
    """Squares that underflow or overflow, infinities and undefined numbers: never more than the bound."""
    module = LINEAR[bias]
    assert contribution(module, torch.from_numpy(x), torch.from_numpy(y), clip, style) <= clip


LINEAR = {bias: nn.Linear(5, 3, bias=bias) for bias in (False, True)}
GHOST = nn.Linear(40, 40)
DIRECT = nn.Linear(3, 2)
SEQUENCE = nn.Linear(9, 9, bias=False)


@settings(max_examples=100, deadline=None)
@given(x=matrices(1, 5, 9), y=matrices(1, 5, 9), clip=bounds, native=st.booleans())
@example(x=torch.full((1, 5, 9), 1e-23).numpy(), y=torch.full((1, 5, 9), 1e18).numpy(), clip=1e-6, native=False)
@example(x=torch.full((1, 5, 9), 1e-23).numpy(), y=torch.full((1, 5, 9), 1e18).numpy(), clip=1e-6, native=True)
def test_ghost_norms_at_the_extremes(x: NDArray[object], y: NDArray[object], clip: float, native: bool) -> None:
    """Gram matrices that underflow on one side while the other is huge would let a record pass unclipped."""
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr("confide.mechanism.clipping.rules.linear.gram_norms", lambda *_: None)
        assert contribution(SEQUENCE, torch.from_numpy(x), torch.from_numpy(y), clip, "flat") <= clip


@settings(max_examples=100, deadline=None)
@given(x=matrices(1, 12, 3), y=matrices(1, 12, 2), clip=bounds)
def test_sequences_formed_in_full_at_the_extremes(x: NDArray[object], y: NDArray[object], clip: float) -> None:
    assert contribution(DIRECT, torch.from_numpy(x), torch.from_numpy(y), clip, "flat") <= clip


@settings(max_examples=60, deadline=None)
@given(scale=st.floats(1e-10, 1e10), clip=bounds, seed=st.integers(0, 100))
def test_ghost_norms_of_terms_that_cancel(scale: float, clip: float, seed: int) -> None:
    """Two positions with opposite gradients: the true gradient is almost zero, the terms are huge.

    Without the guard on ghost norms the norm rounds to zero, and the rounding of the sum passes unclipped.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 40, generator=generator).expand(1, 2, 40) * scale
    y = torch.randn(1, 1, 40, generator=generator) * torch.tensor([1.0, -1.0]).view(1, 2, 1)
    x = x + torch.randn(1, 2, 40, generator=generator) * scale * 1e-7
    assert contribution(GHOST, x, y, clip, "flat") <= clip


@settings(max_examples=150, deadline=None)
@given(rows=matrices(1, 7), clip=bounds, style=st.sampled_from(["flat", "automatic"]))
def test_rows_at_the_extremes_of_float32(rows: NDArray[object], clip: float, style: Style) -> None:
    total = torch.zeros(7)
    norms = clipped_sum_of_rows(torch.from_numpy(rows), clip=clip, out=total, style=style)
    assert torch.isfinite(total).all()
    assert torch.isfinite(norms).all()
    assert total.double().norm().item() <= clip


def test_rows_are_clipped_and_added() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.inf, 0.0], [1e30, 0.0]])
    total = torch.ones(2)
    norms = clipped_sum_of_rows(rows, clip=1.0, out=total)
    torch.testing.assert_close(norms, torch.tensor([5.0, 0.5, 0.0, 1e30], dtype=torch.float64))
    torch.testing.assert_close(total, torch.tensor([1 + 0.6 + 0.3 + 1.0, 1 + 0.8 + 0.4]))


def test_rows_need_float64_sums() -> None:
    """A million small rows on top of a large sum would vanish one by one in float32."""
    rows = torch.full((1_000_000, 1), 1e-3)
    total = torch.full((1,), 1e5)
    clipped_sum_of_rows(rows, clip=1.0, out=total)
    assert abs(total.item() - 101_000) < 1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["mlp", "mnist_network", "transformer", "tied_weights", "gru", "mean_field_4_draws"])
def test_one_record_moves_the_sum_by_at_most_the_bound(name: str, style: Style) -> None:
    """With the record and without it: the definition of the sensitivity, over neighbouring batches."""
    module, loss, x, y = ZOO[name].case()
    size = sum(parameter.numel() for parameter in module.parameters())
    clip = 1e-2
    everyone, without = torch.zeros(2, size, dtype=torch.float64)
    clipped_sum(module, loss, x, y, clip=clip, out=everyone, style=style)
    clipped_sum(module, loss, x[1:], y[1:], clip=clip, out=without, style=style)
    moved = (everyone - without).norm().item()
    assert clip * 0.1 < moved <= clip


def test_factor_stays_below_the_bound_in_float32() -> None:
    """norm * C / norm exceeds C for about a third of all norms in float32; the slack takes that away."""
    norms = torch.rand(100_000) * 10 + 1e-3
    clip = 0.7
    naive = norms * (clip / norms)
    assert (naive.double() > clip).any()
    assert (norms * clip_factors(norms, clip)).double().max() <= clip


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["mlp", "mnist_network", "linear_on_long_sequences", "gru", "layer_without_a_rule",
                                  "mean_field_1_draws", "bare_parameter", "windows_folded_into_the_batch"])  # fmt: skip
def test_records_that_are_not_finite_count_as_zero(name: str, poison: float) -> None:
    """The sum is that of the other records, to the last bit of precision asked for; 0 * inf never enters it."""
    module, loss, x, y = ZOO[name].case()
    module.float()
    for layer in module.modules():
        if hasattr(layer, "sample_"):
            layer.sample_()
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x = x.float()
    x[2] = poison
    size = sum(parameter.numel() for parameter in module.parameters())
    found, wanted = torch.zeros(2, size)
    keep = torch.arange(len(x)) != 2
    norms = clipped_sum(module, loss, x, y, clip=0.1, out=found)
    expected = clipped_sum(module, loss, x[keep], y[keep], clip=0.1, out=wanted)
    assert norms[2] == 0
    torch.testing.assert_close(norms[keep], expected)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_gradient_whose_squares_overflow_is_clipped_like_any_other() -> None:
    """Finite entries whose squares are not: the record has a norm, and moves the sum by the bound."""
    module, loss, x, y = ZOO["mlp"].case()
    module, x = module.float(), x.float()
    x[2] = 1e25
    size = sum(parameter.numel() for parameter in module.parameters())
    found, wanted = torch.zeros(2, size)
    norms = clipped_sum(module, loss, x, y, clip=0.1, out=found)
    keep = torch.arange(len(x)) != 2
    clipped_sum(module, loss, x[keep], y[keep], clip=0.1, out=wanted)
    assert norms[2] > 0.1
    assert 0.099 < (found.double() - wanted).norm() <= 0.1


def test_all_records_not_finite() -> None:
    module, loss, x, y = ZOO["mlp"].case()
    total = torch.ones(sum(parameter.numel() for parameter in module.parameters()), dtype=torch.float64)
    norms = clipped_sum(module, loss, x * math.nan, y, clip=1.0, out=total)
    assert (norms == 0).all()
    assert (total == 1).all()


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan, 1e-30])
def test_impossible_bounds_are_refused(clip: float) -> None:
    module, loss, x, y = ZOO["mlp"].case()
    with pytest.raises(ValueError, match="clip="):
        clipped_sum(module.float(), loss, x.float(), y, clip=clip, out=torch.zeros(10))
