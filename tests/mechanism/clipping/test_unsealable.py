"""State that nobody could put back is refused, other state is put back, and a torch that was changed is noticed."""

from __future__ import annotations

import ctypes
import decimal
import functools
import itertools
import mmap
import os
import queue
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from confide.errors import Refusal, SpeedWarning
from confide.mechanism.clipping import apart, clipped_sum, isolated_rows, sealed
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.proven import is_proven, is_proven_loss
from confide.models.likelihoods import Categorical
from tests.mechanism.clipping.mixers import CLASSES, WIDTH, Net, plain

pytestmark = [
    pytest.mark.filterwarnings("ignore::confide.errors.SpeedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RECORDS, HUGE = 5, 2


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(RECORDS, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, (RECORDS,))
    x[HUGE] *= 1e3
    return x, y


def total(module: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    torch.manual_seed(5)
    clipped_sum(module, loss, x, y, clip=1.0, out=out)
    return out


def influence(module: nn.Module, loss: Any = plain) -> float:
    """How far a sum is from the same sum without a record, plus that record alone: 0 where no record meets another."""
    x, y = records()
    keep = [record for record in range(RECORDS) if record != HUGE]
    whole, less = total(module, loss, x, y), total(module, loss, x[keep], y[keep])
    return (whole - less - total(module, loss, x[[HUGE]], y[[HUGE]])).norm().item()


def remembering(add: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Net(lambda self, x: x - add(x.detach()), True).double()


# held where Python does not see it --------------------------------------------------------------------------------

STEPS = enumerate(itertools.repeat(0))
PAIRS = zip(itertools.count(), itertools.repeat(0), strict=False)
NUMBERS = map(float, itertools.count())
ASKED = iter(functools.partial(next, itertools.count()), -1)
VALUES = iter({place: float(place) for place in range(99)}.values())
WAITING: queue.SimpleQueue[float] = queue.SimpleQueue()
SHARED = mmap.mmap(-1, 8)
NUMBER = ctypes.c_double(0.0)
RAISED = ValueError(0.0)
FIELDS = np.zeros(1, dtype=[("total", "f8")])[0]
STORED = torch.zeros(1, dtype=torch.float64).untyped_storage()


def in_a_queue(x: Tensor) -> float:
    WAITING.put(x.sum().item())
    return WAITING.get()


def in_a_number(x: Tensor) -> float:
    NUMBER.value += x.sum().item()
    return NUMBER.value


def in_an_exception(x: Tensor) -> float:
    RAISED.args = (RAISED.args[0] + x.sum().item(),)
    return RAISED.args[0]


def in_fields(x: Tensor) -> float:
    FIELDS["total"] += x.sum().item()
    return float(FIELDS["total"])


def in_shared_memory(x: Tensor) -> float:
    SHARED[0] = (SHARED[0] + int(x.sum().item() > 0)) % 256
    return float(SHARED[0])


def in_a_storage(x: Tensor) -> Tensor:
    seen = torch.empty(0, dtype=torch.float64).set_(STORED)
    return (seen.add_(x.sum())).clone()


def in_the_environment(x: Tensor) -> float:
    os.environ["SEEN"] = str(float(os.environ.get("SEEN", "0")) + x.sum().item())
    return float(os.environ["SEEN"])


def on_a_disk(x: Tensor) -> float:
    with open(os.devnull, "a") as place:
        return float(place.write("x" * int(1 + x.abs().max().clamp(max=9).item())))


def in_a_context_of_decimals(x: Tensor) -> float:
    decimal.getcontext().prec += int(x.sum().item() > 0)
    return float(decimal.getcontext().prec)


def by_a_computed_name(x: Tensor) -> float:
    globals()["HID" + "DEN"] = globals().get("HID" + "DEN", 0.0) + x.sum().item()
    return float(globals()["HID" + "DEN"])


def by_the_clock(x: Tensor) -> float:
    return float(time.perf_counter_ns() // 10**6 % 100)


def around_the_guard(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)


def underneath(x: Tensor) -> Tensor:
    below = torch._C._functorch
    return below.get_unwrapped(x).mean() if below.is_functorch_wrapped_tensor(x) else x.mean()


HIDDEN_PLACES: dict[str, Callable[[Tensor], Any]] = {
    "enumerate": lambda x: float(next(STEPS)[0]),
    "zip": lambda x: float(next(PAIRS)[0]),
    "map": lambda x: next(NUMBERS),
    "iterator of a call": lambda x: float(next(ASKED)),
    "iterator of values": lambda x: next(VALUES),
    **{
        function.__name__: function
        for function in (in_a_queue, in_a_number, in_an_exception, in_fields, in_shared_memory, in_a_storage)
    },
}
OUTSIDE = (
    in_the_environment, on_a_disk, in_a_context_of_decimals, by_a_computed_name, by_the_clock, around_the_guard,
    underneath,
)  # fmt: skip


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without forks, or on an accelerator."""
    monkeypatch.setattr(apart, "is_possible", lambda: False)


OUTWARD = ("in_a_number", "in_shared_memory", "in_a_storage")  # lead to memory of others, or out of the process


@pytest.mark.parametrize("name", OUTWARD)
def test_what_leads_out_of_a_process_is_refused(name: str) -> None:
    x, y = records()
    with pytest.raises(Refusal, match=r"cannot be put back|gives no answer for made-up ones"):
        total(remembering(HIDDEN_PLACES[name]), plain, x, y)


@pytest.mark.parametrize("name", ["zip", "in_an_exception"])
def test_what_lies_in_c_runs_in_processes_of_its_own(name: str) -> None:
    module = remembering(HIDDEN_PLACES[name])
    with pytest.warns(SpeedWarning, match="each in a process of its own since it reaches an object of type"):
        assert influence(module) < 1e-12
    examined = next(iter(engine_of(module).anatomy.examined.values()))  # type: ignore[union-attr]
    assert (examined.way, examined.apart[:7]) == ("one by one", "reaches")
    (x, y), place = records(), HIDDEN_PLACES[name]
    rows = isolated_rows(lambda x, y: x - place(x), x, y, WIDTH)
    assert torch.equal(rows[1:], isolated_rows(lambda x, y: x - place(x), x[1:], y[1:], WIDTH))


@pytest.mark.parametrize("name", HIDDEN_PLACES)
@pytest.mark.usefixtures("alone")
def test_what_lies_in_c_is_refused(name: str) -> None:
    x, y = records()
    with pytest.raises(Refusal, match="cannot be put back"):
        total(remembering(HIDDEN_PLACES[name]), plain, x, y)
    with pytest.raises(Refusal, match="cannot be put back"):
        isolated_rows(lambda x, y: x - HIDDEN_PLACES[name](x), x, y, WIDTH, rehearsal=True)


@pytest.mark.parametrize("function", OUTSIDE, ids=lambda function: function.__name__)
@pytest.mark.usefixtures("alone")
def test_the_interpreter_and_the_machine_are_refused(function: Callable[[Tensor], Any]) -> None:
    x, y = records()
    with pytest.raises(Refusal, match=function.__name__):
        total(remembering(function), plain, x, y)
    with pytest.raises(Refusal, match=function.__name__):
        total(nn.Linear(WIDTH, CLASSES).double(), lambda output, y: plain(output, y) * function(output.detach()), x, y)


def test_a_hidden_counter_is_found_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the search finds it, and is not listened to."""
    monkeypatch.setattr(apart, "is_possible", lambda: False)
    monkeypatch.setattr(sealed.Reachable, "check", lambda self: None)
    assert influence(remembering(in_a_number)) > 1e-3


class Loaded(Net):
    """As public networks are: beside the forward there are functions to load it and to make its optimiser."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: x)
        self.started = time.time()

    def save(self, path: str) -> None:
        with open(path, "wb") as place:
            torch.save(self.state_dict(), place)
        os.environ["SAVED"] = path

    def __repr__(self) -> str:
        return f"Loaded {time.time() - self.started}"


def test_functions_that_a_forward_never_calls_are_their_own() -> None:
    torch.manual_seed(0)
    assert influence(Loaded().double()) < 1e-12


# put back ---------------------------------------------------------------------------------------------------------

BYTES = memoryview(bytearray(8)).cast("d")
READ_ONLY = np.zeros(1).view()
READ_ONLY.flags.writeable = False
PART = torch.zeros(4, dtype=torch.float64)[:0]
DETACHED = torch.zeros(4, dtype=torch.float64).detach()[:1]
SPARSE = torch.tensor([0.0, 1.0], dtype=torch.float64).to_sparse()
LOG: list[float] = []
ADD = LOG.append


class Holder:
    total = 0.0


class Louder(Holder):
    total = 9.0


KEPT_ALIVE = Holder()
WEAK = weakref.ref(KEPT_ALIVE)
BEHIND = types.MappingProxyType({"total": [0.0]})


def by_keyword(*, total: float = 0.0) -> float:
    return total


def constant() -> float:
    return 0.0


def behind_a_view(x: Tensor) -> float:
    BYTES[0] += x.sum().item()
    return BYTES[0]


def behind_a_read_only_view(x: Tensor) -> float:
    READ_ONLY.base[0] += x.sum().item()  # type: ignore[index]
    return float(READ_ONLY[0])


def behind_a_part(x: Tensor) -> Tensor:
    base: Any = PART._base
    base[3] += x.sum()
    return base[3].clone()


def beside_a_part(x: Tensor) -> Tensor:
    whole = DETACHED.as_strided((4,), (1,))
    whole[3] += x.sum().item()
    return whole[3].clone()


def in_a_sparse_tensor(x: Tensor) -> Tensor:
    return SPARSE._values().add_(x.sum().item()).clone()


def by_a_method_of_a_list(x: Tensor) -> float:
    ADD(x.sum().item())
    return LOG[-1] * len(LOG)


def behind_a_weak_reference(x: Tensor) -> float:
    held: Any = WEAK()
    held.total += x.sum().item()
    return float(held.total)


def behind_a_proxy(x: Tensor) -> float:
    BEHIND["total"][0] += x.sum().item()
    return BEHIND["total"][0]


def in_defaults_by_keyword(x: Tensor) -> float:
    by_keyword.__kwdefaults__ = {"total": by_keyword() + x.sum().item()}
    return by_keyword()


def in_the_code(x: Tensor) -> float:
    constants = (*constant.__code__.co_consts[:-1], constant() + x.sum().item())
    constant.__code__ = constant.__code__.replace(co_consts=constants)
    return constant()


def by_changing_the_class(x: Tensor) -> float:
    KEPT_ALIVE.__class__ = Louder if type(KEPT_ALIVE) is Holder else Holder
    return KEPT_ALIVE.total * float(x.sum().item() > 0)


def on_torch_itself(x: Tensor) -> float:
    torch.seen = getattr(torch, "seen", 0.0) + x.sum().item()  # type: ignore[attr-defined]
    nn.Linear.seen = getattr(nn.Linear, "seen", 0.0) + torch.seen  # type: ignore[attr-defined]
    return nn.Linear.seen  # type: ignore[attr-defined, no-any-return]


def in_torchs_settings(x: Tensor) -> float:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before == torch.float32 else torch.float32)
    return 9.0 if before == torch.float64 else float(x.sum().item() > 0)


PUT_BACK = (
    behind_a_view, behind_a_read_only_view, behind_a_part, beside_a_part, in_a_sparse_tensor, by_a_method_of_a_list,
    behind_a_weak_reference, behind_a_proxy, in_defaults_by_keyword, in_the_code, by_changing_the_class,
    on_torch_itself, in_torchs_settings,
)  # fmt: skip


@pytest.mark.parametrize("function", PUT_BACK, ids=lambda function: function.__name__)
def test_odd_places_are_put_back(function: Callable[[Tensor], Any]) -> None:
    assert influence(remembering(function)) < 1e-12
    assert (BYTES[0], READ_ONLY[0], LOG, by_keyword(), constant(), type(KEPT_ALIVE)) == (0.0, 0.0, [], 0.0, 0.0, Holder)
    assert not hasattr(torch, "seen")
    assert not hasattr(nn.Linear, "seen")
    assert torch.get_default_dtype() == torch.float32


def test_a_hook_on_all_modules_that_remembers_is_put_back() -> None:
    seen = [0.0]

    def hook(layer: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        seen[0] += output.detach().sum().item()
        return output - seen[0]

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        torch.manual_seed(0)
        assert influence(Net(lambda self, x: x).double()) < 1e-12
        assert seen == [0.0]
    finally:
        handle.remove()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.jit.Attribute(0.0, float)

    def forward(self, x: Tensor) -> Tensor:
        self.total += float(x.sum())
        return x - self.total


@pytest.mark.usefixtures("alone")
def test_a_scripted_module_that_counts_is_refused() -> None:
    net = Net(lambda self, x: self.inner(x), True)
    net.inner = torch.jit.script(Counted())
    x, y = records()
    with pytest.raises(Refusal, match="Counted"):
        total(net.double(), plain, x, y)


# torch as it was --------------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).double()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda owner, name, new: monkeypatch.setattr(owner, name, new(getattr(owner, name)))


def by_the_size(old: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *rest, **more: old(x, *rest, **more) * x.shape[0] ** 3


@pytest.mark.parametrize(
    ("owner", "name"), [(F, "relu"), (torch, "relu"), (F, "linear"), (nn.ReLU, "forward"), (nn.Linear, "forward")]
)
def test_a_function_of_torch_that_was_replaced_is_not_proven(
    owner: Any, name: str, replaced: Callable[..., None]
) -> None:
    module, (x, y) = chain(), records()
    total(module, plain, x, y)
    assert is_proven(module, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, by_the_size(getattr(owner, name)))
        assert not is_proven(module, x)
        if owner is not nn.Linear and owner is not nn.ReLU:
            assert influence(chain()) < 1e-9
    assert is_proven(module, x)


def test_attention_that_was_replaced_is_not_proven(replaced: Callable[..., None]) -> None:
    module = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), nn.Flatten())
    x = torch.zeros(RECORDS, 3, WIDTH)
    assert is_proven(module, x)
    replaced(F, "scaled_dot_product_attention", lambda old: lambda *given, **more: old(*given, **more))
    assert not is_proven(module, x)


def test_a_likelihood_over_a_replaced_function_is_not_proven(replaced: Callable[..., None]) -> None:
    loss, y = Categorical(CLASSES).loss, torch.zeros(2, dtype=torch.long)
    assert is_proven_loss(loss, y)
    replaced(F, "cross_entropy", lambda old: lambda *given, **more: old(*given, **more))
    assert not is_proven_loss(loss, y)


def test_a_method_in_the_place_of_a_layers_own_is_not_proven() -> None:
    """As images are made to tile: the convolution's inner function is replaced on the layer itself."""
    layer = nn.Conv2d(1, 2, 3)
    assert is_proven(layer, torch.zeros(2, 1, 5, 5))
    own: Any = layer
    own._conv_forward = types.MethodType(lambda self, x, weight, bias: F.conv2d(x - x.mean(0), weight), layer)
    assert not is_proven(layer, torch.zeros(2, 1, 5, 5))


class EveryFunction(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class EveryOperator(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * found.shape[0] if "tanh.default" in str(function) else found


@pytest.mark.parametrize("mode", [EveryFunction, EveryOperator])
def test_nobody_looks_on(mode: Any) -> None:
    x, y = records()
    with mode(), pytest.raises(Refusal, match=mode.__name__):
        total(chain(), Categorical(CLASSES).loss, x, y)
    with mode(), pytest.raises(Refusal, match=mode.__name__):
        isolated_rows(lambda x, y: x, x, y, WIDTH)
    with torch.device("cpu"):
        assert total(chain(), plain, x, y).any()


def test_a_mode_inside_a_forward_sees_one_record() -> None:
    def inside(self: Any, x: Tensor) -> Tensor:
        with EveryOperator():
            return torch.tanh(x)

    torch.manual_seed(0)
    assert influence(Net(inside).double()) < 1e-12


def test_an_operator_of_torchs_own_with_another_kernel_is_refused() -> None:
    x, y = records()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("elu", lambda x, *rest: x.clamp(-1, 1) * x.shape[0] ** 3, "AutogradCPU")
        with pytest.raises(Refusal, match="aten/elu/AutogradCPU"):
            total(chain(), plain, x, y)
    finally:
        library._destroy()
    assert total(chain(), plain, x, y).any()


def test_what_every_module_runs_through_is_as_it_was(replaced: Callable[..., None]) -> None:
    x, y = records()
    replaced(nn.Module, "__getattr__", lambda old: lambda self, name: old(self, name))
    with pytest.raises(Refusal, match="__getattr__"):
        total(chain(), plain, x, y)
