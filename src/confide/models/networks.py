"""Networks by recipe: linear, logistic and softmax regression are an MLP without hidden layers.

A recipe is plain data, so that a saved posterior can rebuild its network without pickle.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import Refusal

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class Recipe:
    """A fully connected network: features -> hidden... -> outputs."""

    features: int
    outputs: int
    hidden: tuple[int, ...] = ()
    activation: str = "relu"

    def __post_init__(self) -> None:
        for name, width in (("features", self.features), ("outputs", self.outputs)):
            if width < 1:
                raise Refusal(f"{name}={width}: must be at least 1")
        if any(width < 1 for width in self.hidden):
            raise Refusal(f"hidden={self.hidden}: every hidden layer needs at least one unit")
        if self.activation not in ACTIVATIONS:
            raise Refusal(f"activation={self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        return cls(**{**values, "hidden": tuple(values.get("hidden", ()))})


class MLP(nn.Sequential):
    """The network of a recipe. Weights start from `generator`; a network without hidden layers starts at zero."""

    def __init__(self, recipe: Recipe, generator: torch.Generator | None = None) -> None:
        widths = (recipe.features, *recipe.hidden, recipe.outputs)
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise(widths):
            layers += [
                _linear(width_in, width_out, bool(recipe.hidden), generator),
                ACTIVATIONS[recipe.activation](),
            ]
        super().__init__(*layers[:-1])
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x.flatten(1))  # type: ignore[no-untyped-call]
        return output


class Shift(nn.Module):
    """Inputs less a public vector, times a public number; without parameters."""

    centre: Tensor

    def __init__(self, centre: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("centre", centre.detach().clone())
        self.scale = float(scale)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.centre) * self.scale


def recipe_of(module: nn.Module) -> Recipe | None:
    """The recipe of a network of confide's own, also where a method has put other layers in it; None for any other."""
    return module.recipe if isinstance(module, MLP) else None


def _linear(width_in: int, width_out: int, random: bool, generator: torch.Generator | None) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width_in, width_out)
    bound = 1 / math.sqrt(width_in) if random else 0.0
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


def linear(features: int, outputs: int = 1) -> MLP:
    """Linear regression."""
    return MLP(Recipe(features, outputs))


def logistic(features: int) -> MLP:
    """Logistic regression: one logit, for the Bernoulli likelihood."""
    return MLP(Recipe(features, 1))


def softmax(features: int, classes: int) -> MLP:
    """Softmax regression: one logit per class."""
    return MLP(Recipe(features, classes))


def mlp(
    features: int,
    outputs: int,
    hidden: tuple[int, ...] = (64,),
    activation: str = "relu",
    generator: torch.Generator | None = None,
) -> MLP:
    """A fully connected network with the given hidden widths."""
    return MLP(Recipe(features, outputs, tuple(hidden), activation), generator)
