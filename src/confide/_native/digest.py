"""A code of 64 bits for the numbers of a tensor (`digest.cpp`): equal numbers have equal codes, others nearly never.

The key is the process's own, so that nothing can be written with another code in mind.
"""

from __future__ import annotations

import ctypes
import math
import os

import torch
from torch import Tensor

from confide._native.loader import library

KEY_BYTES = 4 * (256 + 8) + 8  # of a block of 256 words, of the shift between its two sums, and a point


# Made at once, since inside of a region nobody may ask for where something lies (`clipping.watched`).
_KEY = ctypes.create_string_buffer(os.urandom(KEY_BYTES), KEY_BYTES)


def digest(values: Tensor) -> int:
    """Of every bit, in whatever order it lies in memory."""
    return _code(values.detach().contiguous(), 0)


def digest_of_numbers(values: Tensor) -> int:
    """Zeros have no sign here, and there is one way to write what is no number."""
    values = values.detach().contiguous()
    if not values.is_floating_point():
        return _code(values, 0)
    if values.dtype in (torch.float32, torch.float64) and library() is not None:
        return _code(values, values.element_size())
    return _code((values + 0.0).masked_fill_(values.isnan(), math.nan), 0)


def _code(values: Tensor, real: int) -> int:
    values, opened = values.cpu(), library()
    if opened is None:
        return hash(values.view(-1).view(torch.uint8).numpy().tobytes())
    size = values.numel() * values.element_size()
    found: int = opened.confide_digest(values.data_ptr(), size, real, _KEY)
    return found
