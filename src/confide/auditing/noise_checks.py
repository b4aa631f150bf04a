"""Noise, looked at as a whole: its size, its shape and its freshness, on every step, coordinate and lag of a run.

noise size    sums and sums of squares: of every step, of every coordinate over the run, of stretches of coordinates of
              every length, of the last ones
noise shape   the whole distribution (Kolmogorov and Smirnov, Anderson and Darling) and the tails: of the run, of every
              step, of every coordinate, of stretches of coordinates
fresh noise   every two steps, and the whole run at every lag, are uncorrelated; so are the absolute values, which sees
              noise that comes again with another sign

Values are in units of the stated standard deviation, one row per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from confide.auditing import significance
from confide.auditing.results import Check, tested
from confide.data.schema import Schema
from confide.mechanism.gaussian import SampledGaussian
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery

Floats: TypeAlias = np.ndarray[Any, Any]
MakeData: TypeAlias = Callable[..., PrivateData]

# More numbers than noise is made of in one go, on each of two threads and before them, whatever the last stretch.
WIDE = 2 * 24 * 8192 + 4 * 8192 + 1001
WIDE_STEPS = 2
# Below, the distribution of one coordinate over the steps says nothing.
FEWEST_STEPS = 8
STRETCHES = 16
# Standard deviations beyond which values are counted: no test of a whole distribution sees that a tail is cut off.
TAILS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0)


def noise_checks(values: Floats) -> list[Check]:
    """The three families on the noise of a run."""
    size = float(np.sqrt((values**2).mean()))
    return [
        tested("noise size", size_chance(values), f"{size:.4f} times the stated standard deviation", "1 times"),
        tested("noise shape", shape_chance(values), f"{_gap(values):.4f} from the normal distribution", "0"),
        tested("fresh noise", freshness_chance(values), _correlation(values), "0"),
    ]


def all_at_once(name: str, values: Floats, bits: Floats | None = None) -> Check:
    """One check of everything; `bits` of noise that stands alone are looked at for values that come again."""
    chance = significance.family(
        size_chance(values),
        shape_chance(values),
        freshness_chance(values),
        1.0 if bits is None else significance.repeats(bits),
    )
    size = float(np.sqrt((values**2).mean()))
    return tested(name, chance, f"noise of {size:.4f} times the stated standard deviation", "1 times, normal and fresh")


def size_chance(values: Floats) -> float:
    """Sums and sums of squares over steps, coordinates and stretches of them."""
    steps, size = values.shape
    found: list[Any] = []
    for powers, chance in ((values, _sum_chance), (values**2, significance.chi_square)):
        columns = powers.sum(0)
        found += [chance(powers.sum(1), size), chance(columns, steps), chance(columns.sum(), values.size)]
        width = 2
        while width < size:
            starts = np.arange(0, size, width)
            lengths = np.diff(np.append(starts, size))
            found += [chance(np.add.reduceat(columns, starts), steps * lengths)]
            found += [chance(columns[-width:].sum(), steps * width)]
            width *= 2
    return significance.family(*found)


def _sum_chance(value: Any, count: Any) -> Floats:
    return significance.normal(np.asarray(value) / np.sqrt(count))


def shape_chance(values: Floats) -> float:
    """The whole distribution, and that of parts of the run."""
    from scipy.special import ndtr

    uniform = ndtr(values)
    steps, size = uniform.shape
    found: list[Any] = [
        significance.kolmogorov(uniform.ravel()),
        significance.anderson_darling(uniform.ravel()),
        significance.kolmogorov(uniform.T),
    ]
    sizes = np.abs(values)
    found += [significance.binomial((sizes > tail).sum(), sizes.size, float(2 * ndtr(-tail))) for tail in TAILS]
    if steps >= FEWEST_STEPS:
        found.append(significance.kolmogorov(uniform))
    if size >= 2 * STRETCHES:
        found += [significance.kolmogorov(part.ravel()) for part in np.array_split(uniform, STRETCHES, axis=1)]
    return significance.family(*found)


def freshness_chance(values: Floats) -> float:
    """Values and their absolute values (made normal again), every two steps and the whole run at every lag."""
    from scipy.special import ndtr, ndtri

    # 1 - 1e-15 keeps the absolute value of a far tail finite.
    sizes = ndtri((2 * ndtr(np.abs(values)) - 1).clip(1e-15, 1 - 1e-15))
    found = [test(each) for each in (values, sizes) for test in (significance.pairs, _lags)]
    return significance.family(*found)


def _lags(values: Floats) -> Floats:
    return significance.lags(values.ravel())


def _gap(values: Floats) -> float:
    from scipy.special import ndtr

    ordered = np.sort(ndtr(values.ravel()))
    return float(np.abs(ordered - (np.arange(len(ordered)) + 0.5) / len(ordered)).max())


def _correlation(values: Floats) -> str:
    rows = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-300)
    every = (rows @ rows.T)[np.triu_indices(len(rows), 1)]
    largest = every[np.abs(every).argmax()] if len(every) else 0.0
    return f"correlation of two steps up to {largest:+.4f}"


def bits_of(values: torch.Tensor) -> Floats:
    """The bits of floating-point numbers, without the sign."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    return np.asarray(values.abs().contiguous().view(kind).flatten().numpy())


def wide_noise(mechanism: SampledGaussian, make_data: MakeData, seed: int) -> Check:
    """Releases so wide that noise is made in several blocks and on two threads; the records answer with nothing."""
    data = make_data(torch.zeros(2, 1), torch.zeros(2), schema=Schema(records=2), seed=seed)
    query = StatisticQuery(lambda x, y: torch.zeros(len(x), WIDE, dtype=torch.float32), WIDE, torch.float32)
    with _two_threads():
        released = torch.stack([data.answer(query, mechanism).sum.clone() for _ in range(WIDE_STEPS)])
    return all_at_once("wide noise", released.double().numpy() / mechanism.noise_std, bits_of(released))


@contextmanager
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
