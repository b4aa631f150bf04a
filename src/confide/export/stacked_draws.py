"""All draws of a posterior as stacks of matrices, one per layer: what every export is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import Refusal
from confide.export.column_features import ColumnFeatures
from confide.models.additive import AdditiveNetwork
from confide.models.calibrated import Calibrated
from confide.models.likelihoods import Bernoulli, Categorical, Likelihood
from confide.models.tabular import TabularNetwork
from confide.posteriors.base import Posterior
from confide.posteriors.prediction.stacked import chain_of
from confide.posteriors.variational import DropoutNetwork

LINEAR = "linear"
LIKELIHOODS = (
    "categorical", "bernoulli", "calibrated", "probit", "ordinal", "multi-label", "gaussian",
    "heteroscedastic-gaussian", "laplace", "student-t", "poisson", "negative-binomial", "exponential", "weibull",
    "multi-gaussian",
)  # fmt: skip
"""Whose predictive distribution the exports know."""
_ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.SiLU: "silu", nn.Identity: "identity"}


@dataclass(frozen=True)
class StackedDraws:
    """layers    names in order: "linear" or an activation
    weights   of the draws, adding up to one
    matrices  by place among the layers: (draws, outputs, inputs)
    biases    by place: (draws, outputs)
    likelihood   of the outputs
    columns   what the first layer sees in place of the inputs, for models of columns
    effects   (draws, outputs, features): a linear map of them that is added to what the layers give
    """

    layers: list[str]
    weights: Tensor
    matrices: dict[int, Tensor]
    biases: dict[int, Tensor]
    likelihood: Likelihood
    columns: ColumnFeatures | None = None
    effects: Tensor | None = None

    @property
    def features(self) -> int:
        """Numbers of one encoded record."""
        return int(self.matrices[0].shape[2]) if self.columns is None else self.columns.inputs

    def arrays(self) -> dict[str, Any]:
        """As numpy arrays by the names of the .npz file."""
        return {
            "weights": self.weights.numpy(),
            **{f"weight_{place}": matrix.numpy() for place, matrix in self.matrices.items()},
            **{f"bias_{place}": bias.numpy() for place, bias in self.biases.items()},
            **({} if self.columns is None else self.columns.arrays()),
            **({} if self.effects is None else {"effects": self.effects.numpy()}),
        }


def stacked_draws(posterior: Posterior) -> StackedDraws:
    """The draws of a model of columns, or of a chain of linear layers and activations; any other network is refused."""
    name = posterior.likelihood.name
    if name not in LIKELIHOODS:
        raise Refusal(
            f"posterior: its likelihood, {name}, has no exported form; those that have are {', '.join(LIKELIHOODS)}, "
            "and load_posterior reads any"
        )
    module = posterior.module
    draws, weights = posterior.weighted_draws()
    if isinstance(module, AdditiveNetwork):
        found = replace(_chain(module[1], draws, weights, posterior), columns=ColumnFeatures.of(module.features))
    elif isinstance(module, TabularNetwork):
        found = _tabular(module, draws, weights, posterior)
    else:
        found = _chain(module, draws, weights, posterior)
    return _uncalibrated(found) if isinstance(posterior.likelihood, Calibrated) else found


def _chain(module: nn.Module, draws: Tensor, weights: Tensor, posterior: Posterior) -> StackedDraws:
    chain = chain_of(module, masked=isinstance(posterior, DropoutNetwork))
    if chain is None:
        raise Refusal(
            f"posterior: its network, {type(posterior.module).__name__}, is not a chain of linear layers and "
            "activations; export_program takes any network"
        )
    layers: list[str] = []
    matrices: dict[int, Tensor] = {}
    biases: dict[int, Tensor] = {}
    for layer in chain:
        if layer.weight is None:
            layers.append(_activation_name(layer.activation))
            continue
        matrices[len(layers)] = draws[:, layer.weight].reshape(-1, *layer.shape)
        if layer.bias is not None:
            biases[len(layers)] = draws[:, layer.bias]
        layers.append(LINEAR)
    return StackedDraws(layers, weights.double(), matrices, biases, posterior.likelihood)


def _tabular(module: TabularNetwork, draws: Tensor, weights: Tensor, posterior: Posterior) -> StackedDraws:
    """Effects and a chain of the same features: which of them the network sees, their scales and the unit of its
    outputs become parts of its first and last layer."""
    features, outputs = module.recipe.effects.features, module.recipe.outputs
    size = features * outputs
    found = _chain(module.network, draws[:, size:], weights, posterior)
    seen = found.matrices[0] * module.scales
    first = seen.new_zeros(*seen.shape[:2], features)
    first[..., module.chosen] = seen
    matrices = _times({**found.matrices, 0: first}, float(module.unit))
    biases = _times(found.biases, float(module.unit))
    effects = draws[:, :size].reshape(-1, outputs, features)
    columns = ColumnFeatures.of(module.effects.features)
    return replace(found, matrices=matrices, biases=biases, columns=columns, effects=effects)


def _times(stacks: dict[int, Tensor], factor: float) -> dict[int, Tensor]:
    """The last of them multiplied."""
    last = max(stacks)
    return {place: stack * factor if place == last else stack for place, stack in stacks.items()}


def _uncalibrated(found: StackedDraws) -> StackedDraws:
    """The same with slope and shifts in the last layer, under the usual likelihood of classes; the rest stays."""
    likelihood = found.likelihood
    assert isinstance(likelihood, Calibrated)
    last = max(found.matrices)
    if last != len(found.layers) - 1:
        raise Refusal("posterior: its network ends in an activation, and recalibrated outputs have no exported form")
    shifts = torch.tensor(likelihood.shifts, dtype=found.matrices[last].dtype)
    if likelihood.one_logit:
        shifts = shifts[1:] - shifts[:1]
    matrices = _times(found.matrices, likelihood.slope)
    before = found.biases.get(last, torch.zeros_like(matrices[last][..., 0]))
    plain: Likelihood = Bernoulli() if likelihood.one_logit else Categorical(likelihood.classes)
    if likelihood.floor > 0 or likelihood.curve or likelihood.power != 1:
        plain = replace(likelihood, slope=1.0, shifts=(0.0,) * likelihood.classes)
    return replace(
        found,
        matrices=matrices,
        biases={**found.biases, last: before * likelihood.slope + shifts},
        likelihood=plain,
        effects=None if found.effects is None else found.effects * likelihood.slope,
    )


def _activation_name(layer: nn.Module | None) -> str:
    if isinstance(layer, nn.GELU):
        return "gelu" if layer.approximate == "none" else "gelu_tanh"
    name = _ACTIVATIONS.get(type(layer))
    if name is None:
        known = ", ".join(kind.__name__ for kind in (*_ACTIVATIONS, nn.GELU))
        raise Refusal(f"posterior: the activation {layer} has no exported form; those that have are {known}")
    return name
