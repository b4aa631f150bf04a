"""A Gaussian, independent in every weight but for a few directions: what averages of released positions leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from confide.models.likelihoods import Likelihood
from confide.posteriors.base import check_size
from confide.posteriors.description import Damaged, save_posterior
from confide.posteriors.variational import DiagonalGaussian


@dataclass(frozen=True, repr=False)
class LowRankGaussian(DiagonalGaussian):
    """N(centre, diag(spread^2) + factors^T factors) over the flat parameter vector.

    factors   (directions, parameters), each as long as a deviation along it
    """

    factors: Tensor | None = None
    kind: ClassVar[str] = "low-rank-gaussian"

    @property
    def directions(self) -> Tensor:
        return self.centre.new_zeros(0, len(self.centre)) if self.factors is None else self.factors

    def covariance(self) -> Tensor:
        return super().covariance() + self.directions.mT @ self.directions

    def deviations(self) -> Tensor:
        """Of every weight, along all directions together."""
        found: Tensor = (self.spread.square() + self.directions.square().sum(0)).sqrt()
        return found

    def named_moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        whole = DiagonalGaussian(self.module, self.likelihood, self.centre, self.deviations())
        return whole.named_moments()

    def save(self, path: str | Path) -> None:
        own = {"centre": self.centre, "spread": self.spread, "factors": self.directions}
        save_posterior(self, {**own, "passes": torch.tensor(self.passes)}, path)

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        centre, spread, factors = tensors["centre"], tensors["spread"], tensors["factors"]
        if centre.dim() != 1 or spread.shape != centre.shape or factors.shape != (len(factors), len(centre)):
            raise Damaged("centre, spread, factors: must be as long as each other; the file is damaged")
        check_size(module, len(centre))
        return cls(module, likelihood, centre, spread, int(tensors["passes"]), facts, factors)

    def _draws(self, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        factors = self.directions
        for draw in super()._draws(count, generator):
            along = torch.randn(len(factors), generator=generator, dtype=factors.dtype)
            yield draw + along @ factors
