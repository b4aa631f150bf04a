"""The clip factor: how far one record's gradient is scaled down before it joins the sum.

For a record with gradient norm n and a bound C the factor is

    flat, per-layer     min(1, C / n)
    automatic           C / (n + gamma)          (Bu et al. 2023, NeurIPS: normalisation with a fixed gamma > 0)

so that factor * n <= C in both. In floating point that is not enough: the norm carries the rounding of its sum
of squares, and factor * gradient rounds again. C is therefore shrunk by SLACK units of machine precision, more
than both together, so that what enters the sum has a norm of at most C, not C plus rounding. What the sum of a batch
loses is another matter: see `rounding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from confide.errors import Refusal

Style: TypeAlias = Literal["flat", "per-layer", "automatic"]
STYLES: tuple[Style, ...] = get_args(Style)

# Cascaded sums of squares are right to a few units, products and the scaling to a few more.
SLACK = 256
# The gamma of automatic clipping: small against usual norms, so that small gradients keep most of their size.
GAMMA = 0.01


@dataclass(frozen=True)
class Precision:
    """What matters of a floating-point type, looked up once."""

    eps: float
    tiny: float
    smallest_clip: float


def _precision(dtype: torch.dtype) -> Precision:
    info = torch.finfo(dtype)
    # below this, scaled gradients would fall among the subnormal numbers and lose the precision the bound relies on
    return Precision(info.eps, info.tiny, info.tiny**0.4)


PRECISION = {dtype: _precision(dtype) for dtype in (torch.float32, torch.float64)}


def check_clip(clip: float, dtype: torch.dtype) -> None:
    """Refuse a bound that is no number or too small, and types other than float32 and float64."""
    if dtype not in PRECISION:
        raise TypeError(f"out={dtype}: must be float32 or float64")
    if not (isinstance(clip, int | float) and math.isfinite(clip) and clip > 0):
        raise Refusal(f"clip={clip}: must be a finite number > 0")
    smallest = PRECISION[dtype].smallest_clip
    if clip < smallest:
        raise Refusal(f"clip={clip}: too small for {dtype}; use at least {smallest:.1e}, or rescale the loss")


def check_style(style: str) -> None:
    if style not in STYLES:
        raise Refusal(f"style={style!r}: must be one of {', '.join(STYLES)}")


def clip_factors(norms: Tensor, clip: float, style: Style = "flat") -> Tensor:
    """The factor of every record, from its norm (finite, >= 0); a zero norm gets a finite factor."""
    bound = shrunk(clip, norms.dtype)
    if style == "automatic":
        return torch.reciprocal(norms + GAMMA).mul_(bound)
    return torch.reciprocal(norms).mul_(bound).clamp_(max=1.0)


def shrunk(clip: float, dtype: torch.dtype) -> float:
    """The bound with room for rounding."""
    return clip * (1 - SLACK * PRECISION[dtype].eps)


def guard(entries: int, dtype: torch.dtype) -> float:
    """What a sum of `entries` squares may have lost to underflow.

    A product of norms |a|^2 |g|^2 must never be too small: a tiny |a|^2 rounds to zero while |g|^2 is huge, and
    the record would pass unclipped. Adding this to each factor keeps the product an upper bound.
    """
    return entries * PRECISION[dtype].tiny
