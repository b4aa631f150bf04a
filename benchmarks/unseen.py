"""Tables of other shapes: `python -m benchmarks.unseen [--quick] [--sets NAME ...] [--epsilons E ...] [--json]`.

confide's defaults on thirty made-up tables whose shapes no default was settled on: many levels, many classes, rare
ones, heavy tails, constant columns, duplicates, far too wide bounds, counts, noise that differs from record to
record. A line says the score over that of no learning (log loss of the classes' shares, deviation of the target),
calibration error, coverage and width of 90 % intervals over the declared range, the worst ratio of a predicted to a
true rate, and seconds of processor time; a star marks what docs/protocols.md calls a fault.
--quick: two tables at epsilon 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import _harness
from benchmarks._harness import Report, say
from benchmarks._tabular import LEVEL_90, Outcome, Race, confide_by, quietly
from confide.data.schema import Column, Schema
from confide.data.table import Table

Array = Any
TEST = 20_000
"""Of the public part: the calibration error of a perfect predictor is .010 on 3000 records and .004 on these."""
EPSILONS = (0.1, 1.0, 8.0)
QUICK = ("ground", "small")


def _race(columns: list[tuple[Column, Array]], y: Array, **target: Any) -> Race:
    """The last TEST records are the public part."""
    named = {column.name: values for column, values in columns}
    table = Table(named, target="y", labels=y)
    records = len(y) - TEST
    schema = Schema(records=records, columns=tuple(column for column, _ in columns), target="y", **target)
    return Race(schema, table.take(np.arange(records)), table.take(np.arange(records, len(y))))


def _numbers(x: Array, low: float, high: float, name: str = "x") -> list[tuple[Column, Array]]:
    return [(Column(f"{name}{place}", bounds=(low, high)), x[:, place]) for place in range(x.shape[1])]


def _chosen(scores: Array, random: np.random.Generator) -> Array:
    return (scores + random.gumbel(size=scores.shape)).argmax(1)


def _drawn(logits: Array, random: np.random.Generator) -> Array:
    return (random.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(int)


def levels(random: np.random.Generator) -> Race:
    """Columns of 40, 80 and 150 levels, most of them rare, and four numbers."""
    total = 12_000 + TEST
    x = random.normal(size=(total, 4))
    logits, columns = 0.8 * x[:, 0] - 0.5 * x[:, 1] ** 2, _numbers(x, -6, 6)
    for place, width in enumerate((40, 80, 150)):
        shares = 1 / np.arange(1, width + 1) ** 1.1
        chosen = random.choice(width, total, p=shares / shares.sum())
        logits = logits + random.normal(0, 0.8, width)[chosen]
        columns.append((Column(f"c{place}", categories=tuple(range(width))), chosen))
    return _race(columns, _drawn(logits, random), classes=2)


def twenty(random: np.random.Generator) -> Race:
    """Twenty classes in ten numbers, as clouds of different sizes."""
    y = random.choice(20, 15_000 + TEST, p=random.dirichlet(np.full(20, 3.0)))
    middles, widths = random.normal(0, 1.5, (20, 10)), random.uniform(0.5, 1.2, 20)
    return _race(_numbers(middles[y] + widths[y][:, None] * random.normal(size=(len(y), 10)), -8, 8), y, classes=20)


def seven(random: np.random.Generator) -> Race:
    """Seven classes, from one in a hundred to nearly a half, in thirty numbers that move together."""
    x = random.normal(size=(6000 + TEST, 6)) @ random.normal(size=(6, 30)) / 2 + random.normal(size=(6000 + TEST, 30))
    weights = random.normal(0, 0.25, (30, 7))
    shares = np.log([0.45, 0.2, 0.15, 0.1, 0.06, 0.03, 0.01])
    return _race(_numbers(x, -10, 10), _chosen(x @ weights + shares, random), classes=7)


def small(random: np.random.Generator) -> Race:
    """Five hundred records, three numbers."""
    x = random.uniform(0, 1, (500 + TEST, 3))
    return _race(_numbers(x, 0, 1), _drawn(4 * x[:, 0] - 3 * x[:, 1], random), classes=2)


def broad(random: np.random.Generator) -> Race:
    """Three hundred numbers in twenty groups that move together."""
    common = random.normal(size=(4000 + TEST, 20))
    x = 0.8 * np.repeat(common, 15, 1) + 0.6 * random.normal(size=(4000 + TEST, 300))
    return _race(_numbers(x, -5, 5), _drawn(1.2 * common[:, 0] - common[:, 1] + common[:, 2], random), classes=2)


def ground(random: np.random.Generator) -> Race:
    """A number far from the middle of its range, with noise that grows with it."""
    x = random.uniform(0, 10, (20_000 + TEST, 12))
    mean = 40 + 6 * x[:, 0] + 20 * np.log1p(x[:, 1]) - 0.6 * (x[:, 2] - 5) ** 2
    y = mean + (1 + 0.15 * mean) * random.normal(size=len(mean))
    return _race(_numbers(x, 0, 10), y, target_bounds=(0, 1000))


def prices(random: np.random.Generator) -> Race:
    """A lognormal number in wide bounds, from heavy-tailed numbers and a category."""
    z = random.normal(size=(8000 + TEST, 6))
    place = random.integers(0, 12, len(z))
    y = np.exp(4 + 0.5 * z[:, 0] - 0.3 * z[:, 1] + 0.2 * np.abs(z[:, 2]) + np.linspace(-0.4, 0.4, 12)[place])
    columns = [*_numbers(np.exp(1.5 * z), 0, 10_000), (Column("place", categories=tuple(range(12))), place)]
    return _race(columns, y * np.exp(random.normal(0, 0.3, len(y))), target_bounds=(0, 2000))


def copies(random: np.random.Generator) -> Race:
    """Every record four times, three constant columns, one column twice, bounds a thousand times too wide."""
    x = np.repeat(random.normal(3, 1, (2000, 7)), 4, 0)[random.permutation(8000)]
    x[:, 4:6] = (1.0, -7.0)
    x[:, 6] = x[:, 0]
    x = np.column_stack([x, np.zeros(len(x))])
    y = _drawn(2 * (x[:, 0] - 3) - 1.5 * (x[:, 1] - 3) ** 2 + 1, random)
    return _race(_numbers(x, -5000, 5000), y, classes=2)


def fraud(random: np.random.Generator) -> Race:
    """One record in two hundred, fifty thousand in all."""
    x = random.normal(size=(50_000 + TEST, 20))
    logits = -7.5 + 1.2 * x[:, 0] + x[:, 1] + 0.8 * np.abs(x[:, 2]) + 1.2 * (x[:, 3] > 1)
    return _race(_numbers(x, -8, 8), _drawn(logits, random), classes=2)


def steps(random: np.random.Generator) -> Race:
    """What a tree would find: steps and what they say together, with two categories."""
    x, total = random.uniform(0, 1, (30_000 + TEST, 10)), 30_000 + TEST
    kind, colour = random.integers(0, 6, total), random.integers(0, 4, total)
    inner = np.where(x[:, 0] > 0.4, np.where(x[:, 1] > 0.7, 2.5, -1.0), np.where(kind < 2, 1.5, -2.0))
    logits = inner + np.where(x[:, 2] < 0.25, 1.5, 0) + np.array([0.5, -0.5, 0, 0])[colour] * (x[:, 3] > 0.5)
    columns = [
        *_numbers(x, 0, 1),
        (Column("kind", categories=tuple(range(6))), kind),
        (Column("colour", categories=tuple(range(4))), colour),
    ]
    return _race(columns, _drawn(logits, random), classes=2)


def line(random: np.random.Generator) -> Race:
    """Fifteen hundred records and five numbers with little noise: what a line says nearly whole."""
    x = random.normal(size=(1500 + TEST, 5))
    y = x @ np.array([1.0, -2.0, 0.5, 0.0, 1.5]) + 0.3 * random.normal(size=len(x))
    return _race(_numbers(x, -5, 5), y, target_bounds=(-15, 15))


def rings(random: np.random.Generator) -> Race:
    """Three shells around the middle, of which the one in between is a class."""
    x = random.normal(size=(10_000 + TEST, 3))
    distance = np.sqrt((x**2).sum(1))
    return _race(_numbers(x, -5, 5), _drawn(3 - 8 * np.abs(distance - 1.6), random), classes=2)


def rides(random: np.random.Generator) -> Race:
    """A skewed count by hour, day, weather and four numbers, which multiply each other."""
    total = 25_000 + TEST
    hour, day, weather = random.integers(0, 24, total), random.integers(0, 7, total), random.choice(4, total)
    warm = random.normal(15, 8, total)
    rush = np.exp(-(((hour - 8) / 2.0) ** 2)) + 1.2 * np.exp(-(((hour - 17.5) / 2.5) ** 2)) * (day < 5)
    rate = np.exp(3 + 2 * rush + 0.04 * warm - 0.5 * weather)
    y = random.negative_binomial(4, 4 / (4 + rate))
    idle = random.exponential(2, (total, 3)) * (random.random((total, 3)) < 0.4)
    columns = [
        (Column("hour", bounds=(0, 23)), hour.astype(float)),
        (Column("day", categories=tuple(range(7))), day),
        (Column("weather", categories=tuple(range(4))), weather),
        (Column("warm", bounds=(-40, 60)), warm),
        *_numbers(idle, 0, 100, "idle"),
    ]
    return _race(columns, y.astype(float), target_bounds=(0, 3000))


def five(random: np.random.Generator) -> Race:
    """Two thousand records, sixty numbers, five classes."""
    x = random.uniform(-1, 1, (2000 + TEST, 60))
    weights = np.zeros((60, 5))
    weights[:12] = random.normal(0, 1.5, (12, 5))
    return _race(_numbers(x, -1, 1), _chosen(x @ weights, random), classes=5)


def counts(random: np.random.Generator) -> Race:
    """Thirty counts that are mostly zero, in bounds a hundred times too wide."""
    x = random.poisson(0.3, (5000 + TEST, 30)).astype(float)
    return _race(_numbers(x, 0, 50), _drawn(x[:, :5].sum(1) - 1.5, random), classes=2)


def tails(random: np.random.Generator) -> Race:
    """Numbers and a target with tails without a variance, in bounds of thousands."""
    x = random.standard_t(2, (6000 + TEST, 6)).clip(-1e4, 1e4)
    y = 2 * np.tanh(x[:, 0]) - np.sign(x[:, 1]) * np.log1p(np.abs(x[:, 1])) + 0.5 * random.standard_t(3, len(x))
    return _race(_numbers(x, -1e4, 1e4), y.clip(-100, 100), target_bounds=(-100, 100))


def rare(random: np.random.Generator) -> Race:
    """One record in sixty, twelve thousand in all."""
    x = random.normal(size=(12_000 + TEST, 8))
    return _race(_numbers(x, -6, 6), _drawn(-5.6 + 1.3 * x[:, 0] + x[:, 1], random), classes=2)


def tiny(random: np.random.Generator) -> Race:
    """Three hundred records, four numbers."""
    x = random.normal(size=(300 + TEST, 4))
    return _race(_numbers(x, -5, 5), _drawn(1.5 * x[:, 0] - x[:, 1], random), classes=2)


def ordinal(random: np.random.Generator) -> Race:
    """Five classes in an order, which nobody says."""
    x = random.uniform(0, 1, (4000 + TEST, 6))
    score = 4 * x[:, 0] + 2 * x[:, 1] ** 2 + 0.6 * random.normal(size=len(x))
    return _race(_numbers(x, 0, 1), np.digitize(score, [1, 2, 3, 4.5]), classes=5)


def flat(random: np.random.Generator) -> Race:
    """A number that is the same for seven records of ten but for a little noise."""
    x = random.uniform(0, 1, (6000 + TEST, 5))
    y = np.where(x[:, 0] > 0.7, 10 * x[:, 1], 0) + 0.2 * random.normal(size=len(x))
    return _race(_numbers(x, 0, 1), y, target_bounds=(-5, 20))


def places(random: np.random.Generator) -> Race:
    """Categories alone, two hundred in one column of four, four thousand records."""
    logits, columns = np.zeros(4000 + TEST), []
    for place, width in enumerate((200, 30, 12, 5)):
        chosen = random.integers(0, width, len(logits))
        logits = logits + random.normal(0, 0.9, width)[chosen]
        columns.append((Column(f"c{place}", categories=tuple(range(width))), chosen))
    return _race(columns, _drawn(logits, random), classes=2)


def words(random: np.random.Generator) -> Race:
    """Three classes by how often sixty words occur in texts of very different lengths."""
    y = random.integers(0, 3, 3000 + TEST)
    rates = random.gamma(0.4, 0.5, 60) * np.exp(random.normal(0, 0.7, (3, 60)))
    length = random.gamma(2.0, 0.5, len(y))
    x = random.poisson(rates[y] * length[:, None]).astype(float)
    return _race(_numbers(x.clip(0, 100), 0, 100), y, classes=3)


def thirty(random: np.random.Generator) -> Race:
    """Thirty classes of uneven shares in twelve numbers."""
    y = random.choice(30, 9000 + TEST, p=random.dirichlet(np.full(30, 2.0)))
    middles = random.normal(0, 1.2, (30, 12))
    return _race(_numbers(middles[y] + random.normal(size=(len(y), 12)), -8, 8), y, classes=30)


def handful(random: np.random.Generator) -> Race:
    """Two hundred records: four numbers and a category."""
    x, kind = random.normal(size=(200 + TEST, 4)), random.integers(0, 3, 200 + TEST)
    columns = [*_numbers(x, -4, 4), (Column("kind", categories=(0, 1, 2)), kind)]
    return _race(columns, _drawn(1.5 * x[:, 0] + np.array([-1.0, 0.0, 1.0])[kind], random), classes=2)


def marks(random: np.random.Generator) -> Race:
    """Whole numbers from 0 to 10, of which most are 5 to 8."""
    x = random.normal(size=(2500 + TEST, 6))
    y = np.rint(6.3 + 0.9 * x[:, 0] - 0.6 * x[:, 1] + 0.4 * x[:, 2] ** 2 - 0.4 + 0.8 * random.normal(size=len(x)))
    return _race(_numbers(x, -5, 5), y.clip(0, 10), target_bounds=(0, 10))


def ends(random: np.random.Generator) -> Race:
    """A share between 0 and 1 that is piled up at both ends."""
    x = random.uniform(-1, 1, (4000 + TEST, 7))
    logit = 3 * x[:, 0] + 2 * np.sin(3 * x[:, 1]) + 1.5 * random.normal(size=len(x))
    return _race(_numbers(x, -1, 1), 1 / (1 + np.exp(-1.5 * logit)), target_bounds=(0, 1))


def twins(random: np.random.Generator) -> Race:
    """Twenty numbers, of which fifteen are copies of five with a hundredth of noise."""
    x = np.repeat(random.normal(size=(3000 + TEST, 5)), 4, 1)
    x = x + 0.01 * random.normal(size=x.shape)
    return _race(_numbers(x, -5, 5), _drawn(1.2 * x[:, 0] - x[:, 4] + 0.8 * x[:, 8] ** 2 - 0.8, random), classes=2)


def gaps(random: np.random.Generator) -> Race:
    """A third of all cells missing, more often where the number is large; one column has a single value."""
    x = random.normal(size=(5000 + TEST, 6))
    logits = 1.3 * x[:, 0] - x[:, 1] + 0.7 * x[:, 2]
    seen = np.where(random.random(x.shape) < 1 / (1 + np.exp(0.8 - x)), np.nan, x)
    seen[:, 5] = 2.0
    columns = [
        (Column(f"x{place}", bounds=(-5, 5), missing="category" if place % 2 else "middle"), seen[:, place])
        for place in range(6)
    ]
    return _race(columns, _drawn(logits, random), classes=2)


def tangled(random: np.random.Generator) -> Race:
    """A number that two products of three columns make, twenty thousand records."""
    x = random.uniform(-1, 1, (20_000 + TEST, 8))
    y = 4 * x[:, 0] * x[:, 1] * x[:, 2] + 2 * x[:, 3] * (x[:, 4] > 0) + 0.3 * random.normal(size=len(x))
    return _race(_numbers(x, -1, 1), y, target_bounds=(-6, 6))


def rarest(random: np.random.Generator) -> Race:
    """One record in five hundred of a hundred thousand, heavy tails, bounds of thousands."""
    z = random.normal(size=(100_000 + TEST, 8))
    y = _drawn(-8 + 1.5 * z[:, 0] + 1.2 * np.abs(z[:, 1]), random)
    return _race(_numbers(np.exp(1.5 * z), 0, 5000), y, classes=2)


TABLES: dict[str, Callable[[np.random.Generator], Race]] = {
    made.__name__: made
    for made in (
        levels, twenty, seven, small, broad, ground, prices, copies, fraud, steps, line, rings, rides, five,
        counts, tails, rare, tiny, ordinal, flat, places,
        words, thirty, handful, marks, ends, twins, gaps, tangled, rarest,
    )
}  # fmt: skip


# -- scores ------------------------------------------------------------------------------------------------------------


def scores(race: Race, found: Outcome, epsilon: float) -> Report:
    if race.classes is None:
        return _real_scores(race, found)
    return _class_scores(race, found)


def _class_scores(race: Race, found: Outcome) -> Report:
    import torch

    from confide.evaluate.metrics import ece

    y = race.y_test
    p = np.clip(np.asarray(found.centre, dtype=float), 1e-12, 1)
    p /= p.sum(1, keepdims=True)
    shares = np.bincount(y, minlength=p.shape[1]) / len(y)
    loss, least = -np.log(p[np.arange(len(y)), y]).mean(), -np.log(shares[y]).mean()
    told = np.bincount(race.y, minlength=p.shape[1]) >= 100  # classes with records enough to tell their rate
    rates = np.abs(np.log(p.mean(0)[told] / np.maximum(shares[told], 1e-4)))
    return {
        "score": float(loss / least),
        "accuracy": float((p.argmax(1) == y).mean()),
        "ece": float(ece(torch.as_tensor(p), torch.as_tensor(y).long())),
        "rate": float(np.exp(rates.max(initial=0.0))),
    }


def _real_scores(race: Race, found: Outcome) -> Report:
    assert found.deviation is not None
    off, reach = np.abs(race.y_test - found.centre), LEVEL_90 * found.deviation
    return {
        "score": float(np.sqrt(np.mean(off**2)) / race.y_test.std()),
        "coverage": float((off <= reach).mean()),
        "width": float(reach.mean()),  # over the declared range, which is 2
    }


def faults(row: Report, records: int) -> list[str]:
    """What docs/protocols.md calls a fault, but for budgets that buy nothing, which a row cannot show."""
    epsilon, found = row["epsilon"], []
    budget = records * epsilon / 3.5  # n mu, about, at delta 1e-5
    if row["score"] > 1.02 and budget >= 100:
        found.append("no learning")
    if row.get("ece", 0.0) > 0.03 and epsilon >= 1:
        found.append("ece")
    if "coverage" in row and (row["width"] > 1 or (records * epsilon >= 1000 and not 0.86 <= row["coverage"] <= 0.95)):
        found.append("interval")
    if row.get("rate", 1.0) > 2 and budget >= 300:
        found.append("rate")
    return found + (["slow"] if row["seconds"] > 60 else [])


def trial(name: str, seed: int, epsilon: float) -> Report:
    race = TABLES[name](np.random.default_rng(seed))
    started = time.process_time()
    found = quietly(confide_by("auto"), race, epsilon, seed)
    row: Report = {"set": name, "seed": seed, "epsilon": epsilon, "seconds": time.process_time() - started}
    row |= scores(race, found, epsilon)
    return row | {"faults": faults(row, race.train.rows)}


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--sets", nargs="+", choices=list(TABLES))
    arguments.add_argument("--epsilons", nargs="+", type=float)
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = arguments.parse_args()
    epsilons = options.epsilons or ((1.0,) if options.quick else EPSILONS)
    rows = []
    for name in options.sets or (QUICK if options.quick else TABLES):
        for seed in options.seeds:
            for epsilon in epsilons:
                rows.append(trial(name, seed, epsilon))
                if not options.json:
                    say(line_of(rows[-1]))
    if options.json:
        _harness.print_json({"rows": rows})


def line_of(row: Report) -> str:
    cells = "".join(
        f"  {key} {row[key]:.3f}"
        for key in ("score", "accuracy", "ece", "rate", "coverage", "width", "seconds")
        if key in row
    )
    return f"{row['set']:8s} {row['seed']:4d} {row['epsilon']:4g}{cells}  {'* ' if row['faults'] else ''}" + ", ".join(
        row["faults"]
    )


if __name__ == "__main__":
    main()
