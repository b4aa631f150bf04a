"""Made-up records for the examination of a module, and the module as it was afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from confide.data.trees import map_tensors, rows_of, tensors_in
from confide.errors import UnclippableError
from confide.mechanism.clipping.anatomy import Anatomy
from confide.mechanism.clipping.attributes import Attributes
from confide.mechanism.clipping.running import Inputs, Loss, per_record_losses

FEW = 3  # More than one neighbour.
PIECE = 1 << 16  # numbers that are drawn at a time
SMALL = 0.1  # of the usual size of a parameter
_OF_NUMPY = (torch.float32, torch.float64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MadeUpBatch(NamedTuple):
    """Inputs and targets."""

    x: Any
    y: Any


# how many records, and whether the first of them is to be another one than usual
MakeBatch: TypeAlias = Callable[[int, bool], MadeUpBatch]


class Chosen(NamedTuple):
    """Made-up batches on which a module runs; the losses of the first, and the state of chance they began with."""

    batch: MakeBatch
    losses: Tensor
    chance: Tensor


Kind: TypeAlias = tuple[str, tuple[int, int], bool | None]  # of numbers, of whole numbers, and of truths
KINDS = (("normal", 0), ("normal", 1), ("uniform", 0), ("uniform", 1))
"""Where what falls out by chance will not do: a mask may hide all that a record has, or nothing."""
NO_GRAPH = "does not require grad"  # as torch says it


def choose_batch(module: nn.Module, anatomy: Anatomy, loss: Loss, x: Inputs, y: Any, most: int = FEW) -> Chosen:
    """The first kind of made-up batch of which `most` records run through the module, with losses that are finite."""
    lookups = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    rows = min((layer.num_embeddings for layer in lookups), default=2)  # without a table: zeros and ones, as in masks
    kinds: list[Kind] = [("normal", (0, rows), None), *((floats, (low, low + 1), bool(low)) for floats, low in KINDS)]
    failure: Exception | None = None
    for kind in kinds:

        def batch(records: int, other: bool, kind: Kind = kind) -> MadeUpBatch:
            targets = ("uniform", (0, 1), bool(kind[2]))
            return MadeUpBatch(made_up(x, records, other, *kind), made_up(y, records, other, *targets))

        try:
            few, chance = MadeUpBatch(*rows_of(tuple(batch(FEW, False)), slice(most))), torch.get_rng_state()
            with torch.no_grad(), kept_generators(module):
                losses = per_record_losses(module, loss, few.x, few.y, anatomy.draws)
        except Exception as error:  # whatever the module does not like about made-up records
            failure = failure or error
            continue
        if torch.isfinite(losses).all():
            return Chosen(batch, losses, chance)
    # Private records are never tried instead: whether the module likes them would then decide what is raised.
    if isinstance(failure, RuntimeError) and NO_GRAPH in str(failure):
        raise UnclippableError(
            "loss: it or the module asks torch.autograd for a derivative where nothing is recorded (examinations and "
            "predictions record nothing); take torch.func.grad, which works everywhere"
        ) from failure
    raise failure or UnclippableError(
        "loss: not finite on any made-up records, so the module cannot be examined; scale its inputs to about [-1, 1]"
    )


def made_up(tree: Any, records: int, other: bool, floats: str, integers: tuple[int, int], truth: bool | None) -> Any:
    """Tensors of the shape and type of the batch's, with other numbers and `records` rows; the first may be another.

    `truth` None: as it falls.
    """
    generator = torch.Generator().manual_seed(records)

    def make(tensor: Tensor) -> Tensor:
        shape = (records, *tensor.shape[1:])
        if tensor.dtype == torch.bool:
            low, high = (0, 2) if truth is None else (int(truth), int(truth) + 1)
            return torch.randint(low, high, shape, generator=generator).to(tensor)
        if not tensor.is_floating_point():
            return torch.randint(*integers, shape, generator=generator).to(tensor)
        draw = torch.randn if floats == "normal" else torch.rand
        return draw(shape, generator=generator, dtype=torch.float64).to(tensor)

    batch = map_tensors(make, tree)
    if other:
        map_tensors(lambda tensor, fresh: tensor[0].copy_(fresh[0]), batch, tensors_in(map_tensors(make, tree)))
    return batch


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Examine a module with parameters that hide nothing, and leave everything as it was.

    Parameters that start at zero would hide the layers before them: no gradient reaches those yet, and whatever is
    wrong with them would be found out too late. So small and constant ones are moved while the module is examined.
    Only what was moved is kept to be put back: a copy of all parameters would be the most memory a run ever needs.
    """
    attributes = Attributes(module)
    with torch.random.fork_rng(devices=[]), kept_generators(module), ExitStack() as stack:
        torch.manual_seed(0)
        for buffer in module.buffers():
            stack.callback(buffer.data.copy_, buffer.data.clone())
        stack.callback(attributes.restore)
        for parameter in module.parameters():
            stack.callback(_moved(parameter.data))
        yield


def _moved(values: Tensor) -> Callable[[], object]:
    """Add noise of the size that ordinary initialisations have where values are far smaller; the way back is returned.

    A constant tensor is moved as a whole: behind a normalisation equal weights hide as well as zeros do.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return lambda: None
    size = 0.5 / math.sqrt(values[0].numel() if values.dim() > 1 else 25)
    rows = values.unsqueeze(0) if values.dim() == 0 else values
    pieces = rows.split(max(1, PIECE * len(rows) // rows.numel()))  # to need no room
    if _is_constant(values):
        before = values.flatten()[0].clone()
        for piece in pieces:
            piece.add_(torch.randn(piece.shape).to(piece), alpha=size)
        return lambda: values.copy_(before)
    quick = values.device.type == "cpu" and values.dtype in _OF_NUMPY and values.is_contiguous()
    moved = _small_moved if quick else _small_moved_anywhere
    return partial(_call_all, [moved(piece, size) for piece in pieces])


def _is_constant(values: Tensor) -> bool:
    bits = values.view(_BITS[values.element_size()])
    some = bits[0].flatten()[:FEW] if values.dim() else bits
    return bool(some.amin() == some.amax()) and bool(bits.amin() == bits.amax())


def _small_moved(piece: Tensor, size: float) -> Callable[[], None]:
    """Kept are the numbers that were small, and where; by numpy, which takes a third of the time."""
    numbers = piece.view(-1).numpy()
    places = np.flatnonzero(np.abs(numbers) < SMALL * size).astype(np.uint16 if len(numbers) <= PIECE else np.int64)
    kept = numbers[places]
    numbers[places] = kept + (torch.randn(len(kept), dtype=piece.dtype) * size).numpy()

    def put_back() -> None:
        numbers[places] = kept

    return put_back


def _small_moved_anywhere(piece: Tensor, size: float) -> Callable[[], None]:
    """Kept is one bit for each number, whether it was small, and those that were."""
    small = piece.abs() < SMALL * size
    values, places = piece.masked_select(small), np.packbits(small.cpu().numpy())
    piece.masked_scatter_(small, values + torch.randn(values.shape).to(values) * size)

    def put_back() -> None:
        at = torch.from_numpy(np.unpackbits(places, count=piece.numel())).view(piece.shape)
        piece.masked_scatter_(at.to(piece.device, torch.bool), values)

    return put_back


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


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
