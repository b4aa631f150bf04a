"""Posteriors that are a list of weighted draws: what samplers and point estimates leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from confide.data.trees import Tree
from confide.errors import Refusal
from confide.models.likelihoods import Likelihood, noise_scale_of
from confide.models.predictive import Predictive
from confide.models.programs import named_draws
from confide.posteriors.base import Shown, check_count, check_size
from confide.posteriors.description import Damaged, save_posterior
from confide.posteriors.prediction.stacked import outputs_of
from confide.posteriors.prediction.summary import Summary, predictive_of_draws, summary_of_draws

DRAWS_AT_ONCE = 64
"""Draws of a file that stays on disk which are held together: enough for quick sums, few enough for any network."""


@dataclass(frozen=True, repr=False)
class Draws(Shown):
    """Weighted draws of the flat parameter vector; a point estimate is a single draw.

    draws    (number of draws, parameters)
    weights  non-negative, one per draw, adding up to one
    """

    module: nn.Module
    likelihood: Likelihood
    draws: Tensor
    weights: Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "draws"

    @property
    def noise_scale(self) -> float | None:
        return noise_scale_of(self.likelihood)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        check_count(count)
        chosen = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        return self.draws[chosen].to(self.weights.dtype)

    def mean(self) -> Tensor:
        total = torch.zeros(self.draws.shape[1], dtype=self.weights.dtype)
        start = 0
        for group in self.groups(DRAWS_AT_ONCE):
            total += self.weights[start : start + len(group)] @ group
            start += len(group)
        return total

    def covariance(self) -> Tensor:
        draws = self.draws.to(self.weights.dtype)
        centred = draws - self.weights @ draws
        return centred.T @ (centred * self.weights[:, None])

    def groups(self, size: int) -> Iterator[Tensor]:
        """The draws in order, at most `size` at a time, in the number type of the weights."""
        for group in self.draws.split(size):
            yield group.to(self.weights.dtype)

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        return torch.cat(list(self.groups(DRAWS_AT_ONCE))).detach(), self.weights

    @torch.no_grad()
    def predict(self, x: Tree) -> Predictive:
        return predictive_of_draws(self.module, self.groups, x, self.likelihood, self.weights)

    @torch.no_grad()
    def summary(self, x: Tree) -> Summary:
        """Probabilities or means with both kinds of uncertainty, in memory that does not grow with the draws."""
        return summary_of_draws(self.module, self.groups, x, self.likelihood, self.weights)

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        return replace(self, likelihood=likelihood, facts=facts)

    def named_draws(self) -> dict[str, Tensor]:
        """The draws by parameter name, of shape (draws, *parameter shape); those of a program in their supports."""
        return named_draws(self.module, self.draws)

    def to_arviz(self) -> Any:
        """The draws by parameter name in the `posterior` group of ArviZ's data tree, (chain, draw, *parameter shape).

        ArviZ knows no weights: where they differ, draws are repeated or left out in proportion to them, in order.
        """
        chains = int(self.facts.get("chains", 1))
        chosen = _evenly_weighted(self.weights.reshape(chains, -1))
        return to_arviz({name: draws[chosen] for name, draws in self.named_draws().items()}, self.facts)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write one safetensors file; dtype=torch.bfloat16 halves it, at three significant digits per weight."""
        if dtype is not None and not dtype.is_floating_point:
            raise Refusal(f"dtype={dtype}: must be a floating point type, such as torch.bfloat16")
        save_posterior(self, {"draws": self.draws.to(dtype or self.draws.dtype), "weights": self.weights}, path)

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        if tensors["draws"].dim() != 2 or tensors["weights"].shape != (len(tensors["draws"]),):
            raise Damaged("draws: must be one vector each with a weight each; the file is damaged")
        check_size(module, tensors["draws"].shape[1])
        return cls(module, likelihood, tensors["draws"], tensors["weights"], facts)


def _evenly_weighted(weights: Tensor) -> Tensor:
    """Row numbers of as many draws as there are, of equal weight, chain by chain: systematic resampling."""
    chains, count = weights.shape
    if torch.allclose(weights, weights.mean()):
        return torch.arange(chains * count).reshape(chains, count)
    mass = weights.double().cumsum(1) / weights.double().sum(1, keepdim=True)
    ticks = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).repeat(chains, 1)
    chosen = torch.searchsorted(mass, ticks).clamp(max=count - 1)
    return chosen + count * torch.arange(chains)[:, None]


def to_arviz(draws: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Any:
    """A data tree of draws by name, each of shape (chain, draw, *parameter shape); needs the extra confide[arviz]."""
    try:
        from arviz_base import from_dict
    except ImportError:
        raise ImportError("arviz_base: not installed; pip install 'confide[arviz]'") from None
    # Attributes of a netCDF file are texts and numbers.
    about = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    arrays = {name: values.detach().cpu().numpy() for name, values in draws.items()}
    return from_dict({"posterior": arrays}, attrs={"posterior": {"inference_library": "confide", **about}})


def outputs_of_draws(module: nn.Module, draws: Tensor, x: Tree) -> Tensor:
    """Network outputs for every draw and input: (draws, inputs, ...), in chunks of bounded memory."""
    return outputs_of(module, lambda size: iter(draws.split(size)), x, len(draws))
