"""Every method in methods/ goes through this suite without being listed."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import confide
from confide import methods
from confide.methods.base import Problem
from confide.methods.sgd import SGD
from confide.running.fit import make_problem
from confide.sources.private_data import PrivateData
from confide.sources.replay import Recorder, Replay
from tests.conformance.conftest import Case, small_plan

METHODS = methods.names()
every_method = pytest.mark.parametrize("name", METHODS)


def draws_of(posterior: Any) -> Tensor:
    return posterior.sample(5, generator=torch.Generator().manual_seed(3))


def predicted(posterior: Any, x: Tensor) -> Tensor:
    """Mean prediction; posteriors that sample while they predict draw from torch's own stream."""
    torch.manual_seed(0)
    predictive = posterior.predict(x)
    return predictive.probabilities if hasattr(predictive, "probabilities") else predictive.mean


def replayed(method: Any, case: Case, plan: confide.Plan) -> tuple[Any, Any]:
    """The posterior of a run, and that of a second run from its releases with the data absent."""
    recorder = Recorder(case.data())
    first = confide.fit(method, case.module, recorder, plan, seed=5)
    again = confide.fit(method, case.module, Replay(recorder.releases, case.schema), plan, seed=5)
    return first.posterior, again.posterior


@every_method
def test_replay_is_bit_identical(name: str, case: Case) -> None:
    first, again = replayed(methods.get(name)(), case, small_plan(case))
    assert torch.equal(draws_of(first), draws_of(again))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(8))
    assert torch.equal(predicted(first, x), predicted(again, x))
    assert diagnosed(first)


def diagnosed(posterior: Any) -> bool:
    """It says whether noise is in its width; and a chain how far it moved and agrees with itself, or a warning."""
    chain = "burn_in_steps" in posterior.facts
    mixed = {"split_r_hat", "way"} <= set(posterior.facts) or "warning" in posterior.facts
    return posterior.facts.get("noise_in_width", "") != "" and (mixed or not chain)


def test_a_chain_that_says_nothing_of_itself_is_caught(case: Case) -> None:
    posterior = confide.fit(methods.get("sgld")(), case.module, case.data(), small_plan(case), seed=5).posterior
    facts = posterior.facts
    for names in (("noise_in_width",), ("warning", "way"), ("warning", "split_r_hat")):
        left = {name: value for name, value in facts.items() if name not in names}
        assert not diagnosed(posterior.with_likelihood(posterior.likelihood, left))


def test_replay_catches_a_method_that_smuggles_records(case: Case) -> None:
    calls = iter(range(10_000))

    @dataclass(frozen=True)
    class Smuggler(SGD):
        """Starts from a record in the first run; in the second the data is gone and something else is there."""

        name: ClassVar[str] = "smuggler"

        def init(self, problem: Problem) -> Any:
            problem.position[:4] = case.x[next(calls)]
            return super().init(problem)

    first, again = replayed(Smuggler(), case, small_plan(case))
    assert not torch.equal(draws_of(first), draws_of(again))


@every_method
def test_answer_moves_by_at_most_the_clip_between_neighbours(name: str, case: Case) -> None:
    """Noise off, the same state: one record more or less changes the sum by at most C."""
    method, clip = methods.get(name)(), 0.05
    plan = small_plan(case, noise_multiplier=None, private=False, clip=clip, sampling="full-batch", batch=None)
    problem = make_problem(method, case.module, case.schema, plan, seed=5)
    state = method.init(problem)
    whole = case.data()
    for position in range(4):
        query = method.ask(problem, state)
        everyone = whole.answer(query, plan.mechanism).sum.clone()
        kept = torch.arange(len(case.x)) != 13 * (position + 1)
        neighbour = PrivateData(case.x[kept], case.y[kept], schema=case.schema, seed=7)
        difference = everyone - neighbour.answer(query, plan.mechanism).sum
        assert difference.norm() <= clip * (1 + 1e-4)
        assert difference.norm() > 0, "a record that never counts would pass any clip"
        state = method.tell(problem, state, whole.answer(method.ask(problem, state), plan.mechanism))


@every_method
def test_an_empty_batch_is_a_step_of_noise(name: str, case: Case) -> None:
    plan = small_plan(case, records=60_000_000, batch=1)
    empty = replace(case, schema=replace(case.schema, records=60_000_000))
    recorder = Recorder(empty.data())
    run = confide.fit(methods.get(name)(), case.module, recorder, plan, seed=5)
    assert all(release.sum.std() > 0.5 for release in recorder.releases)
    assert torch.isfinite(draws_of(run.posterior)).all()


@every_method
def test_hostile_records_neither_raise_nor_spread(name: str, case: Case) -> None:
    x, y = case.x.clone(), case.y.clone()
    x[0], x[1], x[2], x[3], x[4] = torch.nan, torch.inf, -torch.inf, 1e38, 1e-45
    y[5], y[6] = 99, -1
    hostile = replace(case, x=x, y=y)
    run = confide.fit(methods.get(name)(), case.module, hostile.data(), small_plan(case, batch=50), seed=5)
    assert torch.isfinite(draws_of(run.posterior)).all()


@every_method
def test_a_ceiling_refuses_before_anything_is_spent(name: str, case: Case) -> None:
    ledger = confide.Ledger()
    ledger.limit(epsilon=0.01, delta=1e-5)
    data = case.data(ledger=ledger, name="digits")
    with pytest.raises(confide.BudgetExceeded):
        confide.fit(methods.get(name)(), case.module, data, small_plan(case), seed=5)
    assert not ledger.events("digits")


@every_method
def test_every_step_is_charged(name: str, case: Case) -> None:
    ledger = confide.Ledger()
    plan = small_plan(case)
    confide.fit(methods.get(name)(), case.module, case.data(ledger=ledger, name="d"), plan, seed=5)
    assert sum(event.count for event in ledger.events("d")) >= plan.steps


@every_method
def test_the_users_module_stays_as_it_was(name: str, case: Case) -> None:
    before = {key: value.clone() for key, value in case.module.state_dict().items()}
    confide.fit(methods.get(name)(), case.module, case.data(), small_plan(case), seed=5)
    after = case.module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.grad is None for p in case.module.parameters())
    assert not any(module._forward_hooks for module in case.module.modules())


@every_method
def test_posterior_survives_saving(name: str, case: Case, tmp_path: Path) -> None:
    run = confide.fit(methods.get(name)(), case.module, case.data(), small_plan(case), seed=5)
    run.posterior.save(tmp_path / "posterior.safetensors")
    again = confide.load_posterior(tmp_path / "posterior.safetensors")
    assert torch.equal(draws_of(run.posterior), draws_of(again))


@every_method
def test_what_the_width_counts_is_said(name: str, case: Case) -> None:
    """Whether privacy noise is part of the width; and of what says that it is, whether it got where it was going."""
    facts = confide.fit(methods.get(name)(), case.module, case.data(), small_plan(case), seed=5).posterior.facts
    said = facts["noise_in_width"]
    assert said.split(",")[0].split(":")[0] in ("counted", "not counted", "no width")
    if "chain" in said:
        assert "split_r_hat" in facts or "warning" in facts


def test_methods_are_discovered() -> None:
    assert {"sgd", "sgld"} <= set(METHODS)
    assert methods.SGLD is methods.get("sgld")
    with pytest.raises(ValueError, match=r"unknown; known: .*sgld"):
        methods.get("sgd2")


def test_every_method_is_in_the_documentation() -> None:
    """The page is made from what is found, so a new file appears in it; a method without a docstring would not."""
    text = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "pages.py"))["methods_page"]()
    for name in METHODS:
        assert f"## {name}\n" in text
        assert len((methods.get(name).__doc__ or "").split()) > 40
