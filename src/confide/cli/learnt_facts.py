"""`confide facts --epsilon`: facts learnt from the records, paid for before they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from confide.cli.output import emit_json, one_line, output
from confide.cli.paths import check_ledger
from confide.data import Schema, load_table
from confide.data.draft import facts_text, sounds_like_identifier
from confide.data.schema import Column, Task
from confide.data.table import Table
from confide.errors import CommandError
from confide.privacy.events import Adjacency
from confide.wording import delta, up
from confide.workflow.private_facts import Budget, LearntFacts, learn_facts


@dataclass(frozen=True)
class Wanted:
    """What was typed about the columns."""

    train: Path
    target: str
    task: Task
    records: int | None
    known: Path | None
    given: dict[str, list[str]]

    def check(self, names: list[str]) -> None:
        if self.known is not None and not self.known.is_file():
            raise CommandError(f"--facts={self.known}: no such file")

    def declared(self, names: list[str]) -> Schema:
        """What is known before a record is read; columns whose names speak of identifiers are left out."""
        facts = Schema() if self.known is None else Schema.from_toml(self.known)
        if facts.target not in (None, self.target):
            raise CommandError(f"--target={self.target}: the file of facts says {facts.target}; give one")
        listed = {column.raw for column in facts.columns}
        named = {
            **dict.fromkeys(self.given["numeric"], "numeric"),
            **dict.fromkeys(self.given["categorical"], "categorical"),
        }
        added = tuple(Column(name, kind) for name, kind in named.items() if name not in listed)  # type: ignore[arg-type]
        settled = listed | set(named) | {self.target}
        doubtful = [name for name in names if name not in settled and sounds_like_identifier(name)]
        ignored = dict.fromkeys((*facts.ignore, *self.given["ignore"], *doubtful))
        records = facts.records if self.records is None else self.records
        return replace(
            facts, target=self.target, columns=(*facts.columns, *added), ignore=tuple(ignored), records=records
        )


def learn(
    wanted: Wanted,
    names: list[str],
    price: tuple[float, float, Adjacency],
    ledger: Path | None,
    name: str,
    out: Path,
    as_json: bool,
) -> None:
    """Charge, learn, and write what was found and what it cost."""
    check_ledger(ledger)
    declared = wanted.declared(names)
    table = _as_written(wanted.train, names)
    found = learn_facts(table, declared, Budget(*price), task=wanted.task, ledger=ledger, name=name)
    out.write_text(_text_of(found), encoding="utf-8")
    if as_json:
        emit_json(_summary(found, out))
    else:
        _show(found, out, ledger)


def _as_written(train: Path, names: list[str]) -> Table:
    """All columns as texts: what a cell is must not depend on the cells beside it."""
    return load_table(train, None, schema=Schema(columns=[Column(name, "categorical") for name in names]))


def _text_of(found: LearntFacts) -> str:
    notes = [f"# {one_line(note)}" for note in found.notes]
    learnt = "# Learnt privately from the records; change what you know better, and leave its source out then."
    return "\n".join([learnt, *notes]) + "\n" + facts_text(found.schema)


def _summary(found: LearntFacts, out: Path) -> dict[str, Any]:
    schema = found.schema
    return {
        "out": str(out),
        "columns": len(schema.columns),
        "assumed_public": False,
        "records": schema.records,
        "left_out": list(schema.ignore),
        "notes": list(found.notes),
        **found.privacy.to_dict(),
    }


def _show(found: LearntFacts, out: Path, ledger: Path | None) -> None:
    console = output()
    console.print(f"Written: {escape(one_line(str(out)))}", soft_wrap=True)
    for note in found.notes:
        console.print(escape(one_line(note)), soft_wrap=True)
    console.print(
        f"Learnt from the records for epsilon {up(found.privacy.epsilon())} at delta {delta(found.privacy.delta)}, "
        f"{'charged before they were read' if ledger is not None else 'and no --ledger adds it up with other runs'}."
    )
