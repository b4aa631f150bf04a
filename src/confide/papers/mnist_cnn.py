"""A small convolutional network for MNIST, every weight of which is learnt from the private records.

Its features are brought to mean 0 and a fixed size for each image by itself, so that a layer's noise does not change
the size of what the next one reads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUT_NORM = 16.0
FILTERS = (8, 16)
FEATURE_SIZE = 0.5
"""Root mean square of the last layer's inputs: below 1 its gradients leave more of the clip to the convolutions."""
DESCRIPTION = (
    f"{FILTERS[0]} filters (7 x 7 with stride 2 on images of 28 x 28), ReLU, means over 2 x 2, {FILTERS[1]} filters of "
    "3 x 3, ReLU, softmax layer, all of it learnt privately from a random start, with no fixed filter; every image is "
    f"normalised by itself (mean 0, norm {INPUT_NORM:g}), and so is what each convolution makes of it"
)


def normalised(rows: Tensor) -> Tensor:
    """Every record without its own mean and of norm 1; no other record is looked at."""
    flat = rows.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    length: Tensor = centred.norm(dim=1, keepdim=True)
    return (centred / length.clamp(min=1e-6)).view(rows.shape)


def encoded(images: Tensor) -> Tensor:
    """Inputs of the network, one row for each image."""
    return INPUT_NORM * normalised(images.flatten(1))


def learnt_cnn(side: int, classes: int, seed: int, dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions and a softmax layer with random weights; images of 8 x 8 have smaller filters."""
    kernel, stride = (7, 2) if side >= 20 else (3, 1)
    cells = (side // stride // 2) ** 2
    first, second = FILTERS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        masks = [nn.Dropout(dropout)] if dropout > 0 else []
        return nn.Sequential(
            nn.Unflatten(1, (1, side, side)),
            nn.Conv2d(1, first, kernel, stride, kernel // 2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            _of_size(first, 1.0),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            _of_size(second, FEATURE_SIZE),
            nn.Flatten(),
            *masks,
            nn.Linear(second * cells, classes),
        )


def _of_size(channels: int, size: float) -> nn.GroupNorm:
    """An image's features with mean 0 and root mean square `size`; nothing in it is learnt."""
    layer = nn.GroupNorm(1, channels)
    nn.init.constant_(layer.weight, size)
    layer.requires_grad_(False)
    return layer
