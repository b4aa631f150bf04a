"""All draws as one torch module: from encoded inputs to probabilities or means with both kinds of uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from confide.export.column_features import ColumnFeatures
from confide.export.stacked_draws import LINEAR, StackedDraws
from confide.models.likelihoods import likelihood_from_dict
from confide.models.predictive import ClassPredictive, LabelPredictive

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda values: nn.functional.gelu(values, approximate="tanh"),
    "identity": lambda values: values,
}


class AveragedDraws(nn.Module):
    """forward(inputs) -> centre, epistemic, aleatoric, in the target's units and double precision."""

    weights: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, draws: StackedDraws, about: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = tuple(draws.layers)
        self.likelihood = likelihood_from_dict(about["likelihood"])
        for name, key, usual in (("scale", "scale", 1.0), ("shift", "centre", 0.0)):
            self.register_buffer(name, torch.tensor(about.get(key, usual), dtype=torch.float64))
        self.register_buffer("weights", draws.weights.clone())
        for place, matrix in draws.matrices.items():
            self.register_buffer(f"weight_{place}", matrix.transpose(1, 2).contiguous())
        for place, bias in draws.biases.items():
            self.register_buffer(f"bias_{place}", bias[:, None].clone())
        if draws.effects is not None:
            self.register_buffer("effects", draws.effects.transpose(1, 2).contiguous())
        self.columns = None if draws.columns is None else _Columns(draws.columns, draws.matrices[0].dtype)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of shape (n, features)."""
        values = features = inputs if self.columns is None else self.columns(inputs)
        buffers = dict(self.named_buffers())
        for place, layer in enumerate(self.layers):
            if layer == LINEAR:
                values = values @ buffers[f"weight_{place}"]
                if f"bias_{place}" in buffers:
                    values = values + buffers[f"bias_{place}"]
            else:
                values = _ACTIVATIONS[layer](values)
        if "effects" in buffers:
            values = values + features @ buffers["effects"]
        return self._averaged(values.double())

    def _averaged(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the likelihood says; several numbers have uncertainties of their own, in the units of each."""
        found = self.likelihood.predictive(outputs, self.weights)
        if isinstance(found, ClassPredictive | LabelPredictive):
            return found.probabilities, found.epistemic, found.aleatoric
        centre, noise = (torch.einsum("s,s...->...", self.weights, part) for part in (found.means, found.variances))
        doubt = torch.einsum("s,s...->...", self.weights, (found.means - centre).square())
        return centre * self.scale + self.shift, doubt * self.scale**2, noise * self.scale**2


class _Columns(nn.Module):
    """Encoded inputs to the features of an additive model."""

    def __init__(self, columns: ColumnFeatures, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name in ("numbers", "categories", "knots", "widths", "slopes", "angles", "centres", "amplitudes"):
            self.register_buffer(name, torch.as_tensor(getattr(columns, name)).clone())
        self.register_buffer("start", torch.as_tensor(columns.heights[:, 0]).clone())

    def forward(self, inputs: Tensor) -> Tensor:
        buffer = dict(self.named_buffers())
        value = ((inputs[:, buffer["numbers"]].double() + 1) / 2).clamp(0, 1)
        beyond = (value[:, :, None] - buffer["knots"][:-1]).clamp(min=0.0)
        u = buffer["start"] + (torch.minimum(beyond, buffer["widths"]) * buffer["slopes"]).sum(-1)
        waves = torch.cos(u[:, :, None] * buffer["angles"]).flatten(1)
        constant = torch.ones_like(inputs[:, :1]).double()
        features = torch.cat([constant, waves, inputs[:, buffer["categories"]].double()], 1)
        return ((features - buffer["centres"]) * buffer["amplitudes"]).to(self.dtype)
