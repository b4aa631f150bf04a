"""All draws of a posterior as stacks of matrices, one per layer: what every export is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from confide.errors import Refusal
from confide.posteriors.base import Posterior
from confide.posteriors.prediction.stacked import chain_of
from confide.posteriors.variational import DropoutNetwork

LINEAR = "linear"
LIKELIHOODS = ("categorical", "bernoulli", "probit", "gaussian", "heteroscedastic-gaussian")
"""Whose predictive distribution the exports know."""
_ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.SiLU: "silu", nn.Identity: "identity"}


@dataclass(frozen=True)
class StackedDraws:
    """layers    names in order: "linear" or an activation
    weights   of the draws, adding up to one
    matrices  by place among the layers: (draws, outputs, inputs)
    biases    by place: (draws, outputs)
    """

    layers: list[str]
    weights: Tensor
    matrices: dict[int, Tensor]
    biases: dict[int, Tensor]

    @property
    def features(self) -> int:
        return int(self.matrices[0].shape[2])

    def arrays(self) -> dict[str, Any]:
        """As numpy arrays by the names of the .npz file."""
        return {
            "weights": self.weights.numpy(),
            **{f"weight_{place}": matrix.numpy() for place, matrix in self.matrices.items()},
            **{f"bias_{place}": bias.numpy() for place, bias in self.biases.items()},
        }


def stacked_draws(posterior: Posterior) -> StackedDraws:
    """The draws of a chain of linear layers and activations; any other network is refused."""
    chain = chain_of(posterior.module, masked=isinstance(posterior, DropoutNetwork))
    if chain is None:
        raise Refusal(
            f"posterior: its network, {type(posterior.module).__name__}, is not a chain of linear layers and "
            "activations; export_program takes any network"
        )
    name = posterior.likelihood.name
    if name not in LIKELIHOODS:
        raise Refusal(
            f"posterior: its likelihood, {name}, has no exported form; those that have are {', '.join(LIKELIHOODS)}, "
            "and load_posterior reads any"
        )
    draws, weights = posterior.weighted_draws()
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
    return StackedDraws(layers, weights.double(), matrices, biases)


def _activation_name(layer: nn.Module | None) -> str:
    if isinstance(layer, nn.GELU):
        return "gelu" if layer.approximate == "none" else "gelu_tanh"
    name = _ACTIVATIONS.get(type(layer))
    if name is None:
        known = ", ".join(kind.__name__ for kind in (*_ACTIVATIONS, nn.GELU))
        raise Refusal(f"posterior: the activation {layer} has no exported form; those that have are {known}")
    return name
