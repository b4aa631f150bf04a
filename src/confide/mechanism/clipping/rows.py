"""Clipped sums of plain vectors, for methods that ask for statistics instead of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.clipping.factors import Style, check_clip, check_style, clip_factors
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of

# Rows are widened to float64 in pieces of this many bytes.
PIECE_BYTES = 8 << 20


def clipped_sum_of_rows(matrix: Tensor, *, clip: float, out: Tensor, style: Style = "flat") -> Tensor:
    """Add the sum of the rows of `matrix` (records, size), each scaled to a norm of at most `clip`, onto `out`.

    Norms and sums are taken in float64: the entries of statistics span many orders of magnitude. A row that is not
    finite counts as zero. Returns the norms before clipping (0 for such rows); they are private.
    """
    check_clip(clip, out.dtype)
    check_style(style)
    if style == "per-layer":
        raise Refusal("style='per-layer': rows have no layers; use 'flat' or 'automatic'")
    if matrix.dim() != 2 or out.shape != matrix.shape[1:]:
        raise Refusal(f"matrix={tuple(matrix.shape)}, out={tuple(out.shape)}: need (records, size) and (size,)")
    norms = torch.zeros(matrix.shape[0], dtype=torch.float64, device=matrix.device)
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    # the sum is rounded once to the type of `out`: the bound leaves room for that
    bound = clip * (1 - torch.finfo(out.dtype).eps)
    for start, stop in chunks(matrix.shape[0], 8 * matrix.shape[1], PIECE_BYTES):
        rows = matrix[start:stop].to(torch.float64)
        squares = squared_norms_of(rows)
        finite = torch.isfinite(squares)
        rows = torch.where(finite[:, None], rows, 0.0)
        found = torch.where(finite, squares, 0.0).sqrt_()
        norms[start:stop] = found
        total.addmv_(rows.t(), clip_factors(found, bound, style))
    out.add_(total)
    return norms
