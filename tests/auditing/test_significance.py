"""The chances are chances: right noise and sampling alarm no more often than the level says, planted ones always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from confide.auditing import significance
from confide.auditing.noise_checks import freshness_chance, noise_checks, shape_chance, size_chance
from confide.auditing.results import LEVEL, TESTED
from confide.auditing.sampling_checks import sampling_chances

STEPS, SIZE = 24, 600
FAMILIES: dict[str, Callable[[Any], float]] = {
    "noise size": size_chance,
    "noise shape": shape_chance,
    "fresh noise": freshness_chance,
}


def alarms(seeds: int, level: float) -> dict[str, float]:
    """How often each family finds a chance below the level where all is well."""
    found = dict.fromkeys([*FAMILIES, "sampling"], 0)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(STEPS, SIZE))
        for name, chance in FAMILIES.items():
            found[name] += chance(values) <= level
        chances = sampling_chances(
            (rng.random((400, 200)) < (0.01, 1 / 16, 0.25)[seed % 3]) * 1.0, (0.01, 1 / 16, 0.25)[seed % 3]
        )
        found["sampling"] += significance.family(*(np.full(1, each) for each in chances.values())) <= level
    return {name: count / seeds for name, count in found.items()}


def test_right_noise_is_left_alone() -> None:
    assert alarms(8, LEVEL / TESTED) == dict.fromkeys([*FAMILIES, "sampling"], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.2, 0.05, 0.01])
def test_false_alarms_are_as_rare_as_stated(level: float) -> None:
    """Measured where it can be: at levels that are met often enough to be counted."""
    seeds = 400
    for name, rate in alarms(seeds, level).items():
        assert rate <= level + 3 * np.sqrt(level * (1 - level) / seeds), name


def held_sign(values: Any) -> Any:
    """Noise that comes again with the other sign."""
    return np.where(np.arange(len(values))[:, None] % 2 == 0, values, -np.roll(values, 1, axis=0))


BROKEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "one coordinate silent": ("noise size", lambda v: v * (np.arange(v.shape[1]) != 77)),
    "last sixteenth at 0.7": ("noise size", lambda v: v * np.where(np.arange(v.shape[1]) >= 15 * SIZE // 16, 0.7, 1.0)),
    "one step at 0.7": ("noise size", lambda v: v * np.where(np.arange(STEPS)[:, None] == 20, 0.7, 1.0)),
    "shifted": ("noise size", lambda v: v + 0.1),
    "uniform": ("noise shape", lambda v: (np.random.default_rng(1).random(v.shape) - 0.5) * np.sqrt(12)),
    "laplace": ("noise shape", lambda v: np.random.default_rng(1).laplace(size=v.shape) / np.sqrt(2)),
    "tails cut at 2.5": ("noise shape", lambda v: v.clip(-2.5, 2.5)),
    "other sign": ("fresh noise", held_sign),
    "lag of 5 coordinates": ("fresh noise", lambda v: (v + 0.3 * np.roll(v, 5, 1)) / np.sqrt(1.09)),
    "period 11": ("fresh noise", lambda v: np.tile(v[:11], (3, 1))[:STEPS]),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_noise_is_seen(fault: str) -> None:
    name, broken = BROKEN[fault]
    checks = {check.name: check for check in noise_checks(broken(np.random.default_rng(5).normal(size=(STEPS, SIZE))))}
    assert not checks[name].passed
    assert checks[name].level == LEVEL / TESTED


def test_values_that_come_again_anywhere() -> None:
    bits = np.random.default_rng(0).integers(0, 2**30, 5000)
    assert significance.repeats(bits) == 1.0
    again = np.concatenate([bits, bits[1234:1237]])
    assert significance.repeats(again) < 1e-9


@pytest.mark.parametrize("lag", [1, 2, 3, 7])
def test_batches_that_come_again(lag: int) -> None:
    rng = np.random.default_rng(0)
    joined = (rng.random((400, 200)) < 1 / 16) * 1.0
    joined = (
        joined[np.arange(400) // (2 * lag) * lag + np.arange(400) % lag] if lag > 1 else np.repeat(joined, 2, 0)[:400]
    )
    assert min(sampling_chances(joined, 1 / 16).values()) < 1e-12
