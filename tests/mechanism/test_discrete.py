"""Discrete Gaussians: the exact law, where doubts are settled too."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from confide.errors import Refusal
from confide.mechanism import discrete
from confide.mechanism.discrete import Words, discrete_gaussians
from confide.mechanism.noise import NoiseStream


def p_value(sigma: float, seed: int, count: int = 200_000) -> float:
    """Of a chi-squared test against exp(-k^2 / (2 sigma^2))."""
    found = discrete_gaussians(NoiseStream(seed)._draw, sigma, count)
    cells = np.arange(-int(4 * sigma), int(4 * sigma) + 1)
    wide = np.arange(-int(40 * sigma), int(40 * sigma) + 1)
    law = np.exp(-(cells**2) / (2 * sigma**2)) / np.exp(-(wide**2) / (2 * sigma**2)).sum()
    seen = np.array([np.sum(found == cell) for cell in cells])
    law, seen = np.append(law, 1 - law.sum()), np.append(seen, count - seen.sum())
    return float(stats.chi2.sf(((seen - count * law) ** 2 / (count * law)).sum(), len(law) - 1))


@pytest.mark.parametrize("sigma", [1.0, 1.3, 3.7])
def test_small_ones_have_the_law(sigma: float) -> None:
    assert p_value(sigma, seed=11) > 1e-3


def test_a_rounded_normal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: [sigma Z] in place of a discrete Gaussian, whose variance is larger by 1/12."""

    def rounded(draw: object, sigma: float, count: int) -> np.ndarray:
        return np.rint(sigma * np.random.default_rng(0).normal(size=count)).astype(np.int64)

    monkeypatch.setitem(globals(), "discrete_gaussians", rounded)
    assert p_value(1.0, seed=11) < 1e-6


@pytest.mark.parametrize("sigma", [1000.5, 2.0**25, 2.0**36])
def test_wide_ones_look_like_normals(sigma: float) -> None:
    found = discrete_gaussians(NoiseStream(7)._draw, sigma, 100_000)
    assert stats.kstest(found / sigma, "norm").pvalue > 1e-3


def test_what_is_in_doubt_is_settled_by_further_bits() -> None:
    """The same numbers where everything is in doubt, as long as the first bits are the same."""
    stream = NoiseStream(3)
    words = stream._draw(500)
    further = NoiseStream(4)._draw
    plain = discrete._floors(words, 1000.0, further)
    exact = [discrete._floor_exactly(int(word), 1000.0, further) for word in words]
    assert plain.tolist() == exact
    coins = stream._draw(500)
    kept = discrete._coins(coins, plain, 999.5, 1000.0, further)
    assert kept.tolist() == [
        discrete._coin_exactly(int(coin), int(size), 999.5, 1000.0, further)
        for coin, size in zip(coins, plain, strict=True)
    ]


def test_words_at_the_ends_are_no_error() -> None:
    ends: Words = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    found = discrete._floors(ends, 8.0, NoiseStream(0)._draw)
    assert found[0] >= int(8 * 64 * math.log(2))
    assert found[3] == 0
    assert found[2] == int(8 * math.log(2))


def test_nothing_asked_nothing_given_and_limits() -> None:
    assert len(discrete_gaussians(NoiseStream(0)._draw, 2.0, 0)) == 0
    for sigma in (0.0, 0.5, 2.0**41, math.nan):
        with pytest.raises(Refusal, match="sigma"):
            discrete_gaussians(NoiseStream(0)._draw, sigma, 3)
