"""Noise streams as objects: seeds, forks, copies, uniforms and integers, refusals, the missing kernel."""

from __future__ import annotations

import copy
import ctypes
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from confide import _native
from confide._native import build as native_build
from confide._native import loader
from confide.mechanism import noise
from confide.mechanism.noise import NoiseStream
from tests.mechanism.noise_tools import AVAILABLE, LEVEL, Array, draw


@pytest.fixture(params=AVAILABLE)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Seeds, forks, copies


def test_a_seed_repeats_itself_and_another_does_not(backend: str) -> None:
    def first(seed: int | None) -> list[float]:
        return draw(NoiseStream(seed, backend=backend), 8).tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(None) != first(None)
    assert NoiseStream(1).seeded
    assert not NoiseStream().seeded
    exact = draw(NoiseStream(3, backend=backend), 1000)
    np.testing.assert_array_equal(draw(NoiseStream(3, backend=backend), 1000, std=4.0), 4.0 * exact)


def in_child(work: Callable[[], Array], fork: Callable[[], int] = os.fork) -> Array:
    """What `work` returns in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which the child leaves be
        child = fork()
    if child == 0:
        os.write(writing, work().tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = np.frombuffer(pipe.read())
    os.waitpid(child, 0)
    return result


@pytest.mark.parametrize("seed", [None, 13])
def test_a_forked_child_does_not_share_the_noise(
    backend: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = NoiseStream(seed, backend=backend)
    draw(stream, 100)  # the reservoir is full: a child that kept it would hand out the parent's next values

    def next_values() -> Array:
        return np.concatenate([draw(stream, 64), stream.uniform(64)])

    monkeypatch.setattr(noise, "REKEYED_SECONDS", math.inf)  # on a busy machine a second may pass
    first, second = in_child(next_values), in_child(next_values)
    with monkeypatch.context() as broken:
        broken.setattr(NoiseStream, "_after_fork", lambda self: None)
        sharing = in_child(next_values)
    parent = next_values()
    assert len(first) == len(parent) == 128
    assert not np.isin(first, parent).any()
    assert not np.isin(first, second).any()
    assert np.array_equal(sharing, parent)  # without the hook the noise would be shared: the test can fail


@pytest.mark.parametrize("seed", [None, 13])
def test_a_child_of_a_fork_in_c_does_not_share_the_noise(backend: str, seed: int | None) -> None:
    """Python's own hooks do not see this fork."""
    stream = NoiseStream(seed, backend=backend)
    draw(stream, 100)

    def next_values() -> Array:
        return np.concatenate([draw(stream, 64), stream.uniform(64)])

    library = ctypes.PyDLL(None)  # keeps Python's lock, as an extension that forks would
    first, second = (in_child(next_values, fork=library.fork) for _ in range(2))
    parent = next_values()
    assert len(first) == len(second) == len(parent) == 128
    assert not np.isin(first, parent).any()
    assert not np.isin(first, second).any()


def test_an_old_key_gets_fresh_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snapshot of a machine would hold: two copies of one state, a second later."""
    monkeypatch.setattr(noise, "REKEYED_SECONDS", -1.0)
    streams = NoiseStream(backend=backend), NoiseStream(13, backend=backend)
    before = [draw(stream, 100) for stream in streams]
    kept = [stream._bulk for stream in streams]
    assert not np.isin(draw(streams[0], 100), before[0]).any()
    assert (streams[0]._bulk is kept[0], streams[1]._bulk is kept[1]) == (False, True), "a seed stays a seed"
    drawn = streams[0].bytes_drawn
    streams[0].uniform(4)
    assert streams[0].bytes_drawn > drawn


def test_a_lock_held_at_the_fork_does_not_stop_the_child(backend: str) -> None:
    stream = NoiseStream(backend=backend)
    with stream._lock.held():
        assert len(in_child(lambda: draw(stream, 8))) == 8


def test_a_child_does_not_wait_for_threads_left_behind(backend: str) -> None:
    """Torch's worker threads stay in the parent: a child that shared work with them would hang."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stream = NoiseStream(backend=backend)
        draw(stream, 500_000)
        assert len(in_child(lambda: draw(stream, 500_000)[:8])) == 8
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate: Callable[[NoiseStream], object]) -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(NoiseStream())


def test_the_key_stays_out_of_sight() -> None:
    stream = NoiseStream()
    assert repr(stream) == f"NoiseStream(seeded=False, backend='{stream.backend}')"
    assert not any(isinstance(value, bytes) for value in vars(stream).values())


# Threads


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_change_no_value(
    backend: str, with_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches stretches of the counter that overlap, and refinements that follow in another order."""
    monkeypatch.setattr(noise, "REFINED_LOG2", 12)  # so that there are many of them
    sizes = (noise.BLOCK * 3 * noise.THREAD_BLOCKS + 77, 5, noise.BLOCK * 2 * noise.THREAD_BLOCKS)

    def drawn(threads: int) -> tuple[Array, int]:
        with_threads(threads)
        stream = NoiseStream(seed=8, backend=backend)
        return np.concatenate([draw(stream, size) for size in sizes]), stream.bytes_drawn

    alone, drawn_alone = drawn(1)
    for threads in (2, 3):
        shared, drawn_shared = drawn(threads)
        np.testing.assert_array_equal(shared, alone)
        assert drawn_shared == drawn_alone
    assert len(np.unique(alone)) > 0.99 * len(alone)


# Uniforms and integers


def test_uniforms_are_uniform_in_every_bit_and_do_not_depend_on_the_cut() -> None:
    sample = NoiseStream(seed=14).uniform(200_000)
    assert stats.kstest(sample, "uniform").pvalue > LEVEL
    assert sample.min() >= 0.0
    assert sample.max() < 1.0
    grid = (sample * 2.0**53).astype(np.uint64)
    np.testing.assert_array_equal(grid * 2.0**-53, sample)
    ones = [int(((grid >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(53)]
    assert sum((one - 100_000) ** 2 / 50_000 for one in ones) < stats.chi2.isf(LEVEL, 53)
    stream = NoiseStream(seed=14)
    np.testing.assert_array_equal(np.concatenate([stream.uniform(3), stream.uniform(0), stream.uniform(5)]), sample[:8])


def test_integers_choices_and_permutations_are_uniform() -> None:
    stream = NoiseStream(seed=15)
    assert stats.chisquare(np.bincount(stream.integers(7, 70_000), minlength=7)).pvalue > LEVEL
    high = 3 * 2**60  # a quarter of all words must be rejected, else the lower third comes too often
    assert stats.chisquare(np.bincount(stream.integers(high, 30_000) >> 60, minlength=3)).pvalue > LEVEL
    orders = [tuple(stream.permutation(4)) for _ in range(6000)]
    assert stats.chisquare(np.unique(orders, axis=0, return_counts=True)[1]).pvalue > LEVEL
    for n, k, outcomes in ((9, 2, 72), (4, 3, 24)):  # by rejection; by permutation
        chosen = np.array([stream.choice_without_replacement(n, k) for _ in range(200 * outcomes)])
        counts = np.unique(chosen, axis=0, return_counts=True)[1]
        assert len(counts) == outcomes
        assert stats.chisquare(counts).pvalue > LEVEL
    big = stream.choice_without_replacement(60_000, 600)
    assert len(np.unique(big)) == 600
    assert sorted(stream.permutation(1000)) == list(range(1000))
    assert len(stream.choice_without_replacement(5, 0)) == len(stream.permutation(0)) == 0


# Refusals and the missing kernel


def test_unusable_arguments_are_refused() -> None:
    stream, out = NoiseStream(), torch.empty(4, 4)
    for std in (-1.0, math.nan, math.inf, 1e-60, 1e38):
        with pytest.raises(ValueError, match="std="):
            stream.normal_(out, std)
    with pytest.raises(TypeError, match="float16"):
        stream.normal_(out.half(), 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        stream.normal_(out[:, :2], 1.0)
    with pytest.raises(ValueError, match="meta"):
        stream.normal_(torch.empty(4, device="meta"), 1.0)
    with pytest.raises(TypeError, match="seed='a'"):
        NoiseStream("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='dice'"):
        NoiseStream(backend="dice")
    for refused in (lambda: stream.uniform(-1), lambda: stream.integers(0, 1), lambda: stream.permutation(-1)):
        with pytest.raises(ValueError, match=r"(n|high)="):
            refused()
    with pytest.raises(ValueError, match="k=5"):
        stream.choice_without_replacement(4, 5)


def test_no_noise_is_asked_for_by_zero_alone() -> None:
    stream = NoiseStream()
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    assert stream.normal_(parameter, 0.0).abs().sum() == 0
    assert stream.bytes_drawn == 0
    assert stream.normal_(parameter, 1.0) is parameter
    assert parameter.abs().min() > 0


def test_without_the_kernel_the_torch_path_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_build, "LIBRARY", tmp_path / "missing.so")
    loader.library.cache_clear()
    _native.kernel.cache_clear()
    try:
        assert _native.kernel() is None
        assert NoiseStream().backend == "aes-ctr"
        with pytest.raises(ValueError, match="not installed"):
            NoiseStream(backend="aes-ctr-native")
    finally:
        loader.library.cache_clear()
        _native.kernel.cache_clear()


def test_the_build_makes_a_library_or_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "kernel.so"
    reason = native_build.build(target)
    assert target.exists() == (reason == "")
    for compiler in ("/nonexistent/c++", "false"):
        monkeypatch.setenv("CXX", compiler)
        assert native_build.build(target)
        assert not target.exists()
        assert list(tmp_path.iterdir()) == []
