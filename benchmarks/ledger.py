"""What a ledger costs as it grows: opening it, charging it under a ceiling, asking for epsilon.

    python -m benchmarks.ledger [--quick] [--sampled]

Processor time in milliseconds at 10, 1 000 and 100 000 entries, equal ones and distinct ones, and the ratio to 10.
Distinct entries are un-sampled Gaussian releases of different noise, whose composition has a closed form, so that what
is measured is the ledger; with --sampled they are Poisson-sampled, and the composition is measured too (1 000 at most).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from confide.privacy.events import Event, GaussianEvent
from confide.privacy.ledger import Ledger

SIZES = (10, 1_000, 100_000)
CEILING, DELTA = 50.0, 1e-6


def events(kind: str, number: int, sampled: bool) -> list[Event]:
    """`number` events that together stay far below the ceiling."""
    noise = 50.0 * number**0.5
    if kind == "equal":
        return [GaussianEvent(noise)] * number
    if sampled:
        return [GaussianEvent(1.0 + i / number, "poisson", 0.001) for i in range(number)]
    return [GaussianEvent(noise * (1 + i / number)) for i in range(number)]


def processor_time(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one call: the best of a few, since others share the machine."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return 1000 * best


def measure(place: str, kind: str, number: int, sampled: bool) -> dict[str, float]:
    with Ledger(place) as ledger:
        listed = events(kind, number, sampled)
        for start in range(0, number, 10_000):
            ledger.charge_all(listed[start : start + 10_000], dataset="d")
        ledger.limit(CEILING, DELTA)
    unit, fresh = listed[0], GaussianEvent(777.0 * number)
    opening = processor_time(lambda: Ledger(place).close(), 3)
    with Ledger(place) as ledger:
        ledger.charge(unit, dataset="d")
        ledger.charge(fresh, dataset="d")
        again = processor_time(lambda: ledger.charge(unit, dataset="d"), 5)
        other = processor_time(lambda: ledger.charge(GaussianEvent(1e6 + ledger.head.count), dataset="d"), 3)
        asking = processor_time(lambda: ledger.spent(dataset="d"), 1)
        asking_again = processor_time(lambda: ledger.spent(dataset="d"), 3)
    return {"open": opening, "charge": again, "charge another": other, "epsilon": asking, "epsilon again": asking_again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 and 1 000 entries only")
    parser.add_argument("--sampled", action="store_true", help="distinct entries are Poisson-sampled; at most 1 000")
    options = parser.parse_args()
    sizes = SIZES[:2] if options.quick or options.sampled else SIZES
    for kind in ("equal", "distinct"):
        least: dict[str, float] = {}
        for number in sizes:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(str(Path(folder) / "budget.db"), kind, number, options.sampled)
            least = least or found
            words = "  ".join(f"{name} {value:8.2f} ({value / least[name]:6.1f})" for name, value in found.items())
            print(f"{kind:8} {number:7}  {words}", flush=True)


if __name__ == "__main__":
    main()
