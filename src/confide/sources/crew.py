"""Crew: the processes that make one run together. Nearly always one, and then everything here is done on the spot.

Each member holds records of its own and the whole public state. A member that is not alone meets the others at every
call: all of them make the same calls in the same order, with the same public facts. See `confide.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed

from confide import errors
from confide.errors import Refusal

T = TypeVar("T")
Parts: TypeAlias = tuple[tuple[int, ...], ...]
"""Of every stretch of a vector, how many numbers each member has, one after the other."""


class Crew:
    """One process alone; `confide.distributed.Ranks` is the crew of several.

    rank   number of this member; the first one, 0, keeps the ledger and writes files
    size   how many there are
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse unless every member gives the same facts; a refusal names those that differ."""

    def together(self, work: Callable[[], T]) -> T:
        """Work that every member does for itself: where it fails for one, it fails for all."""
        return work()

    def led(self, what: str, work: Callable[[], Any]) -> Any:
        """What the first member's work gives, in JSON, once all agree on what it is; its failure is everybody's."""
        return work()

    def told(self, message: bytes) -> bytes:
        """The message of the first member."""
        return message

    def alike(self, code: bytes) -> bool:
        """Whether all members come with the same code of 32 bytes."""
        return True

    def everybody(self, message: bytes, what: str) -> list[bytes]:
        """The messages of all members, in their order, once all agree on what they are about."""
        return [message]

    def share_(self, tensor: Tensor) -> Tensor:
        """Overwritten by the first member's."""
        return tensor

    def blank(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros on which a member makes its own sum for `add_up`, and which last until then."""
        return torch.zeros(size, dtype=dtype)

    def add_up(self, own: Tensor, what: str, noise: Callable[[int], Tensor], parts: Parts | None = None) -> Tensor:
        """The sum over all members with noise on it, the same bits for each, once all agree on what it is.

        Every member has a part of the coordinates: it gets the sums of the others there, adds them up in double
        precision, and adds what `noise` gives for so many numbers. Then the parts are put together; where `parts` says
        whose they are, every member keeps its own instead.
        """
        return (own.double() + noise(len(own))).to(own.dtype)


ALONE = Crew()


def error_to_dict(error: Exception) -> dict[str, Any]:
    """An error as JSON, for the other members."""
    plain = all(isinstance(value, str | int | float) for value in error.args)
    return {"type": type(error).__name__, "text": str(error), "args": list(error.args) if plain else None}


def error_from_dict(told: dict[str, Any], rank: int) -> Exception:
    """The same error, where it is one of confide's own: a refusal of one member is a refusal of all."""
    kind = vars(errors).get(told["type"])
    if isinstance(kind, type) and issubclass(kind, Exception) and told["args"] is not None:
        first, *rest = told["args"] or [""]
        return kind(f"rank {rank}: {first}", *rest)
    return RuntimeError(f"rank {rank}: {told['type']}: {told['text']}")


def check_alone() -> None:
    """Refuse a plain source in one of several processes that were started together.

    Each would run a fit of its own, on all records and under one name, and each would be charged.
    """
    started = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    size = int(started) if started.isdecimal() else 1
    if size == 1 and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
    if size > 1:
        raise Refusal(
            f"WORLD_SIZE={size}: this is one of {size} processes that were started together, and each would make, and "
            "be charged for, a fit of its own; use `with confide.distributed.start() as ranks:` and ranks.private(...) "
            "in place of PrivateData(...), or start one process"
        )
