"""Schema: the public facts about private records, and whose word each of them is.

A private learner may use the number of records, the classes, the bounds of a column or its categories only if
they are public. They are *declared* by the user, *assumed public* (read off the data because the user said
so, which the report repeats) or *learnt privately* (paid for under the budget). Nothing is read off the data
in silence.

Researchers with plain tensors need one line, `Schema(classes=10, records=60_000)`; tables have columns:

    records = 32561                      # nominal size
    target = "income"
    classes = ["<=50K", ">50K"]          # or a number; for regression: target_bounds = [low, high]
    bounds = [0, 1]                      # for numeric columns without bounds of their own
    missing = "middle"                   # for columns without a policy of their own
    ignore = ["id"]                      # columns of the file that are left out
    [columns.age]
    bounds = [17, 90]
    [columns.workclass]
    categories = ["Private", "State-gov"]
    missing = "category"
    source = "assumed public"            # whose word it is, where it is not declared; of the other facts in [sources]
    [columns.visit]
    date = "ISO"                         # or a format such as "%d/%m/%Y"; it becomes `parts`, see `views`
    bounds = [2015-01-01, 2024-12-31]
    [columns.city]
    buckets = 64                         # too many to list: a public hash puts each into one of these
    [learnt]                             # what facts that were "learnt privately" have cost; `confide facts` writes it
    epsilon = 0.1
    delta = 1e-6
    [inputs.input_ids]                   # for records that are several tensors, or ids
    vocabulary = 50257
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from confide.data.columns import (
    POLICIES,
    Bounds,
    Column,
    Input,
    Missing,
    Source,
    bounds_pair,
    check_choice,
    column_of,
    columns_of,
    facts_of_column,
    known_keys,
    plain,
)
from confide.data.fact_values import (
    class_labels,
    fact_sources,
    facts_of_input,
    is_pair,
    named_inputs,
    names_given,
    record_shape,
    shared_bounds,
    whole,
)
from confide.data.labels import Label
from confide.data.payment import Payment
from confide.data.roles import Targets, check_roles, named_targets
from confide.data.table import attempt, listed, placed, quoted, shown
from confide.errors import DataError

if TYPE_CHECKING:
    from confide.data.table import Table

Task: TypeAlias = Literal["classification", "regression"]
LEARNT: Source = "learnt privately"

__all__ = ["Column", "DataError", "Fact", "Input", "Schema", "Task"]


class Fact(NamedTuple):
    """One row of the report: a public fact, its value, and whose word it is."""

    fact: str
    value: str
    source: Source


@dataclass(frozen=True, init=False)
class Schema:
    """The public facts about a set of private records. Immutable; hashable; plain JSON by `to_dict`.

    records         nominal number of records; need not be exact, must be public
    classes         number of classes or their labels; None for regression
    target          name of the target column; several of them, marks of times and weights of records: see `roles`
    target_bounds   (low, high) of a regression target
    columns         the features by name; empty for plain arrays
    bounds          one pair for all numeric features without their own, or one pair per feature of an array
    shape           shape of one record of a plain array: (64,) or (28, 28)
    missing         policy for features without their own
    ignore          columns of the file that are left out
    inputs          vocabulary or bounds of the tensors of a record: {"input_ids": Input(vocabulary=50257)}; those of a
                    tuple are in order, and a record that is one tensor of ids has one of them
    sources         whose word a fact is, {"records": "assumed public"}; "declared" unless said otherwise
    learnt          what facts that were learnt privately have cost; the statement of every run with them repeats it
    targets         several targets: labels that hold or do not, or numbers with bounds
    observed        the column that says whether a time until an event, the target, is that of the event
    weight          the column that says what a record counts for, from 0 to `largest_weight`
    """

    records: int | None
    classes: tuple[Label, ...] | None
    target: str | None
    target_bounds: Bounds | None
    columns: tuple[Column, ...]
    bounds: Bounds | tuple[Bounds, ...] | None
    shape: tuple[int, ...] | None
    missing: Missing
    ignore: tuple[str, ...]
    inputs: tuple[tuple[str, Input], ...]
    sources: tuple[tuple[str, Source], ...]
    learnt: Payment | None
    targets: Targets
    observed: str | None
    weight: str | None
    largest_weight: float

    def __init__(
        self,
        records: int | None = None,
        classes: int | Iterable[Label] | None = None,
        target: str | None = None,
        target_bounds: Iterable[float] | None = None,
        columns: Iterable[Column] = (),
        bounds: Iterable[Any] | None = None,
        shape: int | Iterable[int] | None = None,
        missing: Missing = "refuse",
        ignore: Iterable[str] = (),
        inputs: Mapping[str, Any] | Iterable[Any] | Input = (),
        sources: Mapping[str, Source] | Iterable[tuple[str, Source]] = (),
        learnt: Payment | Mapping[str, Any] | None = None,
        targets: Mapping[str, Any] | Iterable[Any] = (),
        observed: str | None = None,
        weight: str | None = None,
        largest_weight: float = 1.0,
    ) -> None:
        values: dict[str, Any] = {
            "records": None if records is None else whole("records", records, least=2),
            "classes": class_labels(classes),
            "target": target,
            "target_bounds": None if target_bounds is None else bounds_pair(target_bounds, "target_bounds"),
            "columns": tuple(columns),
            "bounds": None if bounds is None else shared_bounds(bounds),
            "shape": None if shape is None else record_shape(shape),
            "missing": missing,
            "ignore": names_given("ignore", ignore),
            "inputs": named_inputs(inputs),
            "sources": fact_sources(sources),
            "learnt": None if learnt is None else Payment.of(learnt),
            "targets": named_targets(targets),
            "observed": observed,
            "weight": weight,
            "largest_weight": largest_weight,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        check_choice("missing", self.missing, POLICIES)
        if self.target is not None and (not isinstance(self.target, str) or not self.target):
            raise DataError(f"target={shown(self.target)}: must be the name of a column")
        if self.classes is not None and self.target_bounds is not None:
            raise DataError("classes and target_bounds: classification has classes, regression has bounds; give one")
        names = [column.name for column in self.columns]
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise DataError(f"columns: {listed(repeated)} declared twice; declare each column once")
        ignored = set(self.ignore)
        for name in (column.raw for column in self.columns):
            if name == self.target or name in ignored:
                other = "the target" if name == self.target else "ignored"
                raise DataError(f"column {quoted(name)}: declared as a feature but also {other}; choose one")
        check_roles(self)
        if self.inputs and (names or self.bounds is not None):
            raise DataError("inputs: are for records of tensors, columns and bounds for tables and arrays; give one")
        if names and self.shape is not None:
            raise DataError("columns and shape: named columns are for tables, shape is for plain arrays; give one")
        count = len(self.columns) or (self.shape and math.prod(self.shape))
        if self.bounds and not is_pair(self.bounds) and count and len(self.bounds) != count:
            raise DataError(f"bounds: {len(self.bounds)} pairs for {count} features; give one pair, or one for each")

    @property
    def task(self) -> Task:
        return "regression" if self.classes is None else "classification"

    @property
    def class_count(self) -> int | None:
        return None if self.classes is None else len(self.classes)

    @property
    def features(self) -> int | None:
        """How many inputs a flat model gets; None while neither columns nor shape are known."""
        if self.columns:
            return sum(column.width for column in self.columns)
        if self.shape is not None:
            return math.prod(self.shape)
        return len(self.bounds) if self.bounds and not is_pair(self.bounds) else None

    def source_of(self, fact: str) -> Source:
        return dict(self.sources).get(fact, "declared")

    def bounds_of(self, position: int, column: Column | None = None) -> Bounds | None:
        """The bounds of the feature at this position: its own, or the shared ones."""
        if column is not None and column.bounds is not None:
            return column.bounds
        if self.bounds is None or is_pair(self.bounds):
            return cast("Bounds | None", self.bounds)
        return cast("tuple[Bounds, ...]", self.bounds)[position]

    def for_table(self, table: Table) -> Schema:
        """This schema with the structure of a table filled in: column names, or the shape of a record.

        Structure is the same whoever is in the data. A column that is neither declared nor ignored takes the
        shared bounds; without them it is refused rather than dropped in silence.
        """
        if table.inputs:
            return self
        if table.block is not None:
            return self._for_block(tuple(table.block.shape[1:]))
        if self.shape is not None:
            raise DataError("shape: given for plain arrays, but the data has named columns; leave it out")
        known = {column.raw for column in self.columns}
        absent = [name for name in known if name not in table.columns]
        if absent:
            raise DataError(
                f"columns: {listed(sorted(absent))} not among the {len(table.columns)} of the data; check its header"
            )
        settled = known | {self.target} | set(self.ignore)
        places = {name: place for place, name in enumerate(table.names) if name not in settled}
        extra = list(places)
        # Pairs listed one by one belong to features in order, which does not mix with columns by name.
        shared = self.bounds is not None and (is_pair(self.bounds) or not self.columns)
        if extra and not shared:
            raise DataError(
                f"columns: {placed(places.values())} of the data's features not declared; give bounds or categories, "
                "or list under ignore"
            )
        added = tuple(Column(name, missing=self.missing) for name in extra)
        return replace(self, target=self.target or table.target, columns=self.columns + added)

    def _for_block(self, shape: tuple[int, ...]) -> Schema:
        if self.columns:
            raise DataError("columns: declared by name, but the data is a plain array without names; use bounds")
        if self.shape is not None and self.shape != shape and math.prod(self.shape) != math.prod(shape):
            raise DataError(f"shape={self.shape}: the records of the data have shape {shape}")
        return self if self.shape is not None else replace(self, shape=shape)

    @classmethod
    def assume_public(
        cls,
        table: Table,
        target: str | None = None,
        *,
        declared: Schema | None = None,
        task: Task | None = None,
    ) -> Schema:
        """Read the facts that `declared` leaves open off the data, and mark each of them "assumed public".

        The guarantee covers everything except these facts, and the report says so.
        """
        from confide.data.assumed import read_facts

        return read_facts(table, target, declared or cls(), task)

    def public_facts(self) -> list[Fact]:
        """Every public fact with its value and source, as rows for the report."""
        rows = [Fact("records", str(self.records), self.source_of("records"))] if self.records else []
        if self.target is not None:
            rows.append(Fact("target", self.target, "declared"))
        if self.classes is not None:
            rows.append(Fact("classes", _shortened(self.classes), self.source_of("classes")))
        for name, pair in self.targets:
            rows.append(Fact(f"target {name}", "0 or 1" if pair is None else _range(pair), "declared"))
        if self.weight is not None:
            rows.append(Fact("weight", f"{self.weight}, up to {self.largest_weight:g}", "declared"))
        if self.target_bounds is not None:
            rows.append(Fact("target_bounds", _range(self.target_bounds), self.source_of("target_bounds")))
        if self.shape is not None:
            rows.append(Fact("shape", " x ".join(map(str, self.shape)), self.source_of("shape")))
        if self.bounds is not None:
            pairs = cast("Any", (self.bounds,) if is_pair(self.bounds) else self.bounds)
            text = "; ".join(_range(pair) for pair in pairs[:8]) + ("; ..." if len(pairs) > 8 else "")
            rows.append(Fact("bounds", text, self.source_of("bounds")))
        for name, one in self.inputs:
            value = _range(one.bounds) if one.bounds else f"ids below {one.sizes}"
            rows.append(Fact(f"input {name}", value, "declared"))
        for column in self.columns:
            if column.bounds is not None or column.categories:
                value = _range(column.bounds) if column.bounds else _shortened(column.categories)
                value = f"{column.buckets} buckets of a public hash" if column.buckets else value
                rows.append(Fact(f"column {column.name}", value, column.source))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        result: dict[str, Any] = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        result["columns"] = [facts_of_column(column) for column in self.columns]
        result["sources"] = dict(self.sources)
        result["inputs"] = {name: facts_of_input(one) for name, one in self.inputs}
        result["learnt"] = None if self.learnt is None else self.learnt.to_dict()
        if not self.weight and self.largest_weight == 1:
            del result["largest_weight"]
        for name in ("inputs", "learnt", "targets", "observed", "weight"):
            if not result[name]:
                del result[name]
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """The inverse of `to_dict`. Unknown keys are refused."""
        rest = known_keys(values, [field.name for field in fields(cls)], "schema")
        entries = rest.pop("columns", [])
        if not isinstance(entries, list | tuple):
            raise DataError(f"columns={shown(entries)}: must be a list of columns")
        known = [field.name for field in fields(Column)]
        columns = [column_of(known_keys(entry, known, "columns"), "columns") for entry in entries]
        return attempt(lambda: cls(columns=columns, **rest), "schema: a value has the wrong type", TypeError)

    @classmethod
    def from_toml(cls, path: str | Path) -> Schema:
        """Read the facts written down for `--facts FILE.toml`; the format stands at the top of this file."""
        import tomllib

        where = f"facts={quoted(path)}"
        if not Path(path).exists():
            raise DataError(f"{where}: no such file; `confide facts TRAIN --target NAME --out FILE.toml` drafts one")
        text = attempt(
            lambda: Path(path).read_text(encoding="utf-8"),
            f"{where}: cannot be read as a text file",
            OSError,
            ValueError,
        )
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            # The file holds public facts only, so the parser's message with its line number may be shown.
            raise DataError(f"{where}: not valid TOML: {error}") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists without end
            raise DataError(f"{where}: not valid TOML: a number is too long, or lists are nested too deep") from None
        known = [field.name for field in fields(cls)]
        rest = known_keys(values, known, where)
        entries = rest.pop("columns", {})
        if not isinstance(entries, dict):
            raise DataError(f"{where}: columns must be tables such as [columns.age]")
        columns = []
        for name, entry in entries.items():
            columns += columns_of(name, entry, rest.get("missing", "refuse"), f"{where}: [columns.{name}]")
        sources = rest.get("sources", {})
        claimed = {*(sources.values() if isinstance(sources, dict) else ()), *(one.source for one in columns)}
        if LEARNT in claimed and "learnt" not in rest:
            raise DataError(
                f"{where}: 'source' or 'sources' is {LEARNT!r}, and no [learnt] says what was paid for it; leave it out"
            )
        return attempt(lambda: cls(columns=columns, **rest), f"{where}: a value has the wrong type", TypeError)


def _range(pair: Bounds) -> str:
    return f"{pair[0]:g} to {pair[1]:g}"


def _shortened(labels: tuple[Label, ...], limit: int = 12) -> str:
    more = f", ... ({len(labels)} in all)" if len(labels) > limit else ""
    return ", ".join(str(label) for label in labels[:limit]) + more
