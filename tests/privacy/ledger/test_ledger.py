"""The ledger as an account: charges, ceilings and partitions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide.errors import BudgetExceeded, UnsupportedEvents
from confide.privacy import accountants
from confide.privacy.events import Event, GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.ledger import Ledger, Limit
from confide.wording import remaining, up
from tests.privacy.ledger.ledger_tools import (
    DELTA,
    FILTERED,
    POISSON,
    STEP,
    CountingPrice,
    charge_until_refused,
    closed_form,
    gaussian_epsilon,
    most,
)


def test_an_entry_keeps_all_that_was_said(ledger: Ledger) -> None:
    event = GaussianEvent(1.3, "fixed-size", 0.01, count=7, records=1000)
    entry = ledger.charge(event, purpose="training", dataset="hospital", partition="north", count=3)
    assert entry.event == GaussianEvent(1.3, "fixed-size", 0.01, count=21, records=1000)
    assert (entry.purpose, entry.dataset, entry.partition) == ("training", "hospital", "north")
    assert entry.time.endswith("+00:00")
    assert ledger.entries() == (entry,)
    assert ledger.entries("hospital") == (entry,)
    assert ledger.entries("elsewhere") == ()
    assert ledger.head == entry.head == ledger.verify()


@pytest.mark.parametrize(
    "event", [STEP, POISSON, PureEvent(0.1, "replace-one", 3), NonPrivateEvent("baseline"), PureEvent(1.0)]
)
def test_every_kind_of_event_survives_the_store(event: Event, place: str) -> None:
    with Ledger(place) as first:
        first.charge(event)
    with Ledger(place) as second:
        assert second.events() == (event,)


def test_numpy_numbers_are_kept_as_plain_ones(ledger: Ledger) -> None:
    event = GaussianEvent(np.float32(1.5), "poisson", np.float64(0.25), np.int64(3))  # type: ignore[arg-type]
    kept = ledger.charge(event, count=np.int64(2)).event  # type: ignore[arg-type]
    assert kept == GaussianEvent(1.5, "poisson", 0.25, 6)
    assert type(kept.count) is int
    assert json.dumps(kept.count) == "6"


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_wrong_count_is_refused(ledger: Ledger, count: Any) -> None:
    with pytest.raises(ValueError, match=r"count=.*whole number"):
        ledger.charge(STEP, count=count)
    if not isinstance(count, str) and count > 0:
        with pytest.raises(ValueError, match=r"event\.count=.*whole number"):
            ledger.charge(GaussianEvent(1.0, count=count))
    assert ledger.entries() == ()


@pytest.mark.parametrize(
    ("names", "named"),
    [({"purpose": 3}, "purpose=3"), ({"dataset": None}, "dataset=None"), ({"partition": ""}, "partition=''")],
)
def test_a_wrong_name_is_refused(ledger: Ledger, names: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        ledger.charge(STEP, **names)
    with pytest.raises(TypeError, match="unknown kind"):
        ledger.charge("an event")  # type: ignore[arg-type]
    assert ledger.entries() == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0, DELTA), "epsilon=0"),
        ((math.inf, DELTA), "epsilon=inf"),
        ((math.nan, DELTA), "epsilon=nan"),
        (("1", DELTA), "epsilon='1'"),
        ((1.0, 0.0), "delta=0"),
        ((1.0, 1.0), "delta=1"),
        ((1.0, DELTA, "swap"), "adjacency='swap'"),
    ],
)
def test_a_wrong_ceiling_is_refused(ledger: Ledger, arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ledger.limit(*arguments)
    assert ledger.ceiling is None
    assert ledger.limits() == ()


def test_without_a_ceiling_nothing_is_priced_or_refused(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(STEP, count=10**9)
    assert price.calls == 0
    assert ledger.remaining() == math.inf
    with pytest.raises(ValueError, match="delta=None"):
        ledger.spent()


def test_events_compose_across_charges_and_are_not_added_up(ledger: Ledger, price: CountingPrice) -> None:
    for _ in range(4):
        ledger.charge(STEP)
    assert ledger.spent(DELTA) == pytest.approx(gaussian_epsilon(0.2, DELTA))
    assert ledger.spent(DELTA) < 4 * gaussian_epsilon(0.1, DELTA)
    assert ledger.spent(DELTA, adjacency="replace-one") == pytest.approx(gaussian_epsilon(0.4, DELTA))
    assert ledger.spent(DELTA, dataset="another") == 0.0


def test_the_ceiling_admits_exactly_what_fits(ledger: Ledger, price: CountingPrice) -> None:
    """Would catch a ceiling that refuses too early, too late, or writes what it refuses."""
    ledger.limit(1.0, DELTA)
    accepted, refusal = charge_until_refused(ledger, STEP)
    assert accepted == most(STEP, 1.0, delta=FILTERED)
    assert len(ledger.entries()) == accepted
    after = gaussian_epsilon(math.sqrt(accepted + 1) / 10, FILTERED)
    assert (refusal.epsilon_after, refusal.limit, refusal.delta) == (pytest.approx(after), 1.0, DELTA)  # type: ignore[comparison-overlap]
    assert ledger.spent() <= 1.0 < refusal.epsilon_after
    assert ledger.spent() == pytest.approx(gaussian_epsilon(math.sqrt(accepted) / 10, DELTA))
    assert ledger.remaining() == pytest.approx(1.0 - gaussian_epsilon(math.sqrt(accepted) / 10, FILTERED))
    for part in (
        "1 Gaussian steps",
        f"{up(after)} by the gaussian filter",
        "epsilon=1",
        f"{remaining(ledger.remaining())} remains",
        "limit()",
    ):
        assert part in str(refusal)
    assert "\n" not in str(refusal)


def test_a_refusal_leaves_nothing_behind(tmp_path: Path, price: CountingPrice) -> None:
    with Ledger(tmp_path / "budget.db") as ledger:
        ledger.limit(1.0, DELTA)
        ledger.charge(STEP)
    before = (tmp_path / "budget.db").read_bytes()
    with Ledger(tmp_path / "budget.db") as ledger, pytest.raises(BudgetExceeded):
        ledger.charge(STEP, count=1000)
    assert (tmp_path / "budget.db").read_bytes() == before


def test_several_events_are_charged_together_or_not_at_all(ledger: Ledger, price: CountingPrice) -> None:
    """Charged one by one, the first would be paid and the second refused."""
    ledger.limit(closed_form([replace(STEP, count=10)], DELTA), DELTA)
    small, large = replace(STEP, count=6), replace(GaussianEvent(5.0), count=6)
    with pytest.raises(BudgetExceeded, match=r"6 Gaussian steps, noise 10.* and 6 Gaussian steps, noise 5"):
        ledger.charge_all([small, large], dataset="d")
    assert ledger.entries() == ()
    both = ledger.charge_all([replace(STEP, count=4), replace(STEP, count=6)], dataset="d")
    assert [entry.position for entry in both] == [2, 3]
    assert ledger.entries() == both
    assert ledger.charge_all([]) == ()
    ledger.verify(both[-1].head)


def test_a_large_charge_that_fails_does_not_stop_a_small_one(ledger: Ledger, price: CountingPrice) -> None:
    ledger.limit(1.0, DELTA)
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP, count=most(STEP, 1.0) + 1)
    ledger.charge(STEP, count=most(STEP, 1.0))
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP)


def test_each_data_set_has_its_own_budget(ledger: Ledger, price: CountingPrice) -> None:
    ledger.limit(1.0, DELTA)
    full = most(STEP, 1.0)
    ledger.charge(STEP, dataset="a", count=full)
    ledger.charge(STEP, dataset="b", count=full)
    with pytest.raises(BudgetExceeded, match="data set 'a'"):
        ledger.charge(STEP, dataset="a")
    assert ledger.datasets() == ("a", "b")


def test_a_lowered_ceiling_stops_everything_and_a_raised_one_lets_on(ledger: Ledger, price: CountingPrice) -> None:
    ledger.limit(1.0, DELTA)
    ledger.charge(STEP, count=most(STEP, 1.0))
    ledger.limit(0.5, DELTA)
    assert ledger.remaining() == 0.0
    with pytest.raises(BudgetExceeded, match="of which 0 remains"):
        ledger.charge(GaussianEvent(1e6))
    ledger.limit(3.0, DELTA, "replace-one")
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP, count=most(STEP, 3.0, factor=2.0) - most(STEP, 1.0) + 1)
    ledger.charge(STEP, count=most(STEP, 3.0, factor=2.0) - most(STEP, 1.0))
    assert [entry.limit for entry in ledger.limits()] == [
        Limit(1.0, DELTA),
        Limit(0.5, DELTA),
        Limit(3.0, DELTA, "replace-one"),
    ]
    assert ledger.ceiling == Limit(3.0, DELTA, "replace-one")


def test_a_non_private_event_needs_a_ledger_without_a_ceiling(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(NonPrivateEvent("curves shown"), dataset="open")
    assert ledger.spent(DELTA, "open") == math.inf
    ledger.limit(1.0, DELTA)
    with pytest.raises(BudgetExceeded, match="non-private") as refusal:
        ledger.charge(NonPrivateEvent("curves shown"), dataset="closed")
    assert refusal.value.epsilon_after == math.inf
    with pytest.raises(BudgetExceeded, match="epsilon=inf"):
        ledger.charge(STEP, dataset="open")
    ledger.charge(STEP, dataset="closed")
    assert ledger.remaining("open") == 0.0


def test_events_without_a_sound_bound_are_refused_before_writing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(events: Iterable[Event], delta: float, adjacency: str) -> float:
        raise UnsupportedEvents("no bound")

    monkeypatch.setattr(accountants, "sound_epsilon", refuse)
    ledger.limit(1.0, DELTA)
    with pytest.raises(UnsupportedEvents, match="no bound"):
        ledger.charge(STEP)
    assert ledger.entries() == ()


# -- partitions ----------------------------------------------------------------------------------------------


def test_partitions_compose_in_parallel(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(STEP, count=10)
    ledger.charge(STEP, partition="north", count=5)
    ledger.charge(STEP, partition="south", count=20)
    assert ledger.spent(DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(30) / 10, DELTA))
    assert ledger.events() == (GaussianEvent(10.0, count=35),)


def test_the_dearest_partition_decides_whatever_its_events(ledger: Ledger, price: CountingPrice) -> None:
    """Neither partition contains the other, so both must be composed; would catch a maximum by counts."""
    ledger.charge(GaussianEvent(100.0), partition="many", count=500)
    ledger.charge(GaussianEvent(1.0), partition="few", count=1)
    assert ledger.spent(DELTA) == pytest.approx(gaussian_epsilon(1.0, DELTA))


def test_the_ceiling_holds_for_each_partition(ledger: Ledger, price: CountingPrice) -> None:
    ledger.limit(1.0, DELTA)
    full = most(STEP, 1.0)
    ledger.charge(STEP, count=full // 2)
    for name in ("north", "south", "east"):
        accepted, _ = charge_until_refused(ledger, STEP, partition=name)
        assert accepted == full - full // 2
    with pytest.raises(BudgetExceeded):
        ledger.charge(STEP)
    ledger.charge(STEP, partition="west")


def test_with_replacement_two_partitions_are_touched(ledger: Ledger, price: CountingPrice) -> None:
    """A replaced record may move, so the two dearest partitions add up; would catch a plain maximum."""
    ledger.charge(STEP, count=1)
    for name, count in (("a", 5), ("b", 20), ("c", 9)):
        ledger.charge(STEP, partition=name, count=count)
    assert ledger.spent(DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(21) / 10, DELTA))
    replaced = ledger.spent(DELTA, adjacency="replace-one")
    assert replaced == pytest.approx(gaussian_epsilon(2 * math.sqrt(1 + 20 + 9) / 10, DELTA))


def test_with_replacement_two_equal_partitions_count_twice(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(STEP, partition="a", count=4)
    alone = ledger.spent(DELTA, adjacency="replace-one")
    assert alone == pytest.approx(gaussian_epsilon(0.4, DELTA))
    ledger.charge(STEP, partition="b", count=4)
    both = ledger.spent(DELTA, adjacency="replace-one")
    assert both == pytest.approx(gaussian_epsilon(2 * math.sqrt(8) / 10, DELTA))


@pytest.mark.parametrize(
    "event",
    [
        GaussianEvent(1.0, "fixed-size", 0.1, records=100),
        GaussianEvent(1.0, "shuffle", 0.1),
        PureEvent(0.1, "replace-one"),
    ],
)
def test_with_replacement_events_that_show_a_partition_size_are_refused(
    ledger: Ledger, price: CountingPrice, event: Event
) -> None:
    ledger.limit(10.0, DELTA, "replace-one")
    with pytest.raises(UnsupportedEvents, match="partition"):
        ledger.charge(event, partition="north")
    assert ledger.entries() == ()
    ledger.charge(PureEvent(0.1), partition="north")
    ledger.charge(POISSON, partition="north")
