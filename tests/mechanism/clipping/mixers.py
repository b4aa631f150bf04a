"""Modules and losses in which records would touch each other, if they could: each its own way."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 4, 3
Loss = Callable[[Any, Any], Tensor]
Case = tuple[nn.Module, Loss]
MIXERS: dict[str, Callable[[], Case]] = {}
LOG: list[Any] = []
MEMORY: dict[str, Any] = {}
COUNTER = 0


def plain(output: Tensor, y: Tensor) -> Tensor:
    return 30 * F.cross_entropy(output, y, reduction="none")


class Net(nn.Module):
    """A body and a head, with something between."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], before: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between, self.before = between, before
        self.seen: list[Tensor] = []
        self.kept: Any = None
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            return self.head(torch.tanh(self.body(self.between(self, x))))
        return self.head(self.between(self, torch.tanh(self.body(x))))


def mixer(function: Callable[[], Case]) -> Callable[[], Case]:
    MIXERS[function.__name__] = function
    return function


def between(before: bool = False) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    def register(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        MIXERS[function.__name__] = lambda: (Net(function, before), plain)
        return function

    return register


# statistics of the batch ----------------------------------------------------------------------------------------


@between(before=True)
def whitened(self: Any, x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)


@between()
def whitened_by_constants(self: Any, x: Tensor) -> Tensor:
    return x / (x.detach().norm() + 1e-3)


@between(before=True)
def scaled_by_the_largest(self: Any, x: Tensor) -> Tensor:
    return x / x.abs().max()


@between()
def weighted_by_rank(self: Any, x: Tensor) -> Tensor:
    return x * (x[:, :1].argsort(0).argsort(0).to(x.dtype) + 1)


@between()
def attention_over_records(self: Any, x: Tensor) -> Tensor:
    return torch.softmax(x @ x.t(), -1) @ x


@between()
def power_of_the_size(self: Any, x: Tensor) -> Tensor:
    return x * (x.shape[0] / 10) ** 6


@between()
def odd_or_even(self: Any, x: Tensor) -> Tensor:
    return x if len(x) % 2 else -x


@between()
def running_sum(self: Any, x: Tensor) -> Tensor:
    return x.cumsum(0)


@between()
def rolled(self: Any, x: Tensor) -> Tensor:
    return x + x.roll(1, 0)


@between()
def mixed_up(self: Any, x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return share * x + (1 - share) * x[torch.randperm(len(x))]


@between()
def position_in_the_batch(self: Any, x: Tensor) -> Tensor:
    return x * torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None]


@between()
def ghost_batches(self: Any, x: Tensor) -> Tensor:
    return torch.cat([part - part.mean(0) for part in x.split(4)])


@between()
def folded_into_features(self: Any, x: Tensor) -> Tensor:
    return x.reshape(-1, WIDTH).flip(0).reshape(x.shape)


@between()
def seen_through_numpy(self: Any, x: Tensor) -> Tensor:
    return x * float(np.median(x.detach().numpy()))


@between()
def cut_to_the_longest(self: Any, x: Tensor) -> Tensor:
    longest = int((x.abs() > 0.3).sum(1).max().clamp(min=1))
    return F.pad(x[:, :longest], (0, WIDTH - longest)) * longest


@between()
def hardest_records_only(self: Any, x: Tensor) -> Tensor:
    keep = x.norm(dim=1).argsort(descending=True) < max(1, len(x) // 2)
    return x * keep[:, None]


@between()
def masked_rows(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    positive = x[:, 0] > 0
    out[positive] = x[positive] * positive.sum()
    return out


@between()
def experts_with_room_for_four(self: Any, x: Tensor) -> Tensor:
    chosen = F.one_hot((x[:, 0] > 0).long(), 2).to(x.dtype)
    kept = chosen * (chosen.cumsum(0) <= max(4, len(x) // 3))
    return x * kept.sum(1, keepdim=True)


@between()
def no_two_alike(self: Any, x: Tensor) -> Tensor:
    values = torch.unique((x * 2).round(), dim=0)
    return x * len(values)


# memory ---------------------------------------------------------------------------------------------------------


@between(before=True)
def moving_average(self: Any, x: Tensor) -> Tensor:
    self.mean.lerp_(x.detach().mean(0), 0.5)
    return x - self.mean


@between(before=True)
def moving_average_behind_the_back(self: Any, x: Tensor) -> Tensor:
    self.mean.data.copy_(self.mean.data * 0.5 + x.detach().mean(0))
    return x - self.mean


@between(before=True)
def last_batch_in_an_attribute(self: Any, x: Tensor) -> Tensor:
    before, self.kept = self.kept, x.detach().mean(0)
    return x if before is None else x - before


@between(before=True)
def history_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.detach().sum(0))
    return x + sum(self.seen)


@between(before=True)
def history_in_a_global(self: Any, x: Tensor) -> Tensor:
    LOG.append(x.detach().sum(0))
    return x + sum(LOG)


@between(before=True)
def older_history_in_a_global(self: Any, x: Tensor) -> Tensor:
    LOG.append(x.detach().sum(0))
    return x + (LOG[-2] if len(LOG) > 1 else 0)


@between(before=True)
def numbers_in_a_global(self: Any, x: Tensor) -> Tensor:
    global COUNTER
    COUNTER += int(x.sum() > 0)
    return x * (COUNTER + 1)


@between(before=True)
def attribute_of_the_class(self: Any, x: Tensor) -> Tensor:
    type(self).largest = max(getattr(type(self), "largest", 0.0), x.detach().abs().max().item())
    return x / type(self).largest


@functools.cache
def first_seen(key: int) -> list[float]:
    return []


@between(before=True)
def cached(self: Any, x: Tensor) -> Tensor:
    first_seen(0).append(float(x.sum()))
    return x * (1 + len(first_seen(0)))


@mixer
def history_in_a_closure() -> Case:
    total = torch.zeros(WIDTH, dtype=torch.float64)

    def remembered(self: Any, x: Tensor) -> Tensor:
        nonlocal total
        total = total + x.detach().sum(0)
        return x - total

    return Net(remembered, True), plain


@mixer
def array_in_a_default() -> Case:
    def remembered(self: Any, x: Tensor, kept: Any = np.zeros(WIDTH)) -> Tensor:  # noqa: B008
        kept += x.detach().numpy().sum(0)
        return x - torch.from_numpy(kept.copy())

    return Net(remembered, True), plain


class Book:
    __slots__ = ("pages",)

    def __init__(self) -> None:
        self.pages: Any = 0.0


@mixer
def object_with_slots() -> Case:
    book = Book()

    def remembered(self: Any, x: Tensor) -> Tensor:
        book.pages = book.pages + x.detach().mean().item()
        return x - book.pages

    return Net(remembered, True), plain


class Diary:
    """Its only slot has a private name, and a property stands before it in a class further down."""

    __slots__ = ("__pages", "size")

    def __init__(self) -> None:
        self.__pages: Any = 0.0
        self.size: Any = 0.0

    def write(self, more: float) -> float:
        self.__pages = self.__pages + more
        return float(self.__pages)


class CountedDiary(Diary):
    __slots__ = ()
    size = property(lambda self: (1, 2))  # type: ignore[assignment]

    def __init__(self) -> None:
        Diary.size.__set__(self, 0.0)  # type: ignore[attr-defined]

    def count(self, more: float) -> float:
        slot: Any = vars(Diary)["size"]
        slot.__set__(self, slot.__get__(self) + more)
        return float(slot.__get__(self))


@mixer
def slot_with_a_private_name() -> Case:
    diary = Diary()

    def remembered(self: Any, x: Tensor) -> Tensor:
        return x - diary.write(x.detach().mean().item())

    return Net(remembered, True), plain


@mixer
def slot_behind_a_property() -> Case:
    diary = CountedDiary()

    def remembered(self: Any, x: Tensor) -> Tensor:
        return x - diary.count(x.detach().mean().item())

    return Net(remembered, True), plain


# random numbers -------------------------------------------------------------------------------------------------


@between()
def masks_from_a_seed(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * (torch.rand(x.shape) > 0.5)


@between()
def masks_from_a_generator(self: Any, x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) > 0.5)


@between()
def masks_from_its_own_generator(self: Any, x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


@between()
def masks_from_a_seed_for_some(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        random.seed(1)
    return x * random.random()


@between()
def masks_under_a_fork(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return F.dropout(x, 0.5)


# backwards ------------------------------------------------------------------------------------------------------


@between()
def gradient_hook(self: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
    return x


@mixer
def full_backward_hook() -> Case:
    net = Net(lambda self, x: x)
    net.head.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] - inputs[0].mean(0),))
    return net, plain


@mixer
def hook_on_a_parameter() -> Case:
    net = Net(lambda self, x: x)
    net.head.weight.register_hook(lambda gradient: gradient * 1e3)
    return net, plain


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.abs().sum() + 1e-6)


class Generated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        MEMORY["gradient"] = MEMORY.get("gradient", 0) + gradient.detach().sum()
        return gradient - MEMORY["gradient"]


class Escaping(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, axes: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(axes[0], keepdim=True), axes[0]


for kind in (Normalised, Generated, Escaping):
    MIXERS[f"function_{kind.__name__.lower()}"] = lambda kind=kind: (Net(lambda self, x: kind.apply(x)), plain)


@between()
def gradient_taken_in_the_forward(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(inner.square().sum() * inner.sum(), inner)
    return x + found


@between()
def saved_tensors(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t - t.mean(0) if t.dim() > 1 else t):
        return torch.tanh(x) * x


@between()
def checkpointed(self: Any, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda value: value - value.mean(0), x, use_reentrant=False)


@between()
def inner_vmap(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda column: column / column.norm(), in_dims=1, out_dims=1)(x)


@between()
def read_from_its_text(self: Any, x: Tensor) -> Tensor:
    return x * len(repr(x))


# losses ---------------------------------------------------------------------------------------------------------


def loss(function: Loss) -> Loss:
    MIXERS[function.__name__] = lambda: (Net(lambda self, x: x), function)
    MIXERS[f"{function.__name__}, on a chain"] = lambda: (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)),
        function,
    )
    return function


@loss
def divided_by_the_batch(output: Tensor, y: Tensor) -> Tensor:
    return plain(output, y) * 100 / len(y)


@loss
def class_weights_of_the_batch(output: Tensor, y: Tensor) -> Tensor:
    return (
        F.cross_entropy(output, y, len(y) / (1.0 + torch.bincount(y, minlength=CLASSES).double()), reduction="none")
        * 30
    )


@loss
def contrastive(output: Tensor, y: Tensor) -> Tensor:
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.t(), torch.arange(len(y)), reduction="none") + plain(output, y)


@loss
def hard_examples(output: Tensor, y: Tensor) -> Tensor:
    values = plain(output, y)
    return values * (values >= values.quantile(0.7))


@loss
def relative(output: Tensor, y: Tensor) -> Tensor:
    values = plain(output, y)
    return values / values.detach().mean()


@loss
def kept_baseline(output: Tensor, y: Tensor) -> Tensor:
    values = plain(output, y)
    MEMORY["baseline"] = 0.9 * MEMORY.get("baseline", 0) + values.detach().mean()
    return values * MEMORY["baseline"]


@loss
def shuffled_labels(output: Tensor, y: Tensor) -> Tensor:
    return plain(output, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))])
