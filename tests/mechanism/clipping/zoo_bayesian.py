"""Animals with Bayesian layers, under one and under several draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from confide.layers.bayesian import MeanFieldConv2d, MeanFieldLinear, VariationalDropoutConv2d, VariationalDropoutLinear
from confide.layers.tables import MeanFieldEmbedding, MeanFieldTransposedLinear
from tests.mechanism.clipping.zoo_tools import (
    CLASSES,
    ZOO,
    Animal,
    Case,
    Lambda,
    classes,
    labels,
    plain,
    tokens,
)

# Bayesian layers ------------------------------------------------------------------------------------------------


def with_draws(draws: int, *layers: nn.Module, shape: tuple[int, ...]) -> Case:
    module = nn.Sequential(*layers)
    module.zoo_draws = draws  # type: ignore[assignment]
    return plain(module, *shape)


def bayesian(name: str, draws: int, shape: tuple[int, ...], layers: Callable[[], list[nn.Module]]) -> None:
    ZOO[f"{name}_{draws}_draws"] = Animal(lambda: with_draws(draws, *layers(), shape=shape))


def mean_field_layers() -> list[nn.Module]:
    rho = {"initial_rho": -1.0}
    return [
        MeanFieldLinear(5, 7, **rho),
        nn.ReLU(),
        nn.Linear(7, 6),
        nn.Tanh(),
        MeanFieldLinear(6, CLASSES, bias=False, **rho),
    ]


def mean_field_over_positions() -> list[nn.Module]:
    return [MeanFieldLinear(5, 3, initial_rho=-1.0), nn.Tanh(), nn.Flatten(), MeanFieldLinear(12, CLASSES)]


def mean_field_images() -> list[nn.Module]:
    first = MeanFieldConv2d(4, 6, (3, 2), stride=2, padding=1, groups=2, initial_rho=-1.0)
    second = MeanFieldConv2d(6, 3, 2, dilation=2, bias=False, initial_rho=-1.0)
    return [first, nn.ReLU(), nn.GroupNorm(2, 6), second, nn.Flatten(), nn.Linear(3, CLASSES)]


def variational_layers() -> list[nn.Module]:
    wide = {"initial_log_variance": -1.0}
    return [VariationalDropoutLinear(5, 7, **wide), nn.ReLU(), VariationalDropoutLinear(7, CLASSES, bias=False, **wide)]


def variational_over_positions() -> list[nn.Module]:
    return [VariationalDropoutLinear(5, 3, initial_log_variance=-1.0), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)]


def variational_images() -> list[nn.Module]:
    first = VariationalDropoutConv2d(4, 6, 3, stride=2, padding=1, groups=2, initial_log_variance=-2.0)
    return [first, nn.ReLU(), nn.Flatten(), VariationalDropoutLinear(54, CLASSES)]


def mean_field_words(length: int, draws: int) -> Case:
    """Words and places, of which the places have no records; read as a weight too, as tied heads do."""

    def forward(own: Any, ids: Tensor) -> Tensor:
        places = own.places(torch.arange(ids.shape[1]).unsqueeze(0))
        inner = torch.tanh(own.words(ids) + places)
        return own.head(torch.tanh(own.turned(inner))).flatten(1)

    rho = {"initial_rho": -1.0}
    module = Lambda(
        forward,
        words=MeanFieldEmbedding(6, 4, padding_idx=1, **rho),
        places=MeanFieldEmbedding(length, 4, **rho),
        turned=MeanFieldTransposedLinear(nn.Linear, 4, 5, **rho),
        head=nn.Linear(5, CLASSES),
    )
    module.zoo_draws = draws  # type: ignore[assignment]
    return module, classes, tokens(6, length), labels()


for count in (1, 4):
    ZOO[f"mean_field_words_{count}_draws"] = Animal(lambda draws=count: mean_field_words(5, draws))  # type: ignore[misc]
    ZOO[f"mean_field_long_words_{count}_draws"] = Animal(lambda draws=count: mean_field_words(40, draws))  # type: ignore[misc]
    bayesian("mean_field", count, (5,), mean_field_layers)
    bayesian("mean_field_over_positions", count, (4, 5), mean_field_over_positions)
    bayesian("mean_field_images", count, (4, 5, 5), mean_field_images)
    bayesian("variational_dropout", count, (5,), variational_layers)
    bayesian("variational_dropout_over_positions", count, (4, 5), variational_over_positions)
    bayesian("variational_dropout_images", count, (4, 5, 5), variational_images)
