"""Summaries: what the draws say together, accumulated block by block, so that memory does not grow with the draws.

Classes, with weights w_k of the draws and probabilities p_k:

    probabilities = sum_k w_k p_k,      aleatoric = sum_k w_k H(p_k),      epistemic = H(probabilities) - aleatoric

and for softmax outputs z, H(p) = log sum exp(z) - sum p z: one logarithm per draw and input. Numbers, with means m_k
and noise variances v_k:

    mean = sum_k w_k m_k,      aleatoric = sum_k w_k v_k,      epistemic = sum_k w_k (m_k - mean)^2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from confide.models.likelihoods import Categorical
from confide.models.predictive import ClassPredictive, entropy
from confide.prediction.stacked import Block


@dataclass(frozen=True)
class Summary:
    """centre      (inputs, classes) probabilities, or (inputs,) means
    aleatoric   noise in the data, one value per input: nats for classes, a variance for numbers
    epistemic   doubt about the model, in the same units
    """

    centre: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def total(self) -> Tensor:
        return self.aleatoric + self.epistemic

    def rescaled(self, scale: float, shift: float) -> Summary:
        """The same of scale * y + shift: back to the units of a target."""
        return Summary(self.centre * scale + shift, self.aleatoric * scale**2, self.epistemic * scale**2)

    def double(self) -> Summary:
        return replace(self, **{name: value.double() for name, value in vars(self).items()})


def summary_of(posterior: Any, x: Tensor) -> Summary:
    """The summary of any posterior; one that has no quick way to it is asked for its whole predictive distribution."""
    quick = getattr(posterior, "summary", None)
    if quick is not None:
        found: Summary = quick(x)
        return found
    predictive = posterior.predict(x)
    centre = predictive.probabilities if isinstance(predictive, ClassPredictive) else predictive.mean
    return Summary(centre, predictive.aleatoric, predictive.epistemic)


def accumulated(blocks: Iterable[Block], likelihood: Any, weights: Tensor, inputs: int) -> Summary:
    """The summary of blocks of outputs under a likelihood; `weights` add up to one."""
    classes: _Classes | None = None
    reals: _Reals | None = None
    for block in blocks:
        outputs = block.outputs
        share = weights[block.first : block.first + len(outputs)].to(outputs.dtype)
        if isinstance(likelihood, Categorical) and outputs.ndim == 3:
            classes = classes or _Classes(inputs, outputs.shape[2])
            classes.add_logits(block.rows, outputs, share)
            continue
        found = likelihood.predictive(outputs, share)
        if isinstance(found, ClassPredictive):
            classes = classes or _Classes(inputs, found.draws.shape[2])
            classes.add(block.rows, found.draws, share)
        else:
            reals = reals or _Reals(inputs)
            reals.add(block.rows, found.means, found.variances, share)
    keeper = classes or reals
    if keeper is None:
        raise ValueError("x: must hold at least one input")
    return keeper.summary()


class _Classes:
    """Sums over draws of probabilities (classes, inputs) and of entropies, in double precision."""

    def __init__(self, inputs: int, classes: int) -> None:
        self.mean = torch.zeros(classes, inputs, dtype=torch.float64)
        self.entropy = torch.zeros(inputs, dtype=torch.float64)

    def add_logits(self, rows: slice, logits: Tensor, weights: Tensor) -> None:
        z = logits.transpose(1, 2)
        z = z - z.amax(1, keepdim=True)
        p = z.exp()
        total = p.sum(1, keepdim=True)
        p /= total
        entropies = total.log_().squeeze(1).sub_(z.mul_(p).sum(1))
        self._add(rows, p, entropies, weights)

    def add(self, rows: slice, probabilities: Tensor, weights: Tensor) -> None:
        self._add(rows, probabilities.transpose(1, 2), entropy(probabilities), weights)

    def _add(self, rows: slice, p: Tensor, entropies: Tensor, weights: Tensor) -> None:
        self.mean[:, rows] += (weights @ p.reshape(len(p), -1)).view(p.shape[1:])
        self.entropy[rows] += weights @ entropies

    def summary(self) -> Summary:
        probabilities = self.mean.t()
        return Summary(probabilities, self.entropy, (entropy(probabilities) - self.entropy).clamp(min=0))


class _Reals:
    """Sums over draws of means, squares and variances. Squares are taken around the first draw, which keeps their
    digits where the spread is small beside the mean."""

    def __init__(self, inputs: int) -> None:
        self.origin = torch.full((inputs,), torch.nan, dtype=torch.float64)
        self.mean = torch.zeros(inputs, dtype=torch.float64)
        self.square = torch.zeros(inputs, dtype=torch.float64)
        self.noise = torch.zeros(inputs, dtype=torch.float64)

    def add(self, rows: slice, means: Tensor, variances: Tensor, weights: Tensor) -> None:
        if bool(self.origin[rows.start].isnan()):
            self.origin[rows] = means[0].double()
        shifted = means - self.origin[rows].to(means.dtype)
        self.mean[rows] += weights @ shifted
        self.square[rows] += weights @ shifted.square_()
        self.noise[rows] += weights @ variances

    def summary(self) -> Summary:
        epistemic = (self.square - self.mean.square()).clamp(min=0)
        return Summary(self.origin + self.mean, self.noise, epistemic)
