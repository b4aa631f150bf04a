"""Linear layers that keep their weight the other way round, (inputs, outputs), as Conv1D of the transformers library.

Their gradients are those of an ordinary linear layer, transposed. The layer is known by its name, since the library
need not be installed. A class that only has that name gives away nothing: what a rule says is clipped by its own norm,
records run isolated, and a sum that is not the gradient is found out on made-up records.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from confide.mechanism.clipping.rules.linear import OuterSum, linear
from confide.mechanism.clipping.rules.registry import Call, Contribution, Dense, Where, rule_for_named


class TransposedLayer(Contribution):
    """What an ordinary linear layer would contribute, with its weight turned."""

    def __init__(self, ordinary: Contribution) -> None:
        self.ordinary, self.records = ordinary, ordinary.records

    def squared_norms(self) -> Tensor:
        return self.ordinary.squared_norms()

    def spread(self) -> Tensor:
        return self.ordinary.spread()

    def lost(self) -> Tensor | None:
        return self.ordinary.lost()

    def chain(self, records: int) -> int:
        return self.ordinary.chain(records)

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        return _turned(self.ordinary.weighted(factors))

    def add_onto(self, places: dict[str, Tensor], factors: Tensor, size: int) -> bool:
        if not isinstance(self.ordinary, OuterSum):
            return False
        return self.ordinary.add_product(places["weight"], places.get("bias"), factors, size, turned=True)

    def dense(self, start: int, stop: int) -> dict[str, Tensor]:
        return _turned(self.ordinary.dense(start, stop))

    def chosen(self, where: Where) -> Contribution:
        return TransposedLayer(self.ordinary.chosen(where))

    def widened(self) -> Contribution:
        return TransposedLayer(self.ordinary.widened())

    def merged(self, others: Sequence[Contribution]) -> Contribution | None:
        same = [other.ordinary for other in others if isinstance(other, TransposedLayer)]
        found = self.ordinary.merged(same) if len(same) == len(others) else None
        return None if found is None else TransposedLayer(found)


def _turned(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.mT if name == "weight" else value for name, value in values.items()}


@rule_for_named("transformers.pytorch_utils.Conv1D", parameters=("weight", "bias"), positions=True)
def transposed(call: Call) -> Contribution:
    found = linear(call)
    return found if isinstance(found, Dense) else TransposedLayer(found)
