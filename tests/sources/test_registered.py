"""Records are known to a ledger by a keyed sketch, whether asked for or not: a renamed copy has no second budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide import methods
from confide.data.fingerprint import make_key
from confide.errors import BudgetExceeded, Refusal
from confide.privacy.ledger import Ledger
from tests.conformance.conftest import Case, classification, small_plan

DELTA = 1e-5


def fitted(case: Case, ledger: Any, name: str, order: torch.Tensor | None = None) -> confide.Run:
    rows = torch.arange(len(case.x)) if order is None else order
    x = case.x[rows]
    data = confide.PrivateData(x, case.y[rows], schema=case.schema, ledger=ledger, name=name)
    return confide.fit(methods.SGD(), case.module, data, small_plan(case), seed=3)


def test_a_renamed_copy_has_no_second_budget(tmp_path: Path) -> None:
    case, place = classification(), tmp_path / "budget.db"
    shuffled = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(1))
    first = fitted(case, place, "patients")
    with Ledger(place) as ledger:
        ledger.limit(1.01 * first.privacy.epsilon(DELTA), DELTA)
    with pytest.raises(BudgetExceeded, match="'patients'"):
        fitted(case, place, "visitors", shuffled)
    with Ledger(place) as ledger:
        assert ledger.datasets() == ("patients",)
        ledger.limit(100.0, DELTA)
    again = fitted(case, place, "visitors", shuffled[: len(shuffled) // 2])
    assert again.ledger is not None
    assert again.ledger["dataset"] == "patients"


def test_other_records_keep_their_own_name(tmp_path: Path) -> None:
    case, other = classification(), classification()
    other.x.add_(1.0)
    with Ledger(tmp_path / "budget.db") as ledger:
        fitted(case, ledger, "one")
        fitted(other, ledger, "two")
        assert ledger.datasets() == ("one", "two")


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    case, place = classification(), tmp_path / "budget.db"
    fitted(case, place, "d")
    key = tmp_path / "budget.db.key"
    assert key.stat().st_mode & 0o777 == 0o600
    made = key.read_bytes()
    fitted(case, place, "d")
    assert key.read_bytes() == made
    assert not list(tmp_path.glob("*.partial"))


def test_a_ledger_that_knows_records_by_another_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a new key a copy would not be recognised, and would have a new budget."""
    case, place = classification(), tmp_path / "budget.db"
    fitted(case, place, "d")
    (tmp_path / "budget.db.key").rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(Refusal, match=r"knows its data sets by.*CONFIDE_KEY"):
            fitted(case, place, "copy")
    make_key(tmp_path / "budget.db.key")
    with pytest.raises(Refusal, match="CONFIDE_KEY"):
        fitted(case, place, "copy")
    monkeypatch.setenv("CONFIDE_KEY", str(tmp_path / "elsewhere"))
    assert (fitted(case, place, "copy").ledger or {})["dataset"] == "d"
    with Ledger(place) as ledger:
        assert len(ledger.entries()) == 2


def test_a_ledger_in_memory_and_a_seeded_run_need_no_key(tmp_path: Path) -> None:
    case = classification()
    fitted(case, None, "d")
    data = case.data(ledger=tmp_path / "budget.db", name="d", seed=1)
    confide.fit(methods.SGD(), case.module, data, small_plan(case), seed=3)
    assert not (tmp_path / "budget.db.key").exists()


def test_a_checkpoint_goes_on_under_the_name_that_is_known(tmp_path: Path) -> None:
    case, place = classification(), tmp_path / "budget.db"
    fitted(case, place, "d")
    data = confide.PrivateData(case.x, case.y, schema=case.schema, ledger=place, name="copy")
    for _ in range(2):  # the second gives the result again, for nothing
        run = confide.fit(methods.SGD(), case.module, data, small_plan(case), seed=3, checkpoint=tmp_path / "kept")
        assert (run.ledger or {})["dataset"] == "d"
    with Ledger(place) as ledger:
        assert ledger.datasets() == ("d",)
        assert len(ledger.entries()) == 2
