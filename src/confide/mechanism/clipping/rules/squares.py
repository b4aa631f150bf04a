"""Sums of squares and small helpers shared by the rules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from confide._native.arithmetic import row_squares

# Temporaries of this size stay in cache and are never returned to the operating system in between.
PIECE_BYTES = 2 << 20


def squared_norms_of(values: Tensor) -> Tensor:
    """The squared norm of values[i], for every i.

    Sums are cascaded, in the native kernel and in torch, so the error grows with log(entries) only; torch's norms are
    not. Without the kernel large inputs are squared a piece at a time, because a temporary of their size would cost
    more than the arithmetic.
    """
    flat = values.reshape(values.shape[0], -1) if values.dim() != 2 else values
    native = row_squares(flat)
    if native is not None:
        return native
    records, entries = flat.shape
    size = entries * flat.element_size()
    if records * size <= PIECE_BYTES:
        return (flat * flat).sum(-1)
    if size > PIECE_BYTES:
        width = PIECE_BYTES // flat.element_size()
        return torch.stack([_one_squared_norm(row, width) for row in flat])
    norms = flat.new_empty(records)
    for start, stop in chunks(records, size, PIECE_BYTES):
        piece = flat[start:stop]
        torch.sum(piece * piece, -1, out=norms[start:stop])
    return norms


def _one_squared_norm(row: Tensor, width: int) -> Tensor:
    return torch.stack([(piece * piece).sum() for piece in row.split(width)]).sum()


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left[i] @ right[i] for every i, with the same bits however many others are in the call.

    A call for one product is another one than for several, and fewer than there are threads may be shared out between
    them, so that sums are in another order (seen with two threads, and with one for products with a vector). So there
    are copies beside few of them, and large ones are always made one by one.
    """
    count, fewest = len(left), torch.get_num_threads() + 1
    if left.shape[1] * right.shape[2] * left.element_size() > PIECE_BYTES:
        found = left.new_empty(count, left.shape[1], right.shape[2]) if out is None else out
        for one in range(count):
            torch.mm(left[one], right[one], out=found[one])
        return found
    if count == 0 or count >= fewest:
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    found = torch.bmm(*(_copies(side, count, fewest) for side in (left, right)))[:count]
    return found if out is None else out.copy_(found)


def _copies(side: Tensor, count: int, fewest: int) -> Tensor:
    """With copies of the last matrix, each as it lies in memory: turned ones stay turned."""
    where = torch.arange(fewest, device=side.device).clamp_(max=count - 1)
    return side.mT[where].mT if side.stride(1) == 1 else side[where]


def chunks(records: int, bytes_each: int, budget: int) -> Iterator[tuple[int, int]]:
    """Ranges of records whose per-record buffers of `bytes_each` stay within `budget`; at least one record."""
    size = max(1, min(records, budget // max(1, bytes_each)))
    for start in range(0, records, size):
        yield start, min(records, start + size)


def sum_in_blocks(factors: Tensor, rows: Tensor, size: int) -> Tensor | None:
    """sum_i factors[i] rows[i], at most `size` in one product; None where the sums of all blocks would be too much."""
    whole = len(rows) // size * size
    if whole // size * rows.shape[1] * rows.element_size() > PIECE_BYTES:
        return None
    blocks = torch.bmm(factors[:whole].view(-1, 1, size), rows[:whole].view(-1, size, rows.shape[1]))
    total = blocks.sum(0)[0]
    return total if whole == len(rows) else total.add_(factors[whole:] @ rows[whole:])


def full_precision(values: Tensor) -> Tensor:
    """Half precision becomes single: no norm and no sum is taken in less."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def expanded(factors: Tensor, dimensions: int) -> Tensor:
    """Factors (records,) shaped to multiply a tensor of that many dimensions."""
    return factors.view(-1, *[1] * (dimensions - 1))
