"""A secure sum: K parties each send whole numbers that tell nothing alone; their sum modulo 2^64 is a noisy sum.

Party r has places [S_r / g] on a lattice (`secure`), adds its share of the noise and a mask for every other party of
the step's roster:

    Y_r = [S_r / g] + N_r + sum over s > r of M_rs - sum over s < r of M_rs      (mod 2^64).

M_rs is a keystream (AES-256-CTR) under a key that r and s alone can make (X25519), for this run, step and roster.
Summed over the whole roster the masks cancel; where one is missing, or was told another roster, nothing can be read.
N_r is a discrete Gaussian of variance (s^2 + 1/12) / (K - t): K - t of them are as good as the rounded normal [s Z] of
the lattice with a trusted server, for t = parties that may be missing at a step + parties that may tell the server
everything. The proof is in docs/soundness.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.errors import Refusal
from confide.mechanism.discrete import LEAST_SIGMA, discrete_gaussians
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure import Lattice

KEY_BYTES = 32  # of X25519 and AES-256
LEAST_SHARE = 2.0**12
"""Of a share's sigma: what the lattice adds to the law of one share alone is far below any number here."""
DISTANCE = 0.01
"""The sum of the shares that are counted is within this / sigma^4 of a rounded normal, in total variation, sigma being
that of the sum: 3 / (2400 sqrt(2 pi)) sigma^-5 in every number, on 32 sigma of them, by halves; docs/soundness.md."""
MOST_DISTANCE = 2.0**-60
"""Of all numbers of a run together; what it adds to delta is this times 1 + e^epsilon."""


@dataclass(frozen=True)
class Shares:
    """How noise is shared out among `parties`.

    missing     how many of them may be missing at a step
    colluding   how many may tell the server everything they know
    """

    parties: int
    missing: int = 0
    colluding: int = 0

    def __post_init__(self) -> None:
        if self.parties < 2:
            raise Refusal(f"parties={self.parties}: a secure sum needs at least 2")
        for name, count in (("missing", self.missing), ("colluding", self.colluding)):
            if count < 0:
                raise Refusal(f"{name}={count}: must be at least 0")
        if self.counted < 1:
            raise Refusal(
                f"missing={self.missing}, colluding={self.colluding}: leave none of the {self.parties} parties whose "
                "noise could be counted on; lower them"
            )

    @property
    def counted(self) -> int:
        """K - t: so many shares are in every sum, and known to nobody else."""
        return self.parties - self.missing - self.colluding

    @property
    def least(self) -> int:
        """The smallest roster of a step."""
        return self.parties - self.missing

    def sigma(self, lattice: Lattice) -> float:
        """Of one share, in units of the lattice's spacing."""
        found = math.sqrt((lattice.sigma**2 + 1 / 12) / self.counted)
        if found < max(LEAST_SHARE, LEAST_SIGMA):
            raise Refusal(
                f"noise_multiplier: a share would be {found:g} spacings wide, and at least {LEAST_SHARE:g} are proven; "
                "use more noise"
            )
        return found

    def check(self, lattice: Lattice, numbers: int) -> None:
        """Refuse a run of so many numbers that the distance from the law that is charged for could be felt."""
        self.sigma(lattice)
        if DISTANCE * numbers / lattice.sigma**4 > MOST_DISTANCE:
            raise Refusal(
                f"noise_multiplier: noise of {lattice.sigma:g} spacings is too coarse for a secure sum of {numbers} "
                "numbers; use more noise or fewer steps"
            )

    def std(self, lattice: Lattice, replies: int) -> float:
        """Of the noise in the sum over so many parties."""
        return lattice.spacing * self.sigma(lattice) * math.sqrt(replies)


class Masks:
    """What one party hides its numbers by, in one step.

    own    its name
    keys   shared with each of the other parties of the roster, by name
    what   the run, the step and the roster, which everybody must name alike
    """

    def __init__(self, own: str, keys: Mapping[str, bytes], what: str) -> None:
        self._own, self._keys, self._what = own, dict(keys), what.encode()

    def add_(self, places: NDArray[np.uint64]) -> None:
        for other, key in self._keys.items():
            mask = _keystream(hashlib.sha256(key + self._what).digest(), len(places))
            if self._own < other:
                places += mask
            else:
                places -= mask


@dataclass(frozen=True)
class Cover:
    """What a party's places are covered by before they leave: its share of the noise, and its masks."""

    shares: Shares
    masks: Masks

    def covered(self, places: Tensor, lattice: Lattice, stream: NoiseStream) -> Tensor:
        """Whole numbers modulo 2^64, as the bits of int64."""
        noise = discrete_gaussians(stream._draw, self.shares.sigma(lattice), places.numel())
        found = (places.to(torch.int64).numpy() + noise).view(np.uint64)
        self.masks.add_(found)
        return torch.from_numpy(found.view(np.int64))


def summed(parts: Sequence[Tensor], lattice: Lattice) -> Tensor:
    """The sum of what a whole roster sent: masks cancel, and what is left is the noisy sum."""
    total = np.zeros(len(parts[0]), dtype=np.uint64)
    for part in parts:
        total += part.numpy().view(np.uint64)
    return torch.from_numpy(total.view(np.int64)).double().mul_(lattice.spacing)


def _keystream(key: bytes, words: int) -> NDArray[np.uint64]:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * words)), dtype=np.uint64)
