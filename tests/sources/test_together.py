"""Several releases paid for in one go: once each, all or none, and never one too few."""

from __future__ import annotations

import pytest
import torch

import confide
from confide.data.schema import Schema
from confide.errors import BudgetExceeded
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.ledger import Ledger
from confide.sources.together import PaidTogether

FIT = SampledGaussian(2.0, 1.0, 0.5, 20)
BESIDE = SampledGaussian(5.0, 1.0, 1.0, 1, "full-batch")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def data(ledger: Ledger) -> confide.PrivateData:
    schema = Schema(records=20)
    return confide.PrivateData(torch.zeros(20, 1), torch.zeros(20), schema=schema, ledger=ledger, name="d")


def paid_steps(ledger: Ledger) -> int:
    return sum(entry.event.count for entry in ledger.entries() if entry.event is not None)


def test_the_first_charge_pays_for_all_runs_and_the_next_ones_are_free(
    data: confide.PrivateData, ledger: Ledger
) -> None:
    source = PaidTogether(data, times=3)
    for _ in range(3):
        source.charge([(FIT, 7)])
        assert paid_steps(ledger) == 21


def test_a_run_more_than_was_paid_for_is_charged(data: confide.PrivateData, ledger: Ledger) -> None:
    source = PaidTogether(data, times=2)
    for _ in range(3):
        source.charge([(FIT, 7)])
    assert paid_steps(ledger) == 28


def test_another_charge_than_the_one_paid_for_is_charged(data: confide.PrivateData, ledger: Ledger) -> None:
    source = PaidTogether(data, times=2)
    source.charge([(FIT, 7)])
    source.charge([(FIT, 8)])
    assert paid_steps(ledger) >= 14 + 8


def test_what_is_beside_is_paid_for_once(data: confide.PrivateData, ledger: Ledger) -> None:
    source = PaidTogether(data, beside=[(BESIDE, 1)], purpose="a histogram")
    source.charge([(FIT, 7)], purpose="fit")
    source.charge([(FIT, 7)], purpose="fit")
    assert paid_steps(ledger) == 1 + 7 + 7
    assert {entry.purpose for entry in ledger.entries() if entry.event is not None} == {"fit and a histogram"}


def test_a_budget_for_some_of_them_refuses_all(data: confide.PrivateData, ledger: Ledger) -> None:
    ledger.limit(sound_epsilon((FIT.event(10),), 1e-3), 1e-3)  # one run and a half
    with pytest.raises(BudgetExceeded):
        PaidTogether(data, times=3).charge([(FIT, 7)])
    assert paid_steps(ledger) == 0
    PaidTogether(data).charge([(FIT, 7)])
    assert paid_steps(ledger) == 7
