"""A run is the same whatever `torch.set_default_device` names. "meta" holds no numbers, so nothing may land there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import confide
from confide import methods
from tests.conformance.conftest import Case, case_for, small_plan

QUICK = ("sgld", "mc-dropout", "last-layer", "additive")
OTHERS = tuple(name for name in methods.names() if name not in QUICK)
EVERYTHING = """
import importlib, pkgutil
import torch

torch.set_default_device("meta")
import confide

for found in pkgutil.walk_packages(confide.__path__, "confide."):
    if not found.name.endswith(("__main__", "libconfide")):
        for name, value in vars(importlib.import_module(found.name)).items():
            assert not (isinstance(value, torch.Tensor) and value.is_meta), f"{found.name}.{name}"
"""


@pytest.fixture
def elsewhere() -> Iterator[Any]:
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def fitted(name: str, case: Case, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What is predicted before and after a file."""
    run = confide.fit(methods.get(name)(), case.module, case.data(), small_plan(case, steps=5), seed=5)
    run.posterior.save(path)
    again = confide.load_posterior(path)
    return run.posterior.summary(case.x).centre, again.summary(case.x).centre


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_run_is_what_it_is_without_a_default_device(name: str, elsewhere: Any, tmp_path: Path) -> None:
    case = case_for(methods.get(name))
    case.data()
    wanted = fitted(name, case, tmp_path / "one")
    elsewhere()
    found = fitted(name, case, tmp_path / "two")
    for one, other in zip(found, wanted, strict=True):
        assert one.device.type == "cpu"
        assert torch.equal(one, other)


def test_an_estimator_is_not_moved_by_it(elsewhere: Any) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    elsewhere()
    private = confide.PrivateBayesClassifier(method="sgd", epsilon=1.0, assume_public=True)
    assert private.fit(x, (x[:, 0] > 0).astype(int)).predict_proba(x[:2]).shape == (2, 2)


@pytest.mark.slow
def test_no_constant_of_a_module_is_on_a_default_device() -> None:
    command = [sys.executable, "-W", "ignore", "-c", EVERYTHING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-400:]
