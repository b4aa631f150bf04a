"""What a layer rule is, and where rules are found.

A rule turns one call of a layer, that is its input and the gradient of the summed loss with respect to its
output, into a `Contribution`: the gradients of every record with respect to the layer's parameters, kept in
whatever form is cheap. For a layer of one's own three lines are enough, because plain per-record gradients do:

    @rule_for(Scale)
    def scale(call: Call) -> dict[str, Tensor]:
        return {"factor": call.input * call.gradient}          # (records, *factor.shape)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from confide.mechanism.clipping.rules.squares import squared_norms_of, sum_in_blocks
from confide.mechanism.clipping.workspace import Workspace

Where: TypeAlias = slice | Tensor


@dataclass(slots=True)
class Call:
    """One call of one layer, records first on every tensor.

    `gradients` has one entry per output tensor of the layer (None where the loss does not use it) and
    `trainable` names the parameters asked for; a rule must leave the others out. `space` lends memory.
    `captured` is what the rule's `capture` took from the layer right after the call.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    gradients: Sequence[Tensor | None]
    trainable: frozenset[str]
    space: Workspace
    captured: Any = None

    @property
    def input(self) -> Tensor:
        tensor = self.inputs[0]
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def gradient(self) -> Tensor:
        gradient = self.gradients[0]
        assert gradient is not None
        return gradient

    @property
    def records(self) -> int:
        return self.gradient.shape[0]


class Contribution(ABC):
    """The gradients of every record with respect to one layer's parameters, seldom stored in full."""

    records: int
    shortened: bool = False
    """Whether the call was in half precision, in which autograd adds up its own gradients too."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Sum over the parameters of the squared gradient norm, one number per record."""

    @abstractmethod
    def spread(self) -> Tensor:
        """For every record the sum of the norms of the parts that `weighted` adds up: at least the gradient's norm."""

    def lost(self) -> Tensor | None:
        """Whose gradients are surely no numbers, as one side alone shows; None where nobody looks."""
        return None

    def chain(self, records: int) -> int:
        """How many terms meet in one entry of `weighted`, at most, for so many of the records."""
        return records

    @abstractmethod
    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        """The sum over records of factors[record] * gradient[record], in tensors of its own (or lent by the space)."""

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        """As `weighted`, with at most `size` records in one product and all these products added up, or None where
        nothing is cheaper than `weighted` for one block after the other."""
        return None

    def add_onto(self, places: dict[str, Tensor], factors: Tensor, size: int) -> bool:
        """Add the weighted sum onto the places of the parameters, each touched once by a sum of blocks of at most
        `size` records; False where only `weighted` and `in_blocks` make it."""
        return False

    @abstractmethod
    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        """The gradients of records start..stop in full: (stop - start, *shape) for every parameter."""

    @abstractmethod
    def chosen(self, where: Where) -> Contribution:
        """The same for some of the records."""

    @abstractmethod
    def widened(self) -> Contribution:
        """The same gradients, to be summed and formed in double precision."""

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        """One contribution for several calls of the same layer, or None where adding dense gradients is best."""
        return None


def not_finite(values: Tensor) -> Tensor:
    """Which records have something that is no number."""
    return torch.isfinite(values).flatten(1).all(1).logical_not_()


class Dense(Contribution):
    """Gradients held in full; right for parameters that are small beside the activations."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.records = next(iter(values.values())).shape[0]

    def squared_norms(self) -> Tensor:
        first, *rest = (squared_norms_of(value) for value in self.values.values())
        return sum(rest, start=first)

    def spread(self) -> Tensor:
        return self.squared_norms().sqrt_()

    def lost(self) -> Tensor | None:
        return torch.stack([not_finite(value) for value in self.values.values()]).any(0)

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return {
            name: (factors @ value.reshape(self.records, -1)).view(value.shape[1:])
            for name, value in self.values.items()
        }

    def in_blocks(self, factors: Tensor, size: int) -> dict[str, Tensor] | None:
        found: dict[str, Tensor] = {}
        for name, value in self.values.items():
            total = sum_in_blocks(factors, value.reshape(self.records, -1), size)
            if total is None:
                return None
            found[name] = total.view(value.shape[1:])
        return found

    def chosen(self, where: Where) -> Contribution:
        return Dense({name: value[where] for name, value in self.values.items()})

    def widened(self) -> Contribution:
        return Dense({name: value.double() for name, value in self.values.items()})

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return {name: value[start:stop] for name, value in self.values.items()}

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        total = dict(self.values)
        for other in others:
            if not isinstance(other, Dense) or other.values.keys() != total.keys():
                return None
            total = {name: value + other.values[name] for name, value in total.items()}
        return Dense(total)


RuleFunction: TypeAlias = Callable[[Call], Contribution | dict[str, Tensor]]
Function = TypeVar("Function", bound=RuleFunction)


@dataclass(frozen=True)
class Rule:
    """A rule with its limits.

    `parameters` are the names it knows (None: any); a layer that holds others goes to the fallback, as does one
    for which `accepts` is false. `capture` takes from the layer what it keeps of its last call only. `positions`:
    the rule takes further axes between records and features; otherwise a call with them is given in pieces.
    """

    function: RuleFunction
    parameters: frozenset[str] | None = None
    accepts: Callable[[Any], bool] | None = None
    capture: Callable[[Any], Any] | None = None
    positions: bool = False

    def contribution(self, call: Call) -> Contribution:
        result = self.function(call)
        return result if isinstance(result, Contribution) else Dense(result)

    def covers(self, layer: nn.Module, names: frozenset[str]) -> bool:
        known = self.parameters is None or names <= self.parameters
        return known and (self.accepts is None or self.accepts(layer))


_RULES: dict[type[nn.Module], Rule] = {}
_NAMED: dict[str, Rule] = {}
"""Rules for layers of libraries that need not be installed, by the full names of their types."""


def rule_for(
    *layer_types: type[nn.Module],
    parameters: Sequence[str] | None = None,
    accepts: Callable[[Any], bool] | None = None,
    capture: Callable[[Any], Any] | None = None,
    positions: bool = False,
) -> Callable[[Function], Function]:
    """Register the decorated function as the rule of `layer_types`, replacing any rule they had."""

    def register(function: Function) -> Function:
        names = None if parameters is None else frozenset(parameters)
        for layer_type in layer_types:
            _RULES[layer_type] = Rule(function, names, accepts, capture, positions)
        return function

    return register


def rule_for_named(*names: str, parameters: Sequence[str], positions: bool = False) -> Callable[[Function], Function]:
    """Register the decorated function as the rule of the types with these full names, unless one has a rule."""

    def register(function: Function) -> Function:
        for name in names:
            _NAMED[name] = Rule(function, frozenset(parameters), positions=positions)
        return function

    return register


def lookup(table: Mapping[type[nn.Module], Any], layer: nn.Module) -> Any:
    """The entry of the layer's type, or of a base whose forward it inherits unchanged; None without one."""
    if "forward" in vars(layer):  # somebody replaced the forward of this very layer
        return None
    kind: Any = type(layer)
    for base in kind.__mro__:
        if base in table:
            return table[base] if kind.forward is base.forward else None
    return None


def find_rule(layer: nn.Module, names: frozenset[str]) -> Rule | None:
    """The rule for the parameters `names` of `layer`, or None: then the fallback serves it."""
    rule: Rule | None = lookup(_RULES, layer)
    if rule is None and "forward" not in vars(layer):  # by the exact type: what derives from it may do anything
        rule = _NAMED.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    return rule if rule is not None and rule.covers(layer, names) else None
