"""A cryptographic stream of normals that is made where it is needed, from integer operations that every device has.

The words are those of ChaCha20 (Bernstein 2008; RFC 8439): block n of the stream is the cipher's block function of a
key of 256 bits at the counter n. They are the same on every device, bit by bit, and the same as OpenSSL's. A key is
used for one request and never again; it comes from a stream of the host that the operating system has keyed.

Normals come from the transform of Box and Muller as in `confide.mechanism.noise`, in single precision. Four words make
two of them:

    U = (j + v) / 2^30,     j of 30 bits, v of 64 bits where j < 2^10, else v = 1/2;     V of 32 bits.

So the tail ends at sqrt(2 * 95 log 2) = 11.47 standard deviations, and nothing depends on which numbers come up: no
branch, and no word that the host has to wait for.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BLOCKS_AT_ONCE = 1 << 16
"""Blocks of 16 words that are made together: 4 MB, and as much for every buffer."""
WORTH_IT = 1 << 18
"""The cipher takes about a thousand small kernels, some milliseconds; so many normals take the host as long."""
REFINED_BELOW = 1 << 10  # U < 2^-20, as on the host
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_ROTATIONS = (16, 12, 8, 7)  # of the four steps of a quarter round, in the order of the cipher


def key_from(generator: torch.Generator | None) -> bytes:
    """A key for numbers that no privacy rests on: from the generator of a method."""
    words = torch.randint(0, 1 << 32, (8,), generator=generator)
    return np.asarray(words.tolist(), dtype="<u4").tobytes()


def words(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    """Words `first * 16` and on of the stream of this key, as (16, blocks) 32-bit integers."""
    start = _state(key, first, blocks, device)
    rows = [row.clone() for row in start.split(4)]
    room = torch.empty_like(rows[0])
    for _ in range(10):
        _quarters(rows, room)
        _turn(rows, 1)  # the diagonals become columns
        _quarters(rows, room)
        _turn(rows, -1)
    return torch.cat(rows).add_(start)


def _state(key: bytes, first: int, blocks: int, device: torch.device) -> Tensor:
    if len(key) != 32:
        raise ValueError(f"key: has {len(key)} bytes; needs 32")
    if first + blocks > 1 << 31:
        raise ValueError(f"first={first}: the stream of one key ends after 2^31 blocks; take another key")
    fixed = np.concatenate([np.asarray(_CONSTANTS, dtype="<u4"), np.frombuffer(key, dtype="<u4")]).view("<i4")
    column = torch.tensor(fixed.tolist(), dtype=torch.int32).view(-1, 1).to(device)
    counter = torch.arange(first, first + blocks, device=device).to(torch.int32).view(1, -1)
    return torch.cat([column.expand(-1, blocks), counter, torch.zeros(3, blocks, dtype=torch.int32, device=device)])


def _quarters(rows: list[Tensor], room: Tensor) -> None:
    """The quarter round on all columns. Sums wrap around at 2^32, as integers of torch do."""
    a, b, c, d = rows
    for turn, (onto, by, changed) in enumerate(((a, b, d), (c, d, b), (a, b, d), (c, d, b))):
        onto.add_(by)
        changed.bitwise_xor_(onto)
        _rotate_(changed, _ROTATIONS[turn], room)


def _rotate_(values: Tensor, count: int, room: Tensor) -> None:
    """To the left. A shift to the right brings copies of the sign along, which are cut off."""
    torch.bitwise_right_shift(values, 32 - count, out=room)
    room.bitwise_and_((1 << count) - 1)
    values.bitwise_left_shift_(count).bitwise_or_(room)


def _turn(rows: list[Tensor], by: int) -> None:
    for row in (1, 2, 3):
        rows[row] = rows[row].roll(-by * row, 0)


def normal_(out: Tensor, std: float, key: bytes) -> Tensor:
    """Overwrite `out` (contiguous, float32) with independent N(0, std^2) draws of the stream of a key."""
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise TypeError(f"out: is {out.dtype} of strides {out.stride()}; needs contiguous float32")
    flat, done, first = out.detach().view(-1), 0, 0
    while done < len(flat):
        blocks = min(BLOCKS_AT_ONCE, -(-(len(flat) - done) // 8))
        pairs = box_muller(words(key, first, blocks, out.device))
        count = min(8 * blocks, len(flat) - done)
        torch.mul(pairs.narrow(0, 0, count), std, out=flat.narrow(0, done, count))
        done, first = done + count, first + blocks
    return out


def box_muller(drawn: Tensor) -> Tensor:
    """Unit normals of (16, blocks) words: eight for every block.

    -log U = log1p((1 - U) / U); integers give 1 - U and U to full relative accuracy, see `confide.mechanism.noise`.
    """
    radius_words, high, low, angle_words = drawn.view(4, 4, -1).unbind(0)
    odd = radius_words.bitwise_and(0x7FFFFFFF).bitwise_or_(1)  # 2 (j + 1/2)
    scale = 2.0**-32
    v = _unsigned(low).add_(0.5).mul_(scale).add_(_unsigned(high)).mul_(scale)
    twice = torch.where(odd < 2 * REFINED_BELOW, (odd - 1).float().add_(v, alpha=2.0), odd.float())
    rest = (0x7FFFFFFF - odd).add_(1).float()  # 2^31 (1 - U)
    radius = rest.div_(twice).log1p_().mul_(2.0).sqrt_()
    angle = angle_words.float().mul_(2 * math.pi * scale)
    return torch.cat([(radius * angle.cos()).view(-1), (radius * angle.sin()).view(-1)])


def _unsigned(values: Tensor) -> Tensor:
    """32-bit words as numbers from 0 to 2^32, rounded."""
    found = values.float()
    return torch.where(values < 0, found + 2.0**32, found)
