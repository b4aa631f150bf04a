"""Posteriors of the six models of benchmarks/_programs.py by importance sampling, written without any program.

Densities are written out by hand, over the real line, for many parameter vectors at once. Draws of a multivariate t
about the mode are weighted by the posterior; with tens of thousands of effective draws their quantiles are exact for
the purposes of a test, and nothing of confide's samplers, priors or transforms is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta, HalfNormal, Normal, StudentT

from benchmarks._programs import GROUPS, example

DRAWS, FREEDOM = 60_000, 5.0


def _half(scale: float, u: Tensor) -> Tensor:
    """Log density of log s for a half normal s."""
    return HalfNormal(scale).log_prob(u.exp()) + u


def _line(u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    prior = Normal(0.0, 1.0).log_prob(u[:, :3]).sum(1)
    return prior, u[:, :2] @ x.T + u[:, 2:3]


def logistic(u: Tensor, x: Any, y: Tensor) -> Tensor:
    prior, line = _line(u, x)
    return prior + (F.logsigmoid(line) * y + F.logsigmoid(-line) * (1 - y)).sum(1)


def poisson(u: Tensor, x: Any, y: Tensor) -> Tensor:
    prior, line = _line(u, x)
    return prior + (y * line - line.exp()).sum(1)


def robust(u: Tensor, x: Any, y: Tensor) -> Tensor:
    prior, line = _line(u, x)
    return prior + _half(1.0, u[:, 3]) + StudentT(4.0, line, u[:, 3:4].exp()).log_prob(y).sum(1)


def ordinal(u: Tensor, x: Any, y: Tensor) -> Tensor:
    slope, first, gaps = u[:, :2], u[:, 2:3], u[:, 3:]
    prior = Normal(0.0, 1.0).log_prob(slope).sum(1) + Normal(-1.0, 1.0).log_prob(first[:, 0]) + _half(1.5, gaps).sum(1)
    cuts = torch.cat([first, first + gaps.exp().cumsum(1)], 1)
    below = torch.sigmoid(cuts[:, :, None] - (slope @ x.T)[:, None, :])  # (draws, cuts, records)
    ends = torch.cat([torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], 1)
    chosen = torch.diff(ends, dim=1).gather(1, y.long().expand(len(u), 1, -1))[:, 0]
    return prior + chosen.clamp(min=1e-300).log().sum(1)


def mixture(u: Tensor, x: Any, y: Tensor) -> Tensor:
    share, centre, apart, width = u[:, 0].sigmoid(), u[:, 1], u[:, 2].exp(), u[:, 3].exp()
    prior = Beta(2.0, 2.0).log_prob(share) + share.log() + (1 - share).log() + Normal(0.0, 2.0).log_prob(centre)
    prior = prior + _half(4.0, u[:, 2]) + _half(1.0, u[:, 3])
    low = (1 - share).log()[:, None] + Normal(centre[:, None], width[:, None]).log_prob(y)
    high = share.log()[:, None] + Normal((centre + apart)[:, None], width[:, None]).log_prob(y)
    return prior + torch.logaddexp(low, high).sum(1)


def groups(u: Tensor, x: Any, y: Tensor) -> Tensor:
    mean, spread, effect = u[:, :1], u[:, 1:2].exp(), u[:, 2:]
    prior = Normal(0.0, 1.0).log_prob(mean[:, 0]) + _half(1.0, u[:, 1]) + Normal(mean, spread).log_prob(effect).sum(1)
    return prior + Normal(effect[:, x["group"]], 0.5).log_prob(y).sum(1)


Parts = dict[str, tuple[slice, Callable[[Tensor], Tensor]]]


def _same(u: Tensor) -> Tensor:
    return u


_LINE: Parts = {"slope": (slice(0, 2), _same), "shift": (slice(2, 3), _same)}
MODELS: dict[str, tuple[Callable[[Tensor, Any, Tensor], Tensor], Parts, list[float]]] = {
    "logistic": (logistic, _LINE, [0.0] * 3),
    "poisson": (poisson, _LINE, [0.0] * 3),
    "robust": (robust, {**_LINE, "scale": (slice(3, 4), torch.exp)}, [0.0] * 4),
    "ordinal": (
        ordinal,
        {"slope": (slice(0, 2), _same), "first": (slice(2, 3), _same), "gap": (slice(3, 5), torch.exp)},
        [0.0, 0.0, -1.0, 0.0, 0.0],
    ),
    "mixture": (
        mixture,
        {
            "share": (slice(0, 1), torch.sigmoid),
            "centre": (slice(1, 2), _same),
            "apart": (slice(2, 3), torch.exp),
            "width": (slice(3, 4), torch.exp),
        },
        [0.0, -1.5, 1.1, -0.4],
    ),
    "groups": (
        groups,
        {"mean": (slice(0, 1), _same), "spread": (slice(1, 2), torch.exp), "effect": (slice(2, 2 + GROUPS), _same)},
        [0.0] * (2 + GROUPS),
    ),
}
"""Log density, where each parameter stands with its map from the real line, and where to look for the mode from."""


@dataclass(frozen=True)
class Exact:
    """Weighted draws by name, and how many even ones they are worth."""

    draws: dict[str, Tensor]
    weights: Tensor
    effective: float

    def quantiles(self, name: str, levels: Tensor) -> Tensor:
        """(levels, numbers of the parameter)."""
        found = []
        for column in self.draws[name].T:
            order = column.argsort()
            place = torch.searchsorted(self.weights[order].cumsum(0), levels).clamp(max=len(order) - 1)
            found.append(column[order][place])
        return torch.stack(found, 1)


def exact(name: str) -> Exact:
    x, y = example(name)
    density, parts, start = MODELS[name]
    mode = torch.tensor(start, dtype=torch.float64, requires_grad=True)

    def energy(u: Tensor) -> Tensor:
        return -density(u[None], x, y)[0]

    search = torch.optim.LBFGS([mode], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        found = energy(mode)
        found.backward()
        return found

    search.step(closure)  # type: ignore[arg-type]
    centre = mode.detach()
    curvature = torch.autograd.functional.hessian(energy, centre)
    root = torch.linalg.cholesky(torch.linalg.inv(curvature) * 1.3)  # a little wider than the mode says
    generator = torch.Generator().manual_seed(0)
    size = len(centre)
    noise = torch.randn(DRAWS, size, generator=generator, dtype=torch.float64)
    chi = torch.randn(DRAWS, int(FREEDOM), generator=generator, dtype=torch.float64).square().sum(1, keepdim=True)
    standard = noise / (chi / FREEDOM).sqrt()
    u = centre + standard @ root.T
    proposed = -(FREEDOM + size) / 2 * torch.log1p(standard.square().sum(1) / FREEDOM)
    log_weights = torch.cat([density(some, x, y) for some in u.split(5000)]) - proposed
    weights = log_weights.softmax(0)
    draws = {key: shown(u[:, where]) for key, (where, shown) in parts.items()}
    return Exact(draws, weights, float(1 / weights.square().sum()))
