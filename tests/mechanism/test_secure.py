"""Noise on a lattice: the exact law of whole normals, what is reachable, and what is charged for rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import confide
from confide import _native
from confide.mechanism import secure, secure_exact
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure import LatticeNoise, lattice_for
from confide.sources.queries import StatisticQuery

NATIVE = [False] if _native.secure_kernels() is None else [True, False]
by_both = pytest.mark.parametrize("native", NATIVE)


class Planned:
    """Hands out planted words first, then those of a stream; remembers all of them."""

    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        self.first = np.ascontiguousarray(words, dtype=np.uint64)
        self.stream = NoiseStream(5)
        self.drawn: list[np.ndarray[Any, Any]] = []

    def _fill_words(self, buffer: bytearray, count: int) -> None:
        assert len(self.first) == count
        buffer[: 8 * count] = self.first.tobytes()

    def _draw(self, count: int) -> np.ndarray[Any, Any]:
        found = self.stream._draw(count)
        self.drawn.append(found)
        return found


def true_value(radius: int, angle: int, sine: bool, sigma: float) -> Any:
    """sigma Z in 80 digits, for the middle of what two words leave open."""
    with mpmath.workdps(80):
        uniform = mpmath.mpf(((radius & (2**63 - 1)) >> 1) + mpmath.mpf(0.5)) / 2**62
        turn = 2 * mpmath.pi * (mpmath.mpf(angle) + mpmath.mpf(0.5)) / 2**64
        return sigma * mpmath.sqrt(-2 * mpmath.log(uniform)) * (mpmath.sin(turn) if sine else mpmath.cos(turn))


def kernel(native: bool) -> Callable[[Any, float], tuple[Any, Any]]:
    """From words to whole normals and places in doubt, without the slow path."""

    def transform(words: Any, sigma: float) -> tuple[Any, Any]:
        space = secure._Space()
        space.fill(Planned(words), len(words) // 2)  # type: ignore[arg-type]
        doubtful = space.transform(_native.secure_kernels() if native else None, sigma)
        return space.found, doubtful

    return transform


def hard_words() -> np.ndarray[Any, Any]:
    """Ordinary words, and every corner: the ends of what the kernels accept, quarter turns, both sides of sqrt(1/2)."""
    random = np.random.default_rng(0).integers(0, 2**64, 1500, dtype=np.uint64)
    root = int(2**63 * math.sqrt(0.5))
    corners = [2**48, 2**48 + 2, 2**50, root - 2, root, root + 2, 2**62, 2**63 - 2**43 - 2, 2**63 - 2**44, 2**62 + 2]
    turns = [(quarter << 62) + shift + step for quarter in range(4) for shift in (0, 2**61) for step in (0, 1, 2**40)]
    radii = np.concatenate([random[:700], np.repeat(np.array(corners, dtype=np.uint64), len(turns))])
    angles = np.concatenate([random[700:1400], np.tile(np.array(turns, dtype=np.uint64), len(corners))])
    return np.concatenate([radii, angles])


@by_both
def test_kernels_stay_far_within_their_margin(native: bool) -> None:
    """At a sigma of 2^49 the rounding to whole numbers shows errors down to 2^-50. Catches a constant that is off."""
    words, sigma = hard_words(), 2.0**49
    found, _ = kernel(native)(words, sigma)
    pairs, worst = len(words) // 2, 0.0
    for place in range(2 * pairs):
        value = true_value(int(words[place % pairs]), int(words[pairs + place % pairs]), place >= pairs, sigma)
        worst = max(worst, abs(float(found[place] - value)) / sigma)
    assert worst < secure.MARGIN / 2


@by_both
def test_values_in_doubt_are_reported(native: bool) -> None:
    """Everything within the margin of a half, and everything at the ends of U. One that is missed would be wrong."""
    words, sigma = hard_words(), 2.0**44
    found, doubtful = kernel(native)(words, sigma)
    pairs = len(words) // 2
    reported = set(doubtful.tolist())
    assert reported
    for place in set(range(2 * pairs)) - reported:
        value = true_value(int(words[place % pairs]), int(words[pairs + place % pairs]), place >= pairs, sigma)
        assert found[place] == mpmath.nint(value)
    ends = np.array([0, 1, 2**48 - 3, 2**63 - 1, 2**63 - 2**42, 2**64 - 1], dtype=np.uint64)
    assert set(kernel(native)(np.concatenate([ends, ends]), sigma)[1].tolist()) == set(range(12))


@by_both
@pytest.mark.parametrize("sigma", [2.0**20, 1.3 * 2.0**31, 2.0**45])
def test_whole_normals_are_those_of_the_words(native: bool, sigma: float) -> None:
    """Against 80 digits, with the further bits that were drawn. Sigma 2^45 leaves half of them to the slow path."""
    words = hard_words()
    pairs = len(words) // 2
    stream = Planned(words)
    found = LatticeNoise(stream, native=native).whole_normals(2 * pairs, sigma)  # type: ignore[arg-type]
    doubtful = kernel(native)(words, sigma)[1]
    more = dict.fromkeys(range(pairs), (2**63, 2**63))
    if len(doubtful):
        numbers = np.unique(doubtful % pairs)
        further = stream.drawn[0].reshape(2, -1)
        more |= {int(number): (int(further[0, i]), int(further[1, i])) for i, number in enumerate(numbers)}
    wrong = sum(
        found[place] != mpmath.nint(exact(words, place, more[place % pairs], sigma)) for place in range(2 * pairs)
    )
    assert wrong == 0


def exact(words: np.ndarray[Any, Any], place: int, more: tuple[int, int], sigma: float) -> Any:
    pairs = len(words) // 2
    with mpmath.workdps(80):
        u, _ = secure_exact._radius_bits(int(words[place % pairs]), more[0])
        v, _ = secure_exact._angle_bits(int(words[pairs + place % pairs]), more[1])
        length = mpmath.sqrt(-2 * mpmath.log((mpmath.mpf(u) + 0.5) / mpmath.mpf(2) ** 126))
        turn = 2 * mpmath.pi * (mpmath.mpf(v) + 0.5) / mpmath.mpf(2) ** 128
        return sigma * length * (mpmath.sin(turn) if place >= pairs else mpmath.cos(turn))


@by_both
def test_without_the_slow_path_some_would_be_wrong(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: no margin. The test above would then fail."""
    monkeypatch.setattr(secure, "MARGIN", 0.0)
    words, sigma = hard_words(), 2.0**48
    found, _ = kernel(native)(words, sigma)
    pairs = len(words) // 2
    middles = dict.fromkeys(range(pairs), (2**63, 2**63))
    wrong = [found[place] != mpmath.nint(exact(words, place, middles[place % pairs], sigma)) for place in range(pairs)]
    assert sum(wrong) > 10


def test_arbitrary_precision_takes_over_where_extended_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """U = 0 as far as is known, and a sigma for which 64 bits never suffice; also where there is no extended type."""
    words = np.array([0, 2**62, 2**63 - 1, 0, 2**63, 12345], dtype=np.uint64)
    sigma = 2.0**70
    stream = Planned(words)
    found = secure_exact.rounded_exactly(secure_exact.Doubts.of([(words, np.arange(6))]), sigma, stream.stream._draw)
    assert abs(found[0]) > sigma * 9
    assert abs(found[2]) < sigma * 2**-30
    small = np.random.default_rng(1).integers(0, 2**64, 40, dtype=np.uint64)
    doubts = secure_exact.Doubts.of([(small[:10], np.arange(10)), (small[10:], np.arange(30))])
    first = secure_exact.rounded_exactly(doubts, 2.0**31, NoiseStream(3)._draw)
    monkeypatch.setattr(secure_exact, "HAS_EXTENDED", False)
    assert (secure_exact.rounded_exactly(doubts, 2.0**31, NoiseStream(3)._draw) == first).all()


@by_both
@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_the_law_of_small_whole_normals(native: bool, sigma: float) -> None:
    """Chi-square against the exact probabilities; a sigma three per cent off is rejected."""
    noise = LatticeNoise(NoiseStream(11), native=native)
    draws = noise.whole_normals(16 * secure.CHUNK, sigma)

    def p_value(assumed: float) -> float:
        edges = np.arange(-int(4 * sigma) - 1, int(4 * sigma) + 1) + 0.5
        chances = np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]]) / assumed))
        counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
        return float(stats.chisquare(counts, chances * len(draws)).pvalue)

    assert p_value(sigma) > 1e-4
    assert p_value(sigma * 1.03) < 1e-10


@by_both
def test_large_ones_are_normal_in_every_bit(native: bool) -> None:
    """KS, and the low bits evenly distributed: a transform in single precision would leave them empty."""
    sigma = 1.3 * 2.0**31
    draws = LatticeNoise(NoiseStream(12), native=native).whole_normals(8 * secure.CHUNK, sigma)
    assert stats.kstest(draws / sigma, "norm").pvalue > 1e-4
    assert stats.kstest(draws / sigma / 1.03, "norm").pvalue < 1e-4
    for drop in range(12):
        digits = np.bincount((draws.astype(np.int64) >> drop) & 15, minlength=16)
        assert stats.chisquare(digits).pvalue > 1e-5
    coarse = np.float32(draws).astype(np.int64)  # the planted fault
    assert stats.chisquare(np.bincount(coarse & 15, minlength=16)).pvalue < 1e-10


class TestLattice:
    @pytest.mark.parametrize("size", [1, 10, 1000, 2_400_000])
    @pytest.mark.parametrize("clip", [1e-3, 0.7, 1.0, 3.0, 1e6])
    def test_rounding_is_paid_for(self, size: int, clip: float) -> None:
        mechanism = SampledGaussian(1.3, clip, 0.1, 2560)
        lattice = lattice_for(mechanism, size)
        extra = lattice.spacing * math.sqrt(size) / clip
        assert extra < 1e-6
        assert math.log2(lattice.spacing) % 1 == 0
        assert lattice.std == pytest.approx(1.3 * (clip * (1 + extra)), rel=1e-12)
        assert lattice.std < 1.3 * clip * 1.0003

    def test_much_noise_and_many_records_get_a_coarser_lattice(self) -> None:
        for mechanism in (SampledGaussian(1e6, 1.0, 0.1, 100), SampledGaussian(1.0, 1.0, 1.0, 10**9, "full-batch")):
            lattice = lattice_for(mechanism, 2_400_000)
            extra = lattice.spacing * math.sqrt(2_400_000)
            assert lattice.sigma <= 2.0**secure.WIDEST_SIGMA
            assert mechanism.records * 1.0 / lattice.spacing < secure.LARGEST_PLACE
            assert lattice.std >= mechanism.noise_multiplier * (1 + extra)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_neighbours_stay_within_the_sensitivity_that_is_charged(self, dtype: torch.dtype) -> None:
        """Adversarial: every coordinate half way, so that rounding drives the two sums apart as far as it can."""
        size, clip = 4096, 1.0
        mechanism = SampledGaussian(1.0, clip, 1.0, 8, "full-batch")
        spacing = lattice_for(mechanism, size).spacing
        low = torch.full((size,), 0.5 - 2**-9, dtype=torch.float64) * spacing
        high = low + (clip / math.sqrt(size) / spacing - 1 + 2**-8) * spacing
        assert float((high - low).norm()) <= clip
        moved = (high / spacing).round() - (low / spacing).round()
        apart = float(moved.norm()) * spacing
        assert float((high - low).norm()) < apart <= float((high - low).norm()) + spacing * math.sqrt(size)
        std = LatticeNoise(NoiseStream(1)).add_(low.to(dtype), mechanism)
        assert std / mechanism.noise_multiplier >= apart


def released(secure_noise: bool, records: float, seed: int = 1, size: int = 64) -> torch.Tensor:
    """One release of a sum whose true value is `records` in every coordinate (times 1/8)."""
    x = torch.full((4, 1), records, dtype=torch.float64)
    data = confide.PrivateData(x, torch.zeros(4), schema=confide.Schema(records=4), seed=seed)
    mechanism = SampledGaussian(2.0, 10.0, 1.0, 4, "full-batch", secure=secure_noise)
    query = StatisticQuery(lambda x, y: x.double().expand(-1, size) / 8, size)
    return data.answer(query, mechanism).sum.clone()


def test_only_multiples_of_the_spacing_are_reachable_whatever_the_records() -> None:
    """Mironov's attack in miniature: the low bits of an ordinary release depend on the sum, those of a secure one do
    not. The ordinary release is the planted fault."""
    spacing = lattice_for(SampledGaussian(2.0, 10.0, 1.0, 4, "full-batch", secure=True), 64).spacing
    for value in (0.1, 0.3, math.pi, 1e-13, 0.0):
        places = released(True, value) / spacing
        assert torch.equal(places, places.round())
    ordinary = released(False, math.pi) / spacing
    assert not torch.equal(ordinary, ordinary.round())


def test_a_secure_release_has_the_noise_it_says() -> None:
    draws = torch.cat([released(True, 0.25, seed) - 0.125 for seed in range(400)]).double().numpy()
    spread = float(np.std(draws))
    assert spread == pytest.approx(20.0, rel=0.015)
    assert abs(float(draws.mean())) < 4 * 20 / math.sqrt(len(draws))


def test_the_sum_is_in_it() -> None:
    """With the noise taken off again, the sum is there to half a spacing. Catches noise that replaces the sum."""
    total = torch.linspace(-3, 3, 101, dtype=torch.float32)
    mechanism = SampledGaussian(0.5, 1.0, 0.5, 10, secure=True)
    lattice = lattice_for(mechanism, 101)
    noisy = total.double()
    LatticeNoise(NoiseStream(3)).add_(noisy, mechanism)
    noise = LatticeNoise(NoiseStream(3)).whole_normals(101, lattice.sigma) * lattice.spacing
    assert np.abs(noisy.numpy() - noise - total.double().numpy()).max() <= lattice.spacing / 2


@by_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_back_ends_agree_bit_for_bit(native: bool, dtype: torch.dtype) -> None:
    mechanism = SampledGaussian(1.1, 1.5, 0.5, 100)
    sums = []
    for kind in (native, False):
        total = torch.linspace(-5, 5, 3001, dtype=dtype)
        LatticeNoise(NoiseStream(9), native=kind).add_(total, mechanism)
        sums.append(total)
    assert torch.equal(*sums)


def test_the_number_of_threads_changes_nothing() -> None:
    mechanism, size = SampledGaussian(1.1, 1.5, 0.5, 100), 5 * secure.CHUNK + 3
    sums, before = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            sums.append(torch.zeros(size))
            LatticeNoise(NoiseStream(9)).add_(sums[-1], mechanism)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*sums)
    assert len(torch.unique(sums[0])) > size * 0.9  # float32 values; a chunk used twice would leave fewer


class TestDoors:
    def test_fit(self) -> None:
        """The events are the plan's own; the draws come from releases on a lattice."""
        x = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
        data = confide.PrivateData(x, x.sum(1), schema=confide.Schema(records=50), seed=1)
        plan = confide.plan(noise_multiplier=1.0, delta=1e-5, records=50, batch=10, steps=5)
        run = confide.fit(confide.methods.SGD(), confide.networks.linear(3), data, plan, seed=0, secure=True)
        assert run.plan.mechanism.secure
        assert run.privacy.events == confide.Privacy(plan.events(), 1e-5).events
        assert torch.isfinite(run.posterior.draws).all()  # type: ignore[attr-defined]

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="secure=True: there is no noise"):
            SampledGaussian(0.0, 1.0, 1.0, 4, "full-batch", private=False, secure=True)

    def test_without_the_kernel_torch_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_native, "secure_kernels", lambda: None)
        assert LatticeNoise(NoiseStream(1)).whole_normals(10, 4.0).shape == (10,)
        with pytest.raises(ValueError, match="native=True"):
            LatticeNoise(NoiseStream(1), native=True)
