"""The first-step examination of a module, on made-up records.

Book-keeping trusts three things that a module can break: that every use of a parameter is seen, that records sit
where they are thought to sit, and that no record touches another. All three are structural, so they are examined
once per module and input shape on made-up records of the same shape and type. No error and no decision depends
on a private record: a module through which no made-up batch runs is refused.

    layouts      batches of 3 and of 4 records: the axis that grows carries the records
    separation   the gradient of one record's loss must vanish at the rows of all others, and changing one
                 record must leave the losses of the others alone
    coverage     the unclipped sum must equal ordinary autograd; parameters for which it does not, because they are
                 used outside their layer, go to the fallback, which runs the whole module for them
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from confide.errors import UnclippableError
from confide.mechanism.clipping.anatomy import Anatomy, Choices, Examined, Slot, anatomy_of
from confide.mechanism.clipping.calls import contributions_of
from confide.mechanism.clipping.chain import LayerChain, chain_of
from confide.mechanism.clipping.coverage import missed_parameters
from confide.mechanism.clipping.factors import PRECISION
from confide.mechanism.clipping.layout import CallLayout, Layout, tensors_in
from confide.mechanism.clipping.made_up import FEW, MORE, Batch, MakeBatch, choose_batch, undisturbed
from confide.mechanism.clipping.made_up import kept_generators as kept_generators
from confide.mechanism.clipping.running import Inputs, Loss, Pass, per_record_losses, recorded_pass
from confide.mechanism.clipping.shortcuts import with_shortcuts
from confide.mechanism.clipping.tape import Entry
from confide.mechanism.clipping.workspace import Workspace

BUDGET = 64 << 20
MIXES = "records are mixed; every record must pass through the module on its own (use GroupNorm for BatchNorm)"


def examine(module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any) -> tuple[Anatomy, Examined]:
    """The anatomy, with parameters moved to the fallback where needed, and the layout of every call for this shape."""
    with undisturbed(module):
        batch = choose_batch(module, anatomy, loss, x, y)
        _check_losses(module, anatomy, loss, batch)
        if not anatomy.examined:
            anatomy = _with_shortcuts(module, anatomy, loss, batch)
        examined, missed = _examine_once(module, anatomy, loss, batch)
        while missed - anatomy.choices.escaped:
            anatomy = anatomy_of(module, _escaping(anatomy.choices, missed))
            examined, missed = _examine_once(module, anatomy, loss, batch)
        if missed:
            names = [name for name, value in module.named_parameters() if _index(anatomy, value) in missed]
            raise UnclippableError(
                f"{', '.join(names)}: the gradients of single records cannot be found, because a layer that uses them "
                "draws random numbers or changes its state in a way that cannot be repeated"
            )
    return anatomy, examined


def _with_shortcuts(module: nn.Module, anatomy: Anatomy, loss: Loss, batch: MakeBatch) -> Anatomy:
    plain = _losses(module, anatomy, loss, batch)

    def works(trial: Anatomy, parameters: frozenset[int]) -> bool:
        try:
            same = torch.allclose(_losses(module, trial, loss, batch), plain)
            return same and not parameters & _examine_once(module, trial, loss, batch)[1]
        except Exception:  # a shape that does not fit: this is not the way
            return False

    def silent(trial: Anatomy) -> list[Slot]:
        few, more = batch(FEW, False), batch(MORE, False)
        with recorded_pass(module, trial, loss, more.x, more.y) as larger:
            pass
        with recorded_pass(module, trial, loss, few.x, few.y) as run:
            layouts = _layouts(run, larger)
        found = [entry.slot for entry, layout in zip(run.entries, layouts, strict=True) if not any(layout.outputs)]
        return list({id(slot): slot for slot in found}.values())

    return with_shortcuts(module, anatomy, works, silent)


def _losses(module: nn.Module, anatomy: Anatomy, loss: Loss, batch: MakeBatch) -> Tensor:
    """The losses of a recorded pass, always with the same random numbers."""
    few = batch(FEW, False)
    torch.manual_seed(0)
    with kept_generators(module), recorded_pass(module, anatomy, loss, few.x, few.y) as run:
        return run.losses.detach()


def _index(anatomy: Anatomy, value: Tensor) -> int:
    return next((index for index, parameter in enumerate(anatomy.parameters) if parameter is value), -1)


def _escaping(choices: Choices, missed: frozenset[int]) -> Choices:
    copies = tuple(choice for choice in choices.copies if choice[0] not in missed)
    return Choices(choices.escaped | missed, copies, choices.shared)


def _examine_once(module: nn.Module, anatomy: Anatomy, loss: Loss, batch: MakeBatch) -> tuple[Examined, frozenset[int]]:
    """Layouts of all calls and the parameters whose gradients they do not account for."""
    few, more = batch(FEW, False), batch(MORE, False)
    with recorded_pass(module, anatomy, loss, more.x, more.y, leaves=False) as larger:
        pass
    with recorded_pass(module, anatomy, loss, few.x, few.y, leaves=False) as run:
        if not run.entries or not run.losses.requires_grad:
            return Examined([], []), frozenset()
        layouts = _separated(run, _layouts(run, larger), anatomy)
        del larger
        missed = _missed(run, anatomy, layouts)
        chain = None if missed else _chain(module, anatomy, loss, few, run)
        return Examined([entry.slot for entry in run.entries], layouts, chain, _record_bytes(run)), missed


def _record_bytes(run: Pass) -> int:
    """Inputs and output gradients of all calls, for one record."""
    held = 0
    for entry in run.entries:
        held += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((entry.inputs, entry.keywords)))
        held += sum(shape.numel() for shape in entry.shapes) * run.losses.element_size()
    return held // FEW


def _missed(run: Pass, anatomy: Anatomy, layouts: list[CallLayout]) -> frozenset[int]:
    """Parameters whose gradients the recorded calls do not account for."""
    gradients = [
        given if any(layout.outputs) else [None] * len(given)  # without records in it a call accounts for nothing
        for given, layout in zip(run.gradients(keep=True), layouts, strict=True)
    ]
    space = Workspace()
    space.begin(BUDGET)
    with torch.no_grad():
        found = contributions_of(run.tape, gradients, layouts, FEW, space)
    return missed_parameters(run.losses, anatomy, found, space)


def _chain(module: nn.Module, anatomy: Anatomy, loss: Loss, few: Batch, run: Pass) -> LayerChain | None:
    """The short way for fully connected networks, where it gives the same gradients."""
    chain = chain_of(module, anatomy)
    if chain is None or not chain.fits(few.x, few.x):
        return None
    space = Workspace()
    space.begin(BUDGET)
    try:
        with torch.no_grad():
            found = chain.contributions(loss, few.x, few.y, space)
    except Exception:  # a loss that wants more of the output than its values
        return None
    return None if missed_parameters(run.losses, anatomy, found, space) else chain


# layouts --------------------------------------------------------------------------------------------------------


def _layouts(run: Pass, larger: Pass) -> list[CallLayout]:
    if [entry.slot for entry in run.entries] != [entry.slot for entry in larger.entries]:
        raise UnclippableError("module: the number of layer calls depends on the number of records")
    return [_layout(run, larger, *pair) for pair in zip(run.entries, larger.entries, strict=True)]


def _layout(run: Pass, larger: Pass, few: Entry, more: Entry) -> CallLayout:
    name = type(few.slot.layer).__name__
    given_few, given_more = (tensors_in((entry.inputs, entry.keywords)) for entry in (few, more))
    drawn_few, drawn_more = (one.tape.drawn(entry) for one, entry in ((run, few), (larger, more)))

    def places(first: list[torch.Size], second: list[torch.Size]) -> tuple[Layout | None, ...]:
        if len(first) != len(second):
            raise UnclippableError(f"{name}: its inputs or outputs depend on the number of records")
        return tuple(_place(name, *shapes) for shapes in zip(first, second, strict=True))

    return CallLayout(
        places([tensor.shape for tensor in given_few], [tensor.shape for tensor in given_more]),
        places(few.shapes, more.shapes),
        places([tensor.shape for tensor in drawn_few], [tensor.shape for tensor in drawn_more]),
    )


def _place(name: str, few: torch.Size, more: torch.Size) -> Layout | None:
    """The axis that grew from FEW to MORE records."""
    grown = [axis for axis, sizes in enumerate(zip(few, more, strict=False)) if sizes[0] != sizes[1]]
    if not grown and len(few) == len(more):
        return None
    fold = few[grown[0]] // FEW if grown else 0
    if len(few) != len(more) or len(grown) > 1 or (few[grown[0]], more[grown[0]]) != (fold * FEW, fold * MORE):
        raise UnclippableError(f"{name}: shapes {tuple(few)} and {tuple(more)} for {FEW} and {MORE} records; {MIXES}")
    return Layout(grown[0], fold)


# separation -----------------------------------------------------------------------------------------------------


def _separated(run: Pass, layouts: list[CallLayout], anatomy: Anatomy) -> list[CallLayout]:
    """Layouts in which the gradient of the first and of the last record stays in its own rows."""
    probes = []
    for record in (0, FEW - 1):
        weights = torch.zeros_like(run.losses)
        weights[record] = 1
        probes.append((record, run.gradients(weights, keep=True)))
    result = []
    for position, (entry, layout) in enumerate(zip(run.entries, layouts, strict=True)):
        if not any(layout.outputs):  # one output for all records, such as an embedding of positions
            result.append(layout)
            continue
        seen = [(record, gradients[position]) for record, gradients in probes]
        orders = (anatomy.draws > 1, anatomy.draws == 1)  # draws are stacked outside the records, all else inside
        fitting = [_ordered(layout, order) for order in orders if _stays(_ordered(layout, order), seen)]
        if not fitting:
            raise UnclippableError(f"{type(entry.slot.layer).__name__}: {MIXES}")
        result.append(fitting[0])
    return result


def _ordered(layout: CallLayout, outer: bool) -> CallLayout:
    def order(places: tuple[Layout | None, ...]) -> tuple[Layout | None, ...]:
        return tuple(
            place if place is None or place.fold == 1 else Layout(place.axis, place.fold, outer) for place in places
        )

    return CallLayout(order(layout.inputs), order(layout.outputs), order(layout.draws))


def _stays(layout: CallLayout, seen: list[tuple[int, list[Tensor | None]]]) -> bool:
    for record, gradients in seen:
        for gradient, place in zip(gradients, layout.outputs, strict=True):
            if gradient is None:
                continue
            if place is None:
                return False
            others = [other for other in range(FEW) if other != record]
            if place.rows_first(gradient)[others].any():
                return False
    return True


def _check_losses(module: nn.Module, anatomy: Anatomy, loss: Loss, batch: MakeBatch) -> None:
    """Changing the first record must not change the losses of the others."""
    state = torch.get_rng_state()

    def losses(other: bool) -> Tensor:
        torch.set_rng_state(state)
        few = batch(FEW, other)
        with torch.no_grad(), kept_generators(module):
            return per_record_losses(module, loss, few.x, few.y, anatomy.draws)

    before, again, after = losses(False), losses(False), losses(True)
    rounding = 64 * PRECISION[before.dtype].eps
    if not torch.allclose(before, again, rtol=rounding, atol=rounding, equal_nan=True):
        return  # noise from elsewhere than torch: only the gradients can tell
    if not torch.allclose(before[1:], after[1:], rtol=rounding, atol=rounding, equal_nan=True):
        raise UnclippableError(f"module: {MIXES}")
