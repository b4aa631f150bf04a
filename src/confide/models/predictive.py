"""Predictive distributions: what a posterior says about new inputs, with its two kinds of uncertainty apart.

epistemic   what more data would remove: disagreement between posterior draws
aleatoric   what no data would remove: noise that every draw expects

Classification measures both in nats (mutual information and expected entropy, which add up to the entropy of the mean
probabilities); regression as variances (law of total variance).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from confide.errors import Refusal

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


@dataclass(frozen=True)
class ClassPredictive:
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

    def interval(self, level: float = 0.9) -> Tensor:
        """Central credible interval of each class probability over the draws: (inputs, classes, 2)."""
        _check_level(level)
        tail = (1 - level) / 2
        ends = [weighted_quantile(self.draws, self.weights, q) for q in (tail, 1 - tail)]
        return torch.stack(ends, -1)


@dataclass(frozen=True)
class RealPredictive:
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

    def log_density(self, y: Tensor) -> Tensor:
        """log p(y | x) of the mixture over draws, one value per input."""
        squared = (y - self.means).square() / self.variances
        terms = -0.5 * (squared + torch.log(2 * torch.pi * self.variances))
        return torch.logsumexp(terms + self.weights.log()[:, None], 0)

    def cumulative(self, y: Tensor) -> Tensor:
        """P(Y <= y | x) of the mixture, one value per input."""
        standard = (y - self.means) / self.variances.sqrt()
        return torch.einsum("s,sn->n", self.weights, torch.special.ndtr(standard))

    def quantile(self, level: float) -> Tensor:
        """Quantile of the mixture by bisection; exact to about 1e-9 of the predictive scale."""
        _check_level(level)
        # In chunks that stay in the cache: every bisection reads all draws again.
        columns = zip(self.means.split(_INPUTS_AT_ONCE, 1), self.variances.split(_INPUTS_AT_ONCE, 1), strict=True)
        return torch.cat([RealPredictive(*part, self.weights)._bisected(level) for part in columns])

    def _bisected(self, level: float) -> Tensor:
        reach = 40 * self.variances.sqrt()
        low, high = (self.means - reach).amin(0), (self.means + reach).amax(0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cumulative(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def interval(self, level: float = 0.9) -> Tensor:
        """Central predictive interval of a new observation: (inputs, 2)."""
        _check_level(level)
        tail = (1 - level) / 2
        return torch.stack([self.quantile(tail), self.quantile(1 - tail)], -1)

    def rescaled(self, scale: float, shift: float) -> RealPredictive:
        """The same distribution of scale * y + shift: back to the units of the target."""
        return RealPredictive(self.means * scale + shift, self.variances * scale**2, self.weights)


Predictive = ClassPredictive | RealPredictive


def of_classes(predictive: Predictive) -> ClassPredictive:
    """The same, where it is known to be about classes."""
    if not isinstance(predictive, ClassPredictive):
        raise Refusal("predictive: is about numbers, and classes are needed; fit with a likelihood of classes")
    return predictive


def knowing(predictive: Predictive, **averages: Tensor) -> Predictive:
    """The same distribution with averages that were found on the way, in place of those it would take itself."""
    vars(predictive).update(averages)
    return predictive
