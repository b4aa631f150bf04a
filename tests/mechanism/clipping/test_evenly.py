"""A record's numbers do not depend on who else is in its batch, also where its parts cancel or a neighbour raises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.mechanism.clipping import clipped_sum, engine, evenly, statistics
from confide.mechanism.gaussian import SampledGaussian
from confide.models.likelihoods import Categorical
from confide.sources.adaptive_clip import norms_of, under
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query

WIDTH, CLASSES, RECORDS = 64, 3, 300
ROUNDING = 1 + 1e-5
SIZES = (4, 8, 12, 20, 32, 60, 64, 80, 112, 256)
PRECISIONS = (torch.float32, torch.float64)
alike = pytest.mark.skipif(
    not all(evenly.rounds_alike(dtype) for dtype in PRECISIONS),
    reason="products round by the size of a batch on this processor, and statements of runs say so",
)


class Behind(nn.Module):
    """A network of the user's, which runs isolated."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) + torch.ones(4, dtype=x.dtype)[(x[:, :1] > 1e29).long() * 9] - 1


def network(dtype: torch.dtype) -> nn.Module:
    """Its first layer takes the sum of a record, which is 1, of numbers that are far larger."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES)).to(dtype)
    with torch.no_grad():
        found[0].weight.copy_(found[0].weight[:, :1].expand(-1, WIDTH))
    return found


def cancelling(records: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(WIDTH // 2, dtype=torch.float64, generator=generator)
    one = torch.cat([half, -half]) * (30 / torch.finfo(dtype).eps)
    one[0] += 1
    return one[torch.randperm(WIDTH, generator=generator)].expand(records, WIDTH).to(dtype).contiguous()


def answer(query: Query, x: Tensor) -> Tensor:
    data = PrivateData(x, torch.zeros(len(x), dtype=torch.long), schema=Schema(records=RECORDS, classes=CLASSES))
    return data.answer(query, SampledGaussian(0.0, 1.0, 1.0, RECORDS, "full-batch", private=False)).sum.double()


def moves(query: Query, x: Tensor, removed: int = 0) -> float:
    kept = torch.cat([x[:removed], x[removed + 1 :]])
    return float((answer(query, x) - answer(query, kept)).norm())


def as_they_come(patch: pytest.MonkeyPatch) -> None:
    """The broken variant: batches of any size."""
    for module in (engine, statistics):
        patch.setattr(module, "even_size", lambda records, most=0: records)


@alike
@pytest.mark.parametrize("wrap", [nn.Sequential, Behind], ids=["proven", "isolated"])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_neighbours_whose_parts_cancel_stay_where_they_are(
    dtype: torch.dtype, wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, sizes = GradientQuery(wrap(network(dtype)), Categorical(CLASSES).loss), (2, 4, 5, 9, 64, 65)
    assert max(moves(query, cancelling(size, dtype)) for size in sizes) <= ROUNDING
    as_they_come(monkeypatch)
    x = cancelling(4, dtype)
    if not torch.equal(network(dtype)(x)[:3], network(dtype)(x[:3])):  # as on most processors
        assert moves(query, x) > 2


@alike
def test_neighbours_of_a_record_that_raises_stay_where_they_are() -> None:
    """The batch is then tried in halves, down to one record."""
    query = GradientQuery(Behind(network(torch.float32)), Categorical(CLASSES).loss)
    x = cancelling(11, torch.float32)
    x[5] = 1e30
    assert moves(query, x, 5) <= 1e-5


def counted(dtype: torch.dtype) -> float:
    """How far one record moves a count of those under the clip, all of which are at it but for rounding."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES)).to(dtype)
    query, furthest = GradientQuery(module, Categorical(CLASSES).loss), 0.0
    for x in torch.randn(12, 1, WIDTH, dtype=dtype).expand(12, 4, WIDTH):
        norms = [norms_of(query, x[:size], torch.zeros(size, dtype=torch.long)) for size in (3, 4)]
        clip = min(float(norm[0]) for norm in norms)
        furthest = max(furthest, moves(under(query, clip), x.contiguous()))
    return furthest


@alike
def test_a_count_of_norms_is_moved_by_one_record_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(torch.float32) <= 0.5
    as_they_come(monkeypatch)
    x = torch.randn(4, WIDTH)
    if not torch.equal(network(torch.float32)(x)[:3], network(torch.float32)(x[:3])):
        assert counted(torch.float32) > 1


@alike
def test_a_statistic_goes_on_without_a_record_that_raises() -> None:
    """In halves, and the record itself counts as zero."""
    weight = torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(0))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ weight) * torch.ones(4)[(x[:, :1] > 50).long() * 9]

    x = torch.randn(1, WIDTH).repeat(7, 1)
    x[3] = 100
    rows = statistics.isolated_rows(function, x, torch.zeros(7), 2)
    assert torch.equal(rows[3], torch.zeros(2, dtype=rows.dtype))
    others = statistics.isolated_rows(function, x[[0, 1, 2, 4, 5, 6]], torch.zeros(6), 2)
    assert torch.equal(rows[[0, 1, 2, 4, 5, 6]], others.to(rows.dtype))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(20, 16), (20,)),
    "one output": (lambda: nn.Linear(300, 1), (300,)),
    "wide": (lambda: nn.Linear(784, 100), (784,)),
    "of positions": (lambda: nn.Linear(16, 16), (7, 16)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (3, 9, 9)),
    "recurrent": (lambda: nn.LSTM(8, 16, batch_first=True), (5, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (7, 16)),
    "normalised": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.GELU()), (8, 5, 5)),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_equal_records_have_equal_numbers_in_even_batches(name: str, dtype: torch.dtype) -> None:
    """Where a statement leaves the assumption out, it must be true: forwards and backwards, on this processor."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, one = make().to(dtype), torch.randn(1, *shape, dtype=dtype)
    if not (evenly.rounds_alike(dtype) and evenly.network_rounds_alike(layer)):
        pytest.skip(f"{name}: statements of runs on this processor say that it may round by the batch")
    seen: set[bytes] = set()
    for size in SIZES:
        assert evenly.even_size(size) == size
        x = one.expand(size, *shape).clone().requires_grad_()
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        rows = torch.cat([output.detach().flatten(1), gradient.flatten(1)], 1)
        seen |= {bytes(np.ascontiguousarray(row)) for row in rows.numpy()}
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("width", [64, 65])
def test_a_network_in_which_the_place_of_a_record_decides_is_seen(width: int, dtype: torch.dtype) -> None:
    """One record less moves all others by a row: where that moves a sum by more than C, the statement has to say so."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)
    with torch.no_grad():
        found[0].weight.copy_(found[0].weight[:, :1].expand(-1, width))
    x = torch.zeros(41, width, dtype=dtype)
    x[4::4, :WIDTH] = cancelling(10, dtype)
    moved = moves(GradientQuery(found, Categorical(CLASSES).loss), x)
    assert moved <= ROUNDING or not evenly.network_rounds_alike(found)


def test_a_processor_that_rounds_by_the_size_of_a_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight: (x @ weight.T) + len(x) % 3 * 1e-6)
    assert not evenly.rounds_alike.__wrapped__(torch.float32)


def test_sizes() -> None:
    assert [evenly.even_size(size) for size in (1, 4, 5, 63, 64, 65, 250)] == [4, 4, 8, 64, 64, 72, 256]
    assert evenly.even_size(2, 3) == 3  # no more may go at once, and never fewer do
    x, y = evenly.filled((torch.arange(3.0), torch.arange(3)), 3, 4)
    assert x.tolist() == [0, 1, 2, 2]
    assert y.tolist() == [0, 1, 2, 2]


def test_copies_count_for_nothing() -> None:
    module, x, y = nn.Linear(2, 2), torch.randn(5, 2), torch.zeros(5, dtype=torch.long)
    for asked in (module, Behind(module)):
        out = torch.zeros(6)
        norms = clipped_sum(asked, Categorical(2).loss, x, y, clip=100.0, out=out)
        losses = Categorical(2).loss(module(x), y).sum()
        whole = torch.cat([value.flatten() for value in torch.autograd.grad(losses, list(module.parameters()))])
        assert len(norms) == 5
        assert torch.allclose(out, whole, atol=1e-5)
