"""Noise on a lattice, for releases whose low-order bits must not tell either.

A floating-point sum x + z C N(0, 1) is not the Gaussian mechanism: which floating-point numbers it can reach, and how
often, depends on x down to its last bit (Mironov 2012, CCS; Haney et al. 2022, arXiv:2207.13793). With `secure=True`
everything after the clipped sum is done in whole numbers. With a spacing g, a power of two,

    R = g ( [S / g] + [s Z] ),        [.] rounding to whole numbers,   Z ~ N(0, I),   s = z C (1 + k) / g.

[S / g] is a whole number, so [S/g] + [sZ] = [ [S/g] + sZ ]: R is post-processing of the true Gaussian mechanism on
[S/g], without any error of its own. What has to be paid for is that rounding lets neighbours drift apart:
| [a] - [b] | <= |a - b| + 1 in each of d coordinates, so by Minkowski's inequality the sensitivity is at most
C + g sqrt(d). The spacing makes that less than a part in a million of C, and the noise is enlarged by

    k = g sqrt(d) / C

so the noise multiplier that is charged stays z. The reachable values are the multiples of g, whatever the records were.

[sZ] has exactly that law, given random bits. U and V of Box and Muller's transform are real numbers of which the first
62 and 64 bits are drawn; the transform in double precision is within MARGIN of its value at whatever the other bits
may be (the kernels' errors add up to 2^-46.9 at most; 2^-49 is what is seen); a value that is closer than that to the
middle between two whole numbers, and every U at either end of (0, 1), is worked out again with further bits in higher
precision (`secure_exact`), until there is no doubt. No tail is cut off.

S itself is a floating-point sum whose rounding errors are a function of all records of the batch. They are inside C
already: records are clipped to C less a share that bounds them, for every batch (`clipping.rounding`). S is given in
double precision, so that a large sum is not rounded against the lattice. Places beyond LARGEST_PLACE are cut off there,
which moves no two sums apart: so nothing overflows, however many records there are.

Not covered, here as elsewhere: the time a step takes, which depends on the size of the batch; what shared caches and
other processes on the machine may see; a record's own gradient whose last bits depend on which other records share its
matrix products; the sampling of batches, which is by 53-bit uniform numbers (a relative error of about 2^-53 / rate).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide import _native
from confide._native.process import ForkAwareLock
from confide._native.threads import threads
from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure_exact import Doubts, rounded_exactly

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Places = NDArray[np.int64]

GRID_BITS = 20  # the lattice adds less than 2^-20 of C to the sensitivity
MARGIN = 2.0**-46  # in units of the standard deviation
WIDEST_SIGMA = 36  # log2 of the noise in units of the spacing; more would leave too much in doubt
LARGEST_PLACE = 2.0**51  # whole numbers up to here add up without rounding in double precision
CHUNK = 1 << 14  # pairs; what a thread works on fits its cache
GROUP = 32  # chunks; a million normals


@dataclass(frozen=True)
class Lattice:
    """spacing  g, a power of two
    sigma    s, the noise in units of the spacing
    """

    spacing: float
    sigma: float

    @property
    def std(self) -> float:
        return self.spacing * self.sigma


def lattice_for(mechanism: SampledGaussian, size: int) -> Lattice:
    """Spacing and noise for sums of `size` numbers; a function of public facts alone."""
    clip, noise = mechanism.clip, mechanism.noise_multiplier
    fine = GRID_BITS + math.ceil(math.log2(max(size, 1)) / 2)
    room_for_noise = WIDEST_SIGMA - 1 - math.ceil(math.log2(noise))
    room_for_sums = 50 - math.ceil(math.log2(max(4 * mechanism.expected_batch, 4)))
    bits = max(min(fine, room_for_noise, room_for_sums), 1)
    spacing = 2.0 ** (math.floor(math.log2(clip)) - bits)
    growth = spacing * math.sqrt(size) / clip
    return Lattice(spacing, noise * clip * (1 + growth) / spacing)


class _Space:
    """Room for the words of one chunk, for the whole normals they become and for the places that are in doubt."""

    def __init__(self) -> None:
        self._buffer = bytearray(16 * CHUNK + 16)
        self._words: Words = np.frombuffer(self._buffer, dtype=np.uint64, count=2 * CHUNK)
        self._found, self._doubtful = np.empty(2 * CHUNK), np.empty(2 * CHUNK, dtype=np.int64)
        self.words, self.found = self._words, self._found

    def fill(self, stream: NoiseStream, pairs: int) -> None:
        stream._fill_words(self._buffer, 2 * pairs)
        self.words, self.found = self._words[: 2 * pairs], self._found[: 2 * pairs]

    def transform(self, kernels: _native.SecureKernels | None, sigma: float) -> Places:
        """Fill `found`; the places that are in doubt come back."""
        if kernels is None:
            self.found, doubtful = _by_torch(self.words, sigma)
            return doubtful
        places = (self.words.ctypes.data, self.found.ctypes.data, len(self.words) // 2)
        room = (self._doubtful.ctypes.data, len(self._doubtful))
        return self._doubtful[: kernels.rounded_normals(*places, sigma, MARGIN * sigma, *room)]


class LatticeNoise:
    """Adds noise on a lattice; the random bits are the stream's.

    Chunks are drawn in groups: the words of a group, then further bits for its places in doubt. So the values do not
    depend on the number of threads that work on a group.
    """

    def __init__(self, stream: NoiseStream, *, native: bool | None = None) -> None:
        self._stream = stream
        kernels = _native.secure_kernels() if native in (None, True) else None
        if native and kernels is None:
            raise Refusal("native=True: the native kernel is not installed here")
        self._kernels = kernels
        self._spaces: list[_Space] = []
        self._lock = ForkAwareLock()  # threads must not share a space

    def add_(self, total: Tensor, mechanism: SampledGaussian) -> float:
        """Round `total` (contiguous, one dimension) to the lattice and add the noise, in place; its std comes back."""
        lattice = lattice_for(mechanism, total.numel())
        with self._lock.held():
            for start in range(0, total.numel(), GROUP * 2 * CHUNK):
                group = total[start : start + GROUP * 2 * CHUNK]
                parts = group.split(2 * CHUNK)
                for part, noise in zip(parts, self._chunks(group.numel(), lattice.sigma), strict=True):
                    self._add(noise, part, lattice.spacing)
        return lattice.std

    def place_(self, total: Tensor, mechanism: SampledGaussian, members: int) -> Lattice:
        """One member's own sum (double precision) as whole numbers of spacings, in place, and the lattice of all.

        Places of all members are added up, without rounding, and then the noise: g (sum over r of [S_r / g] + [s Z]). A
        record is in one S_r alone, so the sensitivity is what it is for one member, and so is the noise.
        """
        lattice = lattice_for(mechanism, total.numel())
        most = LARGEST_PLACE / members
        total.mul_(1 / lattice.spacing).round_().clamp_(-most, most)
        return lattice

    def add_whole_(self, places: Tensor, sigma: float) -> Tensor:
        """Add [sigma Z] to places, in place."""
        for group in places.split(GROUP * 2 * CHUNK):
            group.add_(torch.from_numpy(self.whole_normals(group.numel(), sigma)))
        return places

    def whole_normals(self, count: int, sigma: float) -> Floats:
        """[sigma Z] for `count` independent normals, at most a group of them."""
        with self._lock.held():
            return np.concatenate([np.empty(0), *self._chunks(count, sigma)])

    def _chunks(self, count: int, sigma: float) -> list[Floats]:
        """The normals of one group, chunk by chunk; a chunk is overwritten by the next group."""
        sizes = [min(2 * CHUNK, count - start) for start in range(0, count, 2 * CHUNK)]
        while len(self._spaces) < len(sizes):
            self._spaces.append(_Space())
        work: list[tuple[_Space, Callable[[], Places]]] = []
        alone = len(sizes) == 1 or torch.get_num_threads() == 1 or self._kernels is None
        for size, space in zip(sizes, self._spaces, strict=False):
            space.fill(self._stream, (size + 1) // 2)
            transform = partial(space.transform, self._kernels, sigma)
            work.append((space, transform if alone else threads().submit(transform).result))
        in_doubt = [(space, result()) for space, result in work]
        if any(len(places) for _, places in in_doubt):
            doubts = Doubts.of([(space.words, places) for space, places in in_doubt])
            settled = rounded_exactly(doubts, sigma, self._stream._draw)
            for space, places in in_doubt:
                space.found[places], settled = settled[: len(places)], settled[len(places) :]
        return [space.found[:size] for size, (space, _) in zip(sizes, in_doubt, strict=True)]

    def _add(self, noise: Floats, part: Tensor, spacing: float) -> None:
        if self._kernels is not None:
            add = self._kernels.add_float if part.dtype == torch.float32 else self._kernels.add_double
            add(noise.ctypes.data, part.data_ptr(), part.numel(), spacing, LARGEST_PLACE)
            return
        place = part.double().mul_(1 / spacing).round_().clamp_(-LARGEST_PLACE, LARGEST_PLACE)
        part.copy_(place.add_(torch.from_numpy(noise)).mul_(spacing))


def _by_torch(words: Words, sigma: float) -> tuple[Floats, Places]:
    """Box-Muller in double precision; -log U = log1p((1 - U) / U) with both from whole numbers."""
    radii, angles = torch.from_numpy(words.view(np.int64).copy()).view(2, -1)
    whole = radii.bitwise_and(2**63 - 1).bitwise_or_(1)
    odd, complement = whole.double(), (2**63 - 1 - whole + 1).double()
    radius = torch.log1p(complement / odd).mul_(2.0).sqrt_().mul_(sigma)
    angle = angles.double().mul_(2 * math.pi * 2.0**-64)
    central = (odd >= 2.0**48) & (complement >= 2.0**43)
    values = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)])
    values = torch.where(central, values, 0.5).flatten()
    rounded = values.round()
    doubtful = (0.5 - (values - rounded).abs() <= MARGIN * sigma).nonzero().flatten()
    return rounded.numpy(), doubtful.numpy()
