"""What an attacker can do: against the exact Gaussian trade-off, quoted values and simulated attacks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from confide.privacy.accountants import sound_epsilon
from confide.privacy.accountants.profiles import gaussian_mu
from confide.privacy.events import Event, GaussianEvent, NonPrivateEvent, PureEvent
from confide.privacy.interpretation import attacker, naive_accuracy, true_positive_rate

MNIST: list[Event] = [GaussianEvent(1.3, "poisson", 256 / 60_000, 3516)]


def test_quoted_values() -> None:
    found = attacker(MNIST, 0.8646, delta=1e-5)
    assert found.advantage == pytest.approx(0.0902, abs=1e-4)
    assert found.accuracy == pytest.approx(0.5451, abs=1e-4)
    assert found.naive_accuracy == pytest.approx(0.7036, abs=1e-4)
    assert found.tpr_at_fpr[0.001] == pytest.approx(0.00214, rel=5e-3)
    assert found.tpr_at_fpr[0.01] == pytest.approx(0.0181, rel=5e-3)
    assert found.tpr_at_fpr[0.1] == pytest.approx(0.146, rel=5e-3)


@pytest.mark.parametrize(
    ("epsilon", "naive", "tight"),
    [(0.5, 0.622, 0.528), (2.18, 0.898, 0.607), (5.0, 0.993, 0.712), (8.0, 0.9997, 0.798)],
)
def test_the_naive_accuracy_overstates(epsilon: float, naive: float, tight: float) -> None:
    found = attacker([GaussianEvent(1 / gaussian_mu(epsilon, 1e-5))], epsilon)
    assert found.naive_accuracy == pytest.approx(naive, abs=1e-3)
    assert found.accuracy == pytest.approx(tight, abs=1e-3)


@settings(deadline=None, max_examples=20)
@given(mu=st.floats(0.05, 4.0), rate=st.sampled_from([0.001, 0.01, 0.1, 0.3]))
def test_gaussians_match_their_trade_off_curve(mu: float, rate: float) -> None:
    # Phi(Phi^-1(a) + mu) is exact; ours may only lie above, by the distance of the grid points.
    found = attacker([GaussianEvent(1 / mu)], 1.0, false_positive_rates=[rate]).tpr_at_fpr[rate]
    true = float(ndtr(ndtri(rate) + mu))
    assert true - 1e-9 <= found <= true * 1.005 + 1e-6


def test_a_simulated_attack_stays_below_the_bound_and_breaks_half_of_it() -> None:
    """The likelihood-ratio attack on one Poisson-sampled release: as strong as allowed, and no stronger."""
    rng = np.random.default_rng(7)
    z, q, draws = 0.5, 0.5, 400_000
    without = rng.normal(0, z, draws)
    included = rng.random(draws) < q
    with_record = rng.normal(0, z, draws) + included
    threshold = np.quantile(without, 0.99)
    power = float((with_record > threshold).mean())
    best = attacker([GaussianEvent(z, "poisson", q, 1)], 1.0).tpr_at_fpr[0.01]
    assert 0.98 * best < power < 1.03 * best
    # A bound computed at twice the noise would be broken by this attack.
    wrong = attacker([GaussianEvent(2 * z, "poisson", q, 1)], 1.0).tpr_at_fpr[0.01]
    assert power > 1.5 * wrong


def test_randomised_response() -> None:
    # Pure epsilon: advantage (e^eps - 1) / (e^eps + 1); here the naive accuracy is tight.
    found = attacker([PureEvent(1.0)], 1.0)
    assert found.advantage == pytest.approx(math.tanh(0.5), rel=1e-4)
    assert found.accuracy == pytest.approx(found.naive_accuracy, rel=1e-4)


def test_replacing_is_easier_to_see_than_adding() -> None:
    add = attacker(MNIST, sound_epsilon(MNIST, 1e-5))
    replace = attacker(MNIST, sound_epsilon(MNIST, 1e-5, "replace-one"), "replace-one")
    assert replace.advantage > 1.5 * add.advantage


def test_no_protection_and_no_release() -> None:
    lost = attacker([NonPrivateEvent("x")], math.inf)
    assert (lost.advantage, lost.accuracy, lost.naive_accuracy) == (1.0, 1.0, 1.0)
    assert set(lost.tpr_at_fpr.values()) == {1.0}
    blind = attacker([], 0.0)
    assert (blind.advantage, blind.accuracy, blind.naive_accuracy) == (0.0, 0.5, 0.5)
    assert blind.tpr_at_fpr[0.1] == pytest.approx(0.1)


def test_delta_enters_the_naive_accuracy() -> None:
    assert naive_accuracy(1.0, 0.1) == pytest.approx((math.e + 0.1) / (1 + math.e))
    assert naive_accuracy(0.0, 0.0) == 0.5
    assert naive_accuracy(800.0, 1e-5) == 1.0
    with pytest.raises(ValueError, match="epsilon=-1"):
        naive_accuracy(-1)


def test_more_points_of_the_profile_only_help() -> None:
    few = true_positive_rate(np.array([0.0]), np.array([0.2]), 0.01)
    more = true_positive_rate(np.array([0.0, 1.0]), np.array([0.2, 0.01]), 0.01)
    assert more < few == pytest.approx(0.21)


def test_a_false_positive_rate_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="false_positive_rates="):
        attacker(MNIST, 1.0, false_positive_rates=[1.5])
