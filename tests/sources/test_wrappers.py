"""Every wrapper, in every order: a run states what the ledger was charged, and nothing of the protocol is lost."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import confide
from confide import methods
from confide.errors import BudgetExceeded, Refusal
from confide.mechanism.gaussian import SampledGaussian
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Event, merged
from confide.sources.adaptive_clip import AdaptiveClip
from confide.sources.base import Part, Receipt, Source, Stretch, Wrapper
from confide.sources.hold_out import HoldOut
from confide.sources.private_data import PrivateData
from confide.sources.queries import StatisticQuery
from confide.sources.replay import Recorder, Replay
from confide.sources.together import PaidTogether

RECORDS = 60
X = torch.randn(RECORDS, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
BESIDE = SampledGaussian(5.0, 1.0, 1.0, 1, "full-batch")
PLAN = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=20, steps=4)

WRAPPERS: dict[str, Callable[[Source], Source]] = {
    "recorder": Recorder,
    "hold-out": lambda source: HoldOut(source, X[:5], Y[:5]),
    "together": PaidTogether,
    "together, beside": lambda source: PaidTogether(source, beside=[(BESIDE, 1)], purpose="a histogram"),
    "adaptive clip": lambda source: AdaptiveClip(source, count_noise=3.0),
}
ORDERS = [*itertools.product(WRAPPERS, repeat=1), *itertools.product(WRAPPERS, repeat=2)]
TRIPLES = list(itertools.permutations(WRAPPERS, 3))


def private(**options: Any) -> PrivateData:
    return PrivateData(X, Y, schema=confide.Schema(classes=2, records=RECORDS), name="d", **options)


def wrapped(source: Source, order: Sequence[str]) -> Source:
    for name in order:
        source = WRAPPERS[name](source)
    return source


def as_set(events: Sequence[Event]) -> set[Event]:
    return set(merged(events))


def check_statement(order: Sequence[str], fit: Callable[[Source], confide.Run]) -> None:
    data = private()
    run = fit(wrapped(data, order))
    assert as_set(run.privacy.events) == as_set(data.ledger.events("d"))
    assert run.privacy.epsilon() == pytest.approx(sound_epsilon(data.ledger.events("d"), 1e-5))


def one_fit(source: Source) -> confide.Run:
    return confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, seed=1)


@pytest.mark.parametrize("order", ORDERS, ids=" in ".join)
def test_what_is_stated_is_what_was_charged(order: Sequence[str]) -> None:
    check_statement(order, one_fit)


@pytest.mark.parametrize("order", TRIPLES, ids=" in ".join)
def test_three_around_each_other(order: Sequence[str]) -> None:
    check_statement(order, one_fit)


@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) == 1], ids=" in ".join)
def test_chains_state_what_was_charged(order: Sequence[str]) -> None:
    def chains(source: Source) -> confide.Run:
        sampler = methods.SGLD(burn_in=0.0, thinning=1)
        return confide.fit_chains(sampler, torch.nn.Linear(3, 2), source, PLAN, chains=3, seed=1)

    check_statement(order, chains)


def test_a_wrapper_that_hides_a_charge_is_caught() -> None:
    """Planted: a source that charges beside the plan and does not say so."""

    class Hidden(AdaptiveClip):
        def charge(self, parts: Sequence[Part], purpose: str = "", stretch: Stretch | None = None) -> Receipt:
            return super().charge(parts, purpose, stretch).stating(self._source.price(parts))

    data = private()
    run = one_fit(Hidden(data))
    assert as_set(run.privacy.events) != as_set(data.ledger.events("d"))


@pytest.mark.parametrize("order", ORDERS, ids=" in ".join)
def test_a_budget_that_does_not_suffice_for_all_pays_nothing(order: Sequence[str]) -> None:
    ledger = confide.Ledger()
    ledger.limit(sound_epsilon(PLAN.events(), 1e-5) * 0.99, 1e-5)
    with pytest.raises(BudgetExceeded):
        one_fit(wrapped(private(ledger=ledger), order))
    assert ledger.events("d") == ()


def test_a_wrapper_forwards_the_whole_protocol() -> None:
    members = {name for name in vars(Source) if not name.startswith("_")}
    assert members == {name for name in vars(Wrapper) if not name.startswith("_")}
    for kind in (PrivateData, Replay, *Wrapper.__subclasses__()):
        for name in members:
            ours, theirs = inspect.getattr_static(kind, name, None), inspect.getattr_static(Source, name)
            if inspect.isfunction(theirs):
                assert inspect.isfunction(ours), f"{kind.__name__}.{name}"
                given, wanted = (list(inspect.signature(one).parameters) for one in (ours, theirs))
                assert given == wanted, f"{kind.__name__}.{name}"


def test_what_a_source_is_reaches_through_every_wrapper(tmp_path: Path) -> None:
    for order in ORDERS:
        data = private(seed=3)
        source = wrapped(data, order)
        assert (source.name, source.seeded, source.schema, source.ledger) == ("d", True, data.schema, data.ledger)
        assert one_fit(source).privacy.seeded


@pytest.mark.parametrize("order", ORDERS, ids=" in ".join)
def test_checkpoints_through_wrappers(order: Sequence[str], tmp_path: Path) -> None:
    """Either they work and state what was charged, or they are refused before anything is."""
    data = private()
    source = wrapped(data, order)
    if "adaptive clip" in order or "hold-out" in order:
        with pytest.raises(Refusal, match="checkpoint"):
            confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, checkpoint=tmp_path / "run")
        assert not data.ledger.entries()
        return
    run = confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, checkpoint=tmp_path / "run")
    assert as_set(run.privacy.events) == as_set(data.ledger.events("d"))


def test_runs_paid_together_cannot_be_taken_up_one_by_one(tmp_path: Path) -> None:
    source = PaidTogether(private(), times=2)
    with pytest.raises(Refusal, match="2 runs that are paid for together"):
        confide.fit(methods.SGD(), torch.nn.Linear(3, 2), source, PLAN, checkpoint=tmp_path / "run")


class TestReceipts:
    query = StatisticQuery(lambda x, y: x, 3)

    def test_each_answer_once(self) -> None:
        data = private()
        run = data.charge(PLAN.blocks, "fit", Stretch("r", (1, 2), ((PLAN.mechanism, 2),)))
        for _ in range(2):
            data.answer(self.query, PLAN.mechanism, run)
        with pytest.raises(Refusal, match="receipt: not good for this answer"):
            data.answer(self.query, PLAN.mechanism, run)
        assert sum(event.count for event in data.ledger.events("d")) == 4

    def test_not_of_another_source_nor_made_up_nor_void(self) -> None:
        data, other = private(), private()
        paid, void = other.charge(PLAN.blocks), data.charge(PLAN.blocks)
        void.void()
        for receipt in (paid, Receipt((), PLAN.blocks), void):
            with pytest.raises(Refusal, match="receipt: not good for this answer"):
                data.answer(self.query, PLAN.mechanism, receipt)

    def test_steps_that_nobody_paid_for_are_not_handed_out(self) -> None:
        data = private()
        data.charge([(PLAN.mechanism, 2)], "fit", Stretch("r", None, ()))
        with pytest.raises(Refusal, match="has not paid for 3"):
            data.charge((), "fit", Stretch("r", (1, 3), ((PLAN.mechanism, 3),)))

    def test_an_interrupted_fit_leaves_nothing_to_be_had_for_nothing(self, tmp_path: Path) -> None:
        """Fit with a checkpoint, interrupt, fit again on the same object: every release was paid for."""
        data, answered = private(), []

        class Counted(Recorder):
            def answer(self, *arguments: Any, **options: Any) -> Any:
                answered.append(1)
                return super().answer(*arguments, **options)

        def stop(done: int, total: int) -> None:
            if done == 7:
                raise KeyboardInterrupt

        plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=20, steps=20)
        for progress in (stop, stop, None):
            checkpoint = confide.running.journal.Checkpoints(tmp_path / "run", every=5)
            try:
                confide.fit(methods.SGD(), torch.nn.Linear(3, 2), Counted(data), plan, checkpoint=checkpoint,
                            progress=progress)  # fmt: skip
            except KeyboardInterrupt:
                continue
        for _ in range(30):
            Counted(data).answer(StatisticQuery(lambda x, y: x, 3), plan.mechanism)
        assert sum(event.count for event in data.ledger.events("d")) >= len(answered)
