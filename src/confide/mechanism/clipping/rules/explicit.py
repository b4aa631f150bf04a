"""Layers that hide linear maps: run through an equivalent forward that shows them.

Attention and recurrent layers call fused kernels, so nothing inside them can be observed. While the engine runs,
such a layer's forward is an equivalent one that does its linear maps through `Linear`, which records them; each
of them is then clipped by the rule of an ordinary linear layer. The layer itself is left as it was afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from confide.mechanism.clipping.rules.registry import lookup


class Linear(Protocol):
    """inputs @ weight[rows]^T + bias[bias_rows], records on axis 0, the parameters given by name.

    `bias_rows` are the rows of the weight unless given. Of a stack of matrices one row is one matrix.
    """

    @property
    def at_once(self) -> bool:
        """Whether all records are given at once, outside of vmap, with nothing beside the input."""

    def __call__(
        self,
        layer: nn.Module,
        inputs: Tensor,
        weight: str,
        bias: str | None,
        rows: tuple[int, int] | None = None,
        bias_rows: tuple[int, int] | None = None,
    ) -> Tensor: ...

    def added(
        self,
        layer: nn.Module,
        inputs: Tensor,
        weight: str,
        bias: str | None,
        onto: Tensor,
        pieces: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """A map that was made in pieces (output, input), each added to its part of what another map gave.

        What reaches that output reaches the pieces: one call stands for all of them, with the `inputs` of all.
        """


@dataclass(frozen=True)
class Explicit:
    """An equivalent forward(linear, layer, *inputs) and the layers it is equivalent for.

    `at_once` says of a layer whether that forward keeps records apart on axis 0 of a single input, so that it may run
    on all of them outside of vmap; it gives outputs with the records on axis 0, and states with the records on axis 1.
    """

    forward: Callable[..., Any]
    accepts: Callable[[Any], bool]
    at_once: Callable[[Any], bool] = lambda layer: False


_EXPLICIT: dict[type[nn.Module], Explicit] = {}
_DESCRIBED: list[Explicit] = []
Forward = TypeVar("Forward", bound=Callable[..., Any])


def explicit_forward_for(
    *layer_types: type[nn.Module], accepts: Callable[[Any], bool], at_once: Callable[[Any], bool] = Explicit.at_once
) -> Callable[[Forward], Forward]:
    """Register the decorated function as the explicit forward of `layer_types`."""

    def register(function: Forward) -> Forward:
        for layer_type in layer_types:
            _EXPLICIT[layer_type] = Explicit(function, accepts, at_once)
        return function

    return register


def explicit_forward_where(accepts: Callable[[Any], bool]) -> Callable[[Forward], Forward]:
    """The same for layers of a library that need not be installed, known by what they say about themselves."""

    def register(function: Forward) -> Forward:
        _DESCRIBED.append(Explicit(function, accepts))
        return function

    return register


def find_explicit(layer: nn.Module) -> Explicit | None:
    explicit: Explicit | None = lookup(_EXPLICIT, layer)
    if explicit is None and "forward" not in vars(layer):
        return next((described for described in _DESCRIBED if described.accepts(layer)), None)
    return explicit if explicit is not None and explicit.accepts(layer) else None
