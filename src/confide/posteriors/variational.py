"""Posteriors of the variational methods: a Gaussian for every weight, and a network that keeps its dropout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from confide.data.trees import Tree, inputs_of, size_of, tree_of
from confide.devices import moved
from confide.layers.bayesian import draw_
from confide.layers.conversion import with_shared_dropout
from confide.layers.dropout import SharedDropout
from confide.models.flat import copied, flatten_, named_slices, training_, uncompiled
from confide.models.likelihoods import Likelihood, noise_scale_of
from confide.models.predictive import Predictive
from confide.models.programs import named_draws
from confide.posteriors.base import Shown, check_count, check_size
from confide.posteriors.description import Damaged, save_posterior
from confide.posteriors.draws import to_arviz
from confide.posteriors.prediction.stacked import Block, blocks, chain_of, collected, in_pieces
from confide.posteriors.prediction.summary import Summary, accumulated, predictive_of_draws, summary_of_draws

PREDICTION_SEED = 0
"""Predictions draw from a stream of their own that starts here, so that the same question has the same answer."""


@dataclass(frozen=True, repr=False)
class DiagonalGaussian(Shown):
    """Independent N(centre, spread^2) over the flat parameter vector; spread 0 is a parameter without a distribution.

    passes   draws that a prediction averages over
    """

    module: nn.Module
    likelihood: Likelihood
    centre: Tensor
    spread: Tensor
    passes: int = 100
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "diagonal-gaussian"

    @property
    def noise_scale(self) -> float | None:
        return noise_scale_of(self.likelihood)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        check_count(count)
        return torch.stack(list(self._draws(count, generator)))

    def mean(self) -> Tensor:
        return self.centre

    def covariance(self) -> Tensor:
        return torch.diag(self.spread.square())

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        """The draws that a prediction averages over."""
        return torch.cat(list(self.groups(self.passes))).detach(), equal_weights(self.passes)

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        return replace(self, likelihood=likelihood, facts=facts)

    def groups(self, size: int) -> Iterator[Tensor]:
        """The draws that a prediction averages over, at most `size` at a time: the same ones every time."""
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        for batch in _batched(self._draws(self.passes, generator), size):
            yield torch.stack(batch)

    @torch.no_grad()
    def predict(self, x: Tree) -> Predictive:
        weights = torch.full((self.passes,), 1 / self.passes, dtype=self.centre.dtype)
        return predictive_of_draws(self.module, self.groups, x, self.likelihood, weights)

    @torch.no_grad()
    def summary(self, x: Tree) -> Summary:
        """Probabilities or means with both kinds of uncertainty, in memory that does not grow with the draws."""
        weights = equal_weights(self.passes)
        return summary_of_draws(self.module, self.groups, x, self.likelihood, weights)

    def to_arviz(self) -> Any:
        """The draws that predictions average over, by parameter name, in ArviZ's data tree."""
        return to_arviz(_by_name(self.module, torch.cat(list(self.groups(self.passes)))), self.facts)

    def named_moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and deviation by parameter name, in the parameter's shape."""
        slices = named_slices(self.module)
        return {
            name: (self.centre[part].reshape(shape), self.spread[part].reshape(shape))
            for name, (part, shape) in slices.items()
        }

    def save(self, path: str | Path) -> None:
        tensors = {"centre": self.centre, "spread": self.spread, "passes": torch.tensor(self.passes)}
        save_posterior(self, tensors, path)

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        if tensors["centre"].dim() != 1 or tensors["spread"].shape != tensors["centre"].shape:
            raise Damaged("centre, spread: must be vectors of one length; the file is damaged")
        check_size(module, len(tensors["centre"]))
        return cls(module, likelihood, tensors["centre"], tensors["spread"], int(tensors["passes"]), facts)

    def _draws(self, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        for _ in range(count):
            noise = torch.randn(self.centre.shape, generator=generator, dtype=self.centre.dtype)
            yield torch.addcmul(self.centre, self.spread, noise)


@dataclass(frozen=True, repr=False)
class DropoutNetwork(Shown):
    """One vector of weights and the masks of the network's dropout layers, which stay random after training.

    module   a network whose dropout layers are SharedDropout, in the mode it was trained in
    weights  the flat parameter vector
    passes   masks that a prediction averages over; within a pass all inputs meet the same mask
    rate     of the dropout layers that were inserted; 0 where the network had its own
    """

    module: nn.Module
    likelihood: Likelihood
    weights: Tensor
    passes: int = 100
    rate: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "dropout-network"

    @property
    def noise_scale(self) -> float | None:
        return noise_scale_of(self.likelihood)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Weights with the masks multiplied in, where a dropout layer stands right before a linear one.

        Masks elsewhere cannot be written as weights; they are left out here, and drawn in predictions all the same.
        """
        check_count(count)
        network = copied(self.module)
        flatten_(network)
        followed = list(_followed_by_linear(network))
        places = named_slices(network)
        slices = {id(value): places[name][0] for name, value in _trainable(network)}
        draws = self.weights.repeat(count, 1)
        for draw in draws:
            draw_(network, generator)
            for dropout, linear in followed:
                mask = dropout.mask(torch.Size([linear.in_features]), draw.dtype)
                draw[slices[id(linear.weight)]].view(linear.weight.shape).mul_(mask)
        return draws

    def mean(self) -> Tensor:
        return self.weights

    def weighted_draws(self) -> tuple[Tensor, Tensor]:
        """The draws that a prediction averages over."""
        return torch.cat(list(self.groups(self.passes))).detach(), equal_weights(self.passes)

    def with_likelihood(self, likelihood: Likelihood, facts: Mapping[str, Any]) -> Self:
        return replace(self, likelihood=likelihood, facts=facts)

    def groups(self, size: int) -> Iterator[Tensor]:
        """The masked weights that a prediction averages over, at most `size` at a time: the same ones every time."""
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        for start in range(0, self.passes, size):
            yield self.sample(min(size, self.passes - start), generator)

    def predict(self, x: Tree) -> Predictive:
        return _predictive(self._blocks(x), self.likelihood, x, self.passes)

    def summary(self, x: Tree) -> Summary:
        """Probabilities or means with both kinds of uncertainty, in memory that does not grow with the masks."""
        return _summary(self._blocks(x), self.likelihood, x, self.passes)

    def to_arviz(self) -> Any:
        """The masked weights that predictions average over, by parameter name, in ArviZ's data tree."""
        return to_arviz(_by_name(self.module, torch.cat(list(self.groups(self.passes)))), self.facts)

    def _blocks(self, x: Tree) -> Iterator[Block]:
        layers = list(_chain(self.module))
        masks = sum(isinstance(layer, SharedDropout) for layer in layers)
        in_weights = masks == len(list(_followed_by_linear(self.module)))
        if in_weights and chain_of(self.module, masked=True) is not None:
            return blocks(self.module, self.groups, x, masked=True)
        return self._one_by_one(x)

    def _one_by_one(self, x: Tree) -> Iterator[Block]:
        """Masks that are not weights: the network runs once for each of them."""
        network = training_(copied(self.module))
        position = flatten_(network)
        position.copy_(self.weights)
        generator = torch.Generator().manual_seed(PREDICTION_SEED)
        inputs = moved(inputs_of(x, position.dtype), position.device)
        # Layers that hide dropout of their own (attention, recurrence) draw from torch's stream.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(PREDICTION_SEED)
            for turn in range(self.passes):
                draw_(network, generator)
                for rows, outputs in in_pieces(network, inputs):
                    yield Block(turn, rows, outputs[None].cpu())

    def save(self, path: str | Path) -> None:
        numbers = {"passes": torch.tensor(self.passes), "rate": torch.tensor(self.rate, dtype=torch.float64)}
        save_posterior(self, {"weights": self.weights, **numbers}, path, lambda made: _with_masks(made, self.rate))

    @classmethod
    def rebuilt(
        cls, module: nn.Module, likelihood: Likelihood, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Self:
        check_size(module, len(tensors["weights"]))
        rate = float(tensors["rate"])
        network = _with_masks(uncompiled(module), rate)  # a mask is a seed, and each would be compiled anew
        return cls(network, likelihood, tensors["weights"], int(tensors["passes"]), rate, facts)


def _with_masks(network: nn.Module, rate: float) -> nn.Module:
    return with_shared_dropout(network, rate)[0]


def equal_weights(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


def _followed_by_linear(network: nn.Module) -> Iterator[tuple[SharedDropout, nn.Linear]]:
    """Dropout layers of a chain of layers whose outputs go to a linear layer and nowhere else."""
    chain = list(_chain(network))
    for layer, follower in itertools.pairwise(chain):
        if isinstance(layer, SharedDropout) and isinstance(follower, nn.Linear) and follower.weight.requires_grad:
            yield layer, follower


def _chain(network: nn.Module) -> Iterator[nn.Module]:
    if isinstance(network, nn.Sequential):
        for child in network:
            yield from _chain(child)
    else:
        yield network


def _trainable(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in network.named_parameters() if value.requires_grad)


@torch.no_grad()
def _predictive(parts: Iterator[Block], likelihood: Likelihood, x: Tree, passes: int) -> Predictive:
    outputs = collected(parts, passes, size_of(tree_of(x)))
    weights = torch.full((passes,), 1 / passes, dtype=outputs.dtype)
    return likelihood.predictive(outputs, weights)


@torch.no_grad()
def _summary(parts: Iterator[Block], likelihood: Likelihood, x: Tree, passes: int) -> Summary:
    weights = equal_weights(passes)
    return accumulated(parts, likelihood, weights, size_of(tree_of(x)))


def _batched(draws: Iterator[Tensor], size: int) -> Iterator[list[Tensor]]:
    while batch := list(itertools.islice(draws, size)):
        yield batch


def _by_name(module: nn.Module, draws: Tensor) -> dict[str, Tensor]:
    """Draws by parameter name, as one chain: (1, draws, *parameter shape)."""
    return {name: values[None] for name, values in named_draws(module, draws).items()}
