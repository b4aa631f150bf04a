"""What a ledger costs as it grows: opening it, charging it under a ceiling, asking for epsilon.

    python -m benchmarks.ledger [--quick] [--sampled] [--server postgresql://...]

Processor time in milliseconds at 10, 1 000 and 100 000 entries, equal ones and distinct ones, and the ratio to 10. Each
entry is a plan of its own, as if it had been chosen after looking at the others, so the filters have to take them all.
Distinct entries are un-sampled Gaussian releases of different noise; with --sampled they are Poisson-sampled, which are
dear to work out, and 1 000 at most.

    open     by a new process: every entry is read and its hash checked, so this grows with their number
    first    the first charge of a new process, which has to learn what was charged before
    charge   one more of a kind that was charged before
    another  one more of a new kind
    epsilon  of everything, asked for the first time; again
    rate     charges a second of one writer, wall clock, commits on the disk
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from confide.privacy.events import Event, GaussianEvent, event_to_dict
from confide.privacy.ledger import Entry, Head, Ledger

SIZES = (10, 1_000, 100_000)
CEILING, DELTA = 50.0, 1e-6
# Entries that are written in one transaction while the ledger is filled.
PIECE = 10_000
RATED = 40


def events(kind: str, number: int, sampled: bool) -> list[Event]:
    """`number` events that together stay far below the ceiling."""
    noise = 50.0 * number**0.5
    if sampled:
        return [GaussianEvent(1.0 + (i / number if kind == "distinct" else 0), "poisson", 1e-3) for i in range(number)]
    return [GaussianEvent(noise * (1 + (i / number if kind == "distinct" else 0))) for i in range(number)]


def fill(ledger: Ledger, listed: Sequence[Event]) -> None:
    """Every event as a plan of its own; many in one transaction, since each transaction waits for the disk."""
    names = {"purpose": "", "dataset": "d", "partition": None}
    for start in range(0, len(listed), PIECE):

        def append(head: Head, piece: Sequence[Event] = listed[start : start + PIECE]) -> tuple[Entry, ...]:
            written = []
            for event in piece:
                written.append(ledger._book.append("charge", {**names, "event": event_to_dict(event)}, head))
                head = written[-1].head
            return tuple(written)

        ledger._book.write(append)


def processor_time(work: Callable[[], object], repeats: int = 1) -> float:
    """Milliseconds of one call: the best of a few, since others share the machine."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return 1000 * best


def measure(place: str, kind: str, number: int, sampled: bool) -> dict[str, float]:
    listed = events(kind, number, sampled)
    unit = listed[0]
    with Ledger(place) as ledger:
        ledger.limit(CEILING, DELTA)
        fill(ledger, listed)
        ledger.charge(unit, dataset="d")  # whoever comes first writes down what was dear to add up
    found = {"open": processor_time(lambda: Ledger(place).close(), 3)}
    with Ledger(place) as ledger:
        found["first"] = processor_time(lambda: ledger.charge(unit, dataset="d"))
        found["charge"] = processor_time(lambda: ledger.charge(unit, dataset="d"), 5)
        found["another"] = processor_time(lambda: ledger.charge(GaussianEvent(1e6 + ledger.head.count), dataset="d"), 3)
        found["epsilon"] = processor_time(lambda: ledger.spent(dataset="d"))
        found["again"] = processor_time(lambda: ledger.spent(dataset="d"), 3)
        start = time.perf_counter()
        for _ in range(RATED):
            ledger.charge(unit, dataset="d")
        found["rate"] = RATED / (time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 and 1 000 entries only")
    parser.add_argument("--sampled", action="store_true", help="entries are Poisson-sampled; at most 1 000")
    parser.add_argument("--server", metavar="ADDRESS", help="an empty database; its ledger is taken away")
    options = parser.parse_args()
    for kind in ("equal", "distinct"):
        least: dict[str, float] = {}
        for number in SIZES[:2] if options.quick or options.sampled else SIZES:
            with tempfile.TemporaryDirectory() as folder:
                place = options.server or str(Path(folder) / "budget.db")
                if options.server:
                    _take_away(options.server)
                found = measure(place, kind, number, options.sampled)
            least = least or found
            words = "  ".join(f"{name} {value:8.2f} ({value / least[name]:6.1f})" for name, value in found.items())
            print(f"{kind:8} {number:7}  {words}", flush=True)


def _take_away(address: str) -> None:
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS confide_ledger CASCADE")


if __name__ == "__main__":
    main()
