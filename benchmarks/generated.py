"""Tables of public generators: `python -m benchmarks.generated [--part settle|judge] [--sets NAME ...] [--json]`.

confide's defaults on what scikit-learn's make_* functions give, and on a few tables of our own: labels that are wrong,
few records, rare classes, nothing to learn. Some served to settle rules and the others to judge them, see
docs/protocols.md. A line says what `benchmarks.unseen` says, and beside it, for classes, score and calibration error of
a logistic regression without privacy on the same records: what is no matter of privacy.
--quick: two tables at epsilon 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import _harness, unseen
from benchmarks._harness import Report, say
from benchmarks._tabular import Outcome, Race, confide_by, quietly
from confide.data.schema import Column, Schema
from confide.data.table import Table

Array = Any
Made = Callable[[int], Race]
TEST = 10_000
EPSILONS = (0.1, 1.0, 8.0)
QUICK = ("few", "wave")


def _race(x: Array, y: Array, bounds: Sequence[tuple[float, float]], **target: Any) -> Race:
    """The last TEST records are the public part. bounds: one pair for all columns, or one for each."""
    limits = list(bounds) * (x.shape[1] if len(bounds) == 1 else 1)
    columns = tuple(Column(f"x{place}", bounds=limits[place]) for place in range(x.shape[1]))
    table = Table({column.name: x[:, place] for place, column in enumerate(columns)}, target="y", labels=y)
    records = len(y) - TEST
    schema = Schema(records=records, columns=columns, target="y", **target)
    return Race(schema, table.take(np.arange(records)), table.take(np.arange(records, len(y))))


def _classes(x: Array, y: Array, low: float, high: float) -> Race:
    return _race(x, y.astype(int), [(low, high)], classes=int(y.max()) + 1)


def sklearns(name: str, records: int, low: float, high: float, **options: Any) -> Made:
    """Classes by one of scikit-learn's generators."""

    def make(seed: int) -> Race:
        from sklearn import datasets

        x, y = getattr(datasets, name)(n_samples=records + TEST, random_state=seed, **options)
        return _classes(x, np.maximum(y, 0), low, high)

    return make


def step(records: int, wrong: float, columns: int) -> Made:
    """Whether a number is above .2, with some labels wrong."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.uniform(-1, 1, (records + TEST, columns))
        return _classes(x, (x[:, 0] > 0.2) ^ (random.random(len(x)) < wrong), -1, 1)

    return make


def steps2(records: int, wrong: float) -> Made:
    """Whether one of two numbers is above its step, with some labels wrong."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.uniform(0, 1, (records + TEST, 6))
        return _classes(x, ((x[:, 0] > 0.3) | (x[:, 1] > 0.6)) ^ (random.random(len(x)) < wrong), 0, 1)

    return make


def line(records: int, columns: int, used: int, constant: float) -> Made:
    """A logistic regression on some of the columns, with weights that every seed draws."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.normal(size=(records + TEST, columns))
        logits = x[:, :used] @ random.normal(0, 1.2, used) + constant
        return _classes(x, random.random(len(x)) < 1 / (1 + np.exp(-logits)), -5, 5)

    return make


def rare(records: int, constant: float) -> Made:
    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.normal(size=(records + TEST, 8))
        logits = constant + 1.2 * x[:, 0] - 0.9 * x[:, 1]
        return _classes(x, random.random(len(x)) < 1 / (1 + np.exp(-logits)), -6, 6)

    return make


def mute(records: int, *shares: float) -> Made:
    """Columns that say nothing of the class."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.normal(size=(records + TEST, 6))
        return _classes(x, random.choice(len(shares), len(x), p=shares), -5, 5)

    return make


def clouds(records: int, columns: int, apart: float, *shares: float) -> Made:
    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        y = random.choice(len(shares), records + TEST, p=shares)
        middles = random.normal(0, apart, (len(shares), columns))
        return _classes(middles[y] + random.normal(size=(len(y), columns)), y, -8, 8)

    return make


# -- numbers -----------------------------------------------------------------------------------------------------------

FRIEDMAN = [(0.0, 100.0), (40 * np.pi, 560 * np.pi), (0.0, 1.0), (1.0, 11.0)]
"""Ranges of the four columns of make_friedman2 and make_friedman3, as their documentation has them."""


def number(
    name: str, records: int, bounds: Sequence[tuple[float, float]], target: tuple[float, float], **options: Any
) -> Made:
    """A number by one of scikit-learn's generators."""

    def make(seed: int) -> Race:
        from sklearn import datasets

        x, y = getattr(datasets, name)(n_samples=records + TEST, random_state=seed, **options)[:2]
        return _race(x, y, bounds, target_bounds=target)

    return make


def smooth(records: int, columns: int, truth: Callable[[Array], Array], noise: float, reach: float) -> Made:
    """A function of even numbers and noise, between -reach and reach."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        x = random.uniform(-1, 1, (records + TEST, columns))
        return _race(x, truth(x) + noise * random.normal(size=len(x)), [(-1, 1)], target_bounds=(-reach, reach))

    return make


def sensors(records: int, small: float) -> Made:
    """Ten numbers that all move with one load; the target is in what little is left."""

    def make(seed: int) -> Race:
        random = np.random.default_rng(seed)
        hidden, load = random.uniform(-1, 1, (records + TEST, 3)), random.integers(1, 9, records + TEST)[:, None] / 8
        x = np.tanh(2 * load * np.linspace(0.5, 1.5, 10)) + small * (hidden @ random.normal(size=(3, 10))) * load
        x = x + 0.01 * random.normal(size=x.shape)
        return _race(x, hidden[:, 0] + 0.05 * random.normal(size=len(x)), [(-2, 2)], target_bounds=(-2, 2))

    return make


PARTS: dict[str, dict[str, Made]] = {
    "settle": {
        "mcnoise": sklearns("make_classification", 1000, -8, 8, n_features=10, n_informative=4, flip_y=0.15),
        "mcclean": sklearns("make_classification", 2000, -8, 8, n_features=12, n_informative=5, flip_y=0.01),
        "mc3": sklearns(
            "make_classification", 3000, -8, 8,
            n_features=12, n_informative=6, n_classes=3, n_clusters_per_class=1, flip_y=0.05,
        ),
        "blobs": sklearns("make_blobs", 500, -20, 20, n_features=2, centers=3, cluster_std=4.0),
        "moons": sklearns("make_moons", 1000, -2, 3, noise=0.25),
        "circles": sklearns("make_circles", 2000, -2, 2, noise=0.15, factor=0.5),
        "quant3": sklearns("make_gaussian_quantiles", 3000, -5, 5, n_features=5, n_classes=3),
        "flip": step(3000, 0.12, 5),
        "rare": rare(8000, -5.2),
        "mute3": mute(1200, 0.5, 0.3, 0.2),
        "clouds5": clouds(1800, 6, 1.2, 0.2, 0.2, 0.2, 0.2, 0.2),
        "few": line(250, 5, 2, 0.0),
        "thousand": line(1000, 6, 3, 0.7),
        "hastie": sklearns("make_hastie_10_2", 8000, -5, 5),
        "friedman1": number("make_friedman1", 2000, [(0, 1)], (-5, 35), n_features=10, noise=1.0),
        "friedman2": number("make_friedman2", 3000, FRIEDMAN, (-200, 2000), noise=50.0),
        "friedman3": number("make_friedman3", 2500, FRIEDMAN, (-1, 2.5), noise=0.1),
        "linear": number("make_regression", 2000, [(-5, 5)], (-1500, 1500), n_features=15, n_informative=6, noise=30.0),
        "sparse": number("make_sparse_uncorrelated", 3000, [(-5, 5)], (-12, 12), n_features=10),
        "swiss": number("make_swiss_roll", 4000, [(-15, 25)], (0, 18), noise=0.5),
        "wave": smooth(3000, 6, lambda x: np.sin(3 * x[:, 0]) + x[:, 1] ** 2 - 0.5 * x[:, 2], 0.4, 4),
        "product": smooth(5000, 6, lambda x: 2 * x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3] + 0.5 * x[:, 4], 0.3, 5),
        "sensors": sensors(8000, 0.15),
        "null": smooth(2000, 5, lambda x: 0 * x[:, 0], 1.0, 6),
    },
    "judge": {
        "mcnoise": sklearns("make_classification", 1500, -8, 8, n_features=8, n_informative=3, flip_y=0.2),
        "mcweights": sklearns(
            "make_classification", 2500, -8, 8, n_features=10, n_informative=4, weights=[0.85], flip_y=0.03
        ),
        "mc4": sklearns("make_classification", 2500, -8, 8, n_features=16, n_informative=8, n_classes=4, flip_y=0.1),
        "blobs": sklearns("make_blobs", 400, -20, 20, n_features=3, centers=2, cluster_std=8.0),
        "moons": sklearns("make_moons", 2000, -2, 3, noise=0.35),
        "circles": sklearns("make_circles", 1200, -2, 2, noise=0.1, factor=0.5),
        "quant2": sklearns("make_gaussian_quantiles", 4000, -5, 5, n_features=3, n_classes=2),
        "steps2": steps2(2500, 0.1),
        "rare": rare(12_000, -6.0),
        "mute": mute(600, 0.8, 0.2),
        "clouds4": clouds(1000, 8, 0.9, 0.5, 0.25, 0.15, 0.1),
        "few": line(200, 4, 2, 0.0),
        "eight": line(800, 8, 5, -0.5),
        "step": step(6000, 0.25, 3),
        "friedman1": number("make_friedman1", 5000, [(0, 1)], (-5, 35), n_features=7, noise=2.0),
        "friedman2": number("make_friedman2", 1500, FRIEDMAN, (-500, 2500), noise=150.0),
        "friedman3": number("make_friedman3", 4000, FRIEDMAN, (-1, 2.5), noise=0.3),
        "linear": number("make_regression", 4000, [(-5, 5)], (-1500, 1500), n_features=8, n_informative=8, noise=80.0),
        "sparse": number("make_sparse_uncorrelated", 1500, [(-5, 5)], (-15, 15), n_features=6),
        "scurve": number("make_s_curve", 3000, [(-3, 3)], (-5, 5), noise=0.2),
        "steps": smooth(3000, 5, lambda x: (x[:, 0] > 0.2) + 1.5 * (x[:, 1] > -0.3) * (x[:, 2] > 0), 0.4, 5),
        "ratio": smooth(6000, 5, lambda x: x[:, 0] / (1.3 + x[:, 1]) + x[:, 2] ** 3, 0.3, 6),
        "sensors": sensors(5000, 0.3),
        "null": smooth(1500, 7, lambda x: 0 * x[:, 0], 1.0, 5),
    },
}  # fmt: skip


def without_privacy(race: Race) -> Report:
    """Of a logistic regression on standardised columns."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)).fit(race.x, race.y)
    found = unseen.scores(race, Outcome(model.predict_proba(race.x_test)), np.inf)
    return {f"plain_{key}": found[key] for key in ("score", "ece")}


def trial(part: str, name: str, seed: int, epsilon: float) -> Report:
    race = PARTS[part][name](seed)
    started = time.process_time()
    found = quietly(confide_by("auto"), race, epsilon, seed)
    row: Report = {"set": name, "seed": seed, "epsilon": epsilon, "seconds": time.process_time() - started}
    row |= unseen.scores(race, found, epsilon)
    if race.classes is not None:
        row |= without_privacy(race)
    return row | {"faults": unseen.faults(row, race.train.rows)}


def mean_of(rows: Sequence[Report]) -> Report:
    """Of one table at one budget, over seeds; faults are those that any of them had."""
    keys = [key for key, value in rows[0].items() if isinstance(value, float) and key != "epsilon"]
    told = {key: float(np.mean([row[key] for row in rows])) for key in keys}
    faults = sorted({fault for row in rows for fault in row["faults"]})
    return {"set": rows[0]["set"], "epsilon": rows[0]["epsilon"], "seed": len(rows), **told, "faults": faults}


def line_of(row: Report) -> str:
    beside = f"  plain {row['plain_score']:.3f} {row['plain_ece']:.3f}" if "plain_score" in row else ""
    return unseen.line_of(row) + beside


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--part", choices=list(PARTS), default="judge")
    arguments.add_argument("--sets", nargs="+")
    arguments.add_argument("--epsilons", nargs="+", type=float)
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = arguments.parse_args()
    part = "settle" if options.quick else options.part
    epsilons = options.epsilons or ((1.0,) if options.quick else EPSILONS)
    rows = []
    for name in options.sets or (QUICK if options.quick else PARTS[part]):
        for epsilon in epsilons:
            rows.append(mean_of([trial(part, name, seed, epsilon) for seed in options.seeds]))
            if not options.json:
                say(line_of(rows[-1]))
    if options.json:
        _harness.print_json({"rows": rows})


if __name__ == "__main__":
    main()
