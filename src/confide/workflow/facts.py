"""Which facts about the records are public, and whose word each of them is; then the records, encoded by them.

A fact is declared, or read off the data because the user said that it is public, or learnt privately and paid for
(the number of records, in `count`, and the classes of pictures, in `classes`). Nothing is read in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from confide import rules
from confide.data.pictures import is_picture
from confide.data.preprocessing import NOTHING, Encoder, Layout, curator_notes
from confide.data.roles import arranged, check_class_weight, weights_of
from confide.data.schema import LEARNT, Schema, Task
from confide.data.table import Array, Table
from confide.data.trees import numbers_of, tree_of
from confide.errors import CuratorNote, DataError, MisplacedMethod, NothingToLearn
from confide.methods.base import Method
from confide.workflow.named_likelihood import in_own_units, means_what_it_says
from confide.workflow.request import LABELS, Request


@dataclass(frozen=True, repr=False, eq=False)
class Settled:
    """The public facts in full, and the records as a network sees them. Holds private records: trusted side only."""

    encoder: Encoder
    x: Any
    y: Array
    weights: Array | None = None

    @property
    def schema(self) -> Schema:
        return self.encoder.schema

    @property
    def features(self) -> int:
        """How many numbers one encoded record has."""
        return numbers_of(tree_of(self.x))

    @property
    def task(self) -> Task:
        return "regression" if self.schema.classes is None else "classification"

    def with_records(self, records: int) -> Settled:
        """The same with the number of records that was learnt privately."""
        return self._knowing("records", records)

    def with_classes(self, classes: Sequence[int]) -> Settled:
        """The same with the classes that were learnt privately, neighbours among all labels that there may be.

        Labels were encoded as their places among all; those outside count for nothing, as any that is not declared.
        """
        places = np.where((self.y >= classes[0]) & (self.y <= classes[-1]), self.y - classes[0], -1)
        return replace(self._knowing("classes", tuple(classes)), y=places)

    def _knowing(self, fact: str, value: Any) -> Settled:
        facts: dict[str, Any] = {fact: value, "sources": {**dict(self.schema.sources), fact: LEARNT}}
        return replace(self, encoder=replace(self.encoder, schema=replace(self.schema, **facts)))


def settle(request: Request) -> Settled:
    """Fix the public facts and encode the records by them; what the curator should know of the records is a note."""
    request = replace(request, facts=with_pixel_range(request.facts, request.data))
    schema = request.facts
    table = arranged(request.data, schema)
    if request.assume_public:
        schema = Schema.assume_public(table, declared=schema, task=request.task)
    elif request.learns_classes:
        schema = replace(schema, classes=tuple(range(LABELS)))  # until they are counted, see `workflow.classes`
        _refuse_what_leaks(replace(request, facts=schema))
    else:
        _refuse_what_leaks(request)
    _check_inputs(request)
    schema = schema.for_table(table)
    _check_sizes(request, schema)
    plain = in_own_units(request.likelihood) or means_what_it_says(schema)
    encoder = Encoder(schema, _layout(request, schema), "plain" if plain else "unit")
    x, y = encoder.training(table)
    for note in curator_notes(table, schema, x, y):
        warnings.warn(note, NothingToLearn if note.startswith(NOTHING) else CuratorNote, stacklevel=2)
    check_class_weight(request.class_weight, schema.classes)
    return Settled(encoder, x, y, weights_of(table, schema, request.class_weight))


def _layout(request: Request, schema: Schema) -> Layout:
    """A network of one's own sees pictures as pictures, confide's own see their features."""
    block = request.data.block
    if request.module is not None:
        return "image" if block is not None and block.ndim > 2 else "flat"
    return "features" if block is not None and is_picture(schema.shape) else "flat"


def pictures_rule(request: Request, settled: Settled) -> str | Method:
    """For "auto" the method of pictures, unless something was said that it does not know."""
    said = request.prior is not None or request.likelihood is not None or request.chains > 1
    of_pictures = settled.encoder.layout == "features" and settled.task == "classification"
    return rules.PICTURES if request.method == "auto" and of_pictures and not said else request.method


FEW = 64
"""Columns of a table below which nobody would take them for features of one length, such as embeddings."""


def tell_of_features(request: Request, settled: Settled) -> None:
    """Warn of the method of pictures on a table of few columns: it is paid for before anybody sees what came of it."""
    named = request.method == rules.PICTURES and request.module is None
    if named and settled.encoder.layout == "flat" and settled.features < FEW:
        warnings.warn(
            f"method={request.method!r}: is made for features of one length, as those of pictures; with "
            f"{settled.features} columns its steps are too short and probabilities come out wrong; use 'auto'",
            MisplacedMethod,
            stacklevel=2,
        )


def with_pixel_range(facts: Schema, table: Table) -> Schema:
    """Pictures of whole numbers of one byte range from 0 to 255, whatever pixels occur: their file says so."""
    block = table.block
    if facts.bounds is not None or block is None or block.dtype != np.uint8:
        return facts
    return replace(facts, bounds=(0, 255)) if is_picture(facts.shape or block.shape[1:]) else facts


def _refuse_what_leaks(request: Request) -> None:
    facts = request.facts
    way = "or set assume_public=True if what the data shows of it is public"
    if facts.classes is None and request.task == "classification":
        raise DataError(
            f"classes=None: the labels that occur in private records are private; list them in classes=, {way}"
        )
    if facts.target_bounds is None and not facts.targets and request.task == "regression":
        raise DataError(
            f"target_bounds=None: the range of a private target is private; give target_bounds=(low, high), {way}"
        )
    if facts.classes is None and facts.target_bounds is None and not facts.targets:
        raise DataError("target: neither classes nor target_bounds declared; give one of them, or assume them public")
    if facts.bounds is None and not (facts.columns or facts.inputs):
        raise DataError(
            f"bounds=None: the range of private features is private; give bounds=(low, high) or one pair per feature, "
            f"{way}; a StandardScaler before this estimator would read it in silence, so it is no way out"
        )


def _check_inputs(request: Request) -> None:
    if bool(request.data.inputs) != bool(request.facts.inputs):
        raise DataError(
            "inputs: records of several tensors, or of ids, need schema=Schema(inputs=...) with a vocabulary or bounds "
            "for them, and only they do"
        )
    if request.data.inputs and (request.module is None or request.assume_public):
        raise DataError("inputs: need a network of one's own, module=, and declared facts, without assume_public")


def _check_sizes(request: Request, schema: Schema) -> None:
    rows, size = request.data.rows, schema.records
    # Without a public size there is nothing to hold delta against: the true one is private.
    if size is not None and request.delta >= 1 / size:
        raise DataError(
            f"delta={request.delta:g}: must be below 1 / records = {1 / size:.3g}, or a record could be published "
            f"outright; {rules.usual_delta(size):g} is a usual choice"
        )
    if request.sampling in ("fixed-size", "shuffle") and schema.records != rows:
        raise DataError(
            f"sampling={request.sampling!r}: makes the number of records public, so it must be declared exactly; "
            "poisson keeps it private"
        )


def assumed_facts(schema: Schema) -> list[str]:
    """The facts that were read off the data because the user said that they are public."""
    return [fact.fact for fact in schema.public_facts() if fact.source == "assumed public"]


def assumptions_of(schema: Schema) -> tuple[str, ...]:
    """What the user vouches for, and what was paid before, as clauses of the privacy statement."""
    facts = assumed_facts(schema)
    paid = () if schema.learnt is None else (schema.learnt.words(),)
    if not facts:
        return paid
    read = f"the facts read off the data ({', '.join(facts[:8])}{', ...' if len(facts) > 8 else ''}) are public"
    return (read, *paid)
