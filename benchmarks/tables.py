"""The race on tables: `python -m benchmarks.tables [--quick] [--data DIR] [--page FILE] [--json]`.

confide's defaults and its additive method against DP-EBM (interpret, default and with the learning rate that is best
for it), diffprivlib, DP-SGD on a linear model (Opacus) and gradient boosting without privacy. All get the same declared
facts and the same epsilon at delta 1e-5; whatever a tool would read off the data is given to it from the schema.

Without options: the made-up and embedded sets, some minutes for each epsilon and repeat. --quick: three small sets at
epsilon 1. --data DIR adds the catalogued sets, --sets and --contenders choose some, --page writes a page with plots.
Needs the extra confide[race]; a contender that is not installed is named with its reason and the others run.

DP-EBM's regressor adds noise for the target's range while its first residual is the target itself: it is fed targets
that are centred on the middle of their declared range, as all others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _harness
from benchmarks._harness import Report, say
from benchmarks._tabular import CONTENDERS, LEVEL_90, Outcome, Race, quietly
from confide.data import catalogue, embedded
from confide.data.schema import Column, Schema
from confide.data.table import DataSet, Table, permuted_rows

EPSILONS = (0.1, 0.3, 1.0, 3.0, 8.0)
TEST = 4000
LOWER_IS_BETTER = ("log_loss", "ece", "rmse", "width", "seconds")
COLUMNS = ("accuracy", "auroc", "log_loss", "ece", "rmse", "coverage", "width", "seconds")

Array = Any


# -- sets --------------------------------------------------------------------------------------------------------------


def _made(x: Array, y: Array, low: float, high: float, **target: Any) -> Race:
    columns = tuple(Column(f"x{place}", bounds=(low, high)) for place in range(x.shape[1]))
    table = Table({column.name: x[:, place] for place, column in enumerate(columns)}, target="y", labels=y)
    train, test = np.arange(len(x) - TEST), np.arange(len(x) - TEST, len(x))
    schema = Schema(records=len(train), columns=columns, target="y", **target)
    return Race(schema, table.take(train), table.take(test))


def friedman1(random: np.random.Generator) -> Race:
    """Friedman (1991): ten numbers, five of them idle, one product."""
    x = random.uniform(0, 1, (6000 + TEST, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return _made(x, y + random.normal(size=len(y)), 0.0, 1.0, target_bounds=(-5, 35))


def hastie(random: np.random.Generator) -> Race:
    """Hastie, Tibshirani and Friedman, example 10.2: whether ten squares add up to more than their median."""
    x = random.normal(size=(8000 + TEST, 10))
    return _made(x, ((x**2).sum(1) > 9.34).astype(int), -5.0, 5.0, classes=2)


def xor(random: np.random.Generator) -> Race:
    """The sign of a product, with a tenth of the labels flipped: nothing for a sum over columns."""
    x = random.uniform(-1, 1, (8000 + TEST, 4))
    y = (x[:, 0] * x[:, 1] > 0) ^ (random.random(len(x)) < 0.1)
    return _made(x, y.astype(int), -1.0, 1.0, classes=2)


def lognormal(random: np.random.Generator) -> Race:
    """Heavy tails in bounds a thousand times the median."""
    z = random.normal(0, 1.5, (6000 + TEST, 8))
    y = random.random(len(z)) < 1 / (1 + np.exp(-(z[:, 0] - z[:, 1] + 0.5 * z[:, 2])))
    return _made(np.exp(z), y.astype(int), 0.0, 1000.0, classes=2)


def imbalanced(random: np.random.Generator) -> Race:
    """One class of 3 %."""
    x = random.uniform(-1, 1, (10_000 + TEST, 12))
    y = random.random(len(x)) < 1 / (1 + np.exp(4.7 - 2 * x[:, 0] - 2 * np.sin(3 * x[:, 1]) - x[:, 2]))
    return _made(x, y.astype(int), -1.0, 1.0, classes=2)


def wide(random: np.random.Generator) -> Race:
    """A hundred numbers, ten of which count."""
    x = random.uniform(-1, 1, (8000 + TEST, 100))
    y = random.random(len(x)) < 1 / (1 + np.exp(-2 * x[:, :10].sum(1)))
    return _made(x, y.astype(int), -1.0, 1.0, classes=2)


MADE_UP: dict[str, Callable[[np.random.Generator], Race]] = {
    made.__name__: made for made in (friedman1, hastie, xor, lognormal, imbalanced, wide)
}
PICTURES = ("mnist", "cifar10", "svhn")
CATALOGUED = tuple(name for name in catalogue.names() if name not in PICTURES)
QUICK = ("lognormal", "diabetes", "friedman1")


def race_of(name: str, seed: int, directory: str | None) -> Race:
    """The set, with fresh records or a fresh split for every seed where it has no official test part."""
    if name in MADE_UP:
        return MADE_UP[name](np.random.default_rng(1000 + seed))
    found = embedded.load(name) if name in embedded.NAMES else catalogue.load(name, directory)
    return _split(found, seed)


def _split(found: DataSet, seed: int) -> Race:
    schema = found.schema
    assert schema is not None
    if found.test is not None:
        return Race(schema, found.train, found.test)
    if found.splits:
        train, test = found.splits[seed % len(found.splits)]
    else:
        train, test = permuted_rows(found.train.rows, found.train.rows // 10, seed=seed)
    from dataclasses import replace

    return Race(replace(schema, records=len(train)), found.train.take(train), found.train.take(test))


# -- scores ------------------------------------------------------------------------------------------------------------


def scores(race: Race, found: Outcome) -> Report:
    return _class_scores(race, found) if race.classes is not None else _real_scores(race, found)


def _class_scores(race: Race, found: Outcome) -> Report:
    import torch
    from sklearn.metrics import roc_auc_score

    from confide.evaluate.metrics import ece

    p = np.clip(np.asarray(found.centre, dtype=float), 1e-12, 1)
    p /= p.sum(1, keepdims=True)
    y = race.y_test
    right = np.clip(p[np.arange(len(y)), y], 1e-6, 1)
    auroc = roc_auc_score(y, p[:, 1]) if race.classes == 2 else roc_auc_score(y, p, multi_class="ovr")
    return {
        "accuracy": float((p.argmax(1) == y).mean()),
        "auroc": float(auroc),
        "log_loss": float(-np.log(right).mean()),
        "ece": float(ece(torch.as_tensor(p), torch.as_tensor(y).long())),
    }


def _real_scores(race: Race, found: Outcome) -> Report:
    """Errors and widths in units of the test targets' own standard deviation."""
    spread = float(race.y_test.std())
    told: Report = {"rmse": float(np.sqrt(np.mean((found.centre - race.y_test) ** 2))) / spread}
    if found.deviation is not None:
        reach = LEVEL_90 * found.deviation
        told["coverage"] = float((np.abs(race.y_test - found.centre) <= reach).mean())
        told["width"] = float(2 * reach.mean()) / spread
    return told


def trials(
    names: Sequence[str], contenders: Sequence[str], epsilons: Sequence[float], options: Any
) -> Iterator[Report]:
    for name in names:
        for seed in range(options.repeats):
            race = race_of(name, seed, options.data)
            for epsilon in epsilons:
                for contender in contenders:
                    row: Report = {"set": name, "epsilon": epsilon, "contender": contender, "seed": seed}
                    started = time.perf_counter()
                    try:
                        found = quietly(CONTENDERS[contender], race, epsilon, seed)
                        row |= scores(race, found) | {"seconds": time.perf_counter() - started}
                    except Exception as error:
                        row["error"] = _harness.reason(error)
                    yield row


def averaged(rows: Sequence[Report]) -> list[Report]:
    """One row for each set, epsilon and contender; the best of the private ones are marked."""
    groups: dict[tuple[Any, ...], list[Report]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["epsilon"], row["contender"]), []).append(row)
    found = []
    for (name, epsilon, contender), members in groups.items():
        told: Report = {"set": name, "epsilon": epsilon, "contender": contender, "repeats": len(members)}
        for column in COLUMNS:
            values = [member[column] for member in members if column in member]
            if values:
                told[column] = float(np.mean(values))
        if any("error" in member for member in members):
            told["error"] = next(member["error"] for member in members if "error" in member)
        found.append(told)
    for row in found:
        row["first"] = [column for column in ("auroc", "log_loss", "rmse") if _is_first(row, column, found)]
    return found


def _is_first(row: Report, column: str, rows: Sequence[Report]) -> bool:
    if column not in row or row["contender"] == "not private":
        return False
    others = [
        other[column]
        for other in rows
        if (other["set"], other["epsilon"]) == (row["set"], row["epsilon"])
        and other["contender"] != "not private"
        and column in other
    ]
    return bool(row[column] == (min(others) if column in LOWER_IS_BETTER else max(others)))


# -- what is printed ---------------------------------------------------------------------------------------------------


def print_rows(rows: Sequence[Report]) -> None:
    before = None
    for row in rows:
        if (row["set"], row["epsilon"]) != before:
            before = (row["set"], row["epsilon"])
            say(f"\n{row['set']}, epsilon {row['epsilon']:g}\n{'':20s}" + "".join(f"{name:>10s}" for name in COLUMNS))
        cells = "".join(f"{row[name]:10.3f}" if name in row else f"{'':10s}" for name in COLUMNS)
        say(f"{row['contender']:20s}{cells}  {row.get('error', '')}{'*' if row['first'] else ''}")


def page(rows: Sequence[Report]) -> str:
    """One drawing for each set: the score that counts against epsilon, a line for every contender."""
    import html

    from confide.report.render import style

    parts = []
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        column = "log_loss" if any("log_loss" in row for row in own) else "rmse"
        parts.append(f"<h2>{html.escape(name)}</h2>{_drawing(name, own, column)}{_table(own)}")
    title = "The race on tables"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style()}</style>'
        f"</head><body><main><h1>{title}</h1><p>{html.escape((__doc__ or '').split(chr(10) * 2)[1])}</p>"
        f"{''.join(parts)}</main></body></html>"
    )


def _drawing(name: str, rows: Sequence[Report], column: str) -> str:
    from confide.evaluate.drawing import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, legend, logarithmic, plot

    colours = (VERMILION, BLUE, ORANGE, GREEN, SKY, "#CC79A7", GREY)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for colour, contender in zip(colours, CONTENDERS, strict=True):
            points = sorted((r["epsilon"], r[column]) for r in rows if r["contender"] == contender and column in r)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=contender)
        budgets = [row["epsilon"] for row in rows]
        logarithmic(axes, min(budgets) / 1.3, max(budgets) * 1.3)
        low = min((row[column] for row in rows if column in row), default=0.0)
        axes.set(xlabel="Epsilon", ylabel=column, ylim=(0.9 * low, 3 * low + 0.2))
        legend(axes, 3)

    alt = f"{column} of every contender on {name} against epsilon; lower is better. The table below has the numbers."
    return plot(f"race-{name}", name, alt, "Lower is better.", draw, 420).svg


def _table(rows: Sequence[Report]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("epsilon", "contender", *COLUMNS))
    body = "".join(
        f"<tr><td>{row['epsilon']:g}</td><td>{row['contender']}{' *' if row['first'] else ''}</td>"
        + "".join(f"<td>{row[name]:.3f}</td>" if name in row else "<td></td>" for name in COLUMNS)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--data", help="directory of the catalogued sets; adds them")
    arguments.add_argument("--sets", nargs="+", help="of " + ", ".join((*MADE_UP, *embedded.NAMES, *CATALOGUED)))
    arguments.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    arguments.add_argument("--epsilons", nargs="+", type=float)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--page", type=Path, help="write an HTML page with plots")
    options = arguments.parse_args()
    usual = QUICK if options.quick else (*MADE_UP, *embedded.NAMES, *(CATALOGUED if options.data else ()))
    epsilons = options.epsilons or ((1.0,) if options.quick else EPSILONS)
    found = []
    for row in trials(options.sets or usual, options.contenders, epsilons, options):
        found.append(row)
        if not options.json:
            say(f"{row['set']:12s} {row['epsilon']:<5g} {row['contender']:20s} {row.get('seconds', 0):6.1f} s")
    rows = averaged(found)
    if options.page is not None:
        options.page.write_text(page(rows), encoding="utf-8")
    if options.json:
        _harness.print_json({"rows": rows})
    else:
        print_rows(rows)


if __name__ == "__main__":
    main()
