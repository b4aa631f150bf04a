"""Sums that are certified: what one record can move, at the extremes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from confide.mechanism.clipping import STYLES, clipped_sum


def test_finite_squares_whose_sum_overflows_end() -> None:
    """Every record has a finite squared norm, and their sum has none: nothing goes round in circles."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.ones(6, 3)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return output.sum(1) * 4e18

    for style in STYLES:
        out = torch.zeros(sum(p.numel() for p in module.parameters()))
        clipped_sum(module, loss, x, None, clip=1.0, out=out, style=style)
        assert torch.isfinite(out).all()
        assert out.norm() <= 6
