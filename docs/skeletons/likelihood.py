"""A likelihood of one's own: counts, whose logarithm of the mean is the network's output.

It is given to `fit(..., likelihood=Counts())`, and again to `load_posterior(path, likelihood=Counts())`. One for
everybody goes into a file of src/confide/models/ and the list LIKELIHOODS of likelihoods.py, and is then found by its
name; confide's own law of counts is confide.likelihoods.Poisson.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from confide.models.predictive import RealPredictive

LARGEST = 8.0  # the largest logarithm of a mean, about 3000: a bound keeps losses and gradients finite


@dataclass(frozen=True)
class Counts:
    """y ~ Poisson(exp(output)). A record's loss is -log p(y | output) without the term that holds y alone."""

    name: ClassVar[str] = "counts"

    @property
    def outputs(self) -> int:
        """The width of the network's last layer."""
        return 1

    @property
    def curvature(self) -> float:
        """The second derivative of the loss is exp(output): about this for the counts one expects."""
        return 10.0

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        log_mean = output.reshape(y.shape).clamp(max=LARGEST)
        return log_mean.exp() - y * log_mean

    def predictive(self, outputs: Tensor, weights: Tensor) -> RealPredictive:
        """By its first two moments: a Poisson law has the variance of its mean."""
        means = torch.exp(outputs[..., 0].clamp(max=LARGEST))
        return RealPredictive(means, means, weights)
