"""The models that the contenders train, each with a batch of random records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.models.likelihoods import Bernoulli


@dataclass(frozen=True)
class Case:
    """A model, a batch for it and the loss of every record."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    @property
    def batch(self) -> int:
        return len(self.x)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mnist_cnn() -> nn.Sequential:
    """The convolutional network of the MNIST tutorials of Opacus and TensorFlow Privacy."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class Attention(nn.Module):
    """Self-attention out of ordinary linear layers, which every contender knows how to handle."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(-1, (3, self.heads, -1)).movedim(-2, -4)  # heads before positions
        query, key, value = split.unbind(-2)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        mixed = scores.softmax(-1) @ value
        merged: Tensor = self.merge(mixed.transpose(-3, -2).flatten(-2))
        return merged


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        widened = F.gelu(self.widen(self.second(x)), approximate="tanh")
        narrowed: Tensor = self.narrow(widened)
        return x + narrowed


class Transformer(nn.Module):
    """Token embedding with fixed positions, two blocks, the mean over positions, a linear read-out."""

    positions: Tensor

    def __init__(self, vocabulary: int = 1000, length: int = 64, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.register_buffer("positions", sinusoids(length, width))
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        said: Tensor = self.read(self.norm(self.blocks(self.embed(tokens) + self.positions)).mean(-2))
        return said


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as sines and cosines of growing wavelength (Vaswani et al. 2017)."""
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def images(batch: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.rand(batch, *shape), torch.randint(10, (batch,))


def logistic_data(batch: int, features: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, features), torch.randint(2, (batch,)).float()


BUILDERS: dict[str, Callable[[], Case]] = {
    "mlp1200": lambda: Case("mlp1200", mlp(784, 1200, 1200, 10), *images(256, 784), cross_entropy),
    "cnn": lambda: Case("cnn", mnist_cnn(), *images(256, 1, 28, 28), cross_entropy),
    "logistic": lambda: Case("logistic", nn.Linear(100, 1), *logistic_data(512, 100), Bernoulli().loss),
    "mlp1000": lambda: Case("mlp1000", mlp(784, 1000, 10), *images(600, 784), cross_entropy),
    "transformer": lambda: Case(
        "transformer",
        Transformer(),
        torch.randint(1000, (64, 64)),
        torch.randint(2, (64,)),
        cross_entropy,
    ),
}


# The same kinds of layers with a few weights and records, for what a contender does only once.
TINY: dict[str, Callable[[], Case]] = {
    "mlp1200": lambda: Case("mlp1200", mlp(8, 8, 8, 10), *images(4, 8), cross_entropy),
    "cnn": lambda: Case("cnn", mnist_cnn(), *images(4, 1, 28, 28), cross_entropy),
    "logistic": lambda: Case("logistic", nn.Linear(5, 1), *logistic_data(4, 5), Bernoulli().loss),
    "mlp1000": lambda: Case("mlp1000", mlp(8, 8, 10), *images(4, 8), cross_entropy),
    "transformer": lambda: Case(
        "transformer",
        Transformer(20, 4, 8, 2),
        torch.randint(20, (4, 4)),
        torch.randint(2, (4,)),
        cross_entropy,
    ),
}


def build(name: str, tiny: bool = False) -> Case:
    """The same weights and records for every contender."""
    torch.manual_seed(0)
    return (TINY if tiny else BUILDERS)[name]()
