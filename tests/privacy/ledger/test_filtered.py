"""The ceiling of a ledger under plans that are chosen by what earlier ones released, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from confide.errors import BudgetExceeded, LedgerError
from confide.privacy.accountants import sound_epsilon
from confide.privacy.events import Event, GaussianEvent, PureEvent
from confide.privacy.filters import FIXED, GAUSSIAN, Filters, History, Log, Plan, Promise, Verdict, kinds
from confide.privacy.ledger import Ledger
from confide.privacy.ledger.entries import sum_values
from tests.privacy.ledger.ledger_tools import DELTA, STEP
from tests.privacy.test_filters import adaptive_delta, options

PROMISE = Promise(1.0, DELTA)
MNIST = GaussianEvent(1.3, "poisson", 256 / 60000, 3516)


def charged_within(plans: Sequence[Sequence[Event]], promise: Promise) -> bool:
    """Whether a ledger with this ceiling accepts the plans, charged one after the other."""
    ledger = Ledger()
    ledger.limit(promise.epsilon, promise.delta, promise.adjacency)
    try:
        for plan in plans:
            ledger.charge_all(plan)
    except BudgetExceeded:
        return False
    return True


def compose_everything(self: Filters, history: History, promise: Promise) -> Verdict:
    """The fault: whatever was charged counts as if it had been one plan."""
    events = [event for log in history.logs for plan in log.plans for event in plan] + list(history.more)
    epsilon = sound_epsilon(events, promise.delta, promise.adjacency)
    return Verdict(epsilon <= promise.epsilon, FIXED, {FIXED: epsilon})


def test_an_adversary_who_looks_before_choosing_stays_within_the_ceiling() -> None:
    assert 0 < adaptive_delta(0.5, options(charged_within, 0.5, 0.2), PROMISE.epsilon) <= DELTA


def test_the_same_adversary_overspends_a_ceiling_on_composed_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("judge", "costs"):
        monkeypatch.setattr(Filters, asked, compose_everything)
    monkeypatch.setattr(
        Filters, "recall", lambda self, history, promise: compose_everything(self, history, promise).within
    )
    assert adaptive_delta(0.5, options(charged_within, 0.5, 0.2), PROMISE.epsilon) > 1.25 * DELTA


def test_a_plan_fixed_in_advance_may_take_all_of_the_ceiling(ledger: Ledger) -> None:
    parts = [GaussianEvent(2.0 + 0.1 * i, "poisson", 0.01, 100) for i in range(5)]
    ledger.limit(sound_epsilon(parts, DELTA), DELTA)
    for part in parts[:3]:
        ledger.charge(part, dataset="one by one")
    with pytest.raises(BudgetExceeded, match=r"by the \w+ filter"):
        ledger.charge(parts[3], dataset="one by one")
    ledger.charge_all(parts, dataset="together")
    assert ledger.standing("together").by == FIXED
    assert ledger.remaining("together") == pytest.approx(0.0, abs=1e-9)


def test_a_plan_of_several_entries_is_one_plan_when_it_is_read_again(place: str) -> None:
    with Ledger(place) as ledger:
        ledger.limit(3.0, DELTA)
        ledger.charge_all([MNIST, GaussianEvent(10.0)], dataset="d")
        ledger.charge_all([MNIST, GaussianEvent(10.0)], dataset="d")
        found = ledger.standing("d")
    with Ledger(place) as again:
        assert again.standing("d") == found
        assert (found.plans, found.by) == (2, GAUSSIAN)
        assert again.spent(dataset="d") < found.epsilon < 1.1 * again.spent(dataset="d")


def test_every_store_says_which_filter_holds_and_which_refused(ledger: Ledger) -> None:
    ledger.limit(1.4, DELTA)
    ledger.charge(MNIST, dataset="d")
    assert "as one plan, fixed in advance" in ledger.standing("d").sentence()
    ledger.charge(GaussianEvent(2.0, "poisson", 0.01, 2000), dataset="d")
    standing = ledger.standing("d")
    assert (standing.by, standing.plans, standing.before_ceiling) == (GAUSSIAN, 2, 0)
    assert "(2 plans) stays within epsilon = 1.4" in standing.sentence()
    assert "by the gaussian filter, which is proven also where a plan was chosen by" in standing.sentence()
    assert standing.assumptions() == ()
    with pytest.raises(BudgetExceeded, match=r"by the gaussian filter.* of which 0\.0[34]\d* remains"):
        ledger.charge(GaussianEvent(2.0, "poisson", 0.01, 2000), dataset="d")


def test_a_ceiling_that_came_late_is_on_the_users_word(ledger: Ledger) -> None:
    ledger.charge(STEP, dataset="d")
    ledger.charge(STEP, dataset="d")
    assert "has no ceiling" in ledger.standing("d").sentence()
    ledger.limit(3.0, DELTA)
    assert "set or changed after 2 of the plans" in ledger.standing("d").assumptions()[0]
    ledger.charge(STEP, dataset="fresh")
    assert ledger.standing("fresh").assumptions() == ()
    ledger.limit(3.0, DELTA)  # as it was
    assert ledger.standing("fresh").assumptions() == ()
    ledger.limit(2.0, DELTA)  # tighter: the older promise holds, but the figure may come from looking at a release
    assert "stays within epsilon = 2" in ledger.standing("fresh").sentence()
    assert "after 1 of the plans" in ledger.standing("fresh").assumptions()[0]
    ledger.charge(STEP, dataset="fresh")
    ledger.limit(4.0, DELTA)
    assert "after 2 of the plans" in ledger.standing("fresh").assumptions()[0]


def test_a_ceiling_below_what_was_charged_proves_nothing(ledger: Ledger) -> None:
    ledger.limit(3.0, DELTA)
    ledger.charge(STEP, dataset="d", count=50)
    ledger.limit(0.1, DELTA)
    assert ledger.standing("d").over
    assert "proves nothing here" in ledger.standing("d").sentence()


def test_whether_there_is_room_can_be_asked_for_several_plans(ledger: Ledger) -> None:
    """Two plans one after the other need more than one; nothing is written, and the answer is that of the charges."""
    two = sound_epsilon([MNIST, MNIST], DELTA)
    ledger.check_room([[MNIST]] * 50)  # no ceiling
    ledger.limit(1.02 * two, DELTA)
    ledger.check_room([[MNIST, MNIST]])
    with pytest.raises(BudgetExceeded, match=r"3516 Gaussian steps.* and 3516"):
        ledger.check_room([[MNIST], [MNIST]])
    ledger.charge(MNIST)
    with pytest.raises(BudgetExceeded):
        ledger.check_room([[MNIST]])
    ledger.limit(1.07 * two, DELTA)
    ledger.check_room([[MNIST]])
    ledger.check_room([])
    assert len(ledger.entries()) == 1
    ledger.charge(MNIST)


# -- partitions ----------------------------------------------------------------------------------------------


def test_each_record_has_a_first_plan_of_its_own(ledger: Ledger) -> None:
    """A record of the south has seen one plan, so that plan may take all of the ceiling, whatever the north saw."""
    plan = GaussianEvent(1.0, "poisson", 0.01, 500)
    ledger.limit(sound_epsilon([plan], DELTA), DELTA)
    ledger.charge(GaussianEvent(30.0), partition="north")
    with pytest.raises(BudgetExceeded):
        ledger.charge(plan, partition="north")
    ledger.charge(plan, partition="south")
    with pytest.raises(BudgetExceeded):
        ledger.charge(GaussianEvent(1000.0), partition="south")


def test_with_replacement_a_pair_of_partitions_is_filtered_together(ledger: Ledger) -> None:
    ledger.limit(1.0, DELTA, "replace-one")
    ledger.charge(GaussianEvent(12.0), partition="north")
    ledger.charge(GaussianEvent(12.0), partition="south")
    both = sound_epsilon([GaussianEvent(12.0, count=2)], DELTA, "replace-one")
    assert ledger.standing().by == GAUSSIAN
    assert both < ledger.standing().epsilon < 1.03 * both


# -- growth --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_a_charge_looks_at_what_is_new_only(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind many different plans, one more asks for its own amount and takes the sums one plan further."""
    made, amounts = 0, 0
    taken, amount_of = kinds.Filter._taken_further, kinds.GaussianFilter.amount_of

    def counting(self: kinds.Filter, log: Log, first: bool) -> object:
        nonlocal made
        before = sum(running.position for running in self._sums.get(log, {}).values())
        found = taken(self, log, first)
        made += sum(running.position for running in self._sums[log].values()) - before
        return found

    def counting_amounts(self: kinds.GaussianFilter, plan: Plan) -> float:
        nonlocal amounts
        amounts += 1
        return amount_of(self, plan)

    monkeypatch.setattr(kinds.Filter, "_taken_further", counting)
    monkeypatch.setattr(kinds.GaussianFilter, "amount_of", counting_amounts)
    monkeypatch.setattr(kinds, "_REMEMBERED", 8)  # what is forgotten must not be asked for again
    ledger = Ledger()
    ledger.limit(5.0, DELTA)
    number = 12 if sampled else 400
    for i in range(number):
        ledger.charge(GaussianEvent(3.0 + i / 50, "poisson", 0.001) if sampled else GaussianEvent(200.0 + i / 10))
    assert amounts <= number
    assert made <= 3 * number
    together = [replace(event, count=1) for event in ledger.events()]
    assert ledger.spent() == pytest.approx(sound_epsilon(together, DELTA), rel=1e-6)


def distinct(number: int, start: int = 0) -> list[GaussianEvent]:
    return [GaussianEvent(3.0 + i / 50, "poisson", 0.001) for i in range(start, start + number)]


def test_what_was_added_up_is_not_added_up_by_the_next_process(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(place) as ledger:
        ledger.limit(5.0, DELTA)
        for event in distinct(20):
            ledger.charge(event, dataset="d")
        found = ledger.standing("d")
    amounts, amount_of = 0, kinds.GaussianFilter.amount_of

    def counting(self: kinds.GaussianFilter, plan: Plan) -> float:
        nonlocal amounts
        amounts += 1
        return amount_of(self, plan)

    monkeypatch.setattr(kinds.GaussianFilter, "amount_of", counting)
    with Ledger(place) as again:
        assert again.standing("d").epsilon == pytest.approx(found.epsilon, rel=1e-12)
        assert 0 < amounts < 6
        assert len(again.entries()) == 20 == len(again.to_rows(DELTA)) - 1
        assert again.verify(sums=True).count > 21


def test_a_sum_that_is_too_small_is_found(place: str) -> None:
    with Ledger(place) as ledger:
        ledger.limit(5.0, DELTA)
        for event in distinct(20):
            ledger.charge(event, dataset="d")
        account = ledger._book.state.account("d")
        noted = [one for one in account.parts[None].log.noted if math.isfinite(one.amount)]
        lie = replace(noted[0], position=len(account.parts[None].log.plans), amount=noted[0].amount / 2)
        names = {"dataset": "d", "partition": None}
        ledger._book.write(lambda head: (ledger._book.append("sum", {**names, **sum_values(lie)}, head),))
        ledger.verify()
        with pytest.raises(LedgerError, match="a sum was written down that is less than"):
            ledger.verify(sums=True)


def test_many_different_gaussians_are_priced_as_the_one_they_amount_to(ledger: Ledger) -> None:
    events = [GaussianEvent(50.0 + i) for i in range(40)]
    ledger.charge_all([*events, PureEvent(0.01)])
    assert ledger.spent(DELTA) == pytest.approx(sound_epsilon([*events, PureEvent(0.01)], DELTA), rel=1e-6)
    assert ledger.spent(DELTA) >= sound_epsilon([*events, PureEvent(0.01)], DELTA)
    assert sum(event.count for event in ledger.events()) == 41
    assert math.isfinite(ledger.spent(DELTA, adjacency="replace-one"))
