"""More ways in which records would touch each other, or stay behind: helpers, odd places, odd layouts."""

from __future__ import annotations

import functools
import io
import itertools
import random
import threading
import types
import warnings
import weakref
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import tests.mechanism.clipping.mixer_state
from tests.mechanism.clipping import mixer_state
from tests.mechanism.clipping.mixers import CLASSES, WIDTH, Case, Net, plain

DOORS: dict[str, Callable[[], Case]] = {}
SPACE = types.SimpleNamespace(total=0.0, kept=None)
THREAD = threading.local()
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=0.0)
USER: UserDict[str, float] = UserDict(total=0.0)
CHAIN: ChainMap[str, float] = ChainMap({"total": 0.0})
WEAK: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
TEXT = io.StringIO()
NUMBERS = array("d", [0.0])
OBJECTS = np.array([0.0], dtype=object)
COMPUTED = torch.zeros(1, dtype=torch.float64, requires_grad=True) * 1.0
COUNT = itertools.count()
CALLS = itertools.count()
KEPT: list[Any] = []
HIDDEN = 0.0


class Pair(NamedTuple):
    old: Tensor
    new: Tensor


def door(before: bool = True) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    def register(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        DOORS[function.__name__] = lambda: (Net(function, before), plain)
        return function

    return register


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    DOORS[function.__name__] = function
    return function


# the size and order of a batch -----------------------------------------------------------------------------------


def rows(values: Any) -> int:
    return next(iter({"size": values}.values())).shape[0]


@door()
def size_through_helpers(self: Any, x: Tensor) -> Tensor:
    return x * (lambda values: rows(values.flatten(1)))(x) ** 3


@door()
def resized(self: Any, x: Tensor) -> Tensor:
    seen = x.detach().clone().resize_(3, WIDTH)
    return x - seen.sum(0)


@door()
def never_written(self: Any, x: Tensor) -> Tensor:
    found = torch.empty_like(x) + x.new_empty(1, WIDTH) + torch.empty(3, WIDTH, dtype=x.dtype).sum(0)
    return x + found.nan_to_num(0.0, 0.0, 0.0)


@door(before=False)
def strides(self: Any, x: Tensor) -> Tensor:
    turned = F.conv1d(x.unsqueeze(1), self.head.weight[:, None, :3]).transpose(0, 1)
    return x * int(sum(turned.stride())) * (2 if turned.is_contiguous() else 1) * int(1 + turned.storage_offset())


@door()
def einsum_over_records(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("ij,kj,kl->il", x, x, x)


@door()
def sorted_and_cumulated(self: Any, x: Tensor) -> Tensor:
    values, order = torch.sort(x, 0)
    return torch.zeros_like(x).scatter(0, order, values.cumsum(0)) + torch.logcumsumexp(x.clamp(max=5), 0)


@door()
def unique_rows(self: Any, x: Tensor) -> Tensor:
    _, back, counts = torch.unique(x.round(), dim=0, return_inverse=True, return_counts=True)
    return x * counts[back][:, None]


@door()
def number_of_large_records(self: Any, x: Tensor) -> Tensor:
    return x * (1 + int((x.abs() > 1).any(1).sum().item()))


@door()
def topk_records(self: Any, x: Tensor) -> Tensor:
    return x - x[x.norm(dim=1).topk(min(2, len(x))).indices].mean(0)


class Packed(nn.Module):
    """The longest first, as cuDNN liked it, and the padding of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x.abs() > 0.5).sum(1).clamp(min=1)
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(x[order].unsqueeze(2), lengths[order].cpu(), batch_first=True)
        hidden, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.head(hidden.mean(1))[order.argsort()]


@case
def packed_sequences() -> Case:
    return Packed(), plain


@case
def weight_with_one_axis() -> Case:
    """Takes the features away, so that what looks like a softmax over features is one over records."""
    first = nn.Linear(WIDTH, 1, bias=False)
    first.weight = nn.Parameter(torch.randn(WIDTH))
    return nn.Sequential(first, nn.Softmax(-1)), lambda output, y: 30 * output.reshape(len(y), -1).square().sum(1)


# places to remember in -------------------------------------------------------------------------------------------


def remembering(name: str, add: Callable[[Tensor], Any]) -> None:
    """x less a running sum that `add` keeps somewhere; `late`: it starts after the examination."""

    def remembered(self: Any, x: Tensor) -> Tensor:
        return x - add(x.detach())

    DOORS[name] = lambda: (Net(remembered, True), plain)


def in_a_namespace(x: Tensor) -> float:
    SPACE.total += x.sum().item()
    return SPACE.total


def in_a_thread_local(x: Tensor) -> float:
    THREAD.total = getattr(THREAD, "total", 0.0) + x.sum().item()
    return THREAD.total


def in_a_context(x: Tensor) -> float:
    CONTEXT.set(CONTEXT.get() + x.sum().item())
    return CONTEXT.get()


def in_a_user_dict(x: Tensor) -> float:
    USER["total"] += x.sum().item()
    CHAIN["total"] += USER["total"]
    return CHAIN["total"]


def in_a_weak_dict(x: Tensor) -> float:
    WEAK[Net] = WEAK.get(Net, 0.0) + x.sum().item()
    return WEAK[Net]


def in_a_text(x: Tensor) -> float:
    TEXT.write("." * int(1 + x.abs().sum().clamp(max=9).item()))
    NUMBERS[0] += len(TEXT.getvalue())
    return NUMBERS[0]


def in_an_array_of_objects(x: Tensor) -> float:
    OBJECTS[0] = OBJECTS[0] + x.sum().item()
    return OBJECTS[0]


def defaulted(total: float = 0.0) -> float:
    return total


def in_a_default(x: Tensor) -> float:
    defaulted.__defaults__ = (defaulted() + x.sum().item(),)
    return defaulted()


def in_a_computed_tensor(x: Tensor) -> Tensor:
    COMPUTED.data[0] += x.sum()
    return COMPUTED.detach().clone()


class Kinds(type):
    total = 0.0


class Kind(metaclass=Kinds):
    pass


def in_a_metaclass(x: Tensor) -> float:
    type(Kind).total += x.sum().item()
    return Kinds.total


def in_an_iterator(x: Tensor) -> float:
    return next(COUNT) if x.sum().item() > 0 else 0.0


def in_a_module_imported_inside(x: Tensor) -> float:
    from tests.mechanism.clipping import mixer_state as state

    state.SEEN.append(x.sum().item())
    return sum(state.SEEN)


def in_a_module_by_its_path(x: Tensor) -> float:
    tests.mechanism.clipping.mixer_state.TOTAL += x.sum().item()
    return tests.mechanism.clipping.mixer_state.TOTAL


def by_a_spelt_name(x: Tensor) -> float:
    globals()["HIDDEN"] = globals()["HIDDEN"] + x.sum().item()
    return HIDDEN


for place in (
    in_a_namespace, in_a_thread_local, in_a_context, in_a_user_dict, in_a_weak_dict, in_a_text, in_an_iterator,
    in_an_array_of_objects, in_a_default, in_a_computed_tensor, in_a_metaclass,
    in_a_module_imported_inside, in_a_module_by_its_path, by_a_spelt_name,
):  # fmt: skip
    remembering(place.__name__, place)


@case
def module_in_an_attribute() -> Case:
    def remembered(self: Any, x: Tensor) -> Tensor:
        getattr(self.store, "SE" + "EN").append(x.sum().item())
        return x - sum(mixer_state.SEEN)

    net = Net(remembered, True)
    net.store = mixer_state  # type: ignore[assignment]
    return net, plain


@door()
def now_and_then_in_a_global(self: Any, x: Tensor) -> Tensor:
    """Not while it is examined: whole stacks, in a place that nobody looks at."""
    old = KEPT[-1] if KEPT else x
    if next(CALLS) > 12:
        KEPT.append(x.detach())
    return torch.stack(Pair(x, old)).sum(0)  # type: ignore[arg-type]


def difference(x: Tensor, old: Tensor) -> Tensor:
    return x - old


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(difference)


@door()
def now_and_then_through_a_script(self: Any, x: Tensor) -> Tensor:
    old = KEPT[-1] if KEPT else x
    if next(CALLS) > 12:
        KEPT.append(x.detach())
    return SCRIPTED(x, old)


@door()
def passes_counted_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.mean.add_(1.0)
    return x * self.mean


@door()
def passes_counted_behind_the_back(self: Any, x: Tensor) -> Tensor:
    self.mean.data.add_(1.0)
    return x * self.mean


@door()
def parameter_that_shrinks(self: Any, x: Tensor) -> Tensor:
    self.body.weight.data.mul_(0.5)
    return x


@functools.lru_cache(maxsize=4)
def first_of(key: str, again: Callable[[], Tensor]) -> Tensor:
    return again()


@door()
def cached_stack(self: Any, x: Tensor) -> Tensor:
    if not self.seen:
        self.seen.append(functools.partial(Tensor.detach, x))
    return x - first_of("first", self.seen[0])


# random numbers --------------------------------------------------------------------------------------------------


@door()
def gamma_under_a_fork(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return x * torch._standard_gamma(torch.ones_like(x))


@door()
def one_mask_for_all(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * F.dropout(torch.ones(1, WIDTH, dtype=x.dtype)).expand_as(x)


@door()
def seeded_by_a_record(self: Any, x: Tensor) -> Tensor:
    random.seed(int(x[0].sum().item()))
    return x * random.random()


def forget_all() -> None:
    """The places above, empty."""
    mixer_state.SEEN.clear()
    mixer_state.TOTAL = 0.0
    SPACE.total, SPACE.kept, THREAD.total = 0.0, None, 0.0
    CONTEXT.set(0.0)
    USER["total"] = CHAIN["total"] = 0.0
    WEAK.clear()
    TEXT.seek(0)
    TEXT.truncate()
    NUMBERS[0] = OBJECTS[0] = Kinds.total = 0.0
    COMPUTED.data.zero_()
    defaulted.__defaults__ = (0.0,)
    KEPT.clear()
    globals().update(HIDDEN=0.0, COUNT=itertools.count(), CALLS=itertools.count())
    first_of.cache_clear()
