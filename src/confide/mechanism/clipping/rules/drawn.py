"""Layers whose parameters are drawn: gradients of means and rhos from the rule of the layer as it was.

With G the gradient of one record with respect to a drawn parameter and J = noise * sigmoid(rho), the derivative of what
was drawn with respect to rho,

    dmean = G,      drho = J * G,

so whatever rule gives G gives both. Every record's gradient is formed, some records at a time, for its norm and for the
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from confide.mechanism.clipping.rules.formed import in_double
from confide.mechanism.clipping.rules.registry import Call, Contribution, Rule, Where, find_rule
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.workspace import Workspace

ENDINGS = ("", "_mean", "_rho")
SlopeOf: TypeAlias = Callable[[nn.Module, str], Tensor]


def drawn_name(name: str) -> str:
    """What is drawn by way of this parameter; itself where nothing is."""
    return name.removesuffix("_mean").removesuffix("_rho")


class DrawnGradients(Contribution):
    """`base` answers for what was drawn; `wanted` are means, rhos and parameters that are not drawn."""

    def __init__(self, base: Contribution, wanted: frozenset[str], slopes: dict[str, Tensor], space: Workspace) -> None:
        self.base, self.wanted, self.slopes, self.space = base, sorted(wanted), slopes, space
        self.records = base.records
        self.kept: dict[str, Tensor] | None = None
        self.squares: Tensor | None = None
        self.wide = False

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        """What was formed stays as it was (`formed`)."""
        if self.kept is not None:
            found = {name: values[start:stop] for name, values in self.kept.items()}
        else:
            found = self._of_base(self.base.dense(start, stop))
        return in_double(found, lambda lost: self._anew(lost + start)) if self.wide else found

    def _of_base(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: found[drawn_name(name)] * self.slopes[name] if name in self.slopes else found[drawn_name(name)]
            for name in self.wanted
        }

    def _anew(self, which: Tensor) -> dict[str, Tensor]:
        return self._of_base(self.base.chosen(which).widened().dense(0, len(which)))

    def _pieces(self) -> list[tuple[int, int]]:
        size = sum(value.numel() * value.element_size() for value in self.dense(0, 1).values())
        return list(chunks(self.records, 2 * size, self.space.budget))

    def squared_norms(self) -> Tensor:
        if self.squares is None:
            parts, pieces = [], self._pieces()
            for start, stop in pieces:
                found = self.dense(start, stop)
                parts.append(torch.stack([squared_norms_of(value) for value in found.values()]).sum(0))
            self.kept = found if len(pieces) == 1 else None
            self.squares = torch.cat(parts)
        return self.squares

    def spread(self) -> Tensor:
        return self.squared_norms().sqrt()

    def lost(self) -> Tensor | None:
        return self.base.lost()

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for start, stop in self._pieces():
            for name, values in self.dense(start, stop).items():
                part = (factors[start:stop] @ values.flatten(1)).view(values.shape[1:])
                total[name] = total[name].add_(part) if name in total else part
        return total

    def chosen(self, where: Where) -> Contribution:
        return self._alike(self.base.chosen(where), lambda values: values[where])

    def widened(self) -> Contribution:
        found = self._alike(self.base, Tensor.double)
        found.wide = True
        return found

    def _alike(self, base: Contribution, change: Callable[[Tensor], Tensor]) -> DrawnGradients:
        found = copy(self)
        found.base, found.records = base, base.records
        found.kept = None if self.kept is None else {name: change(values) for name, values in self.kept.items()}
        found.squares = None if self.squares is None else change(self.squares)
        return found

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        bases = [other.base for other in others if isinstance(other, DrawnGradients) and other.wanted == self.wanted]
        base = self.base.merged(bases) if len(bases) == len(others) else None
        return None if base is None else DrawnGradients(base, frozenset(self.wanted), self.slopes, self.space)


def rule_of_drawn(rule: Rule, slope_of: SlopeOf) -> Rule:
    """The rule of means and rhos, from that of the layer; `slope_of` finds J by layer and name."""
    return replace(rule, function=partial(_contribution, rule, slope_of), parameters=None, accepts=None)


def _contribution(rule: Rule, slope_of: SlopeOf, call: Call) -> Contribution:
    wanted = call.trainable
    base = rule.contribution(replace(call, trainable=frozenset(map(drawn_name, wanted))))
    slopes = {
        name: slope_of(call.layer, drawn_name(name)).to(call.gradient) for name in wanted if name.endswith("_rho")
    }
    return DrawnGradients(base, wanted, slopes, call.space)


def _slope(layer: Any, name: str) -> Tensor:
    found: Tensor = layer.drawn_slope(name)
    return found


def drawn_rule(layer: Any, names: frozenset[str]) -> Rule | None:
    """For a layer with drawn parameters of its own: the rule of its type, if that has one."""
    rule = find_rule(layer, frozenset(map(drawn_name, names)))
    return None if rule is None else rule_of_drawn(rule, _slope)
