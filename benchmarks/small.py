"""Small tables at small budgets: `python -m benchmarks.small [--part settle|judge] [--sets NAME ...] [--json]`.

A few thousand records of columns that move together, with a target that is nearly linear and has skewed noise. A line
says RMSE over the target's deviation and coverage of 90 % intervals by confide's defaults, by its additive model and by
a linear model of Opacus where that is installed, and the RMSE of least squares without privacy. Part settle served to
settle rules, part judge to judge them; see docs/protocols.md. --quick: one table at one budget, confide alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks import _harness
from benchmarks._harness import Report, say
from benchmarks._tabular import LEVEL_90, Contender, Outcome, Race, confide_by, opacus_linear, quietly
from confide.data.schema import Column, Schema
from confide.data.table import Table

Array = Any
Columns = dict[str, Array]
TEST = 8000
EPSILONS = (0.1, 0.3, 1.0, 3.0)


def race(columns: Columns, y: Array, bounds: Mapping[str, Any], target: tuple[float, float]) -> Race:
    """The last TEST records are the public part. bounds: a pair for a number, a list of categories."""
    facts = tuple(
        Column(name, bounds=bounds[name])
        if isinstance(bounds[name], tuple)
        else Column(name, categories=tuple(bounds[name]))
        for name in columns
    )
    records = len(y) - TEST
    table = Table({name: np.asarray(one) for name, one in columns.items()}, target="y", labels=np.clip(y, *target))
    schema = Schema(records=records, columns=facts, target="y", target_bounds=target)
    return Race(schema, table.take(np.arange(records)), table.take(np.arange(records, len(y))))


def numbers(x: Array, y: Array, low: float, high: float, target: tuple[float, float]) -> Race:
    columns = {f"x{place}": x[:, place] for place in range(x.shape[1])}
    return race(columns, y, dict.fromkeys(columns, (low, high)), target)


def sizes(random: Any, records: int) -> tuple[Array, Array]:
    """Of animals, and which of three kinds they are."""
    size, kind = random.beta(4, 2.2, records), random.choice(3, records, p=[0.36, 0.32, 0.32])
    return np.where(kind == 1, 0.75 * size, size), kind


def shells(random: Any) -> Race:
    size, kind = sizes(random, 4000 + TEST)
    columns: Columns = {"k": np.array(list("ABC"))[kind]}
    columns |= {f"l{j}": size * (1 + 0.05 * random.normal(size=len(size))) for j in range(3)}
    columns |= {f"w{j}": size**3 * np.exp(0.15 * random.normal(size=len(size))) for j in range(4)}
    y = 4 + 9 * size - 6 * (columns["w0"] - columns["w1"]) + 3 * columns["w2"]
    y = y + random.gamma(2, 1.2, len(size)) * (0.4 + 0.8 * size)
    bounds = {name: (0.0, 1.5 if name[0] == "l" else 2.0) for name in columns}
    return race(columns, y, bounds | {"k": list("ABC")}, (0.0, 32.0))


def contrast(random: Any) -> Race:
    """Size, and three parts of it whose differences tell the age."""
    size, kind = sizes(random, 4000 + TEST)
    count, age = len(size), random.normal(size=len(size))
    columns: Columns = {"k": np.array(list("ABC"))[kind]}
    columns |= {f"l{j}": size * np.exp(0.06 * random.normal(size=count)) for j in range(3)}
    weight = size**3 * np.exp(0.12 * random.normal(size=count))
    columns["meat"] = 0.43 * weight * np.exp(-0.13 * age + 0.08 * random.normal(size=count))
    columns["shell"] = 0.3 * weight * np.exp(0.13 * age + 0.08 * random.normal(size=count))
    columns["guts"] = 0.2 * weight * np.exp(0.15 * random.normal(size=count))
    columns["whole"] = columns["meat"] + columns["shell"] + columns["guts"] + 0.03 * weight
    y = 3 + 7 * size + 1.4 * age + random.gamma(1.5, 1.3, count) * (0.3 + size)
    bounds: dict[str, Any] = {f"l{j}": (0.0, 1.2) for j in range(3)} | {"k": list("ABC")}
    bounds |= {"meat": (0.0, 1.5), "shell": (0.0, 1.0), "guts": (0.0, 0.8), "whole": (0.0, 3.0)}
    return race(columns, y, bounds, (0.0, 30.0))


def factors(random: Any) -> Race:
    count = 2000 + TEST
    x = 1.5 * random.normal(size=(count, 1)) + random.normal(size=(count, 9)) * random.uniform(0.3, 0.9, 9)
    weights = random.normal(size=9)
    y = x @ (weights - weights.mean() / 2)
    return numbers(x, y / y.std() + 0.6 * (random.gamma(1.5, 1, count) - 1.5), -8, 8, (-6, 8))


def bodies(random: Any) -> Race:
    count = 2500 + TEST
    x = random.normal(size=(count, 2)) @ random.normal(size=(2, 8)) / 1.4 + 0.7 * random.normal(size=(count, 8))
    y = x @ (random.normal(size=8) * [1, 1, 1, 1, 0.3, 0, 0, 0])
    return numbers(x, y / y.std() + random.gamma(2, 0.6, count) - 1.2, -6, 6, (-6, 8))


def plainline(random: Any) -> Race:
    x = random.uniform(-1, 1, (3000 + TEST, 6))
    y = x @ random.normal(size=6)
    return numbers(x, y / y.std() * 0.8 + 0.6 * random.normal(size=len(x)), -1, 1, (-4, 4))


def marks(random: Any) -> Race:
    factor = random.normal(size=(1500 + TEST, 1))
    x = np.clip(np.round(3 + 0.8 * factor + 0.8 * random.normal(size=(len(factor), 10))), 1, 5)
    told = factor[:, 0] * 0.5 + (x - 3) @ (random.random(10) * 0.25)
    return numbers(x, np.round(np.clip(60 + 12 * told + 8 * random.normal(size=len(x)), 0, 100)), 1, 5, (0, 100))


def bent(random: Any) -> Race:
    x = np.tanh(0.7 * random.normal(size=(2500 + TEST, 1)) + 0.8 * random.normal(size=(2500 + TEST, 7)))
    y = np.sin(2.5 * x[:, 0]) + x[:, 1] ** 2 + 0.5 * x[:, 2] - 0.6 * np.exp(x[:, 3])
    return numbers(x, y + 0.5 * random.normal(size=len(x)), -1, 1, (-6, 5))


def survey(random: Any) -> Race:
    """Answers from 1 to 7 that follow two opinions."""
    opinions = random.normal(size=(2000 + TEST, 2))
    x = np.clip(np.round(4 + opinions @ random.normal(0, 0.9, (2, 12)) + random.normal(size=(len(opinions), 12))), 1, 7)
    y = 3 * opinions[:, 0] + (x - 4) @ random.normal(0, 0.5, 12) + random.exponential(2.0, len(x))
    return numbers(x, y, 1, 7, (-25, 35))


def engine(random: Any) -> Race:
    """Seven readings of one state; what is worn out shows in what they differ by, and bends."""
    state, wear = random.uniform(0, 1, (2, 3500 + TEST, 1))
    x = state * np.linspace(1, 2, 7) + 0.08 * wear * np.linspace(-1, 1, 7) + 0.02 * random.normal(size=(len(state), 7))
    return numbers(x, (wear + 0.5 * wear**2)[:, 0] + 0.2 * random.normal(size=len(x)), -1, 4, (-2, 4))


def wages(random: Any) -> Race:
    count = 1500 + TEST
    skill = random.normal(size=count)
    trade, town = random.choice(5, count), random.choice(3, count, p=[0.6, 0.3, 0.1])
    columns: Columns = {"years": np.clip(random.gamma(3, 4, count) + 2 * skill, 0, 60)}
    columns |= {"school": np.round(11 + 2 * skill + random.normal(size=count)), "hours": random.normal(38, 6, count)}
    columns |= {"wealth": np.exp(8 + skill + random.normal(size=count)), "trade": np.array(list("abcde"))[trade]}
    columns |= {"town": np.array(list("xyz"))[town], "test": 100 + 15 * (0.8 * skill + 0.6 * random.normal(size=count))}
    y = 300 * np.exp(0.25 * skill + 0.02 * columns["years"] + 0.1 * trade + 0.3 * random.normal(size=count))
    bounds: dict[str, Any] = {"years": (0.0, 60.0), "school": (0.0, 25.0), "hours": (0.0, 100.0)}
    bounds |= {"wealth": (0.0, 1e6), "trade": list("abcde"), "town": list("xyz"), "test": (0.0, 200.0)}
    return race(columns, y, bounds, (0.0, 5000.0))


def returns(random: Any) -> Race:
    """Heavy tails in all columns and in what they leave."""
    market = random.standard_t(3, (4000 + TEST, 1))
    x = 0.8 * market + 0.6 * random.standard_t(3, (len(market), 10))
    y = x @ random.normal(0, 0.5, 10) + 1.5 * random.standard_t(3, len(x))
    return numbers(x, y, -60, 60, (-80, 80))


def idle(random: Any) -> Race:
    x = 0.5 * random.normal(size=(2500 + TEST, 1)) + random.normal(size=(2500 + TEST, 20))
    return numbers(x, 0.8 * x[:, 3] - 0.8 * x[:, 11] + random.normal(size=len(x)), -5, 5, (-8, 8))


def quiet(random: Any) -> Race:
    """Nothing to learn from columns that all say the same."""
    x = random.normal(size=(1000 + TEST, 1)) + 0.3 * random.normal(size=(1000 + TEST, 8))
    return numbers(x, random.normal(size=len(x)), -5, 5, (-6, 6))


def words(random: Any) -> Race:
    """Five hundred counts, most of them zero."""
    x = random.poisson(random.gamma(0.3, 0.2, 500), (3000 + TEST, 500)).clip(0, 10)
    return numbers(x, x[:, :20].sum(1) + random.normal(size=len(x)), 0, 10, (-10, 60))


PARTS: dict[str, dict[str, Callable[[Any], Race]]] = {
    "settle": {
        "shells": shells, "contrast": contrast, "factors": factors, "bodies": bodies, "plainline": plainline,
        "marks": marks, "bent": bent,
    },
    "judge": {
        "survey": survey, "engine": engine, "wages": wages, "returns": returns, "idle": idle, "quiet": quiet,
        "words": words,
    },
}  # fmt: skip


def contenders(quick: bool) -> dict[str, Contender]:
    found = {"confide": confide_by("auto")}
    if quick:
        return found
    found["additive"] = confide_by("additive")
    return found | ({"opacus": opacus_linear} if find_spec("opacus") else {})


def scores(one: Race, found: Outcome) -> Report:
    y = one.y_test.astype(float)
    told: Report = {"score": float(np.sqrt(np.mean((found.centre - y) ** 2)) / y.std())}
    if found.deviation is not None:
        reach = LEVEL_90 * np.asarray(found.deviation)
        told |= {"coverage": float(np.mean(np.abs(found.centre - y) <= reach)), "widest": float(reach.max())}
    return told


def least_squares(one: Race) -> float:
    """RMSE over the deviation, without privacy."""
    inside, outside = (np.c_[x, np.ones(len(x))] for x in (one.x, one.x_test))
    weights = np.linalg.lstsq(inside, one.y.astype(float), rcond=None)[0]
    return float(scores(one, Outcome(outside @ weights))["score"])


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--part", choices=list(PARTS), default="judge")
    arguments.add_argument("--sets", nargs="+")
    arguments.add_argument("--by", nargs="+", help="of confide, additive, opacus")
    arguments.add_argument("--epsilons", nargs="+", type=float)
    arguments.add_argument("--seeds", nargs="+", type=int, default=[1])
    options = arguments.parse_args()
    part = PARTS["settle" if options.quick else options.part]
    epsilons = options.epsilons or ((1.0,) if options.quick else EPSILONS)
    runners = {name: one for name, one in contenders(options.quick).items() if name in (options.by or [name])}
    rows: list[Report] = []
    for name in options.sets or (("plainline",) if options.quick else part):
        races = [part[name](np.random.default_rng(seed)) for seed in options.seeds]
        plain = float(np.mean([least_squares(one) for one in races]))
        for by, run in runners.items():
            for epsilon in epsilons:
                pairs = zip(options.seeds, races, strict=True)
                found = [scores(one, quietly(run, one, epsilon, seed)) for seed, one in pairs]
                told = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
                rows.append({"set": name, "by": by, "epsilon": epsilon, "least_squares": plain, **told})
                if not options.json:
                    cells = "  ".join(f"{key} {value:.3f}" for key, value in told.items())
                    say(f"{name:10s}{by:10s}{epsilon:5g}  {cells}  (least squares {plain:.3f})")
    if options.json:
        _harness.print_json({"rows": rows})


if __name__ == "__main__":
    main()
