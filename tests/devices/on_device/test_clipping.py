"""Clipped sums on the device: those of the host, for layers of every kind, and never by an address."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.mechanism.clipping import clipped_sum
from confide.mechanism.clipping import engine as engines
from confide.models.likelihoods import Categorical

pytestmark = pytest.mark.gpu
RECORDS = 5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.table(x) + self.places).mean(1))
        return out


class Squared(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.form(x, x)
        return out


class Own(torch.autograd.Function):
    """A function with a backward of its own, which may run in a thread of the device."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return 2 * values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class WithOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Own.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return out


class Alone(WithOwn):
    """Asks for a number, which vmap cannot give, so that records go one by one."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if out.sum().item() > 0 else 2 * out


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    vectors, images, words = torch.randn(RECORDS, 6), torch.randn(RECORDS, 1, 6, 6), torch.randint(20, (RECORDS, 6))
    return {
        "chain": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), vectors),
        "images": (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
            images,
        ),
        "words": (Encoder(), words),
        "no rule": (Squared(), vectors),
        "own function": (WithOwn(), vectors),
        "alone": (Alone(), vectors),
    }


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")  # what runs one by one says so
@pytest.mark.parametrize(
    ("style", "loss"), [("flat", Categorical(3).loss), ("per-layer", own_loss)], ids=["flat", "per layer, own loss"]
)
@pytest.mark.parametrize("kind", ["chain", "images", "words", "no rule", "own function", "alone"])
def test_sums_are_those_of_the_host(kind: str, style: Any, loss: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    module, x = models()[kind]
    y = torch.randint(3, (RECORDS,))
    size = sum(value.numel() for value in module.parameters())
    here, there = torch.zeros(size), torch.zeros(size, device=device)
    norms = clipped_sum(copy.deepcopy(module), loss, x, y, clip=0.5, style=style, out=here)
    found = clipped_sum(module.to(device), loss, x.to(device), y.to(device), clip=0.5, style=style, out=there)
    assert found.device == there.device == device
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.cpu(), norms.to(found.dtype), atol=1e-4, rtol=1e-4)


def test_a_batch_goes_in_pieces_where_memory_is_short(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, _ = models()["images"]
    x, y = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
    size = sum(value.numel() for value in module.parameters())
    sums, pieces = [], []
    cut = engines.Batch.pieces

    def counted(self: engines.Batch, largest: int) -> list[engines.Batch]:
        found = cut(self, largest)
        pieces[-1] = len(found)
        return found

    monkeypatch.setattr(engines.Batch, "pieces", counted)
    for free in (1 << 34, 1 << 17):
        pieces.append(1)
        monkeypatch.setattr(engines, "free_bytes", lambda _, free=free: free)
        out = torch.zeros(size, device=device)
        clipped_sum(copy.deepcopy(module).to(device), own_loss, x.to(device), y.to(device), clip=0.5, out=out)
        sums.append(out.cpu())
    assert pieces[0] == 1
    assert pieces[-1] > 1
    torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)
