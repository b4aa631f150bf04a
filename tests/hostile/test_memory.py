"""What a run holds in memory stays flat over its steps; a leak of 32 kilobytes a step is caught."""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from benchmarks.memory import growth
from confide import methods
from confide.running.journal import Checkpoints


def leak(kept: list[torch.Tensor]) -> object:
    kept.append(torch.ones(8192))
    return None


def grown(planted: bool) -> float:
    """Megabytes over a thousand steps, after what is made once was made."""
    growth(100, methods.SGD())
    gc.collect()
    kept: list[torch.Tensor] = []
    found = growth(1000, methods.SGD(), fault=lambda: leak(kept)) if planted else growth(1000, methods.SGD())
    return float(found["grown_mb"])


@pytest.mark.slow
def test_flat_over_a_thousand_steps_and_a_leak_is_caught() -> None:
    """A release or batch kept by accident is about as large as the planted 32 kilobytes.

    In processes of their own: one that has run other tests has free memory in which a leak does not show.
    """
    with ProcessPoolExecutor(2, get_context("spawn")) as fresh:
        sound, leaking = fresh.map(grown, (False, True))
    assert sound < 0.7
    assert leaking > 1.4


@pytest.mark.slow
@pytest.mark.timeout(1800)  # twenty thousand steps, perhaps beside others
@pytest.mark.parametrize("name", ["sgld", "sgd", "bbp"])
def test_flat_over_ten_thousand_steps(name: str, tmp_path: Path) -> None:
    """With draws kept on the disk too: the last hundred draws of a sampler at most stay in memory (0.6 MB here)."""
    method = methods.get(name)
    growth(100, method())
    assert growth(10_000, method())["grown_mb"] < 2.0
    assert growth(10_000, method(), Checkpoints(tmp_path / "run", every=500))["grown_mb"] < 3.0
