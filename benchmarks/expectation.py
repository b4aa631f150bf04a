"""Speed of private expectation propagation: records per second, and how time per pass grows.

    python -m benchmarks.expectation [--quick] [--json] [--one-thread]

One pass in ten Poisson batches, against the number of records and against the number of weights; the slope of a line
through the logarithms is 1 where time is linear. Networks are wider than those for which the public metric is
computed, as its cost depends on no record.
"""

from __future__ import annotations

from functools import partial

import torch

import confide
from benchmarks import _harness
from benchmarks._harness import Clock, Report, Step
from benchmarks._scaling import fit_line
from confide.data.schema import Schema
from confide.methods.sep import SEP
from confide.sources.private_data import PrivateData

FEATURES, STEPS = 8, 10
RECORDS, WIDTHS = (2500, 5000, 10_000, 20_000), (250, 500, 1000, 2000)


def make(records: int, hidden: int) -> Step:
    """A pass over made-up records, from the module's start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, FEATURES, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, 0])
    module = confide.networks.mlp(FEATURES, 1, hidden=(hidden,))
    plan = confide.plan(delta=1e-5, records=records, batch=records // 10, steps=STEPS, noise_multiplier=1.0)

    def step() -> None:
        data = PrivateData(x, y, schema=Schema(records=records), seed=1)
        confide.fit(SEP(inputs="raw"), module, data, plan, seed=1)

    return step


def weights_of(hidden: int) -> int:
    return hidden * (FEATURES + 1) + hidden + 1


def run(seconds: float, clock: Clock) -> Report:
    shapes = {f"{n} records": (n, WIDTHS[0]) for n in RECORDS}
    shapes |= {f"{weights_of(h)} weights": (RECORDS[0], h) for h in WIDTHS[1:]}
    rows = _harness.race({name: partial(make, *shape) for name, shape in shapes.items()}, seconds, None, clock)
    for name, shape in shapes.items():
        if "ms" in rows[name]:
            rows[name] |= {"records per second": 1000 * shape[0] / rows[name]["ms"]}
    first, *others = rows.values()
    by_records, by_weights = others[: len(RECORDS) - 1], others[len(RECORDS) - 1 :]
    return {
        "passes": rows,
        "records": fit_line(list(RECORDS), [first, *by_records]),
        "weights": fit_line([weights_of(hidden) for hidden in WIDTHS], [first, *by_weights]),
    }


def show(result: Report) -> None:
    print(f"{weights_of(WIDTHS[0])} weights, or {RECORDS[0]} records")
    print(f"{'one pass over':>16} {'seconds':>9} {'records/s':>10}")
    for name, row in result["passes"].items():
        print(f"{name:>16} {row['ms'] / 1000:>9.3f} {row['records per second']:>10.0f}")
    print(f"slope in records {result['records']['slope']:.2f}, in weights {result['weights']['slope']:.2f}")


if __name__ == "__main__":
    _harness.main(__doc__, run, (20.0, 60.0), show)
