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

from confide.errors import Refusal, UnclippableError
from confide.mechanism.clipping.anatomy import Anatomy, Examined, anatomy_of, signature_of
from confide.mechanism.clipping.calls import Cluster, clusters_of, contributions_of, default_layout
from confide.mechanism.clipping.chain import LayerChain
from confide.mechanism.clipping.factors import Style, clip_factors
from confide.mechanism.clipping.layout import CallLayout, map_tensors
from confide.mechanism.clipping.running import Inputs, Loss, Pass, record, recorded_pass, records_of
from confide.mechanism.clipping.structure import examine
from confide.mechanism.clipping.tape import Tape
from confide.mechanism.clipping.workspace import Workspace

# Buffers of up to this many numbers are not worth letting go between steps.
SMALL = 1 << 16
# What a pass may hold of its records; beyond, the batch goes in pieces, so that the activations of a large batch do not
# decide how much memory a step needs. Passes over much less than this would cost time.
HELD_BYTES = 256 << 20
FEWEST_RECORDS = 8

Gradients: TypeAlias = list[list[Tensor | None]]


@dataclass(frozen=True, slots=True)
class ClipBound:
    """How one batch is clipped and where its sum goes."""

    clip: float
    style: Style
    out: Tensor
    budget: int
    micro_batch: int | None


class Engine:
    """What is known of one module; `step` clips and sums the gradients of a batch."""

    def __init__(self) -> None:
        self.anatomy: Anatomy | None = None
        self.space = Workspace()
        self.views: ParameterViews | None = None

    def current_anatomy(self, module: nn.Module, loss: Loss, x: Inputs, y: Any) -> Anatomy:
        """The anatomy of the module as it is now, examined for inputs of this shape."""
        if self.anatomy is None or self.anatomy.signature != signature_of(module):
            self.anatomy = anatomy_of(module)
        key = examination_key(loss, x)
        if key not in self.anatomy.examined:
            try:
                self.anatomy, examined = examine(module, self.anatomy, loss, x, y)
            except UnclippableError:
                raise
            except Exception:
                if records_of(x) > 0:
                    raise
                return self.anatomy  # an empty batch never fails; the next one is examined
            self.anatomy.examined[key] = examined
        return self.anatomy

    def step(self, module: nn.Module, loss: Loss, x: Inputs, y: Any, bound: ClipBound) -> Tensor:
        """Add the clipped sum onto the buffer; the norms come back, zero for records that count as zero."""
        anatomy = self.current_anatomy(module, loss, x, y)
        check_buffer(bound.out, anatomy)
        records = records_of(x)
        if records == 0:
            return bound.out.new_zeros(0)
        largest = self._largest_piece(anatomy, anatomy.examined[examination_key(loss, x)], records, bound)
        if largest >= records:
            return self._piece(anatomy, module, loss, x, y, bound)
        norms = []
        for start in range(0, records, largest):
            piece = slice(start, start + largest)
            part_x, part_y = map_tensors(lambda tensor, piece=piece: tensor[piece], (x, y))
            norms.append(self._piece(anatomy, module, loss, part_x, part_y, bound))
        return torch.cat(norms)

    def _largest_piece(self, anatomy: Anatomy, examined: Examined, records: int, bound: ClipBound) -> int:
        """How many records go through the module at once: all, unless they would hold too much; pieces are equal."""
        largest = records if bound.micro_batch is None else min(records, bound.micro_batch)
        if anatomy.copied:
            largest = min(largest, max(1, bound.budget // anatomy.copied_bytes))
        held = examined.record_bytes
        if examined.chain is None and largest * held > HELD_BYTES:
            largest = min(largest, max(FEWEST_RECORDS, HELD_BYTES // held))
            largest = -(-records // -(-records // largest))
        return largest

    def _piece(self, anatomy: Anatomy, module: nn.Module, loss: Loss, x: Inputs, y: Any, bound: ClipBound) -> Tensor:
        examined = anatomy.examined[examination_key(loss, x)]
        if examined.chain is not None and isinstance(x, Tensor) and examined.chain.fits(x, bound.out):
            return self._chained(anatomy, examined.chain, loss, x, y, bound)
        if not anatomy.explicit:  # nothing to put back afterwards
            return self._sum(anatomy, examined, record(Tape(anatomy), module, loss, x, y), bound)
        with recorded_pass(module, anatomy, loss, x, y) as run:
            return self._sum(anatomy, examined, run, bound)

    @torch.no_grad()
    def _chained(self, anatomy: Anatomy, chain: LayerChain, loss: Loss, x: Tensor, y: Any, bound: ClipBound) -> Tensor:
        """The clipped sum without a tape; records that count as zero are taken out and the others run again."""
        self.space.begin(bound.budget)
        found = chain.contributions(loss, x, y, self.space)
        if not found:
            return bound.out.new_zeros(x.shape[0])
        if bound.style != "per-layer":
            parts = self._views(anatomy, bound.out).parts
            small = chain.add_small(found, bound.clip, bound.style == "automatic", parts)
            if small is not None:
                return small
        clusters = [Cluster([member], anatomy, self.space) for member in found]
        squares = group_squares(clusters)
        total = squared_total(squares)
        if all_finite(total):
            return add_clipped(clusters, squares, total, anatomy, bound, self._views(anatomy, bound.out))
        chosen = torch.isfinite(total).nonzero().flatten()
        norms = bound.out.new_zeros(x.shape[0])
        if len(chosen) == 0:
            return norms
        part_x, part_y = map_tensors(lambda tensor: tensor[chosen], (x, y))
        return norms.index_copy_(0, chosen, self._chained(anatomy, chain, loss, part_x, part_y, bound))

    @torch.no_grad()
    def _sum(self, anatomy: Anatomy, examined: Examined, run: Pass, bound: ClipBound) -> Tensor:
        records = run.losses.shape[0]
        if not run.entries or not run.losses.requires_grad:
            return bound.out.new_zeros(records)
        gradients, layouts = run.gradients(), layouts_of(examined, run)
        self.space.begin(bound.budget)
        found = contributions_of(run.tape, gradients, layouts, records, self.space)
        if not found:  # the loss depends on none of the parameters
            return run.losses.new_zeros(records)
        clusters = clusters_of(found, anatomy, self.space)
        squares = group_squares(clusters)
        total = squared_total(squares)
        if all_finite(total):
            return add_clipped(clusters, squares, total, anatomy, bound, self._views(anatomy, bound.out))
        return self._sum_of_finite(anatomy, run, gradients, layouts, bound, torch.isfinite(total))

    def _sum_of_finite(
        self,
        anatomy: Anatomy,
        run: Pass,
        gradients: Gradients,
        layouts: Sequence[CallLayout],
        bound: ClipBound,
        finite: Tensor,
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
        clusters = clusters_of(found, anatomy, self.space)
        squares = group_squares(clusters)
        views = self._views(anatomy, bound.out)
        return norms.index_copy_(
            0, chosen, add_clipped(clusters, squares, squared_total(squares), anatomy, bound, views)
        )

    def _views(self, anatomy: Anatomy, out: Tensor) -> ParameterViews:
        """Views of the buffer; those of a small one are kept for the next step, where making them would be felt."""
        if self.views is None or self.views.out is not out or self.views.anatomy is not anatomy:
            views = ParameterViews(out, anatomy)
            self.views = views if anatomy.size <= SMALL and not views.copied else None
            return views
        return self.views


def examination_key(loss: Loss, x: Inputs) -> tuple[Any, ...]:
    """What an examination depends on, besides the module: shapes and types, and the loss by its code."""
    code = getattr(loss, "__code__", None) or type(loss)
    return code, *((tensor.shape[1:], tensor.dtype) for tensor in (x if isinstance(x, tuple) else (x,)))


def layouts_of(examined: Examined, run: Pass) -> Sequence[CallLayout]:
    """The examined layouts. Where this batch took another way through the module, and all records were seen on axis
    0 before, they are taken to be there again; anything else could mistake another axis for the records'."""
    records = run.losses.shape[0]
    if [entry.slot for entry in run.entries] == examined.slots:
        for entry, layout in zip(run.entries, examined.layouts, strict=True):
            if not layout.fits(entry.shapes, records):
                break
        else:
            return examined.layouts
    found = [default_layout(entry, records, run.tape.drawn(entry)) for entry in run.entries]
    if not examined.records_first or not all(all(layout.outputs) for layout in found):
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


def all_finite(total: Tensor) -> bool:
    """Whether every record has a finite norm: asked of each, for the sum of finite squares may overflow."""
    return bool(torch.isfinite(total).all())


def add_clipped(
    clusters: Sequence[Cluster],
    squares: dict[int, Tensor],
    total: Tensor,
    anatomy: Anatomy,
    bound: ClipBound,
    views: ParameterViews,
) -> Tensor:
    """The weighted sums, onto the buffer; the norms come back.

    Per-layer clipping gives each of the K groups C / sqrt(K), whether it was used or not: the joint norm of a
    record over all groups is then at most C, the same sensitivity as flat clipping.
    """
    norms = total.sqrt()
    if bound.style == "per-layer":
        share = bound.clip / math.sqrt(anatomy.groups)
        factors = {group: clip_factors(values.sqrt(), share) for group, values in squares.items()}
    else:
        factors = dict.fromkeys(squares, clip_factors(norms, bound.clip, bound.style))
    for cluster in clusters:
        cluster.add_weighted(factors[cluster.group], views.parts)
    views.finish()
    return norms


class ParameterViews:
    """Views of the flat buffer in the shapes of the parameters; through a scratch copy where the types differ."""

    def __init__(self, out: Tensor, anatomy: Anatomy) -> None:
        self.out, self.anatomy = out, anatomy
        self.copied = any(parameter.dtype != out.dtype for parameter in anatomy.parameters)
        if self.copied:
            self.parts = [torch.zeros_like(parameter, requires_grad=False) for parameter in anatomy.parameters]
        else:
            pieces = out.split_with_sizes(anatomy.sizes)
            self.parts = [piece.view(value.shape) for piece, value in zip(pieces, anatomy.parameters, strict=True)]

    def finish(self) -> None:
        if self.copied:
            self.out.add_(torch.cat([part.flatten().to(self.out.dtype) for part in self.parts]))


def check_buffer(out: Tensor, anatomy: Anatomy) -> None:
    if out.shape != (anatomy.size,) or not out.is_contiguous() or out.requires_grad:
        raise Refusal(
            f"out={tuple(out.shape)}: must be a contiguous vector of {anatomy.size} numbers, one per trainable "
            "parameter"
        )


_ENGINES: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


def engine_of(module: nn.Module) -> Engine:
    """The engine that knows this module; kept as long as the module lives."""
    engine = _ENGINES.get(module)
    if engine is None:
        engine = _ENGINES[module] = Engine()
    return engine
