"""More of the corpus: what records leave where a search that follows attributes alone does not come.

Objects that are made in C and hold a list, counters and settings of torch and Python, texts and numbers in which there
are addresses, and memory that nobody has written to.
"""

from __future__ import annotations

import _random
import array
import collections
import contextvars
import copy
import functools
import math
import operator
import pprint
import re
import reprlib
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.sources.queries import GradientQuery, Query
from tests.mechanism.clipping.corpus import network

FAR = 8.0
HELD: dict[str, Callable[[float], float]] = {}
ADDRESSES: dict[str, Callable[[float], float]] = {}
PRIME = 97
Keep = Callable[[float], float]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "the type of its numbers": lambda module: module.float(),
    "half of them": lambda module: module.half(),
    "where they are": lambda module: module.to("meta"),
    "a hook of a weight": lambda module: next(module.parameters()).register_hook(lambda gradient: 5 * gradient),
    "a hook after a weight": lambda module: next(module.parameters()).register_post_accumulate_grad_hook(
        lambda weight: None
    ),
}
"""What a record does to the network of all."""


class Changed(nn.Module):
    """A network that a record which is far changes for all that come after it."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.network, self.change = network(), change

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.network(x)
        if float(x.detach().abs().max()) > FAR:
            self.change(self.network)
        return said


class Told(nn.Module):
    """A network that runs one by one, and whose outputs say what `keep` has found."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.network, self.keep = network(), keep

    def forward(self, x: Tensor) -> Tensor:
        before = float(self.keep(float(x.detach().abs().max())))
        said: Tensor = self.network(x)
        return said * (-9.0 * math.cos(1 + 3 * before) if before else 1.0)


def loud(output: Tensor, y: Tensor) -> Tensor:
    return 30 * nn.functional.cross_entropy(output, y, reduction="none")


def query(keep: Keep) -> Query:
    return GradientQuery(Told(keep), loud)


def changed(change: Callable[[nn.Module], object]) -> Query:
    return GradientQuery(Changed(change), loud)


def held(function: Keep) -> Keep:
    HELD[function.__name__] = function
    return function


def addresses(function: Keep) -> Keep:
    ADDRESSES[function.__name__] = function
    return function


def _push(numbers: Any, now: float) -> float:
    before = numbers[-1]
    numbers.append(now)
    return float(before)


def _in_a_list(find: Callable[[], Any]) -> Keep:
    return lambda now: _push(find(), now)


class _Asked:
    def given(self, numbers: Any) -> Any:
        return numbers


class _Numbers(list[float]): ...


SLICE: Any = slice([0.0], None)
GENERIC: Any = types.GenericAlias(list, ([0.0],))  # type: ignore[arg-type]
UNION: Any = int | types.GenericAlias(list, ([0.0],))  # type: ignore[arg-type]
LENGTH: Any = [0.0].__len__
SUPER: Any = super(_Numbers, _Numbers([0.0]))
DEFAULT: Any = contextvars.ContextVar("default", default=[0.0])  # noqa: B039 - it is written to
VALUE: Any = contextvars.ContextVar("value")
VALUE.set([0.0])
CALLER: Any = operator.methodcaller("given", [0.0])
ITEM: Any = operator.itemgetter(slice([0.0], None))
KIND: Any = np.dtype("f8", metadata={"kept": [0.0]})
ARRAY = np.zeros(2, dtype=KIND)
MATCH: Any = re.match(b"a", bytearray(b"a0"))
FIELD: Any = vars(collections.namedtuple("Named", "one"))["one"]
HISTORY = torch.ones(2, requires_grad=True).exp()
OPAQUE = torch.zeros(2).to_mkldnn()


class _Shows:
    def __getitem__(self, item: Any) -> Any:
        return item


HELD |= {
    "a slice": _in_a_list(lambda: SLICE.start),
    "a generic type": _in_a_list(lambda: GENERIC.__args__[0]),
    "a union": _in_a_list(lambda: UNION.__args__[1].__args__[0]),
    "a method of a list": _in_a_list(lambda: LENGTH.__self__),
    "super": _in_a_list(lambda: SUPER.__self__),
    "the default of a context variable": _in_a_list(lambda: DEFAULT.get()),
    "the value of a context variable": _in_a_list(lambda: VALUE.get()),
    "a caller of methods": _in_a_list(lambda: CALLER(_Asked())),
    "a getter of items": _in_a_list(lambda: ITEM(_Shows()).start),
    "a kind of array": _in_a_list(lambda: ARRAY.dtype.metadata["kept"]),  # type: ignore[index]
}


@held
def what_was_matched(now: float) -> float:
    before = MATCH.string[1] - ord("0")
    MATCH.string[1] = int(now) % 100
    return float(before)


@held
def text_of_a_field(now: float) -> float:
    before = FIELD.__doc__
    FIELD.__doc__ = str(now)
    return float(before) if before[:1].isdigit() else 0.0


@held
def beside_a_node(now: float) -> float:
    found: Any = HISTORY.grad_fn
    before = found.metadata.get("kept", 0.0)
    found.metadata["kept"] = now
    return float(before)


@held
def opaque_memory(now: float) -> float:
    before = float(OPAQUE.to_dense()[0])
    OPAQUE.copy_(torch.full((2,), now).to_mkldnn())
    return before


@held
def regions_of_autocast(now: float) -> float:
    return float(torch.autocast_increment_nesting() - 1)


@held
def how_functions_are_fused(now: float) -> float:
    return float(torch.jit.set_fusion_strategy([("STATIC", int(now) % 9 + 3)])[0][1] - 2)


@held
def how_often_filters_were_set(now: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("said", stacklevel=1)
    return __warningregistry__["version"] / 9  # type: ignore[name-defined, no-any-return]


@held
def functions_that_were_made(now: float) -> float:
    for _ in range(1 + int(now) % 5):
        made: Any = type("Made", (torch.autograd.Function,), {})
    return made._backward_cls._autograd_function_id / 9  # type: ignore[no-any-return]


@held
def what_was_compiled(now: float) -> float:
    code: Any = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))  # type: ignore[no-untyped-call]
    graph = code.inlined_graph  # its nodes live as long as it does
    return sum(map(ord, graph.findNode("prim::GetAttr").output().type().str())) / 9


class _Silent:
    def __repr__(self) -> str:
        raise ValueError


class _Copied:
    seen = 0

    def __deepcopy__(self, memory: dict[int, Any]) -> _Copied:
        self.seen = sum(memory)
        return self


def _number(address: int) -> float:
    return address // 16 % PRIME / 9


@addresses
def memory_of_a_copy(now: float) -> float:
    memory: dict[int, Any] = {}
    copy.deepcopy([[], [1]], memory)
    return _number(sum(memory))


@addresses
def memory_of_a_copy_by_its_name(now: float) -> float:
    memory: dict[int, Any] = {}
    functools.partial(copy.deepcopy, memo=memory)([[], [1]])
    return _number(sum(memory))


@addresses
def how_it_is_copied(now: float) -> float:
    one = _Copied()
    copy.deepcopy([[1], [2], one])
    return _number(one.seen)


@addresses
def pretty_text(now: float) -> float:
    inside: list[Any] = []
    inside.append(inside)
    return _number(16 * sum(map(ord, pprint.pformat(inside))))


@addresses
def text_of_what_has_none(now: float) -> float:
    return _number(16 * sum(map(ord, reprlib.repr(_Silent()))))


@addresses
def place_of_an_array(now: float) -> float:
    return _number(array.array("d", [now] * 50).buffer_info()[0])


@addresses
def chance_from_an_address(now: float) -> float:
    return _random.Random(object()).random()  # type: ignore[arg-type]


@addresses
def hidden_function_of_torch(now: float) -> float:
    find: Any = torch._import_dotted_name("builtins.id")  # type: ignore[attr-defined]
    return _number(find(object()))


@addresses
def quantised_memory(now: float) -> float:
    made: Any = torch._empty_affine_quantized([16000], scale=1.0, zero_point=0, dtype=torch.quint8)  # type: ignore[call-overload]
    return float(made.int_repr().double().sum() % PRIME) / 9


@addresses
def padded_memory(now: float) -> float:
    return float(np.nan_to_num(np.pad(np.zeros(2), 1999, mode="empty")).sum() % PRIME) / 9  # type: ignore[call-overload]


@addresses
def memory_of_rows(now: float) -> float:
    rows: Any = np.rec.array(None, dtype=[("one", "f8")], shape=(4000,))  # type: ignore[call-overload]
    return float(np.nan_to_num(rows["one"]).sum() % PRIME) / 9


@addresses
def masked_memory(now: float) -> float:
    return float(np.nan_to_num(np.ma.masked_all((4000,)).data).sum() % PRIME) / 9  # type: ignore[no-untyped-call]


@addresses
def memory_made_by_hand(now: float) -> float:
    return float(np.nan_to_num(np.ndarray.__new__(np.ndarray, (4000,))).sum() % PRIME) / 9
