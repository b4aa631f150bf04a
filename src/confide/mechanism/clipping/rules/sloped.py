"""Convolutions with a distribution for every weight, of which one draw was made.

The gradient of the means is that of the drawn weight, G, and the gradient of the rhos is J * G entry by entry. So one
product gives the clipped sums of both, and a record's squared norm is the sum of G^2 (1 + J^2) over the entries. The
gradients are formed for their norms only, as many entries at a time as stay in cache.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from confide.mechanism.clipping.rules.convolution import PatchSum
from confide.mechanism.clipping.rules.registry import Contribution, Where
from confide.mechanism.clipping.rules.squares import squared_norms_of


class SlopedPatches(Contribution):
    """slopes: J in the shape of the weight, None where rhos are not trainable; mean: whether the means are."""

    def __init__(self, base: PatchSum, slopes: Tensor | None, mean: bool, biases: dict[str, Tensor]) -> None:
        self.base, self.mean, self.biases = base, mean, biases
        self.slopes = None if slopes is None else base.from_weight(slopes)
        self.records = base.records
        self.squares: Tensor | None = None

    def squared_norms(self) -> Tensor:
        if self.squares is None:
            self.squares = self.base.squared_norms(self._scales())
            for values in self.biases.values():
                self.squares = self.squares + squared_norms_of(values)
        return self.squares

    def _scales(self) -> Tensor | None:
        if self.slopes is None:
            return None
        return (self.slopes.square() + 1).sqrt_() if self.mean else self.slopes

    def lost(self) -> Tensor | None:
        return self.base.lost()

    def chain(self, records: int) -> int:
        return max(self.base.chain(records), records)

    def spread(self) -> Tensor:
        """Scaling entries after the sum changes their errors as it changes them."""
        squares = self.squared_norms()
        if self.base.formed:  # parts are whole gradients
            return squares.sqrt()
        largest = 1.0 if self.slopes is None else float(self.slopes.abs().max())
        scale = (largest**2 + 1) ** 0.5 if self.mean else largest
        return torch.hypot(self.base.spread() * scale, squares.sqrt())

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return self._named(self.base.summed(factors)) | {name: factors @ values for name, values in self.biases.items()}

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        if self.biases:  # layers of residual networks have none; others are small
            return None
        total = self.base.summed_in_blocks(factors, size)
        return None if total is None else self._named(total)

    def _named(self, total: Tensor) -> dict[str, Tensor]:
        found = {} if self.slopes is None else {"weight_rho": self.base.as_weight(total * self.slopes)}
        return found | {"weight_mean": self.base.as_weight(total)} if self.mean else found

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        formed = self.base.dense(start, stop)["weight"]
        found = {"weight_mean": formed} if self.mean else {}
        if self.slopes is not None:
            found["weight_rho"] = formed * self.base.as_weight(self.slopes)
        return found | {name: values[start:stop] for name, values in self.biases.items()}

    def chosen(self, where: Where) -> Contribution:
        found = copy(self)
        found.base = self.base.chosen(where)
        found.biases = {name: values[where] for name, values in self.biases.items()}
        found.squares = None if self.squares is None else self.squares[where]
        found.records = found.base.records
        return found

    def widened(self) -> Contribution:
        found = copy(self)
        found.base = self.base.widened()
        found.biases = {name: values.double() for name, values in self.biases.items()}
        found.slopes = None if self.slopes is None else self.slopes.double()
        found.squares = None if self.squares is None else self.squares.double()
        return found
