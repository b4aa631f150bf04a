"""More of the corpus: whole queries with a trick of their own.

Outputs with parts, layers of torch that read rows as one sequence, tensors and modes that watch, hooks of every kind,
compiled and traced code, settings that say one thing and are another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from confide.sources.queries import GradientQuery, Query
from tests.mechanism.clipping.corpus import CLASSES, WIDTH, Around, Attack, network, plain
from tests.mechanism.clipping.corpus_rows import HIDDEN, Mix, between


class Part(NamedTuple):
    said: Tensor
    balance: Tensor


@dataclasses.dataclass
class Parts:
    said: Tensor
    balance: Tensor


def _with_parts(kind: Any) -> Attack:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> Any:
            said = self.network(x)
            return kind(said, said.softmax(1).mean(0).pow(2).sum() * 9.0)

    def loss(output: Any, y: Tensor) -> Tensor:
        said, balance = (output["said"], output["balance"]) if isinstance(output, dict) else (
            (output.said, output.balance) if hasattr(output, "said") else output
        )  # fmt: skip
        return plain(said, y) * (1.0 + balance)

    return lambda: GradientQuery(Several(), loss)


class Layered(nn.Module):
    """Layers of torch that read a table of rows as one sequence, or one picture."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.layer, self.call, self.out = nn.Linear(WIDTH, HIDDEN), layer, call, nn.Linear(HIDDEN, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.out(self.call(self.layer, self.into(x)))
        return said


def _layered(layer: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]) -> Attack:
    return lambda: GradientQuery(Layered(layer(), call), plain)


def _in_sequence(*layers: Callable[[], nn.Module]) -> Attack:
    def make() -> Query:
        torch.manual_seed(3)
        inner = [layer() for layer in layers]
        return GradientQuery(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), *inner, nn.Linear(HIDDEN, CLASSES)).double(), plain
        )

    return make


class Seen(Tensor):
    """Watches whatever it meets."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.mul:
            found = found - found.mean(0)
        return found


class Mean(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **kwargs or {})
        return found - 3.0 * found.mean(0) if function is torch.tanh else found


class MeanBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **kwargs or {})
        return found - 3.0 * found.mean(0) if function is torch.ops.aten.tanh.default else found


def _in_mode(mode: Callable[[], Any]) -> Mix:
    def between(x: Tensor) -> Tensor:
        with mode():
            return torch.tanh(x) * x

    return between


class OwnRule(torch.autograd.Function):
    """A vmap rule that looks at all records."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x - x.mean(0)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * gradient.abs().sum()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class Dirty(torch.autograd.Function):
    """Writes into its input, and keeps what it saw on the class."""

    before: Any = 0.0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.mark_dirty(x)
        x.add_(Dirty.before)
        Dirty.before = float(x.detach().abs().sum()) % 5.0
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * Dirty.before


def _traced() -> Query:
    module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)).double()
    around = Around(lambda x: x - x.mean(0))
    around.network = nn.Sequential(module[0], nn.Identity(), module[1])
    return GradientQuery(torch.jit.trace(around, torch.randn(5, WIDTH, dtype=torch.float64), check_trace=False), plain)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.mean() > 0.0:
            hidden = hidden - hidden.mean(0)
        return self.second(hidden * len(x))


def _graph() -> Query:
    return GradientQuery(torch.fx.symbolic_trace(Graphed().double()), plain)


class Graphed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0) + hidden.shape[0])


def _functional() -> Query:
    inner = network()

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            moved = {name: value * x.abs().mean() for name, value in self.inner.named_parameters()}
            said: Tensor = torch.func.functional_call(self.inner, moved, (x,))
            return said

    return GradientQuery(Called(), plain)


def _hooked(register: Callable[[nn.Sequential], object]) -> Attack:
    def make() -> Query:
        module = network()
        register(module)
        return GradientQuery(module, plain)

    return make


def _stretch(values: Any) -> Any:
    return tuple(value if value is None else value * (1.0 + value.abs().sum()) for value in values)


def _node_hook(x: Tensor) -> Tensor:
    found = x * 1.0
    if found.grad_fn is not None:
        found.grad_fn.register_hook(lambda given, got: _stretch(given))
    return found


def _node_prehook(x: Tensor) -> Tensor:
    found = x * 1.0
    if found.grad_fn is not None:
        found.grad_fn.register_prehook(lambda got: _stretch(got))
    return found


def _multi_hook(x: Tensor) -> Tensor:
    kept: list[Any] = [0.0]
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((x,), lambda got: kept.append(got[0].sum()))
        x.register_hook(lambda got: got * (1.0 + len(got)))
    return x


def _saved(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value - value.mean(0), lambda value: value):
        return x * x


class Smooth(nn.Module):
    """A running normaliser, in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * x.detach().abs().mean())
            self.steps += 1
        return x / self.scale * self.steps


class Codes(nn.Module):
    """A codebook that follows the batch by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(3, HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.detach(), self.book).argmin(1)
        with torch.no_grad():
            for code in range(3):
                if bool((chosen == code).any()):
                    self.book[code] = x.detach()[chosen == code].mean(0)
        return x + (self.book[chosen] - x).detach() * 3.0


class Liar(int):
    """Says one thing to who asks, and is another."""

    def __mod__(self, other: int) -> int:
        return 1

    def __ge__(self, other: int) -> bool:
        return True

    def __le__(self, other: int) -> bool:
        return True


def _lying_softmax() -> Query:
    torch.manual_seed(0)
    inner: Any = nn.Softmax(dim=1)
    inner.dim = Liar(0)
    module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), inner, nn.Linear(HIDDEN, CLASSES)).double()
    with torch.no_grad():
        module[2].weight.mul_(9.0)
    return GradientQuery(module, plain)


def _adaptive_dropout() -> Query:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.drop = network(), nn.Dropout(0.5).eval()

        def forward(self, x: Tensor) -> Tensor:
            self.drop.p = 1.0 / (1.0 + math.sqrt(len(x)))
            said: Tensor = self.network[2](self.drop(self.network[0](x))) * self.drop.p * 9.0
            return said

    return GradientQuery(Adaptive(), plain)


def _looked_up(**settings: Any) -> Attack:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(5, HIDDEN, **settings).double(), nn.Linear(HIDDEN, CLASSES).double()

        def forward(self, x: Tensor) -> Tensor:
            said: Tensor = self.out(self.table(x[:, 0].detach().abs().long() % 5))
            return said

    return lambda: GradientQuery(Looked(), plain)


def _normalised(name: str) -> Attack:
    def make() -> Query:
        module = network()
        with torch.no_grad():
            getattr(parametrizations, name)(module[0])
        module[2].register_forward_pre_hook(lambda layer, given: (given[0] - given[0].mean(0),))
        return GradientQuery(module, plain)

    return make


BUILT: dict[str, Attack] = {
    "named parts": _with_parts(Part),
    "parts of a dataclass": _with_parts(Parts),
    "parts of a dict": _with_parts(lambda said, balance: {"said": said, "balance": balance}),
    "a tuple": _with_parts(lambda said, balance: (said, balance)),
    "GRU of the batch": _layered(lambda: nn.GRU(HIDDEN, HIDDEN), lambda layer, x: layer(x)[0]),
    "LSTM of the batch": _layered(lambda: nn.LSTM(HIDDEN, HIDDEN), lambda layer, x: layer(x)[0]),
    "LSTM, records second": _layered(lambda: nn.LSTM(HIDDEN, HIDDEN), lambda layer, x: layer(x[:, None])[0][:, 0]),
    "attention of the batch": _layered(
        lambda: nn.MultiheadAttention(HIDDEN, 2), lambda layer, x: layer(x[:, None], x[:, None], x[:, None])[0][:, 0]
    ),
    "encoder of the batch": _in_sequence(lambda: nn.TransformerEncoderLayer(HIDDEN, 2, 8, 0.0)),
    "attention, no records": _layered(lambda: nn.MultiheadAttention(HIDDEN, 2), lambda layer, x: layer(x, x, x)[0]),
    "softmax without an axis": _layered(lambda: nn.Softmax(), lambda layer, x: layer(x[:, None])[:, 0] * 9.0),
    "softmax of pictures": _layered(lambda: nn.Softmax2d(), lambda layer, x: layer(x[:, :, None])[:, :, 0] * 9.0),
    "softmax along the batch": _in_sequence(lambda: nn.Softmax(dim=0)),
    "softmax along minus two": _in_sequence(lambda: nn.LogSoftmax(dim=-2)),
    "instance norm": _layered(lambda: nn.InstanceNorm1d(HIDDEN), lambda layer, x: layer(x.mT[None]).squeeze(0).mT),
    "batch norm": _in_sequence(lambda: nn.BatchNorm1d(HIDDEN)),
    "batch norm without memory": _in_sequence(lambda: nn.BatchNorm1d(HIDDEN, track_running_stats=False).eval()),
    "flattened and back": _in_sequence(
        lambda: nn.Unflatten(0, (1, -1)), lambda: nn.Softmax(1), lambda: nn.Flatten(0, 1)
    ),
    "a dim that lies": _lying_softmax,
    "frequencies of the batch": _looked_up(scale_grad_by_freq=True),
    "rows rescaled": _looked_up(max_norm=0.1),
    "dropout set by size": _adaptive_dropout,
    "a running scale": lambda: GradientQuery(
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), Smooth(), nn.Linear(HIDDEN, CLASSES)).double(), plain
    ),
    "a codebook": lambda: GradientQuery(
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), Codes(), nn.Linear(HIDDEN, CLASSES)).double(), plain
    ),
    "a subclass of Tensor": between(lambda x: torch.Tensor.mul(x.as_subclass(Seen), 3.0).as_subclass(Tensor)),
    "a mode": between(_in_mode(Mean)),
    "a mode below": between(_in_mode(MeanBelow)),
    "a vmap rule": between(lambda x: OwnRule.apply(x)),
    "a function that writes": between(lambda x: Dirty.apply(x * 1.0)),
    "traced": _traced,
    "scripted": lambda: GradientQuery(torch.jit.script(Scripted().double()), plain),
    "a graph of fx": _graph,
    "functional call": _functional,
    "backward hook": _hooked(lambda m: m[0].register_full_backward_hook(lambda layer, given, got: _stretch(given))),
    "backward hook before": _hooked(
        lambda module: module[2].register_full_backward_pre_hook(lambda layer, got: _stretch(got))
    ),
    "hook of a parameter": _hooked(
        lambda module: module[0].weight.register_hook(lambda got: got * (1.0 + got.abs().sum()))
    ),
    "hook after accumulating": _hooked(
        lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda value: value.grad.mul_(9.0))
    ),
    "hook with keywords": _hooked(
        lambda module: module[0].register_forward_hook(
            lambda layer, given, named, output: output - output.mean(0), with_kwargs=True
        )
    ),
    "hook always called": _hooked(
        lambda m: m[0].register_forward_hook(lambda layer, given, output: output * len(output), always_call=True)
    ),
    "hook of a node": between(_node_hook),
    "hook before a node": between(_node_prehook),
    "hook of several": between(_multi_hook),
    "hooks of what is saved": between(_saved),
    "weight norm": _normalised("weight_norm"),
    "spectral norm": _normalised("spectral_norm"),
    "orthogonal weights": _normalised("orthogonal"),
    "a checkpoint": between(
        lambda x: torch.utils.checkpoint.checkpoint(lambda v: v - v.mean(0), x, use_reentrant=True)
    ),
}
