"""Predictive distributions: what a posterior says about new inputs, with its two kinds of uncertainty apart.

epistemic   what more data would remove: disagreement between posterior draws
aleatoric   what no data would remove: noise that every draw expects

Classification measures both in nats (mutual information and expected entropy, which add up to the entropy of the mean
probabilities); regression as variances (law of total variance).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from confide.errors import Refusal
from confide.wording import html_table

_INPUTS_AT_ONCE = 512  # 100 draws of them in single precision are 200 kB: within the cache


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise Refusal(f"level={level}: must be in (0, 1)")


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats along the last axis; 0 log 0 = 0."""
    terms: Tensor = torch.special.entr(probabilities)
    return terms.sum(-1)


def weighted_quantile(values: Tensor, weights: Tensor, level: float) -> Tensor:
    """Quantile along the first axis under normalised weights: the smallest value whose weight reaches `level`."""
    ordered, order = values.sort(0)
    mass = weights[order].cumsum(0)
    index = (mass < level - 1e-9).sum(0, keepdim=True).clamp(max=len(values) - 1)
    return ordered.gather(0, index).squeeze(0)


SHOWN = 5
"""Inputs of which a notebook shows the predictions."""


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


class _ShownPredictive(ABC):
    """What a notebook shows of a predictive distribution: the first inputs, with both kinds of uncertainty."""

    @abstractmethod
    def _rows(self, inputs: slice) -> list[str]:
        """A line for each of the inputs."""

    def _repr_html_(self: Any) -> str:
        first = slice(0, SHOWN)
        parts = (part[first].reshape(len(part[first]), -1).sum(1).tolist() for part in (self.epistemic, self.aleatoric))
        doubt = zip(*parts, strict=True)
        rows = [(said, f"{e:.3g}", f"{a:.3g}") for said, (e, a) in zip(self._rows(first), doubt, strict=True)]
        title = f"{type(self).__name__} of {_counted(len(self.total), 'input')}, {_counted(len(self.weights), 'draw')}"
        return html_table(title, rows, ("prediction", "epistemic", "aleatoric"))


@dataclass(frozen=True)
class ClassPredictive(_ShownPredictive):
    """Class probabilities of every draw, of shape (draws, inputs, classes), with one weight per draw.

    Where every token of an input has a label, positions stand between inputs and classes, here and in the averages.
    """

    draws: Tensor
    weights: Tensor

    @cached_property
    def probabilities(self) -> Tensor:
        """Posterior predictive probabilities, of shape (inputs, classes)."""
        return torch.einsum("s,s...->...", self.weights, self.draws)

    @cached_property
    def total(self) -> Tensor:
        return entropy(self.probabilities)

    @cached_property
    def aleatoric(self) -> Tensor:
        return torch.einsum("s,s...->...", self.weights, entropy(self.draws))

    @cached_property
    def epistemic(self) -> Tensor:
        return (self.total - self.aleatoric).clamp(min=0)

    @property
    def labels(self) -> Tensor:
        return self.probabilities.argmax(-1)

    def _rows(self, inputs: slice) -> list[str]:
        if self.probabilities.ndim > 2:  # a label for every token
            return [f"{len(row)} tokens" for row in self.probabilities[inputs]]
        best = self.probabilities[inputs].max(-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [f"class {label} ({share:.1%})" for label, share in pairs]

    def interval(self, level: float = 0.9) -> Tensor:
        """Central credible interval of each class probability over the draws: (inputs, classes, 2)."""
        _check_level(level)
        tail = (1 - level) / 2
        ends = [weighted_quantile(self.draws, self.weights, q) for q in (tail, 1 - tail)]
        return torch.stack(ends, -1)


@dataclass(frozen=True)
class RealPredictive(_ShownPredictive):
    """A Gaussian per draw: means and noise variances of shape (draws, inputs), with one weight per draw."""

    means: Tensor
    variances: Tensor
    weights: Tensor

    @cached_property
    def mean(self) -> Tensor:
        return torch.einsum("s,sn->n", self.weights, self.means)

    @cached_property
    def epistemic(self) -> Tensor:
        return torch.einsum("s,sn->n", self.weights, (self.means - self.mean).square())

    @cached_property
    def aleatoric(self) -> Tensor:
        return torch.einsum("s,sn->n", self.weights, self.variances)

    @cached_property
    def total(self) -> Tensor:
        return self.epistemic + self.aleatoric

    def log_densities(self, y: Tensor) -> Tensor:
        """log p(y | x) under the law of every draw: (draws, inputs). A law that is not Gaussian has its own."""
        squared = (y - self.means).square() / self.variances
        return -0.5 * (squared + torch.log(2 * torch.pi * self.variances))

    def cumulatives(self, y: Tensor) -> Tensor:
        """P(Y <= y | x) under the law of every draw: (draws, inputs). A law that is not Gaussian has its own."""
        found: Tensor = torch.special.ndtr((y - self.means) / self.variances.sqrt())
        return found

    def bracket(self) -> tuple[Tensor, Tensor]:
        """Two values per input that hold any quantile between them, to all digits that a bisection finds."""
        reach = 40 * self.variances.sqrt()
        return (self.means - reach).amin(0), (self.means + reach).amax(0)

    def log_density(self, y: Tensor) -> Tensor:
        """log p(y | x) of the mixture over draws, one value per input."""
        return torch.logsumexp(self.log_densities(y) + self.weights.log()[:, None], 0)

    def cumulative(self, y: Tensor) -> Tensor:
        """P(Y <= y | x) of the mixture, one value per input."""
        return torch.einsum("s,sn->n", self.weights, self.cumulatives(y))

    def inside(self, y: Tensor, level: float) -> Tensor:
        """Which values lie in their central interval: where P(Y <= y) is within level / 2 of one half."""
        return (self.cumulative(y) - 0.5).abs() <= level / 2

    def quantile(self, level: float) -> Tensor:
        """Quantile of the mixture by bisection; exact to about 1e-9 of the predictive scale."""
        _check_level(level)
        # In chunks that stay in the cache: every bisection reads all draws again.
        parts = (slice(start, start + _INPUTS_AT_ONCE) for start in range(0, self.means.shape[1], _INPUTS_AT_ONCE))
        return torch.cat([self.some(part)._bisected(level) for part in parts])

    def _bisected(self, level: float) -> Tensor:
        low, high = self.bracket()
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cumulative(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def _rows(self, inputs: slice) -> list[str]:
        part = self.some(inputs)
        ends = part.interval(0.9).tolist() if part.means.shape[1] else []
        means = part.mean.tolist()
        return [f"{mean:.4g} [{low:.4g}, {high:.4g}]" for mean, (low, high) in zip(means, ends, strict=True)]

    def some(self, inputs: slice | Tensor) -> Self:
        """The same distribution for some of the inputs."""
        return self._with(lambda values: values[..., inputs])

    def double(self) -> Self:
        """The same in double precision."""
        return replace(self._with(lambda values: values.double()), weights=self.weights.detach().double())

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every field but the weights changed; the last axis of each is the inputs'."""
        names = [one.name for one in fields(self) if one.name != "weights"]
        return replace(self, **{name: change(getattr(self, name).detach()) for name in names})

    def interval(self, level: float = 0.9) -> Tensor:
        """Central predictive interval of a new observation: (inputs, 2)."""
        _check_level(level)
        tail = (1 - level) / 2
        return torch.stack([self.quantile(tail), self.quantile(1 - tail)], -1)

    def rescaled(self, scale: float, shift: float) -> RealPredictive:
        """The same distribution of scale * y + shift: back to the units of the target."""
        return RealPredictive(self.means * scale + shift, self.variances * scale**2, self.weights)


@dataclass(frozen=True)
class LabelPredictive(_ShownPredictive):
    """Probabilities of labels of which any may hold, (draws, inputs, labels), with one weight per draw."""

    draws: Tensor
    weights: Tensor

    @cached_property
    def probabilities(self) -> Tensor:
        """Posterior predictive probability of every label, of shape (inputs, labels)."""
        return torch.einsum("s,snk->nk", self.weights, self.draws)

    @cached_property
    def total(self) -> Tensor:
        """In nats, summed over labels."""
        return _entropy_of_labels(self.probabilities)

    @cached_property
    def aleatoric(self) -> Tensor:
        return torch.einsum("s,sn->n", self.weights, _entropy_of_labels(self.draws))

    @cached_property
    def epistemic(self) -> Tensor:
        return (self.total - self.aleatoric).clamp(min=0)

    def _rows(self, inputs: slice) -> list[str]:
        return [", ".join(f"{share:.1%}" for share in row) for row in self.probabilities[inputs].tolist()]

    @property
    def labels(self) -> Tensor:
        """Which labels are more likely than not, of shape (inputs, labels)."""
        return self.probabilities > 0.5

    def interval(self, level: float = 0.9) -> Tensor:
        """Central credible interval of each label's probability over the draws: (inputs, labels, 2)."""
        return ClassPredictive(self.draws, self.weights).interval(level)


@dataclass(frozen=True)
class VectorPredictive(_ShownPredictive):
    """Several numbers at once: a Gaussian per draw with means and variances of shape (draws, inputs, targets).

    Uncertainties are variances summed over the targets; `of(k)` is the distribution of one target alone.
    """

    means: Tensor
    variances: Tensor
    weights: Tensor

    def of(self, target: int) -> RealPredictive:
        return RealPredictive(self.means[..., target], self.variances[..., target], self.weights)

    @property
    def targets(self) -> int:
        return self.means.shape[2]

    def _rows(self, inputs: slice) -> list[str]:
        return [", ".join(f"{value:.4g}" for value in row) for row in self.mean[inputs].tolist()]

    @cached_property
    def mean(self) -> Tensor:
        """Of shape (inputs, targets)."""
        return torch.einsum("s,snk->nk", self.weights, self.means)

    @cached_property
    def epistemic(self) -> Tensor:
        return torch.einsum("s,snk->n", self.weights, (self.means - self.mean).square())

    @cached_property
    def aleatoric(self) -> Tensor:
        return torch.einsum("s,snk->n", self.weights, self.variances)

    @cached_property
    def total(self) -> Tensor:
        return self.epistemic + self.aleatoric

    def log_density(self, y: Tensor) -> Tensor:
        """log p(y | x) of all targets together under the mixture over draws, one value per input."""
        terms = -0.5 * ((y - self.means).square() / self.variances + torch.log(2 * torch.pi * self.variances)).sum(-1)
        return torch.logsumexp(terms + self.weights.log()[:, None], 0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Central predictive interval of every target: (inputs, targets, 2)."""
        return torch.stack([self.of(target).interval(level) for target in range(self.targets)], 1)

    def double(self) -> VectorPredictive:
        """The same in double precision."""
        return VectorPredictive(self.means.double(), self.variances.double(), self.weights.double())


def _entropy_of_labels(probabilities: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
    return terms.sum(-1)


Predictive = ClassPredictive | RealPredictive | LabelPredictive | VectorPredictive
KINDS_OF_PREDICTIVE = (ClassPredictive, RealPredictive, LabelPredictive, VectorPredictive)
"""What reports, metrics and commands know how to read; anything else derives from one of them."""


def of_numbers(predictive: Predictive) -> RealPredictive:
    """The same, where it is known to be about one number."""
    if not isinstance(predictive, RealPredictive):
        raise Refusal("predictive: is not about one number; fit with a likelihood of numbers")
    return predictive


def of_classes(predictive: Predictive) -> ClassPredictive:
    """The same, where it is known to be about classes."""
    if not isinstance(predictive, ClassPredictive):
        raise Refusal("predictive: is about numbers, and classes are needed; fit with a likelihood of classes")
    return predictive


def knowing(predictive: Predictive, **averages: Tensor) -> Predictive:
    """The same distribution with averages that were found on the way, in place of those it would take itself."""
    vars(predictive).update(averages)
    return predictive
