"""A network that is linear in a Gaussian kernel's values at fixed public points, its landmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GaussianKernel(nn.Module):
    """exp(-|z - l|^2 / 2 h^2) for every landmark l, with z along the leading directions of the public inputs."""

    centre: Tensor
    turned: Tensor
    places: Tensor
    reach: Tensor

    def __init__(self, centre: Tensor, turned: Tensor, places: Tensor, reach: Tensor) -> None:
        super().__init__()
        for name, value in (("centre", centre), ("turned", turned), ("places", places), ("reach", reach)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        coordinates = (x.flatten(1).float() - self.centre) @ self.turned
        return torch.exp(-torch.cdist(coordinates, self.places).square() / (2 * self.reach**2))


class KernelNetwork(nn.Sequential):
    """The kernel's values, then one linear layer, which is what is learnt."""

    def __init__(self, kernel: GaussianKernel, outputs: int) -> None:
        with torch.random.fork_rng(devices=[]):  # the values to start from do not count
            super().__init__(kernel, nn.Linear(len(kernel.places), outputs))

        self.outputs = outputs
