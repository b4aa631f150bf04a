"""The clipping engine: one forward, one backward of output gradients, one weighted product per layer.

    1. run the module while the tape records every layer's input and the autograd edge of its output
    2. propagate the loss to those edges only: no weight gradients are formed, nothing below the first layer
    3. per-record norms from inputs and output gradients, by the rule of each layer
    4. clip factors, then the weighted sum of every layer added onto the caller's buffer, which may hold noise

(book-keeping: Bu et al. 2023, ICML, "Differentially private optimization on large model at small cost")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confide.mechanism.clipping.calls import Cluster, clusters_of, contributions_of, default_layout
from confide.mechanism.clipping.factors import Style, clip_factors
from confide.mechanism.clipping.layout import CallLayout
from confide.mechanism.clipping.plan import Plan, build_plan, signature_of
from confide.mechanism.clipping.rules.refusals import UnclippableError
from confide.mechanism.clipping.running import Inputs, Loss, Pass, record, recorded_pass, records_of
from confide.mechanism.clipping.structure import examine
from confide.mechanism.clipping.tape import Tape
from confide.mechanism.clipping.workspace import Workspace

Gradients: TypeAlias = list[list[Tensor | None]]


@dataclass(frozen=True, slots=True)
class Bound:
    """How one batch is clipped and where its sum goes."""

    clip: float
    style: Style
    out: Tensor
    budget: int


class Engine:
    """What is known of one module; `step` clips and sums the gradients of a batch."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.space = Workspace()

    def current_plan(self, module: nn.Module, loss: Loss, x: Inputs, y: Any) -> Plan:
        """The plan of the module as it is now, examined for inputs of this shape."""
        if self.plan is None or self.plan.signature != signature_of(module):
            self.plan = build_plan(module)
        key = shape_key(x)
        if key not in self.plan.layouts:
            try:
                self.plan, layouts = examine(module, self.plan, loss, x, y)
            except UnclippableError:
                raise
            except Exception:
                if records_of(x) > 0:
                    raise
                return self.plan  # an empty batch never fails; the next one is examined
            self.plan.layouts[key] = layouts
        return self.plan

    def step(self, module: nn.Module, loss: Loss, x: Inputs, y: Any, bound: Bound) -> Tensor:
        """Add the clipped sum onto the buffer; the norms come back, zero for records that count as zero."""
        plan = self.current_plan(module, loss, x, y)
        check_buffer(bound.out, plan)
        records = records_of(x)
        if records == 0:
            return bound.out.new_zeros(0)
        if not plan.explicit:  # nothing to put back afterwards
            return self._sum(plan, record(Tape(plan), module, loss, x, y), x, bound)
        with recorded_pass(module, plan, loss, x, y) as run:
            return self._sum(plan, run, x, bound)

    @torch.no_grad()
    def _sum(self, plan: Plan, run: Pass, x: Inputs, bound: Bound) -> Tensor:
        records = run.losses.shape[0]
        if not run.entries or not run.losses.requires_grad:
            return bound.out.new_zeros(records)
        gradients, layouts = run.gradients(), layouts_of(plan, run, x)
        self.space.begin(bound.budget)
        found = contributions_of(run.tape, gradients, layouts, records, self.space)
        if not found:  # the loss depends on none of the parameters
            return run.losses.new_zeros(records)
        clusters = clusters_of(found, plan, self.space)
        squares = group_squares(clusters)
        total = squared_total(squares)
        if math.isfinite(total.sum().item()):
            return add_clipped(clusters, squares, total, plan, bound)
        return self._sum_of_finite(plan, run, gradients, layouts, bound, torch.isfinite(total))

    def _sum_of_finite(
        self, plan: Plan, run: Pass, gradients: Gradients, layouts: Sequence[CallLayout], bound: Bound, finite: Tensor
    ) -> Tensor:
        """Records with an infinite or undefined norm count as zero.

        They are taken out altogether: a factor of zero would turn their infinities into undefined sums.
        """
        norms = run.losses.new_zeros(len(finite))
        chosen = finite.nonzero().flatten()
        if len(chosen) == 0:
            return norms
        self.space.begin(bound.budget)
        found = contributions_of(run.tape, gradients, layouts, len(finite), self.space, chosen)
        clusters = clusters_of(found, plan, self.space)
        squares = group_squares(clusters)
        return norms.index_copy_(0, chosen, add_clipped(clusters, squares, squared_total(squares), plan, bound))


def shape_key(x: Inputs) -> tuple[Any, ...]:
    """What the layouts of a module depend on, besides the module."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in (x if isinstance(x, tuple) else (x,)))


def layouts_of(plan: Plan, run: Pass, x: Inputs) -> Sequence[CallLayout]:
    """The examined layouts; where this batch took another way through the module, records must be on axis 0."""
    known, records = plan.layouts[shape_key(x)], run.losses.shape[0]
    if len(known) == len(run.entries):
        fits = (layout.fits(entry.shapes, records) for entry, layout in zip(run.entries, known, strict=True))
        if all(fits):
            return known
    found = [default_layout(entry, records, run.tape.drawn(entry)) for entry in run.entries]
    if not all(all(layout.outputs) for layout in found):
        raise UnclippableError("module: its layers are called in another way than for made-up records of this shape")
    return found


def group_squares(clusters: Sequence[Cluster]) -> dict[int, Tensor]:
    """Squared norms by group of per-layer clipping; groups without a call in this batch are absent."""
    squares: dict[int, Tensor] = {}
    for cluster in clusters:
        known, found = squares.get(cluster.group), cluster.squared_norms()
        squares[cluster.group] = found if known is None else known + found
    return squares


def squared_total(squares: dict[int, Tensor]) -> Tensor:
    first, *rest = squares.values()
    return sum(rest, start=first)


def add_clipped(
    clusters: Sequence[Cluster], squares: dict[int, Tensor], total: Tensor, plan: Plan, bound: Bound
) -> Tensor:
    """The weighted sums, onto the buffer; the norms come back.

    Per-layer clipping gives each of the K groups C / sqrt(K), whether it was used or not: the joint norm of a
    record over all groups is then at most C, the same sensitivity as flat clipping.
    """
    norms = total.sqrt()
    if bound.style == "per-layer":
        share = bound.clip / math.sqrt(plan.groups)
        factors = {group: clip_factors(values.sqrt(), share) for group, values in squares.items()}
    else:
        factors = dict.fromkeys(squares, clip_factors(norms, bound.clip, bound.style))
    views = ParameterViews(bound.out, plan)
    for cluster in clusters:
        cluster.add_weighted(factors[cluster.group], views.parts)
    views.finish()
    return norms


class ParameterViews:
    """Views of the flat buffer in the shapes of the parameters; through a scratch copy where the types differ."""

    def __init__(self, out: Tensor, plan: Plan) -> None:
        self.out = out
        self.copied = any(parameter.dtype != out.dtype for parameter in plan.parameters)
        if self.copied:
            self.parts = [torch.zeros_like(parameter, requires_grad=False) for parameter in plan.parameters]
        else:
            pieces = out.split_with_sizes(plan.sizes)
            self.parts = [piece.view(value.shape) for piece, value in zip(pieces, plan.parameters, strict=True)]

    def finish(self) -> None:
        if self.copied:
            self.out.add_(torch.cat([part.flatten().to(self.out.dtype) for part in self.parts]))


def check_buffer(out: Tensor, plan: Plan) -> None:
    if out.shape != (plan.size,) or not out.is_contiguous() or out.requires_grad:
        raise ValueError(
            f"out={tuple(out.shape)}: must be a contiguous vector of {plan.size} numbers, one per trainable parameter"
        )


_ENGINES: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine:
    """The engine that knows this module; kept as long as the module lives."""
    engine = _ENGINES.get(module)
    if engine is None:
        engine = _ENGINES[module] = Engine()
    return engine
