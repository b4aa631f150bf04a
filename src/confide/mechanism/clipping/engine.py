"""The clipping engine: one forward, one backward of output gradients, one weighted product per layer.

    1. run the module while the tape records every layer's input and the autograd edge of its output: as a whole where
       it is proven to keep records apart, else so that no record can see another (`isolation`), else one by one
    2. propagate the loss to those edges only: no weight gradients are formed, nothing below the first layer
    3. per-record norms from inputs and output gradients, by the rule of each layer
    4. clip factors, then the weighted sum of every layer, certified (`rounding`), added onto the caller's buffer at
       once: that may hold noise, and nothing is ever rounded against it twice

(book-keeping: Bu et al. 2023, ICML, "Differentially private optimization on large model at small cost")
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C import _set_grad_enabled as set_grad_enabled

from confide.data.trees import form_of, rows_of
from confide.devices import HOST, free_bytes
from confide.errors import Refusal, UnclippableError
from confide.mechanism.clipping import libraries, one_by_one
from confide.mechanism.clipping.anatomy import Anatomy, Examined, Slot, anatomy_of, signature_of
from confide.mechanism.clipping.backward import propagate
from confide.mechanism.clipping.calls import Cluster, Found, clusters_of, first_of
from confide.mechanism.clipping.certified import add_certified, exact_products, views_of
from confide.mechanism.clipping.chain import LayerChain
from confide.mechanism.clipping.evenly import ANY, FOUR, even_size, filled
from confide.mechanism.clipping.factors import Style
from confide.mechanism.clipping.intact import check_surroundings
from confide.mechanism.clipping.isolation import NotIsolable, forget
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.places import fewest_rows, tell_of_uneven, threads_of
from confide.mechanism.clipping.proven import hooked_backwards, is_proven, is_proven_loss
from confide.mechanism.clipping.randomness import one_answer
from confide.mechanism.clipping.rounding import IN_DOUBLE, SHARE, Tally, working_type
from confide.mechanism.clipping.rules.registry import Contribution, Dense
from confide.mechanism.clipping.rules.squares import full_precision
from confide.mechanism.clipping.running import Inputs, Loss, Pass, isolated_pass, proven_pass, records_of
from confide.mechanism.clipping.structure import examine
from confide.mechanism.clipping.traces import BeforePass
from confide.mechanism.clipping.unchanged import Unchanged
from confide.mechanism.clipping.workspace import Workspace

# Buffers of up to this many numbers are not worth letting go between steps.
SMALL = 1 << 16
# What a pass may hold of its records; beyond, the batch goes in pieces, so that the activations of a large batch do not
# decide how much memory a step needs. Passes over much less than this would cost time.
HELD_BYTES = 256 << 20
# Of what is free on a device with memory of its own: activations, their gradients and what the rules make of both are
# each about as large as what was counted.
SHARE_OF_FREE = 0.25


@dataclass(slots=True)
class ClipBound:
    """How one batch is clipped and where its sum goes."""

    clip: float
    style: Style
    out: Tensor
    budget: int
    micro_batch: int | None
    strict: bool = False  # the records are made up: what they raise is raised
    allowed: float = 0.0  # what rounding may take of the clip in this piece of the batch
    weights: Tensor | None = None  # what each record counts for, at most 1: it scales what was clipped
    most: int = ANY  # records that may go through the module at once


@dataclass(slots=True)
class Batch:
    """A question and the records it is put to."""

    module: nn.Module
    loss: Loss
    x: Inputs
    y: Any

    @property
    def records(self) -> int:
        return records_of(self.x)

    def of_size(self, size: int) -> Batch:
        """Filled up to so many with copies of the last record."""
        x, y = filled((self.x, self.y), self.records, size)
        return Batch(self.module, self.loss, x, y)

    def pieces(self, largest: int) -> list[Batch]:
        if largest >= self.records:
            return [self]
        starts = range(0, self.records, largest)
        cut = [rows_of((self.x, self.y), slice(start, start + largest)) for start in starts]
        return [Batch(self.module, self.loss, x, y) for x, y in cut]


Asking: TypeAlias = Generator[tuple[Batch, ClipBound], Tensor | None, Tensor]
"""What is still to be answered; it is told the norms, or None where a batch gave no answer, and gives all norms."""


class Engine:
    """What is known of one module; `step` clips and sums the gradients of a batch."""

    def __init__(self) -> None:
        self.anatomy: Anatomy | None = None
        self.looked: Unchanged | None = None  # as the anatomy was made and the module was found proven
        self.fresh = False  # whether that was compared for the pass that comes next
        self.space = Workspace()
        self.views: ParameterViews | None = None
        self.adding = False

    def current_anatomy(self, module: nn.Module, loss: Loss, x: Inputs, y: Any, key: tuple[Any, ...]) -> Anatomy:
        """The anatomy of the module as it is now, examined for inputs of this shape."""
        self.fresh = self.looked is not None and self.looked.holds(x)
        if self.anatomy is None or not (self.fresh or self.anatomy.signature == signature_of(module)):
            self.anatomy, self.looked, self.fresh = anatomy_of(module), None, False
        if key not in self.anatomy.examined:
            libraries.tell()
            self.looked, self.fresh = None, False
            try:
                with exact_products():
                    self.anatomy, examined = copy_context().run(examine, module, self.anatomy, loss, x, y)
            except UnclippableError:
                raise
            except Exception:
                if records_of(x) > 0:
                    raise
                return self.anatomy  # an empty batch never fails; the next one is examined
            self.anatomy.examined[key] = examined
        return self.anatomy

    def step(self, module: nn.Module, loss: Loss, x: Inputs, y: Any, bound: ClipBound) -> Tensor:
        """Add the clipped sum onto the buffer; the norms come back, zero for records that count as zero.

        Context variables that user code sets are its own: it runs in a copy of the context.
        """
        return copy_context().run(self._step, module, loss, x, y, bound)

    def _step(self, module: nn.Module, loss: Loss, x: Inputs, y: Any, bound: ClipBound) -> Tensor:
        check_surroundings()
        key = examination_key(loss, x)
        anatomy = self.current_anatomy(module, loss, x, y, key)
        check_buffer(bound.out, anatomy)
        examined = anatomy.examined.get(key)
        if examined is None:  # no records at all, so far
            return bound.out.new_zeros(0)
        with one_answer(examined.chance) if not all(examined.proven) else nullcontext():
            return self._all_answered(anatomy, examined, Batch(module, loss, x, y), bound)

    def _all_answered(self, anatomy: Anatomy, examined: Examined, asked: Batch, bound: ClipBound) -> Tensor:
        records = asked.records
        if records == 0:
            return bound.out.new_zeros(0)
        dtype = working_type(anatomy.parameters)
        bound.allowed = SHARE[dtype] * (1 - IN_DOUBLE[dtype])
        bound.most = self._most_at_once(anatomy, examined, bound)
        try:
            whole = records <= bound.most or examined.way == "one by one"
            pieces = [asked] if whole else asked.pieces(equal_part(records, bound.most))
            return self._driven(anatomy, examined, self._of_pieces(pieces, bound))
        finally:
            forget()

    def _driven(self, anatomy: Anatomy, examined: Examined, asking: Asking) -> Tensor:
        """Every pass runs from here: neither how deep Python's stack is nor an error that is dealt with says to user
        code how a batch was cut."""
        answer: Tensor | None = None
        while True:
            try:
                piece, part = asking.send(answer)
            except StopIteration as end:
                norms: Tensor = end.value
                return norms
            answer = self._tried(anatomy, examined, piece, part)

    def _of_pieces(self, pieces: Sequence[Batch], bound: ClipBound) -> Asking:
        """Pieces are added up in double precision before they meet the buffer, and share what rounding may take.

        No error depends on a record: where a batch gives no answer its halves are tried, and the record that raises
        alone counts as zero.
        """
        if len(pieces) == 1:
            norms = yield pieces[0], bound
            if norms is None:
                norms = yield from self._of_pieces(pieces[0].pieces(-(-pieces[0].records // 2)), bound)
            return norms
        total, found = Tally(bound.out.shape, bound.out.device), []
        for piece, part in self._parts(pieces, bound, total):
            found.append((yield from self._of_pieces([piece], part)))
            total.added()
        bound.out.add_(total.total())
        return torch.cat(found)

    def _parts(self, pieces: Sequence[Batch], bound: ClipBound, total: Tally) -> Iterator[tuple[Batch, ClipBound]]:
        records, start = sum(piece.records for piece in pieces), 0
        for piece in pieces:
            theirs = None if bound.weights is None else bound.weights[start : start + piece.records]
            start += piece.records
            yield piece, replace(bound, out=total.open, allowed=bound.allowed * piece.records / records, weights=theirs)

    def _tried(self, anatomy: Anatomy, examined: Examined, asked: Batch, bound: ClipBound) -> Tensor | None:
        """What is not proven runs isolated whatever the examination found; None where a batch gave no answer."""
        self.adding = False
        if examined.way == "one by one":
            return self._one_by_one(anatomy, asked, bound)
        kept = BeforePass(asked.module, asked.loss, examined.proven) if examined.traces else None
        try:
            return self._at_once(anatomy, examined, asked, bound)
        except NotIsolable:
            alone = True
        except Exception:
            if bound.strict or self.adding:  # nothing is added twice
                raise
            alone = asked.records == 1
        if kept is not None:
            kept.put_back()
        return self._one_by_one(anatomy, asked, bound) if alone else None

    def _at_once(self, anatomy: Anatomy, examined: Examined, asked: Batch, bound: ClipBound) -> Tensor:
        """All of them, among so many that a record's numbers round as they would in any other batch (`evenly`)."""
        if examined.even.single:
            with threads_of(examined.even):
                return self._filled_up(anatomy, examined, asked, bound)
        return self._filled_up(anatomy, examined, asked, bound)

    def _filled_up(self, anatomy: Anatomy, examined: Examined, asked: Batch, bound: ClipBound) -> Tensor:
        records, even = asked.records, examined.even
        fits = even.rows <= bound.most
        size = records if bound.most == 1 else even_size(records, even.rows if fits else 1)
        if not even.alike or not (fits or bound.most == 1):  # one by one every record is at the same place
            tell_of_uneven()
        whole = asked if size == records else asked.of_size(size)
        if examined.way == "proven" and self._is_proven(whole.module, whole.x):
            return self._proven(anatomy, examined, whole, bound, records)
        with muted() if examined.quiet else nullcontext():
            return self._isolated(anatomy, whole, bound, records)

    def _is_proven(self, module: nn.Module, x: Inputs) -> bool:
        """Before every pass: nothing has changed since the whole look that found it so, or the whole look once more."""
        fresh, self.fresh = self.fresh, False
        if fresh or (self.looked is not None and self.looked.holds(x)):
            return True
        now = Unchanged(module, x)  # before the look, so that what changes after it is noticed
        proven = is_proven(module, x)
        self.looked = now if proven else None
        return proven

    def _most_at_once(self, anatomy: Anatomy, examined: Examined, bound: ClipBound) -> int:
        """How many records may go through the module at once: any number, unless they would hold too much.

        Two or three of them would be left over of what products take at a time: then it is one.
        """
        most = self._most_held(anatomy, examined, bound)
        step = examined.even.rows if most >= examined.even.rows else FOUR
        return 1 if most < FOUR else most - most % step

    def _most_held(self, anatomy: Anatomy, examined: Examined, bound: ClipBound) -> int:
        most = ANY if bound.micro_batch is None else bound.micro_batch
        if anatomy.copied:
            most = min(most, max(1, bound.budget // max(1, anatomy.copied_bytes)))
        held, device = examined.record_bytes, bound.out.device
        if held == 0 or (examined.chain is not None and device == HOST):
            return most
        room = held_bytes(device)
        if examined.chain is None or room < HELD_BYTES:
            most = min(most, max(fewest_rows(held), room // held))
        return most

    def _proven(self, anatomy: Anatomy, examined: Examined, asked: Batch, bound: ClipBound, counted: int) -> Tensor:
        chain = examined.chain
        if chain is not None and isinstance(asked.x, Tensor) and chain.fits(asked.x):
            return self._chained(anatomy, chain, asked, asked.x, bound, counted)
        run = proven_pass(asked.module, anatomy, asked.loss, asked.x, asked.y)
        if not is_proven_loss(asked.loss, asked.y) and run.unseen():
            raise NotIsolable("uses parameters in its loss")
        return self._sum(anatomy, run, bound, counted)

    def _isolated(self, anatomy: Anatomy, asked: Batch, bound: ClipBound, counted: int) -> Tensor:
        if any(hooked_backwards(layer) for layer in asked.module.modules()):
            raise NotIsolable("has hooks on gradients")
        run = isolated_pass(asked.module, anatomy, asked.loss, asked.x, asked.y)
        if run.unseen():  # it took another way than for made-up records
            raise NotIsolable("uses parameters outside of their layers")
        return self._sum(anatomy, run, bound, counted)

    @torch.no_grad()
    def _one_by_one(self, anatomy: Anatomy, asked: Batch, bound: ClipBound) -> Tensor:
        """As many records at a time as the budget holds gradients of."""
        pieces = asked.pieces(max(1, bound.budget // max(1, anatomy.bytes)))
        if len(pieces) == 1:
            return self._formed(anatomy, asked, bound)
        total, norms = Tally(bound.out.shape, bound.out.device), []
        for piece, part in self._parts(pieces, bound, total):
            norms.append(self._formed(anatomy, piece, part))
            total.added()
        bound.out.add_(total.total())
        return torch.cat(norms)

    def _formed(self, anatomy: Anatomy, piece: Batch, part: ClipBound) -> Tensor:
        gradients = one_by_one.gradients(
            piece.module, anatomy.parameters, piece.loss, piece.x, piece.y, anatomy.draws, part.strict
        )
        parts = [Dense({"value": full_precision(values)}) for values in gradients]
        self.space.begin(part.budget)
        return self._add(
            anatomy, list(zip(anatomy.single_slots(piece.module), parts, strict=True)), piece.records, part
        )

    def _chained(
        self, anatomy: Anatomy, chain: LayerChain, asked: Batch, x: Tensor, bound: ClipBound, counted: int
    ) -> Tensor:
        """The clipped sum without a tape. The switch is set by hand: torch's context takes longer than small layers."""
        before = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)  # inside: an interrupt must not leave it so
            return self._chained_sum(anatomy, chain, asked, x, bound, counted)
        finally:
            set_grad_enabled(before)

    def _chained_sum(
        self, anatomy: Anatomy, chain: LayerChain, asked: Batch, x: Tensor, bound: ClipBound, counted: int
    ) -> Tensor:
        self.space.begin(bound.budget)
        found = chain.contributions(asked.loss, x, asked.y, self.space, counted)
        if not found:
            return bound.out.new_zeros(counted)
        self.adding = True
        if bound.style != "per-layer" and bound.weights is None:
            parts = self._views(anatomy, bound.out).parts
            small = chain.add_small(found, bound.clip, bound.style == "automatic", parts, bound.allowed)
            if small is not None:
                return small
        clusters = [Cluster([member], anatomy, self.space) for member in found]
        with exact_products():
            return add_certified(clusters, anatomy, bound, self._views(anatomy, bound.out))

    @torch.no_grad()
    def _sum(self, anatomy: Anatomy, run: Pass, bound: ClipBound, counted: int) -> Tensor:
        if not run.losses.requires_grad:
            return bound.out.new_zeros(counted)
        self.space.begin(bound.budget)
        calls = [entry.edges for entry in run.entries]
        found = Found(run.tape, self.space)

        def take(number: int, gradients: Sequence[Tensor | None]) -> None:
            with exact_products():
                found.take(number, gradients)

        at_copies = propagate(run.losses, calls, run.copies, take)
        made, norms = found.contributions(at_copies), found.norms
        if run.losses.shape[0] > counted:
            made, norms = first_of(made, norms, counted)
        return self._add(anatomy, made, counted, bound, norms)

    def _add(
        self,
        anatomy: Anatomy,
        found: list[tuple[Slot, Contribution]],
        records: int,
        bound: ClipBound,
        norms: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """The clipped sum of what was found, of which some `norms` may be known."""
        if not found:  # the loss depends on none of the parameters
            return bound.out.new_zeros(records)
        self.adding = True
        with exact_products():
            return add_certified(
                clusters_of(found, anatomy, self.space, norms), anatomy, bound, self._views(anatomy, bound.out)
            )

    def _views(self, anatomy: Anatomy, out: Tensor) -> ParameterViews:
        """Views of the buffer; those of a small one are kept for the next step, where making them would be felt."""
        if self.views is None or self.views.out is not out or self.views.anatomy is not anatomy:
            views = ParameterViews(out, anatomy)
            self.views = views if anatomy.size <= SMALL else None
            return views
        return self.views


def equal_part(records: int, most: int) -> int:
    """The size of pieces that are as equal as can be, of at most so many."""
    return -(-records // -(-records // most))


def held_bytes(device: torch.device) -> int:
    """What a pass may hold of its records on a device: a part of what is free there, so that backward has room too."""
    free = free_bytes(device)
    return HELD_BYTES if free is None else max(1, int(SHARE_OF_FREE * free))


def examination_key(loss: Loss, x: Inputs) -> tuple[Any, ...]:
    """What an examination depends on, besides the module: shapes and types, threads, and the loss by its code.

    Losses of the same code share an examination, not trust: any loss but confide's own runs isolated at every step.
    """
    code = getattr(loss, "__code__", None) or getattr(loss, "__func__", None) or type(loss)
    threads = torch.get_num_threads()
    return (code, threads, (), (x.shape[1:], x.dtype)) if type(x) is Tensor else (code, threads, *form_of(x))


class ParameterViews:
    """Views of the flat buffer in the shapes of the parameters."""

    def __init__(self, out: Tensor, anatomy: Anatomy) -> None:
        self.out, self.anatomy, self.parts = out, anatomy, views_of(out, anatomy)


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
