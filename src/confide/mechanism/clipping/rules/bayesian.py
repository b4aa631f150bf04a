"""Bayesian layers: gradients of distribution parameters from the gradient of the drawn weight.

Mean-field weights w_n = mean + softplus(rho) * noise_n, draws n = 1..N. With G_n the gradient of one record with
respect to w_n (an outer product g_n a_n^T, the loss being the mean over draws) and J_n = noise_n * sigmoid(rho)

    dmean = sum_n G_n,      drho = sum_n J_n * G_n,

so the clipped sums of means and rhos come from the clipped sums of the G_n, one product per draw. The norm is

    sum_{n,m} (a_n . a_m)(g_n . g_m)  +  sum_{n,m} sum_o g_no g_mo [(a_n * a_m) (J_n * J_m)^T]_o

that is one product per pair of draws, of the size of the forward pass. The upper bound replaces the second sum by
(sum_n |a_n| (sum_o g_no^2 max_i J_noi^2)^(1/2))^2, from the triangle inequality; it needs no product.

Local reparameterisation: with h = g * noise / (2 deviation), dmean = g a^T and dlog_variance = (h (a^2)^T) * variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from confide.mechanism.clipping.factors import PRECISION, guard
from confide.mechanism.clipping.rules.convolution import PatchSum, channel_groups, patches_of
from confide.mechanism.clipping.rules.linear import CANCELLATION, OuterProduct, OuterSum, with_positions
from confide.mechanism.clipping.rules.registry import Call, Contribution, Weighted, rule_for
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace
from confide.models.bayesian import (
    MeanFieldConv2d,
    MeanFieldLinear,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
    _LocalReparameterisation,
)

Terms: TypeAlias = dict[str, list[tuple[int, Tensor | None]]]


class Combined(Contribution):
    """Parameters whose gradients are sums of scaled base gradients: grad[name] = sum_k scale_k * base_k.

    Every base is a contribution with a parameter called "weight"; a scale is a tensor of the weight's shape, or None
    for 1. `biases` are small gradients held in full.
    """

    def __init__(
        self, bases: Sequence[Contribution], terms: Terms, biases: dict[str, Tensor], space: Workspace
    ) -> None:
        self.bases, self.terms, self.biases, self.space = list(bases), terms, biases, space
        self.records = bases[0].records

    def _weights(self, start: int, stop: int) -> dict[str, Tensor]:
        values = [base.dense(start, stop)["weight"] for base in self.bases]
        return {
            name: sum((values[base] if scale is None else values[base] * scale for base, scale in parts[1:]), first)
            for name, parts in self.terms.items()
            for first in [values[parts[0][0]] if parts[0][1] is None else values[parts[0][0]] * parts[0][1]]
        }

    def squared_norms(self) -> Tensor:
        norms = self._weight_norms()
        for values in self.biases.values():
            norms = norms + squared_norms_of(values)
        return norms

    def _weight_norms(self) -> Tensor:
        if not self.terms:
            return next(iter(self.biases.values())).new_zeros(self.records)
        entries = self.bases[0].dense(0, 1)["weight"]
        size = (len(self.bases) + 2) * entries.numel() * entries.element_size()
        return torch.cat(
            [
                torch.stack([squared_norms_of(value) for value in self._weights(start, stop).values()]).sum(0)
                for start, stop in chunks(self.records, size, self.space.budget)
            ]
        )

    def add_weighted(self, factors: Tensor, into: Weighted) -> None:
        sums: dict[int, Tensor] = {}
        for name, parts in self.terms.items():
            for base, scale in parts:
                if base not in sums:
                    sums[base] = torch.zeros_like(into[name])
                    self.bases[base].add_weighted(factors, {"weight": sums[base]})
                if scale is None:
                    into[name].add_(sums[base])
                else:
                    into[name].addcmul_(sums[base], scale)
        for name, values in self.biases.items():
            into[name].addmv_(values.t(), factors)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        weights = self._weights(start, stop) if self.terms else {}
        return weights | {name: values[start:stop] for name, values in self.biases.items()}


# mean-field weights ---------------------------------------------------------------------------------------------


def jacobian(noise: Tensor, rho: Tensor) -> Tensor:
    """dw / drho for every draw."""
    return noise * torch.sigmoid(rho)


class MeanFieldOuterProducts(Contribution):
    """One outer product per record and draw: lefts (draws, records, outputs), rights (draws, records, inputs)."""

    def __init__(self, call: Call, lefts: Tensor, rights: Tensor) -> None:
        layer: Any = call.layer
        self.lefts, self.rights, self.trainable, self.space = lefts, rights, call.trainable, call.space
        self.draws, self.records = lefts.shape[:2]
        draws = range(self.draws)
        self.pairs = [(first, second) for first in draws for second in draws if first <= second]
        self.exact = layer.norms == "exact" or self.draws == 1
        self.noise = layer.weight_noise
        self.slope = torch.sigmoid(layer.weight_rho) if "weight_rho" in call.trainable else None
        self.biases = mean_field_biases(call, lefts)

    def squared_norms(self) -> Tensor:
        norms = self.lefts.new_zeros(self.records)
        if "weight_mean" in self.trainable:
            norms += self._mean_norms()
        if self.slope is not None:
            norms += self._rho_norms(self.slope) if self.exact else self._rho_bound(self.slope)
        for values in self.biases.values():
            norms += squared_norms_of(values)
        return norms

    def _mean_norms(self) -> Tensor:
        eps = PRECISION[self.lefts.dtype].eps
        norms = self.lefts.new_zeros(self.records)
        for first, second in self.pairs:
            left = (self.lefts[first] * self.lefts[second]).sum(1)
            right = (self.rights[first] * self.rights[second]).sum(1)
            if first == second:
                left.add_(guard(self.lefts.shape[2], left.dtype))
                right.add_(guard(self.rights.shape[2], left.dtype))
                # draws may cancel: what rounding could hide then is added
                norms.addcmul_(left, right, value=1 + (self.draws - 1) * CANCELLATION * eps)
            else:
                norms.addcmul_(left, right, value=2)
        return norms.clamp_(min=0)

    def _rho_norms(self, slope: Tensor) -> Tensor:
        norms = self.lefts.new_zeros(self.records)
        slopes = torch.mul(self.noise, slope, out=self.space.take(slope, *self.noise.shape))
        product = self.space.take(slope, *slope.shape)
        for first, second in self.pairs:
            torch.mul(slopes[first], slopes[second], out=product)
            found = (self.rights[first] * self.rights[second]) @ product.t()
            found.mul_(self.lefts[first]).mul_(self.lefts[second])
            norms.add_(found.sum(1), alpha=1 if first == second else 2)
        return norms.clamp_(min=0)

    def _rho_bound(self, slope: Tensor) -> Tensor:
        total = self.lefts.new_zeros(self.records)
        for left, right, noise in zip(self.lefts, self.rights, self.noise, strict=True):
            steepest = (noise * slope).abs_().amax(1).square_()
            total += (squared_norms_of(right) * (left.square() @ steepest)).sqrt_()
        return total.square_()

    def add_weighted(self, factors: Tensor, into: Weighted) -> None:
        mean, rho = into.get("weight_mean"), into.get("weight_rho")
        moved = None
        for left, right, noise in zip(self.lefts, self.rights, self.noise, strict=True):
            total = (left * factors.unsqueeze(1)).t() @ right
            if mean is not None:
                mean.add_(total)
            moved = total.mul_(noise) if moved is None else moved.addcmul_(total, noise)
        if rho is not None and self.slope is not None and moved is not None:
            rho.addcmul_(moved, self.slope)
        for name, values in self.biases.items():
            into[name].addmv_(values.t(), factors)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        lefts, rights = self.lefts[:, start:stop], self.rights[:, start:stop]
        products = lefts.unsqueeze(3) * rights.unsqueeze(2)
        found = {name: values[start:stop] for name, values in self.biases.items()}
        if "weight_mean" in self.trainable:
            found["weight_mean"] = products.sum(0)
        if self.slope is not None:
            found["weight_rho"] = (products * (self.noise * self.slope).unsqueeze(1)).sum(0)
        return found


def mean_field_terms(call: Call) -> Terms:
    layer: Any = call.layer
    terms: Terms = {}
    if "weight_mean" in call.trainable:
        terms["weight_mean"] = [(draw, None) for draw in range(layer.draws)]
    if "weight_rho" in call.trainable:
        terms["weight_rho"] = list(enumerate(jacobian(layer.weight_noise, layer.weight_rho)))
    return terms


def mean_field_biases(call: Call, sums: Tensor) -> dict[str, Tensor]:
    """sums (draws, records, outputs): the output gradients added over positions."""
    layer: Any = call.layer
    biases = {}
    if "bias_mean" in call.trainable:
        biases["bias_mean"] = sums.sum(0)
    if "bias_rho" in call.trainable:
        biases["bias_rho"] = (sums * jacobian(layer.bias_noise, layer.bias_rho).unsqueeze(1)).sum(0)
    return biases


def by_draw(values: Tensor, draws: int) -> Tensor:
    """(records, draws, ...) or (records, ...) as (draws, records, ...)."""
    return values.unsqueeze(0) if draws == 1 else values.transpose(0, 1)


MEAN_FIELD = ("weight_mean", "weight_rho", "bias_mean", "bias_rho")


@rule_for(MeanFieldLinear, parameters=MEAN_FIELD, positions=True)
def mean_field_linear(call: Call) -> Contribution:
    layer: Any = call.layer
    lefts, rights = by_draw(call.gradient, layer.draws), by_draw(call.input, layer.draws)
    if lefts.dim() == 3:
        return MeanFieldOuterProducts(call, lefts, rights)
    lefts, rights = (torch.stack([with_positions(part) for part in side]) for side in (lefts, rights))
    bases = [OuterSum(*pair, False, call.space) for pair in zip(lefts, rights, strict=True)]
    return Combined(bases, mean_field_terms(call), mean_field_biases(call, lefts.sum(2)), call.space)


@rule_for(MeanFieldConv2d, parameters=MEAN_FIELD, positions=True)
def mean_field_convolution(call: Call) -> Contribution:
    layer: Any = call.layer
    lefts, inputs = by_draw(call.gradient, layer.draws), by_draw(call.input, layer.draws)
    bases = [patch_sum(layer, *pair, call.space) for pair in zip(lefts, inputs, strict=True)]
    return Combined(bases, mean_field_terms(call), mean_field_biases(call, lefts.flatten(3).sum(3)), call.space)


def patch_sum(layer: Any, gradient: Tensor, inputs: Tensor, space: Workspace) -> PatchSum:
    margins = [margin for size in reversed(layer.padding) for margin in (size, size)]
    padded = F.pad(inputs, margins) if any(margins) else inputs
    patches = patches_of(padded, layer.kernel_size, layer.stride, layer.dilation, layer.groups)
    return PatchSum(channel_groups(gradient, layer.groups), patches, layer.kernel_size, space)


# local reparameterisation ---------------------------------------------------------------------------------------


class LocalOuterProducts(Combined):
    """One outer product per record for the mean and one, scaled by the variance, for the log variance."""

    def _weight_norms(self) -> Tensor:
        norms = self.bases[0].squared_norms()
        if "weight_log_variance" not in self.terms:
            return norms
        ((index, variance),) = self.terms["weight_log_variance"]
        base = self.bases[index]
        assert isinstance(base, OuterProduct)
        assert variance is not None
        squares = base.right.square() @ variance.square().t()
        of_variance = squares.mul_(base.left.square()).sum(1)
        return norms + of_variance if "weight_mean" in self.terms else of_variance


def _local_terms(call: Call) -> Terms:
    layer: Any = call.layer
    terms: Terms = {}
    if "weight_mean" in call.trainable:
        terms["weight_mean"] = [(0, None)]
    if "weight_log_variance" in call.trainable:
        terms["weight_log_variance"] = [(1, layer.weight_log_variance.exp())]
    return terms


LOCAL = ("weight_mean", "weight_log_variance", "bias")


@rule_for(VariationalDropoutLinear, parameters=LOCAL, positions=True, capture=_LocalReparameterisation.recall)
def variational_dropout_linear(call: Call) -> Contribution:
    left, right = call.gradient, call.input
    spread = left * call.captured * 0.5
    if left.dim() == 2:
        bases = [
            OuterProduct(left, right, False, call.space),
            OuterProduct(spread, right.square(), False, call.space),
        ]
        biases = {"bias": left} if "bias" in call.trainable else {}
        return LocalOuterProducts(bases, _local_terms(call), biases, call.space)
    left, right, spread = (with_positions(values) for values in (left, right, spread))
    sums = [OuterSum(left, right, False, call.space), OuterSum(spread, right.square(), False, call.space)]
    biases = {"bias": left.sum(1)} if "bias" in call.trainable else {}
    return Combined(sums, _local_terms(call), biases, call.space)


@rule_for(VariationalDropoutConv2d, parameters=LOCAL, capture=_LocalReparameterisation.recall)
def variational_dropout_convolution(call: Call) -> Contribution:
    spread = call.gradient * call.captured * 0.5
    bases = [
        patch_sum(call.layer, call.gradient, call.input, call.space),
        patch_sum(call.layer, spread, call.input.square(), call.space),
    ]
    biases = {"bias": call.gradient.flatten(2).sum(2)} if "bias" in call.trainable else {}
    return Combined(bases, _local_terms(call), biases, call.space)
