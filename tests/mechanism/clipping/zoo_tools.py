"""What the zoo is built from: animals, losses and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.layers.bayesian import VariationalDropoutConv2d, VariationalDropoutLinear, draw_

RECORDS = 8
CLASSES = 4
Case = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
ZOO: dict[str, Animal] = {}


@dataclass(frozen=True)
class Animal:
    """`masks`: draws dropout masks inside attention or recurrent layers, in the engine's own order."""

    build: Callable[[], Case]
    masks: bool = False

    def case(self) -> Case:
        torch.manual_seed(0)
        module, loss, x, y = self.build()
        module = module.double()
        draws = next(
            (getattr(layer, "zoo_draws", None) for layer in module.modules() if hasattr(layer, "zoo_draws")), 1
        )
        draw_(module, torch.Generator().manual_seed(5), draws)
        for layer in layers_with_noise_by_row(module):
            layer.sample_(None, draws)
        return module, loss, x, y


def layers_with_noise_by_row(module: nn.Module) -> list[Any]:
    """Rows get noise of their own from torch's generator alone; from any other all records get the same."""
    kinds = VariationalDropoutLinear, VariationalDropoutConv2d
    return [layer for layer in module.modules() if type(layer) in kinds]


def animal(function: Callable[[], Case]) -> Callable[[], Case]:
    ZOO[function.__name__] = Animal(function)
    return function


def classes(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(1), y, reduction="none")


def labels(records: int = RECORDS) -> Tensor:
    return torch.randint(0, CLASSES, (records,))


def floats(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, dtype=torch.float64)


def plain(module: nn.Module, *shape: int) -> Case:
    return module, classes, floats(*shape), labels()


def images(*layers: nn.Module, channels: int = 3, size: int = 7) -> Case:
    """Layers over small images, then a linear layer."""
    body = nn.Sequential(*layers, nn.Flatten())
    x = floats(channels, size, size)
    for layer in body:
        layer.double()
    width = body(x).shape[1]
    return nn.Sequential(body, nn.Linear(width, CLASSES)), classes, x, labels()


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def tokens(count: int, length: int) -> Tensor:
    return torch.randint(0, count, (RECORDS, length))
