"""Private steps on networks of others: `python -m benchmarks.architectures [--json] [--quick] [--only NAME ...]`.

Every contender does a whole step (clipping, noise, update) on the same weights and records. Printed are ratios to the
plain step in the same round, peak memory above the imports in processes of their own, and, as `best_peer`, the best of
Opacus' hooks, Opacus' ghost clipping and torch.func's vmap. --quick takes small networks and measures no memory.
On a busy machine --one-thread measures processor time instead of wall-clock time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks import _harness
from benchmarks._architectures import ARCHITECTURES
from benchmarks._contenders import CONTENDERS
from benchmarks._harness import Clock, Maker, Report, Step
from benchmarks._models import Case

PEERS = ("opacus_ghost", "opacus_hooks", "vmap")
RACING = ("plain", "confide", *PEERS)
TARGETS = {"gpt2": 1.3, "bert": 1.25, "vit": 1.25, "resnet18_gn": 1.15, "lstm": 1.5, "mamba": 3.0, "mixtral": 3.0}
"""Ratios to plain that are aimed at, on two threads."""
MEMORY_TARGET = 1.5  # of what a plain step needs
QUICK_SECONDS, FULL_SECONDS = 4.0, 30.0  # for one network, shared by its contenders
PRELOAD = ["torch", "torch.func", "opacus", "transformers", "confide", "confide.mechanism.clipping"]


def build(name: str, tiny: bool) -> Case:
    """The same weights and records for every contender."""
    torch.manual_seed(0)
    return ARCHITECTURES[name](tiny)


def contenders_of(name: str, tiny: bool = False) -> Mapping[str, Maker]:
    return {who: partial(_make, CONTENDERS[who], name, tiny) for who in RACING}


def _make(make: Callable[[Case], Step], name: str, tiny: bool) -> Step:
    return make(build(name, tiny))


def compare(name: str, quick: bool, clock: Clock) -> Report:
    results = _harness.race(contenders_of(name, quick), QUICK_SECONDS if quick else FULL_SECONDS, "plain", clock)
    if not quick:
        tiny = partial(contenders_of, name, tiny=True)
        _harness.add_peak_memory(results, partial(contenders_of, name), PRELOAD, tiny)
    peers = {who: results[who]["ratio"] for who in PEERS if "ratio" in results[who]}
    if peers and "ratio" in results["confide"]:
        best = min(peers, key=lambda who: peers[who])
        results["confide"]["of_best_peer"] = results["confide"]["ratio"] / peers[best]
        results["confide"]["best_peer"] = best
    return results


def show(name: str, rows: Report) -> None:
    _harness.print_table(f"{name} (ratio to plain SGD, aimed at {TARGETS[name]})", rows)
    mine, plain = rows["confide"], rows["plain"]
    if "best_peer" in mine:
        print(f"  confide takes {mine['of_best_peer']:.2f} of the best peer's time ({mine['best_peer']})")
    if "peak_mb" in mine and "peak_mb" in plain:
        print(f"  memory: {mine['peak_mb'] / plain['peak_mb']:.2f} of plain, aimed at {MEMORY_TARGET}")


def main() -> None:
    arguments = _harness.parser(__doc__)
    names = list(ARCHITECTURES)
    arguments.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    _harness.add_clock(arguments)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")  # of the peers, about their own future
    clock = _harness.use_one_thread() if options.one_thread else time.perf_counter
    result: Report = {"machine": _harness.machine(), "models": {}}
    _harness.warn_if_busy(result["machine"])
    for name in options.only:
        _harness.say(f"{name} ...")
        result["models"][name] = compare(name, options.quick, clock)
        if not options.json:
            show(name, result["models"][name])
    if options.json:
        _harness.print_json(result)


if __name__ == "__main__":
    main()
