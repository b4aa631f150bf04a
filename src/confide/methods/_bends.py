"""A belief about a program whose scores bend: draws of the Gaussian that a line gives, carried to what the scores say.

Released slopes are those of clipped scores at one point u. If the truth is u + R d their mean is -n (A d + r(d)), where
r, by which it is off a line, is the program's own word (`models.program_sharpness.bend_of`), and A is what records tell
(`_told`). So what is known of d is

    log p(d) = log prior(u + R d) - (g + H d + n r(d))^T (H + E)^-1 (g + H d + n r(d)) / 2,          H = n A,

with g the mean slope and E the covariance of its noise. A number that few records tell of, such as the width of a rare
class, bends within its own belief: a line through it there says the wrong thing, surely. Nothing is asked for this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from confide.methods._carried import Energies, carried
from confide.methods._trace import Energy, LocalPrior

Bend = Callable[[Tensor], Tensor]
LOOKED_AT = 64
"""Draws of the belief by a line, at which it is seen whether scores bend."""
STRAIGHT = 0.1
"""Mean square of what they bend by, in deviations of the slope and per number: less moves no interval."""
NEARER = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Shares of a draw's way from the midst, at one of which it begins to be carried."""
DRAWS = 250
"""Of a bent belief: every one of them runs the program at many inputs."""


def bent(
    draws: Tensor,
    curvatures: Tensor,
    slope: Tensor,
    errors: Tensor,
    energy: Energy,
    least: Tensor,
    bend: Bend,
    generator: torch.Generator,
) -> tuple[Tensor, float]:
    """Draws of d, and how much scores bend at those of a line; the same draws where that is little.

    draws        (count, numbers), as many in a row for every curvature
    curvatures   H, of all records;  bend: n r(d)
    energy       of the prior at d;  least: its precision in any direction
    """
    off = torch.vmap(bend)(draws[:: max(1, len(draws) // LOOKED_AT)])
    known = torch.isfinite(off).all(1)
    spread = torch.linalg.cholesky(errors + curvatures.mean(0))
    sizes = torch.linalg.solve_triangular(spread, off.nan_to_num().mT, upper=False).square().mean(0)
    much = float(sizes[known].mean()) if bool(known.any()) else torch.inf
    if much <= STRAIGHT:
        return draws, much
    chosen = torch.linspace(0, len(draws) - 1, min(DRAWS, len(draws))).long()
    each = curvatures[chosen * len(curvatures) // len(draws)]
    roots = torch.linalg.cholesky(errors + each)

    def of_one(d: Tensor, curvature: Tensor, root: Tensor) -> Tensor:
        left = torch.linalg.solve_triangular(root, (slope + curvature @ d + bend(d))[:, None], upper=False)
        found: Tensor = energy(d) + left.square().sum() / 2
        return found

    sloped = torch.vmap(torch.func.grad_and_value(of_one))

    def energies(points: Tensor) -> tuple[Tensor, Tensor]:
        slopes, values = sloped(points, each, roots)
        return values, slopes

    begun = _nearer(draws[chosen], energies)
    prior = LocalPrior.at(energy, torch.zeros_like(slope), least).precision
    whole, mean = curvatures.mean(0), errors + curvatures.mean(0)
    typical = torch.linalg.cholesky(prior + whole @ torch.linalg.solve(mean, whole))
    return carried(begun, energies, typical, generator), much


def _nearer(draws: Tensor, energies: Energies) -> Tensor:
    """Where draws of a line begin: as far along their way from the midst as the density goes with them."""
    ways = torch.stack([draws * share for share in NEARER])
    found = torch.stack([energies(way)[0] for way in ways]).nan_to_num(nan=torch.inf)
    return ways[found.argmin(0), torch.arange(len(draws))]
