"""Filters: a ceiling under plans that are chosen by what earlier ones released."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from confide.privacy.accountants import sound_delta, sound_epsilon
from confide.privacy.accountants.pld import profile, units
from confide.privacy.accountants.profiles import gaussian_delta, sampled_delta, sampled_delta_reversed
from confide.privacy.calibration import noise_multiplier_for
from confide.privacy.events import Event, GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.filters import (
    FIXED,
    GAUSSIAN,
    RENYI,
    REPETITION,
    Filters,
    History,
    Log,
    Promise,
    judge,
    kinds,
    plan_of,
)
from confide.privacy.filters.kinds import gaussian_cover

DELTA = 1e-5
PROMISE = Promise(1.0, DELTA)
MNIST = (GaussianEvent(1.3, "poisson", 256 / 60000, 3516),)
OTHER = (GaussianEvent(2.0, "poisson", 0.01, 2000),)
Judge = Callable[[Sequence[Sequence[Event]], Promise], bool]


def history(plans: Sequence[Sequence[Event]]) -> History:
    return History([Log(plan_of(plan) for plan in plans)])


def filtered(plans: Sequence[Sequence[Event]], promise: Promise) -> bool:
    return Filters().judge(history(plans), promise).within


def composed(plans: Sequence[Sequence[Event]], promise: Promise) -> bool:
    """The broken rule: compose whatever came, stop when epsilon passes the ceiling."""
    events = [event for plan in plans for event in plan]
    return sound_epsilon(events, promise.delta, promise.adjacency) <= promise.epsilon


# -- what adaptivity can do, in exact numbers -----------------------------------------------------------------


def exact(event: Event, epsilon: float) -> float:
    """delta(epsilon) of one release, either sign of epsilon, by its closed profile."""
    assert isinstance(event, GaussianEvent)
    at, mu = np.array([abs(epsilon)]), 1 / event.noise_multiplier
    if event.sampling == "full-batch":
        forward = backward = float(gaussian_delta(mu, at)[0])
    else:
        forward = float(sampled_delta(mu, event.rate, at)[0])
        backward = float(sampled_delta_reversed(mu, event.rate, at)[0])
    return forward if epsilon >= 0 else -math.expm1(epsilon) + math.exp(epsilon) * backward


def adaptive_delta(first: float, options: Sequence[Event], epsilon: float) -> float:
    """Randomised response first; then, by its outcome, whichever option makes delta(epsilon) largest."""
    likely = 1 / (1 + math.exp(-first))
    best = [max(exact(option, epsilon - loss) for option in options) for loss in (first, -first)]
    return likely * best[0] + (1 - likely) * best[1]


def just_accepted(judge: Judge, first: float, make: Callable[[float], Event], low: float, high: float) -> Event:
    """The costliest option make(x), x from low (free) to high (too much), that the rule accepts behind the first."""
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if judge([[PureEvent(first)], [make(middle)]], PROMISE) else (low, middle)
    return make(low)


def options(judge: Judge, first: float, noise: float) -> list[Event]:
    return [
        just_accepted(judge, first, lambda mu: GaussianEvent(1 / mu), 1e-3, 3.0),
        just_accepted(judge, first, lambda rate: GaussianEvent(noise, "poisson", rate), 1e-9, 0.5),
    ]


def test_composing_what_was_chosen_adaptively_breaks_the_ceiling() -> None:
    """Each option alone keeps the ceiling; choosing between them by the first outcome does not: by a quarter more."""
    assert adaptive_delta(0.5, options(composed, 0.5, 0.2), PROMISE.epsilon) > 1.25 * DELTA


@pytest.mark.parametrize(
    ("first", "noise"),
    [(0.8, 1.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, 0.1), (0.5, 0.5), (0.2, 0.3)))],
)
def test_filters_keep_the_ceiling_whatever_is_chosen(first: float, noise: float) -> None:
    assert 0 < adaptive_delta(first, options(filtered, first, noise), PROMISE.epsilon) <= DELTA


def test_a_share_of_delta_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a filter that was given more than its share, here three times delta itself."""
    monkeypatch.setattr(judge, "SHARES", {**judge.SHARES, GAUSSIAN: 3.0})
    assert adaptive_delta(0.5, options(filtered, 0.5, 1.0), PROMISE.epsilon) > DELTA


def test_the_shares_add_up_to_delta() -> None:
    for shares in (judge.SHARES, judge.SHARES_OF_GAUSSIANS):
        assert sum(shares.values()) <= 1 + 1e-15


# -- one plan loses nothing, and several lose little ----------------------------------------------------------


def test_a_plan_calibrated_to_the_ceiling_is_accepted() -> None:
    noise = noise_multiplier_for(1.0, DELTA, 1000, 0.01)
    verdict = Filters().judge(history([[GaussianEvent(noise, "poisson", 0.01, 1000)]]), PROMISE)
    assert verdict.within
    assert verdict.by == FIXED
    assert 0.999 < verdict.epsilon <= 1.0


def test_a_plan_of_many_parts_is_one_plan() -> None:
    parts = [GaussianEvent(2.0 + 0.1 * i, "poisson", 0.01, 100) for i in range(8)]
    ceiling = Promise(sound_epsilon(parts, DELTA), DELTA)
    assert Filters().judge(history([parts]), ceiling).within
    assert not filtered([[part] for part in parts], ceiling)


@pytest.mark.parametrize(
    ("plans", "by", "most"),
    [
        ([MNIST, MNIST], REPETITION, 1.07),
        ([MNIST, OTHER], GAUSSIAN, 1.07),
        ([[GaussianEvent(10.0)], MNIST], GAUSSIAN, 1.03),
        ([[GaussianEvent(5.0)], [GaussianEvent(6.0)], [GaussianEvent(7.0)]], GAUSSIAN, 1.02),
        ([MNIST, [GaussianEvent(1.3, "poisson", 256 / 60000, 17)]], REPETITION, 1.07),
        ([MNIST, [GaussianEvent(1.4, "poisson", 256 / 60000, 17)]], GAUSSIAN, 1.08),
        ([[PureEvent(0.2)], [PureEvent(0.21)], [PureEvent(0.22)], [PureEvent(0.23)]], RENYI, 1.5),
    ],
)
def test_what_adaptivity_costs(plans: Sequence[Sequence[Event]], by: str, most: float) -> None:
    together = sound_epsilon([event for plan in plans for event in plan], DELTA)
    assert not filtered(plans, Promise(0.999 * together, DELTA))
    verdict = Filters().judge(history(plans), Promise(most * together, DELTA))
    assert (verdict.within, verdict.by) == (True, by)


def test_a_refusal_says_what_each_filter_would_need() -> None:
    verdict = Filters().judge(history([MNIST, OTHER]), Promise(1.2, DELTA))
    assert not verdict.within
    assert verdict.by == GAUSSIAN
    assert verdict.costs[REPETITION] == math.inf
    assert 1.2803 < verdict.epsilon == verdict.costs[GAUSSIAN] < verdict.costs[RENYI]


def test_what_has_no_protection_is_refused() -> None:
    assert not filtered([[NonPrivateEvent("a table")]], PROMISE)
    assert not filtered([[GaussianEvent(50.0)], [NonPrivateEvent("a table")]], PROMISE)


def test_slack_is_paid_from_the_leak() -> None:
    first = [GaussianEvent(50.0)]
    assert filtered([first, [PureEvent(0.01, slack=1e-9)]], PROMISE)
    assert not filtered([first, [PureEvent(0.01, slack=1e-6)]], PROMISE)


def test_thousands_of_small_charges_ask_for_few_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = kinds.sound_epsilon

    def counting(*arguments: object) -> float:
        nonlocal asked
        asked += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kinds, "sound_epsilon", counting)
    ours, log, count = Filters(), Log(), 0
    while ours.judge(History([log]), Promise(3.0, DELTA)).within:
        count += 1
        log.add(plan_of([GaussianEvent(60.0)]), count)
    assert count > 1000
    assert asked < 40
    most = max(n for n in range(count, 2 * count) if sound_epsilon([GaussianEvent(60.0, count=n)], DELTA) <= 3.0)
    assert 0.97 * most < count - 1 <= most


# -- the cover ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_cover_dominates(adjacency: str) -> None:
    """Against independently computed deltas, between the points of the cover's own grid too."""
    event, widest, leak = GaussianEvent(1.3, "poisson", 256 / 60000, 3516), 0.6, 1e-7
    squared = gaussian_cover(units([event], adjacency), widest, leak)  # type: ignore[arg-type]
    share = leak * squared / widest
    for epsilon in np.linspace(0, 6 * math.sqrt(squared), 40) + 1.2345e-4:
        covered = share + (1 - share) * float(gaussian_delta(math.sqrt(squared), np.array([epsilon]))[0])
        assert sound_delta([event], float(epsilon), adjacency) <= covered * (1 + 1e-9)  # type: ignore[arg-type]
    less = 0.9 * squared
    assert any(
        sound_delta([event], float(epsilon), adjacency)  # type: ignore[arg-type]
        > leak * less / widest + float(gaussian_delta(math.sqrt(less), np.array([epsilon]))[0])
        for epsilon in np.linspace(0, 6 * math.sqrt(squared), 40)
    )


def test_a_gaussian_covers_itself() -> None:
    assert gaussian_cover(units([GaussianEvent(2.0, count=3)], "add-remove"), 10.0, 1e-7) == pytest.approx(0.75)


def test_the_whole_profile_agrees_with_single_deltas() -> None:
    event = GaussianEvent(1.0, "poisson", 0.01, 500)
    epsilons, deltas = profile(units([event], "add-remove"), 1e-9)
    assert deltas[-1] <= 1e-9
    for i in range(0, len(epsilons), 150):
        assert deltas[i] == pytest.approx(sound_delta([event], float(epsilons[i])), rel=2e-2)
        assert np.all(np.diff(deltas) <= 0)


def test_a_refusal_far_above_the_ceiling_still_says_what_would_do() -> None:
    """At a ceiling of 0.2 no Gaussian covers these plans, and the Renyi order suits 0.2; a higher one is tried."""
    plans = history([MNIST, OTHER])
    needed = Filters().needed(plans, Promise(0.2, DELTA))
    assert not needed.within
    assert 1.28 < needed.epsilon < 1.45 < Filters().costs(plans, Promise(0.2, DELTA)).epsilon
