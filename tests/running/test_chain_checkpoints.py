"""Chains with a checkpoint: killed in any chain they go on there, and nothing is paid for that was not released."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide.errors import Refusal
from confide.running.chains import ChainsInTurn
from confide.running.fit import make_problem
from confide.running.journal import Checkpoints
from tests.conformance.conftest import classification

CHAINS, STEPS, EVERY = 3, 12, 4


def plan_of() -> confide.Plan:
    return confide.plan(epsilon=2.0, delta=1e-5, records=60, batch=20, steps=STEPS, chains=CHAINS)


def fitted(ledger: confide.Ledger, kept: Path, progress: Any = None, chains: int = CHAINS) -> confide.Run:
    case = classification()
    data = case.data(ledger=ledger, name="d", seed=None)
    method = confide.methods.SGLD(thinning=1)
    place = Checkpoints(kept, every=EVERY)
    return confide.fit_chains(
        method, case.module, data, plan_of(), chains=chains, checkpoint=place, progress=progress, seed=1
    )


def paid(ledger: confide.Ledger) -> int:
    return sum(event.count for event in ledger.events("d"))


@pytest.mark.parametrize("stop", [3, STEPS, STEPS + 6, 2 * STEPS + 1])
def test_killed_in_any_chain_they_go_on(stop: int, tmp_path: Path) -> None:
    ledger, seen = confide.Ledger(), []

    def stopping(done: int, total: int) -> None:
        assert total == CHAINS * STEPS
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(ledger, tmp_path / "kept", stopping)
    assert paid(ledger) == CHAINS * STEPS  # all chains, before the first
    run = fitted(ledger, tmp_path / "kept", lambda done, _: seen.append(done))
    assert seen == list(range(stop + 1, CHAINS * STEPS + 1))
    assert CHAINS * STEPS <= paid(ledger) <= CHAINS * STEPS + EVERY
    assert sum(event.count for event in run.privacy.events) == paid(ledger)
    assert run.posterior.facts["chains"] == CHAINS
    assert len(run.posterior.draws) == 18  # type: ignore[attr-defined]
    assert run.posterior.facts["largest_r_hat"] > 0
    assert run.plan.steps == STEPS
    assert run.method.name == "sgld"


def test_a_budget_for_all_chains_is_enough_and_less_refuses_all(tmp_path: Path) -> None:
    ledger = confide.Ledger()
    ledger.limit(2.0, 1e-5)
    with pytest.raises(confide.BudgetExceeded):
        fitted(ledger, tmp_path / "four", chains=CHAINS + 1)
    assert not ledger.entries()
    run = fitted(ledger, tmp_path / "three")
    assert 1.99 < run.privacy.epsilon() <= 2.0


def test_every_chain_starts_where_the_first_did() -> None:
    """Chains that went on from each other would agree too well. The variant that does so is caught."""
    case, plan = classification(), plan_of()
    whole = replace(plan, blocks=plan.blocks * CHAINS, chains=1)
    starts = []
    for forgets in (False, True):
        method = ChainsInTurn(confide.methods.SGLD(thinning=1), CHAINS, STEPS)
        problem = make_problem(method, case.module, case.data().schema, whole, seed=1)
        state = method.init(problem)
        first = problem.position.clone()
        for step in range(STEPS):
            if forgets and step == STEPS - 1:
                state = replace(state, start=problem.position)
            query = method.ask(problem, state)
            state = method.tell(problem, state, confide_release(query.size))
        starts.append(torch.equal(problem.position, first))
        assert len(state.finished) == 1
    assert starts == [True, False]


def confide_release(size: int) -> Any:
    from confide.sources.queries import Release

    mechanism = plan_of().mechanism
    return Release(torch.ones(size), mechanism.noise_std, mechanism.event(), mechanism.expected_batch)


def test_processes_and_a_checkpoint_are_one_sentence(tmp_path: Path) -> None:
    case = classification()
    with pytest.raises(Refusal, match=r"jobs=2: a checkpoint"):
        confide.fit_chains(
            confide.methods.SGLD(thinning=1), case.module, case.data(), plan_of(), chains=CHAINS, jobs=2,
            reopen=case.data, checkpoint=tmp_path / "c",
        )  # fmt: skip


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_estimator_with_chains_that_was_stopped_goes_on(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression learns its noise by a closing question about all chains, paid for with them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(200, 2, generator=generator).numpy()
    y = (x[:, 0] > 0.5).astype(int) if task == "classification" else x[:, 0]
    facts: Any = {"classes": 2} if task == "classification" else {"target_bounds": (0, 1)}
    kind = confide.PrivateBayesClassifier if task == "classification" else confide.PrivateBayesRegressor
    model: Any = kind(
        "sgld", epsilon=2.0, bounds=(0, 1), records=200, hidden=(), steps=STEPS, chains=2, name="d", **facts,
        checkpoint=Checkpoints(tmp_path / "kept", every=EVERY), ledger=tmp_path / "b.db",
    )  # fmt: skip
    usual, told = confide.methods.SGLD.tell, iter(range(1000))

    def stopping(*arguments: Any) -> Any:
        if next(told) == 2 + STEPS + 3:  # two of the rehearsal
            raise MemoryError
        return usual(*arguments)

    monkeypatch.setattr(confide.methods.SGLD, "tell", stopping)
    with pytest.raises(MemoryError) as found:
        model.fit(x, y)
    assert "the same call goes on" in "".join(found.value.__notes__)
    monkeypatch.undo()
    model.fit(x, y)
    assert model.run_.posterior.facts["chains"] == 2
    with confide.Ledger(tmp_path / "b.db") as ledger:
        extra = sum(e.count for e in ledger.events("d")) - 2 * STEPS
    assert (task == "regression") <= extra <= EVERY + (task == "regression")
    assert len(model.predict(x[:3])) == 3
