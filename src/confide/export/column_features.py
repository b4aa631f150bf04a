"""The features of additive models as plain arrays, see `confide.models.additive`: what exports make of encoded inputs.

A quantile scale is straight between its knots, so that it is a sum of clamped differences,

    u(v) = height_0 + sum_k slope_k * min(max(v - knot_k, 0), knot_{k+1} - knot_k),

which every runtime knows; predict.py has numpy's own interpolation for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from confide.models.additive import AdditiveFeatures, middles


@dataclass(frozen=True)
class ColumnFeatures:
    """numbers, categories   places among the inputs
    knots       of all quantile scales, on [0, 1]
    heights     (numbers, knots): the scales
    centres, amplitudes      of every feature: the first is constant, then come the waves of every number, then
                the categories
    """

    numbers: Any
    categories: Any
    knots: Any
    heights: Any
    centres: Any
    amplitudes: Any
    waves: int

    @classmethod
    def of(cls, features: AdditiveFeatures) -> ColumnFeatures:
        return cls(
            features.numbers.numpy(),
            features.categories.numpy(),
            middles(len(features.numbers)).numpy(),
            features.heights.double().numpy(),
            features.centres.double().numpy(),
            features.amplitudes.double().numpy(),
            features.waves,
        )

    @property
    def inputs(self) -> int:
        return len(self.numbers) + len(self.categories)

    @property
    def widths(self) -> Any:
        return np.diff(self.knots)

    @property
    def slopes(self) -> Any:
        """(numbers, knots - 1)"""
        return np.diff(self.heights, axis=1) / self.widths

    @property
    def angles(self) -> Any:
        """By which a quantile is multiplied, for every wave."""
        return np.pi * np.arange(1, self.waves + 1)

    def arrays(self) -> dict[str, Any]:
        """By their names in the .npz file."""
        named = ("numbers", "categories", "knots", "heights", "centres", "amplitudes")
        return {f"columns_{name}": getattr(self, name) for name in named}
