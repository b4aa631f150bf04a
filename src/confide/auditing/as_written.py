"""The query as it is written, asked for a whole batch at once: does one record change the answers of the others?

The boundary keeps records apart whatever a module does in a batch, so a module that mixes them keeps the claim there,
is slow there, and learns something else than its author meant. Here nothing is kept apart: the batch goes through the
module as any trainer would send it, and plain differentiation gives one row per record.

in a batch   one record more, or another one, must leave all other rows as they were
backwards    the gradient of all losses together must be the sum of the rows, each of which was asked for alone
afterwards   a batch must be answered alike whichever records were in the batch before it
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from confide.auditing.hostile_records import RECORDS, TABLES, HostileTable
from confide.auditing.kept_state import KeptState, evaluation, same_start
from confide.auditing.results import Check
from confide.errors import Refusal
from confide.sources.queries import GradientQuery, Query, StatisticQuery

SIZES = (4, 1, 17)  # A few records, one alone, and a number that no tile or vector divides.
# Numbers in the rows of one batch; a batch that would hold more is left out.
LARGEST = 1 << 26
# Of C: what a batch of another size may change by rounding, in double precision and where only single can be had.
ROUNDING = {torch.float64: 1e-3, torch.float32: 3e-2}
# Mean length of a row times these: where most rows are clipped, and where none is.
CLIPS = (0.3, 3.0)
NAME, EXPECTED = "as written", "0 C"


BACKWARDS = "the gradient of a batch is not the sum of what its records give alone; it is off"
AFTERWARDS = "records of the batch before move the answers of a batch"


@dataclass(frozen=True)
class Influence:
    """Records touch each other, which moves a sum by `size` C."""

    size: float
    where: str
    how: str = "in one batch, a record moves the answers of others"

    def __str__(self) -> str:
        return f"{self.how} by {self.size:.4g} C ({self.where})"


def check_as_written(query: Query, examples: HostileTable, seed: int) -> Check:
    """Whether records keep apart by themselves."""
    try:
        worst = WholeBatch(query, examples, seed).worst()
    except Exception as error:  # whatever a batch at once makes a module raise, that asks for no batches
        return Check(NAME, True, f"no batch at once: {type(error).__name__}", EXPECTED)
    if worst is None:
        return Check(NAME, True, "a record moves the answers of others by 0 C", EXPECTED)
    return Check(NAME, False, str(worst), EXPECTED)


class WholeBatch:
    """One query, in double precision if it can be had, and hostile tables."""

    def __init__(self, query: Query, examples: HostileTable, seed: int) -> None:
        self.examples, self.seed = examples, seed
        self.query, self.dtype = query, torch.float32
        self.kept: KeptState | None = None
        for dtype in (torch.float64, torch.float32):
            try:
                self._take(_cast(query, dtype), dtype)
                self.answers(self.table("ordinary", 4), seed)
                return
            except Exception:
                if dtype == torch.float32:
                    raise

    def _take(self, query: Query, dtype: torch.dtype) -> None:
        self.query, self.dtype = query, dtype
        self.kept = KeptState(query.module) if isinstance(query, GradientQuery) else None

    def table(self, name: str, size: int) -> HostileTable:
        generator = torch.Generator().manual_seed(1000 * self.seed + size)
        found = TABLES[name](self.examples, size, generator)
        return found.of(self._cast_features(found.x), found.y)

    def _cast_features(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def worst(self) -> Influence | None:
        """The largest influence in the first table where there is any; in evaluation mode too, if chance is in it."""
        found = self._search(exchange := self._random())
        if found is not None or not isinstance(self.query, GradientQuery):
            return found
        found = self._backwards(self.query) or self._afterwards()
        if found is None and exchange:
            with evaluation(self.query.module):
                return None if self._random() else self._search(False)
        return found

    def _backwards(self, query: GradientQuery) -> Influence | None:
        """Whether losses together have another gradient than one by one, through the same forward pass."""
        table = self.table("ordinary", SIZES[0])
        self._put_back()
        with same_start(query.module, self.seed):
            losses = _losses(query, table)
            rows, again, whole = (_rows(query, values) for values in (losses, losses, losses.sum()[None]))
        size = _moved(rows.sum(0, keepdim=True), whole)
        told = bool(torch.isfinite(rows).all() and torch.isfinite(whole).all() and torch.equal(rows, again))
        return self._beyond(Influence(size, f"ordinary table, batch {len(rows)}", BACKWARDS)) if told else None

    def _afterwards(self) -> Influence | None:
        """Two histories of as many records, so that what counts calls or rows is left alone."""
        later, found = self.table("ordinary", SIZES[0] + 1), []
        for name in ("ordinary", "one huge"):
            self.answers(self.table(name, SIZES[0]), self.seed)
            found.append(self.answers(later, self.seed, fresh=False))
        return self._beyond(Influence(_moved(*found), f"ordinary table, batch {len(later.x)}", AFTERWARDS))

    def _beyond(self, found: Influence) -> Influence | None:
        return None if found.size <= ROUNDING[self.dtype] else found

    def _random(self) -> bool:
        table = self.table("ordinary", 5)
        first, again, other = (self.answers(table, self.seed + number) for number in (0, 0, 1))
        scale = ROUNDING[self.dtype] * first.norm().clamp(min=1e-30)
        return bool((first - again).norm() <= scale) and bool((first - other).norm() > scale)

    def _search(self, exchange: bool) -> Influence | None:
        sizes = [size for size in SIZES if (size + 1) * self.query.size <= LARGEST or size == 1]
        for size in sizes:
            for name in TABLES:
                found = max(self.influences(name, size, exchange), key=lambda each: each.size, default=None)
                if found is not None and self._beyond(found):
                    return found
        return None

    def influences(self, name: str, size: int, exchange: bool) -> Iterator[Influence]:
        """Every record in one table; records and tables that raise are the boundary's to deal with."""
        table = self.table(name, size)
        generator = torch.Generator().manual_seed(self.seed)
        try:
            before = self.answers(table, self.seed)
        except Exception:
            return
        for number, (kind, make) in enumerate(RECORDS.items()):
            record = make(table, self.examples, generator)
            record = record.of(self._cast_features(record.x), record.y)
            if not _usable(record):
                continue
            place = (0, size, size // 2)[number % 3]
            others = torch.arange(size)
            if exchange:
                place = min(place, size - 1)
                others = others[others != place]
            changed = table.replaced(place, record) if exchange else table.with_row(place, record)
            try:
                after = self.answers(changed, self.seed)
            except Exception:
                continue
            here = others if exchange else others + (others >= place)
            yield Influence(_moved(before[others], after[here]), f"{kind} record, {name} table, batch {size}")

    def _put_back(self) -> None:
        if self.kept is not None:
            self.kept.put_back()

    def answers(self, table: HostileTable, seed: int, fresh: bool = True) -> Tensor:
        """One row per record; from the module as it was at first, unless its history is to count."""
        if fresh:
            self._put_back()
        if isinstance(self.query, StatisticQuery):
            with same_start(None, seed):
                rows = self.query.function(table.x, table.y).detach()
        else:
            with same_start(self.query.module, seed):
                rows = _rows(self.query, _losses(self.query, table))
        if len(rows) != len(table.x):
            raise Refusal(f"{len(rows)} answers for {len(table.x)} records")
        return torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, torch.zeros_like(rows)).double()


def _losses(query: GradientQuery, table: HostileTable) -> Tensor:
    losses = query.loss(query.module(table.x), table.y)
    if losses.dim() != 1:
        raise Refusal(f"loss: a number per record is needed, not shape {tuple(losses.shape)}")
    return losses


def _rows(query: GradientQuery, values: Tensor) -> Tensor:
    """The gradient of every value."""
    parameters = [parameter for parameter in query.module.parameters() if parameter.requires_grad]
    rows = []
    for value in values:
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        whole = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows.append(torch.cat([part.detach().flatten() for part in whole]))
    return torch.stack(rows)


def _cast(query: Query, dtype: torch.dtype) -> Query:
    """A copy in double precision, or as it is."""
    if isinstance(query, StatisticQuery):
        return query
    module = copy.deepcopy(query.module)
    return GradientQuery(module.double() if dtype == torch.float64 else module, query.loss)


def _usable(record: HostileTable) -> bool:
    """Whether the boundary would let it into a batch."""
    fits = record.classes is None or bool(((record.y >= 0) & (record.y < record.classes)).all())
    return fits and (not record.x.is_floating_point() or bool(torch.isfinite(record.x).all()))


def _moved(before: Tensor, after: Tensor) -> float:
    """How far the clipped sum of the same records moves, in units of the clip."""
    lengths, others = before.norm(dim=1), after.norm(dim=1)
    usual = lengths.median().item() if len(lengths) else 0.0
    usual = usual or (others.median().item() if len(others) else 0.0)
    if not usual:
        return 0.0
    found: list[float] = []
    for factor in CLIPS:
        clip = factor * usual
        clipped = [
            rows * (clip / norms.clamp(min=1e-300)).clamp(max=1)[:, None]
            for rows, norms in ((before, lengths), (after, others))
        ]
        found.append((clipped[1] - clipped[0]).sum(0).norm().item() / clip)
    return float(max(found))
