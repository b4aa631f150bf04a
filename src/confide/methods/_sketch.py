"""Along how many directions features differ, from a noisy sketch of their covariance; see `features`.

A record tells the products of a few sums of its features with random signs, which are public: sums of vectors of
length one, so that their products have about that length too. On average over signs the products' covariance R C R'
has the square norm (1 + 1 / k) tr C^2 + (tr C)^2 / k, and its trace the square (tr C)^2 + 2 tr C^2 / k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUMS = 12
"""Sums with random signs: tr C^2 is told to a fifth by so many, and each adds noise."""
SIZE = SUMS * (SUMS + 1) // 2
"""Of what a record tells: products of two sums, each pair once."""
ROOM = 1.2
"""Length of the sums that is still told as it is, where features have length 1; few are longer."""
USUAL, SPREAD = 0.01, 0.05
"""Of tr C^2 / (tr C)^2, what is expected beforehand and how far it may be from it; see docs/protocols.md."""
SEED = 20
"""Convention: any will do, but every process and every machine must draw the same signs."""


def signs(features: int) -> Tensor:
    """(features, SUMS), columns of length root(features / SUMS); the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(0, 2, (features, SUMS), generator=generator)
    return (2.0 * drawn - 1).double() / math.sqrt(SUMS)


def products(x: Tensor, signs: Tensor) -> Tensor:
    """Of features (records, features) of length 1: rows (records, SIZE) of length 1 at most."""
    sums = x @ signs
    sums = sums / sums.norm(dim=1, keepdim=True).clamp(min=ROOM)
    first, second = _pairs()
    told: Tensor = sums[:, first] * sums[:, second] * _once_or_twice()
    return told


def concentration(mean: Tensor, noise: float, centre: Tensor) -> float:
    """tr C^2 / (tr C)^2 of the covariance C: 1 where features differ along one direction, 1 / n where along n alike.

    mean     of all records' products, with noise in each of its numbers
    centre   mean feature, where features have length 1; what is left of that length is tr C
    """
    about = centre @ signs(len(centre))
    first, second = _pairs()
    told = ROOM**2 * mean - about[first] * about[second] * _once_or_twice()
    noise = ROOM**2 * noise
    diagonal = first == second
    told[diagonal] -= told[diagonal].mean()
    variance = (1 - float(centre.square().sum())) ** 2
    scale = (1 + 1 / SUMS - 2 / SUMS**2) * max(variance, 1e-6)
    square = float(told.square().sum()) - (SIZE - 1) * noise**2
    doubt = (2 * SIZE * noise**4 + 4 * noise**2 * max(square, 0.0)) / scale**2
    found = (square / scale * SPREAD**2 + USUAL * doubt) / (SPREAD**2 + doubt)
    return min(max(found, 1 / len(centre)), 1.0)


def _pairs() -> tuple[Tensor, Tensor]:
    first, second = torch.triu_indices(SUMS, SUMS)
    return first, second


def _once_or_twice() -> Tensor:
    """Pairs stand for both places that they have in the matrix."""
    first, second = _pairs()
    return 1 + (math.sqrt(2) - 1) * (first != second).double()
