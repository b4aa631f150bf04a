"""Noise streams: cryptographic randomness for the noise, for sampling and for the methods' own draws.

The keystream is AES-256 in counter mode (OpenSSL, through `cryptography`), keyed by the operating system. A
128-bit counter runs on from call to call, so no block of the keystream is ever used twice. On a processor
with AES instructions this is faster than the (predictable) generator behind `torch.Tensor.normal_`.

Normals come from the transform of Box and Muller (1958): with U, V independent and uniform on (0, 1),

    R = sqrt(-2 log U),    Z1 = R cos(2 pi V),    Z2 = R sin(2 pi V)

are independent and N(0, 1). What remains of the discreteness of U and V:

* float32: U = (j + 1/2) / 2^30 with a 30-bit j. Where U < 2^-20 (one pair in a million) 64 further bits v
  refine it to (j + v) / 2^30. The tail thus ends at sqrt(2 * 95 log 2) = 11.47 standard deviations, beyond
  which a normal lies with probability 2e-30; a 32-bit U alone would end it at 6.76 (1.4e-11, too often for
  millions of normals a step). Small radii keep their relative accuracy. V has 32 bits.
* float64: 62 bits for j and 64 for v, so the tail ends at 13.27; 64 bits for V, rounded to 53.
* Every value is a rounded floating-point number. A secure generator does not remove the attacks on the
  low-order bits of floating-point noise (Mironov, 2012, CCS).

With the native kernel (built at installation where a compiler exists) float32 blocks are transformed by
vectorised C++ instead of torch; the keystream is the same, and so are the values up to rounding. Long requests
are then shared out to as many threads as torch has, each at its own stretch of the counter.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from confide import _native
from confide._native.process import ForkAwareLock, mark
from confide._native.threads import threads
from confide.devices import HOST, moved, stream
from confide.errors import Refusal

__all__ = ["BACKENDS", "NoiseStream"]

BACKENDS = ("aes-ctr-native", "aes-ctr")

# Normals are made in blocks: PAIRS words for radii and PAIRS words for angles become PAIRS cosines and PAIRS
# sines. A block depends on its own stretch of keystream alone, so the way a request is cut into calls,
# chunks or threads does not change a value.
PAIRS = 4096
BLOCK = 2 * PAIRS
RESERVOIR_BLOCKS = 4  # drawn ahead for small requests: 32768 normals
TORCH_CHUNK = 64  # blocks; the torch calls on a smaller chunk would cost more than its arithmetic
NATIVE_CHUNK = 16  # blocks; half a megabyte of keystream stays in the cache
THREAD_BLOCKS = 24  # for a thread of its own: 200 000 normals, several times what it costs to wake it

REKEYED_SECONDS = 1.0  # a new key costs tens of microseconds, so every second of drawing has its own
REFINED_LOG2 = 20  # U < 2^-20 is refined: rare enough to cost nothing
NORMALS, REFINEMENTS, UNIFORMS = range(3)  # lanes of the counter

_WORD = {torch.float32: torch.int32, torch.float64: torch.int64}
_LIMITS = {dtype: torch.finfo(dtype) for dtype in _WORD}


class _Keystream:
    """AES-256-CTR whose counter starts at lane * 2^120, so that the lanes of one key never meet."""

    _zeros = memoryview(b"")  # what is encrypted; shared, for nobody writes to it

    def __init__(self, cipher: algorithms.AES, lane: int, start: int = 0) -> None:
        self._cipher, self._lane = cipher, lane
        self._seek(start)

    def _seek(self, position: int) -> None:
        """Go on at that many bytes, a whole count of 16, from the start of the lane."""
        counter = ((self._lane << 120) + position // 16).to_bytes(16, "big")
        self._encryptor = Cipher(self._cipher, modes.CTR(counter)).encryptor()
        self.bytes_drawn = position

    def split_off(self, sizes: list[int]) -> list[_Keystream]:
        """Keystreams for the next stretches of so many bytes, whole counts of 16; this one goes on behind them."""
        starts = list(itertools.accumulate(sizes, initial=self.bytes_drawn))
        self._seek(starts.pop())
        return [_Keystream(self._cipher, self._lane, start) for start in starts]

    def fill(self, buffer: bytearray, size: int) -> None:
        """Overwrite the first `size` bytes of a buffer that has 16 to spare (the cipher insists)."""
        if len(_Keystream._zeros) < size:
            _Keystream._zeros = memoryview(bytes(size))
        self.bytes_drawn += self._encryptor.update_into(_Keystream._zeros[:size], buffer)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of 64 bits."""
        self.bytes_drawn += 8 * count
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype=np.uint64)


class _NoiseWorkspace:
    """Room for one chunk of keystream and for what turns it into normals of one dtype."""

    def __init__(self, dtype: torch.dtype, blocks: int) -> None:
        self.dtype = dtype
        self.blocks = blocks
        self.word_bits: int = torch.finfo(dtype).bits
        self.half_range: int = 1 << (self.word_bits - 1)
        self.block_bytes = BLOCK * self.word_bits // 8
        self.buffer = bytearray(blocks * self.block_bytes + 16)
        words = torch.frombuffer(self.buffer, dtype=_WORD[dtype], count=blocks * BLOCK)
        self.words = words.view(blocks, 2, PAIRS)
        self._scratch: list[Tensor] = []

    def scratch(self, blocks: int) -> list[Tensor]:
        """A buffer for words and three for floats, made at first use: the native kernel needs none."""
        if not self._scratch:
            dtypes = (_WORD[self.dtype], self.dtype, self.dtype, self.dtype)
            self._scratch = [torch.empty(self.blocks, PAIRS, dtype=dtype) for dtype in dtypes]
        return [part[:blocks] for part in self._scratch]

    def odd_words(self, blocks: int) -> Tensor:
        """U as an odd integer over 2^(bits - 1): the radius words without sign bit, their last bit set."""
        return torch.bitwise_and(self.words[:blocks, 0], self.half_range - 1).bitwise_or_(1)


_Transform = Callable[[_NoiseWorkspace, Tensor, float], bool]


def _torch_transform(space: _NoiseWorkspace, out: Tensor, std: float) -> bool:
    """Box-Muller from the words in `space` into `out` (blocks, 2, PAIRS); true if a radius is to be refined.

    -log U = log1p((1 - U) / U), and integers give both 1 - U and U to full relative accuracy, so neither the
    small radii nor the large ones suffer from rounding.
    """
    words = space.words[: len(out)]
    odd, radius, uniform, wave = space.scratch(len(out))
    torch.bitwise_or(words[:, 0], 1 - space.half_range, out=odd)  # sign and last bit set: -(1 - U)
    refine = int(odd.amin()) < _refined_below(space.word_bits) - space.half_range
    radius.copy_(odd)
    uniform.copy_(odd.bitwise_xor_(space.half_range - 2))  # sign bit flipped, then negated: -U
    radius.div_(uniform).log1p_().mul_(2.0).sqrt_()
    angle = uniform.copy_(words[:, 1]).mul_(2 * math.pi * 2.0**-space.word_bits)
    torch.mul(radius, torch.cos(angle, out=wave), out=out[:, 0])
    torch.mul(radius, torch.sin(angle, out=wave), out=out[:, 1])
    if std != 1.0:
        out.mul_(std)
    return refine


def _native_transform(kernel: _native.Kernel) -> _Transform:
    def transform(space: _NoiseWorkspace, out: Tensor, std: float) -> bool:
        least = kernel(space.words.data_ptr(), out.data_ptr(), len(out), PAIRS, std)
        return least < _refined_below(32)

    return transform


def _refined_below(word_bits: int) -> int:
    """The odd words under this stand for U < 2^-20."""
    return 1 << (word_bits - 1 - REFINED_LOG2)


@dataclass(frozen=True)
class _Refinement:
    """The pairs of tiny U = (j + v) / 2^(bits - 2) in one chunk; they wait for 64 fresh bits each, the v."""

    out: Tensor
    blocks: Tensor
    places: Tensor
    j: NDArray[np.float64]
    angle: NDArray[np.float64]
    bits: int

    @classmethod
    def found_in(cls, space: _NoiseWorkspace, out: Tensor) -> _Refinement:
        odd = space.odd_words(len(out))
        blocks, places = (odd < _refined_below(space.word_bits)).nonzero(as_tuple=True)
        j = (odd[blocks, places] >> 1).double().numpy()
        angle = space.words[blocks, 1, places].double().numpy() * (2 * math.pi * 2.0**-space.word_bits)
        return cls(out, blocks, places, j, angle, space.word_bits - 2)

    def apply(self, std: float, keystream: _Keystream) -> None:
        v = (keystream.words(len(self.j)).astype(np.float64) + 0.5) * 2.0**-64
        radius = np.sqrt(2.0 * (self.bits * math.log(2.0) - np.log(self.j + v)))
        for row, wave in enumerate((np.cos(self.angle), np.sin(self.angle))):
            self.out[self.blocks, row, self.places] = torch.from_numpy(radius * wave).to(self.out.dtype) * std


class _NativeGaussian:
    """The unit normals of one dtype as one endless sequence, cut to the lengths asked for."""

    def __init__(self, dtype: torch.dtype, backend: str, bulk: _Keystream, refinements: _Keystream) -> None:
        kernel = _native.kernel() if backend == "aes-ctr-native" and dtype == torch.float32 else None
        self._native = kernel is not None
        self._transform = _torch_transform if kernel is None else _native_transform(kernel)
        self._spaces = [_NoiseWorkspace(dtype, TORCH_CHUNK if kernel is None else NATIVE_CHUNK)]
        self._bulk, self._refinements = bulk, refinements
        self._ahead = torch.empty(RESERVOIR_BLOCKS * BLOCK, dtype=dtype)
        # Served through numpy, whose calls on short arrays take a third of the time of torch's.
        self._reservoir = self._ahead.numpy()
        self._next = len(self._reservoir)  # the first value of the reservoir that nobody has had yet

    def write(self, out: Tensor, std: float) -> None:
        size = out.numel()
        done = self._serve(out, std)
        blocks = (size - done) // BLOCK
        if blocks:
            self._make(out[done : done + blocks * BLOCK].view(blocks, 2, PAIRS), std)
            done += blocks * BLOCK
        while done < size:
            self._make(self._ahead.view(RESERVOIR_BLOCKS, 2, PAIRS), 1.0)
            self._next = 0
            done += self._serve(out[done:], std)

    def _serve(self, out: Tensor, std: float) -> int:
        """Hand out what the reservoir still holds, and move past it."""
        start, stop = self._next, min(self._next + out.numel(), len(self._reservoir))
        self._next = stop
        np.multiply(self._reservoir[start:stop], self._reservoir.dtype.type(std), out=out.numpy()[: stop - start])
        return stop - start

    def _make(self, out: Tensor, std: float) -> None:
        """Fill whole blocks, on several threads where that pays; the rare refinements follow in order."""
        workers = min(torch.get_num_threads(), len(out) // THREAD_BLOCKS) if self._native else 1
        if workers > 1:
            parts = list(out.tensor_split(workers))
            while len(self._spaces) < workers:
                self._spaces.append(_NoiseWorkspace(out.dtype, NATIVE_CHUNK))
            streams = self._bulk.split_off([len(part) * self._spaces[0].block_bytes for part in parts])
            waiting = [
                threads().submit(self._fill, part, std, stream, space)
                for part, stream, space in zip(parts[1:], streams[1:], self._spaces[1:], strict=False)
            ]
            found = self._fill(parts[0], std, streams[0], self._spaces[0])
            for each in waiting:
                found += each.result()
        else:
            found = self._fill(out, std, self._bulk, self._spaces[0])
        for refinement in found:
            refinement.apply(std, self._refinements)

    def _fill(self, out: Tensor, std: float, stream: _Keystream, space: _NoiseWorkspace) -> list[_Refinement]:
        found = []
        for chunk in out.split(space.blocks):
            stream.fill(space.buffer, len(chunk) * space.block_bytes)
            if self._transform(space, chunk, std):
                found.append(_Refinement.found_in(space, chunk))
        return found


class NoiseStream:
    """One independent stream of randomness with a key of its own.

    `seed=None` takes the key from the operating system: only such a stream may carry a privacy claim. A seed,
    for tests, derives the key as SHA-256 of the seed; `seeded` tells the two apart.

    The normals of each dtype form one sequence, in order and without gaps: filling 1000 and then 1000 gives
    the values of filling 2000 at once, bit for bit, as long as no other dtype is filled in between (the
    dtypes share one keystream, block by block). Uniforms and integers share a sequence of their own, which
    does not move the normals.

    Safe to use from several threads. A forked child takes a key of its own (for a seeded stream, from the
    seed and the process id), so that parent and child never share noise, whoever made the fork: every draw looks at
    the process's mark (`confide._native.process`). For the same reason a stream can be neither copied nor pickled. A
    child that draws also puts torch on one thread, for the others are gone. Fresh bits of the operating system are
    mixed into the key every second in which something is drawn: two copies of a virtual machine that were started from
    one snapshot share at most what the second before it would have drawn.
    `backend` is "aes-ctr-native" where the native kernel is at hand, "aes-ctr" otherwise.
    """

    def __init__(self, seed: int | None = None, *, backend: str | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed={seed!r}: must be an integer, or None for a key from the operating system")
        if backend not in (None, *BACKENDS):
            raise Refusal(f"backend={backend!r}: must be None or one of {', '.join(BACKENDS)}")
        if backend == "aes-ctr-native" and _native.kernel() is None:
            raise Refusal(f"backend={backend!r}: the native kernel is not installed here; use 'aes-ctr'")
        self._seed = seed
        self._forked = False
        self._backend = backend or ("aes-ctr" if _native.kernel() is None else "aes-ctr-native")
        self._lock = ForkAwareLock()
        self._drawn_before = 0
        self._rekey(os.urandom(32) if seed is None else _derived_key(seed))

    def _rekey(self, key: bytes) -> None:
        self._mark, self._keyed = mark(), time.monotonic()
        self._bulk, self._refinements, self._words = (
            _Keystream(algorithms.AES(key), lane) for lane in (NORMALS, REFINEMENTS, UNIFORMS)
        )
        self._gaussians: dict[torch.dtype, _NativeGaussian] = {}

    def _renew(self) -> None:
        """A key that is this process's own and holds fresh bits of the system. With the lock held."""
        if self._mark != mark():
            self._after_fork()
        elif self._seed is None and time.monotonic() - self._keyed > REKEYED_SECONDS:
            old = self._words.words(4).tobytes()
            self._drawn_before = self.bytes_drawn
            self._rekey(hashlib.sha256(old + os.urandom(32)).digest())

    def _after_fork(self) -> None:
        self._forked = True
        self._rekey(os.urandom(32) if self._seed is None else _derived_key(self._seed, os.getpid()))

    @property
    def seeded(self) -> bool:
        """True if the key came from a seed: no privacy claim may rest on this stream."""
        return self._seed is not None

    @property
    def backend(self) -> str:
        """What makes the float32 normals: one of `BACKENDS`."""
        return self._backend

    @property
    def bytes_drawn(self) -> int:
        """How far the counters have run, over all lanes. It only grows."""
        lanes = (self._bulk, self._refinements, self._words)
        return self._drawn_before + sum(lane.bytes_drawn for lane in lanes)

    def normal_(self, out: Tensor, std: float) -> Tensor:
        """Overwrite `out` (contiguous, float32 or float64) with independent N(0, std^2) draws; return it.

        On another device than the host a long vector is filled there, by a stream of its own (`confide.devices.stream`)
        under a key that is drawn here for this request alone; a short one, or one in double precision, is filled here
        and copied.
        """
        _check_fill(out, std)
        flat = out.detach().view(-1)
        if std == 0.0:
            flat.zero_()
            return out
        if out.device.type != HOST.type:
            if out.dtype == torch.float32 and out.numel() >= stream.WORTH_IT:
                return stream.normal_(out, float(std), self._draw(4).tobytes())
            flat.copy_(moved(self.normal_(torch.empty(out.numel(), dtype=out.dtype), std), out.device))
            return out
        with self._lock.held():
            self._renew()
            if out.dtype not in self._gaussians:
                if self._forked:  # torch's threads did not survive the fork: waiting for them would never end
                    torch.set_num_threads(1)
                gaussian = _NativeGaussian(out.dtype, self._backend, self._bulk, self._refinements)
                self._gaussians[out.dtype] = gaussian
            self._gaussians[out.dtype].write(flat, float(std))
        return out

    def uniform(self, n: int) -> NDArray[np.float64]:
        """`n` uniform draws from {0, 1, ..., 2^53 - 1} / 2^53."""
        return (self._draw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, high: int, n: int) -> NDArray[np.int64]:
        """`n` exactly uniform draws from {0, ..., high - 1}: words past the last multiple are refused."""
        if not 0 < high <= 2**62:
            raise Refusal(f"high={high}: must be between 1 and 2**62")
        last = np.uint64(2**64 - 1 - 2**64 % high)
        kept = np.empty(0, dtype=np.uint64)
        while len(kept) < n:
            words = self._draw(n - len(kept))
            kept = np.concatenate([kept, words[words <= last]])
        return (kept % np.uint64(high)).astype(np.int64)

    def permutation(self, n: int) -> NDArray[np.int64]:
        """A uniformly random order of 0, ..., n - 1: ranks of 64-bit words, drawn again if two are equal."""
        while True:
            words = self._draw(n)
            order = np.argsort(words, kind="stable")
            ranked = words[order]
            if (ranked[1:] != ranked[:-1]).all():
                return order.astype(np.int64, copy=False)

    def choice_without_replacement(self, n: int, k: int) -> NDArray[np.int64]:
        """`k` distinct members of {0, ..., n - 1}, in random order, every ordered choice equally likely.

        A small share is the first k distinct values of a run of uniform integers; a large one begins a
        permutation.
        """
        if not 0 <= k <= n:
            raise Refusal(f"k={k}: must be between 0 and n={n}")
        if 4 * k > n:
            return self.permutation(n)[:k]
        chosen = np.empty(0, dtype=np.int64)
        while len(chosen) < k:
            chosen = np.concatenate([chosen, self.integers(n, k - len(chosen))])
            first = np.unique(chosen, return_index=True)[1]
            chosen = chosen[np.sort(first)]
        return chosen

    def _fill_words(self, buffer: bytearray, count: int) -> None:
        """The next `count` words of 64 bits into a buffer that has 16 bytes to spare."""
        with self._lock.held():
            self._renew()
            self._words.fill(buffer, 8 * count)

    def _draw(self, count: int) -> NDArray[np.uint64]:
        if count < 0:
            raise Refusal(f"n={count}: must be >= 0")
        with self._lock.held():
            self._renew()
            return self._words.words(count)

    def __repr__(self) -> str:
        return f"NoiseStream(seeded={self.seeded}, backend={self.backend!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a NoiseStream cannot be copied or pickled: its noise would be used twice; make a new one")

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        self.__reduce_ex__(2)


def _derived_key(seed: int, process: int | None = None) -> bytes:
    text = f"confide noise stream, seed {seed}" + ("" if process is None else f", process {process}")
    return hashlib.sha256(text.encode()).digest()


def _check_fill(out: Tensor, std: float) -> None:
    if out.dtype not in _WORD:
        raise TypeError(f"out.dtype={out.dtype}: must be torch.float32 or torch.float64")
    if out.device.type == "meta":
        raise Refusal("out.device=meta: holds no numbers, so that nothing would be noise; use a device that does")
    if not out.is_contiguous():
        raise Refusal(f"out.stride()={out.stride()}: must be contiguous; fill a new tensor and copy")
    limits = _LIMITS[out.dtype]
    # A std that underflows would silently write no noise, and one that overflows infinities.
    if not (std == 0.0 or limits.tiny <= std <= limits.max / 16):
        raise Refusal(f"std={std}: must be 0, or between {limits.tiny:g} and {limits.max / 16:g}")
