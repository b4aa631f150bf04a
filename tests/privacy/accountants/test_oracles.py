"""Independent implementations as judges: the PRV accountant, dp-accounting's PLD and Opacus's RDP."""

from __future__ import annotations

import math
import warnings

import pytest

from confide.privacy.accountants import GDP, PLD, RDP, sound_epsilon
from confide.privacy.calibration import noise_multiplier_for
from confide.privacy.events import Adjacency, GaussianEvent, PureEvent

RUNS = [(1.3, 256 / 60_000, 3516), (1.2720742271998804, 256 / 60_000, 3516)]
MORE_RUNS = [(0.7, 0.01, 500), (4.0, 0.05, 2000), (0.9, 0.001, 20_000), (10.0, 0.5, 100)]


def certified(noise_multiplier: float, rate: float, steps: int) -> tuple[float, float, float]:
    """The PRV accountant's certified interval and its estimate (Gopi, Lee and Wutschitz 2021)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

        mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise_multiplier, sampling_probability=rate)
        accountant = PRVAccountant(prvs=mechanism, max_self_compositions=steps, eps_error=0.005, delta_error=1e-10)
        low, estimate, high = accountant.compute_epsilon(delta=1e-5, num_self_compositions=[steps])
    return low, estimate, high


def google(
    noise_multiplier: float, rate: float, steps: int, adjacency: Adjacency, discretisation: float = 1e-4
) -> float:
    import dp_accounting
    from dp_accounting import pld

    relation = dp_accounting.NeighboringRelation
    accountant = pld.PLDAccountant(
        relation.REPLACE_ONE if adjacency == "replace-one" else relation.ADD_OR_REMOVE_ONE, discretisation
    )
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("run", RUNS[:1])
def test_the_bound_lies_in_the_certified_interval_and_the_limit_theorem_below_it(
    run: tuple[float, float, int],
) -> None:
    low, estimate, high = certified(*run)
    events = [GaussianEvent(run[0], "poisson", *run[1:])]
    assert low < sound_epsilon(events, 1e-5) < high
    assert sound_epsilon(events, 1e-5) == pytest.approx(estimate, rel=5e-4)
    # The central limit theorem understates: below a certified lower bound it cannot be an upper one.
    assert GDP().epsilon(events, 1e-5).epsilon < low


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS + MORE_RUNS)
def test_the_bound_lies_in_the_certified_interval(run: tuple[float, float, int]) -> None:
    low, _, high = certified(*run)
    assert low < sound_epsilon([GaussianEvent(run[0], "poisson", *run[1:])], 1e-5) < high


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("run", RUNS[:1] + MORE_RUNS)
def test_dp_accounting_agrees(run: tuple[float, float, int], adjacency: Adjacency) -> None:
    # Same dots, another grid in the tail and another composition: 1e-3 apart at the most, usually 1e-5.
    found = sound_epsilon([GaussianEvent(run[0], "poisson", *run[1:])], 1e-5, adjacency)
    assert found == pytest.approx(google(*run, adjacency), rel=1e-3)


@pytest.mark.parametrize("run", RUNS[:1] + MORE_RUNS)
def test_opacus_agrees_on_renyi(run: tuple[float, float, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

        orders = [float(order) for order in range(2, 64)]
        divergence = compute_rdp(q=run[1], noise_multiplier=run[0], steps=run[2], orders=orders)
        epsilon, _ = get_privacy_spent(orders=orders, rdp=divergence, delta=1e-5)
    found = RDP(tuple(orders)).epsilon([GaussianEvent(run[0], "poisson", *run[1:])], 1e-5).epsilon
    assert found == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0])
def test_pure_releases_compose_as_the_optimal_theorem_says(epsilon: float, count: int) -> None:
    """Kairouz, Oh and Viswanath (2015): k releases of epsilon compose to (epsilon (k - 2 i), delta_i)."""
    for i in range(0, count // 2 + 1, max(1, count // 4)):
        terms = [
            math.comb(count, j)
            * (math.exp((count - j) * epsilon) - math.exp((count - 2 * i + j) * epsilon))
            / (1 + math.exp(epsilon)) ** count
            for j in range(i)
        ]
        delta = sum(terms)
        if delta < 1e-12:
            continue
        found = PLD().epsilon([PureEvent(epsilon, count=count)], delta).epsilon
        assert found == pytest.approx((count - 2 * i) * epsilon, abs=2e-3)
        assert found >= (count - 2 * i) * epsilon - 1e-9


def test_calibration_agrees_with_dp_accounting() -> None:
    noise = noise_multiplier_for(2.0, 1e-5, 500, 0.01)
    assert google(noise, 0.01, 500, "add-remove") == pytest.approx(2.0, rel=1e-3)
