"""Bayesian layers: gradients of distribution parameters from the gradient of the drawn weight.

Mean-field weights w_n = mean + softplus(rho) * noise_n, draws n = 1..N. With G_n the gradient of one record with
respect to w_n (an outer product g_n a_n^T, the loss being the mean over draws) and J_n = noise_n * sigmoid(rho)

    dmean = sum_n G_n,      drho = sum_n J_n * G_n,

so the clipped sums of means and rhos come from the clipped sums of the G_n, one product per draw. The norm is

    sum_{n,m} (a_n . a_m)(g_n . g_m)  +  sum_{n,m} sum_o g_no g_mo [(a_n * a_m) (J_n * J_m)^T]_o

that is one product per pair of draws, of the size of the forward pass. The upper bound replaces the second sum by
(sum_n |a_n| (sum_o g_no^2 max_i J_noi^2)^(1/2))^2, from the triangle inequality; it needs no product.

Local reparameterisation: with h = g * noise / (2 deviation), dmean = g a^T and dlog_variance = (h (a^2)^T) * variance;
its upper bound takes for the variances of an output their largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from confide.layers.bayesian import (
    MeanFieldConv2d,
    MeanFieldLinear,
    VariationalDropoutConv2d,
    VariationalDropoutLinear,
    _LocalReparameterisation,
)
from confide.layers.dropout import SharedNoiseConv2d, SharedNoiseLinear
from confide.layers.tables import MeanFieldEmbedding
from confide.mechanism.clipping.factors import PRECISION, guard
from confide.mechanism.clipping.rounding import lost_in_squares
from confide.mechanism.clipping.rules.convolution import PatchSum, channel_groups
from confide.mechanism.clipping.rules.embedding import MeanFieldRows, without_padding
from confide.mechanism.clipping.rules.formed import in_double
from confide.mechanism.clipping.rules.linear import OuterProduct, OuterSum, with_positions
from confide.mechanism.clipping.rules.patches import Cut
from confide.mechanism.clipping.rules.registry import Call, Contribution, Where, rule_for
from confide.mechanism.clipping.rules.sloped import SlopedPatches
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace

# A slope is a standard normal draw times less than 1; none of 2^64 draws is as large as this.
LARGEST_SLOPE = 16.0
Terms: TypeAlias = dict[str, list[tuple[int, Tensor | None]]]


class Combined(Contribution):
    """Parameters whose gradients are sums of scaled base gradients: grad[name] = sum_k scale_k * base_k.

    Every base is a contribution with a parameter called "weight"; a scale is a tensor of the weight's shape, or None
    for 1. `biases` are small gradients held in full. Every record's gradient is formed, for its norm and for the sum,
    so that nothing in it can cancel unseen; those that fit into the budget are kept from the one to the other.
    """

    def __init__(
        self, bases: Sequence[Contribution], terms: Terms, biases: dict[str, Tensor], space: Workspace
    ) -> None:
        self.bases, self.terms, self.biases, self.space = list(bases), terms, biases, space
        self.records = bases[0].records
        self.kept: dict[str, Tensor] | None = None
        self.squares: Tensor | None = None
        self.wide = False

    def _weights(self, start: int, stop: int) -> dict[str, Tensor]:
        """What was formed stays as it was (`formed`)."""
        if self.kept is not None:
            found = {name: values[start:stop] for name, values in self.kept.items()}
        else:
            found = self._of_bases([base.dense(start, stop)["weight"] for base in self.bases])
        return in_double(found, lambda lost: self._anew(lost + start)) if self.wide else found

    def _of_bases(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: sum((values[base] if scale is None else values[base] * scale for base, scale in parts[1:]), first)
            for name, parts in self.terms.items()
            for first in [values[parts[0][0]] if parts[0][1] is None else values[parts[0][0]] * parts[0][1]]
        }

    def _anew(self, which: Tensor) -> dict[str, Tensor]:
        return self._of_bases([base.chosen(which).widened().dense(0, len(which))["weight"] for base in self.bases])

    def _pieces(self) -> list[tuple[int, int]]:
        entries = self.bases[0].dense(0, 1)["weight"]
        size = (len(self.bases) + 2) * entries.numel() * entries.element_size()
        return list(chunks(self.records, size, self.space.budget))

    def squared_norms(self) -> Tensor:
        if self.squares is None:
            self.squares = self._weight_norms()
            for values in self.biases.values():
                self.squares = self.squares + squared_norms_of(values)
        return self.squares

    def _weight_norms(self) -> Tensor:
        if not self.terms:
            return next(iter(self.biases.values())).new_zeros(self.records)
        pieces, parts = self._pieces(), []
        for start, stop in pieces:
            found = self._weights(start, stop)
            parts.append(torch.stack([squared_norms_of(value) for value in found.values()]).sum(0))
        self.kept = found if len(pieces) == 1 else None
        return torch.cat(parts)

    def spread(self) -> Tensor:
        return self.squared_norms().sqrt()

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        found = {name: factors @ values for name, values in self.biases.items()}
        for start, stop in self._pieces() if self.terms else ():
            for name, values in self._weights(start, stop).items():
                part = (factors[start:stop] @ values.flatten(1)).view(values.shape[1:])
                found[name] = found[name].add_(part) if name in found else part
        return found

    def chosen(self, where: Where) -> Contribution:
        return self._alike([base.chosen(where) for base in self.bases], lambda values: values[where])

    def widened(self) -> Contribution:
        found = self._alike(self.bases, Tensor.double)
        found.wide = True
        return found

    def _alike(self, bases: list[Contribution], change: Callable[[Tensor], Tensor]) -> Combined:
        found = copy(self)
        found.bases, found.records = bases, bases[0].records
        found.biases = {name: change(values) for name, values in self.biases.items()}
        found.kept = None if self.kept is None else {name: change(values) for name, values in self.kept.items()}
        found.squares = None if self.squares is None else change(self.squares)
        return found

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        weights = self._weights(start, stop) if self.terms else {}
        return weights | {name: values[start:stop] for name, values in self.biases.items()}


def lost_products(right: Tensor, largest: float | Tensor) -> Tensor:
    """What underflow may hide from sum_i right_i^2 s_oi, for scales s of which none is larger: (records, 1)."""
    tiny, entries = PRECISION[right.dtype].tiny, guard(right.shape[1], right.dtype)
    return squared_norms_of(right).mul_(tiny).add_(entries * largest).unsqueeze(1)


# mean-field weights ---------------------------------------------------------------------------------------------


class MeanFieldOuterProducts(Contribution):
    """One outer product per record and draw: lefts (draws, records, outputs), rights (draws, records, inputs)."""

    def __init__(self, call: Call, lefts: Tensor, rights: Tensor) -> None:
        layer: Any = call.layer
        self.lefts, self.rights, self.trainable, self.space = lefts, rights, call.trainable, call.space
        self.draws, self.records = lefts.shape[:2]
        draws = range(self.draws)
        self.pairs = [(first, second) for first in draws for second in draws if first <= second]
        self.exact = layer.norms == "exact" or self.draws == 1
        self.slopes = layer.jacobian("weight") if "weight_rho" in call.trainable else None
        self.biases = mean_field_biases(call, lefts)
        self.scratch: Tensor | None = None

    def squared_norms(self) -> Tensor:
        norms = self.lefts.new_zeros(self.records)
        if "weight_mean" in self.trainable:
            norms += self._mean_norms()
        if self.slopes is not None:
            norms += self._rho_norms(self.slopes) if self.exact else self._rho_bound(self.slopes)
        for values in self.biases.values():
            norms += squared_norms_of(values)
        return norms

    def _mean_norms(self) -> Tensor:
        hidden = lost_in_squares(self.lefts.shape[2] + self.rights.shape[2] + self.draws, self.lefts.dtype)
        norms = self.lefts.new_zeros(self.records)
        for first, second in self.pairs:
            left = (self.lefts[first] * self.lefts[second]).sum(1)
            right = (self.rights[first] * self.rights[second]).sum(1)
            if first == second:
                left.add_(guard(self.lefts.shape[2], left.dtype))
                right.add_(guard(self.rights.shape[2], left.dtype))
                # draws may cancel: what rounding could hide then is added
                norms.addcmul_(left, right, value=1 + (self.draws - 1) * self.draws * hidden)
            else:
                norms.addcmul_(left, right, value=2)
        return norms.clamp_(min=0)

    def _rho_norms(self, slopes: Tensor) -> Tensor:
        norms = self.lefts.new_zeros(self.records)
        product = self._scratch(slopes)
        for first, second in self.pairs:
            torch.mul(slopes[first], slopes[second], out=product)
            found = (self.rights[first] * self.rights[second]) @ product.t()
            if first == second:
                found.add_(lost_products(self.rights[first], LARGEST_SLOPE**2))
            found.mul_(self.lefts[first]).mul_(self.lefts[second])
            norms.add_(found.sum(1), alpha=1 if first == second else 2)
        if self.draws > 1:
            hidden = lost_in_squares(self.lefts.shape[2] + self.rights.shape[2] + self.draws, self.lefts.dtype)
            norms.clamp_(min=0).add_(self._rho_bound(slopes), alpha=hidden)
        return norms.clamp_(min=0)

    def _rho_bound(self, slopes: Tensor) -> Tensor:
        total = self.lefts.new_zeros(self.records)
        for left, right, slope in zip(self.lefts, self.rights, slopes, strict=True):
            steepest = torch.linalg.vector_norm(slope, torch.inf, 1).square_()
            of_right = squared_norms_of(right).add_(guard(right.shape[1], right.dtype))
            of_left = (left.square() @ steepest).add_(guard(left.shape[1], left.dtype))
            total += of_right.mul_(of_left).sqrt_()
        return total.square_()

    def _scratch(self, slopes: Tensor) -> Tensor:
        """Room for one weight, the same for all that needs it in turn."""
        if self.scratch is None:
            self.scratch = self.space.take(slopes, *slopes.shape[1:])
        return self.scratch

    def chain(self, records: int) -> int:
        return (records + 1) * self.draws

    def spread(self) -> Tensor:
        if self.draws == 1:  # scaling entries after the sum changes their errors as it changes them
            return self.squared_norms().sqrt_()
        squares = self.lefts.new_zeros(self.records)
        if "weight_mean" in self.trainable:
            sides = (squared_norms_of(side.flatten(0, 1)) for side in (self.lefts, self.rights))
            squares += torch.mul(*sides).sqrt_().view(self.draws, -1).sum(0).square_()
        if self.slopes is not None:
            squares += self._rho_bound(self.slopes)
        for values in self.biases.values():
            squares += squared_norms_of(values)
        return squares.sqrt_()

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        found = {name: factors @ values for name, values in self.biases.items()}
        scaled = self.lefts * factors.unsqueeze(1)
        mean = "weight_mean" in self.trainable
        if self.slopes is None:
            if mean:
                found["weight_mean"] = scaled.flatten(0, 1).t() @ self.rights.flatten(0, 1)
            return found
        for left, right, slope in zip(scaled, self.rights, self.slopes, strict=True):
            first = "weight_rho" not in found
            room = self.space.take(slope, *slope.shape) if first else self._scratch(self.slopes)
            total = torch.mm(left.t(), right, out=room)
            if first:
                found["weight_rho"] = torch.mul(total, slope, out=self.space.take(slope, *slope.shape))
                found |= {"weight_mean": total} if mean else {}
            else:
                found["weight_rho"].addcmul_(total, slope)
                if mean:
                    found["weight_mean"].add_(total)
        return found

    def chosen(self, where: Where) -> Contribution:
        return self._alike(lambda values: values.transpose(0, 1)[where].transpose(0, 1), lambda values: values[where])

    def widened(self) -> Contribution:
        return self._alike(Tensor.double, Tensor.double)

    def _alike(self, sides: Callable[[Tensor], Tensor], biases: Callable[[Tensor], Tensor]) -> Contribution:
        found = copy(self)
        found.lefts, found.rights = sides(self.lefts), sides(self.rights)
        found.records = found.lefts.shape[1]
        found.biases = {name: biases(values) for name, values in self.biases.items()}
        if found.slopes is not None:
            found.slopes = found.slopes.to(found.lefts.dtype)
        found.scratch = None
        return found

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        lefts, rights = self.lefts[:, start:stop], self.rights[:, start:stop]
        products = lefts.unsqueeze(3) * rights.unsqueeze(2)
        found = {name: values[start:stop] for name, values in self.biases.items()}
        if "weight_mean" in self.trainable:
            found["weight_mean"] = products.sum(0)
        if self.slopes is not None:
            found["weight_rho"] = (products * self.slopes.unsqueeze(1)).sum(0)
        return found


def mean_field_terms(call: Call) -> Terms:
    layer: Any = call.layer
    terms: Terms = {}
    if "weight_mean" in call.trainable:
        terms["weight_mean"] = [(draw, None) for draw in range(layer.draws)]
    if "weight_rho" in call.trainable:
        terms["weight_rho"] = list(enumerate(layer.jacobian("weight")))
    return terms


def mean_field_biases(call: Call, sums: Tensor) -> dict[str, Tensor]:
    """sums (draws, records, outputs): the output gradients added over positions."""
    layer: Any = call.layer
    biases = {}
    if "bias_mean" in call.trainable:
        biases["bias_mean"] = sums.sum(0)
    if "bias_rho" in call.trainable:
        biases["bias_rho"] = (sums * layer.jacobian("bias").unsqueeze(1)).sum(0)
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


@rule_for(MeanFieldEmbedding, parameters=MEAN_FIELD, capture=lambda layer: layer.apart, positions=True)
def mean_field_embedding(call: Call) -> Contribution:
    """The rows of the means, and beside them those of the rhos, each entry times its slope."""
    layer: Any = call.layer
    draws = layer.draws if call.captured else 1
    lefts, index = by_draw(call.gradient, draws), by_draw(call.input, draws)
    index = index.flatten(2) if index.dim() > 2 else index.unsqueeze(2)
    values = without_padding(lefts.reshape(*index.shape, -1), index, layer.padding_idx)
    names = [name for name in ("weight_mean", "weight_rho") if name in call.trainable]
    tables = [values]
    if "weight_rho" in names:
        slopes = layer.jacobian("weight")
        of_rho = torch.stack([values[draw] * slopes[draw][index[draw]] for draw in range(len(values))])
        tables = [values, of_rho] if "weight_mean" in names else [of_rho]
    beside = torch.cat(tables, -1)
    places, sums = (part.transpose(0, 1).flatten(1, 2) for part in (index, beside))
    return MeanFieldRows(places, sums, layer.num_embeddings, names)


@rule_for(MeanFieldConv2d, parameters=MEAN_FIELD, positions=True)
def mean_field_convolution(call: Call) -> Contribution:
    layer: Any = call.layer
    lefts, inputs = by_draw(call.gradient, layer.draws), by_draw(call.input, layer.draws)
    bases = [patch_sum(layer, *pair, call.space) for pair in zip(lefts, inputs, strict=True)]
    terms, biases = mean_field_terms(call), mean_field_biases(call, lefts.flatten(3).sum(3))
    if layer.draws == 1 and terms:
        return SlopedPatches(bases[0], terms.get("weight_rho", [(0, None)])[0][1], "weight_mean" in terms, biases)
    return Combined(bases, terms, biases, call.space)


def patch_sum(layer: Any, gradient: Tensor, inputs: Tensor, space: Workspace) -> PatchSum:
    margins = [margin for size in reversed(layer.padding) for margin in (size, size)]
    return PatchSum(channel_groups(gradient, layer.groups), inputs, Cut(layer, margins), space)


# local reparameterisation ---------------------------------------------------------------------------------------


class LocalOuterProducts(Combined):
    """One outer product per record for the mean and one, scaled by the variance, for the log variance."""

    exact = True

    def widened(self) -> Contribution:
        """Nothing is formed for its norm."""
        return self._alike([base.widened() for base in self.bases], Tensor.double)

    def _weight_norms(self) -> Tensor:
        norms = self.bases[0].squared_norms()
        if "weight_log_variance" not in self.terms:
            return norms
        ((index, variance),) = self.terms["weight_log_variance"]
        base = self.bases[index]
        assert isinstance(base, OuterProduct)
        assert variance is not None
        if self.exact:
            scales = torch.square(variance, out=self.space.take(variance, *variance.shape))
            of_right = (base.right.square() @ scales.t()).add_(lost_products(base.right, scales.amax()))
            of_variance = of_right.mul_(base.left).mul_(base.left).sum(1)
        else:
            of_right = squared_norms_of(base.right).add_(guard(base.right.shape[1], base.right.dtype))
            of_left = base.left.square() @ variance.amax(1).square_()
            of_variance = of_left.add_(guard(base.left.shape[1], base.left.dtype)).mul_(of_right)
        return norms + of_variance if "weight_mean" in self.terms else of_variance

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        """One scaled outer product each: scaling entries after the sum changes their errors as it changes them."""
        found = {name: factors @ values for name, values in self.biases.items()}
        for name, ((base, scale),) in self.terms.items():
            total = self.bases[base].weighted(factors)["weight"]
            found[name] = total if scale is None else total.mul_(scale)
        return found


def _local_terms(call: Call) -> Terms:
    layer: Any = call.layer
    terms: Terms = {}
    if "weight_mean" in call.trainable:
        terms["weight_mean"] = [(0, None)]
    if "weight_log_variance" in call.trainable:
        terms["weight_log_variance"] = [(1, layer.variance())]
    return terms


LOCAL = ("weight_mean", "weight_log_variance", "bias")


# Sharing the noise between records changes what is drawn, not how the gradients follow from it.
@rule_for(
    VariationalDropoutLinear,
    SharedNoiseLinear,
    parameters=LOCAL,
    positions=True,
    capture=_LocalReparameterisation.recall,
)
def variational_dropout_linear(call: Call) -> Contribution:
    layer: Any = call.layer
    pairs = _local_pairs(call)
    left = pairs[0][0]
    if left.dim() == 2:
        products = [OuterProduct(*pair, False, call.space) for pair in pairs]
        biases = {"bias": left} if "bias" in call.trainable else {}
        found = LocalOuterProducts(products, _local_terms(call), biases, call.space)
        found.exact = layer.norms == "exact"
        return found
    sums = [OuterSum(with_positions(one), with_positions(other), False, call.space) for one, other in pairs]
    biases = {"bias": with_positions(left).sum(1)} if "bias" in call.trainable else {}
    return Combined(sums, _local_terms(call), biases, call.space)


@rule_for(VariationalDropoutConv2d, SharedNoiseConv2d, parameters=LOCAL, capture=_LocalReparameterisation.recall)
def variational_dropout_convolution(call: Call) -> Contribution:
    bases = [patch_sum(call.layer, *pair, call.space) for pair in _local_pairs(call)]
    biases = {"bias": call.gradient.flatten(2).sum(2)} if "bias" in call.trainable else {}
    return Combined(bases, _local_terms(call), biases, call.space)


def _local_pairs(call: Call) -> list[tuple[Tensor, Tensor]]:
    """Gradient and input whose products make the means' gradients, and those for variances that are learnt."""
    left, right = call.gradient, call.input
    pairs = [(left, right)]
    if "weight_log_variance" in call.trainable:
        pairs.append((left * call.captured * 0.5, right.square()))
    return pairs
