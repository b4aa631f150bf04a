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
WANTED = 0.8
"""Of moves are accepted; leaps are made shorter or longer towards it."""


def carried(draws: Tensor, energies: Energies, root: Tensor, generator: torch.Generator) -> Tensor:
    """As many draws of exp(-energy).

    root   lower root of a precision that suits the density; leaps are in its units
    """
    found, leap = draws, FIRST_LEAP
    here, slope = energies(found)
    lost = ~torch.isfinite(here) | ~torch.isfinite(slope).all(1)
    if bool(lost.any()) and not bool(lost.all()):  # where the density is nought: begin where another draw does
        kept = torch.nonzero(~lost)[:, 0]
        again = kept[torch.randint(len(kept), (int(lost.sum()),), generator=generator)]
        found = found.clone()
        found[lost] = found[again]
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
        leap *= 1.15 if float(chance.mean()) > WANTED else 1 / 1.15
    return found


def _along(root: Tensor, slopes: Tensor) -> Tensor:
    """Slopes in units of the root: L^-1 slope."""
    found: Tensor = torch.linalg.solve_triangular(root, slopes.mT, upper=False).mT
    return found


def _across(root: Tensor, momenta: Tensor) -> Tensor:
    """Moves in units of the root: L^-T momentum."""
    found: Tensor = torch.linalg.solve_triangular(root.mT, momenta.mT, upper=True).mT
    return found
