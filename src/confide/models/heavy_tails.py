"""Likelihoods of a number with outliers: Laplace and Student's t, each around the network's output.

A record far away pulls with a bounded force, so that neither a clip nor a few wrong values decide the fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.models.predictive import RealPredictive
from confide.models.tokens import logits_of


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise Refusal(f"{name}={value}: must be a finite number > 0")


@dataclass(frozen=True)
class LaplacePredictive(RealPredictive):
    """A Laplace law per draw, by means and variances; the scale b has variance 2 b^2."""

    @property
    def _scale(self) -> Tensor:
        return (self.variances / 2).sqrt()

    def log_densities(self, y: Tensor) -> Tensor:
        return -(y - self.means).abs() / self._scale - torch.log(2 * self._scale)

    def cumulatives(self, y: Tensor) -> Tensor:
        distance = (y - self.means) / self._scale
        tail = torch.exp(-distance.abs()) / 2
        return torch.where(distance < 0, tail, 1 - tail)

    def rescaled(self, scale: float, shift: float) -> LaplacePredictive:
        return LaplacePredictive(self.means * scale + shift, self.variances * scale**2, self.weights)


@dataclass(frozen=True)
class Laplace:
    """y ~ Laplace(output, scale): the output is the median, and a record's gradient is bounded."""

    scale: float = 0.1
    name: ClassVar[str] = "laplace"

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1 / self.scale**2  # of the Gaussian with this scale: a kink has none of its own

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        target = y.reshape(len(y))
        return (logits.reshape(len(logits)) - target).abs() / self.scale + math.log(2 * self.scale)

    def predictive(self, outputs: Tensor, weights: Tensor) -> LaplacePredictive:
        means = outputs.reshape(outputs.shape[:2])
        return LaplacePredictive(means, torch.full_like(means, 2 * self.scale**2), weights)


@dataclass(frozen=True)
class StudentTPredictive(RealPredictive):
    """A Student law per draw: location `means`, `scales`, degrees of freedom `freedom`, each (draws, inputs).

    `variances` are those of the laws: infinite up to two degrees of freedom.
    """

    scales: Tensor = field(default_factory=lambda: torch.zeros(0))
    freedom: Tensor = field(default_factory=lambda: torch.zeros(0))

    def log_densities(self, y: Tensor) -> Tensor:
        nu, distance = self.freedom, (y - self.means) / self.scales
        constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * torch.log(nu * math.pi) - self.scales.log()
        return constant - (nu + 1) / 2 * torch.log1p(distance.square() / nu)

    def cumulatives(self, y: Tensor) -> Tensor:
        from scipy.special import stdtr

        distance = ((y - self.means) / self.scales).double()
        return torch.as_tensor(stdtr(self.freedom.double().numpy(), distance.numpy())).to(self.means.dtype)

    def bracket(self) -> tuple[Tensor, Tensor]:
        """Tails of power nu reach far: one in 10^9 lies beyond about (10^9)^(1/nu) scales."""
        reach = self.scales * 40 * (1e9 ** (1 / self.freedom)).clamp(max=1e9)
        return (self.means - reach).amin(0), (self.means + reach).amax(0)

    def rescaled(self, scale: float, shift: float) -> StudentTPredictive:
        means, variances = self.means * scale + shift, self.variances * scale**2
        return StudentTPredictive(means, variances, self.weights, self.scales * scale, self.freedom)


@dataclass(frozen=True)
class StudentT:
    """y = output + scale t, with t of Student's law: a record far away counts for little."""

    scale: float = 0.1
    freedom: float = 4.0
    name: ClassVar[str] = "student-t"

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)
        _check_positive("freedom", self.freedom)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return (self.freedom + 1) / self.freedom / self.scale**2

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        distance = (logits.reshape(len(logits)) - y.reshape(len(y))) / self.scale
        constant = (
            math.lgamma(self.freedom / 2) - math.lgamma((self.freedom + 1) / 2)
            + 0.5 * math.log(self.freedom * math.pi) + math.log(self.scale)
        )  # fmt: skip
        return (self.freedom + 1) / 2 * torch.log1p(distance.square() / self.freedom) + constant

    def predictive(self, outputs: Tensor, weights: Tensor) -> StudentTPredictive:
        means = outputs.reshape(outputs.shape[:2])
        nu = self.freedom
        variance = self.scale**2 * nu / (nu - 2) if nu > 2 else math.inf
        parts = (torch.full_like(means, value) for value in (variance, self.scale, nu))
        variances, scales, freedom = parts
        return StudentTPredictive(means, variances, weights, scales, freedom)
