"""All steps of an LSTM or a GRU in one node: the layer's own outputs and gradients, and every record alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide._native import recurrence as native
from confide._native.loader import library
from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping.evenly import even_size
from confide.mechanism.clipping.rules import recurrence, recurrent

CLIP, RECORDS, STEPS = 0.3, 8, 4


class Read(nn.Module):
    """Outputs of all steps but the first and the last states, so that every gradient comes from two sides."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.layer(x)
        ends = states if isinstance(states, tuple) else (states,)
        beside = sum(end.transpose(0, 1).flatten(1).tanh().sum(1, keepdim=True) for end in ends)
        found: Tensor = self.head(outputs[:, 1:].mean(1)) + beside
        return found


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


def difference(kind: type[nn.RNNBase], **options: Any) -> float:
    torch.manual_seed(0)
    module = Read(kind, **options).double()
    x, y = 3 * torch.randn(RECORDS, STEPS, 3, dtype=torch.float64), torch.randint(2, (RECORDS,))
    weights = list(module.parameters())
    found = torch.zeros(sum(weight.numel() for weight in weights), dtype=torch.float64)
    clipped_sum(module, cross_entropy, x, y, clip=CLIP, out=found)
    wanted = torch.zeros_like(found)
    for row, label in zip(x.split(1), y.split(1), strict=True):
        each = torch.autograd.grad(cross_entropy(module(row), label).sum(), weights)
        flat = torch.cat([value.flatten() for value in each])
        wanted += flat * min(1.0, CLIP / float(flat.norm()))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_sums_are_those_of_records_alone(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    assert difference(kind, **options) < 1e-12


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_steps_are_one_node(kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch) -> None:
    name, called = "lstm_steps" if kind is nn.LSTM else "gru_steps", []
    steps = getattr(recurrent, name)
    monkeypatch.setattr(recurrent, name, lambda *given: called.append(len(given[0])) or steps(*given))
    assert difference(kind) < 1e-12
    assert called[-1] in (RECORDS, even_size(RECORDS, 32))


def test_a_step_asks_for_no_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the examination of a whole pass does."""
    asked: list[bool] = []
    is_asked = recurrence._is_asked
    monkeypatch.setattr(recurrence, "_is_asked", lambda node: asked.append(is_asked(node)) or asked[-1])
    module, x, y = Read(nn.LSTM), torch.randn(RECORDS, STEPS, 3), torch.randint(2, (RECORDS,))
    found = torch.zeros(sum(weight.numel() for weight in module.parameters()))
    clipped_sum(module, cross_entropy, x, y, clip=CLIP, out=found)
    assert any(asked)
    asked.clear()
    clipped_sum(module, cross_entropy, x, y, clip=CLIP, out=found)
    assert asked
    assert not any(asked)


needs_library = pytest.mark.skipif(library() is None, reason="the native library is not built")
SHAPES = [(7, 3, 5), (1, 4, 16), (13, 2, 33), (64, 9, 12)]


def maps_of(records: int, steps: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return 2 * torch.randn(records, steps, 4 * size), torch.randn(4 * size, size) / size**0.5, torch.randn(4 * size)


def both_ways(maps: Tensor, weight: Tensor, bias: Tensor | None, backwards: bool, by_kernel: bool) -> list[Tensor]:
    """Outputs, and the gradient at the maps for one at all outputs and both last states."""
    forward = native.lstm if by_kernel else recurrence._lstm_by_torch
    back = native.lstm_back if by_kernel else recurrence._lstm_back_by_torch
    gates = maps.clone()
    found = forward(gates, weight, bias, backwards)
    gates, outputs, cells, bent = (gates, *found) if by_kernel else found
    torch.manual_seed(2)
    drawn = torch.randn(1, *outputs.shape[1:]), *torch.randn(2, 1, outputs.shape[2])  # the same for all records
    given = [one.expand(len(maps), *one.shape[1:]).to(maps) for one in drawn]
    return [outputs, back((gates, cells, bent), weight, backwards, given[0], given[1].clone(), given[2].clone())]


@needs_library
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_what_torch_gives(shape: tuple[int, int, int], backwards: bool) -> None:
    maps, weight, bias = maps_of(*shape)
    exact = both_ways(maps.double(), weight.double(), bias.double(), backwards, False)
    for one, other in zip(both_ways(maps, weight, bias, backwards, True), exact, strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 2e-6


@needs_library
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_a_record_the_same_bits_at_every_place(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, weight, bias = maps_of(*shape)
    whole = both_ways(maps, weight, bias, False, True)
    alone = [both_ways(one, weight, bias, False, True) for one in maps.split(1)]
    turned = both_ways(maps.flip(0), weight, bias, False, True)
    monkeypatch.setattr(native, "THREAD_PRODUCTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = both_ways(maps, weight, bias, False, True)
    for kind, one in enumerate(whole):
        assert torch.equal(one, torch.cat([each[kind] for each in alone]))
        assert torch.equal(one, turned[kind].flip(0))
        assert torch.equal(one, shared[kind])


@needs_library
def test_what_is_not_a_number_stays_so_in_its_record() -> None:
    """And so does what is infinite, as torch has it."""
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-5, 90.0, -90.0, 3e38, torch.inf, -torch.inf, torch.nan])
    maps = torch.zeros(3, 1, 4 * len(values))
    maps[1] = values.repeat(4)
    weight = torch.zeros(4 * len(values), len(values))
    gates = maps.clone()
    outputs, cells, bent = native.lstm(gates, weight, None, False)
    wanted = recurrence._lstm_by_torch(maps, weight, None, False)
    for one, other in zip((gates, outputs, cells, bent), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-37, equal_nan=True)
    assert outputs[1].isnan().any()
    assert not outputs[::2].isnan().any()


@needs_library
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
def test_sums_are_the_same_without_the_kernel(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Tensor:
        torch.manual_seed(0)
        module, x, y = Read(nn.LSTM, **options), torch.randn(RECORDS, STEPS, 3), torch.randint(2, (RECORDS,))
        total = torch.zeros(sum(weight.numel() for weight in module.parameters()))
        clipped_sum(module, cross_entropy, x, y, clip=CLIP, out=total)
        return total

    called: list[int] = []
    steps = native.lstm
    monkeypatch.setattr(recurrence, "lstm", lambda *given: called.append(len(given[0])) or steps(*given))
    by_kernel = found()
    assert called
    monkeypatch.setattr(recurrence, "lstm_fits", lambda *given: False)
    torch.testing.assert_close(found(), by_kernel, rtol=2e-5, atol=2e-6)
