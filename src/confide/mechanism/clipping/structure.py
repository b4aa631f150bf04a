"""The first-step examination of a module, on made-up records: which way its batches take.

Nothing here is the reason why records cannot touch each other; that is `proven`, `isolation` and `one_by_one`. The
examination finds out what is exact and fast, on made-up records of the same shape and type, so that no error and no
decision depends on a private record: a module through which no made-up batch runs is refused.

    meaning      a module that gives a record another loss when its neighbours change is refused: run on batches of one
                 it would be another module than the one that was written (batch normalisation, softmax over records)
    coverage     the unclipped sum must equal ordinary autograd; parameters for which it does not are given to every
                 record as a copy of its own
    way          what cannot run on all records at once takes them one by one
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from confide._native.digest import digest
from confide.data.trees import rows_of, tensors_in
from confide.errors import SpeedWarning, UnclippableError
from confide.mechanism.clipping import apart, one_by_one
from confide.mechanism.clipping.anatomy import Anatomy, Examined, anatomy_of
from confide.mechanism.clipping.backward import propagate
from confide.mechanism.clipping.calls import Found
from confide.mechanism.clipping.chain import LayerChain, chain_of
from confide.mechanism.clipping.collection import no_collection
from confide.mechanism.clipping.coverage import Coverage, kind_of
from confide.mechanism.clipping.even_networks import even_batches
from confide.mechanism.clipping.isolation import NotIsolable
from confide.mechanism.clipping.made_up import FEW, Chosen, MadeUpBatch, choose_batch, undisturbed
from confide.mechanism.clipping.made_up import kept_generators as kept_generators
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.places import unheard
from confide.mechanism.clipping.proven import hooked_backwards, is_proven, is_proven_loss
from confide.mechanism.clipping.randomness import drawn_elsewhere
from confide.mechanism.clipping.running import (
    Inputs,
    Loss,
    Pass,
    isolated_pass,
    per_record_losses,
    proven_pass,
    records_of,
)
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.traces import may_leave_traces
from confide.mechanism.clipping.workspace import Workspace, give_back

WORTH_IT = 1 << 20  # Weights of a network whose examination leaves gaps that are felt.
LARGE, FEWEST = 1 << 24, 2  # Weights of a network whose gradients are looked at with fewer records, and how many.
BUDGET = 64 << 20  # Bytes for an examination, which holds a few made-up records only.
MIXES = "records are mixed; every record must pass through the module on its own (use GroupNorm for BatchNorm)"


@dataclass(frozen=True)
class Question:
    """A module with a loss, made-up batches for them, and what they could write to outside of the module."""

    module: nn.Module
    loss: Loss
    chosen: Chosen
    outside: Reachable
    most: int = FEW
    alone: list[Tensor] = field(default_factory=list)  # the losses of the few, each of which saw no other

    def batch(self, records: int, other: bool) -> MadeUpBatch:
        return self.chosen.batch(records, other)

    @property
    def few(self) -> MadeUpBatch:
        few = self.batch(FEW, False)
        return few if self.most >= FEW else MadeUpBatch(*rows_of((few.x, few.y), slice(self.most)))


def examine(module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any) -> tuple[Anatomy, Examined]:
    """The anatomy, with parameters copied where needed, and the way for batches of this shape; in a context of its
    own."""
    unheard()
    proven = is_proven(module, x), is_proven_loss(loss, y)
    parameters = list(module.parameters())
    of_module = frozenset(map(id, (*parameters, *module.buffers())))
    with no_collection():
        outside = Reachable(*(() if proven[0] else (module,)), *(() if proven[1] else (loss,)), left_alone=of_module)
        before = _checksums(parameters)
        try:
            with drawn_elsewhere() as drawn:
                anatomy, examined = _examined(module, anatomy, loss, x, y, proven, outside)
            traces = examined.way != "one by one" and not all(proven) and may_leave_traces(outside)
            return anatomy, replace(examined, traces=traces, proven=proven, chance=(*outside.chance, *drawn))
        finally:
            _tidy(anatomy)
            if _checksums(parameters) != before:
                raise UnclippableError("module: its forward writes to its parameters; write to a buffer or to a copy")


def _tidy(anatomy: Anatomy) -> None:
    if anatomy.size > WORTH_IT:
        give_back()


def _examined(
    module: nn.Module,
    anatomy: Anatomy,
    loss: Loss,
    x: Inputs,
    y: Any,
    proven: tuple[bool, bool],
    outside: Reachable,
) -> tuple[Anatomy, Examined]:
    outside.check()
    if outside.lasting:
        return _lasting(module, anatomy, loss, x, y, outside)
    with undisturbed(module):
        try:
            most = FEWEST if anatomy.size > LARGE else FEW
            asked = Question(module, loss, choose_batch(module, anatomy, loss, x, y, most), outside, most)
            if not all(proven):
                if anatomy.size <= LARGE:
                    _check_meaning(asked, anatomy)
                outside.restore()
            examined = _proven(asked, anatomy) if proven[0] and not outside.makes_tensors else None
            if examined is None:
                anatomy, examined = _isolated(asked, anatomy)
            if not all(proven) and anatomy.size > LARGE and not _means_the_same(asked):
                _check_meaning(asked, anatomy)
                outside.restore()
            _tidy(anatomy)
            return anatomy, replace(examined, even=even_batches(module, anatomy, loss, examined, asked.batch))
        finally:
            outside.restore()


def _proven(asked: Question, anatomy: Anatomy) -> Examined | None:
    """The whole batch at once, where all parameters are accounted for."""
    few = asked.few
    if anatomy.copied:
        return None
    try:
        run = proven_pass(asked.module, anatomy, asked.loss, few.x, few.y, leaves=False)
    except Exception:  # the loss cannot run on all records at once; an error of its own comes up again
        asked.outside.restore()
        return None
    if asked.outside.restore():  # the loss keeps something
        return None
    if not is_proven_loss(asked.loss, few.y) and run.unseen():
        return None
    held = _record_bytes(run)
    if _missed(run, anatomy):
        return None
    return Examined("proven", _chain(asked, anatomy), held)


def _isolated(asked: Question, anatomy: Anatomy) -> tuple[Anatomy, Examined]:
    """All records at once, none of which can see another; or one by one."""
    if any(hooked_backwards(layer) for layer in asked.module.modules()):
        return _one_by_one(asked, anatomy, "it has hooks on gradients")
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in asked.module.modules()):
        return _one_by_one(asked, anatomy, "it is scripted or traced")
    if asked.outside.makes_tensors:
        return _one_by_one(asked, anatomy, "it calls torch.Tensor, whose numbers nobody has written")
    before = _checksums((*asked.module.parameters(), *asked.module.buffers()))
    try:
        anatomy, examined = _covered(asked, anatomy)
        why = examined.why
        if asked.outside.restore():  # perhaps nothing but what it says, to somebody who keeps it
            with muted():
                anatomy, examined = _covered(asked, anatomy)
            examined = replace(examined, quiet=True)
            why = "it writes to a global, a closure or a class" if asked.outside.restore() else examined.why
        if _checksums((*asked.module.parameters(), *asked.module.buffers())) != before:
            why = "it writes to a parameter or a buffer"
    except Exception as error:  # whatever vmap cannot do; an error of the module itself comes up again
        asked.outside.restore()
        why = _reason(asked.module, error)
    return _one_by_one(asked, anatomy, why) if why else (anatomy, examined)


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Of what they hold, also for what is written behind autograd's back (`.data`)."""
    return [digest(value) for value in tensors if value.layout == torch.strided and value.device.type != "meta"]


def _covered(asked: Question, anatomy: Anatomy) -> tuple[Anatomy, Examined]:
    """The anatomy that accounts for all gradients of an isolated pass, with copies where they are needed."""
    few = asked.few
    while True:
        run = isolated_pass(asked.module, anatomy, asked.loss, few.x, few.y)
        asked.alone[:] = [run.losses.detach()]
        held = _record_bytes(run)
        missed = run.unseen() or _missed(run, anatomy)
        if missed <= anatomy.escaped:
            why = "its gradients differ from run to run" if missed else ""
            return anatomy, Examined("isolated", None, held, why)
        examined = anatomy.examined
        anatomy = anatomy_of(asked.module, anatomy.escaped | missed)
        anatomy.examined.update(examined)


def _lasting(
    module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any, outside: Reachable
) -> tuple[Anatomy, Examined]:
    """What keeps something that nobody can put back is examined in a process of its own too."""

    def rehearse() -> None:
        with undisturbed(module):
            asked = Question(module, loss, choose_batch(module, anatomy, loss, x, y), outside)
            _check_meaning(asked, anatomy)
            _rehearse(asked, anatomy)

    apart.rehearsed(rehearse)
    return anatomy, _slow(module, loss, f"it reaches {outside.lasting}, which nobody can put back")


def _one_by_one(asked: Question, anatomy: Anatomy, why: str) -> tuple[Anatomy, Examined]:
    _rehearse(asked, anatomy)
    return anatomy, _slow(asked.module, asked.loss, why)


def _rehearse(asked: Question, anatomy: Anatomy) -> None:
    few = asked.few
    one_by_one.gradients(asked.module, anatomy.parameters, asked.loss, few.x, few.y, anatomy.draws, strict=True)


def _slow(module: nn.Module, loss: Loss, why: str) -> Examined:
    """One by one, and said so."""
    because = one_by_one.why_apart(module, loss)
    where = f", each in a process of its own since it {because}" if because else ""
    warnings.warn(
        f"{type(module).__name__}: its records run one by one{where}, which is slow, because {why}; "
        "keep to torch operations that give tensors of the same shape for every record (torch.where, masks)",
        SpeedWarning,
        stacklevel=2,
    )
    return Examined("one by one", None, 0, why, apart=because)


def _reason(module: nn.Module, error: Exception) -> str:
    """Which layer, and what it does."""
    layers = {id(layer): name for name, layer in module.named_modules()}
    where = type(module).__name__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = layers.get(id(frame.f_locals.get("self")))
        if name:
            where = f"{name} ({type(frame.f_locals['self']).__name__})"
    text = str(error).strip().splitlines()
    return f"{where} {text[0]}" if isinstance(error, NotIsolable) else f"in {where}: {text[0] if text else error!r}"


def _record_bytes(run: Pass) -> int:
    """Inputs and output gradients of all calls, for one record."""
    held = sum(sum(entry.sizes) for entry in run.entries)
    for entry in run.entries:
        held += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((entry.inputs, entry.keywords)))
    return held // max(1, run.losses.shape[0])


def _missed(run: Pass, anatomy: Anatomy) -> frozenset[int]:
    """Parameters whose gradients the recorded calls and the copies do not account for; the pass is used up."""
    if not run.losses.requires_grad:
        return frozenset()
    space = Workspace()
    space.begin(BUDGET)
    calls, slots = [entry.edges for entry in run.entries], [entry.slot for entry in run.entries]
    kinds = [kind_of(entry.slot, (entry.inputs, entry.keywords)) for entry in run.entries]
    found = Found(run.tape, space)
    coverage = Coverage(anatomy, slots, space, run.copies, kinds, found.norms)

    def take(number: int, gradients: Sequence[Tensor | None]) -> None:
        found.take(number, gradients)
        coverage.taken(number, found.made[number])
        found.made[number] = []

    with torch.no_grad(), coverage.hearing():
        propagate(run.losses, calls, run.copies | coverage.parameters, take)
    return coverage.missed()


def _chain(asked: Question, anatomy: Anatomy) -> LayerChain | None:
    """The short way for fully connected networks, where it gives the same gradients."""
    chain, few = chain_of(asked.module, anatomy), asked.few
    if chain is None or not chain.fits(few.x):
        return None
    space = Workspace()
    space.begin(BUDGET)
    try:
        with torch.no_grad():
            found = chain.contributions(asked.loss, few.x, few.y, space, records_of(few.x))
    except Exception:  # a loss that wants more of the output than its values
        return None
    run = proven_pass(asked.module, anatomy, asked.loss, few.x, few.y, leaves=False)
    coverage = Coverage(anatomy, [slot for slot, _ in found], space, {})
    for number, member in enumerate(found):
        coverage.taken(number, [member])
    with coverage.hearing():
        torch.autograd.grad(run.losses.sum(), list(coverage.parameters.values()), allow_unused=True)
    return None if coverage.missed() else chain


def _means_the_same(asked: Question) -> bool:
    """Whether records that could not see each other had the losses that they have among others: then none has another
    one for its neighbours' sake, and the module need not run once more."""
    return any(_close(alone, asked.chosen.losses[: len(alone)]) for alone in asked.alone)


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = 64 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other.to(one.dtype), rtol=rounding, atol=rounding, equal_nan=True)


def _check_meaning(asked: Question, anatomy: Anatomy) -> None:
    """Changing the first record must not change the losses of the others."""

    def losses(other: bool) -> Tensor:
        torch.set_rng_state(asked.chosen.chance)
        few = MadeUpBatch(*rows_of(tuple(asked.batch(FEW, other)), slice(asked.most)))
        with torch.no_grad(), kept_generators(asked.module):
            return per_record_losses(asked.module, asked.loss, few.x, few.y, anatomy.draws)

    if _close(asked.chosen.losses[1:], losses(True)[1:]):
        return
    before, again, after = losses(False), losses(False), losses(True)
    if _close(before, again) and not _close(before[1:], after[1:]):  # else noise from elsewhere than torch, or state
        raise UnclippableError(f"module: {MIXES}")
