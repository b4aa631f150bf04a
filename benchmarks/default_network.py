"""The rule of the default network (`confide.rules.default_hidden`), settled on made-up tables.

    python -m benchmarks.default_network [--records 3000 --features 2 --epsilon 1 ...]

Protocol. Features are uniform on [-1, 1]; the truth is linear in them (slope of norm 1.7) or curved (a sine of the
first, a square of the second, a product of two), with noise of standard deviation 0.2; targets are declared to lie in
[-4, 4], classes are its signs. Both networks, linear and one hidden layer, are fitted by the method and the plan of the
public rules, delta 1e-5, and measured on 2000 new records: root mean squared error, or share of wrong labels. Of each
cell the medians over three tables are shown. What is chosen by the rule must cost little where the truth is linear and
gain where it is not; no real data set was looked at.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from typing import Any

import numpy as np

from confide import rules
from confide.estimators import PrivateBayesClassifier, PrivateBayesRegressor

DELTA = 1e-5
NOISE = 0.2
TESTED = 2000
TABLES = 3
TASKS = ("regression", "classification")
SHAPES = ("linear", "curved")
CELLS = ((300, 2), (1000, 2), (3000, 2), (3000, 10), (10_000, 2), (10_000, 10))
"""Records and features; from one record per weight of the hidden layer to some forty."""


def made_up(shape: str, records: int, features: int, seed: int) -> tuple[Any, Any]:
    """Features, and a score around the truth."""
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (records, features))
    if shape == "linear":
        slope = np.random.RandomState(features).standard_normal(features)
        truth = 1.7 * x @ slope / np.linalg.norm(slope)
    else:
        truth = 1.5 * np.sin(np.pi * x[:, 0]) + 1.5 * x[:, 1] ** 2 - 0.5 + 0.8 * x[:, 0] * x[:, -1]
    return x, truth + NOISE * random.standard_normal(records)


def error_of(task: str, shape: str, records: int, features: int, epsilon: float, hidden: tuple[int, ...]) -> float:
    """The median error over the tables."""
    return statistics.median(_error(task, shape, records, features, epsilon, hidden, seed) for seed in range(TABLES))


def _error(
    task: str, shape: str, records: int, features: int, epsilon: float, hidden: tuple[int, ...], seed: int
) -> float:
    (x, y), (new_x, new_y) = made_up(shape, records, features, seed), made_up(shape, TESTED, features, seed + 1000)
    shared: dict[str, Any] = {"bounds": (-1, 1), "records": records, "hidden": hidden, "seed": seed}
    if task == "regression":
        model = PrivateBayesRegressor(epsilon=epsilon, delta=DELTA, target_bounds=(-4, 4), **shared).fit(x, y)
        return float(np.sqrt(np.mean((model.predict(new_x) - new_y) ** 2)))
    chooser = PrivateBayesClassifier(epsilon=epsilon, delta=DELTA, classes=2, **shared).fit(x, (y > 0).astype(int))
    return float(np.mean(chooser.predict(new_x) != (new_y > 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int)
    parser.add_argument("--features", type=int)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    given = parser.parse_args()
    cells = CELLS if given.records is None else ((given.records, given.features or 2),)
    sys.stdout.write("task            truth   records  features  epsilon  records/weights  linear  hidden  rule\n")
    for (records, features), epsilon, task, shape in itertools.product(cells, given.epsilon, TASKS, SHAPES):
        outputs = 1 if task == "regression" else 2
        ratio = records / rules.weight_count((features, *rules.WIDE_LAYER, outputs))
        plain = error_of(task, shape, records, features, epsilon, ())
        wide = error_of(task, shape, records, features, epsilon, rules.WIDE_LAYER)
        chosen = (
            "hidden" if rules.default_hidden(records, features, outputs, epsilon, regression=outputs == 1) else "linear"
        )
        sys.stdout.write(
            f"{task:<15} {shape:<7} {records:>7}  {features:>8}  {epsilon:>7g}  "
            f"{ratio:>15.1f}  {plain:>6.3f}  {wide:>6.3f}  {chosen}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
