"""Waiting times of the command line: `python -m benchmarks.imports [--json] [--quick]`.

    import       seconds of `import confide` beyond `import torch`             (target: below 0.5)
    account      processor seconds of `confide account` beyond the import      (target: below 3)
    plan         processor seconds of `confide plan` beyond the import         (target: below 10)

Each is the median over processes of their own. Processor time, not wall-clock time: a busy machine matters less.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from benchmarks import _harness
from benchmarks._harness import Report

ACCOUNT = "account --rate 0.0042666667 --noise-multiplier 1.3 --steps 3516 --delta 1e-5 --json"
PLAN = "plan --epsilon 1 --delta 1e-5 --records 60000 --batch 256 --epochs 15 --json"
TARGETS = {"import": 0.5, "account": 3.0, "plan": 10.0}


def processor_seconds(*arguments: str) -> float:
    """User and system time of one Python process; a failing one raises with its last line of complaint."""
    before = os.times()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(complaint[-1])
    return after.children_user + after.children_system - before.children_user - before.children_system


def beyond(work: tuple[str, ...], base: tuple[str, ...], rounds: int) -> Report:
    """Median of `work` minus `base`, taken in turn."""
    try:
        processor_seconds(*work)  # the first run compiles byte code
        pairs = [(processor_seconds(*work), processor_seconds(*base)) for _ in range(rounds)]
    except RuntimeError as failure:
        return {"error": _harness.reason(failure)}
    low, middle, high = _harness.quartiles([whole - part for whole, part in pairs])
    return {"seconds": middle, "low": low, "high": high, "whole": statistics.median(whole for whole, _ in pairs)}


def run(rounds: int) -> Report:
    result: Report = {"machine": _harness.machine()}
    _harness.warn_if_busy(result["machine"])
    imported = ("-c", "import confide.cli.app")
    result["import"] = beyond(("-c", "import torch, confide"), ("-c", "import torch"), rounds)
    for name, command in (("account", ACCOUNT), ("plan", PLAN)):
        result[name] = beyond(("-m", "confide.cli.app", *command.split()), imported, rounds)
    for name, target in TARGETS.items():
        result[name]["target"] = target
    return result


def main() -> None:
    options = _harness.parser(__doc__).parse_args()
    result = run(2 if options.quick else 7)
    if options.json:
        _harness.print_json(result)
        return
    for name, target in TARGETS.items():
        row = result[name]
        text = row["error"] if "error" in row else f"{row['seconds']:6.2f} s ({row['low']:.2f} to {row['high']:.2f})"
        print(f"{name:10}{text}, target below {target} s")


if __name__ == "__main__":
    main()
