"""Networks of kinds that the other two tables lack: bases on every edge, complex weights, weights that a network makes,
weights that are used twice, steps of a differential equation, cells that convolve.

They stand in one table with those of `architectures`, which says how they are used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.data import Input, Schema
from tests.running.architectures import RECORDS, Task, task


def about_first_number(module: nn.Module, features: int = 5) -> Task:
    x = torch.randn(RECORDS, features)
    schema = Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-4, 4))})
    return Task(module, x, (x[:, 0] > 0).long(), schema)


class BasesOnEdges(nn.Module):
    """Liu et al. 2024: every edge is a function of its own, a sum of radial bases."""

    centres: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 6))
        self.first, self.second = (nn.Parameter(0.3 * torch.randn(*size, 6)) for size in ((8, 5), (2, 8)))
        self.beside, self.drop = nn.Parameter(0.3 * torch.randn(8, 5)), nn.Dropout(0.1)

    def edges(self, x: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bik,oik->bo", torch.exp(-2 * (x.unsqueeze(-1) - self.centres).square()), weights)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.edges(x, self.first) + F.silu(x) @ self.beside.t()
        return self.edges(torch.tanh(self.drop(inner)), self.second)


@task
def bases_on_edges() -> Task:
    return about_first_number(BasesOnEdges())


class ComplexWeights(nn.Module):
    """A complex layer after a Fourier transform; its weights are pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(0.4 * torch.randn(8, 5)) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.fft.fft(x, dim=1) @ torch.complex(self.real, self.imaginary).t()
        inner = inner * torch.sigmoid(inner.abs())
        found: Tensor = self.head(self.drop(torch.cat([inner.real, inner.imag], 1)))
        return found


@task
def complex_weights() -> Task:
    return about_first_number(ComplexWeights())


class MadeWeights(nn.Module):
    """Ha et al. 2017: some inputs make the weights that meet the others."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.drop, self.head = nn.Linear(2, 24), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.maker(x[:, 3:]).view(-1, 8, 3)
        found: Tensor = self.head(self.drop(torch.tanh(torch.bmm(weights, x[:, :3, None]).squeeze(2))))
        return found


@task
def made_weights() -> Task:
    return about_first_number(MadeWeights())


class TiedAutoencoder(nn.Module):
    """What goes in comes out by the same weights, transposed, outside of their layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.back = nn.Linear(6, 4), nn.Parameter(torch.zeros(6))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(x))
        left = x - F.linear(code, self.encoder.weight.t(), self.back)
        found: Tensor = self.head(self.drop(torch.cat([code, left], 1)))
        return found


@task
def tied_autoencoder() -> Task:
    return about_first_number(TiedAutoencoder(), 6)


class Flow(nn.Module):
    """Chen et al. 2018: four midpoint steps along a field that a network knows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.field = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 8))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 2)

    def slope(self, place: Tensor, time: float) -> Tensor:
        found: Tensor = self.field(torch.cat([place, place.new_full((len(place), 1), time)], 1))
        return found

    def forward(self, x: Tensor) -> Tensor:
        place = self.enter(x)
        for step in range(4):
            half = place + 0.125 * self.slope(place, step / 4)
            place = place + 0.25 * self.slope(half, step / 4 + 0.125)
        found: Tensor = self.head(self.drop(place))
        return found


@task
def flow() -> Task:
    return about_first_number(Flow())


class ConvolvingCell(nn.Module):
    """Shi et al. 2015: a recurrent cell whose gates are convolutions, over three pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.drop, self.head = nn.Conv2d(5, 16, 3, padding=1), nn.Dropout(0.1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        shown = kept = x.new_zeros(len(x), 4, *x.shape[3:])
        for time in range(x.shape[1]):
            enter, keep, show, new = self.gates(torch.cat([x[:, time], shown], 1)).chunk(4, 1)
            kept = torch.sigmoid(keep) * kept + torch.sigmoid(enter) * torch.tanh(new)
            shown = torch.sigmoid(show) * torch.tanh(kept)
        found: Tensor = self.head(self.drop(shown.mean((2, 3))))
        return found


@task
def convolving_cell() -> Task:
    y = torch.arange(RECORDS) % 2
    x = torch.randn(RECORDS, 3, 1, 6, 6) + (2.0 * y - 1).view(-1, 1, 1, 1, 1)
    return Task(ConvolvingCell(), x, y, Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-5, 5))}))
