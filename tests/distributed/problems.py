"""The small problem that ranks and the one process beside them share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import confide
from confide.mechanism.gaussian import SampledGaussian
from confide.methods.base import Method
from confide.models import networks
from confide.running.fit import default_likelihood
from confide.sources.queries import GradientQuery, StatisticQuery

RECORDS, FEATURES = 2000, 20
SCHEMA = confide.Schema(records=RECORDS, classes=3)
OFF = SampledGaussian(0.0, 0.5, 1.0, RECORDS, "full-batch", private=False)
WIDE, ROUNDS = 100_000, 4
ZEROS = StatisticQuery(lambda x, y: torch.zeros(len(x), WIDE, dtype=torch.float64), WIDE)
ROWS = StatisticQuery(lambda x, y: x.double(), FEATURES)
RATE, STEPS = 0.002, 1500  # two records of a thousand on average, so that every seventh batch is empty


def records(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (RECORDS,), generator=generator)


def shard(rank: int, size: int, empty: bool = False) -> slice:
    """Uneven shards; with `empty`, all but the first hold nothing."""
    cuts = [0, *(RECORDS if empty else round(RECORDS * (r / size) ** 2) for r in range(1, size)), RECORDS]
    return slice(cuts[rank], cuts[rank + 1])


def gradient(dtype: torch.dtype) -> GradientQuery:
    network = networks.mlp(FEATURES, 3, hidden=(64,), generator=torch.Generator().manual_seed(3)).to(dtype)
    return GradientQuery(network, default_likelihood(network, SCHEMA).loss)


def plan(noise: float = 4.0, steps: int = 12) -> confide.Plan:
    return confide.plan(noise_multiplier=noise, delta=1e-5, records=RECORDS, batch=200, steps=steps)


class Foreign(nn.Module):
    """One weight in two layers, a layer that is frozen, a norm with weights, and a rest of rows on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.first, self.again = (nn.Linear(FEATURES, 7, bias=False) for _ in range(2))
        self.again.weight = self.first.weight
        self.back, self.norm, self.head = nn.Linear(7, FEATURES), nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(x) + self.back(torch.tanh(self.first(x))))
        return self.head(hidden + self.back(self.again(hidden)))  # type: ignore[no-any-return]


SCRIPT: dict[str, Any] = {}  # what a user's script has among its globals: the spread network itself


class Reaching(nn.Linear):
    """A network whose forward looks at a global of its script, as one that was written in a notebook may."""

    def forward(self, x: Tensor) -> Tensor:
        found = SCRIPT.get("network", self)
        return super().forward(x) if found.training or not found.training else x


def foreign(name: str) -> Any:
    """The same start in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "reaching":
            return Reaching(FEATURES, 3)
        return Foreign() if name == "tied" else networks.mlp(FEATURES, 3, hidden=(33,))


METHODS: dict[str, Method] = {
    "SGD": confide.methods.SGD(learning_rate=0.5),
    "momentum": confide.methods.SGD(learning_rate=0.05, optimiser="momentum", averaging=0.5),
    "SGLD": confide.methods.SGLD(),
    "SGHMC": confide.methods.SGHMC(),
}


def sharded_plan(method: str) -> confide.Plan:
    """Without noise for methods that bring none of their own: several ranks can be held against one process."""
    if method in ("SGLD", "SGHMC"):
        return plan()
    return confide.plan(private=False, delta=1e-5, records=RECORDS, clip=0.5, sampling="full-batch", steps=4)
