"""Runs that were paid for ahead: one charge for all, each answer once, and statements that say what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import confide
from confide import methods
from confide.errors import BudgetExceeded, Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import merged
from confide.sources.adaptive_clip import AdaptiveClip
from confide.sources.ahead import PaidAhead, Purse, pay_ahead
from confide.sources.base import Source, Stretch
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery
from confide.sources.together import PaidTogether

RECORDS = 60
X = torch.randn(RECORDS, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
PLAN = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=20, steps=4)
BESIDE = SampledGaussian(5.0, 1.0, 1.0, 1, "full-batch")


def private(ledger: confide.Ledger) -> PrivateData:
    return PrivateData(X, Y, schema=confide.Schema(classes=2, records=RECORDS), name="d", ledger=ledger)


def one_fit(source: Source) -> confide.Run:
    return confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, seed=1)


def test_two_sources_share_one_charge() -> None:
    ledger = confide.Ledger()
    first, second = private(ledger), private(ledger)
    purse = pay_ahead(first, PLAN.blocks * 2, "both")
    paid = ledger.events("d")
    runs = [one_fit(PaidAhead(first, purse)), one_fit(PaidAhead(second, purse))]
    assert ledger.events("d") == paid == ledger.paid(purse.run)
    assert all(run.privacy.events == PLAN.events() for run in runs)
    assert {entry.purpose for entry in ledger.entries()} == {"both"}


def test_what_the_purse_does_not_hold_is_charged() -> None:
    ledger = confide.Ledger()
    data = private(ledger)
    purse = pay_ahead(data, PLAN.blocks, "one")
    for _ in range(2):
        one_fit(PaidAhead(data, purse))
    assert sum(event.count for event in ledger.events("d")) == 2 * PLAN.steps
    data.answer(StatisticQuery(lambda x, y: x, 3), PLAN.mechanism)  # nothing was left open for anybody
    assert sum(event.count for event in ledger.events("d")) == 2 * PLAN.steps + 1


def test_all_or_nothing() -> None:
    ledger = confide.Ledger()
    ledger.limit(sound_epsilon(PLAN.events(), 1e-5) * 1.01, 1e-5)
    with pytest.raises(BudgetExceeded):
        pay_ahead(private(ledger), PLAN.blocks * 2, "both")
    assert ledger.events("d") == ()


def test_questions_beside_and_chains() -> None:
    ledger = confide.Ledger()
    data = private(ledger)
    sampler = methods.SGLD(burn_in=0.0, thinning=1)
    purse = pay_ahead(data, [(BESIDE, 1), *(PLAN.blocks * 3)], "chains and a histogram")
    paid = ledger.events("d")
    source = PaidTogether(PaidAhead(data, purse), beside=[(BESIDE, 1)])
    run = confide.fit_chains(sampler, torch.nn.Linear(3, 2), source, PLAN, chains=3, seed=1)
    data.answer(StatisticQuery(lambda x, y: x, 3), BESIDE)
    assert set(merged(run.privacy.events)) == set(merged(ledger.events("d"))) == set(merged(paid))


def test_a_wrapper_that_charges_beside_states_and_pays_it() -> None:
    """A clip that asks more than was paid ahead: the whole run is charged, and stated, as usual."""
    ledger = confide.Ledger()
    data = private(ledger)
    purse = pay_ahead(data, PLAN.blocks, "one")
    ahead = ledger.events("d")
    run = one_fit(AdaptiveClip(PaidAhead(data, purse), count_noise=3.0))
    assert set(merged((*ahead, *run.privacy.events))) == set(merged(ledger.events("d")))


def test_no_checkpoint(tmp_path: Path) -> None:
    data = private(confide.Ledger())
    source = PaidAhead(data, pay_ahead(data, PLAN.blocks, "one"))
    with pytest.raises(Refusal, match="checkpoint: a run that was paid for with others"):
        confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, checkpoint=tmp_path / "run")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of jax, where a benchmark's test has loaded it
def test_a_fork_holds_an_empty_purse(tmp_path: Path) -> None:
    purse = pay_ahead(private(confide.Ledger(tmp_path / "book.db")), PLAN.blocks, "one")
    child = os.fork()
    if child == 0:
        os._exit(int(purse.take(PLAN.blocks)))
    assert os.waitpid(child, 0)[1] == 0
    assert purse.take(PLAN.blocks)


class TestWhatWasPaidForIsUsedOnce:
    """Seen: purses that number their steps anew had 20 releases for 4 that were booked."""

    def test_not_under_other_numbers_of_steps(self) -> None:
        ledger = confide.Ledger()
        data = private(ledger)
        run = pay_ahead(data, PLAN.blocks, "one").run
        one_fit(PaidAhead(data, Purse(run, PLAN.blocks)))
        for claimed in (100, 4, 17):
            with pytest.raises(Refusal, match="4 paid, 4 used before"):
                one_fit(PaidAhead(data, Purse(run, PLAN.blocks, claimed=claimed)))
        assert sum(event.count for event in ledger.events("d")) == PLAN.steps

    def test_not_without_a_claim(self) -> None:
        data = private(confide.Ledger())
        run = pay_ahead(data, PLAN.blocks, "one").run
        with pytest.raises(Refusal, match="must be claimed"):
            data.charge((), "", Stretch(run, None, PLAN.blocks))

    def test_not_a_part_of_it_twice(self) -> None:
        data = private(confide.Ledger())
        run = pay_ahead(data, PLAN.blocks, "one").run
        data.charge((), "", Stretch(run, (1, 3), ((PLAN.mechanism, 3),)))
        with pytest.raises(Refusal, match="4 paid, 3 used before"):
            data.charge((), "", Stretch(run, (4, 5), ((PLAN.mechanism, 2),)))
        data.charge((), "", Stretch(run, (4, 4), ((PLAN.mechanism, 1),)))

    def test_not_beside_the_plan(self) -> None:
        data = private(confide.Ledger())
        run = pay_ahead(data, PLAN.blocks, "one").run
        with pytest.raises(Refusal, match="has not paid for 1 x"):
            data.charge((), "", Stretch(run, (1, 4), PLAN.blocks, ((BESIDE, 1),)))

    def test_not_in_another_process(self, tmp_path: Path) -> None:
        path = tmp_path / "budget.db"
        data = private(confide.Ledger(path))
        run = pay_ahead(data, PLAN.blocks, "one").run
        child = os.fork()
        if child == 0:
            other = private(confide.Ledger(path))
            other.charge((), "", Stretch(run, (1, 4), PLAN.blocks))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(Refusal, match="4 used before"):
            data.charge((), "", Stretch(run, (5, 8), PLAN.blocks))

    def test_nor_by_a_charge_that_pays_for_less_than_it_hands_out(self) -> None:
        ledger = confide.Ledger()
        data = private(ledger)
        with pytest.raises(Refusal, match="has not paid for 4 x"):
            data.charge([(PLAN.mechanism, 3)], "", Stretch("r", (1, 4), ((PLAN.mechanism, 4),)))
        assert not ledger.events("d")  # refused as a whole: nothing was written
