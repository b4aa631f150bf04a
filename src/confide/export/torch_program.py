"""All draws as one torch module: from encoded inputs to probabilities or means with both kinds of uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from confide.export.column_features import ColumnFeatures
from confide.export.stacked_draws import LINEAR, StackedDraws

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

    def __init__(self, draws: StackedDraws, about: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = tuple(draws.layers)
        self.likelihood: dict[str, Any] = dict(about["likelihood"])
        self.scale, self.shift = float(about.get("scale", 1.0)), float(about.get("centre", 0.0))
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
        name, weights = self.likelihood["name"], self.weights
        if name in ("gaussian", "heteroscedastic-gaussian"):
            means = outputs[:, :, 0]
            if name == "gaussian":
                noise = torch.full_like(means[0], self.likelihood["noise_scale"] ** 2)
            else:
                spread = self.likelihood["smallest"] + nn.functional.softplus(outputs[:, :, 1])
                noise = weights @ spread.square()
            centre = weights @ means
            doubt = (weights @ means.square() - centre.square()).clamp(min=0.0)
            return centre * self.scale + self.shift, doubt * self.scale**2, noise * self.scale**2
        if name == "categorical":
            probabilities = outputs.softmax(-1)
        else:
            first = torch.sigmoid(outputs) if name == "bernoulli" else torch.special.ndtr(outputs)
            probabilities = torch.cat([1 - first, first], -1)
        centre = torch.einsum("s,snk->nk", weights, probabilities)
        noise = weights @ torch.special.entr(probabilities).sum(-1)
        return centre, (torch.special.entr(centre).sum(-1) - noise).clamp(min=0.0), noise


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
