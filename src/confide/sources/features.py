"""Features of a frozen network, computed once for every record and kept behind the boundary.

What stands before a last layer is a fixed function of a single record. So a record's features are computed when it is
first drawn, by itself as all code that confide did not write, and kept with the records; every later answer runs
through the last layer alone. The answers are those that the whole network would give, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
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

    def features(self, x: Tree, rehearsal: bool = False) -> Tensor:
        """One row per record, on the host; not a number for a record that the network cannot take."""
        width, place = self.layer.in_features, self.query.device

        def found(one: Any, _: Tensor) -> Tensor:
            seen = trees.called(self.network.features, one).reshape(1, -1)
            if rehearsal and seen.shape[1] != width:
                raise Refusal(
                    f"features={width}: the backbone gives {seen.shape[1]} for a record; pass "
                    f"networks.last_layer(backbone, outputs, features={seen.shape[1]})"
                )
            return torch.cat([seen, seen.new_ones(1, 1)], 1)  # what raises is a row of zeros

        rows = []
        for start in range(0, trees.size_of(x), AT_ONCE):
            part = trees.rows_of(x, slice(start, start + AT_ONCE))
            given, blank = moved((trees.in_type(part, self.query.inputs), torch.zeros(trees.size_of(part))), place)
            row = isolated_rows(found, given, blank, width + 1, rehearsal).to("cpu", self.query.inputs)
            rows.append(torch.where(row[:, -1:] == 1, row[:, :-1], torch.nan))
        return torch.cat(rows) if rows else torch.zeros(0, width, dtype=self.query.inputs)


class FeatureStore:
    """What is known so far of the features of all records, for every backbone that is still in use."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def rows(self, part: LastPart, x: Tree, rows: Tensor) -> Tensor | None:
        """The features of these records; None where those of all records would take too much room."""
        records, width, dtype = trees.size_of(x), part.layer.in_features, part.query.inputs
        if records * width * dtype.itemsize > MOST_BYTES:
            return None
        backbone = part.network.backbone
        kept = self._kept.get(backbone)
        if kept is None or kept[0].dtype != dtype:
            kept = torch.zeros(records, width, dtype=dtype), torch.zeros(records, dtype=torch.bool)
            self._kept[backbone] = kept
        features, known = kept
        new = rows[~known[rows]]
        features[new] = part.features(trees.rows_of(x, new))
        known[new] = True
        return features[rows]


def _altered(module: nn.Module) -> bool:
    """Whether something listens to it, or stands in the place of its own forward."""
    return listens(module) or not {"forward", "features"}.isdisjoint(vars(module))
