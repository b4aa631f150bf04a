"""Memory over a long run: `python -m benchmarks.memory [--steps 10000] [--method sgld] [--json] [--quick]`.

Fits a 20-64-2 network and prints what the process held of its own (anonymous memory) after the first tenth of the
steps, at the end, and at most in between; once without and once with checkpoints, which keep the draws on the disk.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import confide
from benchmarks import _harness
from benchmarks._harness import Report
from confide.running.journal import Checkpoints

RECORDS, FEATURES = 2000, 20


def held() -> int:
    """Bytes of the process's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def growth(
    steps: int, method: Any, checkpoint: Checkpoints | None = None, fault: Callable[[], object] | None = None
) -> Report:
    """How much more is held after the run than after its first tenth. `fault` is called after every step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    data = confide.PrivateData(x, (x[:, 0] > 0).long(), schema=confide.Schema(classes=2, records=RECORDS), seed=1)
    plan = confide.plan(noise_multiplier=2.0, delta=1e-5, records=RECORDS, batch=64, steps=steps)
    module = confide.networks.mlp(FEATURES, 2, hidden=(64,), generator=generator)
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        if fault is not None:
            fault()
        if done % max(1, steps // 10) == 0:
            gc.collect()
            seen.append(held())

    confide.fit(method, module, data, plan, seed=0, progress=progress, checkpoint=checkpoint)
    return {
        "steps": steps,
        "first_tenth_mb": seen[0] / 1e6,
        "end_mb": seen[-1] / 1e6,
        "most_mb": max(seen) / 1e6,
        "grown_mb": (max(seen) - seen[0]) / 1e6,
    }


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--method", default="sgld", choices=confide.methods.names())
    options = arguments.parse_args()
    steps = min(options.steps, 1000) if options.quick else options.steps
    method = confide.methods.get(options.method)
    result: Report = {"plain": growth(steps, method())}
    with tempfile.TemporaryDirectory() as directory:
        kept = Checkpoints(Path(directory) / "run", every=max(1, steps // 50))
        result["checkpoints"] = growth(steps, method(), kept)
    if options.json:
        _harness.print_json(result)
        return
    for name, row in result.items():
        print(name, "  ".join(f"{key} {value:,.1f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
