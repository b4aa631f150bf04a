"""Summaries: what the draws say together, accumulated block by block, so that memory does not grow with the draws.

Classes, with weights w_k of the draws and probabilities p_k:

    probabilities = sum_k w_k p_k,      aleatoric = sum_k w_k H(p_k),      epistemic = H(probabilities) - aleatoric

and for softmax outputs z, H(p) = log sum exp(z) - sum p z: one logarithm per draw and input. Numbers, with means m_k
and noise variances v_k:

    mean = sum_k w_k m_k,      aleatoric = sum_k w_k v_k,      epistemic = sum_k w_k (m_k - mean)^2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.trees import Tree, size_of, tree_of
from confide.errors import Refusal
from confide.models.likelihoods import Bernoulli, Categorical, Gaussian, MultiGaussian, MultiLabel
from confide.models.predictive import ClassPredictive, LabelPredictive, Predictive, RealPredictive, entropy, knowing
from confide.models.programs import ProgramLikelihood
from confide.posteriors.prediction import native
from confide.posteriors.prediction.stacked import Block, Groups, blocks, collected, draws_at_once, native_network


@dataclass(frozen=True)
class Summary:
    """centre      (inputs, classes) probabilities, or (inputs,) means; tokens have axes
                (inputs, positions), several targets (inputs, targets)
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

    def in_shape(self, shape: tuple[int, ...]) -> Summary:
        """The same with these axes in place of the first."""
        return Summary(*(value.reshape(*shape, *value.shape[1:]) for value in vars(self).values()))

    def double(self) -> Summary:
        return replace(self, **{name: value.double() for name, value in vars(self).items()})


def summary_of_predictive(predictive: Predictive) -> Summary:
    """What a whole predictive distribution says, for posteriors that have no quicker way to it."""
    if isinstance(predictive, ClassPredictive | LabelPredictive):
        return Summary(predictive.probabilities, predictive.aleatoric, predictive.epistemic)
    return Summary(predictive.mean, predictive.aleatoric, predictive.epistemic)


def summary_of_draws(
    module: nn.Module, groups: Groups, x: Tree, likelihood: Any, weights: Tensor, masked: bool = False
) -> Summary:
    """The summary of a network's outputs under draws of given weights."""
    x = tree_of(x)
    task = _native_task(module, x, likelihood, masked)
    if task is None:
        return accumulated(blocks(module, groups, x, masked), likelihood, weights, size_of(x))
    return task.sums(groups, weights).summary()


def predictive_of_draws(
    module: nn.Module, groups: Groups, x: Tree, likelihood: Any, weights: Tensor, masked: bool = False
) -> Predictive:
    """The predictive distribution of a network's outputs under draws of given weights."""
    x = tree_of(x)
    task = _native_task(module, x, likelihood, masked)
    if task is None:
        outputs = collected(blocks(module, groups, x, masked), len(weights), size_of(x))
        predictive: Predictive = likelihood.predictive(outputs, weights)
        return predictive
    return task.predictive(groups, weights)


def accumulated(blocks: Iterable[Block], likelihood: Any, weights: Tensor, inputs: int) -> Summary:
    """The summary of blocks of outputs under a likelihood; `weights` add up to one."""
    if isinstance(likelihood, MultiLabel | MultiGaussian | ProgramLikelihood):  # averages over all draws together
        outputs = collected(iter(blocks), len(weights), inputs)
        return summary_of_predictive(likelihood.predictive(outputs, weights.to(outputs.dtype)))
    classes: _Classes | None = None
    reals: _Reals | None = None
    positions: tuple[int, ...] = ()
    for block in blocks:
        outputs, rows = block.outputs, block.rows
        share = weights[block.first : block.first + len(outputs)].to(outputs.dtype)
        if isinstance(likelihood, Categorical) and outputs.ndim == 3:
            classes = classes or _Classes(inputs, outputs.shape[2])
            classes.add_logits(rows, outputs, share)
            continue
        found = likelihood.predictive(outputs, share)
        if isinstance(found, ClassPredictive):
            # the positions of an input are inputs of their own until the end
            positions = tuple(found.draws.shape[2:-1])
            each = math.prod(positions)
            classes = classes or _Classes(inputs * each, found.draws.shape[-1])
            among = slice(rows.start * each, rows.stop * each)
            classes.add(among, found.draws.flatten(1, -2), share)
        else:
            reals = reals or _Reals(inputs)
            reals.add(rows, found.means, found.variances, share)
    keeper = classes or reals
    if keeper is None:
        raise Refusal("x: must hold at least one input")
    said = keeper.summary()
    return said.in_shape((inputs, *positions)) if positions else said


class _Classes:
    """Sums over draws of probabilities (classes, inputs) and of entropies, in double precision."""

    def __init__(self, inputs: int, classes: int) -> None:
        self.sums = torch.zeros(classes + 1, inputs, dtype=torch.float64)
        self.mean, self.entropy = self.sums[:-1], self.sums[-1]

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

    def predictive(self, probabilities: Tensor, weights: Tensor) -> Predictive:
        mean, noise = (values.to(probabilities.dtype) for values in (self.mean.t().contiguous(), self.entropy))
        return knowing(ClassPredictive(probabilities, weights), probabilities=mean, aleatoric=noise)


class _Reals:
    """Sums over draws of means, squares and variances. Squares are taken around the first draw, which keeps their
    digits where the spread is small beside the mean."""

    def __init__(self, inputs: int) -> None:
        self.sums = torch.zeros(native.ROWS_OF_REALS, inputs, dtype=torch.float64)
        self.origin, self.mean, self.square = self.sums
        self.origin.fill_(torch.nan)
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

    def predictive(self, means: Tensor, variance: float, weights: Tensor) -> Predictive:
        said = self.summary()
        mean, noise, doubt = (value.to(means.dtype) for value in (said.centre, said.aleatoric, said.epistemic))
        variances = means.new_full((1, 1), variance).expand_as(means)
        return knowing(RealPredictive(means, variances, weights), mean=mean, aleatoric=noise, epistemic=doubt)


_NATIVE_KINDS = {Categorical: native.CLASSES, Bernoulli: native.TWO_CLASSES, Gaussian: native.REALS}


@dataclass(frozen=True)
class _NativeTask:
    """A network and inputs for the native kernel, with what it makes of the outputs under a likelihood."""

    network: native.Network
    inputs: Tensor
    likelihood: Any
    kind: int

    @property
    def width(self) -> int:
        return 2 if self.kind == native.TWO_CLASSES else self.network.outputs

    def sums(self, groups: Groups, weights: Tensor, results: Tensor | None = None) -> _Classes | _Reals:
        """Sums over all draws; what every single one says goes to `results` (draws, inputs, width)."""
        count, first = len(self.inputs), 0
        keeper = _Reals(count) if self.kind == native.REALS else _Classes(count, self.width)
        for draws in groups(draws_at_once(self.network)):
            part = slice(first, first + len(draws))
            out = None if results is None else results[part]
            self.network.run(
                draws, self.inputs, self.kind, out=out, sums=keeper.sums, weights=weights[part], first=first
            )
            first = part.stop
        if isinstance(keeper, _Reals):
            keeper.noise += self.likelihood.noise_scale**2 * weights.double().sum()
        return keeper

    def predictive(self, groups: Groups, weights: Tensor) -> Predictive:
        results = self.inputs.new_empty(len(weights), len(self.inputs), self.width)
        keeper = self.sums(groups, weights, results)
        if isinstance(keeper, _Classes):
            return keeper.predictive(results, weights)
        return keeper.predictive(results[..., 0], self.likelihood.noise_scale**2, weights)


def _native_task(module: nn.Module, x: Tree, likelihood: Any, masked: bool) -> _NativeTask | None:
    """None where torch has to do the work."""
    kind = _NATIVE_KINDS.get(type(likelihood))
    found = None if kind is None else native_network(module, x, masked)
    if kind is None or found is None or (kind != native.CLASSES and found[0].outputs != 1):
        return None
    return _NativeTask(*found, likelihood, kind)
