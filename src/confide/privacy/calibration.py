"""Calibration: from a promised epsilon to the noise, the number of steps or the step size that keeps it.

The answer is never over the target and within 0.1 % of it, by the same accountant that will price the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from confide.errors import Refusal
from confide.privacy.accountants.bound import Accountant, is_plain_gaussian, sensitivity
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import gaussian_mu
from confide.privacy.events import Adjacency, Event, GaussianEvent, Sampling
from confide.privacy.search import most_steps, smallest_noise
from confide.privacy.step_sizes import StepSize, step_size_for
from confide.wording import is_real

__all__ = ["StepSize", "noise_multiplier_for", "step_size_for", "steps_for"]

_MOST_STEPS = 10**9  # beyond any run; the search has to end


def noise_multiplier_for(
    epsilon: float,
    delta: float,
    steps: int,
    rate: float = 1.0,
    sampling: Sampling = "poisson",
    adjacency: Adjacency = "add-remove",
    records: int | None = None,
    *,
    spent: Iterable[Event] = (),
    accountant: Accountant | None = None,
) -> float:
    """The smallest noise multiplier (std / C) for which `steps` releases stay within epsilon at delta.

    For sampling="shuffle" the steps are passes over the data. `spent` are releases that share the budget.
    """
    check_target(epsilon, delta)
    before = tuple(spent)

    def event(noise_multiplier: float) -> GaussianEvent:
        return GaussianEvent(noise_multiplier, sampling, rate, steps, records)

    judge = accountant or PLD()
    _check_room(epsilon, delta, adjacency, before, judge)
    start = _first_guess(epsilon, delta, event(1.0), adjacency)

    def cost(noise_multiplier: float) -> float:
        return price([*before, event(noise_multiplier)], delta, adjacency, judge)

    if accountant is None and not before and is_plain_gaussian(event(1.0)):
        # Closed form: sqrt(steps) * sensitivity / z = mu. Rounding may leave the last digit on the wrong side.
        while cost(start) > epsilon:
            start *= 1 + 1e-13
        return start
    return smallest_noise(cost, epsilon, start)


def steps_for(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    rate: float = 1.0,
    sampling: Sampling = "poisson",
    adjacency: Adjacency = "add-remove",
    records: int | None = None,
    *,
    spent: Iterable[Event] = (),
    accountant: Accountant | None = None,
) -> int:
    """The largest number of releases within epsilon at delta; at most a thousand million."""
    check_target(epsilon, delta)
    before = tuple(spent)
    unit = GaussianEvent(noise_multiplier, sampling, rate, 1, records)
    judge = accountant or PLD()
    _check_room(epsilon, delta, adjacency, before, judge)

    def cost(steps: int) -> float:
        event = GaussianEvent(noise_multiplier, sampling, rate, steps, records)
        return price([*before, event], delta, adjacency, judge)

    mu = _unit_mu(unit, adjacency)
    start = int(min(max(2.0, (gaussian_mu(epsilon, delta) / mu) ** 2), 1e8)) if mu < 1e6 else 2
    steps = most_steps(cost, epsilon, start, _MOST_STEPS)
    if steps == 0:
        raise Refusal(
            f"noise_multiplier={noise_multiplier}: a single release already costs epsilon={cost(1):.4g}, more than "
            f"epsilon={epsilon}; use more noise or a larger epsilon"
        )
    return steps


def price(events: Iterable[Event], delta: float, adjacency: Adjacency, accountant: Accountant) -> float:
    """The accountant's epsilon, where it must have one."""
    bound = accountant.epsilon(tuple(events), delta, adjacency)
    if bound.epsilon is None:
        raise Refusal(f"accountant={accountant.name!r}: {bound.kind}")
    return bound.epsilon


def check_target(epsilon: Any, delta: Any) -> None:
    if not (is_real(epsilon) and math.isfinite(epsilon) and epsilon > 0):
        raise Refusal(f"epsilon={epsilon!r}: must be a finite number > 0")
    if not (is_real(delta) and 0 < delta < 1):
        raise Refusal(f"delta={delta!r}: must be in (0, 1)")


def _check_room(
    epsilon: float, delta: float, adjacency: Adjacency, spent: tuple[Event, ...], accountant: Accountant
) -> None:
    if not spent:
        return
    already = price(spent, delta, adjacency, accountant)
    if already >= epsilon:
        raise Refusal(
            f"epsilon={epsilon}: the releases that share it with this run (a count, what a clip adapts to) alone cost "
            f"epsilon={already:.4g}; raise epsilon, or give them more noise"
        )


def _first_guess(epsilon: float, delta: float, unit: GaussianEvent, adjacency: Adjacency) -> float:
    """The noise multiplier by the central limit theorem: q sqrt(T (e^(s^2 / z^2) - 1)) = mu; exact at rate 1."""
    mu = gaussian_mu(epsilon, delta)
    moved = sensitivity(adjacency)
    if is_plain_gaussian(unit):
        return moved * math.sqrt(unit.count) / mu
    ratio = mu / (unit.rate * math.sqrt(unit.count))
    return moved / math.sqrt(math.log1p(ratio * ratio))


def _unit_mu(unit: GaussianEvent, adjacency: Adjacency) -> float:
    """mu of one release by the central limit theorem, for a first guess only."""
    exponent = (sensitivity(adjacency) / unit.noise_multiplier) ** 2
    if is_plain_gaussian(unit):
        return math.sqrt(exponent)
    return unit.rate * math.sqrt(math.expm1(min(exponent, 500.0)))
