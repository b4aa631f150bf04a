"""Variants of holes that were closed, each through the door and with the bound in sight.

Statistics that are not constant on a lone record; wrapped sources that are accepted, under targets and after several
fits; records whose parts cancel, once without noise and once under the same noise with and without the record: there
releases may differ by C, and a record that washes noise out makes them differ by more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import confide
from confide import methods
from confide.data.schema import Schema
from confide.mechanism.gaussian import SampledGaussian
from confide.models.likelihoods import Gaussian
from confide.privacy.accountants import sound_epsilon
from confide.sources.adaptive_clip import AdaptiveClip
from confide.sources.base import Source
from confide.sources.hold_out import HoldOut
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery
from confide.sources.replay import Recorder
from confide.sources.together import PaidTogether

pytestmark = pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
CLIP = 1.0
ROUNDING = 1 + 1e-5


def released(query: Query, x: Tensor, y: Tensor, noise: float = 0.0, secure: bool = False) -> Tensor:
    """One release of all records; the noise is the same every time."""
    data = PrivateData(x, y, schema=Schema(records=len(x)), seed=3)
    mechanism = SampledGaussian(noise, CLIP, 1.0, len(x), "full-batch", private=noise > 0, secure=secure)
    return data.answer(query, mechanism).sum


# statistics -----------------------------------------------------------------------------------------------------------

Function = Callable[[Tensor, Tensor], Tensor]
STATISTICS: dict[str, Function] = {
    "half centred": lambda x, y: x - x.mean(0) / 2,
    "a little scaled": lambda x, y: x / (1 + x.std(0, unbiased=False)),
    "beside ranks": lambda x, y: x + x.argsort(0).argsort(0) / 7,
    "rolled": lambda x, y: x + x.roll(1, 0),
    "cumulated": lambda x, y: x.cumsum(0),
    "attended": lambda x, y: x + (x @ x.T).softmax(1) @ x,
    "whitened": lambda x, y: x + x @ (x.T @ x / len(x)),
    "largest": lambda x, y: x / x.abs().amax(),
    "by class": lambda x, y: x + torch.stack([x[y == label].mean(0) for label in y.unique()]).sum(0),
    "shared out": lambda x, y: x.clone().div_(len(x)),
    "above the median": lambda x, y: torch.where(x >= x.median(0).values, x, -x),
    "in place": lambda x, y: x.add_(x.sum(0)),
}


def a_table(records: int = 40) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(records, 3, dtype=torch.float64)
    x[-1] = torch.tensor([1e9, 0.0, -3.0])
    return x, torch.arange(records) % 2


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_of_one_record(name: str) -> None:
    """What comes back is the sum of what lone records answer, and one record moves it by at most the clip."""
    x, y = a_table()
    query = StatisticQuery(STATISTICS[name], 3)
    whole, fewer = released(query, x, y), released(query, x[:-1], y[:-1])
    assert (whole - fewer).norm() <= ROUNDING * CLIP
    alone = torch.cat([STATISTICS[name](x[[record]].clone(), y[[record]]) for record in range(len(x))])
    alone /= alone.norm(dim=1, keepdim=True).clamp(min=CLIP)
    assert torch.allclose(whole.double(), alone.sum(0), rtol=1e-4, atol=1e-4)
    assert whole.norm() > 1e-3
    together = STATISTICS[name](x.clone(), y)
    assert not torch.allclose(together / together.norm(dim=1, keepdim=True).clamp(min=CLIP), alone)


# wrapped sources ------------------------------------------------------------------------------------------------------

X = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ACCEPTED: dict[str, Callable[[Source], Source]] = {
    "counts": lambda source: AdaptiveClip(source, count_noise=20.0),
    "counts, recorded": lambda source: Recorder(AdaptiveClip(source, count_noise=20.0)),
    "recorded, counts": lambda source: AdaptiveClip(Recorder(source), count_noise=20.0),
    "counts beside a hold-out": lambda source: HoldOut(AdaptiveClip(source, count_noise=20.0), X[:9], Y[:9]),
    "counts, together": lambda source: PaidTogether(AdaptiveClip(source, count_noise=20.0)),
    "all of them": lambda source: PaidTogether(HoldOut(AdaptiveClip(Recorder(source), count_noise=20.0), X[:9], Y[:9])),
}
SAMPLINGS: list[dict[str, Any]] = [
    {"sampling": "poisson"},
    {"sampling": "poisson", "adjacency": "replace-one"},
    {"sampling": "fixed-size", "adjacency": "replace-one"},
]


def fitted_twice(source: Source, plan: confide.Plan) -> Sequence[confide.Run]:
    return [confide.fit(methods.SGD(), nn.Linear(3, 2), source, plan) for _ in range(2)]


CASES = [
    pytest.param(name, options, marks=[] if number == 0 or name == "all of them" else [pytest.mark.slow])
    for name in ACCEPTED
    for number, options in enumerate(SAMPLINGS)
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_accepted_wrappers_state_what_the_ledger_charged(name: str, options: dict[str, Any]) -> None:
    """Under a target, twice on one source: both runs keep to the target, and together they are what was charged."""
    data = PrivateData(X, Y, schema=Schema(classes=2, records=len(X)), name="d")
    source = ACCEPTED[name](data)
    asked = confide.plan(epsilon=1.0, delta=1e-5, records=len(X), batch=30, steps=4, **options)
    first, second = fitted_twice(source, asked)
    adjacency = options.get("adjacency", "add-remove")
    assert first.privacy.epsilon() <= 1.0 + 1e-9
    assert second.privacy.epsilon() <= 1.0 + 1e-9
    charged = sound_epsilon(data.ledger.events("d"), 1e-5, adjacency)
    assert charged == pytest.approx(sound_epsilon([*first.privacy.events, *second.privacy.events], 1e-5, adjacency))
    assert charged > first.privacy.epsilon()


# parts that cancel ----------------------------------------------------------------------------------------------------


class Rating(nn.Module):
    """Players by their tables: the difference of two ratings, where one may play himself."""

    def __init__(self, ways: int = 1) -> None:
        super().__init__()
        self.table, self.ways = nn.Embedding(20, ways), ways

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x)
        return (found[:, 0] - found[:, 1]).sum(1, keepdim=True)


class Siamese(nn.Module):
    """One layer on two pictures."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(x[:, :1]).flatten(2).mean(2), self.layer(x[:, 1:]).flatten(2).mean(2)
        said: Tensor = self.head(first - second)
        return said


def ratings(last: float, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(20, (30, 2)), torch.randn(30, dtype=dtype)
    return (
        Rating(2).to(dtype),
        torch.cat([x, torch.tensor([[7, 7]])]),
        torch.cat([y, torch.tensor([last], dtype=dtype)]),
    )


def pictures(last: float, dtype: torch.dtype, layer: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(20, 2, 8, 8, dtype=dtype), torch.randn(21, dtype=dtype)
    return Siamese(layer()).to(dtype), torch.cat([x, torch.full((1, 2, 8, 8), last, dtype=dtype)]), y


CANCELLING: dict[str, Callable[[float, torch.dtype], tuple[nn.Module, Tensor, Tensor]]] = {
    "rating": ratings,
    "siamese": lambda last, dtype: pictures(last, dtype, lambda: nn.Conv2d(1, 4, 3)),
    "siamese, padded": lambda last, dtype: pictures(last, dtype, lambda: nn.Conv2d(1, 4, 3, padding=1, stride=2)),
    "siamese, transposed": lambda last, dtype: pictures(last, dtype, lambda: nn.ConvTranspose2d(1, 4, 2)),
}


@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("last", [3e9, 1e20, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_that_cancel_without_and_under_noise(name: str, last: float, dtype: torch.dtype) -> None:
    module, x, y = CANCELLING[name](last, dtype)
    query = GradientQuery(module, Gaussian(1.0).loss)
    assert (released(query, x, y) - released(query, x[:-1], y[:-1])).norm() <= ROUNDING * CLIP
    # full batches of another size draw the same noise from the same seed
    whole, fewer = (released(query, *each, noise=5.0) for each in ((x, y), (x[:-1], y[:-1])))
    assert (whole - fewer).norm() <= ROUNDING * CLIP
    assert (whole - released(query, x, y)).std() > 2.0  # and it is there


@pytest.mark.parametrize("name", ["rating", "siamese"])
def test_parts_that_cancel_in_secure_mode(name: str) -> None:
    """The lattice is as fine as the noise is large: it may add a step of its own to every coordinate."""
    module, x, y = CANCELLING[name](3e9, torch.float32)
    query = GradientQuery(module, Gaussian(1.0).loss)
    whole, fewer = (released(query, *each, noise=5.0, secure=True) for each in ((x, y), (x[:-1], y[:-1])))
    assert (whole - fewer).norm() <= 1.01 * CLIP
