"""What the tests of the noise streams share."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from confide import _native
from confide.mechanism.noise import BACKENDS, NoiseStream

DTYPES = [torch.float32, torch.float64]
AVAILABLE = [name for name in BACKENDS if name == "aes-ctr" or _native.kernel() is not None]
LEVEL = 1e-6  # of each statistical test; seeds are fixed, so a test that passes goes on passing

Array = NDArray[np.float64]


def draw(stream: NoiseStream, n: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Array:
    return stream.normal_(torch.empty(n, dtype=dtype), std).double().numpy()
