"""Tables and records that look for influence: what an adversary would put beside and into a batch.

A table is where one record more could matter most: all records equal (nothing hides a change of all of them), opposite
(they cancel), in order, with one that is huge, or ordinary. A record is hostile by its size, its sign, its place in an
order, its length, its label, or by being equal to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The lengths by which values are too large: for arithmetic, for float32 sums, for float32 squares.
HUGE, ENORMOUS = 1e6, 1e20
# A little beside an equal record, so that ties do not hide what an order does.
NEARLY = 1e-3
FAR_LABEL = 3e9


@dataclass(frozen=True)
class HostileTable:
    """Records; `top` is the largest whole number among features (None: features are real), `classes` of labels."""

    x: Tensor
    y: Tensor
    top: int | None = None
    classes: int | None = None

    def rows(self, index: Tensor) -> HostileTable:
        return HostileTable(self.x[index], self.y[index], self.top, self.classes)

    def of(self, x: Tensor, y: Tensor) -> HostileTable:
        return HostileTable(x, y, self.top, self.classes)

    def with_row(self, place: int, other: HostileTable) -> HostileTable:
        """One record more, at that place."""
        return self.of(
            torch.cat([self.x[:place], other.x, self.x[place:]]), torch.cat([self.y[:place], other.y, self.y[place:]])
        )

    def replaced(self, place: int, other: HostileTable) -> HostileTable:
        index = torch.arange(len(self.x)) != place
        return self.rows(index).with_row(place, other)


MakeTable = Callable[[HostileTable, int, torch.Generator], HostileTable]
MakeRecord = Callable[[HostileTable, HostileTable, torch.Generator], HostileTable]


def _drawn(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    """Examples drawn with replacement, real features moved a little."""
    found = examples.rows(torch.randint(len(examples.x), (size,), generator=generator))
    if examples.top is not None:
        return found
    noise = torch.randn(found.x.shape, generator=generator).to(found.x.dtype)
    return found.of(found.x + 0.1 * noise * examples.x.std(), found.y)


def _equal(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    one = _drawn(examples, 1, generator)
    return one.rows(torch.zeros(size, dtype=torch.long))


def _nearly_equal(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    same = _equal(examples, size, generator)
    if examples.top is not None:
        return same
    return same.of(same.x + NEARLY * torch.randn(same.x.shape, generator=generator).to(same.x.dtype), same.y)


def _opposite(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    same, odd = _equal(examples, size, generator), torch.arange(size) % 2 == 1
    return same.of(_where(odd, _negative_features(same), same.x), _where(odd, _other_labels(same), same.y))


def _in_order(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    found = _drawn(examples, size, generator)
    return found.rows(found.x.flatten(1)[:, 0].argsort())


def _with_a_huge_one(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    found = _drawn(examples, size, generator)
    if examples.top is not None or not size:
        return found
    x = found.x.clone()
    x[size // 2] *= HUGE
    return found.of(x, found.y)


def _short(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    """Nothing but zeros behind the first place, so that one longer record is the longest."""
    found = _drawn(examples, size, generator)
    return found.of(_cut(found.x), found.y)


def _cut(x: Tensor) -> Tensor:
    found = torch.where(x == 0, torch.ones_like(x), x)
    if x.dim() > 1:
        found[:, 1:] = 0
    return found


def _two_labels(examples: HostileTable, size: int, generator: torch.Generator) -> HostileTable:
    """Equal records with one label and the other in turn."""
    same, odd = _equal(examples, size, generator), torch.arange(size) % 2 == 1
    return same.of(same.x, _where(odd, _other_labels(same), same.y))


TABLES: dict[str, MakeTable] = {
    "ordinary": _drawn,
    "equal": _equal,
    "nearly equal": _nearly_equal,
    "opposite": _opposite,
    "in order": _in_order,
    "one huge": _with_a_huge_one,
    "short": _short,
    "two labels": _two_labels,
}


def _where(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, *[1] * (other.dim() - 1)), one, other)


def _negative_features(table: HostileTable) -> Tensor:
    return -table.x if table.top is None else table.top - table.x


def _other_labels(table: HostileTable) -> Tensor:
    return -table.y if table.classes is None else table.classes - 1 - table.y


def _neighbour(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    """A record of the table; of the examples, if the table is empty."""
    source = table if len(table.x) else examples
    return source.rows(torch.randint(len(source.x), (1,), generator=generator))


def _scaled(factor: float, label: float = 1.0) -> MakeRecord:
    def make(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
        one = _neighbour(table, examples, generator)
        x = one.x * factor if one.top is None else torch.full_like(one.x, one.top)
        return one.of(x, one.y * label if one.classes is None else one.y)

    return make


def _flipped(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    one = _neighbour(table, examples, generator)
    return one.of(_negative_features(one), one.y)


def _other_label(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    one = _neighbour(table, examples, generator)
    return one.of(one.x, _other_labels(one))


def _beyond(sign: float) -> MakeRecord:
    """Before the first or behind the last of the table, in every feature."""

    def make(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
        one, source = _neighbour(table, examples, generator), table if len(table.x) else examples
        if one.top is not None:
            return one.of(torch.full_like(one.x, one.top if sign > 0 else 0), one.y)
        return one.of(source.x.amax(0, keepdim=True) + 1 if sign > 0 else source.x.amin(0, keepdim=True) - 1, one.y)

    return make


def _constant(label: float) -> MakeRecord:
    """Every feature equal, so that what is subtracted cancels, with a label so far off that its parts are large."""

    def make(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
        one = _neighbour(table, examples, generator)
        x = torch.ones_like(one.x) * one.x.flatten(1)[:, :1].view(-1, *[1] * (one.x.dim() - 1))
        return one.of(x, torch.full_like(one.y, label) if one.classes is None else one.y)

    return make


def _far_label(sign: float) -> MakeRecord:
    def make(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
        one = _neighbour(table, examples, generator)
        if one.classes is not None:
            return one.of(one.x, torch.full_like(one.y, one.classes - 1 if sign > 0 else 0))
        return one.of(one.x, torch.full_like(one.y, sign * FAR_LABEL))

    return make


def _outside(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    """A whole number beyond the vocabulary, a feature far out of range, a label that is no class."""
    one = _neighbour(table, examples, generator)
    x = one.x * 0 + 1000 if one.top is None else torch.full_like(one.x, one.top + 1)
    return one.of(x, one.y if one.classes is None else torch.full_like(one.y, one.classes))


def _beyond_features(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    one = _neighbour(table, examples, generator)
    return one.of(one.x * 0 + 1000 if one.top is None else torch.full_like(one.x, one.top + 1), one.y)


def _not_finite(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    one = _neighbour(table, examples, generator)
    return one if one.top is not None else one.of(torch.full_like(one.x, torch.nan), one.y)


def _length(long: bool) -> MakeRecord:
    """No zero behind which a mask would end, or nothing but zeros behind the first place."""

    def make(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
        one = _neighbour(table, examples, generator)
        full = _neighbour(examples, examples, generator).x
        return one.of(torch.where(full == 0, torch.ones_like(full), full) if long else _cut(one.x), one.y)

    return make


def _spike(table: HostileTable, examples: HostileTable, generator: torch.Generator) -> HostileTable:
    one = _neighbour(table, examples, generator)
    x = torch.zeros_like(one.x)
    x.flatten(1)[:, -1] = HUGE if one.top is None else one.top
    return one.of(x, one.y)


RECORDS: dict[str, MakeRecord] = {
    "ordinary": lambda table, examples, generator: _drawn(examples, 1, generator),
    "equal to a neighbour": _neighbour,
    "a neighbour with another label": _other_label,
    "sign-flipped": _flipped,
    "huge": _scaled(HUGE),
    "huge and negative": _scaled(-HUGE, -HUGE),
    "enormous": _scaled(ENORMOUS),
    "zero": _scaled(0.0),
    "one feature alone": _spike,
    "first in order": _beyond(-1.0),
    "last in order": _beyond(1.0),
    "longest": _length(True),
    "shortest": _length(False),
    "cancelling": _constant(FAR_LABEL),
    "largest label": _far_label(1.0),
    "smallest label": _far_label(-1.0),
    "out of range": _outside,
    "features out of range": _beyond_features,
    "not finite": _not_finite,
}
UNUSABLE = ("out of range", "not finite")
"""Records that the boundary leaves out, so that they change how many there are."""
