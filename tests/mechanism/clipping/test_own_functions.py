"""Functions with a backward of their own: exact, on all records at once, and neither way sees a second record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from confide.errors import SpeedWarning
from confide.mechanism.clipping import clipped_sum, engine, own_functions
from confide.mechanism.clipping.engine import engine_of
from confide.mechanism.clipping.made_up import FEW
from confide.mechanism.clipping.reference import reference_clipped_sum

RECORDS = 8
SEEN: list[Any] = []


class Reversed(torch.autograd.Function):
    """Ganin and Lempitsky 2015: the identity, whose gradient turns round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.neg() * ctx.strength, None


class StraightThrough(torch.autograd.Function):
    """Bengio et al. 2013: rounded, as if it were not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Swish(torch.autograd.Function):
    """In the new style, with what it keeps and a factor that is learnt."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return x * torch.sigmoid(factor * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, factor = ctx.saved_tensors
        share = torch.sigmoid(factor * x)
        sloped = share * (1 - share)
        return gradient * (share + factor * x * sloped), (gradient * x.square() * sloped).sum(0)


class Parted(torch.autograd.Function):
    """Two outputs, one of which nobody may differentiate; what is kept stands in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        size, sign = x.abs(), x.sign()
        ctx.kept = [sign]
        ctx.mark_non_differentiable(sign)
        return size, sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.kept[0]


class Acting(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 5), nn.Linear(5, 3), act
        self.factor = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.act(self, self.first(x)))
        return found


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum(1)


ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reversed": lambda net, x: Reversed.apply(torch.tanh(x), 0.5),
    "straight_through": lambda net, x: StraightThrough.apply(x),
    "rounded_weights": lambda net, x: torch.tanh(x @ StraightThrough.apply(net.first.weight[:, :1] * net.factor)),
    "swish": lambda net, x: Swish.apply(x, net.factor),
    "parted": lambda net, x: Parted.apply(x)[0] * (1 + Parted.apply(x)[1]),
    "one_in_another": lambda net, x: Swish.apply(Reversed.apply(StraightThrough.apply(x), 2.0), net.factor),
}


def asked(act: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Acting(act).double(), torch.randn(RECORDS, 4).double(), torch.randn(RECORDS, 3).double()


def summed(module: nn.Module, x: Tensor, y: Tensor, by: Any = clipped_sum) -> Tensor:
    out = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    by(module, squared, x, y, clip=1.0, out=out)
    return out


def way_of(module: nn.Module) -> str:
    anatomy = engine_of(module).anatomy
    assert anatomy is not None
    (examined,) = anatomy.examined.values()
    return examined.way


@pytest.mark.parametrize("name", ACTS)
def test_sums_are_exact_on_all_records_at_once(name: str) -> None:
    module, x, y = asked(ACTS[name])
    wanted = summed(module, x, y, reference_clipped_sum)
    torch.testing.assert_close(summed(module, x, y), wanted, rtol=1e-9, atol=1e-12)
    assert way_of(module) == "isolated"


class Looking(torch.autograd.Function):
    """Adds up over the batch that it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient + gradient.sum(0) + x.sum(0)


def test_a_backward_sees_a_batch_of_one() -> None:
    """So that one which adds up over the batch adds nothing of another record."""
    module, x, y = asked(lambda net, x: Looking.apply(x))
    whole, rest = summed(module, x, y), summed(module, x[1:], y[1:])
    assert way_of(module) == "isolated"
    huge = x.clone()
    huge[0] *= 1e4
    for first in (whole, summed(module, huge, y)):
        assert float((first - rest).norm()) <= 1 + 1e-9


def test_what_runs_under_the_records_instead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the backward runs where all records are."""

    def broken(call: Any, gradients: Any) -> Any:
        kept = {name: own_functions._mapped(value, lambda part: part) for name, value in call.kept.items()}
        context = own_functions.FunctionContext(())
        vars(context).update(kept, saved_tensors=tuple(one.stack[:, 0] for one in call.kept["saved_tensors"]))
        return [call.function.backward(context, *(one[:, 0] for one in gradients))[:, None]]

    monkeypatch.setattr(own_functions.CalledBack, "backward", broken)
    with pytest.raises(AssertionError):
        test_a_backward_sees_a_batch_of_one()


class Remembering(torch.autograd.Function):
    """Leaves what it saw for the next one that comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        SEEN.append(gradient)
        return gradient + SEEN[0]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


@pytest.mark.parametrize("kind", [Remembering, Dirty])
def test_what_keeps_or_writes_runs_record_by_record_within_the_clip(kind: Any) -> None:
    module, x, y = asked(lambda net, x: kind.apply(x))
    SEEN.clear()
    with pytest.warns(SpeedWarning):
        whole = summed(module, x, y)
    assert way_of(module) == "one by one"
    assert float((whole - summed(module, x[1:], y[1:])).norm()) <= 1 + 1e-9


def test_outside_of_a_region_nothing_is_changed() -> None:
    x = torch.randn(3, requires_grad=True)
    Reversed.apply(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), -2.0))  # type: ignore[arg-type]


FAR = 8.0


def told(x: Tensor) -> Tensor:
    """A factor that no made-up record shows."""
    return torch.where(x.abs().amax() > FAR, 1e4, 1.0).to(x.dtype)


class WritesToItsGradient(torch.autograd.Function):
    """The gradient of a sum is one tensor for both of its parts: here, and behind a layer that was seen before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        before = gradient.clone()
        gradient.mul_(told(ctx.saved_tensors[0]))
        return before


class WritesToWhatItKept(WritesToItsGradient):
    """Which is also the input of a layer, whose norm was taken by then."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.autograd._unsafe_preserve_version_counter(x):  # type: ignore[attr-defined]
            x.mul_(told(x))
        return gradient


class OneAxisMore(torch.autograd.Function):
    """Gives back a gradient with an axis of as many places as there are records in an examination."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient[None] * torch.arange(1.0, 1 + FEW, dtype=gradient.dtype).view(-1, 1, 1)


class Beside(nn.Module):
    """The function beside a layer, which is called after it, so that autograd comes to the layer first."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.beside, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        found: Tensor = self.last(self.kind.apply(hidden) + self.beside(hidden))
        return found


def furthest(kind: Any, records: int) -> float:
    """How far one record less moves a sum."""
    module, x, y = Beside(kind).double(), torch.randn(records, 4).double(), torch.randn(records, 3).double()
    x[0] *= 300
    whole = summed(module, x, y)
    assert way_of(module) == "isolated"
    return max(
        float((whole - summed(module, x[keep], y[keep])).norm())
        for keep in (torch.arange(records) != place for place in range(records))
    )


WRITING: dict[Any, int] = {WritesToItsGradient: RECORDS, WritesToWhatItKept: RECORDS, OneAxisMore: FEW}


@pytest.mark.parametrize("kind", WRITING)
def test_what_a_backward_writes_or_gives_back_is_of_one_record(kind: Any) -> None:
    torch.manual_seed(1)
    assert furthest(kind, WRITING[kind]) <= 1 + 1e-9


def _handed_on(call: Any, region: Any, context: Any, output: Any, gradient: Any) -> Any:
    return region.wrap(gradient)


@pytest.mark.parametrize(
    ("kind", "where", "broken"),
    [
        (WritesToItsGradient, (own_functions.CalledBack, "_given"), _handed_on),
        (OneAxisMore, (own_functions, "_shaped"), lambda gradient, shape: gradient),
    ],
)
def test_without_a_tensor_of_its_own_it_moves_others(
    kind: Any, where: tuple[Any, str], broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(*where, broken)
    monkeypatch.setattr(engine, "even_size", lambda records, rows=1: records)  # as many axes as there are records
    with pytest.raises(AssertionError):
        assert furthest(kind, WRITING[kind]) <= 1 + 1e-9
