"""Seven programs that rules are developed on; those of benchmarks/_programs.py are looked at once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta, Gamma, HalfNormal, NegativeBinomial, Normal, Poisson, Weibull

import confide
from confide.models.programs import Program

SCHOOLS, SLOPES, PLACES = 5, 10, 6


class Other(NamedTuple):
    """A program, made-up inputs of so many records, and targets of all records at parameters by name."""

    program: Callable[[], Program]
    inputs: Callable[[int], Any]
    targets: Callable[[Any, Any], Any]


def _inputs(columns: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, columns, dtype=torch.float64).clamp(-2, 2)


def _zero_inflated() -> Program:
    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        counted = Poisson(torch.exp(p["slope"] * x[0] + p["level"])).log_prob(y)
        never = torch.where(y == 0, 0.0, -torch.inf)
        return torch.logaddexp(p["idle"].log() + never, torch.log1p(-p["idle"]) + counted)

    return confide.models.program(said, {"slope": Normal(0.0, 0.5), "level": Normal(1.0, 0.7), "idle": Beta(2.0, 2.0)})


def _zero_inflated_targets(p: Any, x: Tensor) -> Any:
    return torch.poisson(torch.exp(p["slope"] * x[:, 0] + p["level"])) * (torch.rand(len(x)) > p["idle"])


def _negative_binomial() -> Program:
    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        return NegativeBinomial(p["shape"], logits=p["slope"] * x[0] + p["level"] - p["shape"].log()).log_prob(y)

    return confide.models.program(
        said, {"slope": Normal(0.0, 0.5), "level": Normal(1.0, 0.7), "shape": Gamma(3.0, 1.0)}
    )


def _negative_binomial_targets(p: Any, x: Tensor) -> Any:
    mean = torch.exp(p["slope"] * x[:, 0] + p["level"])
    return torch.poisson(mean * Gamma(p["shape"], p["shape"]).sample((len(x),)))


def _own_scales() -> Program:
    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        return Normal(p["slope"] @ x, torch.exp(p["level"] + p["tilt"] * x[0])).log_prob(y)

    return confide.models.program(
        said, {"slope": Normal(0.0, 1.0).expand([2]), "level": Normal(0.0, 0.7), "tilt": Normal(0.0, 0.5)}
    )


def _own_scales_targets(p: Any, x: Tensor) -> Any:
    return x @ p["slope"] + torch.exp(p["level"] + p["tilt"] * x[:, 0]) * torch.randn(len(x))


def _weibull() -> Program:
    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        return Weibull(torch.exp(p["slope"] @ x + p["level"]), p["shape"]).log_prob(y)

    return confide.models.program(
        said, {"slope": Normal(0.0, 0.5).expand([2]), "level": Normal(0.0, 1.0), "shape": Gamma(4.0, 3.0)}
    )


def _weibull_targets(p: Any, x: Tensor) -> Any:
    waited = -torch.log(torch.rand(len(x), dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    return torch.exp(x @ p["slope"] + p["level"]) * waited ** (1 / p["shape"])


def _ten_slopes() -> Program:
    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        return Normal(p["slope"] @ x + p["shift"], p["noise"]).log_prob(y)

    return confide.models.program(
        said, {"slope": Normal(0.0, 1.0).expand([SLOPES]), "shift": Normal(0.0, 1.0), "noise": HalfNormal(1.0)}
    )


def _ten_slopes_targets(p: Any, x: Tensor) -> Any:
    return x @ p["slope"] + p["shift"] + p["noise"] * torch.randn(len(x))


def _schools() -> Program:
    def said(p: Any, x: Any, y: Tensor) -> Any:
        logits = p["school"][x["school"]] + p["slope"] * x["pupil"]
        return torch.distributions.Bernoulli(logits=logits).log_prob(y)

    return confide.models.program(
        said,
        {
            "common": Normal(0.0, 1.0),
            "spread": HalfNormal(1.0),
            "slope": Normal(0.0, 1.0),
            "school": lambda p: Normal(p["common"], p["spread"]).expand([SCHOOLS]),
        },
    )


def _schools_inputs(count: int) -> dict[str, Tensor]:
    return {"pupil": torch.randn(count, dtype=torch.float64), "school": torch.arange(count) % SCHOOLS}


def _schools_targets(p: Any, x: Any) -> Any:
    return torch.bernoulli(torch.sigmoid(p["school"][x["school"]] + p["slope"] * x["pupil"]))


def _change_point() -> Program:
    """A record is a series that steps up once, nobody knows when: every place is summed over."""

    def said(p: Any, x: Tensor, y: Tensor) -> Any:
        after = torch.triu(torch.ones(PLACES, PLACES, dtype=x.dtype))  # row k: the step comes before place k
        levels = p["before"] + p["rise"] * after
        return torch.logsumexp(Normal(levels, 0.5).log_prob(y).sum(1), 0) - math.log(PLACES)

    return confide.models.program(said, {"before": Normal(0.0, 1.0), "rise": HalfNormal(2.0)})


def _change_point_targets(p: Any, x: Tensor) -> Any:
    after = (torch.arange(PLACES) >= torch.randint(0, PLACES, (len(x), 1))).double()
    return p["before"] + p["rise"] * after + 0.5 * torch.randn(len(x), PLACES, dtype=torch.float64)


OTHERS: dict[str, Other] = {
    "zero_inflated": Other(_zero_inflated, _inputs(1), _zero_inflated_targets),
    "negative_binomial": Other(_negative_binomial, _inputs(1), _negative_binomial_targets),
    "own_scales": Other(_own_scales, _inputs(2), _own_scales_targets),
    "weibull": Other(_weibull, _inputs(2), _weibull_targets),
    "ten_slopes": Other(_ten_slopes, _inputs(SLOPES), _ten_slopes_targets),
    "schools": Other(_schools, _schools_inputs, _schools_targets),
    "change_point": Other(_change_point, _inputs(1), _change_point_targets),
}


def drawn_case(name: str, count: int, seed: int) -> tuple[dict[str, Tensor], Any, Tensor]:
    """A truth from the prior, and so many records of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        other = OTHERS[name]
        program = other.program().double()
        truth = program.constrained(program.prior_draw())
        x = other.inputs(count)
        return truth, x, other.targets(truth, x).double()
