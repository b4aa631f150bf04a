"""One record more: how far does the sum move, in units of the clip C? The claim is 1 C, for every record and table.

    confide.auditing.audit_query(query, x, y)            any query, with a few made-up or public examples
    confide.auditing.audit_module(module, x, y, loss=...)

asks through the boundary itself and knows nothing of how records are kept apart there, so it is a check of that. Both
answers of a pair have the same noise, so that a sum which washes noise away is seen as well. Where a module draws
random numbers, a record is exchanged instead (2 C), since one more would shift what all others draw.

moves       hostile records in hostile tables, at several batch sizes, clips and seeds
memory      after a batch with the record, the next batch without it is answered as if it had never been there
left state  what stays in the module after an answer does not depend on the record
errors      no record raises anything
as written  the same query without the boundary: whether records keep apart by themselves (`as_written`)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from confide.auditing.as_written import check_as_written
from confide.auditing.hostile_records import RECORDS, TABLES, UNUSABLE, HostileTable
from confide.auditing.kept_state import KeptState, evaluation, one_thread, same_start
from confide.auditing.results import Check
from confide.data.schema import Schema
from confide.errors import Refusal, SpeedWarning
from confide.mechanism.gaussian import SampledGaussian
from confide.running.fit import default_likelihood
from confide.sources.private_data import PrivateData
from confide.sources.queries import GradientQuery, Loss, Query

SIZES = (0, 1, 4, 17, 64)  # An empty table, one record, a few, a number that nothing divides, and a whole batch.
SEEDS = 2  # Each move is tried with other weights once more: some faults need a lucky start.
# Of C, for what single precision loses in a sum of a batch and its noise.
ROUNDING = 1e-3
# The clip is set by what a record of the table counts for: just above, where nothing is clipped yet; further above,
# for tables whose records cancel in part; and below.
CLIPS = (1.001, 1.5, 0.3)
NOISE = 1.0
FEWEST_EXAMPLES = 4
SECONDS = 60.0
"""Of processor time for the moves: a query whose records run one by one, each with everything put back, takes a hundred
times as long as others. Small tables come first, where most is found; what is left out is said."""
NOBODY = "no"
"""Where a table raises by itself, before a record is added to it."""


@dataclass(frozen=True)
class Move:
    """One pair of tables: `size` in units of C, where `allowed` is the claim."""

    size: float
    allowed: float
    record: str
    table: str
    batch: int
    seed: int
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.size <= self.allowed + ROUNDING

    def __str__(self) -> str:
        where = f"{self.record} record, {self.table} table, batch {self.batch}"
        return f"{where}: {self.error}" if self.error else f"moves by {self.size:.4g} C ({where})"


@dataclass(frozen=True)
class QueryAudit:
    """What was found; `largest` are the largest moves by kind of record, the worst first.

    refused  why the boundary gives no answer even to ordinary records, so that nothing can be released; "" if it does
    left     how many of `tables` were left out for lack of time, the largest ones
    slow     what the boundary says of records that cannot run at once: one by one or in processes of their own, and why
    """

    name: str
    checks: tuple[Check, ...]
    largest: tuple[Move, ...]
    tried: int
    refused: str = ""
    tables: int = 0
    left: int = 0
    slow: str = ""

    @property
    def caught_by(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        return not self.caught_by

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.caught_by and self.caught_by != ("as written",):
            return f"FAILED by {', '.join(self.caught_by)}"
        kept = "refused, so that nothing is released" if self.refused else "the claim survives"
        return f"{kept}; FAILED as written: it mixes records of a batch" if self.caught_by else kept

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


Progress = Callable[[int, int], None]


def audit_module(
    module: nn.Module, x: Any, y: Any, *, loss: Loss | None = None, classes: int | None = None, **options: Any
) -> QueryAudit:
    """`audit_query` for the gradients of a module's loss; by default the one that a fit would take."""
    chosen = loss or default_likelihood(module, Schema(classes=classes, records=2)).loss
    return audit_query(GradientQuery(module, chosen), x, y, classes=classes, **options)


def audit_query(
    query: Query,
    x: Any,
    y: Any,
    *,
    classes: int | None = None,
    name: str = "",
    sizes: tuple[int, ...] | None = None,
    seeds: int = SEEDS,
    seed: int = 0,
    seconds: float = SECONDS,
    make_data: Callable[..., Any] = PrivateData,
    progress: Progress | None = None,
) -> QueryAudit:
    """Try to move the query's sum by more than one record may.

    x, y       a few records of the right shape, made up or public: nothing is charged for them, all is shown
    classes    of the labels; None for a real target
    sizes      of the tables to which one record is added; SIZES unless given
    seconds    of processor time after which no other table is begun
    make_data  what answers: PrivateData, or something faulty
    """
    sizes = SIZES if sizes is None else sizes
    examples = _examples(x, y, classes)
    bench = MovesBench(query, examples, make_data, seed)
    with one_thread():
        return _audited(bench, name, sizes, seeds, seconds, progress)


def _audited(
    bench: MovesBench, name: str, sizes: tuple[int, ...], seeds: int, seconds: float, progress: Progress | None
) -> QueryAudit:
    query, examples, seed = bench.query, bench.examples, bench.seed
    title = name or (type(query.module).__name__ if isinstance(query, GradientQuery) else "statistic")
    slow, written = bench.slow(), check_as_written(query, examples, seed)
    refused = bench.refusal()
    if refused:
        check = Check("moves", True, f"refused, so that nothing is released: {refused}", "at most 1 C")
        return QueryAudit(title, (check, written), (), 0, refused, slow=slow)
    # Other seeds are for the sizes where most is found: neither for the smallest nor for the largest, which are slow
    # and come last.
    settings = [(size, seed) for size in sizes[:4]]
    settings += [(size, seed + number) for number in range(1, seeds) for size in sizes[2:4] or sizes]
    settings += [(size, seed) for size in sizes[4:]]
    memory, state = bench.memory(seed)
    moves = list(bench.all_moves(settings, progress, seconds))
    checks = (_moved(moves), memory, state, _errors(moves), written)
    return QueryAudit(title, checks, _worst(moves), len(moves), "", len(settings) * len(TABLES), bench.left, slow)


def _examples(x: Any, y: Any, classes: int | None) -> HostileTable:
    features, targets = torch.as_tensor(x), torch.as_tensor(y)
    if len(features) != len(targets) or len(features) < FEWEST_EXAMPLES:
        raise Refusal(f"x, y: need at least {FEWEST_EXAMPLES} example records, with one row of each per record")
    whole = not features.is_floating_point()
    return HostileTable(features, targets, int(features.max()) if whole else None, classes)


class MovesBench:
    """One query, the examples, and whatever answers."""

    def __init__(self, query: Query, examples: HostileTable, make_data: Callable[..., Any], seed: int) -> None:
        self.query, self.examples, self.make_data = query, examples, make_data
        self.module = query.module if isinstance(query, GradientQuery) else None
        self.kept = None if self.module is None else KeptState(self.module)
        self.seed, self.exchange, self.left = seed, False, 0

    def slow(self) -> str:
        """What is said of the way that records take, where the query is seen for the first time."""
        with warnings.catch_warnings(record=True) as said, suppress(Exception):  # an error comes up again
            warnings.simplefilter("always")
            schema = Schema(classes=self.examples.classes, records=len(self.examples.x))
            self.make_data(self.examples.x, self.examples.y, schema=schema, seed=self.seed).rehearse(self.query)
        return next((str(one.message) for one in said if issubclass(one.category, SpeedWarning)), "")

    def refusal(self) -> str:
        """Why the boundary refuses ordinary records; empty if it does not. Then it is known whether chance is in it."""
        try:
            self.exchange = self._random()
        except Refusal as error:
            return str(error)
        except Exception as error:
            raise Refusal(
                f"x, y: ordinary records get no answer, but {type(error).__name__}: {error}; give examples of the "
                "shape and kind that the query takes"
            ) from error
        return ""

    def _random(self) -> bool:
        """Whether answers to the same records differ from seed to seed."""
        table = TABLES["ordinary"](self.examples, 5, torch.Generator().manual_seed(self.seed))
        first, again, other = (self.answer(table, self._silent(1e6), number) for number in (0, 0, 1))
        scale = ROUNDING * first.norm().clamp(min=1e-30)
        return bool((first - again).norm() <= scale) and bool((first - other).norm() > scale)

    def all_moves(
        self, settings: list[tuple[int, int]], progress: Progress | None, seconds: float = math.inf
    ) -> Iterator[Move]:
        """All tables and records at these sizes and seeds. What draws random numbers is tried in evaluation mode too:
        there one record more can be compared, and a query that goes by the number of records shows."""
        rounds = [(*setting, table) for setting in settings for table in TABLES]
        total, twice = len(rounds), self.exchange and self.module is not None
        started = process_time()
        for done, (size, seed, table) in enumerate(rounds):
            if done and process_time() - started > seconds:
                self.left = total - done
                break
            yield from self.moves(size, seed, table)
            if twice and self.module is not None and seed == settings[0][1]:
                with evaluation(self.module):
                    self.exchange = self._random()
                    yield from () if self.exchange else self.moves(size, seed, table)
                self.exchange = True
            if progress is not None:
                progress(done + 1, total)

    def moves(self, size: int, seed: int, table_name: str) -> Iterator[Move]:
        """All hostile records in one table."""
        generator = torch.Generator().manual_seed(1000 * seed + size)
        table = TABLES[table_name](self.examples, size, generator)
        if self.exchange and not size:
            return
        try:
            clips = self._clips(table, seed)
        except Exception as error:  # a table is records too
            yield Move(0.0, 1.0, NOBODY, table_name, size, seed, f"raises {type(error).__name__}")
            return
        for clip in clips:
            mechanism = SampledGaussian(NOISE, clip, 1.0, max(1, size), "full-batch")
            without = self.answer(table, mechanism, seed)
            for number, (name, make) in enumerate(RECORDS.items()):
                if self.exchange and name in UNUSABLE:
                    continue
                record = make(table, self.examples, generator)
                place = (0, size, size // 2)[(number + seed) % 3]
                yield self._move(table, record, place, without, mechanism, seed, name, table_name)

    def _move(
        self,
        table: HostileTable,
        record: HostileTable,
        place: int,
        without: Tensor,
        mechanism: SampledGaussian,
        seed: int,
        name: str,
        table_name: str,
    ) -> Move:
        allowed, size = (2.0 if self.exchange else 1.0), len(table.x)
        other = table.replaced(min(place, size - 1), record) if self.exchange else table.with_row(place, record)
        try:
            moved = (self.answer(other, mechanism, seed) - without).norm().item() / mechanism.clip
        except Exception as error:  # whatever a record can make a query raise
            return Move(0.0, allowed, name, table_name, size, seed, f"raises {type(error).__name__}")
        return Move(moved if moved == moved else float("inf"), allowed, name, table_name, size, seed)

    def _clips(self, table: HostileTable, seed: int) -> list[float]:
        """By what a record counts for beside its neighbours, were nothing clipped."""
        own = self.answer(table, self._silent(1e25), seed).norm().item() / max(1, len(table.x))
        alone = self.answer(self.examples, self._silent(1e25), seed).norm().item() / len(self.examples.x)
        scale = next((value for value in (own, alone) if 1e-12 < value < 1e12), 1.0)
        return [factor * scale for factor in CLIPS]

    def memory(self, seed: int) -> tuple[Check, Check]:
        """A batch with or without the record, then the same other batch: what is left of the record, and where."""
        generator = torch.Generator().manual_seed(seed)
        table, later = (TABLES["ordinary"](self.examples, 6, generator) for _ in range(2))
        mechanism = SampledGaussian(NOISE, max(self._clips(later, seed)), 1.0, 6, "full-batch")
        histories = [table]
        for name in ("ordinary", "huge", "largest label"):
            record = RECORDS[name](table, self.examples, generator)
            histories.append(table.replaced(0, record) if self.exchange else table.with_row(6, record))
        found, left = [], []
        for history in histories:
            with suppress(
                Exception
            ):  # that a record raises is seen among the moves; what it leaves behind is seen here
                self.answer(history, mechanism, seed)
            left.append({} if self.kept is None else self.kept.now())
            found.append(self.answer(later, mechanism, seed, fresh=False))
        moved = max((each - found[0]).norm().item() for each in found[1:]) / mechanism.clip
        names = sorted(
            {name for each in left for name in each.keys() | left[0].keys() if each.get(name) != left[0].get(name)}
        )
        return (
            Check("memory", moved <= ROUNDING, f"moves the next batch by {moved:.4g} C", "0 C"),
            Check("left state", not names, f"depends on a record: {', '.join(names) or 'nothing'}", "nothing"),
        )

    def answer(self, table: HostileTable, mechanism: SampledGaussian, seed: int, fresh: bool = True) -> Tensor:
        """From the module as it was at first, unless its history is to count; with the same noise for one seed."""
        if fresh and self.kept is not None:
            self.kept.put_back()
        schema = Schema(classes=self.examples.classes, records=max(2, len(table.x)))
        data = self.make_data(table.x, table.y, schema=schema, seed=seed)
        with same_start(self.module, seed):
            released: Tensor = data.answer(self.query, mechanism).sum
            return released.double().clone()

    def _silent(self, clip: float) -> SampledGaussian:
        return SampledGaussian(0.0, clip, 1.0, 1, "full-batch", private=False)


def _moved(moves: list[Move]) -> Check:
    worst = max((move for move in moves if not move.error), key=lambda move: move.size / move.allowed, default=None)
    if worst is None:
        return Check("moves", False, "no answer at all", "at most 1 C")
    return Check("moves", worst.passed, str(worst), f"at most {worst.allowed:g} C")


def _errors(moves: list[Move]) -> Check:
    wrong = [move for move in moves if move.error]
    return Check("errors", not wrong, str(wrong[0]) if wrong else "none", "none, whatever the record")


def _worst(moves: list[Move]) -> tuple[Move, ...]:
    best: dict[str, Move] = {}
    for move in moves:
        known = best.get(move.record)
        if known is None or (bool(move.error), move.size) > (bool(known.error), known.size):
            best[move.record] = move
    return tuple(sorted(best.values(), key=lambda move: (bool(move.error), move.size), reverse=True))
