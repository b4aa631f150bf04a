"""A network for students that is not linear in its inputs: smooth functions of public inputs, then a softmax layer.

Its fixed part is the Gaussian kernel around landmarks among the public inputs, in the leading directions of that kernel
(Williams and Seeger, NIPS 2001). All of it follows from public inputs; only the softmax layer is learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from confide.models.networks import softmax
from confide.pate.graphs import principal_directions

LEAST_EIGENVALUE = 1e-6
"""Of the first one: directions below it are rounding errors that a division would blow up."""


class KernelFeatures(nn.Module):
    """exp(-|z - l|^2 / 2 h^2) for every landmark l, turned into the leading directions of that kernel, half whitened.

    z are an input's coordinates along the leading directions of the public inputs; h is `width` times the median
    distance of two landmarks.
    """

    centre: Tensor
    turned: Tensor
    places: Tensor
    reach: Tensor
    directions: Tensor

    def __init__(self, inputs: Tensor, *, dimensions: int, landmarks: int, width: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        centre, turned = principal_directions(inputs, dimensions, generator)
        chosen = torch.randperm(len(inputs), generator=generator)[:landmarks]
        places = (inputs[chosen].flatten(1).float() - centre) @ turned
        self.register_buffer("centre", centre)
        self.register_buffer("turned", turned)
        self.register_buffer("places", places)
        self.register_buffer("reach", width * torch.pdist(places).median().clamp(min=1e-12))
        values, vectors = torch.linalg.eigh(self._kernel(places).double())
        kept = values > LEAST_EIGENVALUE * values[-1]
        # Features along the kernel's directions have variances of values / landmarks. Half of that power is taken out,
        # as of the inputs' own directions, so that plain steps get to the end in all of them.
        scale = values[kept].pow(-0.75) * values[-1].pow(0.25)
        self.register_buffer("directions", (vectors[:, kept] * scale).float())

    @property
    def size(self) -> int:
        return self.directions.shape[1]

    def _kernel(self, coordinates: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(coordinates, self.places).square() / (2 * self.reach**2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._kernel((x.flatten(1).float() - self.centre) @ self.turned) @ self.directions
        return found


def kernel_network(
    inputs: Tensor, classes: int, *, dimensions: int = 200, landmarks: int = 1500, width: float = 0.5, seed: int = 0
) -> nn.Module:
    """For `Supervised(module=...)`: softmax regression on smooth functions of public inputs."""
    features = KernelFeatures(inputs, dimensions=dimensions, landmarks=landmarks, width=width, seed=seed)
    return nn.Sequential(features, softmax(features.size, classes))
