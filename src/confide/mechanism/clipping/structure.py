"""The first-step examination of a module, on made-up records.

Book-keeping trusts three things that a module can break: that every use of a parameter is seen, that records sit
where they are thought to sit, and that no record touches another. All three are structural, so they are examined
once per module and input shape on made-up records of the same shape and type. No error and no decision depends
on a private record (only where no made-up batch runs through the module are a few real records used instead).

    layouts      batches of 3 and of 4 records: the axis that grows carries the records
    separation   the gradient of one record's loss must vanish at the rows of all others, and changing one
                 record must leave the losses of the others alone
    coverage     the unclipped sum must equal ordinary autograd; parameters for which it does not, because they are
                 used outside their layer, go to the fallback, which runs the whole module for them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from confide.mechanism.clipping.calls import clusters_of, contributions_of
from confide.mechanism.clipping.factors import PRECISION
from confide.mechanism.clipping.layout import CallLayout, Layout, map_tensors, tensors_in
from confide.mechanism.clipping.plan import Plan, build_plan
from confide.mechanism.clipping.rules.refusals import UnclippableError
from confide.mechanism.clipping.running import Inputs, Loss, Pass, per_record_losses, recorded_pass, records_of
from confide.mechanism.clipping.tape import Entry
from confide.mechanism.clipping.workspace import Workspace

FEW, MORE = 3, 4
BUDGET = 64 << 20


class Batch(NamedTuple):
    """Inputs and targets."""

    x: Any
    y: Any


# how many records, and whether the first of them is to be another one than usual
MakeBatch: TypeAlias = Callable[[int, bool], Batch]
MIXES = "records are mixed; every record must pass through the module on its own (use GroupNorm for BatchNorm)"


def examine(module: nn.Module, plan: Plan, loss: Loss, x: Inputs, y: Any) -> tuple[Plan, list[CallLayout]]:
    """The plan, with parameters moved to the fallback where needed, and the layout of every call for this shape."""
    with undisturbed(module):
        batch = _choose_batch(module, plan, loss, x, y)
        _check_losses(module, plan, loss, batch)
        layouts, missed = _examine_once(module, plan, loss, batch)
        if missed:
            plan = build_plan(module, plan.escaped | missed)
            layouts, missed = _examine_once(module, plan, loss, batch)
        if missed:
            names = [name for name, value in module.named_parameters() if _index(plan, value) in missed]
            raise UnclippableError(
                f"{', '.join(names)}: the gradients of single records cannot be found, because a layer that uses them "
                "draws random numbers or changes its state in a way that cannot be repeated"
            )
    return plan, layouts


def _index(plan: Plan, value: Tensor) -> int:
    return next((index for index, parameter in enumerate(plan.parameters) if parameter is value), -1)


def _examine_once(
    module: nn.Module, plan: Plan, loss: Loss, batch: MakeBatch
) -> tuple[list[CallLayout], frozenset[int]]:
    """Layouts of all calls and the parameters whose gradients they do not account for."""
    few, more = batch(FEW, False), batch(MORE, False)
    with recorded_pass(module, plan, loss, more.x, more.y, leaves=False) as larger:
        pass
    with recorded_pass(module, plan, loss, few.x, few.y, leaves=False) as run:
        if not run.entries or not run.losses.requires_grad:
            return [], frozenset()
        guessed = _layouts(run, larger)
        lost = frozenset(
            index
            for entry, layout in zip(run.entries, guessed, strict=True)
            if not any(layout.outputs)  # one output for all records, such as an embedding of positions
            for index in entry.slot.parameters
        )
        if lost:
            return guessed, lost
        layouts = _separated(run, guessed, plan)
        return layouts, _missed(run, plan, layouts)


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


def _separated(run: Pass, layouts: list[CallLayout], plan: Plan) -> list[CallLayout]:
    """Layouts in which the gradient of the first and of the last record stays in its own rows."""
    probes = []
    for record in (0, FEW - 1):
        weights = torch.zeros_like(run.losses)
        weights[record] = 1
        probes.append((record, run.gradients(weights, keep=True)))
    result = []
    for position, (entry, layout) in enumerate(zip(run.entries, layouts, strict=True)):
        seen = [(record, gradients[position]) for record, gradients in probes]
        orders = (plan.draws > 1, plan.draws == 1)  # draws are stacked outside the records, all else inside
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


def _check_losses(module: nn.Module, plan: Plan, loss: Loss, batch: MakeBatch) -> None:
    """Changing the first record must not change the losses of the others."""
    state = torch.get_rng_state()

    def losses(other: bool) -> Tensor:
        torch.set_rng_state(state)
        few = batch(FEW, other)
        with torch.no_grad(), kept_generators(module):
            return per_record_losses(module, loss, few.x, few.y, plan.draws)

    before, again, after = losses(False), losses(False), losses(True)
    rounding = 64 * PRECISION[before.dtype].eps
    if not torch.allclose(before, again, rtol=rounding, atol=rounding, equal_nan=True):
        return  # noise from elsewhere than torch: only the gradients can tell
    if not torch.allclose(before[1:], after[1:], rtol=rounding, atol=rounding, equal_nan=True):
        raise UnclippableError(f"module: {MIXES}")


# coverage -------------------------------------------------------------------------------------------------------


def _missed(run: Pass, plan: Plan, layouts: list[CallLayout]) -> frozenset[int]:
    """Parameters whose unclipped sum is not the ordinary gradient."""
    expected = torch.autograd.grad(run.losses.sum(), plan.parameters, retain_graph=True, allow_unused=True)
    gradients = run.gradients()
    views = [torch.zeros_like(parameter) for parameter in plan.parameters]
    with torch.no_grad():
        space = Workspace()
        space.begin(BUDGET)
        found = contributions_of(run.tape, gradients, layouts, FEW, space)
        for cluster in clusters_of(found, plan, space):
            cluster.squared_norms()  # decides how the sum is formed, so that the same way is examined
            cluster.add_weighted(torch.ones_like(run.losses), views)
        wanted = [
            torch.zeros_like(view) if value is None else value.to_dense()
            for value, view in zip(expected, views, strict=True)
        ]
        scale = torch.stack([value.norm() for value in wanted]).norm()
        missed = [
            index
            for index, (view, value) in enumerate(zip(views, wanted, strict=True))
            if not (view - value).norm() <= _tolerance(value.dtype) * (value.norm() + 1e-2 * scale)
        ]
    return frozenset(missed)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-8 if dtype == torch.float64 else 1e-3


# made-up records ------------------------------------------------------------------------------------------------


def _choose_batch(module: nn.Module, plan: Plan, loss: Loss, x: Inputs, y: Any) -> MakeBatch:
    """The first kind of made-up batch on which the module runs and its losses are finite."""
    lookups = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    rows = min((layer.num_embeddings for layer in lookups), default=1)
    kinds = [("normal", rows, False), ("uniform", 1, False), ("uniform", 1, True)]
    failure: Exception | None = None
    for kind in kinds:

        def batch(records: int, other: bool, kind: tuple[str, int, bool] = kind) -> Batch:
            targets = ("uniform", 1, kind[2])
            return Batch(made_up(x, records, other, *kind), made_up(y, records, other, *targets))

        try:
            few = batch(FEW, False)
            with torch.no_grad():
                losses = per_record_losses(module, loss, few.x, few.y, plan.draws)
        except Exception as error:  # whatever the module does not like about made-up records
            failure = failure or error
            continue
        if torch.isfinite(losses).all():
            return batch
    return _real_batch(x, y, failure)


def made_up(tree: Any, records: int, other: bool, floats: str, integers: int, truth: bool) -> Any:
    """Tensors of the shape and type of the batch's, with other numbers and `records` rows; the first may be another."""
    generator = torch.Generator().manual_seed(records)

    def make(tensor: Tensor) -> Tensor:
        shape = (records, *tensor.shape[1:])
        if tensor.dtype == torch.bool:
            return torch.full(shape, truth, device=tensor.device)
        if not tensor.is_floating_point():
            return torch.randint(0, integers, shape, generator=generator).to(tensor)
        draw = torch.randn if floats == "normal" else torch.rand
        return draw(shape, generator=generator, dtype=torch.float64).to(tensor)

    batch = map_tensors(make, tree)
    if other:
        map_tensors(lambda tensor, fresh: tensor[0].copy_(fresh[0]), batch, tensors_in(map_tensors(make, tree)))
    return batch


def _real_batch(x: Inputs, y: Any, failure: Exception | None) -> MakeBatch:
    """A few records of the batch, repeated as often as needed."""
    if records_of(x) == 0:
        raise failure or UnclippableError("loss: not finite on made-up records, and there is no real one to examine")

    def batch(records: int, other: bool) -> Batch:
        chosen = torch.arange(records) % records_of(x)
        chosen[0] = 1 % records_of(x) if other else 0
        return Batch(*(map_tensors(lambda tensor: tensor[chosen], tree) for tree in (x, y)))

    return batch


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Leave buffers and random states as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[]), kept_generators(module):
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def kept_generators(module: nn.Module) -> Iterator[None]:
    """Put back the state of generators that layers own."""
    owned = [
        value for layer in module.modules() for value in vars(layer).values() if isinstance(value, torch.Generator)
    ]
    states = [generator.get_state() for generator in owned]
    try:
        yield
    finally:
        for generator, state in zip(owned, states, strict=True):
            generator.set_state(state)
