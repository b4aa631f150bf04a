"""Features of a frozen network, computed once for every record and kept behind the boundary.

What stands before a last layer, or the frozen first part of any network (`prefix`), is a fixed function of a single
record. So a record's features are computed when it is first drawn, by itself as all code that confide did not write,
and kept with the records; every later answer runs through the rest alone. The answers are those that the whole network
would give, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from confide.data import trees
from confide.data.trees import Tree
from confide.devices import moved
from confide.errors import Refusal
from confide.mechanism.clipping import isolated_rows
from confide.mechanism.clipping.proven import listens
from confide.models.networks import FeatureNetwork, LastLayerNetwork
from confide.sources.prefix import Prefix, plan_of, prefix_of
from confide.sources.queries import GradientQuery, Query

MOST_BYTES = 1 << 30
"""Of features that are kept; a gigabyte is a quarter of a million records with a thousand features each."""
AT_ONCE = 64
"""Records whose features are computed together: enough to fill a processor, few enough for a large network."""


@dataclass(frozen=True)
class LastPart:
    """A query about a network that ends in one trainable layer: what comes before it, and the layer."""

    network: LastLayerNetwork
    layer: nn.Linear
    query: GradientQuery

    @classmethod
    def of(cls, query: Query) -> LastPart | None:
        """None where there is no such layer, or where the network may change between answers: outside of a run."""
        if not isinstance(query, GradientQuery) or query.origin is None:
            return None
        module, behind = query.module, None
        if type(module) is FeatureNetwork and not _altered(module):
            module, behind = module.frozen, module.identity
        if type(module) is not LastLayerNetwork or _altered(module) or module.backbone.training:
            return None
        layer = module.head if behind is None else behind
        frozen = not any(value.requires_grad for value in module.backbone.parameters())
        return cls(module, layer, query) if type(layer) is nn.Linear and frozen else None

    @property
    def asked(self) -> GradientQuery:
        """The same of the layer alone: its parameters are all that is trainable."""
        return GradientQuery(self.layer, self.query.loss, self.query.parts, self.query.origin)

    @property
    def key(self) -> nn.Module:
        return self.network.backbone

    @property
    def width(self) -> int:
        return self.layer.in_features

    def records(self, kept: Tensor, x: Callable[[], Tree]) -> Tree:
        return kept

    def features(self, x: Tree, rehearsal: bool = False) -> Tensor:
        def row(one: Any) -> Tensor:
            seen: Tensor = trees.called(self.network.features, one).reshape(1, -1)
            if rehearsal and seen.shape[1] != self.width:
                raise Refusal(
                    f"features={self.width}: the backbone gives {seen.shape[1]} for a record; pass "
                    f"networks.last_layer(backbone, outputs, features={seen.shape[1]})"
                )
            return seen

        return _computed(row, self.query, x, self.width, rehearsal)


@dataclass(frozen=True)
class FirstPart:
    """A query about a network whose first part is frozen: that part, and the query of the rest."""

    prefix: Prefix
    query: GradientQuery

    @property
    def asked(self) -> GradientQuery:
        return GradientQuery(self.prefix.suffix, self.query.loss, self.query.parts, self.query.origin)

    @property
    def key(self) -> nn.Module:
        return self.prefix.suffix

    @property
    def width(self) -> int:
        return self.prefix.width

    def records(self, kept: Tensor, x: Callable[[], Tree]) -> Tree:
        return self.prefix.records(kept, x)

    def features(self, x: Tree, rehearsal: bool = False) -> Tensor:
        return _computed(self.prefix.rows, self.query, x, self.width, rehearsal)


Part: TypeAlias = LastPart | FirstPart


def _computed(row: Callable[[Any], Tensor], query: GradientQuery, x: Tree, width: int, rehearsal: bool) -> Tensor:
    """One row per record, on the host; not a number for a record that the network cannot take."""

    def found(one: Any, _: Tensor) -> Tensor:
        seen = row(one)
        return torch.cat([seen, seen.new_ones(1, 1)], 1)  # what raises is a row of zeros

    rows = []
    for start in range(0, trees.size_of(x), AT_ONCE):
        part = trees.rows_of(x, slice(start, start + AT_ONCE))
        given, blank = moved((trees.in_type(part, query.inputs), torch.zeros(trees.size_of(part))), query.device)
        seen = isolated_rows(found, given, blank, width + 1, rehearsal).to("cpu", query.inputs)
        rows.append(torch.where(seen[:, -1:] == 1, seen[:, :-1], torch.nan))
    return torch.cat(rows) if rows else torch.zeros(0, width, dtype=query.inputs)


class FeatureStore:
    """What is known so far of the features of all records, for every backbone that is still in use."""

    def __init__(self, members: int = 1) -> None:
        """Of each of so many processes that hold a part of the records."""
        self._members = members
        self._kept: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        self._prefix: Prefix | None = None  # of the network that was rehearsed last

    def rehearsed(self, query: Query, x: Tree) -> Part | None:
        """What can be kept of this network, looked at on made-up records `x`."""
        if isinstance(query, GradientQuery):
            self._prefix = prefix_of(query, x) if LastPart.of(query) is None else None
        found = self.part(query)
        return found if found is not None and self._has_room(found) else None

    def part(self, query: Query) -> Part | None:
        """What can be kept of this network; nothing where it is not the one that was looked at, or has changed."""
        if self._prefix is not None and isinstance(query, GradientQuery) and self._prefix.holds(query):
            return FirstPart(self._prefix, query)
        return LastPart.of(query)

    def rows(self, part: Part, x: Tree, rows: Tensor, usable: Tensor | None = None) -> Tensor | None:
        """The features of these records; None where those of the declared records would take too much room.

        Looking at what user code could write to takes long beside a few records: where some are new, others that are
        `usable` are computed with them.
        """
        records, dtype = trees.size_of(x), part.query.inputs
        if not self._has_room(part):
            return None
        kept = self._kept.get(part.key)
        if kept is None or kept[0].dtype != dtype:
            kept = torch.zeros(records, part.width, dtype=dtype), torch.zeros(records, dtype=torch.bool)
            self._kept[part.key] = kept
        features, known = kept
        new = rows[~known[rows]]
        if len(new) and usable is not None:
            others = usable & ~known
            others[new] = False
            new = torch.cat([new, others.nonzero()[: -len(new) % AT_ONCE, 0]])
        features[new] = part.features(trees.rows_of(x, new))
        known[new] = True
        return features[rows]

    def _has_room(self, part: Part) -> bool:
        """By the planned number of records, a public one: what is kept rounds otherwise than the whole network, and one
        record more than there is room for must not change how all others round."""
        plan = plan_of(part.query)
        if plan is None:
            return False
        records: int = -(-plan.records // self._members)
        return records * part.width * part.query.inputs.itemsize <= MOST_BYTES


def _altered(module: nn.Module) -> bool:
    """Whether something listens to it, or stands in the place of its own forward."""
    return listens(module) or not {"forward", "features"}.isdisjoint(vars(module))
