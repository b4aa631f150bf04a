"""The normals of a noise stream: their law, their tails, the freshness of every block; on both back ends."""

from __future__ import annotations

import hashlib
import math
import threading

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from confide.mechanism import noise
from confide.mechanism.noise import BLOCK, PAIRS, NoiseStream
from tests.mechanism.noise_tools import AVAILABLE, DTYPES, LEVEL, Array, draw


@pytest.fixture(params=AVAILABLE)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def accepts_sigma(sample: Array, sigma: float) -> bool:
    """Two-sided chi-square test that the sample has mean zero and standard deviation sigma."""
    statistic = float((sample**2).sum()) / sigma**2
    lower, upper = stats.chi2.ppf([LEVEL / 2, 1 - LEVEL / 2], len(sample))
    return bool(lower < statistic < upper)


def accepts_tail(sample: Array, threshold: float) -> bool:
    """Two-sided Poisson test of how many |z| exceed the threshold."""
    mean = len(sample) * 2 * stats.norm.sf(threshold)
    count = int((np.abs(sample) > threshold).sum())
    return bool(min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)) > LEVEL / 2)


def uncorrelated(first: Array, second: Array) -> bool:
    """Neither the values nor their squares go together."""
    limit = stats.norm.isf(LEVEL / 4) / math.sqrt(len(first))
    products = [(first * second).mean(), ((first**2 - 1) * (second**2 - 1)).mean() / 2]
    return all(abs(product) < limit for product in products)


class Planted:
    """A keystream whose words are given: `radius` and `angle` for every pair, or what a function returns."""

    def __init__(self, radius: int, angle: int, dtype: torch.dtype, further: int | None = None) -> None:
        self.radius, self.angle, self.further = radius, angle, further
        self.dtype = np.int32 if dtype == torch.float32 else np.int64
        self.bytes_drawn = 0

    def fill(self, buffer: bytearray, size: int) -> None:
        words = np.frombuffer(buffer, dtype=self.dtype, count=size // np.dtype(self.dtype).itemsize)
        words.reshape(-1, 2, PAIRS)[:, 0] = self.radius
        words.reshape(-1, 2, PAIRS)[:, 1] = self.angle

    def words(self, count: int) -> NDArray[np.uint64]:
        assert self.further is not None
        return np.full(count, self.further, dtype=np.uint64)


def planted_radius(backend: str, dtype: torch.dtype, radius: int, further: int = 0) -> float:
    """The radius made of a given word (angle zero, so that the cosine half is the radius itself)."""
    stream = NoiseStream(seed=0, backend=backend)
    stream._bulk = stream._refinements = Planted(radius, 0, dtype, further)  # type: ignore[assignment]
    return float(draw(stream, 1, dtype)[0])


# The law


@pytest.mark.parametrize("dtype", DTYPES)
def test_normals_follow_the_standard_normal_law(backend: str, dtype: torch.dtype) -> None:
    sample = draw(NoiseStream(seed=1, backend=backend), 300_000, dtype)
    assert stats.kstest(sample, "norm").pvalue > LEVEL
    bins = np.minimum((stats.norm.cdf(sample) * 256).astype(int), 255)
    assert stats.chisquare(np.bincount(bins, minlength=256)).pvalue > LEVEL
    z = [(sample.mean(), 1.0), ((sample**3).mean(), 15.0), ((sample**4).mean() - 3, 96.0)]
    assert all(abs(moment) < 5 * math.sqrt(variance / len(sample)) for moment, variance in z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.37, 1234.5])
def test_the_right_sigma_is_accepted_and_three_per_cent_off_is_not(
    backend: str, dtype: torch.dtype, sigma: float
) -> None:
    sample = draw(NoiseStream(seed=2, backend=backend), 200_000, dtype, sigma)
    assert accepts_sigma(sample, sigma)
    for wrong in (0.97, 1.03):
        assert not accepts_sigma(sample, wrong * sigma)
        planted_fault = draw(NoiseStream(seed=2, backend=backend), 200_000, dtype, wrong * sigma)
        assert not accepts_sigma(planted_fault, sigma)


@pytest.mark.parametrize("threshold", [3.0, 4.0, 5.0])
def test_tails_hold_as_many_as_they_should_and_a_cut_tail_is_noticed(backend: str, threshold: float) -> None:
    sample = draw(NoiseStream(seed=3, backend=backend), 30_000_000)
    assert accepts_tail(sample, threshold)
    assert not accepts_tail(np.clip(sample, -threshold, threshold), threshold)
    assert not accepts_tail(2.0 * sample, threshold)


def test_both_halves_of_a_pair_are_independent(backend: str) -> None:
    blocks = draw(NoiseStream(seed=4, backend=backend), 40 * BLOCK).reshape(40, 2, PAIRS)
    cosines, sines = blocks[:, 0].ravel(), blocks[:, 1].ravel()
    assert uncorrelated(cosines, sines)
    assert uncorrelated(cosines[1:], cosines[:-1])
    angle = np.arctan2(sines, cosines) / (2 * math.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > LEVEL
    # A radius used for two angles in turn, as a slip of an index would make it, does not pass.
    radius = np.hypot(cosines, sines)
    assert not uncorrelated(cosines, radius * np.roll(sines / radius, 1))


# The tail and the small radii, from planted keystream


@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 11.47), (torch.float64, 13.27)])
def test_the_lowest_word_reaches_far_beyond_eight_and_a_half_sigma(
    backend: str, dtype: torch.dtype, end: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planted_radius(backend, dtype, radius=0) == pytest.approx(end, abs=0.01)
    assert planted_radius(backend, dtype, radius=0, further=2**40) > 8.5
    # Without the further bits a float32 tail would end at 6.6: the check above can fail.
    monkeypatch.setattr(noise._Refinement, "apply", lambda *_: None)
    assert (planted_radius(backend, dtype, radius=0) > 8.5) == (dtype == torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_radius_is_accurate_from_the_centre_to_the_tail(backend: str, dtype: torch.dtype) -> None:
    bits = torch.finfo(dtype).bits
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    top = 2 ** (bits - 1)
    edge = 2 ** (bits - 1 - 20)  # the first word that is not refined
    for odd in (edge + 1, 10 * edge + 1, top // 2 - 1, top // 2 + 1, int(0.7072 * top) | 1, top - 9, top - 1):
        log_uniform = math.log1p(-((top - odd) / top)) if 2 * odd > top else math.log(odd / top)
        exact = math.sqrt(-2.0 * log_uniform)
        for word in (odd, odd - 1, odd - top, odd - 1 - top):  # neither last bit nor sign bit counts
            assert planted_radius(backend, dtype, word) == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_refined_radii_fill_their_bucket_evenly(backend: str, dtype: torch.dtype) -> None:
    stream = NoiseStream(seed=5, backend=backend)
    j = 5
    stream._bulk = Planted(2 * j, 0, dtype)  # type: ignore[assignment]
    radius = draw(stream, BLOCK, dtype)[:PAIRS]
    place = np.exp(-(radius**2) / 2) * 2.0 ** (torch.finfo(dtype).bits - 2) - j
    assert stats.kstest(place, "uniform").pvalue > LEVEL


def test_angles_go_round_the_circle(backend: str) -> None:
    for eighths in range(-4, 4):
        stream = NoiseStream(seed=0, backend=backend)
        stream._bulk = Planted(2**30, eighths * 2**29, torch.float32)  # type: ignore[assignment]
        block = draw(stream, BLOCK)
        radius, angle = math.sqrt(2 * math.log(2)), eighths * math.pi / 4
        assert block[0] == pytest.approx(radius * math.cos(angle), abs=1e-6)
        assert block[PAIRS] == pytest.approx(radius * math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_back_ends_agree_up_to_rounding(dtype: torch.dtype) -> None:
    samples = [draw(NoiseStream(seed=6, backend=name), 5_000_000, dtype, 2.5) for name in AVAILABLE]
    for sample in samples:
        np.testing.assert_allclose(sample, samples[-1], rtol=1e-6, atol=5e-6)


# Freshness


def test_the_keystream_is_aes_counter_mode_with_lanes_apart() -> None:
    key = hashlib.sha256(b"confide noise stream, seed 7").digest()
    for lane in (noise.NORMALS, noise.REFINEMENTS, noise.UNIFORMS):
        counters = b"".join(((lane << 120) + i).to_bytes(16, "big") for i in range(4))
        expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)
        assert noise._Keystream(algorithms.AES(key), lane).words(8).tobytes() == expected
    words = NoiseStream(seed=7)._words.words(8)
    np.testing.assert_array_equal(NoiseStream(seed=7).uniform(8), (words >> np.uint64(11)) * 2.0**-53)


def record_blocks(stream: NoiseStream) -> list[bytes]:
    """Every 16-byte block of keystream that a stream goes on to draw, on whatever thread."""
    seen: list[bytes] = []

    def spy_on(keystream: noise._Keystream) -> noise._Keystream:
        fill, words, split_off = keystream.fill, keystream.words, keystream.split_off

        def spy_fill(buffer: bytearray, size: int) -> None:
            fill(buffer, size)
            seen.extend(bytes(buffer[i : i + 16]) for i in range(0, size, 16))

        def spy_words(count: int) -> NDArray[np.uint64]:
            drawn = words(count)
            seen.extend(drawn[i : i + 2].tobytes() for i in range(0, count, 2))
            return drawn

        keystream.fill, keystream.words = spy_fill, spy_words  # type: ignore[method-assign]
        keystream.split_off = lambda sizes: [spy_on(part) for part in split_off(sizes)]  # type: ignore[method-assign]
        return keystream

    for keystream in (stream._bulk, stream._refinements, stream._words):
        spy_on(keystream)
    return seen


def use_in_every_way(stream: NoiseStream) -> None:
    for size in (1, 999, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 200_000):
        for dtype in DTYPES:
            before = stream.bytes_drawn
            draw(stream, size, dtype)
            stream.uniform(size)
            assert stream.bytes_drawn > before
    stream.permutation(1000)
    stream.choice_without_replacement(10_000, 64)


def test_no_block_of_keystream_is_used_twice_and_reuse_is_noticed(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, second = NoiseStream(backend=backend), NoiseStream(backend=backend)
    seen, seen_by_second = record_blocks(stream), record_blocks(second)
    use_in_every_way(stream)
    use_in_every_way(second)
    assert len(seen) > 100_000
    assert len(set(seen)) == len(seen)
    assert set(seen).isdisjoint(seen_by_second)

    class Restarting(noise._Keystream):  # a counter that starts again with each fill
        def fill(self, buffer: bytearray, size: int) -> None:
            original(algorithms.AES(bytes(32)), 0).fill(buffer, size)

    original = noise._Keystream
    monkeypatch.setattr(noise, "_Keystream", Restarting)
    faulty = NoiseStream(backend=backend)
    seen = record_blocks(faulty)
    draw(faulty, 500_000)
    draw(faulty, 500_000)
    assert len(set(seen)) < len(seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cutting_a_request_changes_nothing_and_no_value_is_handed_out_twice(backend: str, dtype: torch.dtype) -> None:
    sizes = [1, 999, 1000, BLOCK, 5 * BLOCK + 3, 0, 17, 400_000, 2 * BLOCK]
    stream = NoiseStream(seed=8, backend=backend)
    parts = np.concatenate([draw(stream, size, dtype, 1.7) for size in sizes])
    stream.uniform(100)  # a sequence of its own
    whole = draw(NoiseStream(seed=8, backend=backend), sum(sizes), dtype, 1.7)
    np.testing.assert_array_equal(parts, whole)
    if dtype == torch.float64:
        assert len(np.unique(whole)) == len(whole)


def test_consecutive_fills_and_different_streams_are_independent(backend: str) -> None:
    stream = NoiseStream(seed=9, backend=backend)
    fills = [draw(stream, 100_000) for _ in range(4)]
    fills.append(draw(NoiseStream(seed=10, backend=backend), 100_000))
    fills.append(draw(NoiseStream(backend=backend), 100_000))
    for i, first in enumerate(fills):
        assert all(uncorrelated(first, second) for second in fills[:i])
        assert not uncorrelated(first, first)


def test_small_fills_share_a_reservoir(backend: str) -> None:
    """A small model must not pay for a block of keystream at every step."""
    stream = NoiseStream(seed=11, backend=backend)
    draw(stream, 1000)
    before = stream.bytes_drawn
    for _ in range(noise.RESERVOIR_BLOCKS * BLOCK // 1000 - 1):
        draw(stream, 1000)
    assert stream.bytes_drawn == before
    draw(stream, 1000)
    assert stream.bytes_drawn > before


def test_threads_never_share_a_value(backend: str) -> None:
    stream = NoiseStream(seed=12, backend=backend)
    parts: list[list[Array]] = [[] for _ in range(4)]

    def work(mine: list[Array]) -> None:
        mine.extend(draw(stream, 997, torch.float64) for _ in range(100))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = np.sort(np.concatenate([part for mine in parts for part in mine]))
    alone = np.sort(draw(NoiseStream(seed=12, backend=backend), 4 * 100 * 997, torch.float64))
    np.testing.assert_array_equal(together, alone)
