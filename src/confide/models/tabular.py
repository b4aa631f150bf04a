"""The network for tables: an additive model, and beside it a fully connected network for what effects cannot say.

    f(x) = effects(x) + unit * network(z)

z holds every number once, on the quantile scale of the effects (its first cosine), and the categories. Scales are
buffers, see `confide.models.additive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confide.models.additive import WAVES, AdditiveNetwork, AdditiveRecipe
from confide.models.networks import MLP, Recipe


@dataclass(frozen=True)
class TabularRecipe:
    """effects  the additive part
    hidden   widths of the network's hidden layers
    """

    effects: AdditiveRecipe
    hidden: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return self.effects.outputs

    @property
    def network(self) -> Recipe:
        return Recipe(len(self.effects.numbers) + len(self.effects.categories), self.outputs, self.hidden)

    def to_dict(self) -> dict[str, Any]:
        return {"effects": self.effects.to_dict(), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TabularRecipe:
        return cls(AdditiveRecipe.from_dict(values["effects"]), tuple(values["hidden"]))


class TabularNetwork(nn.Module):
    """The network of a recipe.

    chosen   places of the features that the network sees
    scales   by which it multiplies them: what the additive part multiplied them by is taken off again
    unit     of the network's outputs
    """

    chosen: Tensor
    scales: Tensor
    unit: Tensor

    def __init__(self, recipe: TabularRecipe, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.effects = AdditiveNetwork(recipe.effects)
        self.network = MLP(recipe.network, generator)
        effects = recipe.effects
        first = [1 + place * effects.waves for place in range(len(effects.numbers))]
        after = 1 + len(effects.numbers) * effects.waves
        self.register_buffer("chosen", torch.tensor([*first, *range(after, effects.features)], dtype=torch.int64))
        self.register_buffer("scales", torch.ones(recipe.network.features))
        self.register_buffer("unit", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        features = self.effects.features(x.flatten(1))
        seen = features[:, self.chosen] * self.scales
        output: Tensor = self.effects[1](features) + self.network(seen) * self.unit
        return output


def tabular(
    blocks: Sequence[int],
    outputs: int = 1,
    hidden: Sequence[int] = (64,),
    waves: int = WAVES,
    generator: torch.Generator | None = None,
) -> TabularNetwork:
    """An additive model of columns with a network: 0 for a number, a width for a column of so many categories."""
    return TabularNetwork(TabularRecipe(AdditiveRecipe(tuple(blocks), outputs, waves), tuple(hidden)), generator)


__all__ = ["TabularNetwork", "TabularRecipe", "tabular"]
