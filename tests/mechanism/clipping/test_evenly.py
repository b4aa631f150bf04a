"""A record's numbers do not depend on who else is in its batch, also where its parts cancel or a neighbour raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from confide.data.schema import Schema
from confide.mechanism.clipping import Recordwise, clipped_sum, engine, evenly, places, statistics
from confide.mechanism.clipping.anatomy import Anatomy, Examined
from confide.mechanism.clipping.even_networks import Looked
from confide.mechanism.clipping.made_up import MadeUpBatch
from confide.mechanism.clipping.operations import operations_of
from confide.mechanism.clipping.places import Even, hearing_of_uneven, threads_of
from confide.mechanism.gaussian import SampledGaussian
from confide.models.likelihoods import Categorical
from confide.sources.adaptive_clip import norms_of, under
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Query, StatisticQuery

WIDTH, CLASSES, RECORDS = 64, 3, 300
ROUNDING = 1 + 1e-5
PRECISIONS = (torch.float32, torch.float64)


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
        patch.setattr(module, "even_size", lambda records, rows=1: records)


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


def test_a_count_of_norms_is_moved_by_one_record_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(torch.float32) <= 0.5
    as_they_come(monkeypatch)
    x = torch.randn(4, WIDTH)
    if not torch.equal(network(torch.float32)(x)[:3], network(torch.float32)(x[:3])):
        assert counted(torch.float32) > 1


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


class Last(nn.Module):
    """What a recurrent layer says at the end."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def between(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(13, 17), *layers, nn.Linear(17, CLASSES))


def with_head(layer: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(width, CLASSES))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(13, CLASSES), (13,)),
    "wide": (lambda: nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, CLASSES)), (784,)),
    "of odd rows": (lambda: nn.Sequential(nn.Linear(65, 8), nn.Tanh(), nn.Linear(8, CLASSES)), (65,)),
    "sigmoid": (lambda: between(nn.Sigmoid()), (13,)),
    "SiLU": (lambda: between(nn.SiLU()), (13,)),
    "ELU": (lambda: between(nn.ELU()), (13,)),
    "GELU": (lambda: between(nn.GELU()), (13,)),
    "softplus": (lambda: Behind(between(nn.Softplus())), (13,)),
    "of positions": (lambda: with_head(nn.Sequential(nn.Linear(5, 3), nn.Mish()), 21), (7, 5)),
    "convolution": (lambda: with_head(nn.Conv2d(3, 8, 3), 392), (3, 9, 9)),
    "of single places": (lambda: with_head(nn.Conv2d(3, 5, 1), 245), (3, 7, 7)),
    "recurrent": (lambda: with_head(Last(nn.LSTM(5, 13, batch_first=True)), 13), (5, 5)),
    "attention": (lambda: with_head(nn.TransformerEncoderLayer(12, 3, 10, 0.1, batch_first=True), 84), (7, 12)),
    "normalised": (lambda: with_head(nn.Sequential(nn.GroupNorm(2, 8), nn.GELU()), 200), (8, 5, 5)),
}


def examined(module: nn.Module, x: Tensor) -> tuple[Anatomy, Examined]:
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=x.dtype)
    clipped_sum(module, Categorical(CLASSES).loss, x[:4], torch.zeros(4).long(), clip=1.0, out=out)
    anatomy = engine.engine_of(module).anatomy
    assert anatomy is not None
    return anatomy, next(iter(anatomy.examined.values()))


def depends_on_places(module: nn.Module, x: Tensor, rows: int | None = None) -> bool:
    """Whether what layers are given, and gradients, are others, bit by bit, in batches of other sizes and orders."""
    anatomy, found = examined(module, x)
    step, pool = rows or found.even.rows, MadeUpBatch(x, torch.zeros(len(x)).long())
    looked = Looked(module, anatomy, Categorical(CLASSES).loss, found, pool, torch.get_rng_state())
    known = looked.numbers(torch.arange(evenly.even_size(len(x), step)) % len(x))
    for records in range(1, 90, 2):
        index = (torch.arange(evenly.even_size(records, step)) * 7 + records) % len(x)
        if any(not torch.equal(one[index], other) for one, other in zip(known, looked.numbers(index), strict=True)):
            return True
    return False


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_has_the_same_numbers_at_every_place(name: str, dtype: torch.dtype) -> None:
    """Where a statement leaves the assumption out, it must be true: of other records and sizes than were tried."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module, x = make().to(dtype).eval(), torch.randn(100, *shape, dtype=dtype)
    found = examined(module, x)[1]
    if not found.even.alike and torch.get_num_threads() > 1:
        pytest.skip(f"{name}: statements of runs on several threads say that it may round by the place")
    assert found.even.alike
    with threads_of(found.even):
        assert not depends_on_places(module, x)
    if found.even.rows > 1 and found.way == "proven":  # the broken variant: rows that do for products alone
        assert depends_on_places(module, x, rows=1)


def at_a_bend(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A network and a record that a bend lets through, or not, by the last digit of a SiLU."""
    values = torch.linspace(-3, 3, 1 << 12, dtype=dtype)
    whole, alone = nn.SiLU()(values), torch.cat([nn.SiLU()(value) for value in values.split(1)])
    chosen = int((alone > whole).nonzero().flatten()[0]) if bool((alone > whole).any()) else 0
    found = nn.Sequential(nn.Linear(1, 1), nn.SiLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, CLASSES)).to(dtype)
    with torch.no_grad():
        for value in found.parameters():
            value.fill_(value.dim() - 1)
        found[2].bias.fill_(-whole[chosen])
        found[4].weight.copy_(torch.tensor([[100.0], [-100.0], [50.0]]))
    return found, values[chosen].view(1, 1)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_function_of_single_numbers_that_rounds_by_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left over of whole vectors goes by another function: all of the last rows, where a row has one number."""
    module, one = at_a_bend(dtype)
    query = GradientQuery(module, Categorical(CLASSES).loss)
    assert max(moves(query, one.expand(size, 1)) for size in (29, 61, 65)) <= ROUNDING
    monkeypatch.setattr("confide.mechanism.clipping.structure.even_batches", lambda *_: Even())
    module, one = at_a_bend(dtype)
    if not torch.equal(module[:2](one.expand(64, 1)), module[:2](one).expand(64, 1)):  # as on most processors
        # by as many records as a vector leaves over: 36 C with long ones, 6 C in double precision with AVX2
        assert moves(GradientQuery(module, Categorical(CLASSES).loss), one.expand(61, 1)) > 2


class Casting(nn.Module):
    """Half the bits, by the network's own decision."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(x).float()


class ByHand(Casting):
    """Between two layers, where a layer is given single precision again."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.network.children())
        return nn.Sequential(*layers[2:])(layers[1](layers[0](x).bfloat16()).float())


@pytest.mark.parametrize("wrap", [Casting, ByHand])
def test_half_precision_inside_a_network_is_stated(
    wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GELU in bfloat16 is -1.5e-7 or 0 for four of all numbers, by the place of a record: no made-up one shows it."""
    found = nn.Sequential(nn.Linear(1, 1), nn.GELU("tanh"), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, CLASSES))
    one = torch.tensor([[-5.0625]])
    kinds = [nn.GELU("tanh")(one.bfloat16().expand(size, 1)).min() for size in (4, 64)]
    with torch.no_grad():
        for value in found.parameters():
            value.fill_(value.dim() - 1)
        found[2].bias.fill_(-float(min(kinds)))
        found[4].weight.copy_(torch.tensor([[100.0], [-100.0], [50.0]]))
    query = GradientQuery(wrap(found), Categorical(CLASSES).loss)
    with hearing_of_uneven() as uneven:
        moved = moves(query, one.expand(33, 1))
    assert uneven == [True]
    if wrap is Casting and kinds[0] != kinds[1]:  # as on most processors
        assert moved > 2
    monkeypatch.setattr(
        "confide.mechanism.clipping.isolation.SHORT", frozenset()
    )  # the broken variant: by trying alone
    with hearing_of_uneven() as uneven:
        moves(query, one.expand(33, 1))
    assert uneven == []


def test_half_precision_of_a_statistic_is_stated() -> None:
    """Of code of the user's, and of a network that is believed."""
    layer = nn.Linear(2, 1).bfloat16()

    def answer(x: Tensor, y: Tensor) -> Tensor:
        return layer(x.bfloat16()).double()

    for function in (answer, Recordwise(answer, layer)):
        with hearing_of_uneven() as uneven:
            moves(StatisticQuery(function, 1), torch.rand(5, 2))
        assert uneven == [True]


def test_single_precision_is_not_stated() -> None:
    with hearing_of_uneven() as uneven:
        moves(GradientQuery(Behind(network(torch.float32)), Categorical(CLASSES).loss), torch.randn(5, WIDTH))
    assert uneven == []


@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_threads_that_share_out_many_records(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has some left over at the end of its part, unless that is a whole number of vectors."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        module, one = at_a_bend(torch.float32)
        x = one.expand(40_001, 1)
        assert moves(GradientQuery(module, Categorical(CLASSES).loss), x) <= ROUNDING
        monkeypatch.setattr("confide.mechanism.clipping.structure.even_batches", lambda *_: Even(32))
        module, one = at_a_bend(torch.float32)
        # with shorter vectors the parts of two threads have nothing left over at 32 rows either
        long = torch.backends.cpu.get_cpu_capability() == "AVX512"
        if long and not torch.equal(module[:2](x), module[:2](one).expand_as(x)):
            assert moves(GradientQuery(module, Categorical(CLASSES).loss), x) > 10
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("believed", [False, True])
def test_a_statistic_that_counts_by_the_last_digit(believed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bins of predictions do: a threshold between the two values of a SiLU."""
    module, one = at_a_bend(torch.float32)

    def above(x: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.silu(x) + module[2].bias > 0).double()

    query = StatisticQuery(Recordwise(above) if believed else above, 1)
    assert moves(query, one.expand(61, 1)) <= 1
    monkeypatch.setattr(statistics, "_even_of", lambda *_: Even())
    if not torch.equal(module[:2](one.expand(64, 1)), module[:2](one).expand(64, 1)):
        assert moves(query, one.expand(61, 1)) > 10


def test_statistics_of_one_code_are_told_apart_by_what_they_run() -> None:
    def made(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: function(x)

    assert operations_of(made(torch.nn.functional.silu)) == operations_of(made(torch.nn.functional.silu))
    assert operations_of(made(torch.nn.functional.silu)) != operations_of(made(torch.nn.functional.elu))
    assert operations_of(made(nn.Sequential(nn.SiLU()))) != operations_of(made(nn.Sequential(nn.ELU())))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("width", [64, 65])
def test_neighbours_that_move_by_a_row_stay_where_they_are(width: int, dtype: torch.dtype) -> None:
    """Hostile records among zeros: one record less moves all others by a row, whose first numbers stand elsewhere."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)
    with torch.no_grad():
        found[0].weight.copy_(found[0].weight[:, :1].expand(-1, width))
    x = torch.zeros(41, width, dtype=dtype)
    x[4::4, :WIDTH] = cancelling(10, dtype)
    with hearing_of_uneven() as uneven:
        assert moves(GradientQuery(found, Categorical(CLASSES).loss), x) <= ROUNDING
    assert uneven == []


LONG = 2000
"""Numbers of a record that are compared by a code."""


@pytest.mark.parametrize("held", [4 * LONG, 1 << 20, 20 << 20, 60 << 20, 200 << 20], ids="{} bytes".format)
def test_networks_of_every_size_are_tried(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number in the last row that differs by its last digit, or by the size of the batch, or in one place."""
    whole = torch.randn(512, LONG, generator=torch.Generator().manual_seed(0))
    faults: dict[str, Callable[[Tensor], object]] = {
        "last": lambda found: found[-1, 7].mul_(1 + 2**-22),
        "second": lambda found: found[1, LONG - 1].mul_(1 + 2**-22),
        "size": lambda found: found.mul_(1 + 2**-22) if len(found) == 4 else None,
    }

    def even(fault: Callable[[Tensor], object]) -> bool:
        def numbers(index: Tensor) -> list[Tensor]:
            found = whole[index]
            fault(found)
            return [torch.zeros(len(index)), places.brief(found)]

        return places.even_places(numbers, held, small=False) == Even()

    assert even(lambda found: found[:, 3].zero_().neg_() if len(found) > 4 else found[:, 3].zero_())  # zeros are equal
    assert even(lambda found: found[:, 3].fill_(torch.nan))
    tried = {name for name, fault in faults.items() if not even(fault)}
    assert tried == {"last", "second"} | ({"size"} if places.fewest_rows(held) > 4 else set())
    monkeypatch.setattr(places, "brief", lambda found: found[:, :1])  # the broken variant: codes of less than all
    assert even(faults["last"])


def test_sizes() -> None:
    assert [evenly.even_size(size) for size in (1, 4, 5, 63, 64, 65, 250)] == [4, 4, 8, 64, 64, 72, 256]
    assert [evenly.even_size(size, 32) for size in (1, 32, 33, 65)] == [32, 32, 64, 96]
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
