"""Weights of records: they scale what was clipped, on every way through the engine, and never lift the bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.mechanism.clipping import STYLES, Style, clipped_sum, clipped_sum_of_rows
from confide.mechanism.gaussian import SampledGaussian
from confide.models.likelihoods import Categorical
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, StatisticQuery

RECORDS = 12


def own_loss(output: Any, y: Tensor) -> Tensor:
    """Not one that confide knows: it runs isolated."""
    return nn.functional.cross_entropy(output, y, reduction="none") * 1.5


class Looks(nn.Module):
    """Goes another way for every record, so that records are taken one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if float(x.sum()) > 0 else 1.0)


MODELS: dict[str, tuple[Any, Any]] = {
    "chain": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), Categorical(3).loss),
    "linear": (lambda: nn.Linear(5, 3), Categorical(3).loss),
    "layers": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), Categorical(3).loss),
    "isolated": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), own_loss),
    "one by one": (Looks, own_loss),
}


def records() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(RECORDS, 5, generator=generator, dtype=torch.float64)
    return x, torch.arange(RECORDS) % 3, torch.rand(RECORDS, generator=generator).clamp(min=0.0)


def clipped(module: nn.Module, loss: Any, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    out = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    clipped_sum(module, loss, x, y, clip=0.3, out=out, **options)
    return out


@pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", MODELS)
def test_every_way_scales_what_was_clipped(kind: str, style: Style) -> None:
    make, loss = MODELS[kind]
    torch.manual_seed(1)
    module = make().double()
    x, y, weights = records()
    alone = [clipped(module, loss, x[[i]], y[[i]], style=style) * weights[i] for i in range(RECORDS)]
    for micro_batch in (None, 5):
        together = clipped(module, loss, x, y, style=style, weights=weights, micro_batch=micro_batch)
        torch.testing.assert_close(together, torch.stack(alone).sum(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("style", ["flat", "automatic"])
def test_rows_are_scaled_after_the_clip(style: Style) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.1, 0.0], [1e200, 0.0], [torch.nan, 1.0]], dtype=torch.float64)
    weights, out = torch.tensor([0.5, 1.0, 0.25, 1.0]), torch.zeros(2, dtype=torch.float64)
    clipped_sum_of_rows(rows, clip=1.0, out=out, style=style, weights=weights)
    apart = torch.zeros(2, dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        one = torch.zeros(2, dtype=torch.float64)
        clipped_sum_of_rows(row[None], clip=1.0, out=one, style=style)
        apart += weight * one
    torch.testing.assert_close(out, apart)


def released(weights: Any, query: GradientQuery | StatisticQuery) -> Tensor:
    """The sum with next to no noise, the same noise every time: one record answers as far as the clip lets it."""
    x = torch.full((2, 3), 100.0)
    data = PrivateData(x, torch.tensor([0, 1]), schema=Schema(classes=2, records=2), seed=1, weights=weights)
    return data.answer(query, SampledGaussian(1e-9, 1.0, 1.0, 2, "full-batch")).sum


def undecided() -> nn.Module:
    module = nn.Linear(3, 2)
    nn.init.zeros_(module.weight)
    return module


QUERIES = {
    "statistic": lambda: StatisticQuery(lambda x, y: x.double() * (1 - y[:, None]), 3),
    "gradient": lambda: GradientQuery(undecided(), Categorical(2).loss),
}


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("large", [50.0, 3.4e38, 1e300, torch.inf, torch.nan, -5.0])
def test_a_hostile_weight_never_lifts_the_bound(kind: str, large: float) -> None:
    """Weights of one record are its own: whatever it says, it moves the sum by no more than C."""
    query = QUERIES[kind]()
    without, with_ = released([0.0, 0.0], query), released([large, 0.0], query)
    assert torch.linalg.vector_norm(with_ - without) <= 1.0
    if large == 50.0:  # it counts as one record, and not as fifty
        assert torch.linalg.vector_norm(with_) > 0.9
    if not large > 0 or large == torch.inf:
        assert torch.equal(with_, without)


def test_a_weight_that_is_not_bounded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from confide.sources import private_data

    def trusting(weights: Any, _: int) -> tuple[Tensor, None]:
        return torch.as_tensor(weights), None

    monkeypatch.setattr(private_data, "as_weights", trusting)
    with pytest.raises(AssertionError):
        test_a_hostile_weight_never_lifts_the_bound("statistic", 50.0)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one number per record"):
        released([1.0], QUERIES["statistic"]())
