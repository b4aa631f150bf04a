"""Which layer answers for which parameter: the structure of a module, found once and kept.

Every module that holds trainable parameters becomes a `Slot`: with the rule of its type, or with None for the
fallback, which replays that module alone. Parameters used outside their layer (weights passed to a function,
embeddings of positions that carry no records) are moved to a fallback slot of the whole module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from confide.errors import Refusal
from confide.layers.bayesian import BayesianLayer, bayesian_layers
from confide.mechanism.clipping.layout import CallLayout
from confide.mechanism.clipping.rules.explicit import Explicit, find_explicit
from confide.mechanism.clipping.rules.refusals import refuse
from confide.mechanism.clipping.rules.registry import Call, Rule, find_rule

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


@dataclass(frozen=True)
class Choices:
    """What the examination of a module decided.

    escaped     parameters whose uses cannot all be seen: the fallback runs the whole module for them
    copies      parameters of which every record is given a copy of its own, by where the records' axis goes
    shared      layers whose one output serves all records (an embedding of positions): given to each of them
    """

    escaped: frozenset[int] = frozenset()
    copies: tuple[tuple[int, int], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False)
class Slot:
    """One layer and the parameters it answers for, by the names its rule uses.

    `spread` says where the records' axis goes in a copied parameter or a shared output (see `spread_over`).
    """

    reference: weakref.ref[nn.Module]
    rule: Rule | None
    targets: dict[str, Target]
    group: int
    explicit: Explicit | None = None
    spread: int | None = None
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

    @property
    def replayed(self) -> bool:
        return self.rule is None and self.explicit is None


def spread_over(records: int, values: Tensor, axes: int) -> Tensor:
    """The same values for every record, as a view: the leading axis of size 1 grows (axes = -1), or a new one comes
    before `axes` axes of size 1."""
    if axes < 0:
        return values.expand(records, *values.shape[1:])
    return values.expand(records, *[1] * axes, *values.shape)


@dataclass(frozen=True)
class Examined:
    """The calls of one pass through a module: which slot, and where its records are; and a shorter way, if any.

    `record_bytes`: what a step holds of one record until its clip factor is known, inputs and output gradients.
    """

    slots: list[Slot]
    layouts: list[CallLayout]
    chain: LayerChain | None = None
    record_bytes: int = 0

    @property
    def records_first(self) -> bool:
        return all(place is None or place.plain for layout in self.layouts for place in layout.outputs)


@dataclass
class Anatomy:
    """The slots of a module, its trainable parameters in order, and what was learnt of its calls."""

    parameters: list[nn.Parameter]
    slots: list[Slot]
    groups: int
    signature: list[Any]
    draws: int
    choices: Choices
    examined: dict[Any, Examined] = field(default_factory=dict)
    parts: dict[Any, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.size = sum(self.sizes)
        self.copied = [slot for slot in self.slots if slot.copied]
        self.heard = [slot for slot in self.slots if slot.explicit is None and not slot.copied]
        self.explicit = any(slot.explicit is not None for slot in self.slots)
        self.replays = any(slot.replayed for slot in self.slots)
        self.bayesian = any(isinstance(slot.layer, BayesianLayer) for slot in self.slots)
        copied = [self.parameters[index] for slot in self.copied for index in slot.parameters]
        self.copied_bytes = self.draws * sum(value.numel() * value.element_size() for value in copied)


def signature_of(module: nn.Module) -> list[Any]:
    """What a anatomy depends on; compared at every step, so that a module changed in between is planned anew."""
    facts: list[Any] = []
    for layer in module.modules():
        draws = layer.draws if isinstance(layer, BayesianLayer) else 1
        facts.append((id(layer), layer.training, draws))
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                facts.append((name, id(parameter), parameter.requires_grad))
    return facts


def anatomy_of(module: nn.Module, choices: Choices | None = None) -> Anatomy:
    """Assign every trainable parameter to slots."""
    choices = choices or Choices()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    index = {id(parameter): position for position, parameter in enumerate(parameters)}
    owners = [
        (layer, {name: Target(index[id(value)]) for name, value in named.items() if value.requires_grad})
        for layer, named in _owners(module)
    ]
    groups = _groups([{target.parameter for target in targets.values()} for _, targets in owners])
    elsewhere = choices.escaped | {parameter for parameter, _ in choices.copies}
    shared = {id(module.get_submodule(name)): axes for name, axes in choices.shared}
    slots: list[Slot] = []
    for layer, targets in owners:
        wanted = {name: target for name, target in targets.items() if target.parameter not in elsewhere}
        if wanted:
            slots.append(_slot(layer, wanted, groups, shared.get(id(layer))))
    slots += _whole_module_slots(module, index, choices, groups)
    count = len(set(groups.values()))
    return Anatomy(parameters, slots, count, signature_of(module), _draws(module), choices)


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


def _slot(layer: nn.Module, wanted: dict[str, Target], groups: dict[int, int], spread: int | None) -> Slot:
    group = groups[next(iter(wanted.values())).parameter]
    explicit = find_explicit(layer)
    replayed = explicit is not None or parametrize.is_parametrized(layer)
    rule = None if replayed else find_rule(layer, frozenset(wanted))
    return Slot(weakref.ref(layer), rule, wanted, group, explicit, spread)


def _whole_module_slots(
    module: nn.Module, index: dict[int, int], choices: Choices, groups: dict[int, int]
) -> list[Slot]:
    """Slots of copied parameters, and fallback slots of escaped ones, apart by group of per-layer clipping."""
    copies = dict(choices.copies)
    slots: list[Slot] = []
    escaped: dict[int, dict[str, Target]] = {}
    for name, parameter in module.named_parameters():
        position = index.get(id(parameter), -1)
        if position in choices.escaped:
            escaped.setdefault(groups[position], {})[name] = Target(position)
        elif position in copies:
            targets = {name: Target(position)}
            slots.append(
                Slot(weakref.ref(module), COPIED, targets, groups[position], spread=copies[position], copied=True)
            )
    return slots + [Slot(weakref.ref(module), None, wanted, group) for group, wanted in escaped.items()]


def _copied_gradients(call: Call) -> dict[str, Tensor]:
    """The gradient of a record's own copy of a parameter is the record's gradient."""
    (name,) = call.trainable
    parameter = call.layer.get_parameter(name)
    summed = call.gradient.reshape(call.records, -1, parameter.numel()).sum(1)
    return {name: summed.view(call.records, *parameter.shape)}


COPIED = Rule(_copied_gradients, positions=True)


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
