"""Likelihoods of counts: Poisson, and negative binomial where counts spread more than their mean.

The network's output is the logarithm of the mean in units of `mean`, a public guess: an output of zero says `mean`, so
that a prior around zero is a prior around it. A target that is no whole number, or is negative, tells nothing: its
record counts as zero.
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
"""Outputs beyond +-15 count as that: the mean is then three million times the guess, or none at all."""


def counts_in(y: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets are counts, and the targets with zeros in place of the others."""
    valid = (y >= 0) & (y == y.floor()) & torch.isfinite(y)
    return valid, torch.where(valid, y, torch.zeros_like(y))


def _check_mean(mean: float) -> None:
    if not (math.isfinite(mean) and mean > 0):
        raise Refusal(f"mean={mean}: must be a finite number > 0, about the mean that is expected")


@dataclass(frozen=True)
class CountPredictive(RealPredictive):
    """A law of counts per draw, by means and variances: negative binomial where the variance is larger, else Poisson.

    Quantiles and ends of intervals are whole numbers.
    """

    def log_densities(self, y: Tensor) -> Tensor:
        valid, count = counts_in(y.to(self.means.dtype))
        size = self._size
        poisson = torch.xlogy(count, self.means) - self.means
        spread = (
            torch.lgamma(count + size) - torch.lgamma(size)
            - size * torch.log1p(self.means / size) + torch.xlogy(count, self.means / (self.means + size))
        )  # fmt: skip
        found = torch.where(self._spread, spread, poisson) - torch.lgamma(count + 1)
        return torch.where(valid, found, torch.full_like(found, -torch.inf))

    def cumulatives(self, y: Tensor) -> Tensor:
        count = y.to(self.means.dtype).floor()
        known = count.clamp(min=0).expand(self.means.shape)
        found = torch.special.gammaincc(known + 1, self.means.clamp(min=torch.finfo(self.means.dtype).tiny))
        if bool(self._spread.any()):
            from scipy.special import betainc

            size = self._size.double()
            share = (size / (size + self.means.double())).clamp(1e-300, 1.0)
            exact = betainc(size.numpy(), known.double().numpy() + 1, share.numpy())
            found = torch.where(self._spread, torch.as_tensor(exact).to(found.dtype), found)
        return torch.where(count < 0, torch.zeros_like(found), found)

    def inside(self, y: Tensor, level: float) -> Tensor:
        """Between the two quantiles, ends included: a count has a probability of its own."""
        tail = (1 - level) / 2
        return (self.cumulative(y) >= tail) & (self.cumulative(y - 1) < 1 - tail)

    def bracket(self) -> tuple[Tensor, Tensor]:
        most = (self.means + 40 * self.variances.sqrt()).amax(0) + 40
        return torch.full_like(most, -1.0), most.ceil()

    def _bisected(self, level: float) -> Tensor:
        """The smallest count whose cumulative probability reaches the level."""
        low, high = self.bracket()
        for _ in range(60):
            middle = ((low + high) / 2).floor()
            below = self.cumulative(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def rescaled(self, scale: float, shift: float) -> CountPredictive:
        """Counts have no units."""
        if (scale, shift) != (1.0, 0.0):
            raise Refusal(f"scale={scale}, shift={shift}: counts cannot be rescaled; leave their target as it is")
        return self

    @property
    def _spread(self) -> Tensor:
        return self.variances > self.means * (1 + 1e-6)

    @property
    def _size(self) -> Tensor:
        """r of the variance m + m^2 / r; one where there is no spread."""
        excess = torch.where(self._spread, self.variances - self.means, torch.ones_like(self.means))
        return torch.where(self._spread, self.means.square() / excess, torch.ones_like(self.means))


@dataclass(frozen=True)
class Poisson:
    """y ~ Poisson(mean exp(output))."""

    mean: float = 1.0
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        _check_mean(self.mean)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return self.mean

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        valid, count = counts_in(y.reshape(len(y)))
        log_rate = logits.reshape(len(logits)).clamp(-MOST, MOST) + math.log(self.mean)
        found = log_rate.exp() - count * log_rate + torch.lgamma(count + 1)
        return torch.where(valid, found, torch.zeros_like(found))

    def predictive(self, outputs: Tensor, weights: Tensor) -> CountPredictive:
        means = self.mean * outputs.reshape(outputs.shape[:2]).clamp(-MOST, MOST).exp()
        return CountPredictive(means, means, weights)


@dataclass(frozen=True)
class NegativeBinomial:
    """y with mean m = mean exp(output_0) and variance m + m^2 / r: r = smallest + softplus(output_1) is learnt too.

    A smallest r keeps a single large count from being explained by any law at all.
    """

    mean: float = 1.0
    smallest: float = field(default=0.05)
    name: ClassVar[str] = "negative-binomial"

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if not (math.isfinite(self.smallest) and self.smallest > 0):
            raise Refusal(f"smallest={self.smallest}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return 2

    @property
    def curvature(self) -> float:
        return self.mean

    def size(self, raw: Tensor) -> Tensor:
        return self.smallest + F.softplus(raw)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        logits = logits_of(output)
        valid, count = counts_in(y.reshape(len(y)))
        logits = logits.reshape(len(logits), 2)
        log_mean, size = logits[:, 0].clamp(-MOST, MOST) + math.log(self.mean), self.size(logits[:, 1])
        log_total = torch.logaddexp(log_mean, size.log())
        found = (
            torch.lgamma(size) + torch.lgamma(count + 1) - torch.lgamma(count + size)
            - size * (size.log() - log_total) - count * (log_mean - log_total)
        )  # fmt: skip
        return torch.where(valid, found, torch.zeros_like(found))

    def predictive(self, outputs: Tensor, weights: Tensor) -> CountPredictive:
        means = self.mean * outputs[..., 0].clamp(-MOST, MOST).exp()
        return CountPredictive(means, means + means.square() / self.size(outputs[..., 1]), weights)
