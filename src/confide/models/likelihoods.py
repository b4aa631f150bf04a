"""Likelihoods: how a network's output explains a target.

Each gives one loss per record, and reads a predictive distribution off the outputs of many draws. A network's output is
a tensor, or an object that has it as `.logits`, as models of the transformers library give. Classes and Gaussian
targets are here, tokens, counts, orders, outliers, times and several targets in files of their own: LIKELIHOODS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.errors import Refusal
from confide.models.calibrated import Calibrated
from confide.models.counts import NegativeBinomial, Poisson
from confide.models.heavy_tails import Laplace, StudentT
from confide.models.ordinal import Ordinal
from confide.models.predictive import ClassPredictive, Predictive, RealPredictive
from confide.models.programs import ProgramLikelihood
from confide.models.several import MultiGaussian, MultiLabel
from confide.models.survival import Exponential, Weibull
from confide.models.tokens import Tokens, logits_of
from confide.wording import meant

__all__ = [
    "IN_OWN_UNITS", "LIKELIHOODS", "Bernoulli", "Categorical", "Exponential", "Gaussian", "HeteroscedasticGaussian",
    "Laplace", "LearntNoise", "Likelihood", "MultiGaussian", "MultiLabel", "NegativeBinomial", "Ordinal", "Poisson",
    "Probit", "StudentT", "Tokens", "Weibull", "check_likelihood", "is_own", "likelihood_from_dict",
    "likelihood_to_dict", "logits_of", "noise_scale_of",
]  # fmt: skip


@runtime_checkable
class Likelihood(Protocol):
    """How outputs explain targets; docs/skeletons/likelihood.py is one to copy.

    `name` stands in files, `outputs` is the width of the network's last layer that the likelihood expects.
    """

    name: ClassVar[str]

    @property
    def outputs(self) -> int: ...

    @property
    def curvature(self) -> float:
        """Largest second derivative of the loss in an output, about: what a step size must be small against."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """-log p(y | output), one value per record."""

    def predictive(self, outputs: Tensor, weights: Tensor) -> Predictive:
        """From outputs of shape (draws, inputs, ...) and draw weights to a predictive distribution."""


@dataclass(frozen=True)
class Categorical:
    """Softmax over `classes` logits."""

    classes: int
    name: ClassVar[str] = "categorical"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise Refusal(f"classes={self.classes}: classification needs at least 2 classes")

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(output), y, reduction="none")

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        return ClassPredictive(outputs.softmax(-1), weights)


@dataclass(frozen=True)
class Bernoulli:
    """One logit for the class 1 of two."""

    name: ClassVar[str] = "bernoulli"

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        logits = logits_of(output)
        logit = logits.reshape(len(logits))
        return F.binary_cross_entropy_with_logits(logit, y.to(logit.dtype), reduction="none")

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        one = outputs.reshape(outputs.shape[0], outputs.shape[1]).sigmoid()
        return ClassPredictive(torch.stack([1 - one, one], -1), weights)


@dataclass(frozen=True)
class Probit:
    """One output f for the class 1 of two, with probability Phi(f). Its moment matching has a closed form."""

    name: ClassVar[str] = "probit"

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        outputs = logits_of(output)
        value = outputs.reshape(len(outputs))
        loss: Tensor = -torch.special.log_ndtr((2 * y.to(value.dtype) - 1) * value)
        return loss

    def predictive(self, outputs: Tensor, weights: Tensor) -> ClassPredictive:
        value = outputs.reshape(outputs.shape[0], outputs.shape[1])
        return ClassPredictive(torch.special.ndtr(torch.stack([-value, value], -1)), weights)


@dataclass(frozen=True)
class Gaussian:
    """y ~ N(output, noise_scale^2) with a known noise scale."""

    noise_scale: float = 0.1
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_scale) and self.noise_scale > 0):
            raise Refusal(f"noise_scale={self.noise_scale}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def curvature(self) -> float:
        return 1 / self.noise_scale**2

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        # The constant is left out: it moves no gradient and no draw.
        return (logits_of(output).reshape(y.shape) - y).square() / (2 * self.noise_scale**2)

    def predictive(self, outputs: Tensor, weights: Tensor) -> RealPredictive:
        means = outputs.reshape(outputs.shape[0], outputs.shape[1])
        return RealPredictive(means, torch.full_like(means, self.noise_scale**2), weights)


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y ~ N(mean, scale^2) with both from the network: outputs (mean, raw), scale = smallest + softplus(raw).

    A two-headed network learns where the target is noisy. A network wrapped in `LearntNoise` learns one scale for all
    inputs. A smallest scale keeps the loss bounded below where the network fits a target exactly.
    """

    smallest: float = 0.01
    name: ClassVar[str] = "heteroscedastic-gaussian"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.smallest) and self.smallest > 0):
            raise Refusal(f"smallest={self.smallest}: must be a finite number > 0")

    @property
    def outputs(self) -> int:
        return 2

    @property
    def curvature(self) -> float:
        return 10.0  # at a noise scale of about 0.3, where targets are scaled to [-1, 1]

    def scale(self, raw: Tensor) -> Tensor:
        return self.smallest + F.softplus(raw)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        # Without the constant log(2 pi) / 2, as in the Gaussian with known noise.
        output = logits_of(output)
        scale = self.scale(output[..., 1]).reshape(y.shape)
        return ((output[..., 0].reshape(y.shape) - y) / scale).square() / 2 + scale.log()

    def predictive(self, outputs: Tensor, weights: Tensor) -> RealPredictive:
        return RealPredictive(outputs[..., 0], self.scale(outputs[..., 1]).square(), weights)


class NoiseParameter(nn.Linear):
    """A linear map of the constant one. A type of its own: methods that put distributions on weights leave it alone."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__(1, 1, bias=False, dtype=dtype)
        nn.init.constant_(self.weight, value)


class LearntNoise(nn.Module):
    """A network with one output and, beside it, one noise parameter that is the same for all inputs.

    For `HeteroscedasticGaussian`: outputs (mean, raw). The parameter is a linear map of the constant one, so that each
    record's gradient is found and clipped together with those of the network.
    """

    def __init__(
        self, network: nn.Module, scale: float = 0.1, likelihood: HeteroscedasticGaussian | None = None
    ) -> None:
        super().__init__()
        smallest = (likelihood or HeteroscedasticGaussian()).smallest
        if not (math.isfinite(scale) and scale > smallest):
            raise Refusal(f"scale={scale}: must be a finite number above the smallest scale, {smallest}")
        self.network = network
        excess = scale - smallest
        self.raw = NoiseParameter(excess + math.log(-math.expm1(-excess)), next(network.parameters()).dtype)

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        mean = logits_of(self.network(*x, **named))
        mean = mean.reshape(len(mean), 1)
        return torch.cat([mean, self.raw(torch.ones_like(mean))], 1)


LIKELIHOODS: dict[str, type[Likelihood]] = {
    cls.name: cls
    for cls in (
        Categorical, Bernoulli, Calibrated, Probit, Gaussian, HeteroscedasticGaussian, Poisson, NegativeBinomial,
        Ordinal, MultiLabel, StudentT, Laplace, Exponential, Weibull, MultiGaussian, Tokens,
    )
}  # fmt: skip
"""Everything that confide offers, by the name that stands in files."""


def is_own(likelihood: Likelihood) -> bool:
    """Whether it is one of confide's own, which a file describes in full."""
    return type(likelihood) is ({**LIKELIHOODS, ProgramLikelihood.name: ProgramLikelihood}).get(likelihood.name)


def likelihood_to_dict(likelihood: Likelihood) -> dict[str, Any]:
    """A likelihood of confide's own in full; of any other its name, so that nothing else is taken for it."""
    if is_own(likelihood):
        return {"name": likelihood.name, **{key: value for key, value in vars(likelihood).items() if key != "form"}}
    return {"name": likelihood.name, "own": type(likelihood).__qualname__}


def likelihood_from_dict(values: Mapping[str, Any]) -> Likelihood:
    rest = dict(values)
    name = rest.pop("name", None)
    if "own" in rest:
        raise Refusal(f"likelihood=None: {name!r} ({rest['own']}) is a likelihood of your own; pass it as likelihood=")
    if name == ProgramLikelihood.name:
        return ProgramLikelihood()
    if name not in LIKELIHOODS:
        raise Refusal(f"likelihood={name!r}: unknown; known: {', '.join(LIKELIHOODS)}{meant(name, LIKELIHOODS)}")
    return LIKELIHOODS[name](**rest)


IN_OWN_UNITS: tuple[type[Any], ...] = (Poisson, NegativeBinomial, Exponential, Weibull, MultiLabel)
"""Likelihoods of a target that means what it says: counts, times and labels, which are not scaled to [-1, 1]."""


def noise_scale_of(likelihood: Likelihood) -> float | None:
    """That of a Gaussian with known noise; None for any other."""
    return likelihood.noise_scale if isinstance(likelihood, Gaussian) else None


def check_likelihood(likelihood: object) -> None:
    """Refuse what is no likelihood, before anything is charged."""
    absent = [part for part in ("name", "outputs", "curvature", "loss", "predictive") if not hasattr(likelihood, part)]
    if absent or isinstance(likelihood, type):
        raise Refusal(
            f"likelihood={likelihood!r}: {'is a class' if not absent else 'has no ' + ', '.join(absent)}; use one of "
            "confide.likelihoods, or complete your own (confide.likelihoods.Likelihood)"
        )
