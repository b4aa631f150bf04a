"""Do 90 % intervals of a noise-aware posterior hold the truth in 90 % of the cases, and how much wider are they?

    python -m benchmarks.coverage             50 repeats of every cell, some minutes
    python -m benchmarks.coverage --quick     10 repeats of the cells with a limit of width

Truths are drawn from the prior, records from the model, releases are made by the boundary at the stated epsilon
(delta = 1e-5). Width: of the intervals, over those of the non-private posterior of the same records; its limits hold at
5000 records with 5 even features. The protocol is in docs/protocols.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import confide
from confide.data.schema import Schema
from confide.methods.noise_aware import NoiseAware
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Gaussian, Likelihood
from confide.models.priors import GaussianPrior
from confide.sources.private_data import PrivateData

NOISE, DELTA, STEPS = 0.2, 1e-5, 10
PRIOR = {"linear": 0.3, "logistic": 1.0}
EPSILONS = (0.1, 0.3, 1.0, 3.0)
WIDTH_LIMITS = dict(zip(EPSILONS, (10.0, 2.2, 1.2, 1.05), strict=True))
COVERAGE_LIMITS = (0.86, 0.97)


@dataclass(frozen=True)
class Cell:
    """One line of the table; inputs: uniform in [-1, 1], narrow in [.1, .7], or correlated (.85 each pair)."""

    task: str
    inputs: str
    records: int
    features: int
    epsilon: float


@dataclass(frozen=True)
class Outcome:
    """inside: which parameters their interval held; width: mean over parameters, over the non-private one."""

    inside: Tensor
    width: float
    squared_error: float


def drawn_inputs(cell: Cell, generator: torch.Generator) -> Tensor:
    even = torch.rand(cell.records, cell.features, generator=generator, dtype=torch.float64)
    if cell.inputs == "uniform":
        return 2 * even - 1
    if cell.inputs == "narrow":
        return 0.1 + 0.6 * even
    common = torch.rand(cell.records, 1, generator=generator, dtype=torch.float64)
    return 0.7 * (2 * common - 1) + 0.3 * (2 * even - 1)


@cache
def _plan(cell: Cell, **options: Any) -> confide.Plan:
    settings: dict[str, Any] = {"steps": STEPS, "sampling": "full-batch", **options}
    return confide.plan(epsilon=cell.epsilon, delta=DELTA, records=cell.records, **settings)


def _model(cell: Cell) -> tuple[nn.Module, Likelihood, int | None]:
    if cell.task == "linear":
        return networks.linear(cell.features), Gaussian(NOISE), None
    return networks.logistic(cell.features), Bernoulli(), 2


def covered(cell: Cell, repeat: int, **options: Any) -> Outcome:
    """One repeat: draw, fit, compare. Options are those of the plan."""
    generator = torch.Generator().manual_seed(7919 * repeat + 17)
    x, scale = drawn_inputs(cell, generator), PRIOR[cell.task]
    truth = scale * torch.randn(cell.features + 1, generator=generator, dtype=torch.float64)
    z = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    outputs = z @ truth
    module, likelihood, classes = _model(cell)
    if cell.task == "linear":
        y = outputs + NOISE * torch.randn(cell.records, generator=generator, dtype=torch.float64)
        weight = torch.full_like(outputs, NOISE**-2)
    else:
        p = outputs.sigmoid()
        y = (torch.rand(cell.records, generator=generator, dtype=torch.float64) < p).double()
        weight = p * (1 - p)
    own = torch.linalg.inv(z.mT @ (z * weight[:, None]) + torch.eye(z.shape[1]) / scale**2).diagonal().sqrt()
    schema = Schema(records=cell.records, classes=classes)
    data = PrivateData(x, y if classes is None else y.long(), schema=schema, seed=repeat)
    method = NoiseAware(prior=GaussianPrior(scale))
    plan = _plan(cell, **options)
    draws = confide.fit(method, module, data, plan, likelihood=likelihood, seed=repeat).posterior.sample(
        4000, torch.Generator().manual_seed(repeat)
    )
    low, high = torch.quantile(draws.double(), torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
    width = (high - low) / (2 * 1.6449 * own)
    errors = (truth - draws.double().mean(0)) / draws.double().std(0)
    return Outcome((low <= truth) & (truth <= high), float(width.mean()), float(errors.square().mean()))


def cells(quick: bool) -> list[Cell]:
    found = [Cell(task, "uniform", 5000, 5, epsilon) for task in PRIOR for epsilon in EPSILONS]
    if quick:
        return found
    shapes = [("narrow", 5000, 5), ("correlated", 5000, 5), ("uniform", 1000, 5), ("narrow", 1000, 5)]
    shapes += [("uniform", 20_000, 20), ("correlated", 20_000, 20), ("narrow", 20_000, 5)]
    return found + [Cell(task, *shape, epsilon) for task in PRIOR for shape in shapes for epsilon in EPSILONS]


def line(cell: Cell, repeats: int) -> str:
    outcomes = [covered(cell, repeat) for repeat in range(repeats)]
    share = float(torch.stack([outcome.inside for outcome in outcomes]).double().mean())
    width = sorted(outcome.width for outcome in outcomes)[repeats // 2]
    limited = (cell.inputs, cell.records, cell.features) == ("uniform", 5000, 5) and cell.task == "linear"
    low, high = COVERAGE_LIMITS
    remarks = [] if low <= share <= high else ["COVERAGE"]
    remarks += ["WIDTH"] if limited and width > WIDTH_LIMITS[cell.epsilon] else []
    name = f"{cell.task:9}{cell.inputs:11}{cell.records:7}{cell.features:4}{cell.epsilon:6}"
    return f"{name}   coverage {share:.3f}   width {width:6.2f}   {' '.join(remarks)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells, 10 repeats")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--only", default="", help="a word that a line must hold, such as narrow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    for cell in cells(options.quick):
        if options.only in f"{cell.task} {cell.inputs} {cell.records} {cell.features}":
            print(line(cell, options.repeats or (10 if options.quick else 50)), flush=True)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
