"""Whether a record's numbers depend on its place in a batch, tried on made-up records; and batches where they do not.

Products, convolutions and functions of single numbers are made by vectors: what is left over at the end of a batch, or
of the part that a thread gets, may go by other code, which rounds otherwise. So the same made-up records go through a
module in other orders and in batches of other sizes, and every number that a sum rests on must have the same bits:
what each layer was given, and the gradient at its output. Where they have not, batches get more rows, until nothing is
left over; then one thread makes them, if that is no loss; else the run is stated to rest on an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from confide._native.digest import digest_of_numbers
from confide.mechanism.clipping.evenly import EIGHT, FOUR, asked_too_late, even_size

VECTORS = 32
"""Rows that fill two vectors of any type on any processor, whatever a row holds."""
SHARED_EVENLY = 2
"""Threads of which each gets the numbers of 32 rows where there are 64; of more, some get parts of rows."""
MOST_ROWS = 64
"""Of which a batch has a multiple: for two threads."""
POOL, SWEPT, PASSES = 512, (4, 28), 20
"""Different records, of which all are tried in small batches, up to so many: a function of single numbers that rounds
otherwise at the end of a batch does so for one number in fifty or more (the rarest that was measured), and of a batch
few numbers are left over, or all, where a record has only one."""
TRIED = (4, 8, 12, 20, 28, 60, 72)
"""Records of a batch; the sizes that were seen to differ are among the small ones."""
FEWEST, FEWEST_HELD = 24, 256 << 20
"""Rows that are tried, since convolutions were seen to change their ways below, unless they hold so many bytes: then a
batch goes through the network in pieces that are no larger, and copies of one record, which is long, are enough."""
BRIEF = 4096
"""Bytes of a record, beyond which a code of 64 bits stands for them: no pass is held until the next one is made."""
HELD, HELD_ONCE = 1 << 20, 16 << 20
"""Bytes of batches that are tried, and of one large one."""
LARGE, LARGE_BY_THREADS = 256, 8192
"""Rows of that one; threads share out only what is large, however short its rows are."""
SMALL = 1 << 16
"""Weights, and bytes that a record holds, up to which several threads make a batch no faster than one."""
PRODUCTS = 1024
"""Inputs and outputs of products that are tried apart."""

Numbers = Callable[[Tensor], list[Tensor]]
"""Of the records with these numbers, in this order: tensors that have the records first."""


@dataclass(frozen=True)
class Even:
    """How batches run so that a record's numbers are the same at every place.

    rows     a batch has a multiple of so many
    single   on one thread
    alike    whether that was seen to do
    """

    rows: int = 1
    single: bool = False
    alike: bool = True


EVEN = Even()


def fewest_rows(record_bytes: int) -> int:
    """Rows that a batch may have at once whatever they hold; half of them where that is very much."""
    return EIGHT if EIGHT * record_bytes <= 2 * FEWEST_HELD else FOUR


def pool_of(record_bytes: int) -> int:
    """How many different records are needed of this size."""
    held = max(1, record_bytes)
    if MOST_ROWS * held <= FEWEST_HELD:
        return even_size(min(POOL, max(MOST_ROWS, HELD // held)), MOST_ROWS)
    return 1 if is_huge(held) else even_size(FEWEST_HELD // held)


def is_huge(record_bytes: int) -> bool:
    """Whether copies of one record are tried, which has tens of thousands of numbers for every layer."""
    return FEWEST * record_bytes > FEWEST_HELD


def even_places(numbers: Numbers, record_bytes: int, small: bool, opaque: bool = False) -> Even:
    """The first way of filling up batches in which places do not matter.

    small    one thread is as good as several
    opaque   a difference in between may not be among the numbers, as where something is counted that is above a
             threshold: then no function of single numbers may have any left over, whatever made-up records show
    """
    threads = torch.get_num_threads()
    if not opaque and _alike(numbers, 1, record_bytes, threads):
        return EVEN
    for rows in _multiples(numbers, record_bytes, threads, opaque):
        if rows * record_bytes <= FEWEST_HELD and _alike(numbers, rows, record_bytes, threads):
            return Even(rows)
    if small and threads > 1:
        with threads_of(Even(single=True)):
            found = even_places(numbers, record_bytes, small, opaque)
        return replace(found, single=found.alike)
    return Even(alike=False)


def _multiples(numbers: Numbers, record_bytes: int, threads: int, opaque: bool) -> tuple[int, ...]:
    """Of rows, beyond the fewest, at which functions of single numbers have none left over in the part of any thread.

    Where they have none on one thread either, it is the products that differ, and whatever does for them is enough.
    """
    if threads > 1 and not opaque:
        with threads_of(Even(single=True)):
            if _alike(numbers, 1, record_bytes, 1):
                return VECTORS, MOST_ROWS
    return (VECTORS,) if threads == 1 else (MOST_ROWS,) if threads <= SHARED_EVENLY else ()


def _alike(numbers: Numbers, rows: int, record_bytes: int, threads: int) -> bool:
    held = max(1, record_bytes)
    most = max(min(FEWEST, FEWEST_HELD // held), fewest_rows(held), rows, HELD // held)
    first = torch.arange(even_size(min(POOL, most - most % FOUR), rows))
    pool = 1 if is_huge(held) else len(first)
    found = numbers(first % pool)
    known = [one[:pool] for one in found]
    if pool < len(first) and not _same(known, found, first % pool):
        return False
    tried = {even_size(size, rows) for size in TRIED if size <= most} - ({len(first)} if pool == 1 else set())
    sizes = sorted(tried, reverse=True)  # what a large pass has let go is enough for a smaller one
    large = min(LARGE if threads == 1 else LARGE_BY_THREADS, HELD_ONCE // held)
    if large > most:
        sizes.append(even_size(large, rows))
    for size in sizes:
        swept = rows == 1 and size in SWEPT  # beyond, functions of single numbers have none left over
        for start in range(1, max(2, pool), max(size, pool // (PASSES if swept else 2))):
            index = (torch.arange(size) + start) % pool
            if not _same(known, numbers(index), index):
                return False
    return True


def brief(values: Tensor) -> Tensor:
    """What is compared of numbers that have the records first: they themselves, or a code for all that a record has."""
    values = values.detach()
    if not len(values) or values[0].numel() * values.element_size() <= BRIEF:
        return values
    codes: list[int] = []
    for one in values:  # those of copies are known by what they are equal to, which is quicker
        codes.append(codes[0] if codes and torch.equal(one, values[0]) else digest_of_numbers(one))
    return torch.tensor(codes)


def products_alike(width: int, outputs: int, dtype: torch.dtype, rows: int) -> bool:
    """Of batches with fewer rows than outputs, and with more: threads share out the one or the other."""
    return _across(min(width, PRODUCTS), min(outputs, PRODUCTS), dtype, rows, torch.get_num_threads())


@lru_cache(maxsize=4096)
def _across(width: int, outputs: int, dtype: torch.dtype, rows: int, threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, width, generator=generator, dtype=dtype)
    row = torch.randn(1, width, generator=generator, dtype=dtype)
    above = even_size(outputs + 1, rows)
    below = max(rows, FOUR, (outputs - 1) // max(rows, EIGHT) * max(rows, EIGHT))
    found = [row.expand(size, -1) @ weight.T for size in (below, above)]
    return all(torch.equal(one, found[0][:1].expand_as(one)) for one in found)


def _same(known: list[Tensor], found: list[Tensor], index: Tensor) -> bool:
    return len(known) == len(found) and all(
        torch.equal(one[index], other) or bool(torch.isclose(one[index], other, 0.0, 0.0, equal_nan=True).all())
        for one, other in zip(known, found, strict=True)
    )


@contextmanager
def threads_of(even: Even) -> Iterator[None]:
    """Where batches are made on one thread, one thread."""
    before = torch.get_num_threads()
    if not even.single or before == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


UNEVEN = "this device: what a record's gradient rounds to does not depend on the other records of its batch"
"""Said where a record's place was seen to decide what its numbers round to, and of devices where nobody has looked."""
TOO_LATE = f"{UNEVEN} (products were made before confide was imported: import it first, or set MKL_CBWR=AUTO,STRICT)"


def assumed_of_places(uneven: bool) -> tuple[str, ...]:
    """What a statement says of passes in which the place of a record was seen to matter, or was not."""
    return () if not uneven else (TOO_LATE,) if asked_too_late() else (UNEVEN,)


_HEARD: ContextVar[list[bool] | None] = ContextVar("confide_uneven_passes", default=None)


@contextmanager
def hearing_of_uneven() -> Iterator[list[bool]]:
    """A list that is empty as long as all passes inside were made so that places do not matter."""
    found: list[bool] = []
    token = _HEARD.set(found)
    try:
        yield found
    finally:
        _HEARD.reset(token)


SHORT: frozenset[torch.dtype] = frozenset(
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize < torch.float32.itemsize
)
"""Types with so few digits that made-up records show nothing: what rounds by its place is rounded to the same nearly
always, and one number in ten thousand that is not, which few inputs have, is easily found by somebody who looks for
it."""


def unheard() -> None:
    """In this context, and until it ends, nobody listens: records are made up."""
    _HEARD.set(None)


def tell_of_uneven() -> None:
    heard = _HEARD.get()
    if heard is not None and not heard:
        heard.append(True)
