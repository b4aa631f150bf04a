"""Products that are made once where a large network would make the same one many times, on copies of one record.

Whether a product gives a record the same numbers at every place follows from its shapes, not from its numbers: in what
order it is added up, and who gets which rows. So a network whose layers repeat, as those of transformers do, needs
each kind of product once in a pass that is looked at (`even_networks`). A product is left out only if its inputs are
seen to be equal copies, bit by bit, and if the same operation, on the same shapes, in the same layout and alignment,
was seen in this pass to make equal copies of equal copies. All else runs: functions of single numbers, whatever has
other inputs, and whatever follows a product that made unequal ones.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default}
)
LINE = 64
"""Bytes of a line of the cache: where in it a tensor begins may decide in which parts it is read."""


_AT_WORK = threading.local()


def at_work() -> int:
    """How many of these see every operation of this thread: all modes that a region allows."""
    found: int = getattr(_AT_WORK, "passes", 0)
    return found


class ProductsOnce(TorchDispatchMode):
    """For a pass of so many copies of one record."""

    def __init__(self, copies: int, shared: list[Tensor]) -> None:
        super().__init__()
        self.copies = copies
        self.shared = {one.untyped_storage().data_ptr() for one in shared}
        self.made: dict[Any, list[Any]] = {}  # by what was asked: of one copy, and how often it was asked again

    def __enter__(self) -> Any:
        _AT_WORK.passes = at_work() + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _AT_WORK.passes -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or kwargs or not all(self._fits(one) for one in args if isinstance(one, Tensor)):
            return func(*args, **(kwargs or {}))
        asked = (func, *(_form(one) if isinstance(one, Tensor) else repr(one) for one in args))
        if asked in self.made:
            return self._again(asked)
        found = func(*args)
        if self._copied(found):
            self.made[asked] = [found[: len(found) // self.copies].clone(), 0]
        return found

    def _fits(self, one: Tensor) -> bool:
        """A weight, or copies."""
        return one.untyped_storage().data_ptr() in self.shared or self._copied(one)

    def _copied(self, one: Tensor) -> bool:
        if one.dim() < 2 or len(one) % self.copies or not one.numel():
            return False
        first, *others = one.detach().chunk(self.copies)
        return all(torch.equal(first, other) for other in others)

    def _again(self, asked: Any) -> Tensor:
        """Copies of the same numbers in another order, so that what comes next meets others at the same places."""
        kept = self.made[asked]
        kept[1] += 1
        one: Tensor = kept[0]
        turned = one.flatten().roll(LINE * kept[1] + 1).view(one.shape)
        return turned.repeat(self.copies, *[1] * (one.dim() - 1))


def _form(one: Tensor) -> Any:
    return one.shape, one.stride(), one.dtype, one.data_ptr() % LINE
