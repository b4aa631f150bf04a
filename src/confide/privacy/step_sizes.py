"""Step sizes of private stochastic-gradient MCMC: how the noise a sampler needs anyway pays for privacy.

A sampler adds Gaussian noise whose size its step size fixes. Clipping each record's gradient to norm C turns that
into a noise multiplier z, so a promised epsilon bounds the step size. Conventions differ between papers and are
kept apart by name. n records, batches of b (sampling rate b / n), step size eta:

    posterior_sgld    w' = w - (eta/2) (n/b sum clip(g) + prior) + N(0, eta)       z = 2 b / (n C sqrt(eta))
                      the discretisation whose stationary law is the posterior itself
    dp_bnn            w' = w - eta (n/b sum clip(g) + prior) + N(0, eta)           z = b / (n C sqrt(eta))
                      twice the drift: the posterior at half the temperature
    dp_sgmcmc         w' = w - eta (1/b sum clip(g) + prior/n) + N(0, eta/n)       z = b / (C sqrt(n eta))
                      Li, Chen, Liu and Carin (2019): the step multiplies the mean gradient
    ... with friction a   v' = (1-a) v - eta (1/b sum clip(g)) + N(0, 2 a eta/n)   z = b sqrt(2 a) / (C sqrt(n eta))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from confide.errors import Refusal
from confide.privacy.accountants.bound import Accountant
from confide.privacy.accountants.pld import PLD
from confide.privacy.accountants.profiles import gaussian_mu
from confide.privacy.events import Adjacency, GaussianEvent
from confide.privacy.search import smallest_noise

Schedule: TypeAlias = Literal["fixed", "decreasing"]
SamplerName: TypeAlias = Literal["sgld", "sghmc", "sgnht"]
Blocks: TypeAlias = tuple[tuple[float, int], ...]


def posterior_sgld_noise_multiplier(step_size: float, records: int, batch: float, clip: float) -> float:
    """z = 2 b / (n C sqrt(eta)): drift eta/2 on the summed gradient, noise variance eta, temperature one."""
    _check_positive(step_size=step_size, records=records, batch=batch, clip=clip)
    return 2 * batch / (records * clip * math.sqrt(step_size))


def posterior_sgld_step_size(noise_multiplier: float, records: int, batch: float, clip: float) -> float:
    """The step size with that noise multiplier: eta = (2 b / (n C z))^2."""
    _check_positive(noise_multiplier=noise_multiplier, records=records, batch=batch, clip=clip)
    return (2 * batch / (records * clip * noise_multiplier)) ** 2


def dp_bnn_noise_multiplier(step_size: float, records: int, batch: float, clip: float) -> float:
    """z = b / (n C sqrt(eta)): drift eta on the summed gradient, noise variance eta (half the temperature)."""
    return posterior_sgld_noise_multiplier(step_size, records, batch, clip) / 2


def dp_sgmcmc_noise_multiplier(
    step_size: float,
    records: int,
    batch: float,
    clip: float,
    method: SamplerName = "sgld",
    friction: float = 0.1,
) -> float:
    """z = b / (C sqrt(n eta)) for SGLD; times sqrt(2 a) for SGHMC with friction a and for SGNHT with a = A h."""
    _check_positive(step_size=step_size)
    return _unit_noise(records, batch, clip, method, friction) / math.sqrt(step_size)


def dp_sgmcmc_step_size(
    noise_multiplier: float,
    records: int,
    batch: float,
    clip: float,
    method: SamplerName = "sgld",
    friction: float = 0.1,
) -> float:
    """The step size eta with that noise multiplier; the inverse of `dp_sgmcmc_noise_multiplier`."""
    _check_positive(noise_multiplier=noise_multiplier)
    return (_unit_noise(records, batch, clip, method, friction) / noise_multiplier) ** 2


def sgnht_noise_multiplier(step_size: float, diffusion: float, records: int, batch: float, clip: float) -> float:
    """z = b sqrt(2 A / h) / (n C) for v' = (1 - h xi) v - h (n/b sum clip(g)) + N(0, 2 A h).

    The same as `dp_sgmcmc_noise_multiplier` with eta = n h^2 and friction A h. The thermostat xi reads only v.
    """
    _check_positive(step_size=step_size, diffusion=diffusion, records=records, batch=batch, clip=clip)
    return batch * math.sqrt(2 * diffusion / step_size) / (records * clip)


def _unit_noise(records: int, batch: float, clip: float, method: SamplerName, friction: float) -> float:
    """The noise multiplier at step size one."""
    _check_positive(records=records, batch=batch, clip=clip)
    if method not in ("sgld", "sghmc", "sgnht"):
        raise Refusal(f"method={method!r}: must be one of sgld, sghmc, sgnht")
    plain = batch / (clip * math.sqrt(records))
    if method == "sgld":
        return plain
    _check_positive(friction=friction)
    return plain * math.sqrt(2 * friction)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise Refusal(f"{name}={value}: must be a finite number > 0")


def wang2015_step_size(epsilon: float, delta: float, records: int, steps: int, clip: float) -> float:
    """The step size of Wang, Fienberg and Smola (2015): eps^2 n / (128 C^2 T log(2.5 T / delta) log(2 / delta))."""
    logs = math.log(2.5 * steps / delta) * math.log(2 / delta)
    return epsilon**2 * records / (128 * clip**2 * steps * logs)


def large_batch_step_size(
    epsilon: float, delta: float, records: int, steps: int, clip: float, schedule: Schedule = "fixed"
) -> float:
    """The limit of large batches, mu^2 = eta_1 C^2 S / n with S = sum of eta_t / eta_1: NOT a bound.

    It allows too much where the noise multiplier comes near one or below.
    """
    total = float(steps) if schedule == "fixed" else sum(t ** (-1 / 3) for t in range(1, steps + 1))
    return gaussian_mu(epsilon, delta) ** 2 * records / (clip**2 * total)


def decreasing_blocks(steps: int, block_ratio: float = 1.03) -> tuple[tuple[int, int], ...]:
    """(first step, number of steps) of the blocks in which t^(-1/3) changes by less than the ratio."""
    if not block_ratio > 1:
        raise Refusal(f"block_ratio={block_ratio}: must be > 1")
    blocks, first = [], 1
    while first <= steps:
        after = min(max(first + 1, math.ceil(first * block_ratio**3)), steps + 1)
        blocks.append((first, after - first))
        first = after
    return tuple(blocks)


@dataclass(frozen=True)
class StepSize:
    """The largest step size for a promised epsilon, in the dp_sgmcmc convention.

    step_size          eta, or eta_1 of eta_t = eta_1 t^(-1/3)
    noise_multiplier   z of the first step
    blocks             (noise multiplier, steps) as accounted for: each block at its first, largest step
    epsilon            what the blocks cost; at most the target
    wang2015           what Wang, Fienberg and Smola (2015) allow, for comparison
    large_batch_limit  what the limit of large batches would allow; not a bound
    """

    step_size: float
    noise_multiplier: float
    schedule: Schedule
    blocks: Blocks
    epsilon: float
    wang2015: float
    large_batch_limit: float


def step_size_for(
    epsilon: float,
    delta: float,
    records: int,
    batch: int,
    steps: int,
    clip: float,
    schedule: Schedule = "fixed",
    method: SamplerName = "sgld",
    *,
    friction: float = 0.1,
    adjacency: Adjacency = "add-remove",
    block_ratio: float = 1.03,
    accountant: Accountant | None = None,
) -> StepSize:
    """The largest step size with which `steps` Poisson-sampled steps stay within epsilon at delta."""
    _check_positive(epsilon=epsilon, records=records, batch=batch, steps=steps, clip=clip)
    if not 0 < delta < 1:
        raise Refusal(f"delta={delta}: must be in (0, 1)")
    if batch > records:
        raise Refusal(f"batch={batch}: must be at most records={records}")
    unit = _unit_noise(records, batch, clip, method, friction)
    limit = large_batch_step_size(epsilon, delta, records, steps, clip, schedule)
    shape = _shape(schedule, steps, block_ratio)
    start = batch / (clip * math.sqrt(records * limit))
    cost = _cost(shape, batch / records, delta, adjacency, accountant or PLD())
    stride = 0.1
    if accountant is None and len(shape) > 1:
        # Many blocks are dear to compose: a coarse grid leads the way, a few fine evaluations settle it.
        coarse = _cost(shape, batch / records, delta, adjacency, PLD(discretisation=_coarse_step(epsilon)))
        start, stride = smallest_noise(coarse, epsilon, start), 0.003
    first = smallest_noise(cost, epsilon, start, stride)
    # One step of rounding down, so that the noise multiplier of this step size is not below the calibrated one.
    step_size = (unit / first) ** 2 * (1 - 1e-14)
    return StepSize(
        step_size=step_size,
        noise_multiplier=first,
        schedule=schedule,
        blocks=tuple((first * growth, count) for growth, count in shape),
        epsilon=cost(first),
        wang2015=wang2015_step_size(epsilon, delta, records, steps, clip),
        large_batch_limit=limit * (unit / (batch / (clip * math.sqrt(records)))) ** 2,
    )


def _coarse_step(epsilon: float) -> float:
    """A grid step some four times that of the final answer."""
    return 4e-4 if epsilon > 0.15 else 8e-5


def _shape(schedule: Schedule, steps: int, block_ratio: float) -> Blocks:
    """(noise multiplier relative to the first step, steps) for every block of the schedule."""
    if schedule == "fixed":
        return ((1.0, steps),)
    if schedule != "decreasing":
        raise Refusal(f"schedule={schedule!r}: must be one of fixed, decreasing")
    return tuple((first ** (1 / 6), count) for first, count in decreasing_blocks(steps, block_ratio))


def _cost(
    shape: Blocks, rate: float, delta: float, adjacency: Adjacency, accountant: Accountant
) -> Callable[[float], float]:
    def cost(first: float) -> float:
        events = [GaussianEvent(first * growth, "poisson", rate, count) for growth, count in shape]
        bound = accountant.epsilon(events, delta, adjacency)
        if bound.epsilon is None:
            raise Refusal(f"accountant={accountant.name!r}: {bound.kind}")
        return bound.epsilon

    return cost
