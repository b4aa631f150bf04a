"""From the tape to contributions: every recorded call through its rule, calls that share parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confide.mechanism.clipping.anatomy import Anatomy, Slot, Target
from confide.mechanism.clipping.layout import PLAIN, CallLayout, Layout, map_tensors, tensors_in
from confide.mechanism.clipping.rules.registry import Call, Contribution, Rule
from confide.mechanism.clipping.rules.replay import Replayed
from confide.mechanism.clipping.rules.squares import chunks, squared_norms_of
from confide.mechanism.clipping.tape import Entry, Tape
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


def contributions_of(
    tape: Tape,
    gradients: Sequence[Sequence[Tensor | None]],
    layouts: Sequence[CallLayout],
    records: int,
    space: Workspace,
    chosen: Tensor | None = None,
) -> list[tuple[Slot, Contribution]]:
    """Every call through its rule; with `chosen`, as if only those records had been in the batch."""
    found: list[tuple[Slot, Contribution]] = []
    for entry, given, layout in zip(tape.entries, gradients, layouts, strict=True):
        if all(gradient is None for gradient in given):
            continue
        slot = entry.slot
        if layout.plain and slot.rule is not None and chosen is None:  # the ordinary case, without detours
            call = Call(slot.layer, entry.inputs, entry.keywords, given, slot.trainable, space, entry.captured)
            found.append((slot, slot.rule.contribution(call)))
            continue
        made = _Made(entry, list(given), layout, tape.drawn(entry))
        if chosen is not None:
            made.choose(chosen)
        count = records if chosen is None else len(chosen)
        found += [(entry.slot, contribution) for contribution in made.contributions(count, space)]
    return found


class _Made:
    """One entry on its way to a contribution."""

    def __init__(self, entry: Entry, gradients: list[Tensor | None], layout: CallLayout, draws: list[Tensor]) -> None:
        self.entry, self.layout, self.gradients = entry, layout, gradients
        self.given: Any = (entry.inputs, entry.keywords)
        self.captured = entry.captured
        self.draws = draws

    def choose(self, chosen: Tensor) -> None:
        """Keep some records only, in every tensor that carries records."""

        def pick(tensor: Tensor | None, place: Layout | None) -> Tensor | None:
            return tensor if tensor is None or place is None else place.chosen(tensor, chosen)

        places = self.layout
        self.given = map_tensors(pick, self.given, places.inputs)
        self.gradients = [pick(value, place) for value, place in zip(self.gradients, places.outputs, strict=True)]
        self.draws = [pick(value, place) for value, place in zip(self.draws, places.draws, strict=True)]  # type: ignore[misc]
        self.captured = map_tensors(lambda value: pick(value, places.outputs[0]), self.captured)

    def contributions(self, records: int, space: Workspace) -> list[Contribution]:
        slot = self.entry.slot
        if slot.rule is None:
            names = list(slot.targets)
            return [Replayed(slot.layer, names, self.given, self.gradients, self.draws, self.layout, records, space)]
        inputs, keywords = self.given
        if not self.layout.plain:
            return self._rearranged(slot.rule, space)
        call = Call(slot.layer, inputs, keywords, tuple(self.gradients), slot.trainable, space, self.captured)
        return [slot.rule.contribution(call)]

    def _rearranged(self, rule: Rule, space: Workspace) -> list[Contribution]:
        """Records to axis 0; rows of one record become positions, or several calls where the rule has none."""

        def first(tensor: Tensor | None, place: Layout | None) -> Tensor | None:
            return tensor if tensor is None or place is None else place.records_first(tensor)

        slot, places = self.entry.slot, self.layout
        inputs, keywords = map_tensors(first, self.given, places.inputs)
        gradients = tuple(first(value, place) for value, place in zip(self.gradients, places.outputs, strict=True))
        captured = map_tensors(lambda value: first(value, places.outputs[0]), self.captured)
        folds = {place.fold for place in (*places.inputs, *places.outputs) if place is not None}
        call = Call(slot.layer, inputs, keywords, gradients, slot.trainable, space, captured)
        if folds <= {1} or rule.positions:
            return [rule.contribution(call)]
        return [rule.contribution(_row(call, places, row)) for row in range(max(folds))]


def _row(call: Call, places: CallLayout, row: int) -> Call:
    """One of the rows that each record has in a folded call."""

    def pick(tensor: Tensor | None, place: Layout | None) -> Tensor | None:
        return tensor if tensor is None or place is None or place.fold == 1 else tensor[:, row]

    inputs, keywords = map_tensors(pick, (call.inputs, call.keywords), places.inputs)
    gradients = tuple(pick(value, place) for value, place in zip(call.gradients, places.outputs, strict=True))
    captured = map_tensors(lambda value: pick(value, places.outputs[0]), call.captured)
    return Call(call.layer, inputs, keywords, gradients, call.trainable, call.space, captured)


def default_layout(entry: Entry, records: int, draws: Sequence[Tensor]) -> CallLayout:
    """Records on axis 0 of whatever has that many rows."""

    def place(shape: torch.Size) -> Layout | None:
        return PLAIN if len(shape) and shape[0] == records else None

    inputs = tuple(place(tensor.shape) for tensor in tensors_in((entry.inputs, entry.keywords)))
    outputs = tuple(place(shape) for shape in entry.shapes)
    return CallLayout(inputs, outputs, tuple(place(value.shape) for value in draws))
