"""A network whose weights are spread over the ranks by `torch.distributed.fsdp.fully_shard`.

Between steps every rank holds its rows of each weight and nothing else: position, release, the method's state and draws
are all of that length. For one answer the weights are put together on every rank, which then has whole gradients of its
own records, so that clipping needs no exchange; the sums go back in parts, each of which meets the noise of its rank.

fully_shard gives rank r of R the rows [r c, (r + 1) c) of a weight, with c its rows / R rounded up.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from confide.distributed.ranks import Ranks
from confide.errors import Refusal

_STATE = "__composable_api_state_key"
"""Beginning of the names under which torch keeps what it knows of a sharded layer."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_spread(module: nn.Module) -> bool:
    """Whether fully_shard has been at work anywhere in a network."""
    sharding, tensors = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    by_layer = sharding is not None and any(isinstance(layer, sharding.FSDPModule) for layer in module.modules())
    return by_layer or (
        tensors is not None and any(isinstance(value, tensors.DTensor) for value in module.parameters())
    )


class SpreadNetwork:
    """A plain copy of a spread network, which has its weights while `whole` lasts, and no memory for them otherwise.

    plain    the copy
    parts    of every trainable weight in the order of the flat vector: how many of its numbers each rank has
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._given, self._ranks = module, ranks
        for name, value in module.named_parameters():
            _check(name, value, ranks)
        _check_ties(module)
        self.plain = _plain_copy(module)
        self.parts = tuple(_parts(value, ranks.size) for value in _spread(module, trainable=True))
        if not self.parts:
            raise Refusal("module: has no trainable parameters; give at least one with requires_grad=True")

    def position(self) -> Tensor:
        """This rank's numbers of all trainable weights, in memory of their own."""
        own = [_local(value) for value in _spread(self._given, trainable=True)]
        if [len(part) for part in own] != [part[self._ranks.rank] for part in self.parts]:
            raise Refusal("module: its weights are spread otherwise than fully_shard does it; use its defaults")
        return torch.cat(own)

    @contextmanager
    def whole(self, position: Tensor) -> Iterator[nn.Module]:
        """The plain network with all weights in place: a collective, which every rank enters at once."""
        try:
            self._fill(_places(self.plain, trainable=True), self.pieces(position))
            self._fill(self._frozen_in(self.plain), self._frozen_pieces())
            yield self.plain
        finally:
            for value in (*_places(self.plain, trainable=True), *self._frozen_in(self.plain)):
                value.data = _nothing(value)

    def fresh(self) -> nn.Module:
        """Another plain copy, which saw no record, with the frozen weights in place and room for the others."""
        copied = _plain_copy(self._given)
        for value in _places(copied, trainable=True):
            value.data = torch.zeros(value.shape, dtype=value.dtype)
        self._fill(self._frozen_in(copied), self._frozen_pieces())
        return copied

    def pieces(self, position: Tensor) -> Iterator[Tensor]:
        """The flat vector of all trainable weights, one weight after the other, on every rank."""
        start = 0
        for part in self.parts:
            own = part[self._ranks.rank]
            yield self._ranks.put_together(position[start : start + own], part)
            start += own

    def _frozen_pieces(self) -> Iterator[Tensor]:
        for value in _spread(self._given, trainable=False):
            yield self._ranks.put_together(_local(value), _parts(value, self._ranks.size))

    def _frozen_in(self, copied: nn.Module) -> list[nn.Parameter]:
        """The weights of a copy that are frozen and spread; those that every rank holds anyway are in place."""
        pairs = zip(copied.parameters(), self._given.parameters(), strict=True)
        return [mine for mine, given in pairs if not given.requires_grad and _is_dtensor(given)]

    def _fill(self, places: list[nn.Parameter], pieces: Iterator[Tensor]) -> None:
        for place, piece in zip(places, pieces, strict=True):
            place.data = piece.view(place.shape)


def _places(module: nn.Module, trainable: bool) -> list[nn.Parameter]:
    return [value for value in module.parameters() if value.requires_grad == trainable]


def _spread(module: nn.Module, trainable: bool) -> list[nn.Parameter]:
    return [value for value in _places(module, trainable) if _is_dtensor(value)]


def _nothing(like: Tensor) -> Tensor:
    """As large as a weight, and without memory for it."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _is_dtensor(value: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _local(value: Any) -> Tensor:
    """This rank's numbers of a weight."""
    found: Tensor = value.to_local().detach().reshape(-1)
    return found


def _check(name: str, value: Any, ranks: Ranks) -> None:
    from torch.distributed.tensor import Shard

    if not _is_dtensor(value):
        if value.requires_grad:
            raise Refusal(
                f"module: its parameter {name} is whole on every rank; call fully_shard on the network itself too, "
                "after its layers, and reshard() what was gathered"
            )
        return
    mesh = value.device_mesh
    if mesh.ndim != 1 or mesh.size() != ranks.size or mesh.get_local_rank() != ranks.rank:
        raise Refusal(f"module: its parameter {name} is spread over other processes than the {ranks.size} ranks")
    if tuple(value.placements) != (Shard(0),):
        raise Refusal(f"module: its parameter {name} is spread as {value.placements}; use fully_shard's default")
    if value.device.type != "cpu":
        raise Refusal(f"module: its parameter {name} is on {value.device}; ranks add up on the processors, use cpu")


def _check_ties(module: nn.Module) -> None:
    """fully_shard on two layers with one weight makes two weights of it, which would then be learnt apart.

    They have the same numbers still. Constants are not looked at: biases and scales of many layers start alike.
    """
    seen: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for name, value in module.named_parameters():
        if value.requires_grad and value.dim() > 1:
            seen.setdefault((value.shape, value.dtype), []).append((name, _local(value)))
    for alike in seen.values():
        for place, (name, own) in enumerate(alike):
            for other, theirs in alike[:place]:
                if len(own) and bool((own != own[0]).any()) and torch.equal(own, theirs):
                    raise Refusal(
                        f"module: {other} and {name} hold the same numbers, as of one weight in two layers that "
                        "fully_shard has parted; call it once on a part of the network that holds both, or start them "
                        "apart"
                    )


def _parts(value: Tensor, ranks: int) -> tuple[int, ...]:
    rows, inner = value.shape[0], math.prod(value.shape[1:])
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) * inner for rank in range(ranks))


def _plain_copy(module: nn.Module) -> nn.Module:
    """The network as it was before fully_shard, without its weights; one that stands in two places does so here too."""
    spread = [value for value in module.parameters() if _is_dtensor(value)]
    kinds = {value.dtype for value in spread if value.requires_grad}
    if len(kinds) > 1:
        raise Refusal(f"module: its trainable parameters mix {kinds}; convert it to one type with module.to(...)")
    known = {id(value): nn.Parameter(_nothing(value), requires_grad=value.requires_grad) for value in spread}
    with _undressed(module):
        return copy.deepcopy(module, known).train()


@contextmanager
def _undressed(module: nn.Module) -> Iterator[None]:
    """Without what fully_shard has put on the layers, which cannot be copied, as long as this lasts."""
    worn: list[tuple[nn.Module, type, dict[str, Any]]] = []
    try:
        for layer in module.modules():
            kept = {name: value for name, value in vars(layer).items() if name.startswith(_STATE)}
            kept |= {name: vars(layer)[name] for name in _HOOKS}
            worn.append((layer, type(layer), kept))
            _undress(layer)
        yield
    finally:
        for layer, kind, kept in worn:
            layer.__class__ = kind
            vars(layer).update(kept)


def _undress(layer: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for name in _HOOKS:  # torch's own go, for they lead to what is spread; those of the user stay
        hooks = vars(layer)[name]
        vars(layer)[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _of_torch(hook))
    for name in [name for name in vars(layer) if name.startswith(_STATE)]:
        del vars(layer)[name]
    if isinstance(layer, FSDPModule):
        layer.__class__ = type(layer).__mro__[type(layer)._orig_cls_mro_index]


def _of_torch(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)  # some are wrapped
    return str(getattr(getattr(inner, "__func__", inner), "__module__", "")).startswith("torch.distributed.")
