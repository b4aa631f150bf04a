"""Cheaper ways than the fallback for parameters that all records share by broadcasting.

A position embedding, a class token or a learnt scale is used once and spread over the records by broadcasting. Where
every record can be given a copy of its own without changing the result, the gradient of a copy is the gradient of
its record, and nothing has to be run again. Whether that is so is tried on made-up records: the copy must leave
the losses, the summed gradients and the separation of the records as they were; otherwise the fallback serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from confide.layers.bayesian import BayesianLayer
from confide.mechanism.clipping.anatomy import Anatomy, Choices, Slot, anatomy_of

# Larger parameters are matrices more often than not; a copy per record would cost more than the fallback.
LARGEST_COPY = 1 << 17

# whether a anatomy accounts for the gradients of these parameters
Works = Callable[[Anatomy, frozenset[int]], bool]


def with_shortcuts(
    module: nn.Module, anatomy: Anatomy, works: Works, silent: Callable[[Anatomy], list[Slot]]
) -> Anatomy:
    """The anatomy, with copies and shared layers wherever they work. `silent`: slots whose outputs carry no records."""
    choices = anatomy.choices
    for alike in _alike(anatomy):
        together = _with_copies(module, anatomy, choices, alike, works)
        if together == choices and len(alike) > 1:
            for index in alike:
                together = _with_copies(module, anatomy, together, [index], works)
        choices = together
    names = {id(layer): name for name, layer in module.named_modules()}
    for slot in silent(anatomy_of(module, choices)):
        choices = _with_shared(module, choices, names[id(slot.layer)], slot, works)
    return anatomy if choices == anatomy.choices else anatomy_of(module, choices)


def _alike(anatomy: Anatomy) -> list[list[int]]:
    """Parameters without a rule that may be copied; those of the same name in layers of the same type together."""
    families: dict[Any, dict[int, None]] = {}
    for slot in anatomy.slots:
        if slot.replayed:
            for name, target in slot.targets.items():
                parameter = anatomy.parameters[target.parameter]
                if parameter.numel() <= LARGEST_COPY:
                    family = (type(slot.layer), name, parameter.dim(), parameter.shape[:1])
                    families.setdefault(family, {})[target.parameter] = None
    return [list(members) for members in families.values()]


def _places(leading: int) -> Iterator[int]:
    """Where the axis of the records may go: in place of a leading 1, or before up to three axes of size 1."""
    if leading == 1:
        yield -1
    yield from range(4)


def _with_copies(module: nn.Module, anatomy: Anatomy, choices: Choices, indices: list[int], works: Works) -> Choices:
    parameter = anatomy.parameters[indices[0]]
    for axes in _places(parameter.shape[0] if parameter.dim() else 0):
        trial = replace(choices, copies=(*choices.copies, *((index, axes) for index in indices)))
        if works(anatomy_of(module, trial), frozenset(indices)):
            return trial
    return choices


def _with_shared(module: nn.Module, choices: Choices, name: str, slot: Slot, works: Works) -> Choices:
    if slot.rule is None or not slot.rule.positions or isinstance(slot.layer, BayesianLayer):
        return choices
    for axes in _places(1):
        trial = replace(choices, shared=(*choices.shared, (name, axes)))
        if works(anatomy_of(module, trial), slot.parameters):
            return trial
    return choices
