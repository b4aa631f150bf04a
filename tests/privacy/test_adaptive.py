"""Ceilings against the worst adversary over a menu of plans, who looks at every release before the next charge."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from confide.errors import BudgetExceeded
from confide.privacy.accountants import sound_delta, sound_epsilon
from confide.privacy.events import Adjacency, Event, GaussianEvent, PureEvent, VotesEvent
from confide.privacy.filters import Filters, History, Log, Plan, Promise, plan_of
from confide.privacy.ledger import Ledger
from tests.privacy.adversaries import Adversary, error_of_grid

DELTA = 1e-5
SAMPLED = GaussianEvent(1.0, "poisson", 0.01, 20)
SHARP = GaussianEvent(0.2, "poisson", 2e-7)
GAUSSIAN = GaussianEvent(12.0)
PURE = PureEvent(0.25)
VOTES = VotesEvent(12.0, 1.5)
FIXED_SIZE = GaussianEvent(2.0, "fixed-size", 0.02, 10, records=1000)
MENUS: dict[str, list[list[Event]]] = {
    "pure, gaussian, sharp": [[PURE], [GAUSSIAN], [SHARP]],
    "gaussian, sampled": [[GAUSSIAN], [SAMPLED]],
    "pure, sharp": [[PURE], [SHARP]],
    "votes, sampled, mixed": [[VOTES], [SAMPLED], [PURE, GAUSSIAN]],
}
SMALL: list[list[Event]] = [[VotesEvent(30.0, 1.5)], [GaussianEvent(1.0, "poisson", 0.01, 5)], [GaussianEvent(30.0)]]
FILTERS = Filters()


@lru_cache(maxsize=100_000)
def filtered(plans: tuple[Plan, ...], promise: Promise) -> bool:
    return FILTERS.judge(History([Log(plans)]), promise).within


@lru_cache(maxsize=100_000)
def composed(plans: tuple[Plan, ...], promise: Promise) -> bool:
    """The unproven filter: PLD of what ran, as if it had been fixed in advance."""
    events = [event for plan in plans for event in plan]
    return sound_epsilon(events, promise.delta, promise.adjacency) <= promise.epsilon


def promises(adjacency: Adjacency) -> Promise:
    return Promise(1.0, DELTA, adjacency)


SIDES: list[tuple[Adjacency, bool]] = [("add-remove", False), ("add-remove", True), ("replace-one", False)]
OF_FIXED_SIZE: list[list[Event]] = [[FIXED_SIZE], [PURE], [GAUSSIAN]]


@pytest.mark.slow  # the quick form is test_filters.test_filters_keep_the_ceiling_whatever_is_chosen
@pytest.mark.parametrize(("adjacency", "reverse"), SIDES)
@pytest.mark.parametrize("name", MENUS)
def test_nobody_gets_past_the_ceiling(name: str, adjacency: Adjacency, reverse: bool) -> None:
    assert Adversary(MENUS[name], promises(adjacency), filtered, 4, reverse).delta() <= DELTA


@pytest.mark.slow
def test_nobody_gets_past_the_ceiling_with_batches_of_fixed_size() -> None:
    assert 0 < Adversary(OF_FIXED_SIZE, promises("replace-one"), filtered, 4).delta() <= DELTA


def test_the_same_adversary_gets_past_an_unproven_filter() -> None:
    """Planted: plans that were chosen by looking are held against the PLD of what ran."""
    found = Adversary(MENUS["votes, sampled, mixed"], promises("add-remove"), composed, 2, last=16).delta()
    assert found > 1.2 * DELTA


@pytest.mark.parametrize("event", [SAMPLED, GAUSSIAN, PURE, GaussianEvent(1.0, "poisson", 0.01, 1000)], ids=str)
def test_the_grid_of_the_adversary_adds_little(event: Event) -> None:
    promise = Promise(0.6 * sound_epsilon([event], DELTA), DELTA)
    exact = sound_delta([event], promise.epsilon)
    assert -0.02 < error_of_grid((event,), promise, exact) < 0.02


def accepted(place: Path, events: Sequence[Event]) -> bool:
    """A charge by a ledger that knows nothing but its file."""
    with Ledger(place) as ledger:
        try:
            ledger.charge_all(events, dataset="d")
        except BudgetExceeded:
            return False
    return True


def test_a_ledger_that_is_opened_anew_for_every_charge_judges_alike(tmp_path: Path) -> None:
    """Whatever is kept between charges, the answer is that of the whole history; a refusal changes nothing."""
    place, promise = tmp_path / "d.ledger", promises("add-remove")
    with Ledger(place) as ledger:
        ledger.limit(promise.epsilon, promise.delta, promise.adjacency)
    menu, chance, refused = SMALL, random.Random(4), 0
    plans: tuple[Plan, ...] = ()
    for _ in range(16):
        plan = plan_of(menu[chance.randrange(len(menu))])
        expected = filtered((*plans, plan), promise)
        assert accepted(place, plan) is expected
        plans, refused = ((*plans, plan), refused) if expected else (plans, refused + 1)
    assert refused
    assert len(plans) > 5


BUSY = """
import random, sys
from confide.errors import BudgetExceeded
from confide.privacy.ledger import Ledger
from tests.privacy.test_adaptive import SMALL
place, seed = sys.argv[1], int(sys.argv[2])
menu, chance = SMALL, random.Random(seed)
with Ledger(place) as ledger:
    for _ in range(12):
        try:
            ledger.charge_all(menu[chance.randrange(len(menu))], dataset="d")
        except BudgetExceeded:
            pass
"""


@pytest.mark.slow
def test_processes_that_charge_at_once_stay_within_one_filter(tmp_path: Path) -> None:
    place, promise = tmp_path / "d.ledger", promises("add-remove")
    with Ledger(place) as ledger:
        ledger.limit(promise.epsilon, promise.delta, promise.adjacency)
    working = [subprocess.Popen([sys.executable, "-c", BUSY, str(place), str(seed)]) for seed in range(3)]
    assert [process.wait() for process in working] == [0, 0, 0]
    with Ledger(place) as ledger:
        charges: dict[Any, list[Event]] = {}
        for entry in ledger.entries():
            charges.setdefault(entry.plan, []).append(entry.event)
    plans = tuple(plan_of(events) for events in charges.values())
    assert len(plans) > 5
    assert all(filtered(plans[: many + 1], promise) for many in range(len(plans)))
