"""Six models as programs, with made-up records and truths drawn from their priors.

Their exact posteriors stand in tests/statistical/oracle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, HalfNormal, Normal, Poisson, StudentT

import confide
from confide.models.programs import Program

RECORDS, GROUPS = 90, 6
Truth = dict[str, Tensor]


def linear(p: Any, x: Tensor) -> Tensor:
    found: Tensor = p["slope"] @ x + p["shift"]
    return found


LINE: dict[str, Any] = {"slope": Normal(0.0, 1.0).expand([2]), "shift": Normal(0.0, 1.0)}


def logistic() -> Program:
    return confide.models.program(lambda p, x, y: Bernoulli(logits=linear(p, x)).log_prob(y), LINE)


def poisson() -> Program:
    return confide.models.program(lambda p, x, y: Poisson(torch.exp(linear(p, x))).log_prob(y), LINE)


def robust() -> Program:
    return confide.models.program(
        lambda p, x, y: StudentT(4.0, linear(p, x), p["scale"]).log_prob(y), {**LINE, "scale": HalfNormal(1.0)}
    )


def _ordinal(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Four classes: a logistic variable between cut points that lie a positive gap apart."""
    cuts = p["first"] + torch.cat([p["gap"].new_zeros(1), p["gap"].cumsum(0)])
    below = torch.sigmoid(cuts - p["slope"] @ x)
    ends = below.new_tensor([0.0]), below.new_tensor([1.0])
    probabilities = torch.diff(torch.cat([ends[0], below, ends[1]])).clamp(min=1e-30)
    return probabilities.log().gather(0, y.long().reshape(1)).squeeze(0)


def ordinal() -> Program:
    priors = {"slope": LINE["slope"], "first": Normal(-1.0, 1.0), "gap": HalfNormal(1.5).expand([2])}
    return confide.models.program(_ordinal, priors, start={"gap": [1.0, 1.0]})


def _mixture(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """The component is summed out; the second centre is above the first."""
    centres = torch.stack([p["centre"], p["centre"] + p["apart"]])
    shares = torch.stack([1 - p["share"], p["share"]])
    return torch.logsumexp(shares.log() + Normal(centres, p["width"]).log_prob(y), 0)


def mixture() -> Program:
    priors: dict[str, Any] = {
        "share": torch.distributions.Beta(2.0, 2.0),
        "centre": Normal(0.0, 2.0),
        "apart": HalfNormal(4.0),
        "width": HalfNormal(1.0),
    }
    return confide.models.program(_mixture, priors, start={"centre": -1.5, "apart": 3.0, "width": 0.7})


def groups() -> Program:
    priors: dict[str, Any] = {
        "mean": Normal(0.0, 1.0),
        "spread": HalfNormal(1.0),
        "effect": lambda p: Normal(p["mean"], p["spread"]).expand([GROUPS]),
    }
    return confide.models.program(lambda p, x, y: Normal(p["effect"][x["group"]], 0.5).log_prob(y), priors)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "logistic": logistic, "poisson": poisson, "robust": robust, "ordinal": ordinal, "mixture": mixture, "groups": groups
}  # fmt: skip
TRUTHS: dict[str, dict[str, Any]] = {
    "logistic": {"slope": [1.0, -0.6], "shift": 0.3},
    "poisson": {"slope": [0.5, -0.3], "shift": 0.2},
    "robust": {"slope": [0.7, -0.4], "shift": 0.2, "scale": 0.5},
    "ordinal": {"slope": [1.0, -0.5], "first": -1.0, "gap": [1.2, 0.9]},
    "mixture": {"share": 0.4, "centre": -1.5, "apart": 3.0, "width": 0.6},
    "groups": {"mean": 0.2, "spread": 0.8, "effect": [1.0, -0.7, 0.4, 0.9, -0.5, 0.1]},
}


def records(name: str, truth: Truth, count: int, generator: torch.Generator) -> tuple[Any, Tensor]:
    """x and y of so many records, drawn from the model at these parameters."""

    def normal() -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    x = torch.stack([normal(), normal()], 1).clamp(-2, 2)
    if name == "groups":
        group = torch.arange(count) % GROUPS
        return {"group": group}, truth["effect"][group] + 0.5 * normal()
    if name == "mixture":
        return x, truth["centre"] + truth["apart"] * (uniform() < truth["share"]) + truth["width"] * normal()
    line = x @ truth["slope"] + truth.get("shift", torch.zeros(()))
    if name == "logistic":
        return x, (uniform() < torch.sigmoid(line)).double()
    if name == "poisson":
        return x, torch.poisson(line.exp(), generator)
    if name == "robust":
        chi = torch.stack([normal() for _ in range(4)]).square().sum(0)
        return x, line + truth["scale"] * normal() / (chi / 4).sqrt()
    cuts = truth["first"] + torch.cat([torch.zeros(1), truth["gap"].cumsum(0)])
    value = line + torch.logit(uniform().clamp(1e-9, 1 - 1e-9))
    return x, (value[:, None] > cuts).sum(1).double()


def drawn_truth(name: str, generator: torch.Generator) -> Truth:
    """Parameters from the priors above."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def half(scale: float, *size: int) -> Tensor:
        return scale * normal(*size).abs()

    if name == "ordinal":
        return {"slope": normal(2), "first": normal() - 1, "gap": half(1.5, 2)}
    if name == "mixture":
        shares = torch.rand(3, generator=generator, dtype=torch.float64).sort().values  # the middle one is Beta(2, 2)
        return {"share": shares[1], "centre": 2 * normal(), "apart": half(4.0), "width": half(1.0)}
    if name == "groups":
        mean, spread = normal(), half(1.0)
        return {"mean": mean, "spread": spread, "effect": mean + spread * normal(GROUPS)}
    line = {"slope": normal(2), "shift": normal()}
    return {**line, "scale": half(1.0)} if name == "robust" else line


def example(name: str) -> tuple[Any, Tensor]:
    """The records of the reference."""
    truth = {key: torch.tensor(value, dtype=torch.float64) for key, value in TRUTHS[name].items()}
    return records(name, truth, RECORDS, torch.Generator().manual_seed(11))
