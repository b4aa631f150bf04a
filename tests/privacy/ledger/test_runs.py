"""Runs in the ledger: what a run has paid for can be released once, by one attempt."""

from __future__ import annotations

import getpass
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from confide.errors import BudgetExceeded, LedgerError, StepsClaimed
from confide.privacy.events import GaussianEvent
from confide.privacy.ledger import Ledger, Steps

STEP = GaussianEvent(10.0)


def test_a_claim_is_kept_and_cannot_be_made_twice(place: str) -> None:
    with Ledger(place) as ledger:
        assert ledger.claimed("r") == 0
        ledger.charge_all([STEP], "fit", "d", count=100, run="r")
        assert ledger.claim("r", 1, 50, dataset="d").steps == Steps(1, 50)
    with Ledger(place) as again:
        assert again.claimed("r") == 50
        again.claim("r", 51, 100)
        before = again.head
        for first, last in ((51, 100), (100, 101), (1, 1)):
            with pytest.raises(StepsClaimed, match="steps up to 100 of run 'r'") as refusal:
                again.claim("r", first, last)
            assert refusal.value.highest == 100
            with pytest.raises(StepsClaimed):
                again.charge_all([STEP], run="r", first_step=first, last_step=last)
        assert again.head == before
        assert again.paid("r") == (GaussianEvent(10.0, count=100),)
        assert again.paid("another") == ()
        assert [row["kind"] for row in again.to_rows()] == ["charge", "claim", "claim"]
        assert len(again.entries()) == 1


def test_paying_and_claiming_is_one_transaction(place: str) -> None:
    """A refusal for either reason leaves neither behind."""
    ledger = Ledger(place)
    ledger.limit(0.5, 1e-5)
    with pytest.raises(BudgetExceeded):
        ledger.charge_all([STEP], run="r", count=10**6, first_step=1, last_step=10)
    assert ledger.claimed("r") == 0
    both = ledger.charge_all([STEP, GaussianEvent(20.0)], run="r", first_step=1, last_step=10)
    assert [entry.steps for entry in both] == [Steps(1, 10)] * 2
    assert [entry.plan for entry in both] == [both[0].position] * 2
    spent = ledger.spent()
    with pytest.raises(StepsClaimed):
        ledger.charge_all([STEP], run="r", first_step=10, last_step=12)
    assert (ledger.claimed("r"), ledger.spent()) == (10, spent)


def test_a_run_that_another_ledger_was_paid_by_claims_nothing() -> None:
    with pytest.raises(LedgerError, match="was never charged here; pay"):
        Ledger().claim("r", 1, 10)


@pytest.mark.parametrize(
    "names",
    [
        {"run": ""},
        {"run": 3},
        {"first_step": 1, "last_step": 2},
        {"run": "r", "first_step": 0, "last_step": 2},
        {"run": "r", "first_step": 3, "last_step": 2},
        {"run": "r", "first_step": 1},
        {"run": "r", "first_step": 1.0, "last_step": 2},
        {"run": "r", "first_step": True, "last_step": 2},
    ],
)
def test_a_wrong_claim_is_refused(names: dict[str, Any]) -> None:
    ledger = Ledger()
    with pytest.raises((TypeError, ValueError), match=r"run=|first_step="):
        ledger.charge_all([STEP], **names)
    assert ledger.head.count == 0


def test_of_many_attempts_one_gets_the_steps(place: str) -> None:
    """Eight copies of one folder go on at once. Would catch a look at the highest step outside the lock."""
    Ledger(place).charge_all([STEP], run="r", count=50)
    barrier = threading.Barrier(8)

    def attempt(_: int) -> int:
        taken = 0
        with Ledger(place) as ledger:
            barrier.wait()
            for step in range(1, 51, 10):
                try:
                    ledger.claim("r", step, step + 9)
                    taken += 10
                except StepsClaimed:
                    continue
        return taken

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 50


def test_entries_name_who_and_the_version(place: str) -> None:
    with Ledger(place, who="Ada Lovelace") as ledger:
        ledger.charge(STEP)
        ledger.limit(1.0, 1e-5)
    with Ledger(place) as other:
        other.charge(STEP)
        written = [*other.entries(), *other.limits()]
    assert [entry.who for entry in written] == ["Ada Lovelace", getpass.getuser(), "Ada Lovelace"]
    assert all(entry.version for entry in written)
    assert [row["who"] for row in other.to_rows()] == ["Ada Lovelace", "Ada Lovelace", getpass.getuser()]
    for wrong in ("", "  ", "a\nb", 3):
        with pytest.raises(ValueError, match="who="):
            Ledger(who=wrong)  # type: ignore[arg-type]
