"""How batches of a network are filled up so that a record's numbers do not depend on its place; see `places`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.trees import form_of, map_tensors, numbers_of, rows_of, tensors_in
from confide.mechanism.clipping.anatomy import Anatomy, Examined
from confide.mechanism.clipping.backward import propagate
from confide.mechanism.clipping.isolation import NotIsolable
from confide.mechanism.clipping.made_up import MadeUpBatch, MakeBatch, kept_generators
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.once import ProductsOnce
from confide.mechanism.clipping.places import (
    SMALL,
    Even,
    brief,
    even_places,
    is_huge,
    pool_of,
    products_alike,
    threads_of,
)
from confide.mechanism.clipping.proven import is_proven, is_proven_loss
from confide.mechanism.clipping.running import Loss, Pass, isolated_pass, proven_pass
from confide.mechanism.clipping.workspace import Workspace

BYTES = 8  # of one number, at most
BUDGET = 64 << 20  # bytes of workspace, of which a pass that is looked at needs little
WORTH_IT = 1 << 24
"""Weights of a network of which equal products are made once; so are those of one whose records are huge. Of others
products take less time than to look whether they are equal."""
_KNOWN: dict[Any, Even] = {}
"""Of proven modules and losses: what runs is known by their words and shapes."""


def even_batches(module: nn.Module, anatomy: Anatomy, loss: Loss, examined: Examined, batch: MakeBatch) -> Even:
    """Found on made-up records, which `batch` makes; whatever they raise is no error of the module."""
    if examined.way == "one by one":
        return Even()  # every record is alone, and at the same place
    few = batch(1, False)
    held = examined.record_bytes + anatomy.copied_bytes + BYTES * numbers_of((few.x, few.y))
    pool = batch(pool_of(held), False)
    key = _words(module, anatomy, loss, pool) if is_proven(module, pool.x) and is_proven_loss(loss, pool.y) else None
    if key is not None and key in _KNOWN:
        return _KNOWN[key]
    looked = Looked(
        module, anatomy, loss, replace(examined, record_bytes=held), pool, torch.get_rng_state(), key is not None
    )
    try:
        with muted() if examined.quiet else nullcontext():
            try:
                found = looked.even()
            except _DrawsMasks:
                with _without_masks(module):
                    found = replace(looked, masked=False).even()
    except Exception:  # made-up records that it does not like
        found = Even(alike=False)
    if key is not None:
        _KNOWN[key] = found
    return found


class _DrawsMasks(Exception):  # noqa: N818 - a way to turn, not an error that anybody sees
    """The network draws something, such as a mask for every record."""


@dataclass(frozen=True)
class Looked:
    """A network whose numbers are looked at, with made-up records and a state of chance."""

    module: nn.Module
    anatomy: Anatomy
    loss: Loss
    examined: Examined
    pool: MadeUpBatch
    chance: Tensor
    proven: bool = True
    once: ProductsOnce | None = None
    masked: bool = True

    def even(self) -> Even:
        held = self.examined.record_bytes
        if self.once is None and (self.anatomy.size > WORTH_IT or is_huge(held)):
            with suppress(NotIsolable):  # an operation that nobody can look into
                found = replace(self, once=ProductsOnce(list(self.module.parameters()))).even()
                if found.alike:
                    return found
        small = max(self.anatomy.size, held) <= SMALL
        opaque = small and not self.proven  # what user's code does between layers is not seen
        found = even_places(self.numbers, held, small, opaque)
        if not found.alike or found.single or torch.get_num_threads() == 1 or self._products_alike(found.rows):
            return found
        if not small:
            return Even(alike=False)
        with threads_of(Even(single=True)):
            return replace(even_places(self.numbers, held, small, opaque), single=True)

    def _products_alike(self, rows: int) -> bool:
        """Of the sizes of its weights, forwards and backwards."""
        shapes = {(*one.shape, one.dtype) for one in self.module.parameters() if one.ndim == 2 and one.numel()}
        return all(
            products_alike(inputs, outputs, dtype, rows) and products_alike(outputs, inputs, dtype, rows)
            for outputs, inputs, dtype in shapes
        )

    def drew(self) -> bool:
        """Whether the last pass drew something."""
        return not torch.equal(torch.get_rng_state(), self.chance)

    def numbers(self, index: Tensor) -> list[Tensor]:
        """What the sum rests on: what layers are given, and the gradients of their outputs; the records first, and
        those that hold much by a code. As in a step, a gradient is let go before autograd goes on."""
        x, y = rows_of((self.pool.x, self.pool.y), index)
        torch.set_rng_state(self.chance)
        with kept_generators(self.module):
            chain = self.examined.chain
            if chain is not None and chain.fits(x):
                space = Workspace()
                space.begin(BUDGET)
                with torch.no_grad():
                    products = chain.contributions(self.loss, x, y, space, len(index))
                return [brief(side.clone()) for _, one in products for side in (one.left, one.right)]
            one_pass = proven_pass if self.examined.way == "proven" else isolated_pass
            with self.once.passing(index) if self.once else nullcontext():
                run = one_pass(self.module, self.anatomy, self.loss, x, y)
                if self.masked and self.drew():
                    raise _DrawsMasks
                return _seen(run, len(index))


def _seen(run: Pass, records: int) -> list[Tensor]:
    seen, entries, found = [run.losses.detach()], list(run.entries), dict[int, list[Tensor]]()
    for entry in entries:
        tree = entry.inputs if entry.axes is not None or not entry.rows else _records_first(run.tape, entry.inputs)
        seen += [brief(tensor) for tensor in tensors_in(tree) if tensor.dim() and len(tensor) == records]
        entry.inputs = ()
    if not run.losses.requires_grad:
        return seen

    def take(number: int, gradients: Sequence[Tensor | None]) -> None:
        arranged = [run.tape.arranged(entries[number], at, one) for at, one in enumerate(gradients) if one is not None]
        found[number] = [brief(one) for one in arranged]

    at_copies = propagate(run.losses, [entry.edges for entry in entries], run.copies, take)
    return [*seen, *(one for number in sorted(found) for one in found[number]), *map(brief, at_copies.values())]


def _records_first(tape: Any, inputs: Any) -> Any:
    return map_tensors(tape.records_first, inputs)


def _words(module: nn.Module, anatomy: Anatomy, loss: Loss, pool: MadeUpBatch) -> tuple[Any, ...]:
    """All that decides which operations run, and on what shapes."""
    parameters = [(tuple(one.shape), one.dtype, one.requires_grad) for one in module.parameters()]
    said = repr(module), repr(getattr(loss, "__self__", loss)), getattr(loss, "__func__", None), module.training
    return (*said, tuple(parameters), form_of((pool.x, pool.y)), torch.get_num_threads(), anatomy.draws)


@contextmanager
def _without_masks(module: nn.Module) -> Iterator[None]:
    """As it predicts: masks of dropout follow the place of a record, and nobody can foretell them (`answers`)."""
    training = [layer for layer in module.modules() if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True
