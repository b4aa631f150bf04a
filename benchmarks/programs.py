"""Do 90 % intervals of programs hold the truth at epsilon 1 as often as those of built-in models?

    python -m benchmarks.programs [--quick] [--only NAME ...]

Truths are drawn from the priors, records from the models; `laplace`, and SGLD and SGHMC with their default steps, run
under the same plan (2000 records, batches of 200, 200 steps, clip 1, delta 1e-5). Logistic and Poisson regression are
there a second time as built-in networks with the same prior. Printed are the share of parameters whose interval holds
the truth, with its standard error, the median width of the intervals in deviations of the prior, the share of runs
whose facts begin with a warning, and the coverage of those without one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import confide
from benchmarks._programs import PROGRAMS, Truth, drawn_truth, records
from confide.methods import SGHMC, SGLD, LaplaceApproximation
from confide.methods.base import Method
from confide.models import networks
from confide.models.likelihoods import Bernoulli, Poisson
from confide.models.priors import GaussianPrior

RECORDS, BATCH, STEPS, EPSILON, DELTA = 2000, 200, 200, 1.0, 1e-5
METHODS: dict[str, Callable[[], Method]] = {
    "laplace": lambda: LaplaceApproximation(prior=GaussianPrior(1.0)),
    "sgld": lambda: SGLD(prior=GaussianPrior(1.0)),
    "sghmc": lambda: SGHMC(prior=GaussianPrior(1.0)),
}
Fitted = Callable[..., tuple[dict[str, Tensor], bool]]
BUILT_IN: dict[str, Any] = {"logistic": Bernoulli, "poisson": Poisson}


def plan() -> confide.Plan:
    return confide.plan(records=RECORDS, batch=BATCH, steps=STEPS, clip=1.0, epsilon=EPSILON, delta=DELTA)


def draws_of_program(name: str, x: Any, y: Tensor, method: Method) -> tuple[dict[str, Tensor], bool]:
    """By name, and whether the run warns of itself."""
    data = confide.PrivateData(x, y, schema=confide.Schema(records=RECORDS))
    run = confide.fit(method, PROGRAMS[name]().double(), data, plan())
    found = {key: value.reshape(len(value), -1) for key, value in run.posterior.named_draws().items()}  # type: ignore[attr-defined]
    return found, "warning" in run.posterior.facts


def draws_of_network(name: str, x: Any, y: Tensor, method: Method) -> tuple[dict[str, Tensor], bool]:
    """The same regression as a built-in network."""
    classes = 2 if name == "logistic" else None
    data = confide.PrivateData(x, y, schema=confide.Schema(records=RECORDS, classes=classes))
    module = networks.linear(2).double()
    run = confide.fit(method, module, data, plan(), likelihood=BUILT_IN[name]())
    flat = run.posterior.weighted_draws()[0]
    return {"slope": flat[:, :2], "shift": flat[:, 2:]}, "warning" in run.posterior.facts


def inside(found: dict[str, Tensor], truth: Truth) -> tuple[list[bool], list[float]]:
    """For every number: whether its interval holds the truth, and how wide that is."""
    held: list[bool] = []
    widths: list[float] = []
    for name, draws in found.items():
        low, high = torch.quantile(draws.double(), torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
        wanted = truth[name].reshape(-1)
        held += ((low <= wanted) & (wanted <= high)).tolist()
        widths += (high - low).tolist()
    return held, widths


@dataclass(frozen=True)
class Covered:
    """Of some repeats: share of truths that are held, its error, the width, share that warned, and held without."""

    share: float
    error: float
    width: float
    warned: float
    unwarned: float


def coverage(name: str, method: str, repeats: int, fitted: Fitted) -> Covered:
    held: list[tuple[bool, bool]] = []
    widths: list[float] = []
    for seed in range(repeats):
        generator = torch.Generator().manual_seed(seed)
        truth = drawn_truth(name, generator)
        x, y = records(name, truth, RECORDS, generator)
        found, warned = fitted(name, x, y, METHODS[method]())
        some = inside(found, truth)
        held += [(one, warned) for one in some[0]]
        widths += some[1]
    share = sum(one for one, _ in held) / len(held)
    quiet = [one for one, warned in held if not warned]
    return Covered(
        share,
        (share * (1 - share) / len(held)) ** 0.5,
        float(torch.tensor(widths).median()),
        1 - len(quiet) / len(held),
        sum(quiet) / len(quiet) if quiet else float("nan"),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="5 repeats of laplace and SGLD instead of 40 of all")
    arguments.add_argument("--methods", nargs="+", choices=list(METHODS), default=None, metavar="NAME")
    arguments.add_argument("--repeats", type=int, default=None, help="in place of 40, or 5")
    arguments.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), metavar="NAME")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    repeats = options.repeats or (5 if options.quick else 40)
    print(f"{repeats} repeats, epsilon {EPSILON}")
    print(f"{'model':12}{'as':10}{'method':8}{'coverage':>10}{'':9}{'width':>8}{'warned':>8}{'without':>9}")
    for name in options.only:
        doors: dict[str, Fitted] = {"program": draws_of_program}
        if name in BUILT_IN:
            doors["network"] = draws_of_network
        for method in options.methods or list(METHODS)[: 2 if options.quick else None]:
            for door, fitted in doors.items():
                found = coverage(name, method, repeats, fitted)
                start = f"{name:12}{door:10}{method:8}{found.share:10.3f} +- {found.error:.3f}"
                print(f"{start}{found.width:8.2f}{found.warned:8.2f}{found.unwarned:9.3f}", flush=True)


if __name__ == "__main__":
    main()
