"""Moment propagation through fully connected ReLU networks: probabilistic backpropagation.

Every weight is an independent Gaussian. Layer by layer the outputs are treated as independent Gaussians with the
exact mean and variance of their sums; a ReLU of a Gaussian has closed moments. With a = (z, 1) the layer's input, of
mean za and variance va, and weights of mean M and variance V,

    mean      M za
    variance  V za^2 + (M^2 + V) va                    (squares entry by entry)
    ReLU      E[h] = m Phi(r) + s phi(r),  E[h^2] = (m^2 + s^2) Phi(r) + m s phi(r),  r = m / s.

Paper: Hernandez-Lobato and Adams, ICML 2015. The derivatives of log Z with respect to all M and V are outer products
of small per-layer vectors, so one backward pass serves a whole batch and no record is visited alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.models.networks import Recipe

_SMALLEST_VARIANCE = 1e-18  # keeps the square root differentiable where a unit is surely off
LogNormaliser = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WeightLayout:
    """Where the weights stand in one vector: layer by layer, unit by unit, the bias last.

    `Layout.of` reads it off a recipe. The order of a module's own flat vector (all weights of a layer, then its
    biases) is reached by `to_module` and left by `from_module`.
    """

    widths: tuple[int, ...]

    @classmethod
    def of(cls, recipe: Recipe, inputs: Tensor | None = None) -> WeightLayout:
        """`inputs` is an affine map in front of the first layer, which then sees as many numbers as it has rows."""
        if recipe.hidden and recipe.activation != "relu":
            raise Refusal(f"activation={recipe.activation!r}: moments are known for relu networks; use relu")
        features = recipe.features if inputs is None else len(inputs)
        return cls((features, *recipe.hidden, recipe.outputs))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Units and inputs (with the bias) of every layer."""
        return tuple((units, inputs + 1) for inputs, units in itertools.pairwise(self.widths))

    @property
    def size(self) -> int:
        return sum(units * inputs for units, inputs in self.shapes)

    def split(self, vector: Tensor) -> list[Tensor]:
        """One matrix (..., units, inputs + 1) for every layer."""
        parts = vector.split([units * inputs for units, inputs in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([matrix.flatten(-2) for matrix in matrices], -1)

    def fan_in(self) -> Tensor:
        """Inputs with the bias of the unit that each weight belongs to."""
        return self.join(
            [torch.full(shape, float(shape[1]), dtype=torch.float64) for shape in self.shapes],
        )

    @cached_property
    def _order(self) -> Tensor:
        """Position in this layout of every entry of the module's vector."""
        places = self.split(torch.arange(self.size))
        return torch.cat([torch.cat([place[:, :-1].flatten(), place[:, -1]]) for place in places])

    def to_module(self, vector: Tensor) -> Tensor:
        return vector[..., self._order]

    def from_module(self, vector: Tensor) -> Tensor:
        return torch.empty_like(vector).index_copy(-1, self._order, vector)


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, a) for a ~ N(mean, variance)."""
    scale = variance.sqrt()
    ratio = mean / scale
    below = torch.special.ndtr(ratio)
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    first = mean * below + scale * density
    second = (mean.square() + variance) * below + mean * scale * density
    return first, (second - first.square()).clamp(min=_SMALLEST_VARIANCE)


@dataclass(frozen=True)
class _MomentLayer:
    """One layer's pass: its input moments, and the moments of its sums, which lead the backward pass."""

    input_mean: Tensor
    input_variance: Tensor | None
    mean: Tensor
    variance: Tensor


def _through(weights: Tensor, inputs: Tensor) -> Tensor:
    """Weights (units, inputs) shared by all records, or (records, units, inputs) for each its own."""
    return inputs @ weights.mT if weights.ndim == 2 else (weights @ inputs[..., None])[..., 0]


def _forward(means: list[Tensor], variances: list[Tensor], x: Tensor, leaves: bool = False) -> list[_MomentLayer]:
    """Moments of every layer's sums. With `leaves` the first sums start a graph for the backward pass."""
    ones = x.new_ones(len(x), 1)
    mean, variance = torch.cat([x, ones], 1), None
    layers: list[_MomentLayer] = []
    for number, (m, v) in enumerate(zip(means, variances, strict=True)):
        total = _through(m, mean)
        spread = _through(v, mean.square())
        if variance is not None:
            spread = spread + _through(m.square() + v, variance)
        if leaves and number == 0:
            total, spread = total.requires_grad_(), spread.requires_grad_()
        layers.append(_MomentLayer(mean, variance, total, spread))
        if number + 1 < len(means):
            hidden, doubt = relu_moments(total, spread.clamp(min=_SMALLEST_VARIANCE))
            mean, variance = torch.cat([hidden, ones], 1), torch.cat([doubt, torch.zeros_like(ones)], 1)
    return layers


def output_moments(layout: WeightLayout, mean: Tensor, variance: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the network's outputs, both (inputs, outputs), under independent Gaussian weights."""
    last = _forward(layout.split(mean), layout.split(variance), x)[-1]
    return last.mean, last.variance


@dataclass(frozen=True)
class Slopes:
    """Derivatives of log Z, one row per record, with the output moments they were taken at."""

    mean: Tensor
    variance: Tensor
    output_mean: Tensor
    output_variance: Tensor


def slopes(layout: WeightLayout, mean: Tensor, variance: Tensor, x: Tensor, log_normaliser: LogNormaliser) -> Slopes:
    """d log Z / d mean and d log Z / d variance of every weight, for every record.

    `mean` and `variance` are (size,) for all records together or (records, size) for each its own;
    `log_normaliser(output mean, output variance)` gives log Z per record.
    """
    means, variances = layout.split(mean), layout.split(variance)
    with torch.enable_grad():
        layers = _forward(means, variances, x, leaves=True)
        total = log_normaliser(layers[-1].mean, layers[-1].variance).sum()
        parts = [part for layer in layers for part in (layer.mean, layer.variance)]
        inner = torch.autograd.grad(total, parts, allow_unused=True, materialize_grads=True)
    to_mean: list[Tensor] = []
    to_variance: list[Tensor] = []
    for number, layer in enumerate(layers):
        by_mean, by_variance = inner[2 * number], inner[2 * number + 1]
        rows, doubts = _layer_slopes(layer, by_mean, by_variance, means[number])
        to_mean.append(rows)
        to_variance.append(doubts)
    last = layers[-1]
    return Slopes(layout.join(to_mean), layout.join(to_variance), last.mean.detach(), last.variance.detach())


def _layer_slopes(layer: _MomentLayer, by_mean: Tensor, by_variance: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    inputs = layer.input_mean.detach()
    rows = by_mean[:, :, None] * inputs[:, None, :]
    squares = inputs.square()
    if layer.input_variance is not None:
        doubt = layer.input_variance.detach()
        rows = rows + 2 * weights * (by_variance[:, :, None] * doubt[:, None, :])
        squares = squares + doubt
    return rows, by_variance[:, :, None] * squares[:, None, :]


def jacobians(layout: WeightLayout, mean: Tensor, variance: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean outputs (inputs, outputs), and their derivatives (inputs, outputs, size) by the means of all weights."""

    def of_column(column: int) -> Slopes:
        return slopes(layout, mean, variance, x, lambda output, _: output[:, column])

    found = [of_column(column) for column in range(layout.widths[-1])]
    return found[0].output_mean, torch.stack([one.mean for one in found], 1)
