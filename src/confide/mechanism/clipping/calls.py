"""From the tape to contributions: every recorded call through its rule, calls that share parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confide.mechanism.clipping.anatomy import Anatomy, Slot, Target
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Rule
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.tape import Entry, Tape
from confide.mechanism.clipping.trees import map_tensors, tensors_in
from confide.mechanism.clipping.workspace import Workspace


@dataclass
class Cluster:
    """Contributions that touch the same parameters: their gradients add up before any norm is taken."""

    members: list[tuple[Slot, Contribution]]
    anatomy: Anatomy
    space: Workspace

    @property
    def group(self) -> int:
        return self.members[0][0].group

    def merge(self) -> None:
        """Calls of the same slot become one contribution where its rule knows how."""
        by_slot: dict[int, list[tuple[Slot, Contribution]]] = {}
        for slot, contribution in self.members:
            by_slot.setdefault(id(slot), []).append((slot, contribution))
        self.members = []
        for same in by_slot.values():
            slot, first = same[0]
            merged = first.merged([other for _, other in same[1:]]) if len(same) > 1 else first
            self.members += same if merged is None else [(slot, merged)]

    def squared_norms(self) -> Tensor:
        if len(self.members) > 1:
            self.merge()
        if len(self.members) == 1:
            return self.members[0][1].squared_norms()
        if _disjoint([target for slot, _ in self.members for target in slot.targets.values()]):
            first, *rest = (contribution.squared_norms() for _, contribution in self.members)
            return sum(rest, start=first)
        return self._dense_norms()

    def _dense_norms(self) -> Tensor:
        """Add the gradients of all members in full, a micro-batch of records at a time."""
        records = self.members[0][1].records
        indices = {target.parameter for slot, _ in self.members for target in slot.targets.values()}
        parameters = {index: self.anatomy.parameters[index].detach() for index in sorted(indices)}
        size = sum(2 * value.numel() * value.element_size() for value in parameters.values())
        norms = []
        for start, stop in chunks(records, size, self.space.budget):
            total = {index: value.new_zeros(stop - start, *value.shape) for index, value in parameters.items()}
            for slot, contribution in self.members:
                for name, values in contribution.dense(start, stop).items():
                    target = slot.targets[name]
                    rows = slice(None) if target.rows is None else slice(*target.rows)
                    total[target.parameter][:, rows] += values.view_as(total[target.parameter][:, rows])
            norms.append(torch.stack([squared_norms_of(value) for value in total.values()]).sum(0))
        return torch.cat(norms)

    def add_weighted(self, factors: Tensor, views: list[Tensor]) -> None:
        for slot, contribution in self.members:
            contribution.add_weighted(factors, {name: target.view(views) for name, target in slot.targets.items()})


def _disjoint(targets: list[Target]) -> bool:
    """Whether no two targets overlap, so that squared norms simply add up."""
    seen: dict[int, list[tuple[int, int] | None]] = {}
    for target in targets:
        for rows in seen.get(target.parameter, []):
            if rows is None or target.rows is None or max(rows[0], target.rows[0]) < min(rows[1], target.rows[1]):
                return False
        seen.setdefault(target.parameter, []).append(target.rows)
    return True


def clusters_of(
    contributions: Sequence[tuple[Slot, Contribution]], anatomy: Anatomy, space: Workspace
) -> list[Cluster]:
    """Contributions grouped by the parameters they share."""
    home: dict[int, Cluster] = {}
    clusters: list[Cluster] = []
    for slot, contribution in contributions:
        joined = Cluster([(slot, contribution)], anatomy, space)
        for known in {id(home[index]): home[index] for index in slot.parameters if index in home}.values():
            joined.members = known.members + joined.members
            clusters.remove(known)
        clusters.append(joined)
        for member, _ in joined.members:
            home.update(dict.fromkeys(member.parameters, joined))
    return clusters


@dataclass(frozen=True)
class Found:
    """All that a recorded pass and its backward found; contributions are made from it, for all records or for some."""

    tape: Tape
    at_outputs: Sequence[Sequence[Tensor | None]]
    at_copies: dict[int, Tensor]

    def contributions(self, space: Workspace, chosen: Tensor | None = None) -> list[tuple[Slot, Contribution]]:
        """Every call through its rule; with `chosen`, as if only those records had been in the batch."""
        found: list[tuple[Slot, Contribution]] = []
        for entry, given in zip(self.tape.entries, self.at_outputs, strict=True):
            if any(gradient is not None for gradient in given):
                rule = entry.slot.rule
                assert rule is not None
                calls = calls_of(self.tape, entry, given, rule, space, chosen)
                found += [(entry.slot, rule.contribution(call)) for call in calls]
        for slot in self.tape.anatomy.copied:
            (index,) = slot.parameters
            if index in self.at_copies:
                gradient = self.at_copies[index]
                found.append((slot, Dense({"value": gradient if chosen is None else gradient[chosen]})))
        return found


def calls_of(
    tape: Tape,
    entry: Entry,
    gradients: Sequence[Tensor | None],
    rule: Rule,
    space: Workspace,
    chosen: Tensor | None,
) -> list[Call]:
    """The call with records first; several where a record has several rows and the rule takes one at a time."""
    slot = entry.slot
    if not entry.rows and chosen is None:  # the ordinary case, without detours
        return [Call(slot.layer, entry.inputs, entry.keywords, gradients, slot.trainable, space, entry.captured)]
    arranged = [
        None if gradient is None else tape.arranged(entry, position, gradient)
        for position, gradient in enumerate(gradients)
    ]
    tree = (entry.inputs, entry.keywords, entry.captured)
    if entry.rows and entry.axes is None:
        tree = map_tensors(tape.records_first, tree)
    if chosen is not None:
        arranged, tree = map_tensors(lambda tensor: tensor[chosen], (arranged, tree))
    if not entry.rows:
        return [_call(slot, tree, arranged, space)]
    counts = [tensor.shape[1] for tensor in tensors_in((arranged, tree)) if tensor.dim() > 1]
    several = 1 if rule.positions else max(counts, default=1)
    rows = [map_tensors(partial(_row, rule.positions, row), (tree, arranged)) for row in range(several)]
    return [_call(slot, given, found, space) for given, found in rows]


def _row(positions: bool, row: int, tensor: Tensor) -> Tensor:
    """(records, ...) out of (records, rows, ...)."""
    if tensor.dim() < 2:
        return tensor
    if tensor.shape[1] == 1:
        return tensor[:, 0]
    return tensor if positions else tensor[:, row]


def _call(slot: Slot, tree: Any, gradients: Sequence[Tensor | None], space: Workspace) -> Call:
    inputs, keywords, captured = tree
    return Call(slot.layer, inputs, keywords, tuple(gradients), slot.trainable, space, captured)
