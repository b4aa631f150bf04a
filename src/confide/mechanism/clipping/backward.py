"""The backward pass, in which every layer is given its gradient as it comes.

The output gradients of all layers together are as large as all activations. A layer that takes its own when autograd
gets there finds it in cache, and what it does not need any more is let go before autograd goes on. So autograd is asked
for the last gradients of every path only; at the others it passes by, and a hook of ours hears it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edges: TypeAlias = Sequence[GradientEdge | None]
Take: TypeAlias = Callable[[int, Sequence[Tensor | None]], None]


def propagate(losses: Tensor, calls: Sequence[Edges], leaves: Mapping[int, Tensor], take: Take) -> dict[int, Tensor]:
    """One backward of the summed losses: `take` is given the number of every call and the gradients of its outputs,
    None where the losses do not depend on one; the gradients of the leaves come back.

    A call with one output is given its gradient at once, one with several when all are there for certain: at the end.
    """
    found: list[list[Tensor | None]] = [[None] * len(edges) for edges in calls]
    nodes = {edge.node for edges in calls for edge in edges if edge is not None}
    ends = _ends(losses, nodes | {get_gradient_edge(leaf).node for leaf in leaves.values()}) & nodes
    last: list[tuple[int, int]] = []
    passed: list[tuple[Node, Callable[[Any], None]]] = []

    def hear(number: int, position: int, output: int, gradients: Sequence[Tensor | None]) -> None:
        if len(calls[number]) == 1:
            take(number, [gradients[output]])
        else:
            found[number][position] = gradients[output]

    for number, edges in enumerate(calls):
        for position, edge in enumerate(edges):
            if edge is not None and edge.node in ends:
                last.append((number, position))
            elif edge is not None:
                passed.append((edge.node, partial(hear, number, position, edge.output_nr)))
    wanted: list[Any] = [*(calls[number][position] for number, position in last), *leaves.values()]
    with _heard(passed):
        gradients = torch.autograd.grad(losses, wanted, torch.ones_like(losses), allow_unused=True)
    for (number, position), gradient in zip(last, gradients, strict=False):
        found[number][position] = gradient
    at_leaves = zip(leaves, gradients[len(last) :], strict=True)
    heard = {number for number, edges in enumerate(calls) if len(edges) == 1 and (number, 0) not in set(last)}
    for number in range(len(calls)):
        if number not in heard:
            take(number, found[number])
            found[number] = []
    return {index: gradient for index, gradient in at_leaves if gradient is not None}


@contextmanager
def _heard(passed: Sequence[tuple[Node, Callable[[Any], None]]]) -> Iterator[None]:
    """Taken away again whatever happens: a node that holds a hook which holds the node would never be let go."""
    handles = [node.register_prehook(hook) for node, hook in passed]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ends(losses: Tensor, wanted: set[Node]) -> set[Node]:
    """Those of the wanted nodes from which no way leads on to another: asked for these, autograd passes all others."""
    leads_on: dict[Node, bool] = {}
    waiting: list[Any] = [losses.grad_fn]
    while waiting:
        node = waiting[-1]
        inner = [next_node for next_node, _ in node.next_functions if next_node is not None]
        unknown = [next_node for next_node in inner if next_node not in leads_on]
        if unknown:
            waiting += unknown
            continue
        leads_on[waiting.pop()] = any(next_node in wanted or leads_on[next_node] for next_node in inner)
    return {node for node in wanted if not leads_on.get(node, False)}
