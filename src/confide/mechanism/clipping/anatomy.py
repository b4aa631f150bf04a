"""Which layer answers for which parameter: the structure of a module, found once and kept.

Every layer that has a rule becomes a `Slot` for its trainable parameters. All other parameters (bare ones, those of
layers without a rule, and those that were seen to be used outside of their layer) become slots of their own: while the
module runs, every record has a copy of them, and the gradient of a copy is the gradient of its record.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.utils import parametrize

from confide.errors import Refusal
from confide.layers.bayesian import BayesianLayer, bayesian_layers
from confide.layers.drawn import DrawnParameters
from confide.mechanism.clipping.places import EVEN, Even
from confide.mechanism.clipping.proven import listens
from confide.mechanism.clipping.rules.drawn import drawn_rule
from confide.mechanism.clipping.rules.explicit import Explicit, find_explicit
from confide.mechanism.clipping.rules.refusals import reason_to_refuse, refuse
from confide.mechanism.clipping.rules.registry import Rule, find_rule

if TYPE_CHECKING:
    from confide.mechanism.clipping.chain import LayerChain


@dataclass(frozen=True)
class Target:
    """A parameter, or some of its rows, that a contribution adds to."""

    parameter: int
    rows: tuple[int, int] | None = None

    def view(self, views: list[Tensor]) -> Tensor:
        whole = views[self.parameter]
        return whole if self.rows is None else whole[self.rows[0] : self.rows[1]]


@dataclass(eq=False)
class Slot:
    """One layer and the parameters it answers for, by the names its rule uses; or one parameter that is `copied`."""

    reference: weakref.ref[nn.Module]
    rule: Rule | None
    targets: dict[str, Target]
    group: int
    explicit: Explicit | None = None
    copied: bool = False
    trainable: frozenset[str] = field(init=False)
    parameters: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = frozenset(self.targets)
        self.parameters = frozenset(target.parameter for target in self.targets.values())

    @property
    def layer(self) -> nn.Module:
        layer = self.reference()
        assert layer is not None, "a slot never outlives its module"
        return layer


Way: TypeAlias = Literal["proven", "isolated", "one by one"]


@dataclass(frozen=True)
class Examined:
    """How batches of one shape run through a module with a loss.

    way            as a whole, with records that cannot see each other, or one record after the other
    chain          a shorter way for fully connected networks
    record_bytes   what a step holds of one record until its clip factor is known: inputs and output gradients
    why            what made it slow, where it is
    quiet          it says something at every pass, which is not heard: handlers of logs keep what they hear
    apart          one by one: why each record runs in a process of its own, if it does
    even           batches in which a record's numbers do not depend on its place
    traces         a pass that a record breaks off could leave something behind, so that what it reaches is kept
    proven         module and loss: those of which nothing needs to be kept
    chance         generators other than torch's own that its code can reach
    """

    way: Way
    chain: LayerChain | None = None
    record_bytes: int = 0
    why: str = ""
    quiet: bool = False
    apart: str = ""
    even: Even = EVEN
    traces: bool = False
    proven: tuple[bool, bool] = (False, False)
    chance: tuple[Any, ...] = ()


@dataclass
class Anatomy:
    """The slots of a module, its trainable parameters in order, and what was learnt of its calls.

    `pooled`: it takes maxima of images
    """

    parameters: list[nn.Parameter]
    slots: list[Slot]
    groups: int
    signature: list[Any]
    draws: int
    escaped: frozenset[int]
    pooled: bool = False
    examined: dict[Any, Examined] = field(default_factory=dict)
    parts: dict[Any, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.size = sum(self.sizes)
        self.copied = [slot for slot in self.slots if slot.copied]
        self.heard = [slot for slot in self.slots if slot.explicit is None and not slot.copied]
        self.explicit = any(slot.explicit is not None for slot in self.slots)
        self.bayesian = any(isinstance(slot.layer, BayesianLayer) for slot in self.slots)
        copied = [self.parameters[index] for slot in self.copied for index in slot.parameters]
        self.copied_bytes = sum(value.numel() * value.element_size() for value in copied)
        self.bytes = sum(value.numel() * value.element_size() for value in self.parameters)

    def single_slots(self, module: nn.Module) -> list[Slot]:
        """One slot for every parameter, for gradients that are held in full."""
        groups = {index: slot.group for slot in self.slots for index in slot.parameters}
        return [
            Slot(weakref.ref(module), None, {"value": Target(index)}, groups[index], copied=True)
            for index in range(len(self.parameters))
        ]


def signature_of(module: nn.Module) -> list[Any]:
    """What an anatomy depends on; compared at every step, so that a module changed in between is examined anew."""
    facts: list[Any] = []
    for layer in module.modules():
        draws = layer.draws if isinstance(layer, BayesianLayer) else 1
        facts.append((id(layer), type(layer), layer.training, draws, listens(layer), reason_to_refuse(layer)))
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                facts.append((name, id(parameter), parameter.requires_grad))
    return facts


def anatomy_of(module: nn.Module, escaped: frozenset[int] = frozenset()) -> Anatomy:
    """Assign every trainable parameter to slots; those that `escaped` from their layers are copied."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    index = {id(parameter): position for position, parameter in enumerate(parameters)}
    owners = [
        (layer, {name: Target(index[id(value)]) for name, value in named.items() if value.requires_grad})
        for layer, named in _owners(module)
    ]
    groups = _groups([{target.parameter for target in targets.values()} for _, targets in owners])
    slots: list[Slot] = []
    for layer, targets in owners:
        wanted = {name: target for name, target in targets.items() if target.parameter not in escaped}
        slot = _slot(layer, wanted, groups) if wanted else None
        if slot is not None:
            slots.append(slot)
    alone = escaped | (set(range(len(parameters))) - {place for slot in slots for place in slot.parameters})
    for position in sorted(alone):
        targets = {"value": Target(position)}
        slots.append(Slot(weakref.ref(module), None, targets, groups[position], copied=True))
    count = len(set(groups.values()))
    pooled = any(type(layer) is nn.MaxPool2d for layer in module.modules())
    return Anatomy(parameters, slots, count, signature_of(module), _draws(module), escaped, pooled)


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Modules with parameters of their own, each with the parameters it answers for; refuses what mixes records."""
    covered: set[int] = set()
    for layer in module.modules():
        if id(layer) in covered:
            continue
        refuse(layer)
        if find_explicit(layer) is not None:
            named = dict(layer.named_parameters())
            covered.update(id(child) for child in layer.modules())
        else:
            named = {name: value for name, value in layer._parameters.items() if value is not None}
        if parametrize.is_parametrized(layer):
            lists = layer.parametrizations
            assert isinstance(lists, nn.Module)
            named |= {f"parametrizations.{name}": value for name, value in lists.named_parameters()}
            covered.update(id(child) for child in lists.modules())
        if named:
            yield layer, named


def _slot(layer: nn.Module, wanted: dict[str, Target], groups: dict[int, int]) -> Slot | None:
    """The slot of a layer that has a rule or an explicit forward."""
    if parametrize.is_parametrized(layer):
        return None
    group = groups[next(iter(wanted.values())).parameter]
    explicit = find_explicit(layer)
    find = drawn_rule if isinstance(layer, DrawnParameters) else find_rule
    rule = None if explicit is not None else find(layer, frozenset(wanted))
    return None if explicit is None and rule is None else Slot(weakref.ref(layer), rule, wanted, group, explicit)


def _groups(layers: list[set[int]]) -> dict[int, int]:
    """The group of every parameter in per-layer clipping: layers that share one cannot be clipped apart."""
    leaders: dict[int, int] = {}
    for number, parameters in enumerate(layers):
        shared = {leaders[parameter] for parameter in parameters if parameter in leaders}
        leader = min(shared, default=number)
        leaders.update({parameter: leader for parameter, known in leaders.items() if known in shared})
        leaders.update(dict.fromkeys(parameters, leader))
    numbers = {leader: group for group, leader in enumerate(sorted(set(leaders.values())))}
    return {parameter: numbers[leader] for parameter, leader in leaders.items()}


def _draws(module: nn.Module) -> int:
    """How many weight draws the Bayesian layers hold; they must agree, because draws run through the whole module."""
    counts = {layer.draws for layer in bayesian_layers(module)}
    if len(counts) > 1:
        raise Refusal(f"draws={sorted(counts)}: all Bayesian layers of a module must hold the same number of draws")
    return next(iter(counts), 1)
