"""Draws of a Gaussian carried to a density near it: Hamiltonian moves of all of them at once, each accepted or not.

A belief is the prior times a Gaussian that releases tell of. Where the prior is a Gaussian too, draws are exact; where
it is not, such as that of effects whose spread is unknown, draws for the Gaussian nearest to it are where these moves
begin. The density is public, so that nothing is asked and nothing paid.

Papers: Neal, Handbook of Markov Chain Monte Carlo, 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Energies: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of all draws, (draws, numbers): their energies and the slopes of these."""
MOVES, LEAPS = 25, 6
"""Of every draw: moves, each of so many leaps, which go about half around a Gaussian."""
FIRST_LEAP = 0.35
"""In units of the root: short enough for most densities that are near a Gaussian."""
FARTHEST, FARTHER = 50.0, 5.0
"""A draw whose energy is above the least by this, and so much for every number, is nowhere that the density has mass; a
prior that falls off like exp(-exp(u)) is so steep there that no leap would ever lead back."""
NEARER = (0.5, 0.25, 0.125)
"""Shares of the way to such a draw, at one of which it begins."""
WANTED, POOR = 0.8, 0.3
"""Of moves are accepted; leaps are made shorter or longer towards it, and much shorter where few are."""


def carried(draws: Tensor, energies: Energies, root: Tensor, generator: torch.Generator) -> Tensor:
    """As many draws of exp(-energy).

    root   lower root of a precision that suits the density; leaps are in its units
    """
    found, leap = _begun(draws, energies), FIRST_LEAP
    here, slope = energies(found)
    for _ in range(MOVES):
        push = torch.randn(found.shape, generator=generator, dtype=found.dtype)
        length = leap * (0.6 + 0.8 * torch.rand(len(found), 1, generator=generator, dtype=found.dtype))
        point, momentum, bend = found, push, slope
        for _ in range(LEAPS):
            momentum = momentum - length / 2 * _along(root, bend)
            ahead = point + length * _across(root, momentum)
            point = torch.where(torch.isfinite(ahead), ahead, point)  # a move that flies off is not accepted below
            there, bend = energies(point)
            momentum = momentum - length / 2 * _along(root, bend)
        gain = here - there + (push.square() - momentum.square()).sum(1) / 2
        chance = torch.nan_to_num(gain, nan=-torch.inf, neginf=-torch.inf).clamp(max=0).exp()
        good = torch.isfinite(bend).all(1) & (torch.rand(len(found), generator=generator, dtype=found.dtype) < chance)
        found, here = torch.where(good[:, None], point, found), torch.where(good, there, here)
        slope = torch.where(good[:, None], bend, slope)
        leap *= 1.15 if float(chance.mean()) > WANTED else 1 / 1.15 if float(chance.mean()) > POOR else 0.5
    return found


def _begun(draws: Tensor, energies: Energies) -> Tensor:
    """Where draws begin: those where the density is next to nought on their way from the midst, where it is not.

    Next to nought by what it is in the midst: the largest that any draw has may be that of a narrow place, such as
    effects that are all alike with a spread of nought.
    """
    midst = draws.median(0).values.expand_as(draws)
    most = energies(midst)[0] + FARTHEST + FARTHER * draws.shape[1]
    good = _sound(*energies(draws), most)
    found = draws
    for share in (*NEARER, 0.0) if not bool(good.all()) else ():
        nearer = torch.where(good[:, None], found, midst + share * (draws - midst))
        there = ~good & _sound(*energies(nearer), most)
        found, good = torch.where(there[:, None], nearer, found), good | there
    return found


def _sound(values: Tensor, slopes: Tensor, most: Tensor) -> Tensor:
    return torch.isfinite(values) & torch.isfinite(slopes).all(1) & (values <= most)


def _along(root: Tensor, slopes: Tensor) -> Tensor:
    """Slopes in units of the root: L^-1 slope."""
    found: Tensor = torch.linalg.solve_triangular(root, slopes.mT, upper=False).mT
    return found


def _across(root: Tensor, momenta: Tensor) -> Tensor:
    """Moves in units of the root: L^-T momentum."""
    found: Tensor = torch.linalg.solve_triangular(root.mT, momenta.mT, upper=True).mT
    return found
