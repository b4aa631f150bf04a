"""Products that are made once where a large network would make the same one many times, on made-up records.

Whether a product gives a record the same numbers at every place follows from its shapes, not from its numbers: in what
order it is added up, and who gets which rows. So of the products of a pass that is looked at (`even_networks`) one of
each kind is made; a kind is an operation on the same shapes, in the same layout and alignment. In the place of the
others the record is given what the first of them gave it, in another order, so that what comes next meets other
numbers at the same places. That is done only

    if the product that was made in this pass gave every record, bit by bit, what it had been given at all other places
    if every record comes with the inputs, bit by bit, that it has had in this product at all other places

All else runs: functions of single numbers, whatever comes after a difference, and what follows a product that made one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from confide._native.digest import digest

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
    """For passes of one network; `shared` are its parameters."""

    def __init__(self, shared: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared = {one.untyped_storage().data_ptr() for one in shared}
        self.given: dict[Any, int] = {}  # by product, its input and record: a code of that
        self.made: dict[Any, dict[int, Tensor]] = {}  # by kind: what a record got
        self.index: list[int] = []  # the records of this pass
        self.seen: dict[Any, int] = {}  # kinds of which this pass has made one, and how many were not made since
        self.number = 0

    @contextmanager
    def passing(self, index: Tensor) -> Iterator[None]:
        """A pass of these records, by number."""
        self.index, self.seen, self.number = index.tolist(), {}, 0
        before = at_work()
        try:
            _AT_WORK.passes = before + 1  # inside: an interrupt must not leave it so
            with self:
                yield
        finally:
            _AT_WORK.passes = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or kwargs:
            return func(*args, **(kwargs or {}))
        self.number += 1
        kind = (func, *(self._form(one) if isinstance(one, Tensor) else repr(one) for one in args))
        if not self._as_before(args):
            return func(*args)
        if kind in self.seen:
            return self._again(kind)
        found: Tensor = func(*args)
        if len(found) % len(self.index) == 0 and self._given_alike(kind, found):
            self.seen[kind] = 0
        return found

    def _is_shared(self, one: Tensor) -> bool:
        return one.untyped_storage().data_ptr() in self.shared

    def _form(self, one: Tensor) -> Any:
        """Without the number of records, which are the first part of the first axis."""
        shape = one.shape if self._is_shared(one) else (len(one) / len(self.index), *one.shape[1:])
        return shape, one.stride(), one.dtype, one.data_ptr() % LINE

    def _as_before(self, args: Any) -> bool:
        """Whether what is no weight has its records first, and each of them what it had here at other places."""
        for place, one in enumerate(args):
            if not isinstance(one, Tensor) or self._is_shared(one):
                continue
            if one.dim() < 2 or not one.numel() or len(one) % len(self.index):
                return False
            first: dict[int, Tensor] = {}
            for record, block in zip(self.index, one.detach().chunk(len(self.index)), strict=True):
                if record in first:
                    if not torch.equal(first[record], block):
                        return False
                    continue
                first[record] = block
                code = digest(block)
                if self.given.setdefault((self.number, place, record), code) != code:
                    return False
        return True

    def _given_alike(self, kind: Any, found: Tensor) -> bool:
        kept = self.made.setdefault(kind, {})
        return all(
            torch.equal(kept.setdefault(record, block), block)
            for record, block in zip(self.index, found.clone().chunk(len(self.index)), strict=True)
        )

    def _again(self, kind: Any) -> Tensor:
        self.seen[kind] += 1
        turn, kept = LINE * self.seen[kind] + 1, self.made[kind]
        turned = {record: kept[record].flatten().roll(turn).view_as(kept[record]) for record in set(self.index)}
        return torch.cat([turned[record] for record in self.index])
