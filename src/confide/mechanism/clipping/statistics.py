"""Per-record statistics, evaluated so that no record can see another.

A statistic maps a batch to one row per record. Code that confide did not write is given batches of one: all at once
inside a region, else one by one. A record for which it raises, or whose row has another size, counts as zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confide.data.trees import Tree, form_of, numbers_of, rows_of, tensors_in
from confide.errors import Refusal, SpeedWarning
from confide.mechanism.clipping import libraries, one_by_one, randomness
from confide.mechanism.clipping.collection import no_collection
from confide.mechanism.clipping.evenly import even_size, filled
from confide.mechanism.clipping.intact import check_surroundings
from confide.mechanism.clipping.isolation import NotIsolable, Region, forget
from confide.mechanism.clipping.made_up import FEW, made_up
from confide.mechanism.clipping.muted import muted
from confide.mechanism.clipping.operations import operations_of
from confide.mechanism.clipping.places import (
    SHORT,
    SMALL,
    VECTORS,
    Even,
    even_places,
    pool_of,
    tell_of_uneven,
    threads_of,
)
from confide.mechanism.clipping.proven import is_proven
from confide.mechanism.clipping.sealed import Reachable
from confide.mechanism.clipping.texts import without_addresses

Statistic: TypeAlias = Callable[[Any, Tensor], Tensor]
_RUN: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()
_EVEN: dict[tuple[Any, ...], Even] = {}
MOST_KNOWN = 4096
"""Statistics of which it is remembered how their batches are filled up."""
LARGEST_PASS, BYTES = 64 << 20, 8
"""Bytes of answers for which a pass is filled up, and of one number."""


@dataclass(frozen=True)
class Recordwise:
    """A statistic of confide's own that treats every row alone, if the module it runs, if any, is proven to."""

    function: Statistic
    module: nn.Module | None = None

    def __call__(self, x: Tree, y: Tensor) -> Tensor:
        return self.function(x, y)

    def holds(self, x: Tree) -> bool:
        return self.module is None or is_proven(self.module, x)


def isolated_rows(function: Statistic, x: Tree, y: Tensor, size: int, rehearsal: bool = False) -> Tensor:
    """(records, size): the statistic of every record; with `rehearsal` records are made up and errors are raised."""
    if not len(y):
        return torch.zeros(0, size, dtype=torch.float64, device=y.device)
    check_surroundings()
    with torch.no_grad():
        if rehearsal and _is_believed(function, x):  # how made-up records round is nobody's matter
            return _rows(function, x, y, size)
        rows, error = _first_tried(function, x, y, size)
        if rows is not None:
            return rows
        # whatever vmap cannot do; an error of the function itself comes up again
        if not rehearsal and len(y) > 1 and _runs_at_once(function, x, y, size):
            return _halves(function, x, y, size)
        rows = _rows_one_by_one(function, x, y, size, rehearsal)
        if rehearsal:
            _warn(function, error)
        return rows


def _tried(function: Statistic, x: Tree, y: Tensor, size: int) -> tuple[Tensor | None, Exception]:
    """The rows of a batch, or why there are none: nobody who runs afterwards does so while an error is dealt with."""
    try:
        return _even_rows(function, x, y, size), NotIsolable()
    except Exception as found:
        return None, found.with_traceback(None)


def _is_believed(function: Statistic, x: Tree) -> bool:
    return type(function) is Recordwise and function.holds(x)


def _is_short(function: Statistic) -> bool:
    """Whether a network that is believed works in less than single precision; of other code the region tells it."""
    if type(function) is not Recordwise:
        return False
    parameters = () if function.module is None else function.module.parameters()
    return torch.is_autocast_enabled("cpu") or any(value.dtype in SHORT for value in parameters)


def _even_rows(function: Statistic, x: Tree, y: Tensor, size: int) -> Tensor:
    """All records in one pass, among so many that their numbers round as in any other batch (`evenly`)."""
    if VECTORS * size * BYTES > LARGEST_PASS:  # every record is alone, and at the same place in memory
        alone = (rows_of((x, y), torch.tensor([one])) for one in range(len(y)))
        return torch.cat([_rows(function, one_x, one_y, size) for one_x, one_y in alone])
    even = _even_of(function, x, y, size)
    records, whole = len(y), even_size(len(y), even.rows)
    if whole > records:
        x, y = filled((x, y), records, whole)
    with threads_of(even):
        rows = _rows(function, x, y, size)[:records]
    if not even.alike or _is_short(function):  # and it did run at once
        tell_of_uneven()
    return rows


def _rows(function: Statistic, x: Tree, y: Tensor, size: int) -> Tensor:
    if _is_believed(function, x):
        return _whole(function(x, y), len(y), size)
    return rows_at_once(function, x, y, size)


def _even_of(function: Statistic, x: Tree, y: Tensor, size: int) -> Even:
    """How its batches are filled up: found on made-up records at the first batch of this form and these operations."""
    form = (operations_of(function), form_of((x, y)), size, torch.get_num_threads(), y.device)
    if form not in _EVEN:
        if len(_EVEN) > MOST_KNOWN:
            _EVEN.clear()
        held = BYTES * (size + numbers_of((x, y)))
        pool_x, pool_y = made_up((x, y), pool_of(held), False, "uniform", (0, 1), None)

        def numbers(index: Tensor) -> list[Tensor]:
            some_x, some_y = rows_of((pool_x, pool_y), index)
            with randomness.restored():
                return [_rows(function, some_x, some_y, size)]

        try:
            with muted(), randomness.restored():
                _EVEN[form] = even_places(numbers, held, held <= SMALL, opaque=True)
        except Exception:  # made-up records that it does not like, or what vmap cannot run
            _EVEN[form] = Even(alike=False)
    return _EVEN[form]


def without_records(function: Statistic) -> None:
    """An answer to nobody: generators move on as in any other."""
    if type(function) is not Recordwise:
        randomness.move_on(Reachable(function).chance)


def _runs_at_once(function: Statistic, x: Tree, y: Tensor, size: int) -> bool:
    """Whether made-up records of this form do not raise, so that what has raised is a record of the batch."""
    few_x, few_y = made_up((x, y), FEW, False, "uniform", (0, 1), None)
    with muted(), randomness.restored():
        try:
            _even_rows(function, few_x, few_y, size)
        except Exception:
            return False
    return True


def _first_tried(function: Statistic, x: Tree, y: Tensor, size: int) -> tuple[Tensor | None, Exception]:
    """All records, as deep in Python's stack as halves of them are."""
    return _tried(function, x, y, size)


def _halves(function: Statistic, x: Tree, y: Tensor, size: int) -> Tensor:
    """Where a record raises, the others go the way they would have gone without it, from the same place in the code."""
    waiting, found = [slice(0, len(y))], []
    while waiting:
        part = waiting.pop()
        some_x, some_y = rows_of((x, y), part)
        middle = part.start + (part.stop - part.start) // 2
        if part.stop - part.start == len(y):  # was tried
            rows = None
        else:
            rows = _tried(function, some_x, some_y, size)[0]
        if rows is not None:
            found.append(rows)
        elif len(some_y) == 1:
            found.append(_rows_one_by_one(function, some_x, some_y, size).to(torch.float64))
        else:
            waiting += [slice(middle, part.stop), slice(part.start, middle)]
    kinds = {rows.dtype for rows in found}
    return torch.cat([rows.double() for rows in found] if len(kinds) > 1 else found)


def rows_at_once(function: Statistic, x: Tree, y: Tensor, size: int) -> Tensor:
    """All records in one pass of torch's vmap; raises where it cannot: where a record's values decide what runs."""
    libraries.tell()
    with no_collection():
        region, seal = Region(len(y)), Reachable(function)
        seal.check()
        if seal.lasting:
            raise NotIsolable(f"reaches {seal.lasting}, which nobody can put back")
        if seal.makes_tensors:
            raise NotIsolable("calls torch.Tensor, whose numbers nobody has written")
        randomness.note(seal.chance)
        try:
            with without_addresses() if seal.shows_objects else nullcontext(), region.entered():
                given = region.one_each(x), region.one_each(y)
                row = _row(copy_context().run(function, *given), size)
                rows = region.stacked(row).clone()  # its own: what is kept by user code is emptied
        finally:
            changed = seal.restore()
            forget()
    if changed:
        raise NotIsolable("writes to a global, a closure or a class")
    return rows


def _rows_one_by_one(function: Statistic, x: Tree, y: Tensor, size: int, strict: bool = False) -> Tensor:
    found = torch.zeros(len(y), size, dtype=torch.float64, device=y.device)

    def of_record(one_x: Any, one_y: Tensor) -> list[Tensor]:
        return [_row(function(one_x, one_y), size)]

    if not strict:
        refuse_silent(function, x, y, size)
    with torch.no_grad():
        one_by_one.for_each((function,), of_record, [found], x, y, strict)
    return found


def refuse_silent(function: Statistic, x: Tree, y: Tensor, size: int) -> None:
    """Refuse a statistic that answers for made-up records of this form, and for none in a process of its own.

    It would be paid for and be noise, and nobody may say so: whether no record answers depends on all of them. What it
    raises here is not heard, for it may well be made for other records than these.
    """
    if type(function) is Recordwise or not len(tensors_in((x, y))) or not _is_new(function, x):
        return
    few_x, few_y = made_up((x, y), FEW, False, "uniform", (0, 1), None)
    with torch.no_grad(), muted(), randomness.restored():
        with suppress(Exception):
            rows_at_once(function, few_x, few_y, size)
            return
        if one_by_one.why_apart(function):  # also for what it loads: in a process of its own no file can be opened
            few = torch.zeros(FEW, size, dtype=torch.float64, device=y.device)
            try:
                one_by_one.for_each(
                    (function,), lambda *one: [_row(function(*one), size)], [few], few_x, few_y, strict=True
                )
            except one_by_one.SilentApart:
                raise
            except Exception:
                return


def _is_new(function: Statistic, x: Tree) -> bool:
    """Whether it has not run on records of this form before, by its code."""
    known = _RUN.setdefault(getattr(function, "__code__", None) or type(function), set())
    form = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_in(x))
    fresh = form not in known
    known.add(form)
    return fresh


def _row(row: Tensor, size: int) -> Tensor:
    if not isinstance(row, Tensor) or row.numel() != size:
        got = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise Refusal(f"statistic: returned {got} for one record; a row of {size} numbers is needed")
    return row.reshape(size)


def _whole(rows: Tensor, records: int, size: int) -> Tensor:
    if not isinstance(rows, Tensor) or rows.shape != (records, size):
        got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise Refusal(f"statistic: returned {got} for {records} records; ({records}, {size}) is needed")
    return rows


def _warn(function: Statistic, error: Exception) -> None:
    text = (str(error).strip().splitlines() or [repr(error)])[0]
    apart = one_by_one.why_apart(function)
    where = f", each in a process of its own since it {apart}" if apart else ""
    warnings.warn(
        f"{getattr(function, '__name__', 'statistic')}: its records run one by one{where}, which is slow, because of: "
        f"{text}; "
        "keep to torch operations that give tensors of the same shape for every record",
        SpeedWarning,
        stacklevel=3,
    )
