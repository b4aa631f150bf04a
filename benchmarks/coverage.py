"""Do 90 % intervals of a noise-aware posterior hold the truth in 90 % of the cases, and how much wider are they?

    python -m benchmarks.coverage                   50 repeats of every cell, some minutes of one core
    python -m benchmarks.coverage --shapes          the same of inputs, errors and truths that nothing was settled on
    python -m benchmarks.coverage --quick           10 repeats of the cells with a limit of width
    python -m benchmarks.coverage --boundary        by `confide.fit` itself, ten times slower; see `_coverage.py`
    python -m benchmarks.coverage --json FILE       also as a file

Truths are drawn from the prior, records from the model, releases are made at the stated epsilon (delta = 1e-5). Width:
of the intervals, over those of the non-private posterior of the same records; its limits hold at 5000 records with 5
even features. The protocol is in docs/protocols.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import confide
from benchmarks._coverage import beliefs
from confide.data.schema import Schema
from confide.methods.noise_aware import NoiseAware
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Gaussian, Likelihood
from confide.models.priors import GaussianPrior
from confide.sources.private_data import PrivateData

NOISE, DELTA, STEPS = 0.2, 1e-5, 10
PRIOR = {"linear": 0.3, "logistic": 1.0}
EPSILONS = (0.1, 0.3, 1.0, 3.0)
INPUTS = ("uniform", "narrow", "correlated")
SHAPES = ("tails", "binary", "rare", "collinear", "constant", "gaussian")
TWISTS = ("heteroscedastic", "student", "edge", "unlikely", "separable")
WIDTH_LIMITS = dict(zip(EPSILONS, (10.0, 2.2, 1.2, 1.05), strict=True))
COVERAGE_LIMITS = (0.86, 0.97)
QUANTILE = 1.6448536
AT_ONCE = 2_000_000
"""Numbers of inputs that are held at a time."""


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    inputs   uniform in [-1, 1], narrow in [.1, .7], or correlated (.85 each pair); or one of SHAPES
    twist    of targets or truths: one of TWISTS; see `drawn`
    """

    task: str
    inputs: str
    records: int
    features: int
    epsilon: float
    twist: str = ""


@dataclass(frozen=True)
class Outcome:
    """inside: which parameters their interval held; width: mean over parameters, over the non-private one."""

    inside: Tensor
    width: float
    squared_error: float


@dataclass(frozen=True)
class Drawn:
    """z: inputs with the constant last;  deviations: of the non-private posterior."""

    z: Tensor
    y: Tensor
    truth: Tensor
    deviations: Tensor


def drawn_inputs(cell: Cell, generator: torch.Generator) -> Tensor:
    """Rows within [-1, 1] in every column."""
    shape = (cell.records, cell.features)
    even = torch.rand(shape, generator=generator, dtype=torch.float64)
    if cell.inputs == "uniform":
        return 2 * even - 1
    if cell.inputs == "narrow":
        return 0.1 + 0.6 * even
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if cell.inputs == "gaussian":
        return (normal / 3).clamp(-1, 1)
    if cell.inputs == "tails":  # Student with three degrees of freedom, cut by declared bounds at eight deviations
        squares = torch.randn(3, *shape, generator=generator, dtype=torch.float64).square().sum(0)
        return (normal / (squares / 3).sqrt() / 8).clamp(-1, 1)
    if cell.inputs in ("binary", "rare"):  # one column of zeros and ones, one in two or one in thirty
        first = (even[:, :1] < (0.5 if cell.inputs == "binary" else 1 / 30)).double()
        return torch.cat([first, 2 * even[:, 1:] - 1], 1)
    if cell.inputs == "collinear":  # two columns that differ by a hundredth
        twin = (2 * even[:, :1] - 1) * 0.99 + 0.01 * normal[:, 1:2].clamp(-1, 1)
        return torch.cat([2 * even[:, :1] - 1, twin, 2 * even[:, 2:] - 1], 1)
    if cell.inputs == "constant":  # the intercept alone says something: one column that hardly varies
        return 0.3 + 0.001 * even
    common = torch.rand(cell.records, 1, generator=generator, dtype=torch.float64)
    return 0.7 * (2 * common - 1) + 0.3 * (2 * even - 1)


def drawn(cell: Cell, repeat: int) -> Drawn:
    """Records of one repeat.

    heteroscedastic   the noise of a target grows threefold with the first feature;  student: it has heavy tails
    edge              truths two deviations of the prior away;  unlikely: one class of 2 %
    separable         weights so large that a line parts the classes
    """
    generator = torch.Generator().manual_seed(7919 * repeat + 17)
    x, scale = drawn_inputs(cell, generator), PRIOR[cell.task]
    truth = scale * torch.randn(cell.features + 1, generator=generator, dtype=torch.float64)
    if cell.twist == "edge":
        truth = 2 * scale * truth.sign()
    elif cell.twist == "unlikely":
        truth[-1] = -3.9
    elif cell.twist == "separable":
        truth = 60 * truth
    z = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    outputs = z @ truth
    if cell.task == "linear":
        noise = torch.randn(cell.records, generator=generator, dtype=torch.float64)
        if cell.twist == "student":  # five degrees of freedom, of the same variance
            squares = torch.randn(5, cell.records, generator=generator, dtype=torch.float64).square().sum(0)
            noise = noise / (squares / 5).sqrt() * math.sqrt(3 / 5)
        size = NOISE * (1 + x[:, 0] / 2) if cell.twist == "heteroscedastic" else NOISE
        y, weight = outputs + size * noise, torch.full_like(outputs, NOISE**-2)
    else:
        p = outputs.sigmoid()
        y = (torch.rand(cell.records, generator=generator, dtype=torch.float64) < p).double()
        weight = p * (1 - p)
    precision = z.mT @ (z * weight[:, None]) + torch.eye(z.shape[1]) / scale**2
    return Drawn(z, y, truth, torch.linalg.inv(precision).diagonal().sqrt())


@cache
def noise_multiplier(epsilon: float) -> float:
    """Of ten releases about all records, however many they are."""
    plan = confide.plan(epsilon=epsilon, delta=DELTA, records=1000, steps=STEPS, sampling="full-batch")
    return plan.mechanism.noise_multiplier


def _model(cell: Cell) -> tuple[nn.Module, Likelihood, int | None]:
    if cell.task == "linear":
        return networks.linear(cell.features), Gaussian(NOISE), None
    return networks.logistic(cell.features), Bernoulli(), 2


def covered(cell: Cell, repeat: int, **options: Any) -> Outcome:
    """One repeat through the boundary: draw, fit, compare. Options are those of the plan."""
    found, (module, likelihood, classes) = drawn(cell, repeat), _model(cell)
    schema = Schema(records=cell.records, classes=classes)
    target = found.y if classes is None else found.y.long()
    data = PrivateData(found.z[:, :-1], target, schema=schema, seed=repeat)
    settings: dict[str, Any] = {"steps": STEPS, "sampling": "full-batch", **options}
    if not options:
        settings["noise_multiplier"] = noise_multiplier(cell.epsilon)
    else:
        settings["epsilon"] = cell.epsilon
    plan = confide.plan(delta=DELTA, records=cell.records, **settings)
    method = NoiseAware(prior=GaussianPrior(PRIOR[cell.task]))
    posterior = confide.fit(method, module, data, plan, likelihood=likelihood, seed=repeat).posterior
    draws = posterior.sample(4000, torch.Generator().manual_seed(repeat)).double()
    return compared(found, draws.mean(0), draws.std(0))


def covered_at_once(cell: Cell, repeats: range) -> list[Outcome]:
    """The same of many repeats, by `benchmarks._coverage`."""
    likelihood, found = _model(cell)[1], [drawn(cell, repeat) for repeat in repeats]
    z, y = torch.stack([one.z for one in found]), torch.stack([one.y for one in found])
    method = NoiseAware(prior=GaussianPrior(PRIOR[cell.task]))
    seed = repeats.start + round(1000 * cell.epsilon)
    belief, _ = beliefs(method, likelihood, z, y, STEPS, noise_multiplier(cell.epsilon), seed)
    deviations = belief.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    return [compared(*parts) for parts in zip(found, belief.mean, deviations, strict=True)]


def compared(found: Drawn, mean: Tensor, deviations: Tensor) -> Outcome:
    """A Gaussian belief with the truth, and its width with that of the non-private posterior."""
    errors = (found.truth - mean) / deviations
    width = float((deviations / found.deviations).mean())
    return Outcome(errors.abs() <= QUANTILE, width, float(errors.square().mean()))


def cells(quick: bool) -> list[Cell]:
    if quick:
        return [Cell(task, "uniform", 5000, 5, epsilon) for task in PRIOR for epsilon in EPSILONS]
    sizes = [(records, features) for records in (1000, 5000, 20_000) for features in (5, 20)]
    return [Cell(task, x, *size, e) for task in PRIOR for x in INPUTS for size in sizes for e in EPSILONS]


def shapes() -> list[Cell]:
    """What nothing was settled on. Truths of twists are not those that the prior expects."""
    found = [
        Cell(task, x, records, 5, e) for task in PRIOR for x in SHAPES for records in (1000, 5000) for e in EPSILONS
    ]
    found += [Cell(task, x, 300, 5, e) for task in PRIOR for x in INPUTS for e in EPSILONS]
    for twist in TWISTS:
        task = "linear" if twist in ("heteroscedastic", "student") else "logistic"
        found += [Cell(task, "uniform", 5000, 5, e, twist) for e in EPSILONS]
    return found + [Cell("linear", "uniform", 5000, 5, e, "edge") for e in EPSILONS]


def measured(cell: Cell, start: int, repeats: int, boundary: bool) -> dict[str, Any]:
    if boundary:
        outcomes = [covered(cell, repeat) for repeat in range(start, start + repeats)]
    else:
        size = max(1, AT_ONCE // (cell.records * (cell.features + 1)))
        starts = range(start, start + repeats, size)
        parts = [range(first, min(first + size, start + repeats)) for first in starts]
        outcomes = [outcome for part in parts for outcome in covered_at_once(cell, part)]
    hits = torch.stack([outcome.inside for outcome in outcomes]).double()
    return {
        **asdict(cell),
        "coverage": round(float(hits.mean()), 4),
        "error": round(float(hits.mean(1).std() / math.sqrt(repeats)), 4),
        "width": round(sorted(outcome.width for outcome in outcomes)[repeats // 2], 3),
        "squared_error": round(sum(outcome.squared_error for outcome in outcomes) / repeats, 3),
        "repeats": repeats,
        "first": start,
    }


def line(found: dict[str, Any]) -> str:
    limited = (found["inputs"], found["records"], found["features"]) == ("uniform", 5000, 5) and not found["twist"]
    low, high = COVERAGE_LIMITS
    remarks = [] if low <= found["coverage"] <= high else ["COVERAGE"]
    remarks += ["WIDTH"] if limited and found["width"] > WIDTH_LIMITS[found["epsilon"]] else []
    name = f"{found['task']:9}{found['inputs']:11}{found['twist']:16}{found['records']:6}{found['features']:4}"
    held = f"coverage {found['coverage']:.3f} +- {found['error']:.3f}   width {found['width']:6.2f}"
    return f"{name}{found['epsilon']:6}   {held}   {' '.join(remarks)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells, 10 repeats")
    parser.add_argument("--shapes", action="store_true", help="inputs, errors and truths of other shapes")
    parser.add_argument("--boundary", action="store_true", help="through the boundary itself")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="seed of the first repeat")
    parser.add_argument("--only", default="", help="words that a line must hold, such as narrow")
    parser.add_argument("--json", type=Path, default=None, help="a file to which every line is added")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, repeats = time.process_time(), options.repeats or (10 if options.quick else 50)
    for cell in shapes() if options.shapes else cells(options.quick):
        words = [str(value) for value in asdict(cell).values()]
        if not all(word in words for word in options.only.split()):
            continue
        found = measured(cell, options.first, repeats, options.boundary)
        print(line(found), flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print(f"{time.process_time() - started:.0f} s of processor time")


if __name__ == "__main__":
    main()
