"""Secure sums: masks cancel over a whole roster and hide everything else; shares add up to the noise charged for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from confide.errors import Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.mechanism.noise import NoiseStream
from confide.mechanism.secure import Lattice, lattice_for
from confide.mechanism.secure_sum import DISTANCE, Cover, Masks, Shares, summed

MECHANISM = SampledGaussian(1.0, 1.0, 0.1, 1000)
NAMES = ("a", "b", "c", "d")


def key(one: str, other: str) -> bytes:
    return "".join(sorted((one, other))).encode().ljust(32, b".")


def sent(
    shares: Shares, size: int, roster: tuple[str, ...] = NAMES, seed: int = 0, step: int = 1
) -> list[torch.Tensor]:
    """What each party of the roster sends, for places that are its number times ten."""
    lattice = lattice_for(MECHANISM, size)
    parts = []
    for place, name in enumerate(roster):
        masks = Masks(name, {other: key(name, other) for other in roster if other != name}, f"run {step} {roster}")
        places = torch.full((size,), 10.0 * (place + 1), dtype=torch.float64)
        parts.append(Cover(shares, masks).covered(places, lattice, NoiseStream(100 * seed + place)))
    return parts


def ratio(shares: Shares, roster: tuple[str, ...]) -> float:
    """Noise of a sum without the parties that collude, in units of what is charged for."""
    size = 20_000
    lattice = lattice_for(MECHANISM, size)
    known = roster[: shares.colluding]  # they subtract their own shares, which they know
    rest = [name for name in roster if name not in known]
    noise = torch.zeros(size, dtype=torch.float64)
    for place, _ in enumerate(rest):
        covered = Cover(shares, Masks("x", {}, "")).covered(
            torch.zeros(size, dtype=torch.float64), lattice, NoiseStream(place)
        )
        noise += covered.double()
    return float(noise.std() / lattice.sigma)


class TestMasks:
    def test_they_cancel(self) -> None:
        size = 1000
        lattice = lattice_for(MECHANISM, size)
        total = summed(sent(Shares(4), size), lattice) / lattice.spacing
        assert float(total.mean()) == pytest.approx(100, abs=5 * lattice.sigma / math.sqrt(size))
        assert float(total.std()) == pytest.approx(lattice.sigma, rel=0.1)

    def test_one_part_alone_is_uniform(self) -> None:
        (first, *_) = sent(Shares(4), 20_000)
        shares = first.numpy().view(np.uint64).astype(np.float64) / 2.0**64
        assert stats.kstest(shares, "uniform").pvalue > 1e-3

    @pytest.mark.parametrize("left_out", [0, 3])
    def test_a_sum_without_one_of_the_roster_tells_nothing(self, left_out: int) -> None:
        """Shares under a dropout: what is left is uniform, so that there is nothing to release."""
        parts = sent(Shares(4, missing=1), 20_000)
        del parts[left_out]
        total = summed(parts, Lattice(1.0, 1.0)).numpy() / 2.0**64 + 0.5
        assert stats.kstest(total, "uniform").pvalue > 1e-3

    def test_another_step_has_other_masks(self) -> None:
        one, two = sent(Shares(4), 100, step=1)[0], sent(Shares(4), 100, step=2)[0]
        assert not bool((one == two).any())


class TestShares:
    @pytest.mark.parametrize("shares", [Shares(10), Shares(10, 2), Shares(10, 0, 3), Shares(10, 2, 3), Shares(2, 0, 1)])
    def test_what_is_left_of_the_noise_is_what_is_charged(self, shares: Shares) -> None:
        """With as many missing and colluding as are allowed for."""
        roster = tuple(f"p{place}" for place in range(shares.least))
        assert ratio(shares, roster) == pytest.approx(1.0, rel=0.03)

    def test_shares_for_all_ten_are_too_small_where_three_fail(self) -> None:
        """Planted: noise dimensioned as if nobody were missing."""
        roster = tuple(f"p{place}" for place in range(7))
        assert ratio(Shares(10), roster) != pytest.approx(1.0, rel=0.03)

    def test_the_same_share_twice_is_caught(self) -> None:
        """Two sums must not share noise: their difference would be that of the records alone."""
        size = 5000
        lattice = lattice_for(MECHANISM, size)

        def difference(seeds: tuple[int, int]) -> float:
            one, two = (summed(sent(Shares(4), size, seed=seed, step=step), lattice) for step, seed in enumerate(seeds))
            return float((one - two).std() / (lattice.std * math.sqrt(2)))

        assert difference((1, 2)) == pytest.approx(1.0, rel=0.05)
        assert difference((1, 1)) == 0.0  # planted: the second step draws the noise of the first

    def test_numbers_that_do_not_fit(self) -> None:
        for wrong in ({"parties": 1}, {"missing": -1}, {"colluding": 4}, {"missing": 2, "colluding": 2}):
            with pytest.raises(Refusal):
                Shares(**{"parties": 4, **wrong})
        with pytest.raises(Refusal, match="spacings wide"):
            Shares(4).sigma(Lattice(1.0, 100.0))
        with pytest.raises(Refusal, match="too coarse"):
            Shares(4).check(Lattice(1.0, 2.0**14), 10**9)
        Shares(4).check(lattice_for(MECHANISM, 10**6), 10**12)


def test_the_distance_from_a_rounded_normal_is_within_the_bound() -> None:
    """The proof of docs/soundness.md, by numbers: at small sigmas the distance can be computed."""
    for sigma, count in ((4.0, 3), (6.0, 2), (6.0, 7), (10.0, 1)):
        share = math.sqrt((sigma**2 + 1 / 12) / count)
        whole = np.arange(-int(40 * sigma), int(40 * sigma) + 1)
        one = np.exp(-(whole**2) / (2 * share**2))
        law = one / one.sum()
        total = law
        for _ in range(count - 1):
            total = np.convolve(total, law, mode="same")
        rounded = stats.norm.cdf((whole + 0.5) / sigma) - stats.norm.cdf((whole - 0.5) / sigma)
        distance = 0.5 * np.abs(total - rounded).sum()
        assert distance <= DISTANCE / sigma**4
        assert distance > 1e-4 * DISTANCE / sigma**4, "the bound is about this"
