"""Networks of the Bayesian GAN: discriminators and generators, and the views under which a discriminator sees images.

A view is one small shift, turn, shear and scale of the whole picture, drawn afresh for a step. It is public chance and
the same map for every record of that step, real or fake, so that a record still has one gradient of its own, and no
record tells anything of another.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 0.2
"""Of a unit that is off, so that a discriminator tells a generator where to go there too (docs/protocols.md)."""
TURN, SCALE, SHEAR, SHIFT = 0.26, 0.12, 0.15, 1 / 7
"""Furthest view: radians, parts of the size, slope, and parts of half the width; two pixels of 28."""
BLANK = -1.0
"""What lies outside of a picture whose pixels are in [-1, 1]."""


class View(nn.Module):
    """Flat pictures as squares of one channel, seen under the view that was drawn last; at first as they are."""

    grid: Tensor

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.side = math.isqrt(pixels)
        self.register_buffer("grid", self._grid(torch.eye(2, 3)), persistent=False)

    def renew(self) -> None:
        """Draw another view, from the public generator that draws starts and fakes."""
        turn, scale, shear, across, down = (2 * torch.rand(5) - 1).tolist()
        cosine, sine, size = math.cos(TURN * turn), math.sin(TURN * turn), 1 + SCALE * scale
        rows = [
            [size * cosine, SHEAR * shear - size * sine, SHIFT * across],
            [sine / size, cosine / size, SHIFT * down],
        ]
        self.grid = self._grid(torch.tensor(rows))

    def forward(self, x: Tensor) -> Tensor:
        squares = x.reshape(-1, 1, self.side, self.side)
        grid = self.grid.expand(len(squares), -1, -1, -1)
        return F.grid_sample(squares - BLANK, grid, align_corners=False) + BLANK

    def _grid(self, affine: Tensor) -> Tensor:
        return F.affine_grid(affine[None], [1, 1, self.side, self.side], align_corners=False)


def dense_network(inputs: int, hidden: int, outputs: int, last: nn.Module | None = None) -> nn.Sequential:
    """Two hidden layers of one width."""
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    layers = [first, nn.LeakyReLU(SLOPE), second, nn.LeakyReLU(SLOPE), nn.Linear(hidden, outputs)]
    return nn.Sequential(*layers, *([] if last is None else [last]))


def judge_network(inputs: int, hidden: int, outputs: int, filters: tuple[int, ...]) -> nn.Sequential:
    """A discriminator: dense without filters; else views, convolutions of 5 x 5 with stride 2, one hidden layer."""
    if not filters:
        return dense_network(inputs, hidden, outputs)
    layers: list[nn.Module] = [View(inputs)]
    side, channels = math.isqrt(inputs), 1
    for count in filters:
        layers += [nn.Conv2d(channels, count, 5, 2, 2), nn.LeakyReLU(SLOPE)]
        side, channels = (side + 1) // 2, count
    layers += [nn.Flatten(), nn.Linear(channels * side * side, hidden), nn.LeakyReLU(SLOPE), nn.Linear(hidden, outputs)]
    return nn.Sequential(*layers)


def renew_view(network: nn.Sequential) -> None:
    """Another view for the next step; nothing for a network without views."""
    if isinstance(network[0], View):
        network[0].renew()


def features(network: nn.Sequential, x: Tensor) -> Tensor:
    """The last hidden layer of a discriminator, in a unit in which its norm is about 1."""
    found: Tensor = network[:-1](x)
    return found / math.sqrt(found.shape[1])


def inputs_of_units(network: nn.Module) -> Tensor:
    """Of the unit that a weight belongs to; 1 for a bias."""
    parts = [
        torch.full((parameter.numel(),), float(parameter[0].numel() if parameter.dim() > 1 else 1))
        for parameter in network.parameters()
    ]
    return torch.cat(parts)
