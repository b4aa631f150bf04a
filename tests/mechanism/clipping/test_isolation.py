"""No record touches another: whatever a module or a loss does, one record moves the clipped sum by at most C."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from confide.errors import SpeedWarning, UnclippableError
from confide.mechanism.clipping import Recordwise, apart, batching, clipped_sum, engine, isolated_rows, isolation
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.evenly import even_size
from confide.mechanism.clipping.rounding import SHARE
from confide.mechanism.clipping.sealed import Reachable
from confide.models.likelihoods import Categorical
from tests.mechanism.clipping import mixers
from tests.mechanism.clipping.mixers import CLASSES, MIXERS, WIDTH, Net, plain

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore:std"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]
RECORDS = 13
ROUNDING = 1 + 1e-5


@pytest.fixture(autouse=True)
def forgotten() -> None:
    mixers.LOG.clear()
    mixers.MEMORY.clear()
    mixers.COUNTER = 0
    mixers.first_seen.cache_clear()
    if hasattr(Net, "largest"):
        del Net.largest


def total(module: nn.Module, loss: Any, x: Any, y: Any, clip: float = 1.0) -> Tensor:
    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    out = torch.zeros(size, dtype=torch.float64)
    torch.manual_seed(5)
    if isinstance(module, Net):
        module.generator.manual_seed(0)
    clipped_sum(module, loss, x, y, clip=clip, out=out)
    return out


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(RECORDS, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, (RECORDS,))
    x[4] *= 1e4
    return x, y


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module, loss = MIXERS[name]()
    return module.double(), loss


def test_there_are_enough_mixers() -> None:
    assert len(MIXERS) >= 50


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "in processes"], autouse=True)
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether records may run in processes of their own: quick without, and then the seal of this process is asked."""
    if not request.param:
        monkeypatch.setattr(apart, "is_possible", lambda: False)
    return bool(request.param)


# Where random numbers are drawn for each record, taking one out hands those behind it other ones, as fresh as before.
FRESH = {"mixed_up", "masks_from_a_seed_for_some"}


@pytest.mark.parametrize("name", MIXERS)
def test_one_record_moves_the_sum_by_at_most_the_clip(name: str) -> None:
    """In any order of the calls, so that nothing of one batch is in the sum of the next."""
    x, y = records()
    for removed in (RECORDS - 1,) if name in FRESH else (4, 0):
        module, loss = made(name)
        keep = [record for record in range(RECORDS) if record != removed]
        try:
            whole = total(module, loss, x, y)
        except UnclippableError:
            return
        less = total(module, loss, x[keep], y[keep])
        again = total(module, loss, x, y)
        assert (whole - less).norm() <= ROUNDING, removed
        torch.testing.assert_close(whole, again, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_nothing_of_the_records_stays_in_the_module(name: str) -> None:
    x, y = records()
    module, loss = made(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    attributes = [dict(vars(layer)) for layer in module.modules()]
    try:
        total(module, loss, x, y)
    except UnclippableError:
        return
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    for layer, was in zip(module.modules(), attributes, strict=True):
        assert vars(layer).keys() == was.keys()
        assert all(vars(layer)[key] is value for key, value in was.items())
    if isinstance(module, Net):
        assert module.seen == []


def test_without_isolation_the_mixers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all of it believed to be proven, and the diagnosis off. Most mixers then move the sum by more than C."""
    monkeypatch.setattr(engine, "is_proven", lambda module, x: True)
    monkeypatch.setattr(engine, "is_proven_loss", lambda loss, y: True)
    monkeypatch.setattr("confide.mechanism.clipping.structure.is_proven", lambda module, x: True)
    monkeypatch.setattr("confide.mechanism.clipping.structure.is_proven_loss", lambda loss, y: True)
    monkeypatch.setattr("confide.mechanism.clipping.running.is_proven_loss", lambda loss, y: True)
    x, y = records()
    keep = [record for record in range(RECORDS) if record != 4]
    caught = 0
    for name in ("power_of_the_size", "odd_or_even", "whitened_by_constants", "experts_with_room_for_four"):
        module, loss = made(name)
        caught += bool((total(module, loss, x, y) - total(module, loss, x[keep], y[keep])).norm() > ROUNDING)
    assert caught >= 3


def test_guards_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a region that does not look after the generator believes a mask that depends on the position."""
    monkeypatch.setattr(isolation._Guard, "check_generator", lambda *_: None)
    x, y = records()
    keep = [record for record in range(RECORDS) if record != 0]
    module, loss = made("masks_from_a_seed")
    assert (total(module, loss, x, y, 0.05) - total(module, loss, x[keep], y[keep], 0.05)).norm() > 0.05 * ROUNDING


def test_a_stack_of_an_earlier_pass_is_refused() -> None:
    x, _ = records()
    kept = []
    for _ in range(3):
        region = isolation.Region(RECORDS)
        refused = pytest.raises(isolation.NotIsolable, match="left behind")
        with refused if kept else nullcontext(), region.entered():  # also where user code goes on after it
            seen = region.one_each(x)
            for old in kept:
                for use in (seen.add, torch.neg, lambda one: torch.cat([one]), lambda one: one[0]):
                    with pytest.raises(isolation.NotIsolable, match="left behind"):
                        use(old)
            kept.append(seen * 2)


def test_a_hook_on_the_gradients_of_all_modules_is_called_for_every_record() -> None:
    x, y = records()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()

    def tripled(layer: nn.Module, at_inputs: Any, at_outputs: Any) -> Any:
        factor = 3.0 if len(at_outputs[0]) == 1 else 100.0
        return tuple(None if gradient is None else factor * gradient for gradient in at_inputs)

    def alone(record: slice) -> Tensor:
        found = torch.autograd.grad(plain(module(x[record]), y[record]).sum(), list(module.parameters()))
        return torch.cat([value.flatten() for value in found])

    before = total(module, plain, x, y, 1e9)
    with register_module_full_backward_hook(tripled):
        expected = torch.stack([alone(slice(record, record + 1)) for record in range(RECORDS)]).sum(0)
        assert not torch.allclose(expected, before)
        torch.testing.assert_close(total(module, plain, x, y, 1e9), expected, rtol=1e-4, atol=1e-6)


# what each way is for -------------------------------------------------------------------------------------------


def way(module: nn.Module) -> set[str]:
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    return {examined.way for examined in anatomy.examined.values()}


def test_each_kind_takes_its_way() -> None:
    x, y = records()
    chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    total(chain, Categorical(CLASSES).loss, x, y)
    assert way(chain) == {"proven"}
    net = Net(lambda self, hidden: hidden).double()
    total(net, plain, x, y)
    assert way(net) == {"isolated"}
    branching = Net(lambda self, hidden: hidden if hidden.sum() > 0 else -hidden).double()
    with pytest.warns(SpeedWarning, match=r"one by one.*because in Net"):
        total(branching, plain, x, y)
    assert way(branching) == {"one by one"}


ALTERED: dict[str, Callable[[nn.Sequential], object]] = {
    "hook": lambda net: net[1].register_forward_hook(lambda layer, inputs, output: output - output.mean(0)),
    "early hook": lambda net: net[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * len(inputs[0]),)),
    "replaced forward": lambda net: setattr(net[1], "forward", lambda x: x / x.norm()),
    "replaced layer": lambda net: net.__setitem__(1, nn.Softmax(0)),
    "replaced call": lambda net: setattr(net[1], "_call_impl", lambda x: x * len(x)),
    "subclass": lambda net: setattr(net[1], "__class__", type("Sub", (nn.Tanh,), {"forward": lambda s, x: x * len(x)})),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_proven_module_that_changes_between_steps_is_proven_no_more(name: str) -> None:
    """It was examined as it was; every step looks again."""
    torch.manual_seed(0)
    x, y = records()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    loss = Categorical(CLASSES).loss
    total(net, loss, x, y)
    ALTERED[name](net)
    keep = [record for record in range(RECORDS) if record != 4]
    try:
        moved = (total(net, loss, x, y) - total(net, loss, x[keep], y[keep])).norm()
    except UnclippableError:
        return
    assert moved <= ROUNDING
    assert way(net) != {"proven"}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(RECORDS, RECORDS), ()), (nn.Softmax(-1), ()), (nn.Softmax(0), (3,)), (nn.Flatten(0, 1), (3, 4)),
     (nn.Conv1d(RECORDS, RECORDS, 1), (5,)), (nn.Conv2d(RECORDS, RECORDS, 1), (5, 5)), (nn.BatchNorm1d(3), (3,)),
     (nn.LayerNorm([RECORDS, 3]), (3,)), (nn.Dropout2d(), (3, 3)), (nn.TransformerEncoderLayer(4, 2), (5, 4))],
)  # fmt: skip
def test_layers_for_which_axis_0_is_not_the_records_are_not_proven(layer: nn.Module, shape: tuple[int, ...]) -> None:
    from confide.mechanism.clipping.proven import axes_after

    assert axes_after(layer, 1 + len(shape)) is None
    assert axes_after(nn.Sequential(layer), 1 + len(shape)) is None


def test_a_loss_with_the_code_of_one_examined_before_is_not_believed() -> None:
    """The same code closes over another weighting: what was examined was harmless."""

    def weighted(how: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, y: plain(output, y) * how(y)

    x, y = records()
    net = nn.Sequential(nn.Linear(WIDTH, CLASSES)).double()
    total(net, weighted(lambda y: 1.0), x, y)
    mixing = weighted(lambda y: (-1) ** len(y) * len(y))
    keep = list(range(1, RECORDS))
    assert (total(net, mixing, x, y) - total(net, mixing, x[keep], y[keep])).norm() <= ROUNDING


# nothing is silently zero ---------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        first, second = torch.randn(WIDTH, 5), torch.randn(5, CLASSES)
        self.kind = kind
        self.child = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        self.several = nn.ParameterList([nn.Parameter(first), nn.Parameter(second)])
        self.named = nn.ParameterDict({"a": first * 2, "b": second * 2})

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "list":
            return torch.tanh(x @ self.several[0]) @ self.several[1]
        if self.kind == "dict":
            return torch.tanh(x @ self.named["a"]) @ self.named["b"]
        if self.kind == "functional":
            hidden = torch.tanh(F.linear(x, self.child[0].weight, self.child[0].bias))
            return torch.addmm(self.child[2].bias, hidden, self.child[2].weight.t())
        if self.kind == "children's forward":
            return self.child[2].forward(self.child[1].forward(self.child[0].forward(x)))
        return torch.func.functional_call(self.child, dict(self.child.named_parameters()), (x,))


@pytest.mark.parametrize("kind", ["list", "dict", "functional", "children's forward", "functional call", "traced"])
def test_gradients_of_parameters_that_no_layer_call_shows(kind: str) -> None:
    torch.manual_seed(0)
    x, y = records()
    module: Any = Bare(kind).double()
    if kind == "traced":
        with pytest.warns(DeprecationWarning, match="trace"):
            module = torch.jit.trace(Bare("list").double(), x, check_trace=False)
    wanted = torch.autograd.grad(plain(module(x), y).sum(), list(module.parameters()), allow_unused=True)
    flat = [
        torch.zeros_like(value) if found is None else found
        for value, found in zip(module.parameters(), wanted, strict=True)
    ]
    found = total(module, plain, x, y, clip=1e9)
    torch.testing.assert_close(found, torch.cat([value.flatten() for value in flat]), rtol=1e-7, atol=1e-7)


def test_a_loss_that_uses_parameters_gets_their_gradients() -> None:
    x, y = records()
    net = nn.Sequential(nn.Linear(WIDTH, CLASSES)).double()

    def decayed(output: Tensor, target: Tensor) -> Tensor:
        return plain(output, target) + net[0].weight.square().sum()

    wanted = torch.autograd.grad(decayed(net(x), y).sum(), list(net.parameters()))
    found = total(net, decayed, x, y, clip=1e9)
    torch.testing.assert_close(found, torch.cat([value.flatten() for value in wanted]), rtol=1e-7, atol=1e-7)


# errors never depend on records ---------------------------------------------------------------------------------


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 3), nn.Flatten(), nn.Linear(3 * WIDTH, CLASSES)).double()


class Picky(nn.Module):
    def __init__(self, most: float) -> None:
        super().__init__()
        self.head, self.most = nn.Linear(WIDTH, CLASSES), most

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > self.most).any()):
            raise ValueError(f"a value above {self.most}")
        return self.head(x)


def unit_targets(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(output[:, 0]), y, reduction="none")


@pytest.mark.parametrize("kind", ["token", "label", "label, own loss", "picky", "target"])
def test_a_record_that_raises_counts_as_zero_and_moves_nobody_else(kind: str) -> None:
    torch.manual_seed(0)
    x, y = records()
    x[4] /= 1e4
    loss: Any = plain if kind != "label" else Categorical(CLASSES).loss
    if kind == "token":
        module = embedded()
        x = torch.randint(0, 10, (RECORDS, WIDTH))
        x[3, 1] = 10
    elif kind == "picky":
        module = Picky(50.0).double()
        x[3, 0] = 51
    else:
        module = nn.Sequential(nn.Linear(WIDTH, CLASSES)).double()
        if kind == "target":
            loss, y = unit_targets, torch.rand(RECORDS, dtype=torch.float64)
        y[3] = CLASSES if kind != "target" else 1.5
    keep = [record for record in range(RECORDS) if record != 3]
    torch.testing.assert_close(total(module, loss, x, y), total(module, loss, x[keep], y[keep]), rtol=1e-9, atol=1e-9)


class Deep(nn.Module):
    """Written so that it is not proven: in single precision, deep enough for roundings to grow."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x).mean(1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(2 * layer(hidden))
        said: Tensor = self.head(hidden)
        return said


@pytest.mark.parametrize("many", [31, 256])
@pytest.mark.parametrize("fails", ["module", "statistic"])
def test_the_way_round_a_record_that_raises_rounds_others_within_a_part_of_the_share(many: int, fails: str) -> None:
    """Others are computed in batches of other sizes, or one by one, so in another order: soundness.md, section 1."""
    torch.manual_seed(0)
    module, loss = Deep(), plain
    x, y = torch.randint(0, 10, (many, 5)), torch.randint(0, CLASSES, (many,))
    odd = torch.cat([x, torch.full((1, 5), 10)]), torch.cat([y, y[:1]])

    def answer(x: Tensor, y: Tensor) -> Tensor:
        if fails == "module":
            return total(module, loss, x, y)
        rows = isolated_rows(lambda x, y: module(x)[0] + 0.0 * module.table(x).sum(), x, y, CLASSES)
        return (rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0).double()

    moved = (answer(*odd) - answer(x, y)).norm().item()
    assert 0 < moved <= SHARE[torch.float32] / 100


def test_a_rehearsal_raises() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, CLASSES)).double()
    out = torch.zeros(WIDTH * CLASSES + CLASSES, dtype=torch.float64)
    x, y = torch.zeros(2, WIDTH, dtype=torch.float64), torch.tensor([0, CLASSES])
    with pytest.raises(Exception, match="outputs=3"):
        clipped_sum(module, Categorical(CLASSES + 1).loss, x, y, clip=1.0, out=out, rehearsal=True)


def test_squeezed_outputs_work_for_any_number_of_records() -> None:
    module = Net(lambda self, hidden: hidden).double()
    squeezing = nn.Module()
    squeezing.head = nn.Linear(WIDTH, 1).double()
    squeezing.forward = lambda x: squeezing.head(x).squeeze()  # type: ignore[method-assign]
    x, _ = records()
    for count in (0, 1, 2, 5):
        total(squeezing, lambda output, y: (output - y) ** 2, x[:count], torch.ones(count).double())
    assert module is not None


# statistics -----------------------------------------------------------------------------------------------------

STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "centred": lambda x, y: x - x.mean(0),
    "ranks": lambda x, y: x.argsort(0).argsort(0) / len(x),
    "scaled": lambda x, y: x / (x.std(0, unbiased=False) + 1e-9),
    "size": lambda x, y: x * len(x),
    "numpy": lambda x, y: torch.from_numpy(np.sort(x.numpy(), 0)),
    "first record": lambda x, y: x - x[0],
    "masked": lambda x, y: x * (x[x[:, 0] > 0].sum() > 1),
    "history": lambda x, y: (mixers.LOG.append(x.sum(0)), x + sum(mixers.LOG))[1],
    "whole classes": lambda x, y: x / (1 + torch.bincount(y, minlength=3)[y][:, None]),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_see_one_record(name: str) -> None:
    x, y = records()
    rows = isolated_rows(STATISTICS[name], x, y, WIDTH)
    mixers.LOG.clear()
    for record in (0, 4, 7):
        alone = STATISTICS[name](x[record : record + 1], y[record : record + 1]).double()
        mixers.LOG.clear()
        torch.testing.assert_close(rows[record].double(), alone[0])


def test_a_statistic_that_raises_for_a_record_is_zero_there() -> None:
    x, y = records()
    one_hot = isolated_rows(lambda x, y: F.one_hot(y, CLASSES), x, y + (torch.arange(RECORDS) == 2) * 9, CLASSES)
    assert one_hot[2].tolist() == [0, 0, 0]
    assert one_hot.sum() == RECORDS - 1


def test_what_is_believed_of_a_statistic_is_its_proven_module() -> None:
    """One that is not believed sees batches of one."""
    x, y = records()

    def sized(x: Tensor, y: Tensor) -> Tensor:
        return x * len(x)

    believed = isolated_rows(Recordwise(sized, nn.Linear(WIDTH, 1)), x, y, WIDTH)
    not_believed = isolated_rows(Recordwise(sized, Net(lambda self, x: x)), x, y, WIDTH)
    assert torch.equal(believed, x * even_size(RECORDS))
    assert torch.equal(not_believed, x)


class Lazy(OrderedDict[str, Any]):
    """As large libraries have them: it cannot be made again from its contents, and looks things up when asked."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        raise KeyError(self.prefix + key)

    def copy(self) -> Any:
        raise AssertionError("nobody may copy it")


def test_mappings_with_a_mind_of_their_own_are_put_back() -> None:
    table, plain_list = Lazy("x"), [1, 2]
    OrderedDict.__setitem__(table, "a", 1)
    holder: dict[str, Any] = {
        "table": table,
        "list": plain_list,
        "queue": deque([1]),
        "set": {1},
        "bytes": bytearray(b"a"),
    }
    seal = Reachable(holder)
    assert not seal.restore()
    OrderedDict.__setitem__(table, "b", 2)
    plain_list.append(3)
    holder["queue"].append(2)
    holder["set"].add(2)
    holder["bytes"].extend(b"b")
    holder["more"] = 1
    assert seal.restore()
    assert (list(table), plain_list, list(holder["queue"])) == (["a"], [1, 2], [1])
    assert (holder["set"], holder["bytes"], len(holder)) == ({1}, b"a", 5)


# the seam to torch ----------------------------------------------------------------------------------------------


def test_regions_leave_nothing_behind() -> None:
    x, y = records()
    module, loss = made("gradient_hook")
    total(module, loss, x, y)
    gc.collect()
    assert torch._C._functorch.maybe_current_level() is None
    assert isolation._ACTIVE.guard is None
    torch.func.vmap(lambda row: row * 2)(x)  # and vmap is what it was


def test_cross_entropy_of_a_region_is_torchs() -> None:
    """Its stand-in has a batching rule, and must not differ in anything else."""
    torch.manual_seed(0)
    weights = torch.rand(5, dtype=torch.float64)
    cases = [(torch.randn(7, 5), torch.randint(0, 5, (7,))), (torch.randn(7, 5, 3), torch.randint(0, 5, (7, 3))),
             (torch.randn(5), torch.tensor(2))]  # fmt: skip
    for values, target in cases:
        ignoring = target.clone().masked_fill_(target == 1, -100)
        for options in ({}, {"weight": weights}, {"reduction": "none"}, {"reduction": "sum"}):
            found = batching._cross_entropy(values.double(), ignoring, **options)
            torch.testing.assert_close(found, F.cross_entropy(values.double(), ignoring, **options))
        found = batching._cross_entropy(values.double(), target, ignore_index=1)
        torch.testing.assert_close(found, F.cross_entropy(values.double(), target, ignore_index=1))
    positional = (values.double(), target, weights, None, -100, None, "sum")
    torch.testing.assert_close(batching._cross_entropy(*positional), F.cross_entropy(*positional))
    with pytest.raises(TypeError, match="unexpected keyword"):
        batching._cross_entropy(values, target, weigth=weights)
