"""Every layer is given its gradient as it comes: the right one, once, and none is held for the others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from confide.mechanism.clipping.backward import Edges, Take, propagate

LAYERS = 6


def graph() -> tuple[Tensor, list[Edges], dict[int, Tensor]]:
    """A trunk, a branch off it, a call with two outputs of one operation, one that nothing uses, and a copy."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(3)]
    copy = torch.randn(5, 4, generator=generator, requires_grad=True)
    first = torch.randn(5, 4, generator=generator) @ weights[0]
    left, right = (first.tanh() @ weights[1]).split(2, 1)
    branch = first.sin() @ weights[2]
    unused = first.exp()
    losses = (torch.cat([left.square(), right], 1) * branch.relu() + branch * copy).sum(1)
    outputs: list[list[Tensor]] = [[first], [left, right], [branch], [unused]]
    edges = [[get_gradient_edge(output) for output in call] for call in outputs]
    return losses, [*edges, [None, edges[0][0]]], {7: copy}


def all_at_once(losses: Tensor, calls: Sequence[Edges], copies: dict[int, Tensor], take: Take) -> dict[int, Tensor]:
    """What `propagate` stands for: autograd asked for everything."""
    wanted: list[GradientEdge | Tensor] = [edge for edges in calls for edge in edges if edge is not None]
    found = torch.autograd.grad(losses, [*wanted, *copies.values()], torch.ones_like(losses), allow_unused=True)
    gradients = iter(found)
    for number, edges in enumerate(calls):
        take(number, [None if edge is None else next(gradients) for edge in edges])
    return {index: gradient for index in copies if (gradient := next(gradients)) is not None}


def test_every_call_gets_what_autograd_gives_and_once() -> None:
    answers = []
    for backward in (propagate, all_at_once):
        taken: dict[int, Sequence[Tensor | None]] = {}

        def take(number: int, gradients: Sequence[Tensor | None], taken: dict = taken) -> None:  # type: ignore[type-arg]
            assert number not in taken
            taken[number] = gradients

        answers.append((taken, backward(*graph(), take)))
    (mine, at_copies), (theirs, expected) = answers
    assert mine.keys() == theirs.keys() == {0, 1, 2, 3, 4}
    for number, gradients in theirs.items():
        assert len(mine[number]) == len(gradients)
        for one, other in zip(mine[number], gradients, strict=True):
            assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]
    assert torch.equal(at_copies[7], expected[7])


def most_alive(backward: Callable[..., object]) -> int:
    """How many of the gradients of a chain of layers are held at a time."""
    hidden, calls = torch.ones(3, 4), []
    for _ in range(LAYERS):
        hidden = (hidden @ torch.ones(4, 4, requires_grad=True)) / 4
        calls.append([get_gradient_edge(hidden)])
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def take(number: int, gradients: Sequence[Tensor | None]) -> None:
        (gradient,) = gradients
        assert gradient is not None
        seen.append(weakref.ref(gradient.untyped_storage()))  # type: ignore[arg-type]
        gc.collect()
        alive.append(sum(one() is not None for one in seen))

    backward(hidden.sin().sum(1), calls, {}, take)
    assert len(alive) == LAYERS
    return max(alive)


def test_no_gradient_is_held_for_the_others() -> None:
    assert most_alive(propagate) <= 2


def test_a_pass_that_asks_for_all_is_caught() -> None:
    assert most_alive(all_at_once) == LAYERS


def test_an_error_of_a_rule_is_the_error_that_is_seen() -> None:
    def take(number: int, gradients: Sequence[Tensor | None]) -> None:
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 2"):
        propagate(*graph(), take)
