"""What a step costs on several ranks: a small model, by which `confide plan --ranks R` says when parallel is slower.

A step of one rank on a dense network of d weights with an expected batch B over R ranks:

    compute    B / R records x d weights x COMPUTE          forward, backward and clipping
    noise      d / R numbers x NOISE                        every rank fills its own part
    exchange   2 (R - 1) / R x 4 d bytes / BANDWIDTH        a ring all-reduce in single precision; none for R = 1
    fixed      FIXED, and MEETING for R > 1                 calls, sampling; hashes before and after a sum

The constants were measured by `python -m benchmarks.distributed` with two ranks on one server, which have memory in
common (docs/scaling.md has the figures); over its loopback device the bandwidth was a third of that. Convolutions use a
weight many times a record, so they compute more for the same exchange: what the model says of them is on the side of
one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from confide.errors import Refusal

COMPUTE = 5e-11  # seconds of a core per record and weight
NOISE = 2e-9  # seconds per number
BANDWIDTH = 1.4e9  # bytes a second between two ranks on one machine, adding up included
FIXED = 5e-4  # seconds a step
MEETING = 5e-4  # seconds for the two meetings of a sum


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step on one rank, and bytes that it sends."""

    compute: float
    noise: float
    exchange: float
    fixed: float
    sent: float

    @property
    def seconds(self) -> float:
        return self.compute + self.noise + self.exchange + self.fixed


def step_cost(weights: int, batch: float, ranks: int = 1, bandwidth: float = BANDWIDTH) -> StepCost:
    """The model's answer for a dense network."""
    if weights < 1 or not batch > 0:
        raise Refusal(f"weights={weights}, batch={batch}: must be greater than 0")
    if ranks < 1:
        raise Refusal(f"ranks={ranks}: must be at least 1")
    sent = 2 * (ranks - 1) / ranks * 4 * weights
    return StepCost(
        compute=batch / ranks * weights * COMPUTE,
        noise=weights / ranks * NOISE,
        exchange=sent / bandwidth,
        fixed=FIXED + (MEETING if ranks > 1 else 0.0),
        sent=sent,
    )


def advice(weights: int, batch: float, ranks: int) -> str:
    """One sentence: how many times as fast so many ranks are, or that they are slower."""
    ratio = step_cost(weights, batch).seconds / step_cost(weights, batch, ranks).seconds
    what = f"{ranks} ranks on {weights:,} weights with batches of {batch:g}"
    if ratio < 1.1:
        return f"{what}: no faster than one process ({ratio:.2f} times, as estimated); use one, or larger batches."
    return f"{what}: about {ratio:.1f} times as fast as one process, as estimated for dense layers on one core a rank."
