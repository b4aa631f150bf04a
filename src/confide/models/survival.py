"""Likelihoods of a time until an event, of which only a lower bound is known for some: exponential and Weibull.

A target is (time, observed): observed 1 says that the event came at that time, 0 that it had not come by then. The
network's output is the logarithm of the time scale in units of `time`, a public guess. A target whose time is not a
finite number > 0, or whose mark is neither 0 nor 1, tells nothing: its record counts as zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.errors import Refusal
from confide.models.predictive import RealPredictive
from confide.models.tokens import logits_of

MOST = 15.0
"""Outputs beyond +-15 count as that: times three million times the guess, or as much shorter."""
LARGEST_HAZARD = 50.0
"""Logarithm of the largest accumulated hazard: beyond it nobody survives, and single precision does not overflow."""
AT_ZERO = 0.5413248546129181
"""softplus(this) = 1: outputs of zero make a Weibull law exponential."""


def times_in(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets are times with a mark, the times with ones in place of the others, and the marks."""
    y = y.reshape(len(y), 2)
    time, mark = y[:, 0], y[:, 1]
    valid = (time > 0) & torch.isfinite(time) & ((mark == 0) | (mark == 1))
    return valid, torch.where(valid, time, torch.ones_like(time)), torch.where(valid, mark, torch.zeros_like(mark))


@dataclass(frozen=True)
class SurvivalPredictive(RealPredictive):
    """A Weibull law of the time per draw: `scales` and `shapes`, each (draws, inputs); shape 1 is exponential."""

    scales: Tensor = field(default_factory=lambda: torch.zeros(0))
    shapes: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of_laws(cls, scales: Tensor, shapes: Tensor, weights: Tensor) -> SurvivalPredictive:
        first, second = (torch.exp(torch.lgamma(1 + power / shapes)) for power in (1, 2))
        variances = scales.square() * (second - first.square()).clamp(min=0)
        return cls(scales * first, variances, weights, scales, shapes)

    def log_densities(self, y: Tensor) -> Tensor:
        """Of times; with marks, (inputs, 2), of what is known: the density, or the chance to last longer."""
        time, mark = (y[:, 0], y[:, 1]) if y.ndim == 2 else (y, torch.ones_like(y))
        known = time.clamp(min=torch.finfo(time.dtype).tiny)
        log_time = known.log() - self.scales.log()
        hazard = torch.exp((self.shapes * log_time).clamp(max=LARGEST_HAZARD))
        density = self.shapes.log() - self.scales.log() + (self.shapes - 1) * log_time
        found = mark * density - hazard
        return torch.where(time > 0, found, torch.full_like(found, -torch.inf))

    def cumulatives(self, y: Tensor) -> Tensor:
        ratio = (y / self.scales).clamp(min=0)
        return -torch.expm1(-ratio.pow(self.shapes))

    def survival(self, time: Tensor | float) -> Tensor:
        """The chance that the event has not come by a time: one value per input."""
        return 1 - self.cumulative(torch.as_tensor(time, dtype=self.means.dtype).expand(self.means.shape[1]))

    def bracket(self) -> tuple[Tensor, Tensor]:
        """No law lasts beyond a hazard of 40, but for e^-40 of it."""
        most = (self.scales * torch.exp(math.log(40) / self.shapes)).amax(0)
        return torch.zeros_like(most), most

    def rescaled(self, scale: float, shift: float) -> SurvivalPredictive:
        if shift != 0 or scale <= 0:
            raise Refusal(f"scale={scale}, shift={shift}: times start at zero; leave their target as it is")
        return SurvivalPredictive.of_laws(self.scales * scale, self.shapes, self.weights)


@dataclass(frozen=True)
class Exponential:
    """A time of constant hazard, with mean `time` exp(output); targets are (time, observed)."""

    time: float = 1.0
    name: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        _check_time(self.time)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        return _loss(logits.reshape(len(logits)), None, y, self.time)

    def predictive(self, outputs: Tensor, weights: Tensor) -> SurvivalPredictive:
        scales = self.time * outputs.reshape(outputs.shape[:2]).clamp(-MOST, MOST).exp()
        return SurvivalPredictive.of_laws(scales, torch.ones_like(scales), weights)


@dataclass(frozen=True)
class Weibull:
    """A time of rising or falling hazard: scale `time` exp(output_0), shape smallest + softplus(output_1 + c).

    Outputs of zero are the exponential law but for `smallest`, which keeps the mean finite.
    """

    time: float = 1.0
    smallest: float = 0.1
    name: ClassVar[str] = "weibull"

    def __post_init__(self) -> None:
        _check_time(self.time)
        if not (math.isfinite(self.smallest) and self.smallest > 0):
            raise Refusal(f"smallest={self.smallest}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return 2

    @property
    def curvature(self) -> float:
        return 2.0

    def shape(self, raw: Tensor) -> Tensor:
        return self.smallest + F.softplus(raw + AT_ZERO)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        logits = logits.reshape(len(logits), 2)
        return _loss(logits[:, 0], self.shape(logits[:, 1]), y, self.time)

    def predictive(self, outputs: Tensor, weights: Tensor) -> SurvivalPredictive:
        scales = self.time * outputs[..., 0].clamp(-MOST, MOST).exp()
        return SurvivalPredictive.of_laws(scales, self.shape(outputs[..., 1]), weights)


def _loss(log_scale: Tensor, shape: Tensor | None, y: Tensor, unit: float) -> Tensor:
    """-log of the density where the event was seen, of the survival where it was not."""
    valid, time, mark = times_in(y)
    log_scale = log_scale.clamp(-MOST, MOST) + math.log(unit)
    log_time = time.log() - log_scale
    if shape is None:
        found = log_time.clamp(max=LARGEST_HAZARD).exp() + mark * log_scale
    else:
        hazard = (shape * log_time).clamp(max=LARGEST_HAZARD).exp()
        found = hazard - mark * (shape.log() - log_scale + (shape - 1) * log_time)
    return torch.where(valid, found, torch.zeros_like(found))


def _check_time(time: float) -> None:
    if not (math.isfinite(time) and time > 0):
        raise Refusal(f"time={time}: must be a finite number > 0, about the time that is expected")
