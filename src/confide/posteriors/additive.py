"""The posterior of an additive model: independent Gaussian weights, predictions and effects in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from confide.devices import device_of, moved
from confide.errors import Refusal
from confide.expectation.evidence import standard_normals
from confide.models.additive import NUMBER, AdditiveNetwork
from confide.models.flat import named_slices
from confide.models.likelihoods import Gaussian, Likelihood, noise_scale_of
from confide.models.predictive import Predictive
from confide.posteriors.base import Shown, check_count, check_size
from confide.posteriors.description import save_posterior
from confide.posteriors.draws import to_arviz
from confide.posteriors.natural import GaussianPredictive
from confide.posteriors.prediction.summary import Summary, summary_of_predictive

_DRAWS = 64  # quasi-random outputs of a class prediction, as for every posterior in closed form
_WRITTEN = 100  # draws that stand for the formula where a list is needed
_POINTS, _OUTER = 101, 0.01  # of the quantile scale at which the effect of a number is told, without its ends
_INPUTS_AT_ONCE = 4096  # 64 draws of ten classes for them are 20 MB
WIDER = "effects_wider"
"""The fact that says how many times wider effects of single columns are in doubt than weights are drawn: those of
columns that move together are, and outputs are not."""


@dataclass(frozen=True)
class Effect:
    """What one column adds to the output, with its doubt: mean and standard deviation of shape (places, outputs).

    places   where 1 to 99 % of the records are, as inputs in [-1, 1]; for categories their numbers, 0, 1, ...
    """

    first_input: int
    number: bool
    places: Tensor
    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True, repr=False)
class AdditiveGaussian(Shown):
    """Independent N(centre, spread^2) over the weights of an additive network."""

    module: AdditiveNetwork
    likelihood: Likelihood
    centre: Tensor
    spread: Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "additive-gaussian"

    @property
    def noise_scale(self) -> float | None:
        return noise_scale_of(self.likelihood)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        check_count(count)
        noise = torch.randn(count, len(self.centre), generator=generator, dtype=self.centre.dtype)
        return self.centre + self.spread * noise

    def mean(self) -> Tensor:
        return self.centre

    def covariance(self) -> Tensor:
        return torch.diag(self.spread.square())

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        """Pairs on opposite sides of the centre, so that their mean is the posterior's own."""
        half = self.sample(_WRITTEN // 2, torch.Generator().manual_seed(0)).detach()
        draws = torch.cat([half, 2 * self.centre - half])
        return draws, torch.full((_WRITTEN,), 1 / _WRITTEN, dtype=torch.float64)

    def output_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs, both (inputs, outputs)."""
        return self._moments(self.module.features(moved(x.flatten(1), device_of(self.module))).cpu().double())

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predictive:
        """Closed form for a Gaussian target; for classes an average over fixed quasi-random outputs."""
        mean, doubt = self.output_moments(x)
        if isinstance(self.likelihood, Gaussian):
            noise = torch.full_like(mean[:, 0], self.likelihood.noise_scale**2)
            return GaussianPredictive.of(mean[:, 0], doubt[:, 0], noise)
        spread = standard_normals(_DRAWS, mean.shape[1])[:, None, :] * doubt.sqrt()
        weights = torch.full((_DRAWS,), 1 / _DRAWS, dtype=mean.dtype)
        return self.likelihood.predictive(mean + spread, weights)

    def summary(self, x: Tensor) -> Summary:
        parts = [summary_of_predictive(self.predict(part)) for part in x.split(_INPUTS_AT_ONCE)]
        if not parts:
            return summary_of_predictive(self.predict(x))
        return Summary(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))

    @torch.no_grad()
    def effects(self) -> list[Effect]:
        """One for every block of the network, in order."""
        recipe = self.module.recipe
        found: list[Effect] = []
        levels = self.module.features.places(torch.linspace(_OUTER, 1 - _OUTER, _POINTS)).float()
        # What a column adds depends on nothing but itself, so that one pass shows all of them side by side.
        count = max([_POINTS, *recipe.blocks])
        starts = list(itertools.accumulate((max(1, width) for width in recipe.blocks), initial=0))
        x, numbers = torch.zeros(count, recipe.inputs), iter(levels)
        for start, width in zip(starts, recipe.blocks, strict=False):
            if width == NUMBER:
                x[:_POINTS, start] = next(numbers)
            else:
                x[:width, start : start + width] = torch.eye(width)
        features, numbers = self.module.features(x).double(), iter(levels)
        for first, width, group in zip(starts, recipe.blocks, recipe.groups(), strict=False):
            places = next(numbers) if width == NUMBER else torch.arange(float(width))
            mean, doubt = self._moments(features[: len(places), group], group)
            found.append(Effect(first, width == NUMBER, places, mean, doubt.sqrt() * self.facts.get(WIDER, 1.0)))
        return found

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        return replace(self, likelihood=likelihood, facts=facts)

    def to_arviz(self, count: int = 200) -> Any:
        """`count` draws by parameter name, the same at every call, in the `posterior` group of ArviZ's data tree."""
        draws = self.sample(count, torch.Generator().manual_seed(0))
        places = named_slices(self.module).items()
        return to_arviz({name: draws[:, part].reshape(1, -1, *shape) for name, (part, shape) in places}, self.facts)

    def save(self, path: str | Path) -> None:
        save_posterior(self, {"centre": self.centre, "spread": self.spread}, path)

    @classmethod
    def rebuilt(
        cls, module: Any, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        if not isinstance(module, AdditiveNetwork):
            raise Refusal(f"module={type(module).__name__}: this posterior belongs to an additive network; pass that")
        check_size(module, len(tensors["centre"]))
        return cls(module, likelihood, tensors["centre"], tensors["spread"], facts)

    def _moments(self, features: Tensor, group: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Of the outputs, or of what a group of features adds to them."""
        outputs = self.module.recipe.outputs
        centre, spread = (part.double().view(outputs, -1)[:, group] for part in (self.centre, self.spread))
        return features @ centre.mT, features.square() @ spread.square().mT
