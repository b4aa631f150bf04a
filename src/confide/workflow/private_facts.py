"""Public facts learnt from private records, and paid for: what each column holds, its bounds, its categories.

    found = learn_facts(table, Schema(target="income"), Budget(epsilon=0.5, delta=1e-6), ledger="budget.db")
    found.schema          # facts, each marked "learnt privately", with what they have cost

One release of noisy counts answers everything (`mechanism.open_histogram`): how many records there are, and for every
column how many cells are numbers, dates, texts or missing, how many numbers lie between neighbours of 1, 2 and 5 times
powers of ten, how many dates in each year, and which texts many records hold. What is made of it:

    bounds       from the lowest to the highest bin whose count stands out of the noise: tails that do not are clamped
    categories   the texts that reach the threshold; others count as none of them, and where those are the most part a
                 public hash puts all into buckets
    missing      a category of its own where missing cells stand out of the noise, else the middle

A column in which nothing stands out is left out, with a note. Facts that are declared stay; bounds that are far wider
than what stands out are said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from confide.data.cells import GRID, LISTED, YEARS, CellKind, Cells, NoisyCells, days_of_years, edges_of
from confide.data.columns import Bounds, Column, Source
from confide.data.draft import sounds_like_date
from confide.data.fingerprint import Sketch, key_for, register_sketch, registered_name
from confide.data.payment import Payment
from confide.data.preprocessing import Encoder
from confide.data.schema import LEARNT, Schema, Task
from confide.data.table import Array, Table, quoted
from confide.data.views import ISO, USUAL_PARTS
from confide.errors import DataError
from confide.mechanism.noise import NoiseStream
from confide.mechanism.open_histogram import OpenHistogram
from confide.privacy.events import Adjacency, Event, NonPrivateEvent
from confide.privacy.ledger import Ledger
from confide.privacy.statement import SEEDED, Privacy

PURPOSE = "learn the facts of the columns"
DOUBT = 1e-3
"""Chance that noise alone passes for something in one column: bounds too wide, which cost utility and no privacy."""
TOO_WIDE = 10.0
"""Declared bounds so many times as wide as what stands out leave a tenth of an input's range in use."""
LISTED_SHARE = 0.5
"""Where the texts that many records hold are less than this of all texts, most would be none of them."""
FEWEST_BUCKETS, MOST_BUCKETS = 16, 256
"""Of a column of many texts; about four for each text that many records hold, so that few of those share one."""


@dataclass(frozen=True)
class Budget:
    """What learning facts may cost."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"


@dataclass(frozen=True)
class LearntFacts:
    """What was found: the facts, what should be known about them, and what they have cost."""

    schema: Schema
    notes: tuple[str, ...]
    privacy: Privacy


@dataclass(frozen=True)
class _AskedColumn:
    """One column that is asked about: `named` says what the user knows of it."""

    column: Column
    named: bool

    @property
    def categories(self) -> bool:
        return self.named and self.column.kind == "categorical"

    @property
    def ones(self) -> int:
        """Of a column whose kind is known only the value is counted, or the cell is missing."""
        return 1 if self.named else 2

    @property
    def is_open(self) -> bool:
        """Whether texts of it could be shown."""
        return not self.named or self.categories


def learn_facts(
    table: Table,
    declared: Schema,
    budget: Budget,
    *,
    task: Task = "classification",
    ledger: Ledger | str | os.PathLike[str] | None = None,
    name: str = "",
    seed: int | None = None,
) -> LearntFacts:
    """Charge the budget, then read the records once.

    table     all columns by name, the target among them, texts as they are written
    declared  what is known: the target, `ignore`, columns with or without their facts
    seed      for tests only: noise that can be reproduced protects nothing, and the charge says so
    """
    if declared.target is None or declared.target not in table.columns:
        raise DataError(f"target={declared.target!r}: no such column; name the one to predict")
    questions = _questions(table, declared, task)
    ones = 1 + sum(one.ones for one in questions)
    mechanism = OpenHistogram.within(
        budget.epsilon, budget.delta, ones, sum(one.is_open for one in questions), budget.adjacency
    )
    events: tuple[Event, ...] = mechanism.events()
    if seed is not None:
        events = tuple(NonPrivateEvent(SEEDED) for _ in events)
    with nullcontext(ledger) if isinstance(ledger, Ledger) else Ledger(ledger) as book:
        known_as = _name(book, table, name) if seed is None else name
        book.charge_all(events, PURPOSE, known_as)  # before a record is counted
        entry = book.head.hash if book.outlives_the_process else ""
        count, answers = _asked(table, questions, mechanism, NoiseStream(seed))
        records = max(2, int(np.ceil(mechanism.std)), round(count))
        schema, notes = _Reading(mechanism, records, declared, task).facts(questions, answers)
        schema = replace(schema, learnt=Payment(budget.epsilon, budget.delta, budget.adjacency, entry))
        if seed is None:
            _register_encoded(book, table, schema, known_as)
    return LearntFacts(schema, notes, Privacy(events, budget.delta, budget.adjacency, seed is not None))


def _questions(table: Table, declared: Schema, task: Task) -> list[_AskedColumn]:
    """The columns whose facts are open, and numbers with bounds, which are looked at for their width."""
    known = {column.raw: column for column in declared.columns}
    questions = []
    for name in table.names:
        if name in declared.ignore:
            continue
        if name == declared.target:
            open_target = declared.classes is None and declared.target_bounds is None
            kind: Any = "categorical" if task == "classification" else "numeric"
            questions += [_AskedColumn(Column(name, kind), named=True)] if open_target else []
        elif name not in known:
            questions.append(_AskedColumn(Column(name), named=False))
        elif not (known[name].categories or known[name].date):
            questions.append(_AskedColumn(known[name], named=True))
    return questions


def _asked(
    table: Table, questions: Sequence[_AskedColumn], mechanism: OpenHistogram, noise: NoiseStream
) -> tuple[float, list[NoisyCells]]:
    """The noisy number of records, and the noisy cells of every question: one release."""
    cells = [_counted(table.columns[one.column.raw], one) for one in questions]
    listed = np.concatenate([[float(table.rows)], *(one.listed for one in cells)])
    texts = {(place, text): count for place, one in enumerate(cells) for text, count in one.texts.items()}
    noisy, shown = mechanism.release(listed, texts, noise)
    parts = noisy[1:].reshape(len(questions), LISTED) if questions else np.zeros((0, LISTED))
    found: list[dict[str, float]] = [{} for _ in questions]
    for (place, text), count in shown.items():
        found[place][text] = count
    return float(noisy[0]), [NoisyCells.of(part, own) for part, own in zip(parts, found, strict=True)]


def _counted(values: Array, question: _AskedColumn) -> Cells:
    """The counts of one column, in each of which a record is as often as its question says."""
    cells = Cells.of(values, question.categories)
    if question.named:
        cells.kinds.clear()
    if not question.is_open:
        cells.texts.clear()
    return cells


@dataclass(frozen=True)
class _Reading:
    """From noisy counts to facts. Functions of the release and of what is declared alone."""

    mechanism: OpenHistogram
    records: int
    declared: Schema
    task: Task

    def facts(self, questions: Sequence[_AskedColumn], answers: Sequence[NoisyCells]) -> tuple[Schema, tuple[str, ...]]:
        declared, notes = self.declared, []
        facts: dict[str, Any] = {}
        sources: dict[str, Source] = dict(declared.sources)
        if declared.records is None:
            facts["records"], sources["records"] = self.records, LEARNT
        left_out, found = list(declared.ignore), {column.name: column for column in declared.columns}
        for question, answer in zip(questions, answers, strict=True):
            column = question.column
            where = f"column {quoted(column.name)}"
            if column.name == declared.target:
                fact, value = self._target(answer)
                if value is None:
                    notes.append(f"target {quoted(column.name)}: nothing stands out of the noise; declare {fact}")
                else:
                    facts[fact], sources[fact] = value, LEARNT
                continue
            if column.bounds is not None:
                notes += self._width(column, answer)
                continue
            columns, note = self._columns(question, answer)
            if note:
                notes.append(f"{where}: {note}")
            found.pop(column.name, None)  # also where it was named: without facts no record could be encoded
            found |= {one.name: one for one in columns}
            if not any(one.raw == column.raw for one in found.values()):
                left_out.append(column.raw)
        facts |= {"columns": tuple(found.values()), "ignore": tuple(left_out), "sources": sources}
        return replace(declared, **facts), tuple(notes)

    def _target(self, answer: NoisyCells) -> tuple[str, Any]:
        if self.task == "regression":
            return "target_bounds", self._bounds(answer)
        classes = _labels(answer.texts)
        return "classes", classes if len(classes) > 1 else None

    def _columns(self, question: _AskedColumn, answer: NoisyCells) -> tuple[list[Column], str]:
        """The facts of one column, or none and why."""
        name = question.column.name
        missing = "category" if answer.missing > self._out_of_noise(1) else "middle"
        rest: dict[str, Any] = {"missing": missing, "source": LEARNT}
        kind: CellKind = "number" if question.named else max(answer.kinds, key=lambda one: answer.kinds[one])
        if question.categories:
            kind = "text"
        elif not question.named and answer.kinds[kind] < self._out_of_noise(3):
            return [], "nothing of it stands out of the noise, so it is left out; declare it, or pay more"
        if kind == "number":
            bounds = self._bounds(answer)
            return (
                ([], "no numbers stand out of the noise, so it is left out; declare bounds")
                if bounds is None
                else (
                    [Column(name, bounds=bounds, **rest)],
                    "",
                )
            )
        if kind == "date":
            return self._dates(name, answer, rest)
        return self._texts(name, answer, rest, self.records - max(answer.missing, 0.0))

    def _texts(
        self, name: str, answer: NoisyCells, rest: dict[str, Any], all_of_them: float
    ) -> tuple[list[Column], str]:
        labels = _labels(answer.texts)
        if not labels:
            if sounds_like_date(name):
                return [], 'sounds like a date, so it is left out; to keep it, declare date = "%d/%m/%Y" and bounds'
            return [], (
                "no text of it is common, as in identifiers or dates, so it is left out; to keep it declare "
                'buckets = 64, or date = "ISO" with bounds'
            )
        if sum(answer.texts.values()) >= LISTED_SHARE * all_of_them:
            return [Column(name, categories=labels, **rest)], ""
        buckets = 1 << (4 * len(labels) - 1).bit_length()
        buckets = min(max(buckets, FEWEST_BUCKETS), MOST_BUCKETS)
        return [
            Column(name, buckets=buckets, **rest)
        ], f"has many texts: a public hash puts them into {buckets} buckets"

    def _dates(self, name: str, answer: NoisyCells, rest: dict[str, Any]) -> tuple[list[Column], str]:
        years = np.flatnonzero(answer.years > self._out_of_noise(YEARS))
        if not years.size:
            return [], "dates of no year stand out of the noise, so it is left out; declare date and bounds"
        bounds = days_of_years(int(years[0]), int(years[-1]))
        columns = [
            Column(f"{name} {part}", of=name, date=ISO, part=part, bounds=bounds if part == "time" else None, **rest)
            for part in USUAL_PARTS
        ]
        return columns, ""

    def _bounds(self, answer: NoisyCells) -> Bounds | None:
        """From the lowest to the highest bin that stands out; one value alone lies in the middle of its bounds."""
        bins = np.flatnonzero(answer.grid > self._out_of_noise(GRID))
        if not bins.size:
            return None
        low, high = edges_of(int(bins[0]))[0], edges_of(int(bins[-1]))[1]
        return (low, high) if low < high else (low - 1.0, high + 1.0)

    def _width(self, column: Column, answer: NoisyCells) -> list[str]:
        seen, bounds = self._bounds(answer), column.bounds
        assert bounds is not None
        if seen is None or bounds[1] / 2 - bounds[0] / 2 < TOO_WIDE * (seen[1] / 2 - seen[0] / 2):
            return []
        times = (bounds[1] / 2 - bounds[0] / 2) / (seen[1] / 2 - seen[0] / 2)
        return [
            f"column {quoted(column.name)}: its declared bounds, {bounds[0]:g} to {bounds[1]:g}, are {times:.3g} times "
            f"as wide as where its numbers stand out, {seen[0]:g} to {seen[1]:g}; narrower ones are learnt from better"
        ]

    def _out_of_noise(self, bins: int) -> float:
        """A count that noise alone reaches in none of so many empty bins, but for a chance of DOUBT."""
        return self.mechanism.std * NormalDist().inv_cdf(1 - DOUBT / bins)


def _labels(texts: dict[str, float]) -> tuple[str, ...]:
    return tuple(sorted(texts))


def _name(ledger: Ledger, table: Table, name: str) -> str:
    """The name that the raw records are known by in a ledger that outlives the process, or the one given, from now on.

    Cells are looked at for it, and nothing of them leaves but what only the curator's key opens.
    """
    if not ledger.outlives_the_process:
        return name
    key = key_for(ledger)
    assert key is not None  # a new one is made
    return register_sketch(ledger, Sketch.as_read(table, key), key, name)


def _register_encoded(ledger: Ledger, table: Table, schema: Schema, name: str) -> None:
    """Make the records known as they will be encoded by these facts: a fit with them is charged to the same budget."""
    if not ledger.outlives_the_process or (schema.classes is None and schema.target_bounds is None):
        return
    assert schema.target is not None
    columns = dict(table.columns)
    labels = columns.pop(schema.target)
    if not schema.columns:
        return
    x, y = Encoder(schema).training(Table(columns, target=schema.target, labels=labels))
    key = key_for(ledger)
    assert key is not None
    registered_name(ledger, x, y, key=key, name=name, read=table)
