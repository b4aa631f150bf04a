"""Networks of others, from fit to predictions in a fresh process, with every kind of method."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.data.labels import NO_LABEL
from confide.data.trees import map_tensors, rows_of, tensors_in
from confide.errors import Refusal, SpeedWarning
from confide.methods import BBP, SEP, SGLD, MCDropout
from confide.methods.base import Method
from confide.running.fit import Run
from tests.running import (  # noqa: F401 - their networks join the table
    further_architectures,
    more_architectures,
    unusual_architectures,
)
from tests.running.architectures import RECORDS, TASKS, Task, same_predictions

# of the transformers library, which still scripts a few functions
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
QUICK = ("gpt2", "lstm-on-tokens", "ft-transformer", "set-transformer", "gru-on-series")
METHODS: dict[str, Method] = {
    "sgld": SGLD(),
    "bbp": BBP(predictive_draws=3),
    "mc-dropout": MCDropout(predictive_draws=3),
}


def made(name: str) -> Task:
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


def many(name: str, seeds: range) -> Task:
    """The network of the first seed, with the records of all of them."""
    tasks = [TASKS[name](seed=seed) for seed in seeds]
    parts = [tensors_in(task.x) for task in tasks]
    x = map_tensors(lambda _, *all_of: torch.cat(all_of), tasks[0].x, *parts)
    return replace(tasks[0], x=x, y=torch.cat([task.y for task in tasks]))


def learnt(name: str, method: Method) -> Run:
    """A run on eight times as many records, so that noise at epsilon 100 leaves something to be learnt."""
    task = many(name, range(8))
    schema = replace(task.schema, records=len(task.y))
    plan = confide.plan(records=len(task.y), batch=96, steps=100, clip=1.0, epsilon=100.0, delta=1e-4)
    data = confide.PrivateData(task.x, task.y, schema=schema, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeedWarning)
        return confide.fit(method, task.module, data, plan, likelihood=task.likelihood, seed=1)


def advantage(run: Run, new: Task) -> float:
    """How much more often a new answer is found than by saying the commonest one."""
    found, y = run.posterior.summary(new.x).centre.argmax(-1), new.y
    if getattr(new.likelihood, "shifted", False):
        found, y = found[:, :-1], y[:, 1:]
    known = y != NO_LABEL
    commonest = float(y[known].bincount().max() / known.sum())
    return float((found == y)[known].double().mean()) - commonest


BETTER = 0.08
"""Than chance, on two hundred records that nobody saw: two standard errors and more."""


@pytest.mark.parametrize("name", ["tab-m", "lstm-on-tokens"])
def test_learning_is_better_than_chance(name: str) -> None:
    assert advantage(learnt(name, METHODS["bbp"]), many(name, range(100, 104))) > BETTER


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TASKS)
def test_every_network_learns_by_every_method(name: str, method: str) -> None:
    assert advantage(learnt(name, METHODS[method]), many(name, range(100, 104))) > BETTER


def test_rows_of_a_tree_stay_together() -> None:
    task = made("ft-transformer")
    few = rows_of(task.x, slice(2, 4))
    assert [len(part) for part in few] == [2, 2, 2]
