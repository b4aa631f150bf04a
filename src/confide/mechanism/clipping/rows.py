"""Clipped sums of plain vectors, for methods that ask for statistics instead of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping.factors import GAMMA, Style, check_clip, check_style, shrunk
from confide.mechanism.clipping.rounding import Tally
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of

# Rows are widened to float64 in pieces of this many bytes, and of no more rows than keep the error of the largest batch
# within the share of C that `rounding` sets.
PIECE_BYTES = 8 << 20
PIECE_ROWS = 1024


def clipped_sum_of_rows(
    matrix: Tensor, *, clip: float, out: Tensor, style: Style = "flat", weights: Tensor | None = None
) -> Tensor:
    """Add the sum of the rows of `matrix` (records, size), each scaled to a norm of at most `clip`, onto `out`.

    Norms and sums are taken in float64: the entries of statistics span many orders of magnitude. A row that is not
    finite counts as zero. Weights, between 0 and 1, scale the clipped rows. Returns the norms before clipping (0 for
    such rows); they are private.
    """
    check_clip(clip, out.dtype)
    check_style(style)
    if style == "per-layer":
        raise Refusal("style='per-layer': rows have no layers; use 'flat' or 'automatic'")
    if matrix.dim() != 2 or out.shape != matrix.shape[1:]:
        raise Refusal(f"matrix={tuple(matrix.shape)}, out={tuple(out.shape)}: need (records, size) and (size,)")
    norms = torch.zeros(matrix.shape[0], dtype=torch.float64, device=matrix.device)
    total = Tally(out.shape)
    # the sum is rounded once to the type of `out`: the bound leaves room for that
    bound = clip * (1 - torch.finfo(out.dtype).eps)
    for start, stop in chunks(matrix.shape[0], max(8 * matrix.shape[1], PIECE_BYTES // PIECE_ROWS), PIECE_BYTES):
        rows, sizes, scale = unit_rows(matrix[start:stop].to(torch.float64))
        norms[start:stop] = norms_of(sizes, scale)
        factors = row_factors(sizes, scale, bound, style)
        total.open.add_(torch.mv(rows.t(), factors if weights is None else factors * weights[start:stop].double()))
        total.added()
    out.add_(total.total())
    return norms


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows divided by their largest entry, the norms of that, and what they were divided by; rows that are not finite
    are 0. Squares of what is at most 1 in size do not overflow."""
    rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
    if not rows.shape[1]:
        return rows, rows.sum(1), rows.sum(1)
    scale = rows.abs().amax(1).clamp_(min=torch.finfo(rows.dtype).tiny)
    rows = rows.div_(scale[:, None])
    return rows, squared_norms_of(rows).sqrt_(), scale


def norms_of(sizes: Tensor, scale: Tensor) -> Tensor:
    """The norms before clipping; one beyond the largest number is that number."""
    return (sizes * scale).nan_to_num_()


def row_factors(sizes: Tensor, scale: Tensor, clip: float, style: Style) -> Tensor:
    """The factors of rows that were divided by `scale`, found without their norms, which may be no numbers."""
    bound = shrunk(clip, sizes.dtype)
    if style == "automatic":
        return torch.reciprocal(sizes + GAMMA / scale).mul_(bound)
    return torch.minimum(torch.reciprocal(sizes).mul_(bound), scale)
