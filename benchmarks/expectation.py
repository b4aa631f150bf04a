"""Speed of private expectation propagation: records per second, against the number of records and of weights.

    python -m benchmarks.expectation

Time per pass should grow linearly in both: the last column is the time against that of the row above, over the growth
of the work. It stays near 1; the metric, whose cost does not depend on the records, is left out by a width beyond it.
"""

from __future__ import annotations

import time

import torch

import confide
from confide.boundary import PrivateData
from confide.data.schema import Schema
from confide.methods.sep import SEP

FEATURES, STEPS = 8, 10


def seconds_per_pass(records: int, hidden: int) -> tuple[float, int]:
    """One pass in ten Poisson batches, and the number of weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, FEATURES, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, 0])
    module = confide.networks.mlp(FEATURES, 1, hidden=(hidden,))
    plan = confide.plan(delta=1e-5, records=records, batch=records // 10, steps=STEPS, noise_multiplier=1.0)
    data = PrivateData(x, y, schema=Schema(records=records), seed=1)
    started = time.perf_counter()
    confide.fit(SEP(inputs="raw"), module, data, plan, seed=1)
    return time.perf_counter() - started, sum(p.numel() for p in module.parameters())


def main() -> None:
    seconds_per_pass(1000, 250)
    print(f"{'records':>8} {'weights':>8} {'s per pass':>11} {'records/s':>10} {'growth':>7}")
    for cases in (((5000, 250), (10_000, 250), (20_000, 250)), ((5000, 250), (5000, 500), (5000, 1000))):
        before: tuple[float, int] | None = None
        for records, hidden in cases:
            seconds, weights = min(seconds_per_pass(records, hidden) for _ in range(2))
            work = records * weights
            growth = "" if before is None else f"{seconds / before[0] / (work / before[1]):.2f}"
            print(f"{records:>8} {weights:>8} {seconds:>11.3f} {records / seconds:>10.0f} {growth:>7}")
            before = (seconds, work)


if __name__ == "__main__":
    main()
