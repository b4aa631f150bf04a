"""What the ledger promises under pressure: no overspending, few compositions, no second budget."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confide.errors import BudgetExceeded, LedgerError
from confide.privacy import accountants
from confide.privacy.events import Event, GaussianEvent, PureEvent, merged
from confide.privacy.filters.kinds import Filter
from confide.privacy.ledger import Ledger
from confide.wording import up
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

# -- speed: how often the accountant is asked ----------------------------------------------------------------


def test_thousands_of_equal_charges_need_few_compositions(price: CountingPrice) -> None:
    """Composing for each of n charges asks n times; the search asks O(log n) times and admits as many."""
    ledger = Ledger()
    small = GaussianEvent(60.0)
    ledger.limit(3.0, DELTA)
    accepted, _ = charge_until_refused(ledger, small)
    assert accepted == most(small, 3.0, delta=FILTERED) > 1000
    assert price.calls < 40


def test_one_large_charge_needs_one_composition(price: CountingPrice) -> None:
    ledger = Ledger()
    ledger.limit(3.0, DELTA)
    ledger.charge(STEP, count=50)
    assert price.calls == 1
    for _ in range(3):
        assert ledger.spent() > 0
        assert ledger.remaining() > 0
    assert price.calls == 2


def test_refusing_again_asks_nobody(price: CountingPrice) -> None:
    ledger = Ledger()
    ledger.limit(0.1, DELTA)
    for _ in range(5):
        with pytest.raises(BudgetExceeded):
            ledger.charge(STEP, count=100)
    assert price.calls == 1


# -- races, made to happen -----------------------------------------------------------------------------------


def test_a_charge_that_slips_in_while_pricing_is_seen(place: str, price: CountingPrice) -> None:
    """There is room for one. Both are priced, and found to fit, before either is written."""
    ours, theirs = Ledger(place), Ledger(place)
    one = GaussianEvent(1.0)
    ours.limit(1.1 * gaussian_epsilon(1.0, DELTA), DELTA)

    def slip_in() -> None:
        price.hook = None
        theirs.charge(one, "theirs")

    price.hook = slip_in
    with pytest.raises(BudgetExceeded):
        ours.charge(one, "ours")
    assert [entry.purpose for entry in ours.entries()] == ["theirs"]


def test_a_ceiling_lowered_while_pricing_is_seen(place: str, price: CountingPrice) -> None:
    ours, theirs = Ledger(place), Ledger(place)
    ours.limit(5.0, DELTA)

    def slip_in() -> None:
        price.hook = None
        theirs.limit(0.01, DELTA)

    price.hook = slip_in
    with pytest.raises(BudgetExceeded):
        ours.charge(GaussianEvent(1.0))
    assert ours.entries() == ()


def test_others_who_are_always_quicker_cannot_starve_a_charge(place: str, price: CountingPrice) -> None:
    ours, theirs = Ledger(place), Ledger(place, timeout=0)
    ours.limit(50.0, DELTA)
    noise = iter(range(100, 1000))
    slipped, refused = [], []

    def slip_in() -> None:
        hook, price.hook = price.hook, None
        try:
            slipped.append(theirs.charge(GaussianEvent(float(next(noise)))))
        except LedgerError as error:
            refused.append(str(error))  # ours holds the lock by now
        price.hook = hook

    price.hook = slip_in
    ours.charge(GaussianEvent(3.0), "ours")
    assert len(slipped) == 3
    assert len(refused) == 1
    assert "locked" in refused[0]
    assert [entry.purpose for entry in ours.entries()] == ["" for _ in slipped] + ["ours"]


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_in_memory_cannot_be_duplicated(duplicate: Callable[[Ledger], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*Ledger\('budget.db'\)"):
        duplicate(Ledger())


def test_a_copy_of_a_ledger_in_a_file_spends_the_same_budget(place: str, price: CountingPrice) -> None:
    ledger = Ledger(place, timeout=1.0)
    ledger.limit(1.0, DELTA)
    other = pickle.loads(pickle.dumps(ledger))
    other.charge(STEP, count=most(STEP, 1.0))
    with pytest.raises(BudgetExceeded):
        copy.deepcopy(ledger).charge(STEP)
    assert len(ledger.entries()) == 1


def test_a_refusal_survives_pickling() -> None:
    refusal = pickle.loads(pickle.dumps(BudgetExceeded("too much", 2.0, 1.0, DELTA)))
    assert (str(refusal), refusal.epsilon_after, refusal.limit, refusal.delta) == (
        "too much",
        2.0,
        1.0,
        DELTA,
    )
    assert isinstance(refusal, RuntimeError)
    assert not isinstance(refusal, LedgerError)


# -- the table -----------------------------------------------------------------------------------------------


def test_rows_tell_the_story(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(STEP, "training", "a")
    ledger.charge(STEP, "training", "a", count=3)
    ledger.limit(2.0, DELTA)
    ledger.charge(PureEvent(0.25), "mean", "a")
    last = ledger.charge(POISSON, "training", "b", "north")
    rows = ledger.to_rows()
    assert [row["kind"] for row in rows] == ["charge", "limit", "charge", "charge"]
    assert [row["charges"] for row in rows] == [2, 0, 1, 1]
    assert [row["event"] for row in rows] == [
        "4 Gaussian steps, noise 10, full-batch",
        "ceiling epsilon 2, delta 1e-05, add-remove",
        "1 pure, epsilon 0.25 (add-remove)",
        "1 Gaussian steps, noise 1, poisson rate 0.1",
    ]
    four = gaussian_epsilon(0.2, DELTA)
    assert rows[0]["epsilon"] == pytest.approx(four)
    assert rows[1]["epsilon"] is None
    assert rows[2]["epsilon"] == pytest.approx(four + 0.25)
    assert rows[3]["epsilon"] == pytest.approx(gaussian_epsilon(0.1, DELTA))
    assert (rows[3]["time"], rows[3]["dataset"], rows[3]["partition"]) == (last.time, "b", "north")
    json.dumps(rows)


def test_rows_without_a_delta_have_no_epsilon(ledger: Ledger, price: CountingPrice) -> None:
    ledger.charge(STEP)
    assert ledger.to_rows()[0]["epsilon"] is None
    assert ledger.to_rows(delta=DELTA)[0]["epsilon"] == pytest.approx(gaussian_epsilon(0.1, DELTA))
    assert price.calls == 1


# -- the promise ---------------------------------------------------------------------------------------------

# Un-sampled: the stand-in accountant is exact for these, and the filters hold them against it.
EVENTS = st.builds(GaussianEvent, st.sampled_from([0.7, 2.0, 5.0, 20.0, 21.0]), count=st.integers(1, 60))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(EVENTS, st.sampled_from(["", "b"]), st.sampled_from([None, None, "p", "q"]), st.integers(1, 40)),
        st.floats(0.05, 6.0),
    ),
    max_size=25,
)


def worst_case(charges: list[tuple[Event, str, str | None]], dataset: str, adjacency: str) -> float:
    """The composition spelt out: both partitions together, or each of them; nothing remembered."""
    mine = [(event, partition) for event, name, partition in charges if name == dataset]
    whole = [event for event, partition in mine if partition is None]
    parts = {p: [event for event, partition in mine if partition == p] for p in ("p", "q")}
    both = [parts["p"] + parts["q"]] if adjacency == "replace-one" else [parts["p"], parts["q"]]
    return max(closed_form(merged(whole + part), DELTA, adjacency) for part in both)


def keeps_the_promise(actions: list[Any], adjacency: Any) -> bool:
    ledger = Ledger()
    ledger.limit(1.0, DELTA, adjacency)
    ceiling = 1.0
    accepted: list[Any] = []
    for action in actions:
        if isinstance(action, float):
            ceiling = action
            ledger.limit(ceiling, DELTA, adjacency)
            continue
        event, dataset, partition, times = action
        for _ in range(times):
            candidate = [*accepted, (event, dataset, partition)]
            fits = worst_case(candidate, dataset, adjacency) <= ceiling + 1e-9
            try:
                ledger.charge(event, dataset=dataset, partition=partition)
            except BudgetExceeded:
                break
            if not fits:
                return False
            accepted = candidate
    return all(ledger.spent(dataset=name) == pytest.approx(worst_case(accepted, name, adjacency)) for name in ("", "b"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, adjacency=st.sampled_from(["add-remove", "replace-one"]))
def test_accepted_charges_never_compose_above_the_ceiling(
    price: CountingPrice, actions: list[Any], adjacency: str
) -> None:
    assert keeps_the_promise(actions, adjacency)


def test_the_promise_is_broken_by_a_ledger_that_mistakes_smaller_for_larger(
    price: CountingPrice, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = [(STEP, "", None, 40)] * 10
    assert keeps_the_promise(actions, "add-remove")

    def careless(self: Filter, amount: float) -> bool | None:
        return True if self._fits >= 0 else None

    monkeypatch.setattr(Filter, "_answer", careless)
    assert not keeps_the_promise(actions, "add-remove")


# -- with the real accountant --------------------------------------------------------------------------------


def test_the_real_accountant_and_the_ledger_agree() -> None:
    """Two runs of the same training cost less than twice one of them, and the ceiling knows it.

    Fixed in advance and charged together they lose nothing; one after the other they cost a few per cent more.
    """
    run = GaussianEvent(1.3, "poisson", 256 / 60000, 3516)
    one = accountants.sound_epsilon([run], DELTA, "add-remove")
    two = accountants.sound_epsilon([GaussianEvent(1.3, "poisson", 256 / 60000, 2 * 3516)], DELTA, "add-remove")
    assert two < 1.9 * one
    ledger = Ledger()
    ledger.limit(two, DELTA)
    ledger.charge_all([run, run], dataset="fixed in advance")
    assert ledger.spent(dataset="fixed in advance") == pytest.approx(two, rel=1e-9)
    ledger.charge(run, "first run")
    assert ledger.spent() == pytest.approx(one, rel=1e-9)
    with pytest.raises(BudgetExceeded, match=rf"by the gaussian filter.*epsilon={up(two)} if all had been fixed"):
        ledger.charge(run, "second run")
    ledger.limit(1.07 * two, DELTA)
    ledger.charge(run, "second run")
    assert ledger.spent() == pytest.approx(two, rel=1e-9)
    with pytest.raises(BudgetExceeded):
        ledger.charge(run, "third run")


def test_a_run_charged_step_by_step_ends_before_its_plan_ends() -> None:
    """The ceiling is what the whole run costs as one plan: step by step it may depend on itself, and ends earlier."""
    step = GaussianEvent(1.0, "poisson", 0.01)
    ledger = Ledger()
    ledger.limit(accountants.sound_epsilon([GaussianEvent(1.0, "poisson", 0.01, 300)], DELTA, "add-remove"), DELTA)
    accepted, refusal = charge_until_refused(ledger, step)
    assert 220 < accepted < 300
    assert refusal.epsilon_after > ledger.spent()
    ledger.charge(replace(step, count=300), dataset="as one plan")
    with pytest.raises(BudgetExceeded):
        ledger.charge(replace(step, count=301), dataset="as one longer plan")
