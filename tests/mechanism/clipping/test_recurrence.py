"""All steps of an LSTM or a GRU in one node: the layer's own outputs and gradients, and every record alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
