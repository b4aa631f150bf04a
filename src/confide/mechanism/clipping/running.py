"""Running a module on a batch: several weight draws folded into the batch, one loss per record out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from confide.layers.bayesian import observed
from confide.mechanism.clipping.anatomy import Anatomy
from confide.mechanism.clipping.layout import map_tensors
from confide.mechanism.clipping.losses import check_losses
from confide.mechanism.clipping.rules.randomness import Keeping, KeptRandomness
from confide.mechanism.clipping.tape import Entry, Tape, check_unchanged

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Inputs: TypeAlias = Tensor | tuple[Tensor, ...]


def folded(tree: Any, draws: int) -> Any:
    """Repeat every tensor for each weight draw: (draws x records, ...), the draws running slower."""
    return tree if draws == 1 else map_tensors(lambda tensor: torch.cat([tensor] * draws), tree)


def per_record_losses(
    module: nn.Module, loss: Loss, x: Inputs, y: Any, draws: int, copies: dict[str, Tensor] | None = None
) -> Tensor:
    """One loss per record, averaged over the weight draws before any gradient is taken.

    `copies` are used in place of the parameters of those names.
    """
    inputs, targets = folded(x, draws), folded(y, draws)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    output = functional_call(module, copies, given) if copies else module(*given)
    losses = loss(output, targets)
    check_losses(losses, records_of(inputs))
    return losses if draws == 1 else losses.view(draws, -1).mean(0)


def records_of(x: Inputs) -> int:
    return (x[0] if isinstance(x, tuple) else x).shape[0]


@dataclass
class Pass:
    """A recorded forward pass."""

    tape: Tape
    losses: Tensor

    @property
    def entries(self) -> list[Entry]:
        return self.tape.entries

    def gradients(self, weights: Tensor | None = None, keep: bool = False) -> list[list[Tensor | None]]:
        """The gradient of the (weighted) sum of losses at every recorded output: one backward, no weight gradients."""
        edges = [edge for entry in self.entries for edge in entry.edges if edge is not None]
        start = torch.ones_like(self.losses) if weights is None else weights
        found = iter(torch.autograd.grad(self.losses, edges, start, retain_graph=keep, allow_unused=True))
        return [[None if edge is None else next(found) for edge in entry.edges] for entry in self.entries]


@contextmanager
def recorded_pass(
    module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any, leaves: bool = True
) -> Iterator[Pass]:
    """Run the module with the tape on; layers keep their explicit forwards until the block ends."""
    tape = Tape(anatomy)
    with tape.explicit_forwards() if anatomy.explicit else nullcontext():
        yield record(tape, module, loss, x, y, leaves)


def record(tape: Tape, module: nn.Module, loss: Loss, x: Inputs, y: Any, leaves: bool = True) -> Pass:
    """Run the module once, with all calls on the tape."""
    anatomy = tape.anatomy
    with torch.enable_grad(), observed(leaves) if anatomy.bayesian else nullcontext():
        tape.start(anatomy.draws * records_of(x))
        try:
            copies = tape.copies(leaves) if anatomy.copied else None
            if anatomy.replays:
                tape.random = KeptRandomness()
                with Keeping(tape.random):
                    losses = per_record_losses(module, loss, x, y, anatomy.draws, copies)
            else:
                losses = per_record_losses(module, loss, x, y, anatomy.draws, copies)
        finally:
            tape.stop()
    for entry in tape.entries:
        check_unchanged(entry)
    return Pass(tape, losses)
