"""Calibration: never over the target, within 0.1 % of it, for noise, steps and step sizes."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.privacy.accountants import PLD, RDP, sound_epsilon
from confide.privacy.calibration import noise_multiplier_for, step_size_for, steps_for
from confide.privacy.events import Adjacency, GaussianEvent, PureEvent, Sampling
from confide.privacy.search import most_steps, smallest_noise
from confide.privacy.step_sizes import (
    decreasing_blocks,
    dp_bnn_noise_multiplier,
    dp_sgmcmc_noise_multiplier,
    dp_sgmcmc_step_size,
    large_batch_step_size,
    posterior_sgld_noise_multiplier,
    posterior_sgld_step_size,
    sgnht_noise_multiplier,
)

WAYS: list[tuple[Sampling, Adjacency, float]] = [
    ("poisson", "add-remove", 0.01),
    ("poisson", "replace-one", 0.01),
    ("fixed-size", "replace-one", 0.01),
    ("shuffle", "replace-one", 0.01),
    ("full-batch", "add-remove", 1.0),
    ("full-batch", "replace-one", 1.0),
]


def within(found: float, target: float) -> bool:
    return target * (1 - 1e-3) <= found <= target


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("sampling", "adjacency", "rate"), WAYS)
def test_noise_hits_the_target_from_below(target: float, sampling: Sampling, adjacency: Adjacency, rate: float) -> None:
    noise = noise_multiplier_for(target, 1e-5, 100, rate, sampling, adjacency, 10_000)
    events = [GaussianEvent(noise, sampling, rate, 100, 10_000)]
    assert within(sound_epsilon(events, 1e-5, adjacency), target)


@settings(deadline=None, max_examples=8)
@given(
    target=st.floats(0.02, 30),
    log_delta=st.floats(-9, -2),
    steps=st.integers(1, 20_000),
    rate=st.floats(1e-4, 0.9),
)
def test_noise_hits_any_target_from_below(target: float, log_delta: float, steps: int, rate: float) -> None:
    delta = 10**log_delta
    noise = noise_multiplier_for(target, delta, steps, rate)
    found = sound_epsilon([GaussianEvent(noise, "poisson", rate, steps)], delta)
    assert within(found, target)


def test_a_slightly_smaller_noise_would_break_the_promise() -> None:
    # The broken variant: without the last nudge, 0.1 % less noise, the target is exceeded.
    noise = noise_multiplier_for(1.0, 1e-5, 3515, 256 / 60_000)
    assert sound_epsilon([GaussianEvent(0.999 * noise, "poisson", 256 / 60_000, 3515)], 1e-5) > 1.0


def test_steps_are_the_largest_number_within_the_target() -> None:
    rate = 256 / 60_000
    steps = steps_for(1.0, 1e-5, 1.3, rate)
    assert sound_epsilon([GaussianEvent(1.3, "poisson", rate, steps)], 1e-5) <= 1.0
    assert sound_epsilon([GaussianEvent(1.3, "poisson", rate, steps + 1)], 1e-5) > 1.0


@pytest.mark.parametrize(("sampling", "adjacency", "rate"), WAYS)
def test_steps_and_noise_are_inverse(sampling: Sampling, adjacency: Adjacency, rate: float) -> None:
    noise = noise_multiplier_for(2.0, 1e-5, 50, rate, sampling, adjacency, 10_000)
    assert steps_for(2.0, 1e-5, noise, rate, sampling, adjacency, 10_000) == 50


def test_what_was_spent_before_is_taken_from_the_budget() -> None:
    spent = [PureEvent(0.2)]
    noise = noise_multiplier_for(1.0, 1e-5, 100, 0.01, spent=spent)
    events = [*spent, GaussianEvent(noise, "poisson", 0.01, 100)]
    assert within(sound_epsilon(events, 1e-5), 1.0)
    assert noise > noise_multiplier_for(1.0, 1e-5, 100, 0.01)
    steps = steps_for(1.0, 1e-5, noise, 0.01, spent=spent)
    assert steps == 100
    with pytest.raises(ValueError, match="alone cost"):
        noise_multiplier_for(0.1, 1e-5, 100, 0.01, spent=spent)


def test_another_accountant_may_judge() -> None:
    accountant = RDP()
    noise = noise_multiplier_for(1.0, 1e-5, 100, 0.01, accountant=accountant)
    found = accountant.epsilon([GaussianEvent(noise, "poisson", 0.01, 100)], 1e-5).epsilon
    assert found is not None
    assert within(found, 1.0)
    with pytest.raises(ValueError, match="not applicable"):
        noise_multiplier_for(1.0, 1e-5, 100, 0.01, adjacency="replace-one", accountant=accountant)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0: must be"),
        ({"epsilon": math.inf}, "epsilon=inf: must be"),
        ({"delta": 0.0}, "delta=0.0: must be"),
        ({"delta": 1.0}, "delta=1.0: must be"),
        ({"rate": 0.0}, "rate=0.0: must be"),
        ({"steps": 0}, "count=0: must be"),
        ({"sampling": "fixed-size"}, "records=None"),
    ],
)
def test_impossible_targets_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for(
            **{"epsilon": 1.0, "delta": 1e-5, "steps": 10, "rate": 0.1, **arguments}  # type: ignore[arg-type]
        )


def test_a_budget_below_one_step_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"single release already costs.*use more noise"):
        steps_for(0.1, 1e-5, 0.3, 0.5)


def test_the_search_stays_on_the_safe_side_of_a_jump() -> None:
    # A cost that jumps over the target: the answer must be on the cheap side of the jump.
    found = smallest_noise(lambda noise: 0.5 if noise >= 2.0 else 3.0, 1.0, 0.3)
    assert 2.0 <= found < 2.0 * (1 + 1e-9)
    assert most_steps(lambda steps: 0.5 if steps < 37 else 2.0, 1.0, 5, 1000) == 36
    assert most_steps(lambda steps: 0.5, 1.0, 5, 1000) == 1000
    with pytest.raises(ValueError, match="no noise multiplier"):
        smallest_noise(lambda noise: 3.0, 1.0, 1.0)


def test_conventions_of_the_step_size_are_kept_apart() -> None:
    half_temperature = dp_bnn_noise_multiplier(5e-6, 60_000, 256, 1.5)
    assert posterior_sgld_noise_multiplier(5e-6, 60_000, 256, 1.5) == pytest.approx(2 * half_temperature)
    # The step of the mean gradient is n times that of the sum at the same noise multiplier.
    assert dp_sgmcmc_noise_multiplier(60_000 * 5e-6, 60_000, 256, 1.5) == pytest.approx(half_temperature)
    thermostat = sgnht_noise_multiplier(1e-3, 2.0, 1000, 50, 1.0)
    assert thermostat == pytest.approx(
        dp_sgmcmc_noise_multiplier(1000 * 1e-6, 1000, 50, 1.0, "sgnht", friction=2.0 * 1e-3)
    )


def test_noise_of_the_sampler_by_hand() -> None:
    """The definition itself: std of what is added, over how far one clipped record can move it."""
    n, b, clip, eta = 5000, 100, 2.0, 1e-4
    moved_by_one_record = eta / 2 * (n / b) * clip
    assert posterior_sgld_noise_multiplier(eta, n, b, clip) == pytest.approx(math.sqrt(eta) / moved_by_one_record)
    moved_on_the_mean = eta / b * clip
    assert dp_sgmcmc_noise_multiplier(eta, n, b, clip) == pytest.approx(math.sqrt(eta / n) / moved_on_the_mean)
    assert dp_sgmcmc_noise_multiplier(eta, n, b, clip, "sghmc", 0.3) == pytest.approx(
        math.sqrt(2 * 0.3 * eta / n) / moved_on_the_mean
    )


@pytest.mark.parametrize("method", ["sgld", "sghmc", "sgnht"])
def test_step_size_and_noise_multiplier_are_inverse(method: str) -> None:
    noise = dp_sgmcmc_noise_multiplier(0.03, 1000, 50, 1.5, method, 0.2)  # type: ignore[arg-type]
    assert dp_sgmcmc_step_size(noise, 1000, 50, 1.5, method, 0.2) == pytest.approx(0.03)  # type: ignore[arg-type]
    posterior = posterior_sgld_noise_multiplier(0.03, 1000, 50, 1.5)
    assert posterior_sgld_step_size(posterior, 1000, 50, 1.5) == pytest.approx(0.03)


@pytest.mark.parametrize("schedule", ["fixed", "decreasing"])
@pytest.mark.parametrize("target", [0.1, 0.5])
def test_step_sizes_keep_the_promise(target: float, schedule: str) -> None:
    found = step_size_for(target, 1e-5, 20_000, 128, 1000, 1.0, schedule)  # type: ignore[arg-type]
    blocks = [GaussianEvent(z, "poisson", 128 / 20_000, count) for z, count in found.blocks]
    assert sum(count for _, count in found.blocks) == 1000
    assert within(sound_epsilon(blocks, 1e-5), target)
    assert within(found.epsilon, target)
    assert dp_sgmcmc_noise_multiplier(found.step_size, 20_000, 128, 1.0) >= found.noise_multiplier
    assert found.wang2015 < found.step_size < 1.001 * found.large_batch_limit


def test_blocks_are_charged_at_their_largest_step() -> None:
    found = step_size_for(0.5, 1e-5, 20_000, 128, 1000, 1.0, "decreasing")
    start = 1
    for (noise, count), (first, number) in zip(found.blocks, decreasing_blocks(1000), strict=True):
        assert (first, number) == (start, count)
        for step in (start, start + count - 1):
            true = dp_sgmcmc_noise_multiplier(found.step_size * step ** (-1 / 3), 20_000, 128, 1.0)
            assert noise <= true * (1 + 1e-12) <= noise * 1.03**0.5 * (1 + 1e-9)
        start += count


def test_finer_blocks_allow_a_larger_step() -> None:
    coarse = step_size_for(0.1, 1e-5, 20_000, 128, 100, 1.0, "decreasing", block_ratio=1.2)
    fine = step_size_for(0.1, 1e-5, 20_000, 128, 100, 1.0, "decreasing", block_ratio=1.03)
    assert coarse.step_size < fine.step_size


def test_the_large_batch_limit_allows_too_much() -> None:
    # The broken variant: trusting the limit. Near noise multiplier one it breaks the promise.
    limit = large_batch_step_size(1.0, 1e-5, 50_000, 10_000, 1.0)
    noise = dp_sgmcmc_noise_multiplier(limit, 50_000, 128, 1.0)
    assert sound_epsilon([GaussianEvent(noise, "poisson", 128 / 50_000, 10_000)], 1e-5) > 1.2


def test_friction_pays_for_part_of_the_step_only() -> None:
    plain = step_size_for(0.5, 1e-5, 20_000, 128, 1000, 1.0)
    damped = step_size_for(0.5, 1e-5, 20_000, 128, 1000, 1.0, method="sghmc", friction=0.1)
    assert damped.step_size == pytest.approx(0.2 * plain.step_size)
    assert damped.noise_multiplier == plain.noise_multiplier


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "cosine"}, "schedule='cosine': must be"),
        ({"method": "hmc"}, "method='hmc': must be"),
        ({"clip": 0.0}, "clip=0.0: must be"),
        ({"batch": 30_000}, "batch=30000: must be at most"),
        ({"delta": 0.0}, "delta=0.0: must be"),
        ({"schedule": "decreasing", "block_ratio": 1.0}, "block_ratio=1.0: must be"),
        ({"method": "sghmc", "friction": 0.0}, "friction=0.0: must be"),
    ],
)
def test_impossible_step_sizes_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_size_for(0.5, **{"delta": 1e-5, "records": 20_000, "batch": 128, "steps": 10, "clip": 1.0} | arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "table"), [(0.02, 3.779e-3), (0.1, 7.352e-2), (0.5, 0.8912), (1.0, 1.1933), (1.7, 1.4762)]
)
def test_decreasing_steps_allow_at_least_what_a_coarser_grid_allows(target: float, table: float) -> None:
    found = step_size_for(target, 1e-5, 50_000, 128, 10_000, 1.0, "decreasing")
    assert table * (1 - 1e-3) <= found.step_size <= 1.08 * table
    assert within(found.epsilon, target)


def test_decreasing_steps_of_the_same_grid() -> None:
    found = step_size_for(0.1, 1e-5, 50_000, 128, 10_000, 1.0, "decreasing", accountant=PLD(discretisation=5e-5))
    assert found.step_size == pytest.approx(7.352e-2, rel=1e-3)


def test_noise_has_the_same_bits_whatever_the_number_of_threads() -> None:
    """Ranks, workers and a run that is taken up again find it anew, and compare."""
    code = (
        "from confide.privacy.calibration import noise_multiplier_for as z; print(repr(z(1.0, 1e-5, 449, 128 / 1437)))"
    )

    def found(threads: str) -> str:
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert found("1") == found("2")
