"""Does more budget buy more? `python -m benchmarks.monotone [--quick] [--records N] [--json]`: defaults on tables.

A table's line says log loss, or RMSE over the target's deviation, for epsilon 0.1 to 8. A budget is at fault where its
mean is above that of a smaller one by more than two standard errors of the seeds and one per cent. --quick: two tables,
two budgets, one repeat. --records N: no more than so many of every table, which takes minutes instead of an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import _harness, made_up, tables
from benchmarks._harness import Report, say
from benchmarks._tabular import Race, confide_by, quietly
from confide.data.table import Table

EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
ADDED = ("waves", "alike", "three", "curve", "crossed", "sparse")
"""Of benchmarks.made_up, beside those of benchmarks.tables."""
QUICK = ("curve", "xor")
FIRST_SEED = 8000
"""Seeds that nothing was settled on start here."""
ROOM = 0.01
"""Part of a score that two budgets may differ by for no reason."""


def cut(race: Race, records: int | None) -> Race:
    """The first so many records of the private part, if there are more."""
    if records is None or records >= race.train.rows:
        return race
    return Race(replace(race.schema, records=records), race.train.take(np.arange(records)), race.test)


def race_of(name: str, seed: int) -> Race:
    random = np.random.default_rng(FIRST_SEED + seed)
    if name in tables.MADE_UP:
        return tables.MADE_UP[name](random)
    found = made_up.TABLES[name](random)
    names = [column.name for column in found.schema.columns]

    def table(x: Any, y: Any) -> Table:
        return Table({name: x[:, place] for place, name in enumerate(names)}, target="y", labels=y)

    return Race(replace(found.schema, target="y"), table(found.x, found.y), table(found.x_test, found.y_test))


def score(race: Race, epsilon: float, seed: int) -> float:
    found = tables.scores(race, quietly(confide_by("auto"), race, epsilon, seed))
    return float(found["log_loss"] if "log_loss" in found else found["rmse"])


def faults(scores: Sequence[Sequence[float]]) -> list[int]:
    """Places of budgets, in growing order with their repeats, that are worse than a smaller one beyond chance."""
    means = [float(np.mean(one)) for one in scores]
    errors = [float(np.std(one, ddof=1) / np.sqrt(len(one))) if len(one) > 1 else 0.0 for one in scores]
    found = []
    for place in range(1, len(scores)):
        best = min(range(place), key=lambda before: means[before])
        if means[place] > means[best] * (1 + ROOM) + 2 * float(np.hypot(errors[place], errors[best])):
            found.append(place)
    return found


def line(name: str, epsilons: Sequence[float], repeats: int, records: int | None = None) -> Report:
    races = [cut(race_of(name, seed), records) for seed in range(repeats)]
    scores = [[score(race, epsilon, seed) for seed, race in enumerate(races)] for epsilon in epsilons]
    at_fault = [epsilons[place] for place in faults(scores)]
    return {"set": name, "scores": [float(np.mean(one)) for one in scores], "faults": at_fault}


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--sets", nargs="+", help="of " + ", ".join((*tables.MADE_UP, *ADDED)))
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--records", type=int, help="of every table, at most")
    options = arguments.parse_args()
    epsilons, repeats = ((1.0, 8.0), 1) if options.quick else (EPSILONS, options.repeats)
    rows = []
    for name in options.sets or (QUICK if options.quick else (*tables.MADE_UP, *ADDED)):
        rows.append(line(name, epsilons, repeats, options.records))
        if not options.json:
            cells = "".join(f"{value:9.3f}" for value in rows[-1]["scores"])
            say(f"{name:12s}{cells}  {rows[-1]['faults'] or ''}")
    if options.json:
        _harness.print_json({"epsilons": list(epsilons), "rows": rows})


if __name__ == "__main__":
    main()
