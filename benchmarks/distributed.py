"""Several ranks against one: `python -m benchmarks.distributed [--ranks 2] [--json] [--quick]`.

Prints the processor time of a step on the rank that needs most of it, and how many times less that is than one process
needs for the same step. On a shared machine the processor's time says more than the clock's; ranks that wait for each
other do not compute. What travels and what is waited for is in the rows "exchange" and "meeting".
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import _harness, _models
from benchmarks._harness import Report

CASES: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "mlp 1200-1200, batch 1024": (lambda: _models.mlp(784, 1200, 1200, 10), 1024),
    "mlp 1200-1200, batch 256": (lambda: _models.mlp(784, 1200, 1200, 10), 256),
    "logistic, batch 16384": (lambda: _models.mlp(784, 10), 16384),
    "logistic, batch 1024": (lambda: _models.mlp(784, 10), 1024),
}
STEPS = 12
REPEATS = 3  # of each measurement, one process and several in turn: what else a machine does comes and goes


def work(quick: bool) -> None:
    """One rank: milliseconds of its processor for a step of every case, written as JSON."""
    import confide
    from confide.mechanism.gaussian import SampledGaussian
    from confide.mechanism.noise import NoiseStream
    from confide.models.likelihoods import Categorical
    from confide.sources.queries import GradientQuery

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with confide.distributed.start() as ranks:
        for name, (make, batch) in CASES.items():
            records = 2 * batch
            generator = torch.Generator().manual_seed(ranks.rank)
            own = records // ranks.size
            x, y = torch.rand(own, 784, generator=generator), torch.randint(10, (own,), generator=generator)
            data = ranks.private(x, y, schema=confide.Schema(records=records, classes=10))
            query = GradientQuery(make(), Categorical(10).loss)  # as in a fit: a loss that is proven runs whole
            mechanism = SampledGaussian(1.0, 1.0, 0.5, records)
            steps = 3 if quick else STEPS
            data.charge([(mechanism, steps + 2)])
            found[name] = _milliseconds(partial(data.answer, query, mechanism), steps)
        vector, nothing, stream = torch.zeros(2_400_000), torch.zeros, NoiseStream()
        found["exchange of 9.6 MB"] = _milliseconds(lambda: ranks.add_up(vector, "benchmark", nothing), STEPS)
        found["meeting"] = _milliseconds(lambda: ranks.agree({}), 100) / 3  # it meets three times
        found["noise, 2.4 million"] = _milliseconds(lambda: stream.normal_(vector, 1.0), STEPS)
    sys.stdout.write(json.dumps(found))


def _milliseconds(step: Callable[[], Any], steps: int) -> float:
    """Of the processor, for the median step; two before it are not counted."""
    times = []
    for _ in range(steps + 2):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times[2:])


def measured(size: int, quick: bool) -> dict[str, float]:
    """The worst rank of so many."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.distributed", "--worker", *(["--quick"] if quick else [])]
    meet = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **meet, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=110)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {name: max(each[name] for each in found) for name in found[0]}


def measure(ranks: int, quick: bool) -> Report:
    pairs = [(measured(1, quick), measured(ranks, quick)) for _ in range(1 if quick else REPEATS)]
    one, several = (
        {name: statistics.median(pair[side][name] for pair in pairs) for name in pairs[0][0]} for side in (0, 1)
    )
    return {
        name: {"one_ms": round(one[name], 2), "worst_rank_ms": round(several[name], 2)}
        | ({"ratio": round(one[name] / several[name], 2)} if name in CASES else {})
        for name in one
    }


def main() -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help="one rank of a measurement")
    options = parser.parse_args()
    if options.worker:
        work(options.quick)
        return
    report = measure(options.ranks, options.quick)
    if options.json:
        print(json.dumps(report, indent=1))
        return
    for name, row in report.items():
        print(f"{name:28}", "  ".join(f"{key} {value:g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
