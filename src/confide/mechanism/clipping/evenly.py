"""Batches of even sizes, in which a record's numbers are the same whoever else is there.

A product takes rows of records some at a time, and the few that are left over by another way, which adds up in another
order; a batch of one goes by a third. So a record whose parts cancel could be given other numbers when one record more
or less stands beside it: three neighbours have moved a sum by 4 C in this way. Batches are therefore filled up with
copies of a record, which count for nothing, to a size at which nothing is left over.

That equal records then have equal numbers, in batches of any of these sizes, is how processors and their libraries
work, as far as it is measured (`test_evenly`), and not a theorem: docs/soundness.md, "Sums as they are computed". A
processor on which a few products show that it is not so, and every other device, is stated as an assumption.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from confide.data.trees import rows_of

FEW = 64
"""Fewer records than this are filled up to a multiple of FOUR; more of them to one of EIGHT."""
FOUR = 4
"""Rows are taken four at a time by the products that were measured: the last one, two or three go another way."""
EIGHT = 8
"""Which costs little from 64 records on, and leaves room for processors that take more rows at a time."""
ANY = 1 << 62
"""Records: more than there ever are."""
PROBED, PROBES = (4, 12, 64, 72, 256), ((20, 16), (300, 1), (64, 100))
"""Batches, and inputs and outputs of a layer: a narrow one, one number, a wide one; all of them take a millisecond."""

LARGE, VECTOR = 512, 64
"""Numbers of a row from which on only what is left over of whole vectors is tried, which is what decides."""


def even_size(records: int, most: int = ANY) -> int:
    """The number of rows for so many records, of which at most so many may go at once."""
    step = FOUR if records < FEW else EIGHT
    return max(records, most) if most < step else -(-records // step) * step


@lru_cache
def rounds_alike(dtype: torch.dtype) -> bool:
    """Whether this processor gives equal rows equal numbers in even batches, as far as a few products show."""
    return all(_product_alike(width, outputs, dtype) for width, outputs in PROBES)


def network_rounds_alike(module: nn.Module) -> bool:
    """The same of products of the sizes that a network has, forwards and backwards, wherever a row stands.

    Rows of an odd number of numbers begin at other places in memory than whole vectors, and a processor may add up the
    first few of them by themselves: a record then has other numbers in the second row than in the first.
    """
    weights = [weight for weight in module.parameters() if weight.ndim > 1 and weight.numel()]
    if any(one.ndim > 2 and math.prod(one.shape[2:]) == 1 for one in weights):
        return False  # convolutions of single places go by kernels of their own, which were seen to differ
    sizes = {(_probed(math.prod(one.shape[1:])), _probed(one.shape[0]), one.dtype) for one in weights}
    return all(_size_alike(*size) for size in sizes)


def _probed(width: int) -> int:
    """The width itself, or of a large one as many numbers beyond whole vectors."""
    return width if width <= LARGE else LARGE + width % VECTOR


@lru_cache(maxsize=4096)
def _size_alike(width: int, outputs: int, dtype: torch.dtype) -> bool:
    """Of outputs, and of what goes back to the inputs, whose products have other kernels."""
    return _product_alike(width, outputs, dtype) and _product_alike(outputs, width, dtype, back=True)


def _product_alike(width: int, outputs: int, dtype: torch.dtype, back: bool = False) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*((width, outputs) if back else (outputs, width)), generator=generator, dtype=dtype)
    row = torch.randn(1, width, generator=generator, dtype=dtype)
    batches = [row.expand(size, -1).contiguous() for size in PROBED]
    found = [rows @ weight if back else torch.nn.functional.linear(rows, weight) for rows in batches]
    return all(torch.equal(one, found[0][:1].expand_as(one)) for one in found)


def filled(tree: Any, records: int, size: int) -> Any:
    """With copies of the last record."""
    return rows_of(tree, torch.arange(size).clamp_(max=records - 1))
