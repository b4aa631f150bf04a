"""Memory that lies free between gradients is handed back in large passes, and in no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from confide.mechanism.clipping import clipped_sum, workspace

RECORDS, WIDTH = 8, 64


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


def given_back(limit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """How often in a second step, and its sum."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * WIDTH, 2)]
    module, x, y = nn.Sequential(*layers), torch.randn(RECORDS, 4, WIDTH), torch.randint(2, (RECORDS,))
    total = torch.zeros(sum(weight.numel() for weight in module.parameters()))
    clipped_sum(module, cross_entropy, x, y, clip=1.0, out=total)
    calls: list[None] = []
    monkeypatch.setattr(workspace, "GAPS", limit)
    monkeypatch.setattr(workspace, "give_back", lambda: calls.append(None))
    clipped_sum(module, cross_entropy, x, y, clip=1.0, out=total)
    return len(calls), total


def test_a_large_pass_hands_back_as_often_as_so_many_bytes_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one_layer = RECORDS * 4 * WIDTH * 4
    often, found = given_back(of_one_layer, monkeypatch)
    never, wanted = given_back(100 * of_one_layer, monkeypatch)
    assert often == 2
    assert never == 0
    assert torch.equal(found, wanted)
