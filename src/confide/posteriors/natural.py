"""Posteriors of expectation propagation: a Gaussian in natural parameters, with predictions in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.expectation.evidence import standard_normals
from confide.expectation.glm import with_ones
from confide.expectation.mixture import MixtureOfGaussians
from confide.expectation.moments import WeightLayout, output_moments
from confide.expectation.natural import GaussianFamily
from confide.models.flat import named_slices
from confide.models.likelihoods import Gaussian, Likelihood
from confide.models.networks import Recipe
from confide.models.predictive import ClassPredictive, Predictive, RealPredictive
from confide.posteriors.base import Shown, check_count
from confide.posteriors.description import save_posterior
from confide.posteriors.draws import outputs_of_draws, to_arviz
from confide.posteriors.prediction.summary import Summary, summary_of_predictive

_DRAWS = 64  # quasi-random outputs of a class prediction: errors of about 1 / 64, at the price of one pass
_WRITTEN = 100  # draws that stand for the formula where a list is needed


@dataclass(frozen=True)
class GaussianPredictive(RealPredictive):
    """One Gaussian per input in closed form: mean, what the weights leave open (`doubt`), and the noise on top.

    `variances` holds the sum of both, so densities, quantiles and intervals are those of the Gaussian itself.
    """

    doubt: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, mean: Tensor, doubt: Tensor, noise: Tensor) -> GaussianPredictive:
        return cls(mean[None], (doubt + noise)[None], torch.ones(1, dtype=mean.dtype), doubt)

    @cached_property
    def epistemic(self) -> Tensor:
        return self.doubt

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.variances[0] - self.doubt

    def rescaled(self, scale: float, shift: float) -> GaussianPredictive:
        """The same distribution of scale * y + shift: back to the units of the target."""
        means, variances = self.means * scale + shift, self.variances * scale**2
        return GaussianPredictive(means, variances, self.weights, self.doubt * scale**2)


@dataclass(frozen=True, repr=False)
class NaturalGaussian(Shown):
    """A Gaussian posterior over the parameters of a network, or over the component means of a mixture.

    natural   [eta, packed precision] over the working parameters, float64
    noise     variance of the noise of a Gaussian target
    inputs    public affine map of a network's inputs (seen, features + 1), or None. The working parameters belong
              to the mapped inputs; draws are given for the module's own
    """

    module: nn.Module
    likelihood: Likelihood
    natural: Tensor
    noise: Tensor
    inputs: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "natural-gaussian"

    @property
    def noise_scale(self) -> float | None:
        return float(self.noise.sqrt()) if isinstance(self.likelihood, Gaussian) else None

    @property
    def family(self) -> GaussianFamily:
        recipe: Recipe = self.module.recipe  # type: ignore[assignment]
        covariance = self.facts["covariance"]
        if isinstance(self.module, MixtureOfGaussians):
            return GaussianFamily(recipe.features, covariance, recipe.outputs)
        return GaussianFamily(self.layout.size, covariance)

    @property
    def layout(self) -> WeightLayout:
        """Of the working parameters."""
        recipe: Recipe = self.module.recipe  # type: ignore[assignment]
        return WeightLayout.of(recipe, self.inputs)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` parameter vectors of the module, of shape (count, parameters)."""
        check_count(count)
        return self._of_module(self.family.sample(self.natural, count, generator))

    def mean(self) -> Tensor:
        """The mean parameter vector of the module."""
        return self._of_module(self.family.moments(self.natural)[0].flatten(-2)[None])[0]

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        draws = self.sample(_WRITTEN, torch.Generator().manual_seed(0))
        return draws.detach(), torch.full((_WRITTEN,), 1 / _WRITTEN, dtype=torch.float64)

    def covariance(self) -> Tensor:
        """The covariance of the module's parameters, (parameters, parameters)."""
        _, covariance = self.family.moments(self.natural)
        working: Tensor = torch.block_diag(*self.family.dense(covariance))
        if isinstance(self.module, MixtureOfGaussians):
            return working
        columns = self._of_module(torch.eye(len(working), dtype=working.dtype))
        return columns.mT @ working @ columns

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predictive:
        """Closed form for a Gaussian target; for classes an average over fixed quasi-random outputs or draws."""
        if isinstance(self.module, MixtureOfGaussians):
            draws = self.sample(_DRAWS, torch.Generator().manual_seed(0))
            shares = outputs_of_draws(self.module, draws, x).softmax(-1)
            return ClassPredictive(shares, torch.full((_DRAWS,), 1 / _DRAWS, dtype=shares.dtype))
        mean, doubt = self.output_moments(x)
        if isinstance(self.likelihood, Gaussian):
            return GaussianPredictive.of(mean[:, 0], doubt[:, 0], self.noise)
        spread = standard_normals(_DRAWS, mean.shape[1])[:, None, :] * doubt.sqrt()
        weights = torch.full((_DRAWS,), 1 / _DRAWS, dtype=mean.dtype)
        return self.likelihood.predictive(mean + spread, weights)

    def summary(self, x: Tensor) -> Summary:
        return summary_of_predictive(self.predict(x))

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        # The same likelihood with other facts leaves a noise that was learnt; another one brings its own.
        noise = self.noise
        if isinstance(likelihood, Gaussian) and likelihood is not self.likelihood:
            noise = noise.new_tensor(likelihood.noise_scale**2)
        return replace(self, likelihood=likelihood, noise=noise, facts=facts)

    def output_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and epistemic variance of a network's outputs, both (inputs, outputs)."""
        x = x.cpu().to(torch.float64).flatten(1)
        if self.inputs is not None:
            x = x @ self.inputs[:, :-1].mT + self.inputs[:, -1]
        mean, covariance = self.family.moments(self.natural)
        if self.family.covariance == "diagonal":
            return output_moments(self.layout, mean[0], covariance[0], x)
        inputs = with_ones(x)
        doubt = torch.einsum("ni,ij,nj->n", inputs, self.family.dense(covariance)[0], inputs)
        return (inputs @ mean[0])[:, None], doubt[:, None]

    def _of_module(self, vectors: Tensor) -> Tensor:
        """Working parameters as the module's own: linear, row by row."""
        if isinstance(self.module, MixtureOfGaussians):
            return vectors
        if self.inputs is not None:
            first, *rest = self.layout.split(vectors)
            # W (A x + c) + b = (W A) x + (b + W c)
            weights, bias = first[..., :-1], first[..., -1:]
            bias = bias + weights @ self.inputs[:, -1:]
            first = torch.cat([weights @ self.inputs[:, :-1], bias], -1)
            vectors = self.layout.join([first, *rest])
        recipe: Recipe = self.module.recipe  # type: ignore[assignment]
        return WeightLayout.of(recipe).to_module(vectors)

    def to_arviz(self, count: int = 200) -> Any:
        """`count` draws by parameter name, the same at every call, in the `posterior` group of ArviZ's data tree."""
        draws = self.sample(count, torch.Generator().manual_seed(0))
        places = named_slices(self.module).items()
        return to_arviz({name: draws[:, part].reshape(1, -1, *shape) for name, (part, shape) in places}, self.facts)

    def save(self, path: str | Path) -> None:
        tensors = {"natural": self.natural, "noise": self.noise.reshape(1)}
        if self.inputs is not None:
            tensors["inputs"] = self.inputs
        save_posterior(self, tensors, path)

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        found = cls(module, likelihood, tensors["natural"], tensors["noise"][0], tensors.get("inputs"), facts)
        if len(found.natural) != found.family.size:
            raise Refusal(
                f"module={type(module).__name__}: needs {found.family.size} numbers, and this posterior has "
                f"{len(found.natural)}; pass the network that was fitted"
            )
        return found
