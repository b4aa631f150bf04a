"""Running a module on a batch, one loss per record out, with every layer call on the tape.

`proven_pass` runs the batch as it is; `isolated_pass` runs it so that no record can see another. A loss that is not
proven always runs isolated. Several weight draws are rows: all of them belong to the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from confide.data.trees import Tree, called, map_tensors, size_of
from confide.devices import HOST
from confide.errors import Refusal
from confide.layers.bayesian import observed
from confide.mechanism.clipping.anatomy import Anatomy
from confide.mechanism.clipping.attributes import Attributes
from confide.mechanism.clipping.isolation import NotIsolable, Region
from confide.mechanism.clipping.losses import check_losses
from confide.mechanism.clipping.own_functions import allow_own_functions
from confide.mechanism.clipping.proven import is_proven_loss
from confide.mechanism.clipping.tape import Tape, TapedCall, check_unchanged

allow_own_functions()
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Inputs: TypeAlias = Tree
records_of = size_of


def folded(tree: Any, draws: int) -> Any:
    """Repeat every tensor for each weight draw: (draws x records, ...), the draws running slower."""
    return tree if draws == 1 else map_tensors(lambda tensor: torch.cat([tensor] * draws), tree)


def laid_out(anatomy: Anatomy, x: Inputs) -> Inputs:
    """Images of a network that takes maxima of them, with their channels side by side: of planes that lie apart, torch
    takes them one by one on the host, which lasts longer than all convolutions. The layers that see it are torch's."""
    if not anatomy.pooled or anatomy.bayesian or not isinstance(x, Tensor) or x.dim() != 4:
        return x
    if x.device != HOST or x.dtype != torch.float32 or x.requires_grad:
        return x
    channels, height, width = x.shape[1:]
    strides = (channels * height * width, 1, width * channels, channels)  # said of a single channel too
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def per_record_losses(module: nn.Module, loss: Loss, x: Inputs, y: Any, draws: int) -> Tensor:
    """The batch as it is: one loss per record, averaged over the weight draws before any gradient is taken."""
    return _losses_of(loss, called(module, folded(x, draws)), y, draws, records_of(x))


def _losses_of(loss: Loss, output: Any, y: Any, draws: int, records: int) -> Tensor:
    losses = loss(output, folded(y, draws))
    check_losses(losses, draws * records)
    return losses if draws == 1 else losses.view(draws, -1).mean(0)


def isolated_losses(loss: Loss, output: Tensor, y: Any, draws: int) -> Tensor:
    """One loss per record from outputs (draws x records, ...); the loss sees one record at a time."""
    records = output.shape[0] // draws
    if draws > 1:
        output = output.reshape(draws, records, *output.shape[1:]).transpose(0, 1)
    region = Region(records, draws)
    with region.entered():
        seen = region.wrap(output.unsqueeze(1) if draws == 1 else output)
        return _one_value(region, loss(seen, region.one_each(y)))


def _one_value(region: Region, losses: Any) -> Tensor:
    """The value of each record, out of the region."""
    if not isinstance(losses, Tensor) or losses.numel() != region.rows:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise Refusal(f"loss: returned {got} for one record; one value per record is needed (reduction='none')")
    stacked = region.stacked(losses).reshape(region.records, region.rows)
    return stacked[:, 0] if region.rows == 1 else stacked.mean(1)


@dataclass
class Pass:
    """A recorded forward pass; `copies` are the parameters, by number, of which every record had its own."""

    tape: Tape
    losses: Tensor
    copies: dict[int, Tensor] = field(default_factory=dict)

    @property
    def entries(self) -> list[TapedCall]:
        return self.tape.entries

    def unseen(self) -> frozenset[int]:
        """Parameters that the losses depend on in a way that no recorded call accounts for."""
        known = {id(parameter): index for index, parameter in enumerate(self.tape.anatomy.parameters)}
        jumps: dict[Any, list[Any]] = {}
        for entry in self.entries:
            for edge in entry.edges:
                if edge is not None:  # two calls may have one output
                    jumps.setdefault(edge.node, []).extend(entry.nodes)
            jumps.update(entry.passed)
        return frozenset(index for node in leaves(self.losses, jumps) if (index := known.get(id(node), -1)) >= 0)


def leaves(losses: Tensor, jumps: dict[Any, list[Any]]) -> list[Tensor]:
    """The leaf tensors of the graph, walked from the losses; at a recorded output the walk goes on at its inputs."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in jumps:
            waiting += jumps[node]
        elif (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        else:
            waiting += [inner for inner, _ in node.next_functions]
    return found


@contextmanager
def _noticed(anatomy: Anatomy, leaves: bool) -> Iterator[None]:
    with torch.enable_grad(), observed(leaves) if anatomy.bayesian else nullcontext():
        yield


def proven_pass(module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any, leaves: bool = True) -> Pass:
    """The whole batch at once; with `leaves` autograd ends at drawn weights."""
    tape, x = Tape(anatomy, records_of(x)), laid_out(anatomy, x)
    with _noticed(anatomy, leaves):
        with tape.listening():
            output = called(module, folded(x, anatomy.draws))
            output = output.contiguous() if anatomy.pooled else output  # how it lies is nothing that a loss should see
            if is_proven_loss(loss, y):
                losses = _losses_of(loss, output, y, anatomy.draws, records_of(x))
        if not is_proven_loss(loss, y):
            losses = isolated_losses(loss, output, y, anatomy.draws)
    return Pass(tape, losses)


def isolated_pass(module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any) -> Pass:
    """All records at once, none of which can see another; attributes are as before when it ends."""
    records = records_of(x)
    copies = {index: _copy(anatomy.parameters[index], records) for slot in anatomy.copied for index in slot.parameters}
    region, attributes = Region(records, anatomy.draws), Attributes(module)
    tape, before = Tape(anatomy, records, region), _versions(module)
    try:
        with _noticed(anatomy, False), region.entered():
            given = region.one_each(x)
            targets = region.one_each(y)
            with tape.listening(), _with_copies(module, anatomy, region, copies):
                losses = _one_value(region, loss(called(module, given), targets))
    finally:
        attributes.restore()
    if _versions(module) != before:
        raise NotIsolable("writes to a parameter or a buffer")
    for entry in tape.entries:
        check_unchanged(entry)
    return Pass(tape, losses, copies)


def _versions(module: nn.Module) -> list[int]:
    """How often every parameter and buffer was written to."""
    return [value._version for value in (*module.parameters(), *module.buffers()) if not value.is_inference()]


def _copy(parameter: Tensor, records: int) -> Tensor:
    return parameter.detach().expand(records, *parameter.shape).requires_grad_()


def _with_copies(module: nn.Module, anatomy: Anatomy, region: Region, copies: dict[int, Tensor]) -> Any:
    """The module with one copy of these parameters for each record, under all their names."""
    if not copies:
        return nullcontext()
    numbers = {id(parameter): index for index, parameter in enumerate(anatomy.parameters)}
    wrapped = {index: region.wrap(copy) for index, copy in copies.items()}
    named = {
        name: wrapped[numbers[id(parameter)]]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if numbers.get(id(parameter)) in wrapped
    }
    return _reparametrize_module(module, named, tie_weights=False)
