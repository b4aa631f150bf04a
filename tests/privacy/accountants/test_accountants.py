"""Accountants: what each says of itself, what they refuse, and the laws that composition obeys."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from confide.errors import UnsupportedEvents
from confide.privacy.accountants import (
    APPROXIMATION,
    EXACT,
    GDP,
    PLD,
    RDP,
    UPPER_BOUND,
    ZCDP,
    AdvancedComposition,
    accountants,
    epsilons,
    sound_delta,
    sound_epsilon,
)
from confide.privacy.events import Adjacency, Event, GaussianEvent, NonPrivateEvent, PureEvent, Sampling

MNIST = GaussianEvent(1.3, "poisson", 256 / 60_000, 3516)
NAMES = ["pld", "rdp", "gdp_clt", "zcdp", "advanced_composition"]


def epsilon(events: list[Event], delta: float = 1e-5, adjacency: Adjacency = "add-remove") -> float:
    return sound_epsilon(events, delta, adjacency)


def test_every_accountant_answers_by_its_name_and_says_what_it_is_worth() -> None:
    answers = epsilons([MNIST], 1e-5)
    assert list(answers) == NAMES
    assert answers["gdp_clt"].kind == APPROXIMATION
    assert not answers["gdp_clt"].sound
    assert {answers[name].kind for name in NAMES if name != "gdp_clt"} == {UPPER_BOUND}
    tight = answers["pld"].epsilon
    assert tight is not None
    for name in ("rdp", "zcdp", "advanced_composition"):
        other = answers[name].epsilon
        assert other is not None
        assert other > tight


def test_full_batches_are_exact_and_shuffled_passes_only_bounded() -> None:
    full = epsilons([GaussianEvent(10.0, count=200)], 1 / 250)
    assert full["pld"].kind == full["gdp_clt"].kind == EXACT
    assert full["pld"].epsilon == full["gdp_clt"].epsilon
    passes = epsilons([GaussianEvent(10.0, "shuffle", 0.1, 200)], 1 / 250, "replace-one")
    assert passes["pld"].kind == passes["gdp_clt"].kind == UPPER_BOUND
    # Each pass is one Gaussian of sensitivity 2C: the same as full batches at half the noise.
    assert passes["pld"].epsilon == epsilon([GaussianEvent(5.0, count=200)], 1 / 250)


def test_poisson_sampling_at_rate_one_is_a_full_batch() -> None:
    sampled = GaussianEvent(3.0, "poisson", 1.0, 20)
    for accountant in accountants():
        assert accountant.epsilon([sampled], 1e-5) == accountant.epsilon([GaussianEvent(3.0, count=20)], 1e-5)


def test_nearly_always_sampled_is_nearly_a_full_batch() -> None:
    # Catches a direction left out: the two differ only in the reversed pair when the rate nears one.
    full = epsilon([GaussianEvent(3.0, count=20)])
    assert epsilon([GaussianEvent(3.0, "poisson", 0.999, 20)]) == pytest.approx(full, rel=5e-3)


@pytest.mark.parametrize("sampling", ["fixed-size", "shuffle"])
def test_batches_without_a_sound_bound_are_refused_with_the_way_out(sampling: Sampling) -> None:
    event = GaussianEvent(1.0, sampling, 0.01, 10, 1000)
    for call in (sound_epsilon, epsilons):
        with pytest.raises(UnsupportedEvents, match=r"use sampling='poisson'.*replace-one"):
            call([event], 1e-5, "add-remove")
    with pytest.raises(ValueError, match="no sound bound"):
        sound_delta([event], 0.0)
    assert sound_epsilon([event], 1e-5, "replace-one") > 0


def test_unknown_events_are_refused_never_guessed() -> None:
    for accountant in accountants():
        with pytest.raises(UnsupportedEvents, match="unknown kind of event"):
            accountant.epsilon([{"noise_multiplier": 1.0}], 1e-5)  # type: ignore[list-item]


def test_a_release_without_protection_costs_everything() -> None:
    events: list[Event] = [MNIST, NonPrivateEvent("loss curve")]
    assert epsilon(events) == math.inf
    assert sound_delta(events, 3.0) == 1.0
    assert all(bound.epsilon == math.inf for bound in epsilons(events, 1e-5).values())


def test_nothing_costs_nothing() -> None:
    assert epsilon([]) == 0
    assert all(bound.epsilon == 0 for bound in epsilons([], 1e-5).values())


@pytest.mark.parametrize("delta", [-1e-9, 1.0, math.nan])
def test_a_delta_outside_its_range_is_refused(delta: float) -> None:
    for accountant in accountants():
        with pytest.raises(ValueError, match="delta="):
            accountant.epsilon([MNIST], delta)


def test_delta_zero_is_for_pure_releases() -> None:
    pure = [PureEvent(0.1, count=3), PureEvent(0.2)]
    assert epsilon(list(pure), 0.0) == pytest.approx(0.5)
    assert AdvancedComposition().epsilon(pure, 0.0).epsilon == pytest.approx(0.5)
    assert epsilon([MNIST], 0.0) == math.inf
    assert RDP().epsilon(pure, 0.0).epsilon is None
    assert ZCDP().epsilon(pure, 0.0).epsilon is None


def test_replacing_a_record_costs_a_pure_release_twice() -> None:
    once, twice = PureEvent(0.1, count=5), PureEvent(0.2, count=5)
    for accountant in (PLD(), RDP(), ZCDP(), AdvancedComposition()):
        assert accountant.epsilon([once], 1e-5, "replace-one").epsilon == pytest.approx(
            accountant.epsilon([twice], 1e-5, "add-remove").epsilon, rel=1e-9
        )


@pytest.mark.parametrize("delta", [1e-5, 1e-13])
def test_pure_releases_never_cost_more_than_their_sum(delta: float) -> None:
    assert epsilon([PureEvent(0.3, count=2)], delta) <= 0.6
    # Next to nothing beside them costs next to nothing, even where rounding errors outweigh delta.
    beside = GaussianEvent(18.0, "poisson", 2.7e-6, 888)
    assert epsilon([PureEvent(0.3, count=2), beside], delta) <= 0.6 * 1.01


def test_the_profile_and_its_inverse_agree() -> None:
    for delta in (1e-2, 1e-5, 1e-9):
        found = epsilon([MNIST], delta)
        assert sound_delta([MNIST], found) == pytest.approx(delta, rel=2e-3)


def test_total_variation_decreases_to_zero_with_epsilon() -> None:
    deltas = PLD().deltas([MNIST], [0.0, 0.1, 0.5, 1.0])
    assert list(deltas) == sorted(deltas, reverse=True)
    assert deltas[0] == pytest.approx(sound_delta([MNIST], 0.0))
    assert deltas[2] == pytest.approx(sound_delta([MNIST], 0.5), rel=1e-3)


def test_a_huge_epsilon_is_still_bounded_in_time_and_memory() -> None:
    found = epsilon([GaussianEvent(0.1, "poisson", 1024 / 60_000, 1160)])
    assert found == pytest.approx(1904, rel=1e-3)
    assert epsilon([GaussianEvent(0.05, count=10_000)]) > 1e6
    assert math.isfinite(epsilon([GaussianEvent(0.05, "poisson", 0.1, 100_000)]))


def test_a_given_grid_is_used_and_finer_ones_are_tighter() -> None:
    bounds = [PLD(step).epsilon([MNIST], 1e-5) for step in (1e-3, 1e-4, 2e-5)]
    values = [bound.epsilon for bound in bounds]
    assert values == sorted(values, reverse=True)
    assert "0.001" in bounds[0].note
    with pytest.raises(ValueError, match="discretisation=0"):
        PLD(discretisation=0)


def test_the_moments_conversion_is_looser_than_the_improved_one() -> None:
    moments = RDP(conversion="moments").epsilon([MNIST], 1e-5).epsilon
    improved = RDP().epsilon([MNIST], 1e-5).epsilon
    assert moments is not None
    assert improved is not None
    assert improved < moments


def test_zcdp_is_not_amplified() -> None:
    sampled = ZCDP().epsilon([GaussianEvent(5.0, "poisson", 0.01, 50)], 1e-5)
    full = ZCDP().epsilon([GaussianEvent(5.0, count=50)], 1e-5)
    assert sampled.epsilon == full.epsilon
    assert "no amplification" in sampled.note


def test_advanced_composition_of_pure_steps_by_hand() -> None:
    found = AdvancedComposition().epsilon([PureEvent(0.1, count=100)], 1e-5).epsilon
    by_hand = 100 * 0.1 * math.tanh(0.05) + math.sqrt(2 * math.log(1e5) * 100 * 0.01)
    assert found == pytest.approx(by_hand)


def test_the_limit_theorem_can_err_on_both_sides() -> None:
    for noise, steps, sign in ((1.3, 3516, -1), (0.34837, 14_062, 1)):
        event = GaussianEvent(noise, "poisson", 256 / 60_000 if sign < 0 else 64 / 60_000, steps)
        limit = GDP().epsilon([event], 1e-5).epsilon
        assert limit is not None
        assert (limit - epsilon([event])) * sign > 0


noises = st.floats(0.5, 20.0)
rates = st.floats(1e-3, 0.5)
counts = st.integers(1, 300)
gaussians = st.builds(lambda z, q, t: GaussianEvent(z, "poisson", q, t), noises, rates, counts)
pures = st.builds(lambda e, t: PureEvent(e, count=t), st.floats(0.01, 0.5), st.integers(1, 5))
# The grid adds up to about one per cent, and more or less of it from case to case.
SLACK = 1.012
quick = settings(deadline=None, max_examples=12)


@quick
@given(first=gaussians, second=st.one_of(gaussians, pures))
def test_composition_is_symmetric_and_costs_more_than_its_parts(first: Event, second: Event) -> None:
    both = epsilon([first, second])
    assert both == epsilon([second, first])
    assert both * SLACK >= max(epsilon([first]), epsilon([second]))
    assert both <= (epsilon([first], 5e-6) + epsilon([second], 5e-6)) * SLACK


@quick
@given(event=gaussians, split=st.integers(1, 299))
def test_a_run_costs_the_same_in_one_piece_or_two(event: GaussianEvent, split: int) -> None:
    assume(split < event.count)
    pieces: list[Event] = [
        GaussianEvent(event.noise_multiplier, "poisson", event.rate, split),
        GaussianEvent(event.noise_multiplier, "poisson", event.rate, event.count - split),
    ]
    assert epsilon(pieces) == epsilon([event])


@quick
@given(event=gaussians)
def test_less_noise_more_steps_or_more_sampling_never_cost_less(event: GaussianEvent) -> None:
    z, q, t = event.noise_multiplier, event.rate, event.count
    base = epsilon([event])
    for worse in (
        GaussianEvent(z / 1.1, "poisson", q, t),
        GaussianEvent(z, "poisson", min(1.0, 1.1 * q), t),
        GaussianEvent(z, "poisson", q, t + max(1, t // 10)),
    ):
        assert epsilon([worse]) * SLACK >= base
    assert epsilon([event], 1e-6) * SLACK >= base


@quick
@given(event=gaussians)
def test_no_other_sound_accountant_beats_pld(event: GaussianEvent) -> None:
    # Catches a PLD that is too small (it would fall below a truth) as well as one that is far too large.
    tight = epsilon([event])
    for accountant in (RDP(tuple(float(order) for order in range(2, 33))), ZCDP(), AdvancedComposition()):
        other = accountant.epsilon([event], 1e-5).epsilon
        assert other is not None
        assert tight <= other * SLACK


@quick
@given(event=gaussians)
def test_replacing_a_record_costs_more_than_adding_one_and_at_most_twice_over(event: GaussianEvent) -> None:
    once, replaced = epsilon([event]), epsilon([event], adjacency="replace-one")
    assert once <= replaced * SLACK
    # Group privacy for two: (2 eps, (1 + e^eps) delta).
    delta = 1e-5 / (1 + math.exp(once + 1))
    assert replaced <= 2 * epsilon([event], delta) * SLACK


@quick
@given(z=noises, batch=st.integers(1, 500), steps=counts)
def test_fixed_size_batches_lie_between_the_attained_pair_and_twice_it(z: float, batch: int, steps: int) -> None:
    fixed = GaussianEvent(z, "fixed-size", batch / 1000, steps, 1000)
    attained = epsilon([GaussianEvent(z / 2, "poisson", batch / 1000, steps)])
    found = epsilon([fixed], adjacency="replace-one")
    assert attained <= found * SLACK
    assert found <= epsilon([GaussianEvent(z / 2, count=steps)]) * SLACK
