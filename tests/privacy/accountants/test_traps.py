"""Four traps of dp-accounting 0.6, each shown to be there and shown to be avoided."""

from __future__ import annotations

import logging
import math

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from confide.errors import UnsupportedEvents
from confide.privacy.accountants import PLD, RDP, sound_epsilon
from confide.privacy.events import GaussianEvent, PureEvent

ADD_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
UNSUPPORTED = dp_accounting.UnsupportedEventError


def naive_replace_one_rdp(noise_multiplier: float, delta: float) -> float:
    accountant = rdp.RdpAccountant(neighboring_relation=REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier))
    return float(accountant.get_epsilon(delta))


def test_trap_one_replacing_a_record_doubles_the_sensitivity_in_every_accountant() -> None:
    events = [GaussianEvent(2.0)]
    exact = PLD().epsilon(events, 1e-5, "replace-one").epsilon
    renyi = RDP().epsilon(events, 1e-5, "replace-one").epsilon
    assert exact is not None
    assert renyi is not None
    assert exact == pytest.approx(4.377, abs=1e-3)
    assert exact <= renyi <= 1.15 * exact
    # The naive call, without the factor two, claims half of it: caught, since it falls below the exact value.
    assert naive_replace_one_rdp(2.0, 1e-5) == pytest.approx(2.166, abs=0.2)
    assert naive_replace_one_rdp(2.0, 1e-5) < exact


def test_trap_one_for_batches_of_fixed_size() -> None:
    event = GaussianEvent(1.3, "fixed-size", 0.01, 100, 1000)
    naive = rdp.RdpAccountant(tuple(range(2, 33)), REPLACE_ONE)
    naive.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.3)), 100)
    tight = sound_epsilon([event], 1e-5, "replace-one")
    ours = RDP(tuple(float(order) for order in range(2, 33))).epsilon([event], 1e-5, "replace-one").epsilon
    assert ours is not None
    assert naive.get_epsilon(1e-5) < tight < ours


def test_trap_two_combinations_the_package_refuses_are_answered_soundly_or_refused_by_name() -> None:
    sampled = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    without_replacement = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(UNSUPPORTED):
        rdp.RdpAccountant(neighboring_relation=REPLACE_ONE).compose(sampled)
    with pytest.raises(UNSUPPORTED):
        pld.PLDAccountant(REPLACE_ONE).compose(without_replacement)

    poisson = GaussianEvent(1.0, "poisson", 0.01, 10)
    bound = RDP().epsilon([poisson], 1e-5, "replace-one")
    assert bound.epsilon is None
    assert bound.kind.startswith("not applicable: ")
    fixed = GaussianEvent(1.0, "fixed-size", 0.01, 10, 1000)
    lower = sound_epsilon([GaussianEvent(0.5, "poisson", 0.01, 10)], 1e-5)  # the attained one-sided pair
    assert lower <= sound_epsilon([fixed], 1e-5, "replace-one") < 2 * lower
    with pytest.raises(UnsupportedEvents, match="sampling='poisson'"):
        sound_epsilon([fixed], 1e-5, "add-remove")


def test_trap_three_a_coarse_grid_inflates_small_epsilons() -> None:
    noise, rate, steps = 43.53026421133884, 0.01, 20_000
    naive = pld.PLDAccountant(ADD_REMOVE)
    naive.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    event = [GaussianEvent(noise, "poisson", rate, steps)]
    truth = PLD(discretisation=1e-6).epsilon(event, 1e-5).epsilon
    ours = sound_epsilon(event, 1e-5)
    assert truth is not None
    assert naive.get_epsilon(1e-5) > 1.015 * truth
    assert truth <= ours < 1.002 * truth


def test_trap_three_many_tiny_losses_get_a_finer_grid_by_themselves() -> None:
    # 1e6 steps whose losses are a hundredth of the usual grid step.
    event = [GaussianEvent(80.0, "poisson", 1e-4, 1_000_000)]
    truth = PLD(discretisation=1e-7).epsilon(event, 1e-5).epsilon
    ours = sound_epsilon(event, 1e-5)
    fixed = PLD(discretisation=1e-4).epsilon(event, 1e-5).epsilon
    assert truth is not None
    assert fixed is not None
    assert truth <= ours < 1.02 * truth
    assert fixed > 2 * truth


def test_trap_four_small_noise_is_quiet_and_stays_an_upper_bound(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heard whatever tests before this one did to the package's logger.
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    caplog.set_level(logging.WARNING, logger="absl")
    naive = rdp.RdpAccountant()
    naive.compose(dp_accounting.PoissonSampledDpEvent(0.37, dp_accounting.GaussianDpEvent(0.31)))
    assert any("failed to converge" in record.message for record in caplog.records)
    caplog.clear()
    event = GaussianEvent(0.31, "poisson", 0.37, 3)
    renyi = RDP().epsilon([event], 1e-5).epsilon
    assert not caplog.records
    assert renyi is not None
    assert renyi >= sound_epsilon([event], 1e-5)


def test_rounding_never_goes_below_the_true_divergence() -> None:
    # At order two the divergence is log(1 + q^2 (e^(1/z^2) - 1)); the package's sum of logarithms falls short of it.
    noise, rate, steps, delta = 80.0, 1e-3, 10**9, 1e-5
    true = steps * math.log1p(rate**2 * math.expm1(1 / noise**2)) - math.log(delta)
    naive = rdp.RdpAccountant([2.0])
    naive.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    ours = RDP((2.0,), "moments").epsilon([GaussianEvent(noise, "poisson", rate, steps)], delta).epsilon
    assert naive.rdp[0] - math.log(delta) < true
    assert ours is not None
    assert true <= ours < true * (1 + 1e-5)


def test_a_pure_release_that_holds_for_replacement_only_is_not_stretched() -> None:
    with pytest.raises(UnsupportedEvents, match="replace-one"):
        sound_epsilon([PureEvent(0.1, "replace-one")], 1e-5, "add-remove")
