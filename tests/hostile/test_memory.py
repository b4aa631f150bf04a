"""What a run holds in memory stays flat over its steps; a leak of two kilobytes a step is caught."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from benchmarks.memory import growth
from confide import methods
from confide.checkpoints import Checkpoints


def leak(kept: list[torch.Tensor]) -> object:
    kept.append(torch.ones(512))
    return None


def test_flat_over_a_thousand_steps_and_a_leak_is_caught() -> None:
    """A release or batch kept by accident is larger than the planted two kilobytes."""
    growth(100, methods.SGD())  # what is made once is made here
    gc.collect()
    assert growth(1000, methods.SGD())["grown_mb"] < 0.7
    kept: list[torch.Tensor] = []
    assert growth(1000, methods.SGD(), fault=lambda: leak(kept))["grown_mb"] > 1.4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgld", "sgd", "bbp"])
def test_flat_over_ten_thousand_steps(name: str, tmp_path: Path) -> None:
    """With draws kept on the disk too: the last hundred draws of a sampler at most stay in memory (0.6 MB here)."""
    method = methods.get(name)
    growth(100, method())
    assert growth(10_000, method())["grown_mb"] < 2.0
    assert growth(10_000, method(), Checkpoints(tmp_path / "run", every=500))["grown_mb"] < 3.0
