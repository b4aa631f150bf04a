"""From the tape to contributions: every recorded call through its rule, calls that share parameters together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confide.data.trees import map_tensors, tensors_in
from confide.mechanism.clipping.anatomy import Anatomy, Slot, Target
from confide.mechanism.clipping.rounding import ROWS, Tally, lost_in_squares
from confide.mechanism.clipping.rules.embedding import Rows
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Rule, Where
from confide.mechanism.clipping.rules.squares import chunks, full_precision, squared_norms_of
from confide.mechanism.clipping.rules.tied import tied_norms
from confide.mechanism.clipping.tape import Tape, TapedCall
from confide.mechanism.clipping.workspace import Gaps, Workspace


@dataclass
class Cluster:
    """Contributions that touch the same parameters: their gradients add up before any norm is taken."""

    members: list[tuple[Slot, Contribution]]
    anatomy: Anatomy
    space: Workspace
    known: Tensor | None = None  # the squared norms, where they were taken already

    @property
    def group(self) -> int:
        return self.members[0][0].group

    @property
    def entries(self) -> int:
        return sum(self.anatomy.sizes[index] for slot, _ in self.members for index in slot.parameters)

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
            return self.members[0][1].squared_norms() if self.known is None else self.known
        if _disjoint([target for slot, _ in self.members for target in slot.targets.values()]):
            first, *rest = (contribution.squared_norms() for _, contribution in self.members)
            return sum(rest, start=first)
        tied = tied_norms([one for _, one in self.members], self.chain(1)) if self._share_a_weight() else None
        return self._dense_norms() if tied is None else tied

    def _share_a_weight(self) -> bool:
        """Whether what all members have in common is one whole parameter, the weight of each."""
        weights = {slot.targets.get("weight") for slot, _ in self.members}
        others = [target for slot, _ in self.members for name, target in slot.targets.items() if name != "weight"]
        shared = next(iter(weights))
        return len(weights) == 1 and shared is not None and shared.rows is None and _disjoint([shared, *others])

    def _formed(self) -> Iterator[tuple[slice, dict[int, Tensor]]]:
        """The gradients of all members added up in full, some records at a time, by parameter."""
        records = self.members[0][1].records
        indices = {target.parameter for slot, _ in self.members for target in slot.targets.values()}
        shapes = {index: self.anatomy.parameters[index].shape for index in sorted(indices)}
        size = max(sum(16 * shape.numel() for shape in shapes.values()), self.space.budget // ROWS)
        for start, stop in chunks(records, size, self.space.budget):
            total: dict[int, Tensor] = {}
            for slot, contribution in self.members:
                for name, values in contribution.dense(start, stop).items():
                    target = slot.targets[name]
                    if target.parameter not in total:  # in the type of what is formed: a parameter may be shorter
                        total[target.parameter] = values.new_zeros(stop - start, *shapes[target.parameter])
                    rows = slice(None) if target.rows is None else slice(*target.rows)
                    total[target.parameter][:, rows] += values.view_as(total[target.parameter][:, rows])
            yield slice(start, stop), total

    def _dense_norms(self) -> Tensor:
        parts = [torch.stack([squared_norms_of(value) for value in each.values()]).sum(0) for _, each in self._formed()]
        found = torch.cat(parts)
        # the sum comes from other products than these norms
        return found.add_(self.spread().square_(), alpha=lost_in_squares(self.chain(1), found.dtype))

    def add_formed(self, factors: Tensor, views: list[Tensor]) -> None:
        """As `add_weighted`, of gradients that are formed first, in double precision."""
        wide, totals = self.widened(), dict[int, Tally]()
        for where, each in wide._formed():
            for index, values in each.items():
                total = totals.setdefault(index, Tally(values.shape[1:]))
                total.open.add_((factors[where].double() @ values.flatten(1)).view(values.shape[1:]))
                total.added()
        for index, total in totals.items():
            views[index].add_(total.total())

    def spread(self) -> Tensor:
        """For every record the sum of the norms of its parts, over all calls that share the parameters."""
        first, *rest = (contribution.spread() for _, contribution in self.members)
        return sum(rest, start=first)

    def lost(self) -> list[Tensor]:
        """Whose gradients are surely no numbers, by every member that looks."""
        return [found for _, contribution in self.members if (found := contribution.lost()) is not None]

    def chain(self, records: int) -> int:
        return sum(contribution.chain(records) for _, contribution in self.members) + len(self.members) - 1

    def chosen(self, where: Where) -> Cluster:
        return Cluster([(slot, one.chosen(where)) for slot, one in self.members], self.anatomy, self.space)

    def widened(self) -> Cluster:
        return Cluster([(slot, one.widened()) for slot, one in self.members], self.anatomy, self.space)

    def add_weighted(self, factors: Tensor, views: list[Tensor], blocks: int = 1) -> None:
        """Add the weighted sum onto the views, each of which is touched once: sums of blocks are added up before."""
        mark, size = self.space.used, -(-factors.shape[0] // blocks)
        if not self._added_at_once(factors, views, size):
            for target, value in self._sum(factors, size).items():
                target.view(views).add_(value)
        self.space.used = mark

    def _added_at_once(self, factors: Tensor, views: list[Tensor], size: int) -> bool:
        """Whether the sum was added in one pass over the parameters: of the only member, or of a table that is also
        the weight of a linear layer, by way of one buffer in which both meet."""
        if len(self.members) > 1:
            return self._added_tied(factors, views, size)
        slot, contribution = self.members[0]
        return contribution.add_onto({n: t.view(views) for n, t in slot.targets.items()}, factors, size)

    def _added_tied(self, factors: Tensor, views: list[Tensor], size: int) -> bool:
        rows = [one for _, one in self.members if type(one) is Rows]
        others = [(slot, one) for slot, one in self.members if type(one) is not Rows]
        if len(rows) != 1 or len(others) != 1 or not self._share_a_weight():
            return False
        slot, other = others[0]
        weight = slot.targets["weight"].view(views)
        if factors.dtype != weight.dtype:
            return False
        mark, both = self.space.used, self.space.take(weight, *weight.shape).zero_()
        both.index_copy_(0, *rows[0].sums(factors, size))
        places = {name: target.view(views) for name, target in slot.targets.items()} | {"weight": both}
        if not other.add_onto(places, factors, size):
            self.space.used = mark
            return False
        weight.add_(both)
        return True

    def _in_blocks(self, contribution: Contribution, factors: Tensor, size: int) -> dict[str, Tensor]:
        """The weighted sum of one member, at most `size` records in one product."""
        if size >= contribution.records:
            return contribution.weighted(factors)
        found = contribution.in_blocks(factors, size)
        if found is not None:
            return found
        total = contribution.chosen(slice(0, size)).weighted(factors[:size])
        kept = self.space.used
        for start in range(size, contribution.records, size):
            self.space.used = kept
            some = slice(start, start + size)
            for name, value in contribution.chosen(some).weighted(factors[some]).items():
                total[name].add_(value)
        return total

    def _sum(self, factors: Tensor, size: int) -> dict[Target, Tensor]:
        """The weighted sum by target; members that meet in a parameter are added up."""
        found: dict[Target, Tensor] = {}
        members = self.members
        apart = len(members) == 1 or _disjoint([target for slot, _ in members for target in slot.targets.values()])
        for slot, contribution in members:
            for name, value in self._in_blocks(contribution, factors, size).items():
                target = slot.targets[name]
                shape = self.anatomy.parameters[target.parameter].shape
                if apart and target not in found:
                    found[target] = value.reshape(shape if target.rows is None else (-1, *shape[1:]))
                    continue
                whole = target if apart else Target(target.parameter)
                if whole not in found and target.rows is None:
                    found[whole] = value.reshape(shape)
                    continue
                if whole not in found:
                    found[whole] = value.new_zeros(shape)
                place = found[whole] if apart or target.rows is None else found[whole][slice(*target.rows)]
                place.add_(value.reshape(place.shape))
        return found

    def add_rows(self, into: Tensor, offsets: list[int], start: int, stop: int) -> None:
        """Add the gradients of records start..stop in full, all calls together, onto (records, parameters)."""
        for slot, contribution in self.members:
            for name, values in contribution.dense(start, stop).items():
                target = slot.targets[name]
                parameter = self.anatomy.parameters[target.parameter]
                first = offsets[target.parameter]
                if target.rows is not None:
                    first += target.rows[0] * (parameter.numel() // parameter.shape[0])
                flat = values.reshape(stop - start, -1)
                into[:, first : first + flat.shape[1]] += flat


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
    contributions: Sequence[tuple[Slot, Contribution]],
    anatomy: Anatomy,
    space: Workspace,
    norms: Mapping[int, Tensor] | None = None,
) -> list[Cluster]:
    """Contributions grouped by the parameters they share; `norms` are known ones by the identity of a contribution."""
    home: dict[int, Cluster] = {}
    clusters: list[Cluster] = []
    for slot, contribution in contributions:
        joined = Cluster([(slot, contribution)], anatomy, space, None if norms is None else norms.get(id(contribution)))
        for known in {id(home[index]): home[index] for index in slot.parameters if index in home}.values():
            joined.members, joined.known = known.members + joined.members, None
            clusters.remove(known)
        clusters.append(joined)
        for member, _ in joined.members:
            home.update(dict.fromkeys(member.parameters, joined))
    return clusters


class Found:
    """What a recorded pass and its backward found: every call through its rule, once, as its gradients come.

    The norm of a call that shares its parameters with no other is taken at once, and what neither it nor its rule needs
    any more is let go.
    """

    def __init__(self, tape: Tape, space: Workspace) -> None:
        self.tape, self.space = tape, space
        self.made: list[list[tuple[Slot, Contribution]]] = [[] for _ in tape.entries]
        self.entries: list[TapedCall | None] = list(tape.entries)
        users = Counter(index for entry in tape.entries for index in entry.slot.parameters)
        self.shared = {index for index, count in users.items() if count > 1}
        self.shared |= {index for slot in tape.anatomy.copied for index in slot.parameters}
        self.gaps = Gaps()
        self.norms: dict[int, Tensor] = {}  # squared ones, by the identity of contributions that are kept
        tape.entries.clear()

    def take(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        entry, self.entries[number] = self.entries[number], None
        assert entry is not None
        if all(gradient is None for gradient in gradients):
            return
        rule, half = entry.slot.rule, _shortened(gradients, entry.inputs)
        assert rule is not None
        for call in calls_of(self.tape, entry, gradients, rule, self.space, half):
            contribution = rule.contribution(call)
            contribution.shortened = half
            self.made[number].append((entry.slot, contribution))
        if len(self.made[number]) == 1 and not entry.slot.parameters & self.shared:
            self.norms[id(contribution)] = contribution.squared_norms()
        self.gaps.taken(gradients)

    def contributions(self, at_copies: Mapping[int, Tensor]) -> list[tuple[Slot, Contribution]]:
        """In the order of the calls, and then the parameters that were copied."""
        found = [one for made in self.made for one in made]
        for slot in self.tape.anatomy.copied:
            (index,) = slot.parameters
            if index in at_copies:
                found.append((slot, Dense({"value": full_precision(at_copies[index])})))
        return found


def first_of(
    found: list[tuple[Slot, Contribution]], norms: Mapping[int, Tensor], records: int
) -> tuple[list[tuple[Slot, Contribution]], dict[int, Tensor]]:
    """What the first records contribute, and what is known of their squared norms."""
    kept, known = [], {}
    for slot, one in found:
        first = one.chosen(slice(0, records))
        first.shortened = one.shortened
        kept.append((slot, first))
        if id(one) in norms:
            known[id(first)] = norms[id(one)][:records]
    return kept, known


def _shortened(*values: Sequence[Any]) -> bool:
    """Whether something is in half precision."""
    return any(
        isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        for some in values
        for value in some
    )


def calls_of(
    tape: Tape, entry: TapedCall, gradients: Sequence[Tensor | None], rule: Rule, space: Workspace, half: bool
) -> list[Call]:
    """The call with records first; several where a record has several rows and the rule takes one at a time."""
    slot = entry.slot
    if not entry.rows and not half:  # the ordinary case, without detours
        return [Call(slot.layer, entry.inputs, entry.keywords, gradients, slot.trainable, space, entry.captured)]
    arranged = [
        None if gradient is None else tape.arranged(entry, position, gradient)
        for position, gradient in enumerate(gradients)
    ]
    tree = (entry.inputs, entry.keywords, entry.captured)
    if entry.rows and entry.axes is None:
        tree = map_tensors(tape.records_first, tree)
    if half:
        arranged, tree = map_tensors(full_precision, (arranged, tree))
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
