"""Whether contributions account for the whole gradient: the unclipped sum against ordinary autograd.

Both are made in one backward pass, and compared as soon as they are there: so looking takes the memory of a step, and
little more time. Of layers that do the same thing on the same shapes one is compared; that nothing goes past any of
them is seen in the graph, at every step (`Pass.unseen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from confide.data.trees import form_of
from confide.mechanism.clipping.anatomy import Anatomy, Slot
from confide.mechanism.clipping.calls import clusters_of
from confide.mechanism.clipping.proven import listens
from confide.mechanism.clipping.rules.registry import Contribution
from confide.mechanism.clipping.workspace import Gaps, Workspace

Member = tuple[Slot, Contribution]
WORTH_IT = 1 << 20
"""Weights of a network in which layers of one kind are compared once."""


@dataclass
class Touched:
    """Parameters that the same calls touch, and what has come of them."""

    parameters: set[int]
    calls: set[int]
    due: int  # calls and gradients that are yet to come
    members: dict[int, Sequence[Member]] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    alike: list[set[int]] = field(default_factory=list)  # the parameters of others that this one stands for


class Coverage:
    """Takes what calls contribute and the gradients of parameters, in any order.

    slots    of the calls, by number
    kinds    what each call does, by number, where it is known
    norms    squared ones that were taken already, by the identity of a contribution
    skipped  parameters that are copied: they are not in the graph, and what their copies got is all there is
    """

    def __init__(
        self,
        anatomy: Anatomy,
        slots: Sequence[Slot],
        space: Workspace,
        skipped: Mapping[int, Any],
        kinds: Sequence[Any] = (),
        norms: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.anatomy, self.space, self.gaps, self.norms = anatomy, space, Gaps(), norms
        self.differences: dict[int, Tensor] = {}
        self.sizes: dict[int, Tensor] = {}
        self.half = False
        groups = _groups([slot.parameters for slot in slots], len(anatomy.parameters))
        groups = [group for group in groups if not group.parameters & skipped.keys()]
        self.groups = _one_of_each(groups, kinds) if anatomy.size > WORTH_IT and kinds else groups
        self.of_call = {number: group for group in self.groups for number in group.calls}
        self.of_parameter = {index: group for group in self.groups for index in group.parameters}
        self.parameters = {index: anatomy.parameters[index] for index in self.of_parameter}

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Inside, the gradients of `parameters` that autograd is asked for come here, and nobody holds them."""
        handles = [one.register_hook(partial(self._came, index)) for index, one in self.parameters.items()]
        try:
            yield
        finally:
            for handle, parameter in zip(handles, self.parameters.values(), strict=True):
                handle.remove()
                parameter._backward_hooks = None  # as before: nobody else listens (`structure._isolated`)

    def _came(self, index: int, gradient: Tensor) -> Tensor | None:
        group = self.of_parameter[index]
        group.gradients[index] = gradient.detach()
        self._count(group)
        return None if gradient.layout != torch.strided else gradient.new_zeros(()).expand_as(gradient)

    def taken(self, number: int, members: Sequence[Member]) -> None:
        """What a call contributes to the unclipped sum."""
        group = self.of_call.get(number)
        if group is not None:
            group.members[number] = members
            self._count(group)

    def _count(self, group: Touched) -> None:
        group.due -= 1
        if not group.due:
            self._compare(group)

    @torch.no_grad()
    def _compare(self, group: Touched) -> None:
        shapes = {index: self.anatomy.parameters[index] for index in group.parameters}
        sums = {index: torch.zeros_like(one, memory_format=torch.contiguous_format) for index, one in shapes.items()}
        members = [one for number in sorted(group.members) for one in group.members[number]]
        for cluster in clusters_of(members, self.anatomy, self.space, self.norms):
            norms = cluster.squared_norms()  # decides how the sum is formed, so that the same way is examined
            ones = norms.new_ones(members[0][1].records)
            cluster.add_weighted(ones, [sums.get(index, ones) for index in range(len(self.anatomy.parameters))])
        self.half |= any(contribution.shortened for _, contribution in members)
        for index, total in sums.items():
            gradient = group.gradients.get(index)
            gradient = total.new_zeros(total.shape) if gradient is None else gradient.to_dense()
            self.sizes[index], self.differences[index] = gradient.norm(), total.sub_(gradient).norm()
        self.gaps.taken([*sums.values()])
        group.members, group.gradients = {}, {}

    def missed(self) -> frozenset[int]:
        """Parameters whose unclipped sum is not the gradient of the summed losses."""
        for group in self.groups:
            if group.due:  # of a gradient that has not come there is none
                self._compare(group)
        if not self.sizes:
            return frozenset()
        scale = torch.stack(list(self.sizes.values())).norm()
        return frozenset(
            other
            for index, difference in self.differences.items()
            if not difference <= _tolerance(difference.dtype, self.half) * (self.sizes[index] + 1e-2 * scale)
            for other in self._like(index)
        )

    def _like(self, index: int) -> list[int]:
        """The parameter and those that have its place in the groups that were not compared."""
        group = self.of_parameter[index]
        place = sorted(group.parameters).index(index)
        return [sorted(parameters)[place] for parameters in (group.parameters, *group.alike)]


def _groups(calls: Sequence[frozenset[int]], parameters: int) -> list[Touched]:
    """Of calls that share a parameter; a parameter that no call touches is a group of its own."""
    home = {index: {index} for index in range(parameters)}
    for touched in calls:
        joined = set().union(*(home[index] for index in touched))
        home.update(dict.fromkeys(joined, joined))
    groups = {id(members): Touched(members, set(), len(members)) for members in home.values()}
    for number, touched in enumerate(calls):
        for index in list(touched)[:1]:
            group = groups[id(home[index])]
            group.calls.add(number)
            group.due += 1
    return list(groups.values())


def _one_of_each(groups: Sequence[Touched], kinds: Sequence[Any]) -> list[Touched]:
    """Of groups that do the same thing the first; of all whose calls nobody can tell, each."""
    found: dict[Any, Touched] = {}
    for group in groups:
        what = tuple(kinds[number] for number in sorted(group.calls))
        first = found.setdefault(what if what and None not in what else id(group), group)
        if first is not group:
            first.alike.append(group.parameters)
    return list(found.values())


def kind_of(slot: Slot, inputs: Any) -> Any:
    """What decides what a call does but for its numbers: the layer's class and settings, and all shapes. None where
    somebody listens to the layer, or has replaced how it runs."""
    layer = slot.layer
    if listens(layer):
        return None
    settings = {name: value for name, value in vars(layer).items() if name not in _OF_EVERY_LAYER}
    targets = [(name, one.rows) for name, one in sorted(slot.targets.items())]
    owned = [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in layer.named_parameters()]
    return type(layer), layer.training, repr(settings), repr(targets), repr(owned), form_of(inputs)


_OF_EVERY_LAYER = frozenset(vars(nn.Module()))


def _tolerance(dtype: torch.dtype, half: bool) -> float:
    """Half precision inside a layer leaves autograd's gradients three digits and this many roundings."""
    if half:
        return 3e-2
    return 1e-8 if dtype == torch.float64 else 1e-3
