"""Adapters on frozen networks: what is trainable is clipped, drawn and stored; the rest is known by a fingerprint."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from confide.data.schema import Schema
from confide.errors import Refusal
from confide.methods import SGLD
from confide.posteriors.files import load_posterior
from confide.posteriors.frozen import fingerprint_of_frozen
from confide.running.journal import Checkpoints
from tests.running.adapters import ADAPTERS, task_of, write
from tests.running.architectures import RECORDS, Task, predict_alike
from tests.running.test_architectures import METHODS, fitted, kept

pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _libraries_warn() -> Iterator[None]:
    """peft and transformers warn of their own calls of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write("bert", folder)
    return folder


def test_a_low_rank_adapter_is_all_that_is_drawn_and_stored(bert: Path, tmp_path: Path) -> None:
    task = task_of("lora", bert)
    learnt = [value for value in task.module.parameters() if value.requires_grad]
    frozen = [value for value in task.module.parameters() if not value.requires_grad]
    run = fitted(SGLD(), task)
    assert run.posterior.mean().numel() == sum(value.numel() for value in learnt) < 400
    assert fingerprint_of_frozen(run.posterior.module) == fingerprint_of_frozen(task.module)
    kept(run, task, tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").stat().st_size < sum(value.numel() for value in frozen) * 4 / 2
    assert predict_alike(task_of("lora", bert), tmp_path), "the backbone is read from its folder again"


def test_another_backbone_is_refused(bert: Path, tmp_path: Path) -> None:
    """Whether it has other weights, another type or something else frozen."""
    task = task_of("last-layer", bert)
    run = fitted(SGLD(), task)
    run.posterior.save(tmp_path / "p")
    write("bert", tmp_path / "other", seed=1)
    for other in (task_of("last-layer", tmp_path / "other").module, task_of("last-layer", bert).module.half()):
        with pytest.raises(Refusal, match="frozen parameters are not those of the network that was fitted"):
            load_posterior(tmp_path / "p", other)
    moved = task_of("last-layer", bert).module
    with torch.no_grad():
        next(value for value in moved.parameters() if not value.requires_grad).view(-1)[-1] += 1e-6
    with pytest.raises(Refusal, match="frozen parameters"):
        load_posterior(tmp_path / "p", moved)


def test_a_run_that_was_stopped_does_not_go_on_with_another_backbone(tmp_path: Path) -> None:
    x = torch.rand(RECORDS, 3)

    def go_on(seed: int, stop: int = 0) -> Any:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2))
        task = Task(module, x, (x[:, 0] > 0.5).long(), Schema(classes=2, records=RECORDS))

        def kill(done: int, total: int) -> None:
            if done == stop:
                raise KeyboardInterrupt

        return fitted(SGLD(), task, 4, checkpoint=Checkpoints(tmp_path / "run", every=1), progress=kill)

    with pytest.raises(KeyboardInterrupt):
        go_on(seed=0, stop=2)
    with pytest.raises(Refusal, match="another"):
        go_on(seed=1)
    assert torch.isfinite(go_on(seed=0).posterior.mean()).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_with_every_method_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    write(ADAPTERS[name][0], tmp_path / "backbone")
    for kind, method in METHODS.items():
        task = task_of(name, tmp_path / "backbone")
        run = fitted(method, task)
        assert torch.isfinite(run.posterior.predict(task.new).probabilities).all()
        if kind == "bbp":
            assert 0 < run.posterior.facts["bayesian_share"] <= 1
        (tmp_path / "posteriors").mkdir(exist_ok=True)
        kept(run, task, tmp_path / "posteriors" / f"{kind}.safetensors")
    root = Path(__file__).parents[2]
    places = [str(tmp_path / "backbone"), str(tmp_path / "posteriors")]
    command = [sys.executable, "-m", "tests.running.adapters", name, *places]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0
