"""Batches of even sizes, in which a record's numbers are the same whoever else is there.

A product takes rows of records some at a time, and the few that are left over by another way, which adds up in another
order; a batch of one goes by a third. So a record whose parts cancel could be given other numbers when one record more
or less stands beside it: three neighbours have moved a sum by 4 C in this way. Batches are therefore filled up with
copies of a record, which count for nothing, to a size at which nothing is left over.

That equal records then have equal numbers, in batches of any of these sizes, is how processors and their libraries
work, and not a theorem: docs/soundness.md, "Sums as they are computed". Every network is tried (`places`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from confide.data.trees import rows_of

FEW = 64
"""Fewer records than this are filled up to a multiple of FOUR; more of them to one of EIGHT."""
FOUR = 4
"""Rows are taken four at a time by the products that were measured: the last one, two or three go another way."""
EIGHT = 8
"""Which costs little from 64 records on, and leaves room for processors that take more rows at a time."""
ANY = 1 << 62
"""Records: more than there ever are."""
ANY_ORDER = 1
"""What the library calls the state in which the place of a row in memory decides in what order it is added up."""


def even_size(records: int, rows: int = 1) -> int:
    """The number of rows for so many records: a multiple of `rows` too, a power of two, where a network needs more."""
    step = max(rows, FOUR if records < FEW else EIGHT)
    return -(-records // step) * step


def asked_too_late() -> bool:
    """Whether the library that makes products was at work before confide could ask it for sums in one order.

    It listens once, at the first product of a process; `import confide` asks by setting MKL_CBWR.
    """
    if not torch.backends.mkl.is_available():
        return False
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return bool(library.mkl_serv_cbwr_get(-1) == ANY_ORDER)
    except (OSError, AttributeError):  # it has other names elsewhere
        return False


def filled(tree: Any, records: int, size: int) -> Any:
    """With copies of the last record."""
    return rows_of(tree, torch.arange(size).clamp_(max=records - 1))
