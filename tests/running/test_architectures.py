"""Networks of others, from fit to predictions in a fresh process, with every kind of method."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.data.trees import rows_of, size_of
from confide.errors import Refusal, SpeedWarning
from confide.methods import BBP, SEP, SGLD, MCDropout
from confide.methods.base import Method
from confide.running.fit import Run
from tests.running.architectures import RECORDS, TASKS, Task, same_predictions

QUICK = ("gpt2", "lstm-on-tokens", "ft-transformer")
METHODS: dict[str, Method] = {
    "sgld": SGLD(),
    "bbp": BBP(predictive_draws=3),
    "mc-dropout": MCDropout(predictive_draws=3),
}


def made(name: str) -> Task:
    if name == "timm-vit":
        pytest.importorskip("timm")
    return TASKS[name]()


def fitted(method: Method, task: Task, steps: int = 2, **options: Any) -> Run:
    plan = confide.plan(records=RECORDS, batch=12, steps=steps, clip=1.0, epsilon=50.0, delta=1e-3)
    data = confide.PrivateData(task.x, task.y, schema=task.schema, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeedWarning)
        return confide.fit(method, task.module, data, plan, likelihood=task.likelihood, seed=1, **options)


def kept(run: Run, task: Task, path: Path) -> None:
    run.posterior.save(path)
    torch.save(run.posterior.summary(task.new).centre, path.with_suffix(".pt"))


@pytest.mark.parametrize("name", QUICK)
def test_a_network_of_others_is_fitted_saved_and_predicts_the_same(name: str, tmp_path: Path) -> None:
    task = made(name)
    run = fitted(SGLD(), task)
    found = run.posterior.predict(task.new)
    assert torch.isfinite(found.probabilities).all()
    summary = run.posterior.summary(task.new)
    assert torch.allclose(summary.centre.float(), found.probabilities, atol=1e-5)
    assert torch.allclose(summary.epistemic.float(), found.epistemic, atol=1e-4)
    kept(run, task, tmp_path / "sgld.safetensors")
    assert same_predictions(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_network_with_every_method_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    task = made(name)
    for kind, method in METHODS.items():
        run = fitted(method, task)
        assert torch.isfinite(run.posterior.predict(task.new).probabilities).all()
        kept(run, task, tmp_path / f"{kind}.safetensors")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.running.architectures", name, str(tmp_path)]
    assert subprocess.run(command, cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("method", ["bbp", "mc-dropout"])
def test_converted_layers_work_inside_of_a_library_model(method: str, tmp_path: Path) -> None:
    task = made("gpt2")
    run = fitted(METHODS[method], task)
    if method == "bbp":  # all but the tied table of words and the scales of normalisations
        assert 0.8 < run.posterior.facts["bayesian_share"] < 1
    kept(run, task, tmp_path / "one.safetensors")
    assert same_predictions("gpt2", tmp_path)


def test_expectation_propagation_refuses_a_network_of_others_before_it_pays() -> None:
    task = made("bert")
    plan = confide.plan(records=RECORDS, batch=12, steps=2, clip=1.0, epsilon=50.0, delta=1e-3)
    data = confide.PrivateData(task.x, task.y, schema=task.schema)
    with pytest.raises(Refusal, match="module"):
        confide.fit(SEP(), task.module, data, plan)
    assert not data.ledger.entries()


def test_a_killed_run_on_trees_goes_on_where_it_was(tmp_path: Path) -> None:
    task = made("ft-transformer")

    class KilledError(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == 3:
            raise KilledError

    from confide.running.journal import Checkpoints

    with pytest.raises(KilledError):
        fitted(SGLD(), task, steps=4, checkpoint=Checkpoints(tmp_path / "run", every=2), progress=kill)
    steps: list[int] = []
    run = fitted(
        SGLD(), task, 4, checkpoint=Checkpoints(tmp_path / "run", every=2), progress=lambda done, _: steps.append(done)
    )
    assert steps == [4], "an exception leaves the last whole step behind"
    assert torch.isfinite(run.posterior.predict(task.new).probabilities).all()


def test_a_record_with_an_unknown_id_counts_as_zero() -> None:
    """The release is the one without the record, bit by bit; a vocabulary that says nothing of it does not hide it."""
    task = made("bert")
    broken = {name: tensor.clone() for name, tensor in task.x.items()}
    broken["input_ids"][0, 0] = 10**6
    plan = confide.plan(records=RECORDS, steps=1, clip=1.0, epsilon=50.0, delta=1e-3, sampling="full-batch")
    silent = task.y.clone()
    silent[0] = -5  # takes the same record out by its label

    def moved(x: Any, y: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        data = confide.PrivateData(x, y, schema=task.schema, seed=3)
        return confide.fit(SGLD(), task.module.eval(), data, plan, seed=1).posterior.mean()

    without = moved(task.x, silent)
    assert torch.equal(moved(broken, task.y), without)
    assert not torch.equal(moved(task.x, task.y), without)


def test_learning_is_better_than_chance() -> None:
    task = made("tab-m")
    x, y = {"x": task.x["x"].repeat(8, 1)}, task.y.repeat(8)
    records = size_of(x)
    schema = confide.Schema(classes=2, records=records, inputs=task.schema.inputs)
    plan = confide.plan(records=records, batch=96, steps=60, clip=1.0, epsilon=100.0, delta=1e-4)
    data = confide.PrivateData(x, y, schema=schema, seed=1)
    run = confide.fit(SGLD(), task.module, data, plan, seed=1)
    probabilities = run.posterior.summary(task.x).centre
    assert (probabilities.argmax(1) == task.y).float().mean() > 0.75


def test_rows_of_a_tree_stay_together() -> None:
    task = made("ft-transformer")
    few = rows_of(task.x, slice(2, 4))
    assert [len(part) for part in few] == [2, 2, 2]
