"""Priors over the flat parameter vector. A prior is not data: its gradient joins in `tell`, never clipped or noised.

Samplers and point estimates need the energy -log p. Variational methods need the divergence KL(q || p) of a Gaussian
q = N(mean, deviation^2) in every coordinate: Gaussian, Laplace and flat priors have it in closed form, for any other
`add_divergence_gradient_` takes the average over draws of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from confide.errors import Refusal


@runtime_checkable
class Prior(Protocol):
    """A density over parameters, seen through its energy -log p."""

    def energy(self, position: Tensor) -> Tensor:
        """-log p(position), up to a constant."""

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """out += factor * d(energy)/d(position), in place."""


@runtime_checkable
class Divergence(Protocol):
    """A prior whose divergence from an independent Gaussian is known in closed form."""

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """KL(N(mean, deviation^2) || p), summed; up to a constant where p is improper."""

    def divergence_slopes(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Its derivatives with respect to mean and deviation."""


def add_divergence_gradient_(
    prior: Any,
    mean: Tensor,
    deviation: Tensor,
    noise: Tensor,
    out_mean: Tensor,
    out_deviation: Tensor,
    factor: float = 1.0,
) -> None:
    """out += factor * gradient of KL(N(mean, deviation^2) || prior), in place.

    In closed form where the prior has one. Otherwise from the draws w = mean + deviation * noise, noise of shape
    (draws, *mean.shape), with the entropy of the Gaussian exact:

        d/dmean = E[ r'(w) ],    d/ddeviation = E[ r'(w) noise ] - 1 / deviation,    r = -log p.
    """
    if isinstance(prior, Divergence):
        slopes = prior.divergence_slopes(mean, deviation)
        out_mean.add_(slopes[0], alpha=factor)
        out_deviation.add_(slopes[1], alpha=factor)
        return
    out_deviation.sub_(deviation.reciprocal(), alpha=factor)
    for one in noise:
        slope = prior.add_energy_gradient_(torch.addcmul(mean, deviation, one), torch.zeros_like(mean))
        out_mean.add_(slope, alpha=factor / len(noise))
        out_deviation.addcmul_(slope, one, value=factor / len(noise))


def _check_scale(scale: float, name: str = "scale") -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise Refusal(f"{name}={scale}: must be a finite number > 0")


@dataclass(frozen=True)
class GaussianPrior:
    """Independent N(0, scale^2): energy |theta|^2 / (2 scale^2)."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def energy(self, position: Tensor) -> Tensor:
        return position.square().sum() / (2 * self.scale**2)

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out.add_(position, alpha=factor / self.scale**2)

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        ratio = (mean.square() + deviation.square()) / self.scale**2
        return ((ratio - 1) / 2 - (deviation / self.scale).log()).sum()

    def divergence_slopes(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        return mean / self.scale**2, deviation / self.scale**2 - deviation.reciprocal()


@dataclass(frozen=True)
class LaplacePrior:
    """Independent LaplacePrior(0, scale): energy |theta|_1 / scale.

    Under w ~ N(m, d^2), E|w| = d sqrt(2/pi) exp(-t^2) + m erf(t) with t = m / (d sqrt 2); its derivatives are erf(t)
    and sqrt(2/pi) exp(-t^2).
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def energy(self, position: Tensor) -> Tensor:
        return position.abs().sum() / self.scale

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out.add_(torch.sign(position), alpha=factor / self.scale)

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        of_mean, of_deviation = self._slopes_of_size(mean, deviation)
        size = mean * of_mean + deviation * of_deviation
        entropy = deviation.log() + 0.5 * math.log(2 * math.pi * math.e)
        return (size / self.scale + math.log(2 * self.scale) - entropy).sum()

    def divergence_slopes(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        of_mean, of_deviation = self._slopes_of_size(mean, deviation)
        return of_mean / self.scale, of_deviation / self.scale - deviation.reciprocal()

    def _slopes_of_size(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        ratio = mean / (deviation * math.sqrt(2))
        return torch.erf(ratio), torch.exp(-ratio.square()) * math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class ScaleMixturePrior:
    """Independent mixtures share * N(0, wide^2) + (1 - share) * N(0, narrow^2) (Blundell et al., ICML 2015).

    A narrow part that holds most weights near zero and a wide one that lets a few be large. Its divergence has no
    closed form.
    """

    share: float = 0.5
    wide: float = 1.0
    narrow: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise Refusal(f"share={self.share}: must be in (0, 1)")
        _check_scale(self.wide, "wide")
        _check_scale(self.narrow, "narrow")

    def energy(self, position: Tensor) -> Tensor:
        wide, narrow = self._log_densities(position)
        return -torch.logaddexp(wide, narrow).sum()

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        wide, narrow = self._log_densities(position)
        from_wide = torch.sigmoid(wide - narrow)
        precision = from_wide / self.wide**2 + (1 - from_wide) / self.narrow**2
        return out.addcmul_(position, precision, value=factor)

    def _log_densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        squared = position.square() / 2
        wide = math.log(self.share / self.wide) - squared / self.wide**2
        return wide, math.log((1 - self.share) / self.narrow) - squared / self.narrow**2


@dataclass(frozen=True)
class FlatPrior:
    """The improper constant density: no pull at all."""

    def energy(self, position: Tensor) -> Tensor:
        return position.new_zeros(())

    def add_energy_gradient_(self, position: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return out

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        return -deviation.log().sum()

    def divergence_slopes(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(mean), -deviation.reciprocal()


@dataclass(frozen=True)
class LogUniformPrior:
    """The improper density 1 / |theta|, uniform in log |theta|: the prior of variational dropout.

    Its divergence depends on log alpha = log(deviation^2 / mean^2) alone. It has no closed form; the approximation of
    Molchanov, Ashukha and Vetrov (ICML 2017), good to 0.01 nats in every coordinate, is

        KL = k1 (1 - sigmoid(k2 + k3 log alpha)) + log(1 + 1/alpha) / 2,     zero as alpha grows.

    It cannot serve as an energy: 1 / |theta| has no maximum that a point estimate could find.
    """

    K1: ClassVar[float] = 0.63576
    K2: ClassVar[float] = 1.87320
    K3: ClassVar[float] = 1.48695

    def divergence(self, mean: Tensor, deviation: Tensor) -> Tensor:
        log_alpha = self._log_alpha(mean, deviation)
        rest = torch.sigmoid(-(self.K2 + self.K3 * log_alpha))
        return (self.K1 * rest + torch.nn.functional.softplus(-log_alpha) / 2).sum()

    def divergence_slopes(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        log_alpha = self._log_alpha(mean, deviation)
        rest = torch.sigmoid(-(self.K2 + self.K3 * log_alpha))
        slope = -self.K1 * self.K3 * rest * (1 - rest) - torch.sigmoid(-log_alpha) / 2
        # d log alpha / d mean = -2 / mean, and the slope vanishes faster than the mean does.
        safe = torch.where(mean.abs() < SMALLEST_MEAN, torch.full_like(mean, math.inf), mean)
        return -2 * slope / safe, 2 * slope / deviation

    def _log_alpha(self, mean: Tensor, deviation: Tensor) -> Tensor:
        return 2 * (deviation.log() - mean.abs().clamp(min=SMALLEST_MEAN).log())


SMALLEST_MEAN = 1e-12  # its square, 1e-24, is far above the smallest normal number in single precision
PRIORS: dict[str, Any] = {
    "gaussian": GaussianPrior,
    "laplace": LaplacePrior,
    "scale-mixture": ScaleMixturePrior,
    "flat": FlatPrior,
}
